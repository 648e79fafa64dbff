// tokenize.h: the command `tokenize`: converts text to token shards and writes the tokenizer beside them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

struct TokenizeOptions {
    std::vector<std::string> inputs;  // files and folders, see text_reader.h
    std::string output;               // folder, created if missing; refused if it has shards and replace is false
    bool replace = false;             // delete the shards that output already has, when the new ones are complete
    std::string tokenizer;            // directory or file, see load_tokenizer()
    bool special_tokens = false;      // read "<|endoftext|>", and the text of other added tokens, as tokens
    int train_bpe = 0;                // instead of tokenizer: size of a vocabulary to train on all of the text
    double val_fraction = 0.05;       // fraction of the text to hold out, up to 0.5 (text_reader.h); 0: none
    int64_t val_tokens = 0;  // instead of val_fraction: hold out the first tokens, as llm.c's scripts do; 0: off
    int64_t shard_tokens = 100'000'000;
    std::string split = "none";     // documents of a text file: none, blank-lines, end-of-text (text_reader.h)
    std::string text_key = "text";  // key of the text in JSONL objects
    bool skip_bad_lines = false;    // skip invalid lines of JSONL, up to 1 % of the documents
    int threads = 0;                // 0: as OpenMP has
    bool quiet = false;             // no progress and no summary
};

// Writes OUTPUT/train_000001.bin ..., val_000000.bin ... (shard.h; each document is <|endoftext|> and its tokens) and
// the files of save_tokenizer(). The bytes of all files depend only on the inputs and options, not on the threads.
// Progress goes to stderr, the summary to stdout.
// Returns 0. Throws Error for invalid options, missing or invalid input, and output that cannot be written or that
// another run writes to. Shards get their final names last: a call that fails before removes its shards, and one that
// is killed leaves OUTPUT/*.bin.tmp, which the next call removes.
int tokenize(const TokenizeOptions& options);
