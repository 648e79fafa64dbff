// input.h: finds input files, decides what each one is, and reads it as text: unpacked, and tables as JSON lines.
//
// The content decides first: files packed by gzip, zstd, xz or bzip2, and Parquet, are recognized with any name. Then
// the name decides, without .gz and the like, in upper or lower case:
//   .txt .text .md .markdown .rst        text, also if it looks like JSON
//   .csv .tsv                            records after a header
//   .json .jsonl .jsonlines .ndjson .jl  JSON
//   another one, or none                 JSON if it begins with an object or with an array of objects, else text
// What is neither (base/content.h, or a zero byte in the first MiB) is refused.
//
// Inputs are files, folders, and - for the standard input. A folder is searched recursively in the order of the names.
// Files in it with the names above, or .parquet, are read, apart from hidden ones, a tokenizer's files, those beside
// .safetensors files, and JSON and CSV whose first object has no text. A file that is named directly is read, with any
// name. Links are followed, but nothing is read twice. A pipe is copied to a file without a name in TMPDIR, because it
// may be read several times; so is the rest of a file on the standard input of which a part was read.
#pragma once
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/content.h"
#include "base/files.h"

enum class Format {
    text,
    json_lines,  // an object in each line; also a table
    json         // an array of objects, or objects one after another, with any line ends
};

inline constexpr int64_t MAX_PROMPT_BYTES = 16 << 20;

struct TextFile {
    std::string path;    // name that the user gave; "standard input" for -
    std::string source;  // path that is opened: the same, or the copy of a pipe
    int64_t size = 0;    // bytes of the file, packed as it is
    Format format = Format::text;
    const ForeignContent* unpacker = nullptr;  // null: none is needed
    std::string table = "";                // "parquet", "csv" or "tsv": scripts/table_rows.py reads it; "": it is none
    int64_t odd_byte = -1;                 // offset of the first invalid UTF-8 in the first MiB of text; -1: none
    int64_t text_bytes = INT64_MAX;        // size of the unpacked text; INT64_MAX: unknown
    std::string refused = "";              // why the file is no text, "is a zip archive, not text; ..."
    bool may_have_text = true;             // false: JSON or CSV whose first object has no text under the key
    std::shared_ptr<FILE> copy = nullptr;  // copy of a pipe
};

struct FoundFiles {
    std::vector<TextFile> texts;                               // each file once
    std::map<std::string, std::vector<std::string>> left_out;  // files in folders that are no text, and other names of
                                                               // text files, by the reason: "already read"
};

// Refuses inputs that do not exist or cannot be read, folders without text files (EXIT_NO_INPUT), and files that are
// damaged or no text (EXIT_BAD_DATA).
FoundFiles find_text_files(const std::vector<std::string>& inputs, const std::string& text_key);

// The purpose that a single file is read for. rows: they are JSON or CSV, with any name. prompt: all of it is text.
enum class Wanted { documents, rows, prompt };
// Refuses a file that is not that (EXIT_BAD_DATA). text_key: of documents.
TextFile open_input(const std::string& path, Wanted wanted, const std::string& text_key);
std::string read_prompt(const std::string& path);
// The file's name without folders and without .gz and the like.
std::string unpacked_name(const std::string& path);

// Reads a file from its begin to its end. A program that unpacks it has the file as its standard input; no shell starts
// the program.
struct TextStream {
    // columns: the one that Parquet must have; or several, in lines, of which it may lack some.
    TextStream(const TextFile& file, const std::string& columns);
    TextStream(const TextStream&) = delete;
    ~TextStream();  // ends the program

    // Both return the next bytes, fewer only at the end. There they refuse a file that the program could not unpack to
    // its end (EXIT_BAD_DATA), and a program that is not installed (EXIT_NO_INPUT). peek leaves the bytes to read.
    int64_t read(char* out, int64_t bytes);
    std::string_view peek(int64_t bytes);
    int64_t skip_mark();            // leaves out a byte order mark; returns its bytes, 3 or 0
    int64_t file_position() const;  // bytes of the file itself that were read

  private:
    bool is_piped() const { return unpacker || !table.empty(); }
    void start(const std::string& columns);
    void finish();
    int64_t fetch(char* out, int64_t bytes);

    InputFile file;
    const std::string table;
    const ForeignContent* const unpacker;
    const char *program_name = "python3", *package = "python3";
    int64_t position = 0;                                           // bytes read of a file without an unpacker
    int program = -1;                                               // process of the unpacker; -1: it has ended
    int output = -1, status = 0;                                    // end of its pipe; how it ended
    std::unique_ptr<FILE, int (*)(FILE*)> errors{nullptr, fclose};  // its standard error
    std::string ahead;                                              // read by peek
};
