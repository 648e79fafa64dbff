// text_stream.h: reads a text file from its begin to its end. The end of its name says whether a program unpacks it:
// .gz (gzip), .zst (zstd), .xz (xz), or .parquet (python3 with scripts/parquet_text.py, which prints JSON lines). The
// program has the file as its standard input; no shell starts it.
#pragma once
#include <sys/types.h>

#include <cstdio>
#include <memory>
#include <string_view>

#include "base/files.h"

bool is_packed(const std::string& path);               // a program unpacks the file
std::string without_packing(const std::string& path);  // a.jsonl.gz -> a.jsonl; .parquet stays

struct TextStream {
    TextStream(const std::string& path, const std::string& text_key);  // text_key: the column of a .parquet file
    TextStream(const TextStream&) = delete;
    ~TextStream();  // ends the program

    // Both return the next bytes, fewer only at the end. There they refuse a file that the program could not unpack to
    // its end (EXIT_BAD_DATA), and a program that is not installed (EXIT_NO_INPUT). peek leaves the bytes to read.
    int64_t read(char* out, int64_t bytes);
    std::string_view peek(int64_t bytes);
    int64_t file_position() const;  // bytes of the file itself that were read

  private:
    void start(const std::string& text_key);
    void finish();
    int64_t fetch(char* out, int64_t bytes);

    InputFile file;
    const struct Unpacker* unpacker;                                // null: none is needed
    int64_t position = 0;                                           // in a file without one
    pid_t program = -1;                                             // -1: it has ended
    int output = -1, status = 0;                                    // the end of its pipe; how it ended
    std::unique_ptr<FILE, int (*)(FILE*)> errors{nullptr, fclose};  // its standard error
    std::string ahead;                                              // read by peek
};
