// corpus.h: text files as a stream of documents, in pieces small enough for memory and threads.
//
// Inputs are files and folders. Of a folder, searched with its subfolders in the order of the names, the files that end
// in .txt .text .md .markdown .rst .jsonl or .ndjson are taken; names that start with a dot are not. A named file is
// taken whatever it is called. A file that is given more than once, also by a link or by its folder, is taken once.
// .jsonl and .ndjson have one JSON object per line, each a document; of a text file the rules say what its documents
// are. Text is UTF-8; a byte order mark at the start of a file is dropped, other invalid bytes are kept as they are.
//
// Held out for validation, about val_fraction of the text:
//   * of every document of at least 64 KiB its end, from a line's start on;
//   * the same of smaller text files, when they are too few to spare one: fewer than k = 1 / val_fraction, and not
//   split;
//   * of every k documents the second, where it is shorter.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct InputFile;

struct TextFile {
    std::string path;
    int64_t size;
    bool jsonl;
    bool binary = false;        // a zero byte is among its first 8000, which git and diff take for the sign of one
    int64_t invalid_utf8 = -1;  // where, of a text file that is not binary; of the first MiB
};

struct FoundFiles {
    std::vector<TextFile> files;                                // each once, under the first name it is found by
    std::vector<std::pair<std::string, std::string>> repeated;  // a name, and the file it names again
    std::set<std::string> left_out;                             // of the folders; hidden files are not counted
};

// Refuses inputs that do not exist or cannot be read, folders without such a file (EXIT_NO_INPUT), and files that are
// compressed, UTF-16 or token shards (EXIT_BAD_DATA). The file merges.txt of output_directory is not text.
FoundFiles find_text_files(const std::vector<std::string>& inputs, const std::string& output_directory);

struct CorpusRules {
    // Documents of a text file. "none": the file. "blank-lines": each section up to and with a blank line, as llm.c
    // cuts tinyshakespeare. "end-of-text": what stands between two <|endoftext|>, without white space around it.
    std::string split = "none";
    std::string text_key = "text";
    double val_fraction = 0.0;  // 0 to 0.5
};

// A document, or what a chunk has of it.
struct Document {
    size_t begin, end;  // in the chunk's bytes
    int64_t line;       // in a JSONL file, from 1
    bool starts;        // false: it goes on from the chunk before
    bool val;
};

struct Chunk {
    const TextFile* file;
    std::string bytes;
    std::vector<Document> documents;
};

struct CorpusReader {
    CorpusReader(const std::vector<TextFile>& files, const CorpusRules& rules);
    CorpusReader(const CorpusReader&) = delete;
    ~CorpusReader();

    // Chunks of 2 MiB, and as much more as a line of JSON, a section or a run without white space needs. They do not
    // depend on the number of threads. Encoding their documents gives the tokens of the uncut text. False: the end.
    bool next(Chunk& chunk);

    const std::vector<TextFile>& files;
    const CorpusRules rules;
    bool few_files;          // text files give their ends
    int64_t bytes_read = 0;  // of all files
    int64_t documents = 0;   // begun, the ends that are held out not counted
    size_t file = 0;         // the present one
    std::unique_ptr<InputFile> input;
    int64_t begin = 0, end = 0;   // of it, still to be read; end: of the part for training first, then of the file
    int64_t lines = 0;            // of it, handed out
    bool many_documents = false;  // in it
    bool part_begun = false, part_val = false;  // of a file that is one document
    std::string rest;                           // read, but not handed out
};

// Calls f(text, starts, val) for the documents of a chunk, from the JSON of its lines, long ones in two parts. Refuses
// lines that are not what they should be: file:line, EXIT_BAD_DATA.
void for_each_document(const Chunk& chunk, const CorpusRules& rules,
                       const std::function<void(std::string_view text, bool starts, bool val)>& f);
