// test_dataloader.cpp: tests the order of the windows, which depends only on the seed, and errors in the thread that
// reads them.
//
// Token i of a corpus is i modulo a prime, so that the tokens of a window tell where it begins.
#include "data/dataloader.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
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
    return {.pattern = pattern,
            .option = "--train-data",
            .B = B,
            .T = T,
            .vocab_size = VOCAB,
            .seed = 1,
            .windows_per_step = windows_per_step};
}

static DataLoaderConfig validation_for(const std::string& pattern, int B) {
    DataLoaderConfig config = config_for(pattern, B, 0);
    config.in_order = true;
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

TEST_CASE("every window occurs once per epoch, for any number of windows") {
    for (int64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 257, 1000, 4097})
        for (int64_t epoch : {0, 1, 12345}) {
            CAPTURE(n);
            std::set<int64_t> seen;
            for (int64_t i = 0; i < n; i++) seen.insert(window_at(epoch * n + i, n, 42));
            CHECK(int64_t(seen.size()) == n);
            CHECK(*seen.begin() == 0);
            CHECK(*seen.rbegin() == n - 1);
        }
    const int64_t n = int64_t(1) << 45;  // with 1024 tokens each, 36 * 10^15 tokens
    std::set<int64_t> seen;
    for (int64_t g = 0; g < 1000; g++) seen.insert(window_at(g, n - 12345, 1));
    CHECK(seen.size() == 1000);
    CHECK(*seen.rbegin() > n - n / 16);  // 1000 random windows are all below this with probability e^-64
    CHECK(*seen.begin() < n / 16);
}

// Two random orders agree in one place on average, and in ten places with probability 1e-7.
TEST_CASE("each epoch and each seed has its own order") {
    const int64_t n = 1000;
    const auto same_places = [&](int64_t epoch, uint64_t seed, const std::function<int64_t(int64_t)>& other) {
        int same = 0;
        for (int64_t i = 0; i < n; i++) same += window_at(epoch * n + i, n, seed) == other(i);
        return same;
    };
    CHECK(same_places(0, 1, [](int64_t i) { return i; }) < 10);
    CHECK(same_places(0, 1, [&](int64_t i) { return window_at(n + i, n, 1); }) < 10);
    CHECK(same_places(0, 1, [&](int64_t i) { return window_at(i, n, 2); }) < 10);
    CHECK(same_places(1, 1, [&](int64_t i) { return window_at(i, n, 2); }) < 10);  // not a function of seed + epoch
}

// The order belongs to the format of checkpoints: a change of it breaks every resumed run. The values were computed
// by an independent program (Philox and Feistel network in Python).
TEST_CASE("the order of windows is that of version 1") {
    std::vector<int64_t> got;
    for (int64_t g = 0; g < 12; g++) got.push_back(window_at(g, 10, 1234));
    CHECK(got == std::vector<int64_t>{3, 4, 1, 2, 8, 5, 9, 6, 0, 7, 9, 2});
    CHECK(window_at(123456789, 1000003, 7) == 8267);
}

// Over many seeds, all windows occur equally often at each place, and at each pair of neighbouring places. Chi-square
// with 9 degrees of freedom exceeds 40 with probability 1e-5; with 89, it exceeds 180 with probability 1e-7. The seeds
// are fixed, so the result never changes.
TEST_CASE("a small number of windows is shuffled uniformly") {
    constexpr int n = 10, seeds = 10000;
    double single[n] = {}, pairs[n][n] = {}, chi_single = 0, chi_pairs = 0;
    for (int seed = 0; seed < seeds; seed++) {
        const int64_t a = window_at(3, n, uint64_t(seed)), b = window_at(4, n, uint64_t(seed));
        single[a]++, pairs[a][b]++;
    }
    const auto term = [](double got, double want) { return (got - want) * (got - want) / want; };
    for (int a = 0; a < n; a++) {
        chi_single += term(single[a], double(seeds) / n);
        for (int b = 0; b < n; b++)
            if (b != a) chi_pairs += term(pairs[a][b], double(seeds) / (n * (n - 1)));
    }
    CHECK(chi_single < 40);
    CHECK(chi_pairs < 180);
}

TEST_CASE("a window lies in one shard, and neighbours overlap by one token") {
    const TemporaryDirectory dir;
    // With windows of 8+1 tokens, shards of 0 and 8 tokens have no window, 9 and 16 tokens have one, 17 have two.
    const Corpus corpus = open_corpus(write_corpus(dir, {9, 8, 0, 16, 17, 30}), "--train-data", T);
    CHECK(corpus.shards.size() == 6);
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

static uint64_t fingerprint_of(const std::string& pattern) {
    return open_corpus(pattern, "--train-data", T).fingerprint;
}

TEST_CASE("the fingerprint depends on names and sizes of the files, and not on their folder") {
    const TemporaryDirectory a, b, c, d;
    const uint64_t print = fingerprint_of(write_corpus(a, {100, 50}));
    CHECK(fingerprint_of(write_corpus(b, {100, 50})) == print);
    CHECK(fingerprint_of(write_corpus(c, {50, 100})) != print);
    CHECK(fingerprint_of(write_corpus(d, {100})) != print);
    std::filesystem::rename(b / "train_000002.bin", b / "train_000003.bin");
    CHECK(fingerprint_of(b / "train_*.bin") != print);
}

TEST_CASE("the fingerprint covers small files, four places of large ones, and two where there are many files") {
    constexpr size_t large = 1024 + 2 * 300000, piece = 64 << 10, third = (large - piece) / 3;
    const struct {
        std::vector<int> sizes;
        size_t shard;  // of which one bit is changed
        std::vector<size_t> covered;
        size_t not_covered;
    } cases[] = {
        {{100, 300000}, 1, {1024, 1100, 1223}, 0},
        {{100, 300000}, 2, {1024, piece - 1, third, third + piece - 1, 2 * third, large - piece, large - 1}, piece},
        {std::vector<int>(180, 0), 180, {1024, piece - 1, large - piece, large - 1}, third},
    };
    for (const auto& c : cases) {
        const TemporaryDirectory dir;
        std::vector<int> sizes = c.sizes;
        if (c.shard > 1) sizes.back() = 300000;
        const std::string pattern = write_corpus(dir, sizes), path = dir / format("train_%06zu.bin", c.shard);
        const uint64_t print = fingerprint_of(pattern);
        const std::string bytes = read_bytes(path);
        const auto changed_at = [&](size_t at) {
            std::string changed = bytes;
            changed[at] ^= 1;
            write_bytes(path, changed);
            return fingerprint_of(pattern) != print;
        };
        for (size_t at : c.covered) CHECK(changed_at(at));
        if (c.not_covered) CHECK_FALSE(changed_at(c.not_covered));
    }
}

TEST_CASE("the loader reads every window once per epoch, and the next epoch follows without a gap") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1000, 700, 333});
    const int n = 124 + 87 + 41;
    for (int per_step : {12, 20}) {  // the last step of 12 windows ends with the epoch, of 20 crosses its end
        Rows all;
        for (const Rows& step : run_steps(config_for(pattern, 4, per_step), 1, 2 * n / per_step))
            all.insert(all.end(), step.begin(), step.end());
        const Rows first(all.begin(), all.begin() + n), second(all.begin() + n, all.end());
        CHECK(std::set(first.begin(), first.end()).size() == size_t(n));
        CHECK(std::set(second.begin(), second.end()).size() == second.size());
        CHECK(!std::equal(second.begin(), second.end(), first.begin()));
    }
}

TEST_CASE("a step reads the same windows for any micro-batch and any number of ranks") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1500, 600});
    const auto want = run_steps(config_for(pattern, 24, 24), 1, 25);  // 600 positions, 261 windows: three epochs
    for (const auto& [world_size, B] : {std::pair{1, 1}, {1, 6}, {2, 3}, {2, 12}, {3, 2}, {3, 8}, {4, 1}, {4, 6}}) {
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
    DataLoader first(config_for(pattern, 2, 8));
    read_rows(first, 4 * 17 + 3);  // 17 steps, and 3 of the 4 calls of an interrupted step
    REQUIRE(first.position == 17 * 8);

    DataLoader second(config_for(pattern, 2, 8));
    for (int calls_before : {0, 1, 2, 7}) {  // also after the thread has read batches ahead
        read_rows(second, calls_before);
        second.seek(first.position);
        CHECK(second.position == first.position);
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

TEST_CASE("a batch does not change until the next call of next()") {
    const TemporaryDirectory dir;
    DataLoader loader(config_for(write_corpus(dir, {5000}), 4, 4));
    for (int call = 0; call < 20; call++) {
        const Batch batch = loader.next();
        Rows before, after;
        append_rows(batch, before);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // enough for the thread to read ahead
        append_rows(batch, after);
        CHECK(before == after);
    }
}

TEST_CASE("each validation pass reads the same windows in the same order, and pads the last batch") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 60});  // 12 + 7 windows
    for (int world_size : {1, 2, 3})
        for (int B : {1, 4, 5, 19, 32}) {
            CAPTURE(world_size);
            CAPTURE(B);
            DataLoaderConfig config = validation_for(pattern, B);
            config.world_size = world_size;
            std::set<Row> seen;
            int64_t windows = 0, valid = 0;
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
                    if (row.back() != -1) seen.insert(row), windows++;
            }
            CHECK(windows == 19);
            CHECK(seen.size() == 19);
            CHECK(valid == 19 * T);
        }
}

TEST_CASE("validation reads max_batches batches, or all where there are fewer") {
    const TemporaryDirectory dir;
    DataLoaderConfig config = validation_for(write_corpus(dir, {100}), 4);  // 12 windows
    config.max_batches = 2;
    DataLoader loader(config);
    CHECK(loader.num_batches == 2);
    const Rows rows = read_rows(loader, 4);
    for (int i = 0; i < 16; i++) CHECK(rows[i][0] == i % 8 * T);
    config.max_batches = 100;
    CHECK(DataLoader(config).num_batches == 3);
}

TEST_CASE("a corpus too small for one step is refused, and the message has the arithmetic") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 60});
    const auto refused = [](DataLoaderConfig config, int seq_len) {
        config.T = seq_len;
        return refusal([&] { DataLoader loader(config); });
    };
    CHECK(
        refused(config_for(pattern, 1, 20), T) ==
        "65 --train-data '" + pattern +
            "' has 19 windows of --seq-len 8 + 1 tokens (160 tokens, 2 files), but one step needs 20 = --global-batch "
            "160 / 8; give more text, or lower --global-batch or --seq-len");
    CHECK(refused(config_for(pattern, 1, 19), T).empty());
    CHECK(contains(refused(config_for(pattern, 1, 20), 60), "has 1 window of --seq-len 60 + 1 tokens"));
    CHECK(contains(refused(validation_for(pattern, 1), 100), "has 0 windows of --seq-len 100 + 1 tokens"));
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
    for (const auto& [damage, message] : cases) {
        CAPTURE(message);
        read_rows(loader, 1);
        damage();
        CHECK(contains(refusal([&] { read_rows(loader, 5); }), message));  // at most two are in memory
        CHECK(contains(refusal([&] { read_rows(loader, 1); }), message));

        // With the file restored the loader continues from the last step.
        write_corpus(dir, {1000});
        loader.seek(loader.position);
        read_rows(loader, 5);
    }
}

TEST_CASE("a loader can be destroyed at any moment") {
    const TemporaryDirectory dir;
    const DataLoaderConfig config = config_for(write_corpus(dir, {3000}), 8, 16);
    for (int calls = 0; calls < 200; calls++) {
        DataLoader loader(config);
        for (int call = 0; call < calls % 5; call++) loader.next();
        if (calls % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * (calls % 7)));
    }
    DataLoader waiting(config);  // both slots full: the thread waits
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}
