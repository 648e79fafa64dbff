// sources: llmc/data/shard.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/print.cpp
//
// fuzz_shard.cpp: reads any bytes as a token shard. A file that open_shard accepts must be readable to its last token,
// or be refused for a token outside of the vocabulary. No input may cause a crash or a read beyond the file.
#include <cstring>
#include <vector>

#include "data/shard.h"
#include "fuzz.h"

void fuzz(std::string_view input) {
    // Four of five inputs get the right magic number, to reach the checks after it.
    std::string bytes(input);
    const int32_t magic = 20240520;
    if (bytes.size() >= 4 && uint8_t(bytes[0]) % 5 != 0) memcpy(bytes.data(), &magic, 4);
    const Shard shard = open_shard(memory_file(bytes));
    require(1024 + shard.tokens * shard.bytes_per_token == int64_t(bytes.size()));
    std::vector<int> tokens(shard.tokens);
    read_tokens(shard, 0, shard.tokens, 50257, tokens.data());
    for (int token : tokens) require(token >= 0 && token < 50257);
}
