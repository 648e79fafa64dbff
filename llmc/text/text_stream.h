// text_stream.h: reads a text file from its begin to its end. The end of its name says whether a program unpacks it:
// .gz (gzip), .zst (zstd), .xz (xz), or .parquet (python3 with scripts/parquet_text.py, which prints JSON lines). The
// program has the file as its standard input, and is started without a shell.
#pragma once
#include <sys/types.h>

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "base/files.h"

bool is_packed(const std::string& path);               // a program unpacks the file
std::string without_packing(const std::string& path);  // a.jsonl.gz -> a.jsonl; other names stay

struct TextStream {
    // text_key: the column of a .parquet file. Refuses a program that is not installed (EXIT_NO_INPUT).
    TextStream(const std::string& path, const std::string& text_key);
    TextStream(const TextStream&) = delete;
    ~TextStream();  // ends the program

    // Reads the next bytes; fewer than these only at the end. Refuses there a file that the program could not unpack to
    // its end (EXIT_BAD_DATA), with the program's last line.
    int64_t read(char* out, int64_t bytes);
    // Returns the next bytes, which the next read returns too; fewer only at the end.
    std::string_view peek(int64_t bytes);
    int64_t file_position() const;  // bytes that were read of the file itself

  private:
    void start(const std::vector<std::string>& command, const char* package);
    int64_t fetch(char* out, int64_t bytes);
    void wait_for_program();
    void check_program();

    InputFile file;
    int64_t position = 0;  // in a file that is not packed
    pid_t program = -1;    // unpacks the file; -1: there is none, or it has ended
    int pipe_end = -1;     // what it prints
    int status = 0;        // how it ended
    std::unique_ptr<FILE, int (*)(FILE*)> errors{nullptr, fclose};  // what it prints on its standard error
    std::string ahead;                                              // was read by peek
};
