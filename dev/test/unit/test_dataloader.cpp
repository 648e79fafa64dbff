// test_dataloader.cpp: tests the order of the windows, which depends only on the seed, and errors in the thread that
// reads them.
//
// Token i of a corpus is i modulo a prime, so that the tokens of a window tell where it begins.
#include "data/dataloader.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>

#include "base/common.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"
#include "support/test.h"

static constexpr int T = 8, VOCAB = 9973;

// Writes shards of the given sizes, in the order of their names. Tokens continue from shard to shard.
static std::string write_corpus(const TemporaryDirectory& dir, const std::vector<int>& sizes) {
    int token = 0;
    for (size_t i = 0; i < sizes.size(); i++) {
        std::vector<int> tokens(sizes[i]);
        for (int& t : tokens) t = token++ % VOCAB;
        ShardWriter writer(dir / format("train_%06zu.bin", i + 1), VOCAB);
        writer.append(tokens.data(), int64_t(tokens.size()));
        writer.finish();
    }
    return dir / "train_*.bin";
}

static DataLoaderConfig config_for(const std::string& pattern, int B, int64_t windows_per_step) {
    DataLoaderConfig config;
    config.pattern = pattern, config.option = "--train-data";
    config.B = B, config.T = T, config.vocab_size = VOCAB, config.seed = 1;
    config.windows_per_step = windows_per_step, config.in_order = windows_per_step == 0;  // 0: for validation
    return config;
}

using Row = std::vector<int>;  // the T+1 tokens of a window
using Rows = std::vector<Row>;

static void append_rows(const Batch& batch, Rows& out) {
    for (int b = 0; b < batch.B; b++) {
        const std::vector<int> tokens = to_host(batch.tokens + b * batch.T, batch.T);
        const std::vector<int> targets = to_host(batch.targets + b * batch.T, batch.T);
        if (targets[0] != -1) CHECK(std::equal(tokens.begin() + 1, tokens.end(), targets.begin()));
        out.push_back(tokens);
        out.back().push_back(targets.back());
    }
}

static Rows read_rows(DataLoader& loader, int64_t calls) {
    Rows out;
    for (int64_t call = 0; call < calls; call++) append_rows(loader.next(), out);
    return out;
}

// The windows of each step, in the order of ranks and micro-batches.
static std::vector<Rows> run_steps(DataLoaderConfig config, int world_size, int steps) {
    std::vector<Rows> out(steps);
    for (int rank = 0; rank < world_size; rank++) {
        config.rank = rank, config.world_size = world_size;
        DataLoader loader(config);
        for (int step = 0; step < steps; step++) {
            CHECK(loader.position == step * config.windows_per_step);
            const Rows rows = read_rows(loader, config.windows_per_step / world_size / config.B);
            out[step].insert(out[step].end(), rows.begin(), rows.end());
        }
    }
    return out;
}

// Two random orders agree in one place on average, and in ten places with probability 1e-7.
TEST_CASE("every window occurs once per epoch, and each epoch and each seed has its own order") {
    for (int64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 257, 1000, 4097})
        for (int64_t epoch : {0, 1, 12345}) {
            CAPTURE(n);
            std::set<int64_t> seen;
            for (int64_t i = 0; i < n; i++) seen.insert(window_at(epoch * n + i, n, 42));
            CHECK(int64_t(seen.size()) == n);
            CHECK(*seen.begin() == 0);
            CHECK(*seen.rbegin() == n - 1);
        }
    const int64_t n = 1000;
    int in_order = 0, next_epoch = 0, next_seed = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        in_order += window_at(i, n, 1) == i;
        next_epoch += window_at(i, n, 1) == window_at(n + i, n, 1);
        next_seed += window_at(i, n, 1) == window_at(i, n, 2);
        sum += window_at(n + i, n, 1) == window_at(i, n, 2);  // not a function of seed + epoch
    }
    for (int same_places : {in_order, next_epoch, next_seed, sum}) CHECK(same_places < 10);
}

// The order belongs to the format of checkpoints: a change of it breaks every resumed run. The values were computed
// by an independent program (Philox and Feistel network in Python).
TEST_CASE("the order of windows is that of version 1") {
    std::vector<int64_t> got;
    for (int64_t g = 0; g < 12; g++) got.push_back(window_at(g, 10, 1234));
    CHECK(got == std::vector<int64_t>{3, 4, 1, 2, 8, 5, 9, 6, 0, 7, 9, 2});
    CHECK(window_at(123456789, 1000003, 7) == 8267);
    const int64_t n = (int64_t(1) << 45) - 12345;  // with 1024 tokens each, 36 * 10^15 tokens
    int64_t largest = 0;
    for (int64_t g = 0; g < 1000; g++) largest = std::max(largest, window_at(g, n, 1));
    CHECK(largest > n - n / 16);  // wrong with probability e^-64
    CHECK(largest < n);
}

TEST_CASE("a window lies in one shard, and neighbours overlap by one token") {
    const TemporaryDirectory dir;
    // With windows of 8+1 tokens, shards of 0 and 8 tokens have no window, 9 and 16 tokens have one, 17 have two.
    const Corpus corpus = open_corpus(write_corpus(dir, {9, 8, 0, 16, 17, 30}), "--train-data", T);
    CHECK(corpus.tokens == 80);
    CHECK(corpus.num_windows == 1 + 0 + 0 + 1 + 2 + 3);
    std::vector<int> starts, window_tokens(T + 1);
    for (int64_t window = 0; window < corpus.num_windows; window++) {
        read_window(corpus, window, VOCAB, window_tokens.data());
        for (int t = 0; t <= T; t++) CHECK(window_tokens[t] == window_tokens[0] + t);
        starts.push_back(window_tokens[0]);
    }
    CHECK(starts == std::vector<int>{0, 17, 33, 41, 50, 58, 66});
}

TEST_CASE("shards for vocabularies of different sizes are refused, and a link to a shard is no other shard") {
    const TemporaryDirectory dir;
    const std::vector<int> tokens(20, 7);
    const auto write = [&](const std::string& name, int vocab_size) {
        ShardWriter writer(dir / name, vocab_size);
        writer.append(tokens.data(), 20);
        writer.finish();
    };
    write("a.bin", 1000), write("b.bin", 70000);
    std::filesystem::create_symlink(dir / "b.bin", dir / "c.bin");
    std::filesystem::create_hard_link(dir / "b.bin", dir / "d.bin");
    const Corpus corpus = open_corpus(dir / "*.bin", "--train-data", T);
    CHECK(corpus.tokens == 40);
    CHECK(corpus.vocab_size == 70000);
    write("e.bin", 80000);
    CHECK(contains(refusal([&] { open_corpus(dir / "*.bin", "--train-data", T); }),
                   "e.bin is for a vocabulary of 80000 tokens, the shards before it for one of 70000"));
}

TEST_CASE("the fingerprint covers names, sizes and tokens of the files, but not their folder") {
    const TemporaryDirectory a, b, c, d;
    const auto of = [](const std::string& pattern) { return open_corpus(pattern, "--train-data", T).fingerprint; };
    const std::string pattern = write_corpus(a, {100, 300000}), path = a / "train_000002.bin", bytes = read_bytes(path);
    const uint64_t print = of(pattern);
    CHECK(of(write_corpus(b, {100, 300000})) == print);
    CHECK(of(write_corpus(c, {300000, 100})) != print);
    CHECK(of(write_corpus(d, {100})) != print);
    std::filesystem::rename(b / "train_000002.bin", b / "train_000003.bin");
    CHECK(of(b / "train_*.bin") != print);
    for (size_t at : {size_t(1024), bytes.size() - 1}) {
        std::string changed = bytes;
        changed[at] ^= 1;
        write_bytes(path, changed);
        CHECK(of(pattern) != print);
    }
}

TEST_CASE("a step reads the same windows for any micro-batch and any number of ranks, each once per epoch") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1500, 600});
    const int n = 187 + 74;  // no multiple of 24: a step crosses the end of the epoch
    const auto want = run_steps(config_for(pattern, 24, 24), 1, 25);
    Rows all;
    for (const Rows& step : want) all.insert(all.end(), step.begin(), step.end());
    const Rows first(all.begin(), all.begin() + n), second(all.begin() + n, all.begin() + 2 * n);
    CHECK(std::set(first.begin(), first.end()).size() == size_t(n));
    CHECK(std::set(second.begin(), second.end()).size() == size_t(n));
    CHECK(first != second);
    for (const auto& [ranks, sequences] : {std::pair{1, 1}, {1, 6}, {2, 3}, {2, 12}, {3, 2}, {3, 8}, {4, 1}, {4, 6}}) {
        const int world_size = ranks, B = sequences;
        CAPTURE(world_size);
        CAPTURE(B);
        CHECK(run_steps(config_for(pattern, B, 24), world_size, 25) == want);
    }
}

TEST_CASE("a loader that continues at a position reads the same windows as an uninterrupted one") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {2000});
    const Rows want = run_steps(config_for(pattern, 240, 240), 1, 1)[0];
    const auto windows = [&](int from, int to) { return Rows(want.begin() + from, want.begin() + to); };
    DataLoader first(config_for(pattern, 2, 8)), second(config_for(pattern, 2, 8));
    read_rows(first, 4 * 17 + 3);  // 17 steps, and 3 of the 4 calls of an interrupted step
    REQUIRE(first.position == 17 * 8);
    for (int calls_before : {0, 1, 7}) {  // also after the thread has read batches ahead
        read_rows(second, calls_before);
        second.seek(first.position);
        CHECK(read_rows(second, 4 * 13) == windows(17 * 8, 30 * 8));
        CHECK(second.position == 30 * 8);
    }
    // A run resumed with another global batch: 17 is not a multiple of 12.
    DataLoader other(config_for(pattern, 3, 12));
    other.seek(17);
    CHECK(read_rows(other, 12) == windows(17, 17 + 36));
    CHECK(other.position == 17 + 36);
    CHECK_THROWS_WITH_AS(other.seek(-8), doctest::Contains("data position -8 is negative"), Error);
}

TEST_CASE("a batch does not change until the next call of next(), and a loader can be destroyed at any moment") {
    const TemporaryDirectory dir;
    const DataLoaderConfig config = config_for(write_corpus(dir, {5000}), 4, 4);
    DataLoader loader(config);
    for (int call = 0; call < 20; call++) {
        const Batch batch = loader.next();
        Rows before, after;
        append_rows(batch, before);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // enough for the thread to read ahead
        append_rows(batch, after);
        CHECK(before == after);
    }
    for (int calls = 0; calls < 200; calls++) {
        DataLoader other(config);
        for (int call = 0; call < calls % 5; call++) other.next();
        if (calls % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * (calls % 7)));
    }
}

TEST_CASE("each validation pass reads the same windows in the same order, and pads the last batch") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 60});  // 12 + 7 windows
    for (const auto& [ranks, sequences] : {std::pair{1, 1}, {1, 19}, {1, 32}, {2, 4}, {2, 5}, {3, 1}, {3, 5}}) {
        const int world_size = ranks, B = sequences;
        CAPTURE(world_size);
        CAPTURE(B);
        DataLoaderConfig config = config_for(pattern, B, 0);
        config.world_size = world_size;
        std::multiset<Row> seen;
        int64_t valid = 0;
        for (config.rank = 0; config.rank < world_size; config.rank++) {
            DataLoader loader(config);
            CHECK(loader.num_batches == ceil_div(19, B * world_size));
            Rows first_pass;
            for (int64_t i = 0; i < loader.num_batches; i++) {
                const Batch batch = loader.next();
                valid += batch.valid_tokens;
                append_rows(batch, first_pass);
            }
            CHECK(read_rows(loader, loader.num_batches) == first_pass);
            for (const Row& row : first_pass)
                if (row.back() != -1) seen.insert(row);
        }
        CHECK(seen.size() == 19);
        CHECK(std::set(seen.begin(), seen.end()).size() == 19);
        CHECK(valid == 19 * T);
    }
    DataLoaderConfig config = config_for(pattern, 4, 0);
    config.max_windows = 8;
    DataLoader loader(config);
    CHECK(loader.num_batches == 2);
    const Rows rows = read_rows(loader, 4);
    for (int i = 0; i < 16; i++) CHECK(rows[i][0] == i % 8 * T);
    config.max_windows = 100;
    CHECK(DataLoader(config).num_batches == 5);
    config.max_windows = 6;  // the last micro-batch has two rows of padding
    DataLoader six(config);
    CHECK(six.num_batches == 2);
    CHECK(six.next().valid_tokens + six.next().valid_tokens == 6 * T);
}

TEST_CASE("a corpus too small for one step is refused, and the message has the arithmetic") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 60});
    const auto refused = [&](int64_t windows_per_step, int seq_len) {
        DataLoaderConfig config = config_for(pattern, 1, windows_per_step);
        config.T = seq_len;
        return refusal([&] { DataLoader loader(config); });
    };
    CHECK(refused(19, T).empty());
    CHECK(refused(20, T).starts_with("65 --train-data '" + pattern + "' has 19 windows of --seq-len 8 + 1 tokens"));
    CHECK(contains(refused(20, T), "one step needs 20 = --global-batch 160 / 8; give more text, or lower"));
    CHECK(contains(refused(0, 100), "has 0 windows of --seq-len 100 + 1 tokens"));
}

TEST_CASE("an error in the reading thread is thrown by every call of next()") {
    const TemporaryDirectory dir;
    const std::string file = dir / "train_000001.bin", pattern = write_corpus(dir, {1000});
    write_bytes(dir / "bad", read_bytes(file).substr(0, 1024) + std::string(2000, '\xff'));
    const std::pair<std::function<void()>, std::string> cases[] = {
        {[&] { std::filesystem::resize_file(file, 1024); }, "65 " + file + ": became shorter"},
        {[&] { std::filesystem::remove(file); }, "66 " + file + ": cannot open: No such file or directory"},
        {[&] { std::filesystem::rename(dir / "bad", file); }, "is 65535, but the vocabulary has 9973 tokens"},
    };
    DataLoader loader(config_for(pattern, 2, 2));
    for (const auto& [damage, said] : cases) {
        const std::string message = said;
        CAPTURE(message);
        read_rows(loader, 1);
        damage();
        const std::string refused = refusal([&] { read_rows(loader, 5); });  // at most two are in memory
        CHECK(contains(refused, message));
        CHECK(contains(refused, "mend or replace this file, or leave it out of --train"));
        CHECK(refusal([&] { read_rows(loader, 1); }) == refused);

        // With the file restored the loader continues from the last step.
        write_corpus(dir, {1000});
        loader.seek(loader.position);
        read_rows(loader, 5);
    }
}
