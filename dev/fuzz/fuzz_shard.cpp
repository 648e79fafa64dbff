// sources: llmc/data/shard.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/print.cpp
//
// fuzz_shard.cpp: reads any bytes as a token shard. A file that open_shard accepts must be readable to its last token,
// or be refused for a token outside of the vocabulary. No input may cause a crash or a read beyond the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/common.h"
#include "data/shard.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("shard", MFD_CLOEXEC);
    static const std::string path = format("/proc/self/fd/%d", fd);
    // Four of five inputs get the right magic number, to reach the checks after it.
    std::vector<uint8_t> bytes(data, data + size);
    const int32_t magic = 20240520;
    if (size >= 4 && data[0] % 5 != 0) memcpy(bytes.data(), &magic, 4);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, bytes.data(), size, 0) != ssize_t(size)) abort();
    try {
        const Shard shard = open_shard(path);
        if (1024 + shard.tokens * shard.bytes_per_token != int64_t(size)) abort();
        std::vector<int> tokens(shard.tokens);
        read_tokens(shard, 0, shard.tokens, 50257, tokens.data());
        for (int token : tokens)
            if (token < 0 || token >= 50257) abort();
    } catch (const Error& error) {
        if (error.exit_code != EXIT_BAD_DATA) abort();
    }
    return 0;
}
