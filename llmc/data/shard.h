// shard.h: reads and writes token shards: llm.c's file format, and a second version of it for larger vocabularies.
//
// A shard is a header of 256 little-endian int32 (magic 20240520, version, number of tokens, then zeros) followed by
// the tokens. Version 1 has uint16 tokens, as llm.c and its data sets have. Version 2 is this program's own: uint32
// tokens, and header[3] is the vocabulary size, 1 to 2^20.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

struct Shard {
    std::string path;
    int64_t tokens;
    int bytes_per_token;  // 2 or 4
    uint64_t hash;        // hash of pieces of the content
    int vocab_size = 0;   // tokens of its tokenizer, as a shard of version 2 states; 0: unknown
};

// Checks the magic, the version, and that the file has exactly the length that its header states. Fails with
// EXIT_NO_INPUT if the file is missing. Other errors are EXIT_BAD_DATA, and the message says the values and what to do.
// `places` is the number of pieces of the file whose hash is kept.
Shard open_shard(const std::string& path, int places = 4);
// Reads tokens [begin, begin + count) of the shard. Refuses (EXIT_BAD_DATA) a token that is not below vocab_size, with
// its place, and a file that has become shorter.
void read_tokens(const Shard& shard, int64_t begin, int64_t count, int vocab_size, int* out);

// Files whose names match the shell patterns, one in each line, which may be plain file names. They are sorted, and
// each is there once: links to a file that is there already are left out. Refuses a pattern that matches nothing
// (EXIT_NO_INPUT). Refuses a pattern that also matches an unfinished shard of a ShardWriter (EXIT_BAD_DATA): the
// finished shards would be only a part of the data. `option` is named in errors.
std::vector<std::string> glob_files(const std::string& patterns, const char* option);

// Writes one shard under the temporary name PATH.tmp, which finish() renames to PATH. The destructor of an unfinished
// writer removes its file.
struct ShardWriter {
    ShardWriter(const std::string& path, int vocab_size);
    ~ShardWriter();
    ShardWriter(const ShardWriter&) = delete;
    void append(const int* tokens, int64_t count);  // up to 2^31 - 1 in all: the header's count is an int32
    void complete();                                // syncs and closes the file, still under its temporary name
    void finish();                                  // calls complete() if needed, then renames

    std::string path;
    int vocab_size;
    int64_t tokens = 0;
    FILE* file = nullptr;   // null after complete()
    bool finished = false;  // renamed to PATH

  private:
    void write_header();
};
