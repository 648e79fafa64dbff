// temporary.h: a directory for the files of one test, which is removed when the test ends.
#pragma once
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

struct TemporaryDirectory {
    std::string path = (std::filesystem::temp_directory_path() / "test_gpt2.XXXXXX").string();

    TemporaryDirectory() {
        if (!mkdtemp(path.data())) std::abort();
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

// The SHA-256 of a file in hexadecimal digits, computed by the program sha256sum.
inline std::string sha256_of(const std::string& path) {
    std::string digits(64, '\0');
    FILE* pipe = popen(("sha256sum '" + path + "'").c_str(), "r");
    const bool read = pipe && fread(digits.data(), 1, 64, pipe) == 64;
    if (pipe) pclose(pipe);
    return read ? digits : "";
}
