// test_shard.cpp: tests that token shards are written and read back, have the same bytes as llm.c's, and are refused if
// damaged; and tests patterns of file names.
#include "data/shard.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>
#include <numeric>

#include "base/common.h"
#include "base/files.h"
#include "support/faults.h"
#include "support/refusal.h"
#include "support/temporary.h"
#include "support/test.h"

static std::vector<int> counting(int count) {
    std::vector<int> tokens(count);
    std::iota(tokens.begin(), tokens.end(), 0);
    return tokens;
}

static void write_shard(const std::string& path, const std::vector<int>& tokens, int vocab_size) {
    ShardWriter writer(path, vocab_size);
    writer.append(tokens.data(), int64_t(tokens.size()));
    writer.finish();
}

// Header fields and uint16 tokens 0, 1, 2, ..., byte for byte as llm.c's scripts write them.
static std::string llmc_bytes(std::vector<int32_t> fields, int tokens) {
    fields.resize(256);
    std::string bytes(1024 + 2 * tokens, '\0');
    memcpy(bytes.data(), fields.data(), 1024);
    for (int i = 0; i < tokens; i++) bytes[1024 + 2 * i] = char(i), bytes[1025 + 2 * i] = char(i >> 8);
    return bytes;
}

// The message of the Error that open_shard throws, which must have this exit code.
static std::string open_error(const std::string& path, int exit_code) {
    try {
        open_shard(path);
    } catch (const Error& error) {
        CHECK(error.exit_code == exit_code);
        return error.what();
    }
    FAIL("the file was accepted");
    return "";
}

TEST_CASE("a shard of llm.c is read, whole and in parts") {
    const TemporaryDirectory dir;
    write_bytes(dir / "a.bin", llmc_bytes({20240520, 1, 1000}, 1000));
    const Shard shard = open_shard(dir / "a.bin");
    CHECK(shard.tokens == 1000);
    CHECK(shard.bytes_per_token == 2);
    std::vector<int> all(1000), part(7, -1);
    read_tokens(shard, 0, 1000, 1000, all.data());
    CHECK(all == counting(1000));
    read_tokens(shard, 993, 7, 1000, part.data());
    CHECK(part == std::vector<int>{993, 994, 995, 996, 997, 998, 999});
    read_tokens(shard, 1000, 0, 1000, part.data());  // reads nothing, at the end
    CHECK_THROWS_AS(read_tokens(shard, 994, 7, 1000, part.data()), Error);
    CHECK_THROWS_AS(read_tokens(shard, -1, 2, 1000, part.data()), Error);
}

TEST_CASE("the writer makes llm.c's bytes, and leaves no file if it is not finished") {
    const TemporaryDirectory dir;
    const std::string path = dir / "a.bin";
    {
        ShardWriter unfinished(path, 50257);
        unfinished.append(counting(10).data(), 10);
    }
    CHECK(std::filesystem::is_empty(dir.path));  // no file is left

    ShardWriter writer(path, 50257);
    writer.append(counting(600).data(), 256);
    writer.append(counting(600).data() + 256, 344);
    CHECK(!std::filesystem::exists(path));
    writer.finish();
    CHECK(read_bytes(path) == llmc_bytes({20240520, 1, 600}, 600));
}

TEST_CASE("a shard gets its final name only by finish()") {
    const TemporaryDirectory dir;
    {
        ShardWriter complete(dir / "a.bin", 50257);
        complete.append(counting(10).data(), 10);
        complete.complete();
        CHECK(!std::filesystem::exists(dir / "a.bin"));
        CHECK(complete.file == nullptr);  // no file stays open, so thousands of shards can wait for finish()
    }
    CHECK(std::filesystem::is_empty(dir.path));

    ShardWriter writer(dir / "a.bin", 50257);
    writer.append(counting(600).data(), 600);
    writer.complete();
    writer.finish();
    CHECK(read_bytes(dir / "a.bin") == llmc_bytes({20240520, 1, 600}, 600));
}

TEST_CASE("a shard larger than the writer's buffer reads back as written") {
    const TemporaryDirectory dir;
    std::vector<int> tokens(1500000), back(tokens.size());
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int(i * 7919 % 65536);
    write_shard(dir / "a.bin", tokens, 65536);
    const Shard shard = open_shard(dir / "a.bin");
    CHECK(shard.bytes_per_token == 2);
    read_tokens(shard, 0, int64_t(back.size()), 65536, back.data());
    CHECK(back == tokens);
}

TEST_CASE("a vocabulary above 65536 takes four bytes per token, and its size is in the header") {
    const TemporaryDirectory dir;
    const std::vector<int> tokens = {0, 65535, 65536, 99999};
    write_shard(dir / "a.bin", tokens, 100000);
    const Shard shard = open_shard(dir / "a.bin");
    CHECK(shard.bytes_per_token == 4);
    std::vector<int> back(4);
    read_tokens(shard, 0, 4, 100000, back.data());
    CHECK(back == tokens);
    int32_t header[4];
    memcpy(header, read_bytes(dir / "a.bin").data(), sizeof(header));
    CHECK(header[1] == 2);
    CHECK(header[3] == 100000);
    CHECK_THROWS_WITH_AS(read_tokens(shard, 0, 4, 99999, back.data()),
                         doctest::Contains("is 99999, but the vocabulary has 99999"), Error);
}

TEST_CASE("the writer refuses tokens outside of the vocabulary, and a folder that does not exist") {
    const TemporaryDirectory dir;
    const int tokens[] = {5, -1, 10};
    ShardWriter writer(dir / "a.bin", 10);
    writer.append(tokens, 1);
    CHECK_THROWS_WITH_AS(writer.append(tokens + 1, 1), doctest::Contains("token -1"), Error);
    CHECK_THROWS_WITH_AS(writer.append(tokens + 2, 1), doctest::Contains("token 10 is outside of the vocabulary of 10"),
                         Error);
    try {
        ShardWriter nowhere(dir / "no/folder/a.bin", 10);
        FAIL("created a file in a folder that does not exist");
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_CANNOT_CREATE);
    }
}

TEST_CASE("the writer replaces an unfinished shard, and writes nothing through a link in its place") {
    const TemporaryDirectory dir;
    write_bytes(dir / "outside", "precious");
    { ShardWriter(dir / "a.bin", 10).finish(); }
    const std::string whole = read_bytes(dir / "a.bin");
    // The name under which the writer keeps a shard until it is finished.
    std::string unfinished;
    {
        const ShardWriter writer(dir / "b.bin", 10);
        for (const std::string& name : list_directory(dir.path))
            if (name != "a.bin" && name != "outside") unfinished = dir / name;
    }
    REQUIRE(!unfinished.empty());
    write_bytes(unfinished, std::string(5000, 'x'));
    { ShardWriter(dir / "b.bin", 10).finish(); }
    CHECK(read_bytes(dir / "b.bin") == whole);
    std::filesystem::create_symlink(dir / "outside", unfinished);
    { ShardWriter(dir / "b.bin", 10).finish(); }
    CHECK(read_bytes(dir / "b.bin") == whole);
    CHECK(!std::filesystem::is_symlink(dir / "b.bin"));
    CHECK(read_bytes(dir / "outside") == "precious");
}

TEST_CASE("a write that fails is an error of finish() or append(), and leaves no file") {
    const TemporaryDirectory dir;
    const int code = in_child([&] {
        limit_file_size(1500);  // the shard has 1024 + 2000 bytes
        ShardWriter writer(dir / "a.bin", 10);
        writer.append(std::vector<int>(1000, 3).data(), 1000);
        writer.finish();
        return 0;
    });
    CHECK(code == EXIT_IO);
    CHECK(list_directory(dir.path).empty());
}

TEST_CASE("a file of another kind is refused, and the message names the kind") {
    const TemporaryDirectory dir;
    const std::string path = dir / "a.bin";
    const auto refusal_of = [&](const std::string& bytes) {
        write_bytes(path, bytes);
        return open_error(path, EXIT_BAD_DATA);
    };
    CHECK(refusal_of("\x93NUMPY\x01" + std::string(2000, ' ')).find("NumPy's") != std::string::npos);
    CHECK(refusal_of("text").find("run train_gpt2 tokenize") != std::string::npos);
    const std::string bare = refusal_of(llmc_bytes({1234567, 1, 10}, 10));
    CHECK(bare.find("it starts with 1234567, not 20240520") != std::string::npos);
    CHECK(bare.find("data/to_shard.py") != std::string::npos);
    CHECK(open_error(dir / "missing.bin", EXIT_NO_INPUT).find("missing.bin") != std::string::npos);
    CHECK(open_error(dir.path, EXIT_BAD_DATA).find("directory") != std::string::npos);
    REQUIRE(mkfifo((dir / "pipe").c_str(), 0600) == 0);
    open_error(dir / "pipe", EXIT_BAD_DATA);  // without waiting for a writer
}

TEST_CASE("a header that contradicts the file is refused, and the message has the numbers") {
    const TemporaryDirectory dir;
    const std::string path = dir / "a.bin";
    const auto refusal_of = [&](std::vector<int32_t> header, int tokens) {
        write_bytes(path, llmc_bytes(header, tokens));
        return open_error(path, EXIT_BAD_DATA);
    };
    CHECK(
        refusal_of({20240520, 1, 20000}, 19999).find("promises 20,000 tokens, so 41,024 bytes; the file has 41,022") !=
        std::string::npos);
    CHECK(refusal_of({20240520, 1, 10}, 11).find("promises 10 tokens") != std::string::npos);
    CHECK(refusal_of({20240520, 2, 10, 99999}, 10).find("so 1,064 bytes; the file has 1,044") != std::string::npos);
    CHECK(refusal_of({20240520, 1, -5}, 10).find("promises -5 tokens") != std::string::npos);
    CHECK(refusal_of({20240520, 1, 0x7fffffff}, 10).find("promises 2,147,483,647 tokens") != std::string::npos);
    CHECK(refusal_of({20240520, 3, 10}, 10).find("shard version 3") != std::string::npos);
    CHECK(refusal_of({20240520, 0, 10}, 10).find("shard version 0") != std::string::npos);
}

TEST_CASE("a file cut at any length is refused") {
    const TemporaryDirectory dir;
    const std::string whole = llmc_bytes({20240520, 1, 20}, 20);
    for (size_t length = 0; length < whole.size(); length++) {
        CAPTURE(length);
        write_bytes(dir / "a.bin", whole.substr(0, length));
        const std::string text = open_error(dir / "a.bin", EXIT_BAD_DATA);
        const char* want = length < 4 ? "is not a token shard" : length < 1024 ? "cut off after" : "promises 20 tokens";
        CHECK(text.find(want) != std::string::npos);
    }
    write_bytes(dir / "a.bin", whole);
    CHECK(open_shard(dir / "a.bin").tokens == 20);
}

TEST_CASE("a token outside of the vocabulary is refused, and the message has its file and place") {
    const TemporaryDirectory dir;
    std::vector<int> tokens(100, 1), out(100);
    tokens[42] = 50257;
    write_shard(dir / "a.bin", tokens, 65536);
    const Shard shard = open_shard(dir / "a.bin");
    const std::string want = (dir / "a.bin") + ": token 42 (byte 1,108) is 50257, but the vocabulary has 50257";
    CHECK_THROWS_WITH_AS(read_tokens(shard, 40, 10, 50257, out.data()), doctest::Contains(want.c_str()), Error);
    read_tokens(shard, 43, 57, 50257, out.data());  // the other tokens can be read
    read_tokens(shard, 0, 42, 50257, out.data());
    read_tokens(shard, 0, 100, 50258, out.data());
}

TEST_CASE("four-byte tokens with the highest bit are refused, not taken for negative numbers") {
    const TemporaryDirectory dir;
    std::string bytes = llmc_bytes({20240520, 2, 2, 100000}, 4);
    memset(bytes.data() + 1024, 0xff, 8);
    write_bytes(dir / "a.bin", bytes);
    int out[2];
    CHECK_THROWS_AS(read_tokens(open_shard(dir / "a.bin"), 0, 2, std::numeric_limits<int>::max(), out), Error);
}

TEST_CASE("a shard that becomes shorter after it was opened is refused") {
    const TemporaryDirectory dir;
    write_shard(dir / "a.bin", counting(1000), 1000);
    const Shard shard = open_shard(dir / "a.bin");
    std::filesystem::resize_file(dir / "a.bin", 1024 + 2 * 500);
    std::vector<int> out(1000);
    read_tokens(shard, 0, 500, 1000, out.data());
    try {
        read_tokens(shard, 499, 2, 1000, out.data());
        FAIL("read beyond the end");
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_BAD_DATA);
        CHECK(std::string(error.what()).find("became shorter") != std::string::npos);
    }
}

TEST_CASE("a pattern is refused if it would match a shard that is not finished") {
    const TemporaryDirectory dir;
    for (const char* name : {"train_000002.bin", "train_000001.bin.tmp", "val_000000.bin"}) write_bytes(dir / name, "");
    CHECK(glob_files(dir / "val_*.bin", "--val-data").size() == 1);
    CHECK(glob_files(dir / "train_000002.bin", "--train-data").size() == 1);  // a name without a pattern
    const std::string want = (dir / "train_000001.bin.tmp") + " is not finished";
    for (const char* pattern : {"train_*.bin", "{train,val}_*.bin", "t*_0000*.bin", "t*1.bin"})
        CHECK_THROWS_WITH_AS(glob_files(dir / pattern, "--train-data"), doctest::Contains(want.c_str()), Error);
}

TEST_CASE("a pattern gives sorted names, may be a plain file, and must match one") {
    const TemporaryDirectory dir;
    for (const char* name :
         {"train_000010.bin", "train_000002.bin", "Train_000001.bin", "val_000000.bin", "odd[1].bin"})
        write_bytes(dir / name, "");
    using Names = std::vector<std::string>;
    CHECK(glob_files(dir / "train_*.bin", "--train-data") == Names{dir / "train_000002.bin", dir / "train_000010.bin"});
    CHECK(glob_files(dir / "[tT]rain_*.bin", "--train-data").front() == dir / "Train_000001.bin");  // sorted by bytes
    CHECK(glob_files(dir / "{train,val}_*.bin", "--train-data").size() == 3);
    CHECK(glob_files(dir / "odd[1].bin", "--train-data") == Names{dir / "odd[1].bin"});
    try {
        glob_files(dir / "nothing_*.bin", "--val-data");
        FAIL("a pattern that matches no file was accepted");
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_NO_INPUT);
        CHECK(std::string(error.what()).find("--val-data '") == 0);
    }
    CHECK_THROWS_WITH_AS(glob_files(dir.path, "--train-data"), doctest::Contains("is a folder"), Error);
}
