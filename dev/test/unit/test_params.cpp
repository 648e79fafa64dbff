// test_params.cpp: tests the table of parameter tensors and their layout in one flat buffer: sizes, offsets, buckets,
// initial values, and the shards of tensor parallelism.
#include "model/params.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <omp.h>
#include <xxhash.h>

#include "support/parse.h"
#include "support/refusal.h"

TEST_CASE("the named sizes have the numbers of parameters of GPT-2 and GPT-3") {
    const struct {
        const char *name, *alias;
        int64_t parameters;
        int max_T, HS;
    } sizes[] = {{"d12", "gpt2", 124439808, 1024, 64},
                 {"d24", "gpt2-medium", 354823168, 1024, 64},
                 {"d36", "gpt2-large", 774030080, 1024, 64},
                 {"d48", "gpt2-xl", 1557611200, 1024, 64},
                 {"gpt3-125m", "gpt3-125m", 125226240, 2048, 64},
                 {"gpt3-350m", "gpt3-350m", 355871744, 2048, 64},
                 {"gpt3-760m", "gpt3-760m", 760300032, 2048, 96},
                 {"gpt3-1.3b", "gpt3-1.3b", 1315723264, 2048, 128},
                 {"gpt3-2.7b", "gpt3-2.7b", 2651553280, 2048, 80},
                 {"gpt3-6.7b", "gpt3-6.7b", 6658404352, 2048, 128},
                 {"gpt3-13b", "gpt3-13b", 12853386240, 2048, 128}};
    for (const auto& size : sizes) {
        const GPT2Config config = config_by_name(size.name);
        CAPTURE(size.name);
        CHECK(config == config_by_name(size.alias));
        CHECK(count_parameters(config) == size.parameters);
        CHECK(config.max_T == size.max_T);
        CHECK(config.HS() == size.HS);
    }
    const std::string known = refusal([] { config_by_name("d13"); });
    CHECK(contains(known, "d12 (gpt2), d24 (gpt2-medium)"));
    CHECK(contains(known, "gpt3-6.7b, gpt3-13b"));
}

// ---- The layout of the buffer

// 60 heads divide by 1 to 5. With 3 tokens all shards of the vocabulary but the first are padding.
static const GPT2Config divided[] = {{7, 1500, 2, 60, 120}, {2, 3, 1, 60, 60}, {5, 1280, 1, 60, 180}};

// Calls f with layouts of GPT-2's configurations, of more than 2^32 elements, of awkward ones (sizes of 1, odd widths,
// vocabularies at and next to a multiple of 128), and of shards.
template <class F>
static void for_each_layout(F f) {
    const auto call = [&](const ParamLayout& layout) {
        CAPTURE(layout.config.V);
        CAPTURE(layout.config.C);
        CAPTURE(layout.shard.count);
        f(layout);
    };
    for (const char* name : {"gpt2", "gpt2-xl", "gpt3-13b"}) call(ParamLayout(config_by_name(name)));
    for (const GPT2Config& config :
         {GPT2Config{1, 1, 1, 1, 1}, {7, 128, 2, 3, 21}, {24, 129, 3, 1, 65}, {17, 127, 1, 4, 100}})
        call(ParamLayout(config));
    for (const GPT2Config& config : divided)
        for (int count : {2, 5}) call(ParamLayout(config, 1, {count - 1, count}));
}

TEST_CASE("tensors are aligned to 64 elements, do not overlap, and leave gaps shorter than 64") {
    for_each_layout([](const ParamLayout& layout) {
        std::vector<std::pair<int64_t, int64_t>> ranges;
        for (const ParamSpec& p : param_table)
            for (int l = 0; l < layout.layers(p.id); l++)
                ranges.push_back({layout.offset(p.id, l), layout.offset(p.id, l) + layout.size(p.id)});
        CHECK(int(ranges.size()) == 4 + 12 * layout.config.L);
        std::sort(ranges.begin(), ranges.end());
        int64_t end = 0, elements = 0;
        for (const auto& [begin, after] : ranges) {
            CHECK(begin % 64 == 0);
            CHECK(begin >= end);
            CHECK(begin - end < 64);
            end = after, elements += after - begin;
        }
        CHECK(layout.total >= end);
        CHECK(layout.total - end < 64);
        const GPT2Config& config = layout.config;
        if (layout.shard.count == 1)
            CHECK(elements == count_parameters(config) + int64_t(config.Vp() - config.V) * config.C);
    });
}

TEST_CASE("buckets cover the buffer without a gap, and decayed tensors come first in each") {
    for_each_layout([](const ParamLayout& layout) {
        CHECK(layout.num_buckets() == 1 + layout.config.L);
        int64_t end = 0;
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b);
            CHECK(bucket.begin == end);
            CHECK(bucket.begin <= bucket.decayed_end);
            CHECK(bucket.decayed_end <= bucket.end);
            end = bucket.end;
            for (const ParamSpec& p : param_table) {
                if ((p.scope == Scope::layer) != (b > 0)) continue;
                const int64_t begin = layout.offset(p.id, std::max(b - 1, 0)), after = begin + layout.size(p.id);
                CAPTURE(p.name);
                CHECK(layout.bucket_of(p.id, std::max(b - 1, 0)) == b);
                CHECK(begin >= (p.decay ? bucket.begin : bucket.decayed_end));
                CHECK(after <= (p.decay ? bucket.decayed_end : bucket.end));
            }
        }
        CHECK(end == layout.total);
    });
}

// The padding between tensors is zero, so it may decay or not.
TEST_CASE("the decay pattern has the elements of matrices and embeddings") {
    for_each_layout([](const ParamLayout& layout) {
        const DecayPattern decay = layout.decay_pattern();
        for (const ParamSpec& p : param_table)
            for (int l = 0; l < layout.layers(p.id); l++) {
                const int64_t begin = layout.offset(p.id, l), end = begin + layout.size(p.id);
                for (const int64_t i : {begin, (begin + end) / 2, end - 1})
                    CHECK(decay.run(i).decays == (p.rows != Dim::one));
                CHECK(decay.run(begin).end >= end);
            }
        CHECK_NOTHROW(check_adamw(0, layout.total, decay, 1));
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b);
            CHECK_NOTHROW(check_adamw(bucket.begin, bucket.end - bucket.begin, decay, 1));
            CHECK(decay.run(bucket.begin).end == bucket.decayed_end);
            CHECK(decay.run(bucket.decayed_end).end == bucket.end);
        }
    });
}

TEST_CASE("impossible shapes are refused, and the largest shape allowed does not overflow") {
    const struct {
        GPT2Config config;
        const char* why;
    } cases[] = {
        {{1024, 50257, 0, 12, 768}, "0 layers"},
        {{1024, 50257, 12, 0, 768}, "0 heads"},
        {{1024, 50257, 12, 12, 0}, "0 channels"},
        {{1024, 50257, 12, 1, 512}, "heads of 512 channels: at most 256; 512 channels need at least 2 heads"},
        {{0, 50257, 12, 12, 768}, "0 positions"},
        {{1024, -5, 12, 12, 768}, "-5 tokens"},
        {{1024, 50257, 1025, 12, 768}, "1025 layers"},
        {{1024, 50257, 12, 12, 65537}, "65537 channels"},
        {{1024, 50257, 12, 5, 768}, "768 channels are not a multiple of 5 heads; try --channels 770"},
    };
    for (const auto& c : cases) {
        CHECK(contains(refusal([&] { check_config(c.config); }), c.why));
        CHECK(contains(refusal([&] { ParamLayout{c.config}; }), c.why));
    }
    const ParamLayout largest({1 << 20, 1 << 20, 1024, 1024, 65536});
    CHECK(largest.total > int64_t(1) << 45);
    CHECK(largest.total >= count_parameters(largest.config));
}

// ---- Initial values

static std::vector<float> initial(const ParamLayout& layout, Param p, int l, uint64_t seed) {
    std::vector<float> values(layout.size(p), NAN);
    init_param(values.data(), layout.config, p, l, seed, 0, layout.size(p));
    return values;
}

TEST_CASE("the initial values of a slice equal those of the whole tensor") {
    const ParamLayout layout({64, 300, 2, 4, 36});
    for (const Param p : {wte, ln1w, fcprojw}) {
        const auto whole = initial(layout, p, 1, 42);
        const int64_t size = layout.size(p);
        for (const int64_t begin : {int64_t(0), int64_t(1), int64_t(2), size / 2 + 1, size - 1})
            for (const int64_t count : {int64_t(0), int64_t(1), int64_t(1025), size}) {
                const int64_t end = std::min(size, begin + count);
                std::vector<float> part(end - begin + 1, NAN);
                init_param(part.data(), layout.config, p, 1, 42, begin, end);
                CHECK(std::equal(part.begin(), part.end() - 1, whole.begin() + begin));
                CHECK(std::isnan(part.back()));
            }
    }
}

TEST_CASE("initial values have GPT-2's means and standard deviations") {
    const GPT2Config config = {64, 300, 8, 4, 128};
    const ParamLayout layout(config);
    for (const ParamSpec& p : param_table) {
        CAPTURE(p.name);
        const auto values = initial(layout, p.id, 0, 42);
        const int64_t count = int64_t(dim_size(config, p.rows)) * layout.cols(p.id);
        if (p.rows == Dim::one) {
            const bool ones = p.id == ln1w || p.id == ln2w || p.id == lnfw;
            CHECK(std::count(values.begin(), values.end(), ones ? 1.0f : 0.0f) == count);
            continue;
        }
        // The root mean square of n normal numbers has a standard deviation of 1 / sqrt(2 n). The bound is five times
        // that.
        const bool residual = p.id == attprojw || p.id == fcprojw;
        const double scale = residual ? 0.02 / std::sqrt(2.0 * config.L) : 0.02;
        double squares = 0.0;
        for (const float x : values) squares += double(x) * double(x);
        CHECK(std::fabs(std::sqrt(squares / double(count)) / scale - 1.0) < 5.0 / std::sqrt(2.0 * double(count)));
        CHECK(std::all_of(values.begin() + count, values.end(), [](float x) { return x == 0.0f; }));  // rows of padding
    }
    CHECK(layout.size(wte) == 384 * 128);
}

// The hashes are from a build for x86-64 by g++ 12. A build that fuses multiplications and additions has other hashes;
// -ffp-contract=off in the Makefile prevents it on arm64, and on x86-64 with -mfma.
TEST_CASE("initial values depend on seed, tensor and layer, not on the architecture, the compiler or the threads") {
    const ParamLayout layout({64, 300, 3, 4, 128});
    const auto hash = [&](Param p, int l, uint64_t seed) {
        const auto values = initial(layout, p, l, seed);
        return XXH3_64bits(values.data(), values.size() * sizeof(float));
    };
    CHECK(hash(wte, 0, 42) == 0xc0b14f19b3edff95);
    CHECK(hash(fcprojw, 2, 42) == 0x3b11343487b84444);
    const int threads = omp_get_max_threads();
    for (int n : {1, 3, 7}) {
        omp_set_num_threads(n);
        CHECK(hash(qkvw, 1, 42) == 0xd46099ffc9630fa1);
    }
    omp_set_num_threads(threads);
    CHECK(hash(qkvw, 1, 43) != hash(qkvw, 1, 42));
    CHECK(hash(qkvw, 0, 42) != hash(qkvw, 1, 42));
    const auto qkv = initial(layout, qkvw, 0, 42), fc = initial(layout, fcw, 0, 42);
    CHECK_FALSE(std::equal(qkv.begin(), qkv.begin() + 1000, fc.begin()));
}

// ---- Tensor parallelism

// Calls f(whole, shards), with the layout of each of the shards, for 1 to 5 shards.
template <class F>
static void for_each_division(F f) {
    for (const GPT2Config& config : divided)
        for (int count = 1; count <= 5; count++) {
            CAPTURE(config.V);
            CAPTURE(count);
            std::vector<ParamLayout> shards;
            for (int q = 0; q < count; q++) shards.emplace_back(config, 1, TensorShard{q, count});
            f(ParamLayout(config), shards);
        }
}

// The shard of element (row, col) of a tensor, and where it is there, by the definition of Split.
struct Place {
    int shard;
    int64_t index;
};
static Place place_of(const GPT2Config& config, const ParamSpec& p, int count, int64_t row, int64_t col) {
    const bool is_bias = p.rows == Dim::one;
    const int64_t channel = is_bias ? col : row, cols = is_bias ? 1 : dim_size(config, p.cols);  // output channel
    const int64_t column = is_bias ? 0 : col;
    if (p.split == Split::input) {
        const int64_t own_cols = cols / count;
        return {int(column / own_cols), row * own_cols + column % own_cols};
    }
    if (p.split == Split::heads) {
        const int64_t third = channel / config.C, head = channel % config.C / config.HS(), heads = config.NH / count;
        const int64_t own = (third * heads + head % heads) * config.HS() + channel % config.HS();
        return {int(head / heads), own * cols + column};
    }
    const int64_t channels = p.id == wte ? round_up(config.V, 128 * count) / count
                                         : dim_size(config, p.rows) * dim_size(config, p.cols) / cols / count;
    return {int(channel / channels), channel % channels * cols + column};
}

TEST_CASE("a shard has the rows, columns or heads that its split says, zeros as padding, and can be put back") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        for (const ParamSpec& p : param_table) {
            CAPTURE(p.name);
            const int64_t elements = int64_t(dim_size(whole.config, p.rows)) * dim_size(whole.config, p.cols);
            std::vector<float> values(size_t(whole.size(p.id)), 0.0f), back(values.size(), 0.0f);
            for (int64_t i = 0; i < elements; i++) values[size_t(i)] = float(i + 1);
            std::vector<std::vector<float>> own;
            int64_t zeros = 0, wrong = 0;
            for (const ParamLayout& shard : shards) {
                CHECK(shard.size(p.id) == shards[0].size(p.id));
                own.emplace_back(size_t(shard.size(p.id)), NAN);
                take_shard(own.back().data(), values.data(), shard, p.id);
                zeros += std::count(own.back().begin(), own.back().end(), 0.0f);
                put_shard(back.data(), own.back().data(), shard, p.id);
                if (p.split == Split::none) CHECK(own.back() == values);
            }
            CHECK(back == values);
            if (p.split == Split::none) continue;
            CHECK(zeros == int64_t(shards.size()) * shards[0].size(p.id) - elements);
            const int64_t cols = dim_size(whole.config, p.cols);
            for (int64_t i = 0; i < elements; i++) {
                const Place place = place_of(whole.config, p, int(shards.size()), i / cols, i % cols);
                wrong += own[size_t(place.shard)][size_t(place.index)] != values[size_t(i)];
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("the shards of the vocabulary are whole tiles, follow each other, and end with the vocabulary") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        for (const ParamLayout& shard : shards) {
            const int rows = shard.rows(wte), first = shard.shard.index * rows;
            CHECK(rows % 128 == 0);
            CHECK(shard.vocab().first == first);
            CHECK(shard.vocab().count == std::clamp(whole.config.V - first, 0, rows));
        }
    });
}

TEST_CASE("heads that do not divide into shards are refused, with the numbers that do") {
    for (int count : {1, 5, 25}) CHECK_NOTHROW(ParamLayout(config_by_name("d48"), 1, {0, count}));
    for (int count : {2, 3, 4, 8})
        CHECK(contains(refusal([&] {
                           ParamLayout(config_by_name("d48"), 1, {0, count});
                       }),
                       "25 heads; give one of 1, 5, 25"));
    CHECK(contains(refusal([] {
                       ParamLayout(config_by_name("d12"), 1, {0, 5});
                   }),
                   "--tensor-parallel 5 does not divide the model's 12 heads; give one of 1, 2, 3, 4, 6, 12"));
}
