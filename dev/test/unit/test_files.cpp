// test_files.cpp: base/files.h: writing, replacing and checksums of files, and each error with its exit code.
#include "base/files.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>

#include "support/faults.h"
#include "support/refusal.h"
#include "support/temporary.h"

TEST_CASE("a file reads back as it was written, with the checksum of its bytes") {
    const TemporaryDirectory dir;
    std::string content(40'000'000, '\0');  // several writes
    for (size_t i = 0; i < content.size(); i++) content[i] = char(i * 2654435761u >> 24);
    OutputFile file(dir / "a");
    file.write(content.data(), 1);
    file.write(content.data() + 1, 39'000'000);
    file.write(content.data() + 39'000'001, 999'999);
    const FileSum sum = file.finish();
    CHECK(sum.size == 40'000'000);
    CHECK(sum.xxh3 == XXH3_64bits(content.data(), content.size()));
    CHECK(read_file(dir / "a", 1 << 30) == content);
    CHECK(checksum_file(dir / "a") == sum);
    CHECK(write_file(dir / "empty", "").size == 0);
    CHECK(checksum_file(dir / "empty").xxh3 == XXH3_64bits("", 0));
}

TEST_CASE("a missing file, a directory, a pipe and a file above the limit are refused") {
    const TemporaryDirectory dir;
    CHECK(exit_code_of([&] { InputFile(dir / "none"); }) == EXIT_NO_INPUT);
    CHECK(exit_code_of([&] { InputFile(dir.path); }) == EXIT_BAD_DATA);
    REQUIRE(mkfifo((dir / "pipe").c_str(), 0600) == 0);
    CHECK(exit_code_of([&] { InputFile(dir / "pipe"); }) == EXIT_BAD_DATA);  // without waiting for a writer
    write_bytes(dir / "a", "12345");
    CHECK(read_file(dir / "a", 5) == "12345");
    CHECK(exit_code_of([&] { read_file(dir / "a", 4); }) == EXIT_BAD_DATA);
    CHECK(exit_code_of([&] { list_directory(dir / "none"); }) == EXIT_NO_INPUT);
}

TEST_CASE("reads beyond the end of a file are refused, also if it became shorter") {
    const TemporaryDirectory dir;
    write_bytes(dir / "a", "0123456789");
    const InputFile file(dir / "a");
    char out[16];
    file.read_at(out, 7, 3);
    CHECK(std::string(out, 3) == "789");
    CHECK(exit_code_of([&] { file.read_at(out, 7, 4); }) == EXIT_BAD_DATA);
    CHECK(exit_code_of([&] { file.read_at(out, 11, 1); }) == EXIT_BAD_DATA);
    CHECK(exit_code_of([&] { file.read_at(out, -1, 1); }) == EXIT_BAD_DATA);
    CHECK(exit_code_of([&] { file.read_at(out, INT64_MAX, INT64_MAX); }) == EXIT_BAD_DATA);
    REQUIRE(truncate((dir / "a").c_str(), 5) == 0);
    CHECK(exit_code_of([&] { file.read_at(out, 0, 10); }) == EXIT_BAD_DATA);
}

TEST_CASE("an output that cannot be created is refused, and nothing is overwritten") {
    const TemporaryDirectory dir;
    write_bytes(dir / "a", "old");
    CHECK(exit_code_of([&] { write_file(dir / "a", "new"); }) == EXIT_CANNOT_CREATE);
    CHECK(exit_code_of([&] { write_file(dir / "a/b", "new"); }) == EXIT_CANNOT_CREATE);
    CHECK(exit_code_of([&] { make_directories(dir / "a/b"); }) == EXIT_CANNOT_CREATE);
    CHECK(exit_code_of([&] { make_directories(dir / "a"); }) == EXIT_CANNOT_CREATE);
    CHECK(exit_code_of([&] { write_file("/proc/none", "new"); }) == EXIT_CANNOT_CREATE);
    CHECK(exit_code_of([&] { rename_path(dir / "none", dir / "b"); }) == EXIT_CANNOT_CREATE);
    CHECK(read_bytes(dir / "a") == "old");
    CHECK_THROWS_WITH_AS(write_file(dir / "a", "new"), doctest::Contains("/a: cannot create: File exists"), Error);
    std::filesystem::create_symlink("loop", dir / "loop");
    std::filesystem::create_symlink("none", dir / "dangling");
    CHECK(exit_code_of([&] { make_directories(dir / "loop/out"); }) == EXIT_CANNOT_CREATE);
    for (const char* name : {"a", "dangling"})
        CHECK(refusal([&] { make_directories(dir / name); }).ends_with("is not a directory; give another name"));
}

TEST_CASE("replace_file replaces the whole file, even if an interrupted replacement left its temporary file") {
    const TemporaryDirectory dir;
    write_bytes(dir / "latest.tmp", "half");
    replace_file(dir / "latest", "one\n");
    replace_file(dir / "latest", "two\n");
    CHECK(read_bytes(dir / "latest") == "two\n");
    CHECK(list_directory(dir.path) == std::vector<std::string>{"latest"});
}

TEST_CASE("a write that fails is an I/O error, and the file to be replaced keeps its content") {
    const TemporaryDirectory dir;
    replace_file(dir / "a", "old");
    const int code = in_child([&] {
        limit_file_size(4096);
        replace_file(dir / "a", std::string(10'000, 'x'));
        return 0;
    });
    CHECK(code == EXIT_IO);
    CHECK(read_bytes(dir / "a") == "old");
    CHECK(list_directory(dir.path) == std::vector<std::string>{"a"});  // nothing takes the space that is missing
}

TEST_CASE("a full disk is an I/O error that names the file") {
    const TemporaryDirectory dir;
    const int failed = on_small_disk(dir.path, "1m", [&] {
        if (free_bytes(dir.path) > 1 << 20) return 1;
        const std::string said = refusal([&] { write_file(dir / "a", std::string(2 << 20, 'x')); });
        if (!said.starts_with("74 ") || said.find("/a: cannot write") == std::string::npos) return 2;
        return said.ends_with("No space left on device") ? 0 : 3;
    });
    CHECK(failed == 0);
}

TEST_CASE("a replacement interrupted at any system call leaves the old content or the new content") {
    const FaultTest replacement = {
        .least_calls = 7,  // create, write, fsync, close, rename, open, fsync
        .prepare = [](const TemporaryDirectory& dir) { write_bytes(dir / "a", "old"); },
        .run = [](const TemporaryDirectory& dir) { replace_file(dir / "a", "new"); },
        .check =
            [](const TemporaryDirectory& dir, const FaultResult& result) {
                const std::string content = read_bytes(dir / "a");
                const bool whole = content == "old" || content == "new";
                CHECK(whole);
                if (result.code == 0) CHECK(content == "new");
            },
    };
    for (int error : {0, EIO, ENOSPC, EROFS})
        if (!fault_at_each_call(error, replacement)) return;
}

TEST_CASE("remove_tree does not follow links") {
    const TemporaryDirectory dir;
    make_directories(dir / "keep/deep");
    write_bytes(dir / "keep/file", "x");
    make_directories(dir / "tree/deep");
    write_bytes(dir / "tree/deep/file", "x");
    REQUIRE(symlink((dir / "keep").c_str(), (dir / "tree/link").c_str()) == 0);
    remove_tree(dir / "tree");
    remove_tree(dir / "never");
    CHECK_FALSE(path_exists(dir / "tree"));
    CHECK(path_exists(dir / "keep/file"));
}

TEST_CASE("check_directory refuses a missing directory, a file, and a directory without search permission") {
    const TemporaryDirectory dir;
    make_directories(dir / "hidden");
    write_bytes(dir / "hidden/file", "x");
    check_directory(dir / "hidden");
    CHECK(exit_code_of([&] { check_directory(dir / "none"); }) == EXIT_NO_INPUT);
    CHECK(refusal([&] { check_directory(dir / "hidden/file"); }) ==
          format("66 %s: is a file; give the directory that holds it", (dir / "hidden/file").c_str()));
    const int failed = as_ordinary_user(dir.path, [&] {
        chmod((dir / "hidden").c_str(), 0);
        return exit_code_of([&] { check_directory(dir / "hidden"); }) == EXIT_NO_INPUT ? 0 : 1;
    });
    CHECK(failed == 0);
}

TEST_CASE("one process at a time holds a lock; it is free when the process has ended in any way") {
    const TemporaryDirectory dir;
    const std::string path = dir / "run.lock";
    {
        const FileLock held(path);
        CHECK(held.held);
        CHECK(refusal([&] { FileLock{path}; }) ==
              format("73 %s is in use by another run: pid %d on %s; wait for it, or give another --output",
                     dir.path.c_str(), int(getpid()), host_name().c_str()));
        CHECK(read_bytes(path).starts_with("pid "));  // the refused one has not written into it
        std::filesystem::rename(path, dir / "moved");
        const FileLock next(path);  // another run's, after a user has moved the directory
        CHECK(next.held);
    }
    CHECK(list_directory(dir.path) == std::vector<std::string>{"moved"});
    CHECK(in_child([&] {
              const FileLock killed(path);
              kill(getpid(), SIGKILL);
              return 0;
          }) == 128 + SIGKILL);
    CHECK(path_exists(path));
    CHECK(FileLock(path).held);
    CHECK(exit_code_of([&] { FileLock{dir / "none/run.lock"}; }) == EXIT_CANNOT_CREATE);
}

TEST_CASE("exchange_paths exchanges a directory and a link") {
    const TemporaryDirectory dir;
    make_directories(dir / "a/inside");
    std::filesystem::create_symlink("elsewhere", dir / "b");
    exchange_paths(dir / "a", dir / "b");
    CHECK(is_directory(dir / "b/inside"));
    CHECK(std::filesystem::is_symlink(dir / "a"));
    CHECK(exit_code_of([&] { exchange_paths(dir / "a", dir / "none"); }) == EXIT_CANNOT_CREATE);
    CHECK(list_directory(dir.path) == std::vector<std::string>{"a", "b"});
}

TEST_CASE("names of files, parents of paths, and text for messages") {
    for (const char* name : {"a", "model-00001-of-00002.safetensors", "..."}) CHECK(is_file_name(name));
    for (const char* name : {"", ".", "..", "/", "a/b", "../a", "a/"}) CHECK_FALSE(is_file_name(name));
    CHECK_FALSE(is_file_name(std::string("a\0b", 3)));
    for (const char* name : {"a\x1b[2J", "a\nerror: b", "\x7f"}) CHECK_FALSE(is_file_name(name));
    CHECK(is_file_name("caf\xc3\xa9"));
    CHECK_FALSE(is_file_name(std::string(256, 'a')));
    CHECK(parent_directory("a") == ".");
    CHECK(parent_directory("out/step") == "out");
    CHECK(parent_directory("/a") == "/");
    CHECK(printable("a\x1b[31mb\n") == "a\\x1b[31mb\\x0a");
    CHECK(printable(std::string(200, 'a')).size() == 103);
    const TemporaryDirectory dir;
    CHECK(free_bytes(dir.path) > 0);
    CHECK(exit_code_of([&] { free_bytes(dir / "none"); }) == EXIT_IO);
}
