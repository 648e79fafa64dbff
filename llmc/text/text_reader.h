// text_reader.h: reads text files (input.h) as a stream of documents, in chunks that are small enough for memory and
// threads.
//
// An object of JSON, a row of Parquet and a record of CSV are a document each; CorpusRules says how a text file is
// split into documents. Text is UTF-8. A byte order mark at the start of a file is dropped; other invalid bytes are
// kept.
//
// About val_fraction of all text is held out for validation:
//   * the end of every document of at least 64 KiB, from the start of a line on;
//   * the end of smaller text files too, when there are too few to hold out a whole one: fewer than
//     k = 1 / val_fraction, and not split;
//   * the second of every k documents, if it is shorter than 64 KiB.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/input.h"
#include "text/unicode.h"

// How a text file is split into documents. none: the file is one document. blank_lines: each section up to and
// including a blank line, as llm.c splits tinyshakespeare. lines: each line without its end, but no blank one.
// end_of_text: the text between two <|endoftext|>, without surrounding white space.
enum class SplitAt { none, blank_lines, lines, end_of_text };

struct CorpusRules {
    SplitAt split = SplitAt::none;
    std::string text_key = "text";
    bool skip_bad_lines = false;  // true: bad rows are left out; text files have none
    bool may_skip = false;        // whether the command has --skip-bad-lines
    double val_fraction = 0.0;    // 0 to 0.5
    // The last position at which a text may be cut into chunks; 0: there is none.
    std::function<size_t(std::string_view)> cut = [](std::string_view text) { return last_safe_cut(text); };
};

// Sets text_bytes, if it is unknown and the end of the text is held out: unpacks the file once more.
// progress(bytes of the file that were read) is called for each piece.
void measure_text(TextFile& file, const CorpusRules& rules, const std::function<void(int64_t)>& progress);

// A document, or the part of it that is in a chunk.
struct Document {
    size_t begin, end;  // range in the chunk's bytes
    int64_t line;       // where it begins, from 1; not of text files
    bool starts;        // false: the document continues from the previous chunk
    bool val;
};

struct Chunk {
    const TextFile* file;
    std::string bytes;
    std::vector<Document> documents = {};
    // Set by for_each_document:
    int64_t bad_rows = 0, bad_lines = 0;  // objects and records that it skipped, and their lines
    std::string first_bad = {};           // the error of the first skipped row
};

struct CorpusReader {
    // Reads the next chunk: about 64 KiB, or more where a JSON line, a section or a run without white space is longer.
    // Chunks do not depend on the number of threads. Encoding the documents of all chunks gives the tokens of the uncut
    // text. Returns false at the end.
    bool next(Chunk& chunk);
    int64_t file_bytes_read() const;  // bytes read of all files, packed as they are

    const std::vector<TextFile>& files;
    const CorpusRules rules;
    int64_t documents = 0;                      // documents begun; held-out ends do not count
    size_t file = 0;                            // index of the current file
    int64_t file_bytes = 0;                     // sum of the sizes of the files before it
    std::optional<TextStream> input = {};       // the current file; none: the next one is still to be opened
    std::string rest = {};                      // bytes that were read, but not yet returned
    int64_t lines = 0;                          // lines of the file returned so far
    char last = ' ';                            // JSON: [ , or { (an object) came last in an array; a space: outside
    int64_t train_left = 0;                     // bytes before the held-out end of the file; INT64_MAX: it has none
    bool part_begun = false, part_val = false;  // state of a file that is one document
};

// Calls f(text, starts, val) for each document of a chunk, decoded unless the file is text; a long document comes in
// two parts. The text of a row may be empty. Refuses invalid objects and records (EXIT_BAD_DATA, with file:line), or
// skips and counts them.
void for_each_document(Chunk& chunk, const CorpusRules& rules,
                       const std::function<void(std::string_view text, bool starts, bool val)>& f);

// The documents of a file: a text is one. warns: on stderr, of text that is not UTF-8.
std::vector<std::string> read_documents(const std::string& path, const std::string& text_key, bool warns);
// Calls f(row, where) for each object or record; where: "file:line", for messages. keys: those that are read, in lines.
void for_each_row(const std::string& path, const std::string& keys,
                  const std::function<void(const Json& row, const std::string& where)>& f);
