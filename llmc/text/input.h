// input.h: finds input files, decides what each one is, and reads it as text: unpacked, and tables as JSON lines. The
// content decides first, then the name without .gz and the like; docs/data.md ("Text") has the names and what a folder
// leaves out.
//
// Inputs are files, folders, and - for the standard input. A folder is searched recursively in the order of the names.
// A file that is named directly is read, with any name. A pipe is copied to a file without a name in TMPDIR, because it
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
inline constexpr const char* BLANK = " \t\r\n";  // white space of JSON

struct TextFile {
    std::string path;    // name that the user gave; "standard input" for -
    std::string source;  // path that is opened: the same, or the copy of a pipe
    int64_t size = 0;    // bytes of the file, packed as it is
    Format format = Format::text;
    std::vector<std::string> command = {};  // reads the standard input and writes the text; empty: none is needed
    const char* package = "python3";        // has the command
    bool is_table = false;                  // the command is scripts/table_rows.py
    int64_t odd_byte = -1;                  // offset of the first invalid UTF-8 in the first MiB of text; -1: none
    int64_t text_bytes = INT64_MAX;         // size of the unpacked text; INT64_MAX: unknown
    std::string refused = "";               // why the file is no text, "is a zip archive, not text; ..."
    bool may_have_text = true;              // false: JSON or CSV whose first objects have no text under the key
    std::shared_ptr<FILE> copy = nullptr;   // copy of a pipe
};

struct FoundFiles {
    std::vector<TextFile> texts;                               // each file once
    std::map<std::string, std::vector<std::string>> left_out;  // files that are not read, by the reason: "already read"
};

// Refuses inputs that do not exist or cannot be read, folders without text files (EXIT_NO_INPUT), and files that are
// damaged or no text (EXIT_BAD_DATA).
FoundFiles find_text_files(const std::vector<std::string>& inputs, const std::string& text_key);

// The purpose that a single file is read for. rows: they are JSON or CSV, with any name. prompt: all of it is text.
enum class Wanted { documents, rows, prompt };
// Refuses a file that is not that (EXIT_BAD_DATA). keys: the one that documents are under, or those of rows, in lines.
TextFile open_input(const std::string& path, Wanted wanted, const std::string& keys);
std::string read_prompt(const std::string& path);
void warn_unless_utf8(const TextFile& file);
// The file's name without folders and without .gz and the like.
std::string unpacked_name(const std::string& path);

// Reads a file from its begin to its end. A program that unpacks it has the file as its standard input.
struct TextStream {
    explicit TextStream(const TextFile& text);
    ~TextStream();  // ends the program

    // Both give the next bytes, fewer only at the end. There they refuse a file that the program could not unpack to
    // its end (EXIT_BAD_DATA), and a program that is not installed (EXIT_NO_INPUT).
    bool read(std::string& out, int64_t bytes);  // appends; returns whether there were so many
    std::string_view peek(int64_t bytes);        // leaves the bytes to read
    int64_t skip_mark();                         // leaves out a byte order mark; returns its bytes, 3 or 0
    int64_t file_position() const;               // bytes of the file itself that were read

  private:
    void start();
    void finish();
    int64_t fetch(std::string& out, int64_t bytes);

    const TextFile& text;
    InputFile file;
    int64_t position = 0;                                           // bytes read of a file without a command
    int program = -1, output = -1;                                  // the command's process and pipe; -1: it ended
    std::unique_ptr<FILE, int (*)(FILE*)> errors{nullptr, fclose};  // its standard error
    std::string ahead;                                              // read by peek
};
