// test_shard.cpp: tests that token shards are written and read back, have the same bytes as llm.c's, and are refused if
// damaged; and tests patterns of file names.
#include "data/shard.h"

#include <cstring>
#include <numeric>

#include "base/common.h"
#include "base/files.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"
#include "support/test.h"

using Names = std::vector<std::string>;

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

static std::vector<int> read_shard(const std::string& path, int64_t begin, int64_t count, int vocab_size) {
    std::vector<int> tokens(size_t(count), -1);
    read_tokens(open_shard(path), begin, count, vocab_size, tokens.data());
    return tokens;
}

// Header fields and uint16 tokens 0, 1, 2, ..., byte for byte as llm.c's scripts write them.
static std::string llmc_bytes(std::vector<int32_t> fields, int tokens) {
    fields.resize(256);
    std::string bytes(1024 + 2 * tokens, '\0');
    memcpy(bytes.data(), fields.data(), 1024);
    for (int i = 0; i < tokens; i++) bytes[1024 + 2 * i] = char(i), bytes[1025 + 2 * i] = char(i >> 8);
    return bytes;
}

TEST_CASE("a shard of llm.c is read in parts, and the writer makes its bytes, under its name only by finish()") {
    const TemporaryDirectory dir;
    const std::string a = dir / "a.bin";
    write_bytes(a, llmc_bytes({20240520, 1, 1000}, 1000));
    CHECK(open_shard(a).bytes_per_token == 2);
    CHECK(read_shard(a, 0, 1000, 1000) == counting(1000));
    CHECK(read_shard(a, 997, 3, 1000) == std::vector<int>{997, 998, 999});
    {
        ShardWriter unfinished(dir / "b.bin", 50257), complete(dir / "c.bin", 50257);
        unfinished.append(counting(10).data(), 10);
        complete.complete();
        CHECK(complete.file == nullptr);  // no file stays open, so thousands of shards can wait for finish()
        CHECK(list_directory(dir.path) == Names{"a.bin", "b.bin.tmp", "c.bin.tmp"});
    }
    CHECK(list_directory(dir.path) == Names{"a.bin"});
    write_bytes(dir / "outside", "precious");
    std::filesystem::create_symlink(dir / "outside", dir / "b.bin.tmp");  // in the place of an unfinished shard
    ShardWriter writer(dir / "b.bin", 50257);
    writer.append(counting(600).data(), 256);
    writer.append(counting(600).data() + 256, 344);
    writer.finish();
    CHECK(read_bytes(dir / "b.bin") == llmc_bytes({20240520, 1, 600}, 600));
    CHECK(!std::filesystem::is_symlink(dir / "b.bin"));
    CHECK(read_bytes(dir / "outside") == "precious");
}

TEST_CASE("shards of a large vocabulary have four bytes per token, and may be larger than the writer's buffer") {
    const TemporaryDirectory dir;
    for (const int vocab_size : {65536, 100000}) {
        std::vector<int> tokens(500000);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int(i * 7919 % size_t(vocab_size));
        const std::string path = dir / format("%d.bin", vocab_size);
        write_shard(path, tokens, vocab_size);
        CHECK(open_shard(path).bytes_per_token == (vocab_size == 65536 ? 2 : 4));
        CHECK(open_shard(path).vocab_size == (vocab_size == 65536 ? 0 : vocab_size));  // 0: unknown
        CHECK(read_shard(path, 0, int64_t(tokens.size()), vocab_size) == tokens);
    }
    int32_t header[4];
    memcpy(header, read_bytes(dir / "100000.bin").data(), sizeof(header));
    CHECK(header[1] == 2);
    CHECK(header[3] == 100000);
}

TEST_CASE("the writer refuses tokens outside of the vocabulary and a missing folder, and leaves no file") {
    const TemporaryDirectory dir;
    const auto refused = [&](const std::string& name, int token) {
        return refusal([&] { write_shard(dir / name, {5, token}, 10); });
    };
    CHECK(contains(refused("a.bin", -1), "token -1"));
    CHECK(contains(refused("a.bin", 10), "token 10 is outside of the vocabulary of 10"));
    CHECK(refused("no/folder/a.bin", 5).starts_with("73 "));
    CHECK(list_directory(dir.path).empty());
}

TEST_CASE("a file that is not a whole shard is refused, and the message has its kind or the numbers") {
    const TemporaryDirectory dir;
    const std::string whole = llmc_bytes({20240520, 1, 20}, 20);
    const std::pair<std::string, const char*> cases[] = {
        {"\x93NUMPY\x01" + std::string(2000, ' '), "NumPy's"},
        {"text", "run train_gpt2 tokenize"},
        {llmc_bytes({1234567, 1, 10}, 10), "it starts with 1234567, not 20240520"},
        {llmc_bytes({20240520, 1, 20000}, 19999), "promises 20,000 tokens, so 41,024 bytes; the file has 41,022"},
        {llmc_bytes({20240520, 1, 10}, 11), "promises 10 tokens"},
        {llmc_bytes({20240520, 2, 10, 99999}, 10), "so 1,064 bytes; the file has 1,044"},
        {llmc_bytes({20240520, 1, -5}, 10), "promises -5 tokens"},
        {llmc_bytes({20240520, 1, 0x7fffffff}, 10), "promises 2,147,483,647 tokens"},
        {llmc_bytes({20240520, 3, 10}, 10), "shard version 3"},
        {llmc_bytes({20240520, 2, 10, 0}, 20), "states a vocabulary of 0 tokens, not 1 to 1048576"},
        {llmc_bytes({20240520, 2, 10, -1}, 20), "states a vocabulary of -1 tokens"},
        {llmc_bytes({20240520, 2, 10, 0x7fffffff}, 20), "states a vocabulary of 2147483647 tokens"},
        {"", "is not a token shard"},
        {whole.substr(0, 3), "is not a token shard"},
        {whole.substr(0, 1023), "cut off after"},
        {whole.substr(0, whole.size() - 1), "promises 20 tokens"},
    };
    for (const auto& [bytes, said] : cases) {
        const std::string message = said;
        CAPTURE(message);
        write_bytes(dir / "a.bin", bytes);
        const std::string refused = refusal([&] { open_shard(dir / "a.bin"); });
        CHECK(refused.starts_with("65 "));
        CHECK(contains(refused, message));
    }
    CHECK(exit_code_of([&] { open_shard(dir / "missing.bin"); }) == EXIT_NO_INPUT);
}

TEST_CASE("a token outside of the vocabulary is refused, and the message has its file and place") {
    const TemporaryDirectory dir;
    std::vector<int> tokens(100, 1);
    tokens[42] = 50257;
    write_shard(dir / "a.bin", tokens, 65536);
    CHECK(refusal([&] {
              read_shard(dir / "a.bin", 40, 10, 50257);
          }).starts_with("65 " + (dir / "a.bin") + ": token 42 (byte 1,108) is 50257, but the vocabulary has 50257"));
    std::string wide = llmc_bytes({20240520, 2, 5, 1000}, 10);
    std::fill_n(wide.end() - 4, 4, '\xff');
    write_bytes(dir / "wide.bin", wide);
    CHECK(contains(refusal([&] { read_shard(dir / "wide.bin", 4, 1, 1000); }), "is 4294967295, but the vocabulary"));
    read_shard(dir / "a.bin", 43, 57, 50257);  // the other tokens can be read
    Shard known = open_shard(dir / "a.bin");
    known.vocab_size = 50260;
    CHECK(contains(refusal([&] { read_tokens(known, 42, 1, 50257, tokens.data()); }),
                   ", and the tokenizer 50260: a new run with --init and --vocab-size 50260 adds the others"));
    read_shard(dir / "a.bin", 0, 42, 50257);
}

TEST_CASE("a pattern gives sorted names, may be a plain file, and must match one") {
    const TemporaryDirectory dir;
    for (const char* name : {"train_10.bin", "train_02.bin", "Train_01.bin", "val_00.bin", "odd[1].bin"})
        write_bytes(dir / name, "");
    const auto names = [&](const char* pattern) { return glob_files(dir / pattern, "--train-data"); };
    CHECK(names("train_*.bin") == Names{dir / "train_02.bin", dir / "train_10.bin"});
    CHECK(names("[tT]rain_*.bin").front() == dir / "Train_01.bin");  // sorted by bytes
    CHECK(names("{train,val}_*.bin").size() == 3);
    CHECK(names("odd[1].bin") == Names{dir / "odd[1].bin"});
    CHECK(glob_files((dir / "val_*.bin") + "\n" + (dir / "train_*.bin"), "-i") ==
          Names{dir / "train_02.bin", dir / "train_10.bin", dir / "val_00.bin"});
    for (const char* pattern : {"nothing_*.bin", "nothing.bin", "{x,y}.bin", "{x.bin", "~nobody/x.bin"})
        CHECK(
            refusal([&] { names(pattern); }).starts_with("66 --train-data '" + (dir / pattern) + "' matches no file"));
    CHECK(contains(refusal([&] { names("run[1]/*.bin"); }), "write a [ in a name as \\["));
    CHECK(contains(refusal([&] { names("."); }), "is a folder"));

    write_bytes(dir / "train_01.bin.tmp", "");  // a shard that is not finished
    for (const char* pattern : {"val_*.bin", "train_02.bin"}) CHECK(names(pattern).size() == 1);
    for (const char* pattern : {"train_*.bin", "{train,val}_*.bin"})
        CHECK(refusal([&] { names(pattern); }).starts_with("65 " + (dir / "train_01.bin.tmp") + " is not finished"));
}
