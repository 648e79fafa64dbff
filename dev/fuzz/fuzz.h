// fuzz.h: what the fuzzers share: a check that ends the process, and files in memory.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "support/temporary.h"

inline void require(bool condition) {
    if (!condition) abort();
}

inline std::string as_text(const uint8_t* data, size_t size) { return {reinterpret_cast<const char*>(data), size}; }

// The directory of a fuzzer that writes files. It is in memory, if possible: on a disk, fsync takes milliseconds.
inline const TemporaryDirectory& memory_directory() {
    static const TemporaryDirectory directory = [] {
        if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
        return TemporaryDirectory();
    }();
    return directory;
}

// The path of a file in memory with these bytes. There is one such file.
inline const std::string& memory_file(const std::string& bytes) {
    static const int fd = memfd_create("input", MFD_CLOEXEC);
    static const std::string path = "/proc/self/fd/" + std::to_string(fd);
    require(ftruncate(fd, 0) == 0 && pwrite(fd, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()));
    return path;
}
