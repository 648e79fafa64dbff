// shard.h: token shards, llm.c's file format, and its second version for larger vocabularies.
//
// 256 little-endian int32: magic 20240520, version, number of tokens, and zeros; then the tokens. Version 1: uint16
// tokens (as llm.c and its data sets have them). Version 2, ours: uint32 tokens, and header[3] is the vocabulary size.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

struct Shard {
    std::string path;
    int64_t tokens;
    int bytes_per_token;  // 2 or 4
};

// Checks magic, version and that the file is exactly as long as its header promises. Missing file: EXIT_NO_INPUT; else
// EXIT_BAD_DATA with the values and what to do.
Shard open_shard(const std::string& path);
// XXH3 of a file of at most `places` x 64 KiB, and of a larger one of so many pieces of 64 KiB, from the first to the
// last bytes: tells shards apart that only share name and size, at a cost that does not grow with them.
uint64_t sampled_hash(const Shard& shard, int places);
// Tokens [begin, begin + count) of the shard. Refuses a token that is not below vocab_size (EXIT_BAD_DATA, with its
// place) and a file that has become shorter.
void read_tokens(const Shard& shard, int64_t begin, int64_t count, int vocab_size, int* out);

// Files whose names match a shell pattern (or one plain file), sorted; refuses a pattern that matches nothing
// (EXIT_NO_INPUT), and one for a shard that a ShardWriter has not finished (EXIT_BAD_DATA): the others would be a part
// of the data. `option` is named in errors.
std::vector<std::string> glob_files(const std::string& pattern, const char* option);

// Writes one shard under a temporary name, PATH.tmp, which finish() changes to PATH. A writer that is destroyed
// unfinished removes its file.
struct ShardWriter {
    ShardWriter(const std::string& path, int vocab_size);
    ~ShardWriter();
    ShardWriter(const ShardWriter&) = delete;
    void append(const int* tokens, int64_t count);
    void complete();  // the whole file is on disk and closed, still under its temporary name
    void finish();    // completes it if nobody has

    std::string path;
    int vocab_size;
    int64_t tokens = 0;
    int fd = -1;            // -1: complete
    bool finished = false;  // under its last name
    std::vector<unsigned char> buffer;
};
