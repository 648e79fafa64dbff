// fuzz.h: what the fuzzers share: the function that libFuzzer calls, a check that ends the process, and files in
// memory.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/common.h"
#include "support/refusal.h"
#include "support/temporary.h"

// Defined by each fuzzer. It may refuse its input by an Error with EXIT_BAD_DATA.
void fuzz(std::string_view input);

inline void require(bool condition) {
    if (!condition) abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        fuzz({reinterpret_cast<const char*>(data), size});
    } catch (const Error& error) {
        require(error.exit_code == EXIT_BAD_DATA);
    }
    return 0;
}

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
