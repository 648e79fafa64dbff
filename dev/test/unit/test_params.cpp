// test_params.cpp: tests the table of parameter tensors and their layout in one flat buffer: sizes, offsets, buckets,
// initial values, and the shards of tensor parallelism.
#include "model/params.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <utility>
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
                 {"gpt3-760m", "gpt3-760m", 760300032, 2048, 96},
                 {"gpt3-13b", "gpt3-13b", 12853386240, 2048, 128}};
    for (const auto& size : sizes) {
        const GPT2Config config = config_by_name(size.name);
        CAPTURE(size.name);
        CHECK(config == config_by_name(size.alias));
        CHECK(count_parameters(config) == size.parameters);
        CHECK(config.max_T == size.max_T);
        CHECK(config.HS() == size.HS);
    }
}

// ---- The layout of the buffer

// 60 heads divide by 1 to 5. With 3 tokens all shards of the vocabulary but the first are padding.
static const GPT2Config divided[] = {{7, 1500, 2, 60, 120}, {2, 3, 1, 60, 60}, {5, 1280, 1, 60, 180}};

// Layouts of GPT-2's configurations, of more than 2^32 elements, of awkward ones (sizes of 1, odd widths, vocabularies
// at and next to a multiple of 128), and of shards.
static std::vector<ParamLayout> layouts() {
    std::vector<ParamLayout> layouts;
    for (const char* name : {"gpt2", "gpt2-xl", "gpt3-13b"}) layouts.emplace_back(config_by_name(name));
    for (const GPT2Config& config :
         {GPT2Config{1, 1, 1, 1, 1}, {7, 128, 2, 3, 21}, {24, 129, 3, 1, 65}, {17, 127, 1, 4, 100}})
        layouts.emplace_back(config);
    for (const GPT2Config& config : divided)
        for (int count : {2, 5}) layouts.emplace_back(config, 1, TensorShard{count - 1, count});
    return layouts;
}

TEST_CASE("tensors are aligned to 64 elements, do not overlap, and leave gaps shorter than 64") {
    for (const ParamLayout& layout : layouts()) {
        std::vector<std::pair<int64_t, int64_t>> ranges;
        for (const ParamSpec& p : param_table)
            for (int l = 0; l < layout.layers(p.id); l++)
                ranges.push_back({layout.offset(p.id, l), layout.offset(p.id, l) + layout.size(p.id)});
        ranges.push_back({layout.total, layout.total});
        const GPT2Config& config = layout.config;
        CHECK(int(ranges.size()) == 4 + 12 * config.L + 1);
        std::sort(ranges.begin(), ranges.end());
        int64_t end = 0, elements = 0;
        for (const auto& [begin, after] : ranges) {
            CHECK(begin % 64 == 0);
            CHECK(begin >= end);
            CHECK(begin - end < 64);
            end = after, elements += after - begin;
        }
        if (layout.shard.count == 1)
            CHECK(elements == count_parameters(config) + int64_t(config.Vp() - config.V) * config.C);
    }
}

TEST_CASE("buckets cover the buffer without a gap, and in each the matrices and embeddings, which decay, come first") {
    for (const ParamLayout& layout : layouts()) {
        CHECK(layout.num_buckets() == 1 + layout.config.L);
        const DecayPattern decay = layout.decay_pattern();
        int64_t end = 0;
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b);
            CHECK(bucket.begin == end);
            end = bucket.end;
            CHECK((decay.run(bucket.begin).decays && !decay.run(bucket.decayed_end).decays));
            CHECK(decay.run(bucket.begin).end == bucket.decayed_end);
            CHECK(decay.run(bucket.decayed_end).end == bucket.end);
            const int l = std::max(b - 1, 0);
            for (const ParamSpec& p : param_table) {
                if ((p.scope == Scope::layer) != (b > 0)) continue;
                CAPTURE(p.name);
                const bool decays = p.rows != Dim::one;
                CHECK(layout.bucket_of(p.id, l) == b);
                CHECK(layout.offset(p.id, l) >= (decays ? bucket.begin : bucket.decayed_end));
                CHECK(layout.offset(p.id, l) + layout.size(p.id) <= (decays ? bucket.decayed_end : bucket.end));
            }
        }
        CHECK(end == layout.total);
    }
}

TEST_CASE("each bucket divides into equal shards for any number of ranks") {
    const GPT2Config config = {16, 100, 3, 2, 32};
    const ParamLayout plain(config);
    for (int ranks : {1, 2, 3, 7, 24}) {
        const ParamLayout layout(config, ranks);
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b), least = plain.bucket(b);
            CHECK((bucket.end - bucket.begin) % (ranks * FLAT_ALIGN) == 0);
            CHECK(bucket.end - bucket.begin < least.end - least.begin + ranks * FLAT_ALIGN);
        }
    }
}

TEST_CASE("impossible shapes are refused, and the largest shape allowed does not overflow") {
    for (const auto& [config, why] : std::vector<std::pair<GPT2Config, const char*>>{
             {{1024, 50257, 0, 12, 768}, "0 layers"},
             {{1024, 50257, 12, 12, 65537}, "65537 channels"},
             {{1024, -5, 12, 12, 768}, "-5 tokens"},
             {{1024, 50257, 12, 1, 512}, "heads of 512 channels: at most 256; 512 channels need at least 2 heads"},
             {{1024, 50257, 12, 5, 768}, "768 channels are not a multiple of 5 heads; try --channels 770"}})
        CHECK(contains(refusal([&, shape = config] { ParamLayout{shape}; }), why));
    const std::string refused = refusal([] { ParamLayout(config_by_name("d48"), 1, {0, 2}); });
    CHECK(contains(refused, "--tensor-parallel 2 does not divide the model's 25 heads; give one that does"));
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
    CHECK(initial(layout, qkvw, 0, 42)[0] != initial(layout, fcw, 0, 42)[0]);
}

// ---- Tensor parallelism. dev/test/ranks/layouts.cpp compares the results of shards with those of the whole.

TEST_CASE("shards have all elements of a tensor once, in whole tiles of the vocabulary, and zeros as padding") {
    for (const GPT2Config& config : divided)
        for (const int count : {1, 2, 3, 4, 5})
            for (const ParamSpec& p : param_table) {
                CAPTURE(config.V);
                CAPTURE(count);
                CAPTURE(p.name);
                const ParamLayout whole(config);
                const int64_t elements = int64_t(dim_size(config, p.rows)) * dim_size(config, p.cols);
                std::vector<float> values(size_t(whole.size(p.id)), 0.0f), back(values.size(), 0.0f);
                for (int64_t i = 0; i < elements; i++) values[size_t(i)] = float(i + 1);
                int64_t zeros = 0, size = 0;
                for (int q = 0; q < count; q++) {
                    const ParamLayout shard(config, 1, TensorShard{q, count});
                    std::vector<float> own(size_t(shard.size(p.id)), NAN);
                    take_shard(own.data(), values.data(), shard, p.id);
                    put_shard(back.data(), own.data(), shard, p.id);
                    zeros += std::count(own.begin(), own.end(), 0.0f), size += int64_t(own.size());
                    if (p.split == Split::none) CHECK(own == values);
                    const int first = q * shard.rows(wte);
                    CHECK(shard.rows(wte) % 128 == 0);
                    CHECK(shard.vocab().first == first);
                    CHECK(shard.vocab().count == std::clamp(config.V - first, 0, shard.rows(wte)));
                }
                CHECK(back == values);
                if (p.split != Split::none) CHECK(zeros == size - elements);
            }
}
