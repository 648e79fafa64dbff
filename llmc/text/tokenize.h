// tokenize.h: the command `tokenize`: from text to token shards and the tokenizer beside them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

struct TokenizeOptions {
    std::vector<std::string> inputs;  // files and folders, see corpus.h
    std::string output;               // folder; made if it is missing, refused if it has shards already, unless
    bool replace = false;             // they are to be deleted
    std::string tokenizer;            // directory or file, see load_tokenizer(); or
    int train_bpe = 0;                // the size of a vocabulary to be trained on all of the text
    double val_fraction = 0.05;       // of the text, up to 0.5, held out by the rule in corpus.h; 0: nothing
    int64_t val_tokens = 0;           // instead: the first so many tokens of all, as llm.c's scripts do; 0: off
    int64_t shard_tokens = 100'000'000;
    std::string split = "none";     // documents of a text file: none, blank-lines, end-of-text (corpus.h)
    std::string text_key = "text";  // of the text in the objects of JSONL files
    int threads = 0;                // 0: one per core
    bool quiet = false;             // no progress and no summary
};

// Writes OUTPUT/train_000001.bin ..., val_000000.bin ... (shard.h; each document is <|endoftext|> and its tokens) and
// the files of save_tokenizer(). The bytes of all files depend on the inputs and options only, not on the threads.
// Progress goes to stderr: one line that changes on a terminal, else a line every ten seconds; the summary to stdout.
// Returns 0. Throws Error for options that cannot be, missing or broken input, output that cannot be written or that
// another run writes to (output_lock.h); the shards of this call are removed then. The shards get their names last: a
// call that is killed leaves OUTPUT/*.bin.tmp, which the next one removes.
int tokenize(const TokenizeOptions& options);
