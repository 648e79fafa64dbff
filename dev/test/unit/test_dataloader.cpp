// test_dataloader.cpp: tests the order of the windows, which depends only on the seed, and errors in the thread that
// reads them.
//
// Token i of a corpus is i modulo a prime, so that the tokens of a window tell where it begins.
#include "data/dataloader.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "base/common.h"
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

static std::vector<std::vector<int>> rows(const Batch& batch) {
    std::vector<std::vector<int>> out;
    for (int b = 0; b < batch.B; b++) {
        const std::vector<int> tokens = to_host(batch.tokens + b * batch.T, batch.T);
        const std::vector<int> targets = to_host(batch.targets + b * batch.T, batch.T);
        if (targets[0] != -1) CHECK(std::equal(tokens.begin() + 1, tokens.end(), targets.begin()));
        out.push_back(tokens);
        out.back().push_back(targets.back());
    }
    return out;
}

// The windows of each step, in the order of ranks and micro-batches.
using Steps = std::vector<std::vector<std::vector<int>>>;
static Steps run_steps(DataLoaderConfig config, int world_size, int steps) {
    Steps out(steps);
    const int64_t calls = config.windows_per_step / world_size / config.B;
    for (int rank = 0; rank < world_size; rank++) {
        config.rank = rank, config.world_size = world_size;
        DataLoader loader(config);
        for (int step = 0; step < steps; step++) {
            CHECK(loader.position == step * config.windows_per_step);
            for (int64_t call = 0; call < calls; call++)
                for (const std::vector<int>& row : rows(loader.next())) out[step].push_back(row);
        }
    }
    return out;
}

TEST_CASE("every window occurs once per epoch, for any number of windows") {
    for (int64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 257, 1000, 4097, 100003})
        for (int64_t epoch : {0, 1, 12345}) {
            CAPTURE(n);
            std::vector<int> seen(n);
            for (int64_t g = epoch * n; g < (epoch + 1) * n; g++) {
                const int64_t window = window_at(g, n, 42);
                REQUIRE(window >= 0);
                REQUIRE(window < n);
                seen[window]++;
            }
            CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
        }
}

TEST_CASE("2^45 windows are shuffled over their whole range") {
    const int64_t n = int64_t(1) << 45;  // with 1024 tokens each, 36 * 10^15 tokens
    std::set<int64_t> seen;
    for (int64_t g = 0; g < 1000; g++) seen.insert(window_at(g, n - 12345, 1));
    CHECK(seen.size() == 1000);
    CHECK(*seen.rbegin() > n - n / 16);  // 1000 random windows are all below this with probability e^-64
    CHECK(*seen.begin() < n / 16);
}

TEST_CASE("each epoch and each seed has its own order, which is the same every time") {
    const int64_t n = 1000;
    const auto order = [&](int64_t epoch, uint64_t seed) {
        std::vector<int64_t> windows(n);
        for (int64_t i = 0; i < n; i++) windows[i] = window_at(epoch * n + i, n, seed);
        return windows;
    };
    // Two random orders agree in one place on average, and in ten places with probability 1e-7.
    const auto same_places = [&](const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
        return std::inner_product(a.begin(), a.end(), b.begin(), 0, std::plus<>(), std::equal_to<>());
    };
    CHECK(order(0, 1) == order(0, 1));
    CHECK(same_places(order(0, 1), order(1, 1)) < 10);
    CHECK(same_places(order(0, 1), order(0, 2)) < 10);
    CHECK(same_places(order(1, 1), order(0, 2)) < 10);  // would fail if the order depended on seed + epoch
    std::vector<int64_t> in_order(n);
    std::iota(in_order.begin(), in_order.end(), 0);
    CHECK(same_places(order(0, 1), in_order) < 10);
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
// with 9 degrees of freedom exceeds 40 with probability 1e-5; with 99, it exceeds 180 with probability 1e-6. The seeds
// are fixed, so the result never changes.
TEST_CASE("a small number of windows is shuffled uniformly") {
    constexpr int n = 10, seeds = 10000;
    double single[n] = {}, pairs[n][n] = {};
    for (int seed = 0; seed < seeds; seed++) {
        const int64_t a = window_at(3, n, uint64_t(seed)), b = window_at(4, n, uint64_t(seed));
        single[a]++, pairs[a][b]++;
    }
    double chi_single = 0, chi_pairs = 0;
    for (int a = 0; a < n; a++) {
        const double want = double(seeds) / n, want_pair = double(seeds) / (n * (n - 1));
        chi_single += (single[a] - want) * (single[a] - want) / want;
        for (int b = 0; b < n; b++)
            if (b != a) chi_pairs += (pairs[a][b] - want_pair) * (pairs[a][b] - want_pair) / want_pair;
        CHECK(pairs[a][a] == 0);
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

TEST_CASE("the fingerprint depends on names and sizes of the files, and not on their folder") {
    const TemporaryDirectory a, b, c, d;
    const uint64_t print = open_corpus(write_corpus(a, {100, 50}), "--train-data", T).fingerprint;
    CHECK(open_corpus(write_corpus(b, {100, 50}), "--train-data", T).fingerprint == print);
    CHECK(open_corpus(write_corpus(c, {50, 100}), "--train-data", T).fingerprint != print);
    CHECK(open_corpus(write_corpus(d, {100}), "--train-data", T).fingerprint != print);
    std::filesystem::rename(b / "train_000002.bin", b / "train_000003.bin");
    CHECK(open_corpus(b / "train_*.bin", "--train-data", T).fingerprint != print);
}

// The fingerprint with one bit of the byte `at` flipped.
static uint64_t fingerprint_with(const std::string& pattern, const std::string& path, size_t at) {
    std::string bytes = read_bytes(path);
    REQUIRE(at < bytes.size());
    bytes[at] ^= 1;
    write_bytes(path, bytes);
    const uint64_t print = open_corpus(pattern, "--train-data", T).fingerprint;
    bytes[at] ^= 1;
    write_bytes(path, bytes);
    return print;
}

TEST_CASE("the fingerprint covers all bytes of small files, and four places of large ones") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 300000});  // 600 KB
    const std::string small = dir / "train_000001.bin", large = dir / "train_000002.bin";
    const uint64_t print = open_corpus(pattern, "--train-data", T).fingerprint;
    for (size_t at : {1024, 1100, 1223}) CHECK(fingerprint_with(pattern, small, at) != print);
    constexpr size_t size = 1024 + 2 * 300000, piece = 64 << 10, third = (size - piece) / 3;
    for (size_t at : {size_t(1024), piece - 1, third, third + piece - 1, 2 * third, size - piece, size - 1})
        CHECK(fingerprint_with(pattern, large, at) != print);
    CHECK(fingerprint_with(pattern, large, piece) == print);  // this byte is between two of the four places
    CHECK(open_corpus(pattern, "--train-data", T).fingerprint == print);
}

TEST_CASE("of many files the fingerprint covers the first and the last bytes") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, std::vector<int>(180, 100000));  // 201 KB each
    const uint64_t print = open_corpus(pattern, "--train-data", T).fingerprint;
    for (size_t at : {1024, 65535, 201023 - 65535, 201023})
        CHECK(fingerprint_with(pattern, dir / "train_000180.bin", at) != print);
    CHECK(fingerprint_with(pattern, dir / "train_000001.bin", 100000) == print);
}

TEST_CASE("the loader reads every window once per epoch, and the next epoch follows without a gap") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1000, 700, 333});
    const int64_t n = open_corpus(pattern, "--train-data", T).num_windows;
    REQUIRE(n == 124 + 87 + 41);
    REQUIRE(n % 12 == 0);  // the last step of 12 windows ends with the epoch
    const Steps steps = run_steps(config_for(pattern, 3, 12), 1, int(2 * n / 12));
    for (int epoch : {0, 1}) {
        std::map<std::vector<int>, int> times;
        for (int step = 0; step < int(n / 12); step++)
            for (const auto& row : steps[epoch * (n / 12) + step]) times[row]++;
        CHECK(int64_t(times.size()) == n);
    }
    CHECK(steps[0] != steps[n / 12]);

    // 20 does not divide the epoch: the step that crosses its end starts the next one.
    const Steps across = run_steps(config_for(pattern, 4, 20), 1, int(2 * n / 20));
    std::map<std::vector<int>, int> times;
    int position = 0;
    for (const auto& step : across)
        for (const auto& row : step)
            if (position++ < n) times[row]++;
    CHECK(int64_t(times.size()) == n);
}

TEST_CASE("a step reads the same windows for any micro-batch and any number of ranks") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1500, 600});
    const Steps want = run_steps(config_for(pattern, 24, 24), 1, 25);  // 600 positions, 261 windows: three epochs
    for (int world_size : {1, 2, 3, 4})
        for (int B : {1, 2, 3, 6, 12, 24}) {
            if (24 % (B * world_size) != 0) continue;
            CAPTURE(world_size);
            CAPTURE(B);
            CHECK(run_steps(config_for(pattern, B, 24), world_size, 25) == want);
        }
}

TEST_CASE("a loader that continues at a position reads the same windows as an uninterrupted one") {
    const TemporaryDirectory dir;
    const DataLoaderConfig config = config_for(write_corpus(dir, {1500}), 2, 8);
    Steps want = run_steps(config, 1, 60);
    DataLoader first(config);
    for (int call = 0; call < 4 * 17 + 3; call++)
        first.next();  // 17 steps, and 3 of the 4 calls of an interrupted step
    REQUIRE(first.position == 17 * 8);

    DataLoader second(config);
    for (int calls_before : {0, 1, 2, 7}) {  // also after the thread has read batches ahead
        for (int call = 0; call < calls_before; call++) second.next();
        second.seek(first.position);
        CHECK(second.position == first.position);
        for (int step = 17; step < 30; step++) {
            std::vector<std::vector<int>> got;
            for (int call = 0; call < 4; call++)
                for (const auto& row : rows(second.next())) got.push_back(row);
            CHECK(got == want[step]);
        }
        CHECK(second.position == 30 * 8);
    }
    CHECK_THROWS_WITH_AS(second.seek(-8), doctest::Contains("data position -8 is negative"), Error);
    second.next();  // the loader still works
}

TEST_CASE("a run resumed with another global batch neither repeats nor skips a window") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1500});
    Steps in_ones = run_steps(config_for(pattern, 1, 1), 1, 100);
    DataLoader loader(config_for(pattern, 3, 12));
    loader.seek(17);  // not a multiple of 12
    for (int position = 17; position < 17 + 36; position += 3) {
        const auto got = rows(loader.next());
        for (int b = 0; b < 3; b++) CHECK(got[b] == in_ones[position + b][0]);
    }
    CHECK(loader.position == 17 + 36);
}

TEST_CASE("a batch does not change until the next call of next()") {
    const TemporaryDirectory dir;
    DataLoader loader(config_for(write_corpus(dir, {5000}), 4, 4));
    for (int call = 0; call < 20; call++) {
        const Batch batch = loader.next();
        const auto before = rows(batch);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // enough for the thread to read ahead
        CHECK(rows(batch) == before);
    }
}

TEST_CASE("each validation pass reads the same windows in the same order, and pads the last batch") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 60});  // 12 + 7 windows
    for (int world_size : {1, 2, 3})
        for (int B : {1, 4, 5, 19, 32}) {
            CAPTURE(world_size);
            CAPTURE(B);
            DataLoaderConfig config = config_for(pattern, B, 0);
            config.in_order = true, config.world_size = world_size;
            std::map<std::vector<int>, int> times;
            int64_t valid = 0, padded = 0, batches = 0;
            for (config.rank = 0; config.rank < world_size; config.rank++) {
                DataLoader loader(config);
                batches = loader.num_batches;
                std::vector<std::vector<int>> first_pass, second_pass;
                for (int pass : {0, 1})
                    for (int64_t i = 0; i < loader.num_batches; i++) {
                        const Batch batch = loader.next();
                        if (pass == 0) valid += batch.valid_tokens;
                        for (const auto& row : rows(batch)) {
                            (pass ? second_pass : first_pass).push_back(row);
                            if (pass == 0) row.back() == -1 ? padded++ : times[row]++;
                        }
                    }
                CHECK(first_pass == second_pass);
            }
            CHECK(times.size() == 19);
            CHECK(valid == 19 * T);
            CHECK(batches == ceil_div(19, B * world_size));
            CHECK(padded == batches * B * world_size - 19);
        }
}

TEST_CASE("validation reads max_batches batches, or all where there are fewer") {
    const TemporaryDirectory dir;
    DataLoaderConfig config = config_for(write_corpus(dir, {100}), 4, 0);  // 12 windows
    config.in_order = true;
    config.max_batches = 2;
    DataLoader loader(config);
    CHECK(loader.num_batches == 2);
    for (int pass : {0, 1})
        for (int first : {0, 4}) {
            CAPTURE(pass);
            const auto got = rows(loader.next());
            for (int b = 0; b < 4; b++) CHECK(got[b][0] == (first + b) * T);
        }
    config.max_batches = 100;
    CHECK(DataLoader(config).num_batches == 3);
}

TEST_CASE("a corpus too small for one step is refused, and the message has the arithmetic") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {100, 60});
    const auto refusal = [&](const DataLoaderConfig& config) {
        try {
            DataLoader loader(config);
        } catch (const Error& error) {
            CHECK(error.exit_code == EXIT_BAD_DATA);
            return std::string(error.what());
        }
        return std::string("accepted");
    };
    CHECK(
        refusal(config_for(pattern, 1, 20)) ==
        "--train-data '" + pattern +
            "' has 19 windows of --seq-len 8 + 1 tokens (160 tokens, 2 files), but one step needs 20 = --global-batch "
            "160 / 8; give more text, or lower --global-batch or --seq-len");
    CHECK(refusal(config_for(pattern, 1, 19)) == "accepted");
    DataLoaderConfig one = config_for(pattern, 1, 20);
    one.T = 60;
    CHECK(refusal(one).find("has 1 window of --seq-len 60 + 1 tokens") != std::string::npos);
    DataLoaderConfig validation = config_for(pattern, 1, 0);
    validation.T = 100, validation.in_order = true;
    CHECK(refusal(validation).find("has 0 windows of --seq-len 100 + 1 tokens") != std::string::npos);
}

TEST_CASE("a global batch that is not a multiple of micro-batches and ranks is refused") {
    const TemporaryDirectory dir;
    const std::string pattern = write_corpus(dir, {1000});
    CHECK_THROWS_WITH_AS(DataLoader(config_for(pattern, 3, 8)),
                         doctest::Contains("8 windows per step are not a multiple of 3"), Error);
    DataLoaderConfig config = config_for(pattern, 2, 8);
    config.world_size = 3;
    CHECK_THROWS_AS(DataLoader{config}, Error);
    config.world_size = 2, config.rank = 2;
    CHECK_THROWS_AS(DataLoader{config}, Error);
}

TEST_CASE("an error in the reading thread is thrown by every call of next()") {
    const TemporaryDirectory dir;
    const DataLoaderConfig config = config_for(write_corpus(dir, {1000}), 2, 2);
    DataLoader loader(config);
    loader.next();
    const std::string file = dir / "train_000001.bin";
    std::filesystem::resize_file(file, 1024);
    const auto drain = [&] {
        for (int call = 0; call < 5; call++) loader.next();  // at most two are in memory
    };
    CHECK_THROWS_WITH_AS(drain(), doctest::Contains((file + ": became shorter").c_str()), Error);
    CHECK_THROWS_AS(loader.next(), Error);

    // With the file restored the loader continues from the last step.
    std::filesystem::remove(file);
    write_corpus(dir, {1000});
    loader.seek(loader.position);
    for (int call = 0; call < 5; call++) loader.next();
}

TEST_CASE("a shard that is missing is an error of the batch that needs it") {
    const TemporaryDirectory dir;
    DataLoader loader(config_for(write_corpus(dir, {1000}), 2, 2));
    loader.next();
    std::filesystem::remove(dir / "train_000001.bin");
    CHECK(refusal([&] {
              for (int call = 0; call < 10; call++) loader.next();
          }) == "66 " + (dir / "train_000001.bin") + ": cannot open: No such file or directory");
}

TEST_CASE("a token outside of the vocabulary is refused before it is used") {
    const TemporaryDirectory dir;
    DataLoaderConfig config = config_for(write_corpus(dir, {1000}), 1, 1);
    config.vocab_size = 900;
    DataLoader loader(config);
    const auto epoch = [&] {
        for (int call = 0; call < 124; call++) {
            const auto got = rows(loader.next());
            for (int token : got[0]) REQUIRE(token < 900);
        }
    };
    CHECK_THROWS_WITH_AS(epoch(), doctest::Contains("the vocabulary has 900"), Error);
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
