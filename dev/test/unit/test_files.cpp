// test_files.cpp: base/files.h: writing, replacing and checksums of files, and each error with its exit code.
#include "base/files.h"
#include "base/content.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "support/faults.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"

using Names = std::vector<std::string>;

struct Directory {
    const TemporaryDirectory dir;
};

TEST_CASE_FIXTURE(Directory, "a file reads back as it was written, with the checksum of its bytes") {
    std::string content(20'000'000, '\0');  // several pieces of 8 MiB
    for (size_t i = 0; i < content.size(); i++) content[i] = char(i * 2654435761u >> 24);
    OutputFile file(dir / "a");
    file.write(content.data(), 1);
    file.write(content.data() + 1, 19'999'999);
    const FileSum sum = file.finish();
    CHECK(sum.size == 20'000'000);
    CHECK(sum.xxh3 == XXH3_64bits(content.data(), content.size()));
    CHECK(read_file(dir / "a", 1 << 30) == content);
    CHECK(checksum_file(dir / "a") == sum);
    CHECK(write_file(dir / "empty", "").size == 0);
    CHECK(checksum_file(dir / "empty").xxh3 == XXH3_64bits("", 0));
}

TEST_CASE_FIXTURE(Directory, "what is missing, no file, above the limit or too short is refused") {
    CHECK(exit_code_of([&] { InputFile(dir / "none"); }) == EXIT_NO_INPUT);
    CHECK(exit_code_of([&] { list_directory(dir / "none"); }) == EXIT_NO_INPUT);
    CHECK(exit_code_of([&] { InputFile(dir.path); }) == EXIT_BAD_DATA);
    REQUIRE(mkfifo((dir / "pipe").c_str(), 0600) == 0);
    CHECK(exit_code_of([&] { InputFile(dir / "pipe"); }) == EXIT_BAD_DATA);  // without waiting for a writer
    write_bytes(dir / "a", "0123456789");
    CHECK(read_file(dir / "a", 10) == "0123456789");
    CHECK(exit_code_of([&] { read_file(dir / "a", 9); }) == EXIT_BAD_DATA);
    const InputFile file(dir / "a");
    char out[16];
    const auto code = [&](int64_t offset, int64_t bytes) {
        return exit_code_of([&] { file.read_at(out, offset, bytes); });
    };
    CHECK(code(7, 3) == 0);
    CHECK(std::string(out, 3) == "789");
    for (const auto& [offset, bytes] : {std::pair<int64_t, int64_t>{7, 4}, {11, 1}, {-1, 1}, {INT64_MAX, INT64_MAX}})
        CHECK(code(offset, bytes) == EXIT_BAD_DATA);
    REQUIRE(truncate((dir / "a").c_str(), 5) == 0);
    CHECK(code(0, 10) == EXIT_BAD_DATA);
}

TEST_CASE("other formats are recognized by their first bytes, and a text that begins like one is not") {
    const auto what = [](const std::string& start) {
        const ForeignContent* content = foreign_content(start);
        return std::string(content ? content->what : "");
    };
    CHECK(what("version https://git-lfs.github.com/spec/v1\noid sha256:0").starts_with("a git-lfs pointer"));
    CHECK(what(std::string("\x10\0\0\0\0\0\0\0{\"a\"", 12)) == "a safetensors file");
    CHECK(what("book.txt" + std::string(249, '\0') + "ustar  " + '\0') == "a tar archive");
    CHECK(what(std::string(256, 'a') + "mustard  and honey") == "");
    CHECK(what("\xef\xbb\xbf\n <!DocType HTML><p>404") == "a web page (HTML)");
    CHECK(what(std::string("GGUF\3\0\0\0", 8)) == "a GGUF file");
    CHECK(what("IQ== 0\nIg== 1\nIw== 2\n") == "a vocabulary of tiktoken");
    for (const char* text : {"", "GGUF is a format", "version 1", "<p>", "ORC", "{\"text\": \"<html>\"}"})
        CHECK(what(text).empty());
}

TEST_CASE_FIXTURE(Directory, "an output that cannot be created is refused, and nothing is overwritten") {
    write_bytes(dir / "a", "old");
    std::filesystem::create_symlink("none", dir / "dangling");
    for (const std::string& path : {dir / "a/b", std::string("/proc/none")})
        CHECK(exit_code_of([&] { write_file(path, "new"); }) == EXIT_CANNOT_CREATE);
    CHECK(refusal([&] { write_file(dir / "a", "new"); }).ends_with("/a: cannot create: File exists"));
    for (const char* name : {"a/b", "a", "dangling"})
        CHECK(exit_code_of([&] { make_directories(dir / name); }) == EXIT_CANNOT_CREATE);
    CHECK(exit_code_of([&] { rename_path(dir / "none", dir / "b"); }) == EXIT_CANNOT_CREATE);
    CHECK(read_bytes(dir / "a") == "old");
}

TEST_CASE("a replacement interrupted at any system call leaves the old content or the new one") {
    const FaultTest replacement = {
        .least_calls = 7,  // create, write, fsync, close, rename, open, fsync
        .prepare =
            [](const TemporaryDirectory& dir) {
                write_bytes(dir / "a", "old");
                write_bytes(dir / "a.tmp", "half");  // an interrupted replacement left it
            },
        .run = [](const TemporaryDirectory& dir) { replace_file(dir / "a", "new"); },
        .check =
            [](const TemporaryDirectory& dir, const FaultResult& result) {
                const bool killed = result.code == 128 + SIGKILL, failed_early = path_exists(dir / "a.tmp");
                if (result.code == 0 || read_bytes(dir / "a") != "old") CHECK(read_bytes(dir / "a") == "new");
                if (!killed && !failed_early) CHECK(list_directory(dir.path) == Names{"a"});
                if (!killed && failed_early) CHECK(read_bytes(dir / "a.tmp") == "half");
            },
    };
    for (int error : {0, EIO})
        if (!fault_at_each_call(error, replacement)) return;
}

TEST_CASE_FIXTURE(Directory, "exchange_paths exchanges a directory and a link, remove_tree does not follow links") {
    make_directories(dir / "keep/inside");
    std::filesystem::create_symlink(dir / "keep", dir / "link");
    exchange_paths(dir / "keep", dir / "link");
    CHECK(std::filesystem::is_symlink(dir / "keep"));
    CHECK(is_directory(dir / "link/inside"));
    CHECK(exit_code_of([&] { exchange_paths(dir / "keep", dir / "none"); }) == EXIT_CANNOT_CREATE);
    exchange_paths(dir / "keep", dir / "link");
    make_directories(dir / "tree/deep");
    rename_path(dir / "link", dir / "tree/link");
    remove_tree(dir / "tree");
    remove_tree(dir / "never");
    CHECK(list_directory(dir.path) == Names{"keep"});
    CHECK(is_directory(dir / "keep/inside"));
}

TEST_CASE_FIXTURE(Directory, "one process at a time holds a lock; it is free when the process has ended in any way") {
    const std::string path = dir / "run.lock";
    {
        const FileLock held(path);
        CHECK(held.held);
        CHECK(refusal([&] { FileLock{path}; }) ==
              format("73 %s is in use by another run: pid %d on %s; wait for it, or give another --output",
                     dir.path.c_str(), int(getpid()), host_name().c_str()));
        std::filesystem::rename(path, dir / "moved");
        const FileLock next(path);  // another run's, after a user has moved the directory
        CHECK(next.held);
    }
    CHECK(list_directory(dir.path) == Names{"moved"});
    const auto killed = [&] { return FileLock(path).held ? kill(getpid(), SIGKILL) : 0; };
    CHECK(in_child(killed) == 128 + SIGKILL);
    CHECK(path_exists(path));
    CHECK(FileLock(path).held);
    CHECK(exit_code_of([&] { FileLock{dir / "none/run.lock"}; }) == EXIT_CANNOT_CREATE);
}

TEST_CASE("names of files, parents of paths, and text for messages") {
    for (const char* name : {"model-00001-of-00002.safetensors", "...", "caf\xc3\xa9"}) CHECK(is_file_name(name));
    for (const std::string& name : {std::string("a\0b", 3), std::string(256, 'a'), std::string("a\x1b[2J"),
                                    std::string(), std::string(".."), std::string("a/b"), std::string("a\nerror: b")})
        CHECK_FALSE(is_file_name(name));
    CHECK(parent_directory("a") == ".");
    CHECK(parent_directory("out/step") == "out");
    CHECK(parent_directory("/a") == "/");
    CHECK(printable("a\x1b[31mb\n") == "a\\x1b[31mb\\x0a");
    CHECK(printable(std::string(200, 'a')).size() == 103);
}
