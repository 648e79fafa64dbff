// test_params.cpp: tests the table of parameter tensors and their layout in one flat buffer: sizes, offsets, buckets,
// and initial values.
#include "model/params.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include <omp.h>
#include <xxhash.h>

// GPT-2's configurations and awkward ones: sizes of 1, odd widths, vocabularies at and next to a multiple of 128.
static const GPT2Config configs[] = {{1024, 50257, 12, 12, 768}, {1, 1, 1, 1, 1},      {7, 128, 2, 3, 21},
                                     {24, 129, 3, 1, 65},        {17, 127, 1, 4, 100}, {1024, 50257, 48, 25, 1600}};

TEST_CASE("the four named sizes have GPT-2's numbers of parameters, under both of their names") {
    const struct {
        const char *depth, *hf_name;
        int64_t parameters;
    } sizes[] = {{"d12", "gpt2", 124439808},
                 {"d24", "gpt2-medium", 354823168},
                 {"d36", "gpt2-large", 774030080},
                 {"d48", "gpt2-xl", 1557611200}};
    for (const auto& size : sizes) {
        CHECK(count_parameters(config_by_name(size.depth)) == size.parameters);
        CHECK(config_by_name(size.depth) == config_by_name(size.hf_name));
    }
    CHECK(config_by_name("d12").Vp() == 50304);
    CHECK(config_by_name("d48").HS() == 64);
    CHECK_THROWS_WITH_AS(config_by_name("d13"), doctest::Contains("d12 (gpt2), d24 (gpt2-medium)"), Error);
}

TEST_CASE("GPT-3's sizes have 2,048 positions and about as many parameters as their names say") {
    const struct {
        const char* name;
        int64_t parameters;
        int HS;
    } sizes[] = {{"gpt3-125m", 125226240, 64},   {"gpt3-350m", 355871744, 64},  {"gpt3-760m", 760300032, 96},
                 {"gpt3-1.3b", 1315723264, 128}, {"gpt3-2.7b", 2651553280, 80}, {"gpt3-6.7b", 6658404352, 128},
                 {"gpt3-13b", 12853386240, 128}};
    for (const auto& size : sizes) {
        const GPT2Config config = config_by_name(size.name);
        CAPTURE(size.name);
        CHECK(count_parameters(config) == size.parameters);
        CHECK(config.HS() == size.HS);
        CHECK(config.max_T == 2048);
        CHECK(ParamLayout(config).total >= size.parameters);
    }
    CHECK_THROWS_WITH_AS(config_by_name(""), doctest::Contains("gpt3-6.7b, gpt3-13b"), Error);
}

TEST_CASE("there are 16 kinds of tensors, 4 of the model and 12 of each layer, with unique names") {
    CHECK(NUM_PARAMS == 16);
    std::set<std::string> names, hf_names;
    int layer = 0;
    for (const ParamSpec& p : param_table) {
        names.insert(p.name);
        hf_names.insert(p.hf_name);
        layer += p.scope == Scope::layer;
        CHECK(p.decay == (p.rows != Dim::one));  // decay is for matrices and embeddings
    }
    // Conv1D matrices are transposed in Hugging Face's files, embeddings and vectors are not.
    for (const Param p : {qkvw, attprojw, fcw, fcprojw}) CHECK(param_table[p].transposed_in_hf());
    for (const Param p : {wte, wpe, lnfw, ln1w, qkvb}) CHECK_FALSE(param_table[p].transposed_in_hf());
    CHECK(names.size() == 16);
    CHECK(hf_names.size() == 16);
    CHECK(layer == 12);
}

TEST_CASE("a decay pattern covers the first elements of the first bucket and of each later one") {
    const DecayPattern decay = {256, 192, 320, 128};
    const auto check = [&](int64_t i, bool decays, int64_t end) {
        CAPTURE(i);
        CHECK(decay.run(i).decays == decays);
        CHECK(decay.run(i).end == end);
    };
    check(0, true, 192);
    check(191, true, 192);
    check(192, false, 256);
    check(255, false, 256);
    for (const int64_t bucket : {int64_t(256), 256 + 320 * int64_t(5), 256 + 320 * int64_t(13421773)}) {
        check(bucket, true, bucket + 128);
        check(bucket + 127, true, bucket + 128);
        check(bucket + 128, false, bucket + 320);
        check(bucket + 319, false, bucket + 320);
    }
}

// param_table says which tensors decay. The padding between tensors is zero, so it may decay or not.
TEST_CASE("the decay pattern agrees with the table for every element") {
    for (const GPT2Config& config : configs) {
        CAPTURE(config.C);
        const ParamLayout layout(config);
        const DecayPattern decay = layout.decay_pattern();
        for (const ParamSpec& p : param_table)
            for (int l = 0; l < layout.layers(p.id); l++) {
                const int64_t begin = layout.offset(p.id, l), end = begin + layout.size(p.id);
                for (const int64_t i : {begin, (begin + end) / 2, end - 1}) CHECK(decay.run(i).decays == p.decay);
                CHECK(decay.run(begin).end >= end);
            }
        int64_t runs = 0;
        for (int64_t i = 0; i < layout.total; i = decay.run(i).end, runs++) {
            CHECK(decay.run(i).end > i);
            CHECK(decay.run(decay.run(i).end).decays != decay.run(i).decays);
        }
        CHECK(runs == 2 * layout.num_buckets());
        CHECK_NOTHROW(check_adamw(0, layout.total, decay, 1));
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b);
            CHECK_NOTHROW(check_adamw(bucket.begin, bucket.end - bucket.begin, decay, 1));
            CHECK(decay.run(bucket.begin).end == bucket.decayed_end);
            CHECK(decay.run(bucket.decayed_end).end == bucket.end);
        }
    }
}

TEST_CASE("tensors are aligned to 64 elements, do not overlap, and leave gaps shorter than 64") {
    for (const GPT2Config& config : configs) {
        CAPTURE(config.C);
        const ParamLayout layout(config);
        std::vector<std::pair<int64_t, int64_t>> ranges;
        for (const ParamSpec& p : param_table)
            for (int l = 0; l < layout.layers(p.id); l++)
                ranges.push_back({layout.offset(p.id, l), layout.offset(p.id, l) + layout.size(p.id)});
        CHECK(int(ranges.size()) == 4 + 12 * config.L);
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
        CHECK(elements == count_parameters(config) + int64_t(config.Vp() - config.V) * config.C);
    }
}

TEST_CASE("buckets cover the buffer without a gap, and decayed tensors come first in each") {
    for (const GPT2Config& config : configs) {
        const ParamLayout layout(config);
        CHECK(layout.num_buckets() == 1 + config.L);
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
                CHECK(begin >= (p.decay ? bucket.begin : bucket.decayed_end));
                CHECK(after <= (p.decay ? bucket.decayed_end : bucket.end));
            }
        }
        CHECK(end == layout.total);
    }
}

static std::vector<float> initial(const ParamLayout& layout, Param p, int l, uint64_t seed) {
    std::vector<float> values(layout.size(p), NAN);
    init_param(values.data(), layout.config, p, l, seed, 0, layout.size(p));
    return values;
}

static double rms(const std::vector<float>& values, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += double(values[i]) * double(values[i]);
    return std::sqrt(sum / double(count));
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
        const bool residual = p.id == attprojw || p.id == fcprojw;
        if (p.rows == Dim::one) {
            const bool ones = p.id == ln1w || p.id == ln2w || p.id == lnfw;
            for (float x : values) CHECK(x == (ones ? 1.0f : 0.0f));
        } else {
            // The root mean square of n normal numbers has a standard deviation of 1 / sqrt(2 n). The bound is five
            // times that.
            const int64_t count = int64_t(dim_size(config, p.rows)) * layout.cols(p.id);
            const double scale = residual ? 0.02 / std::sqrt(2.0 * config.L) : 0.02;
            CHECK(std::fabs(rms(values, count) / scale - 1.0) < 5.0 / std::sqrt(2.0 * double(count)));
            for (size_t i = count; i < values.size(); i++) CHECK(values[i] == 0.0f);  // padded rows of wte
        }
    }
    CHECK(layout.size(wte) == 384 * 128);
}

TEST_CASE("initial values depend on seed, tensor and layer, and not on the number of threads") {
    const ParamLayout layout({64, 300, 3, 4, 128});
    const auto base = initial(layout, qkvw, 0, 42);
    CHECK(base != initial(layout, qkvw, 1, 42));
    CHECK(base != initial(layout, qkvw, 0, 43));
    const auto fc = initial(layout, fcw, 0, 42);
    CHECK_FALSE(std::equal(base.begin(), base.begin() + 1000, fc.begin()));
    const int threads = omp_get_max_threads();
    for (int n : {1, 3, 7}) {
        omp_set_num_threads(n);
        CHECK(base == initial(layout, qkvw, 0, 42));
    }
    omp_set_num_threads(threads);
}

// The hashes are from a build for x86-64 by g++ 12. A build that fuses multiplications and additions has other hashes;
// -ffp-contract=off in the Makefile prevents it on arm64, and on x86-64 with -mfma.
TEST_CASE("initial values have the same bits on every architecture and with every compiler") {
    const ParamLayout layout({64, 300, 3, 4, 128});
    const auto hash = [&](Param p, int l) {
        const auto values = initial(layout, p, l, 42);
        return XXH3_64bits(values.data(), values.size() * sizeof(float));
    };
    CHECK(hash(wte, 0) == 0xc0b14f19b3edff95);
    CHECK(hash(qkvw, 1) == 0xd46099ffc9630fa1);
    CHECK(hash(fcprojw, 2) == 0x3b11343487b84444);
}

// ---- Tensor parallelism

// 60 heads divide by 1 to 5. With 3 tokens all shards of the vocabulary but the first are padding.
static const GPT2Config divided[] = {{7, 1500, 2, 60, 120}, {2, 3, 1, 60, 60}, {5, 1280, 1, 60, 180}};

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

// The elements of a tensor that are parameters: all but the padded rows.
static int64_t elements(const GPT2Config& config, const ParamSpec& p) {
    return int64_t(dim_size(config, p.rows)) * dim_size(config, p.cols);
}

TEST_CASE("the first matmuls of a layer are divided by output, the second ones by input, and qkv by heads") {
    const auto split = [](std::initializer_list<Param> params, Split want) {
        for (Param p : params) CHECK(param_table[p].split == want);
        return params.size();
    };
    const size_t listed = split({wte, fcw, fcb}, Split::output) + split({qkvw, qkvb}, Split::heads) +
                          split({attprojw, fcprojw}, Split::input) +
                          split({wpe, lnfw, lnfb, ln1w, ln1b, attprojb, ln2w, ln2b, fcprojb}, Split::none);
    CHECK(listed == NUM_PARAMS);
}

TEST_CASE("the shards of a tensor cover each element once, and have equal sizes") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        for (const ParamSpec& p : param_table) {
            CAPTURE(p.name);
            std::vector<int> covered(size_t(whole.size(p.id)));
            for (const ParamLayout& shard : shards) {
                std::vector<int> held(size_t(shard.size(p.id)));
                int64_t end = 0;
                for_each_run(shard, p.id, [&](int64_t own, int64_t at, int64_t count) {
                    CHECK(own == end);  // in order and without a gap
                    CHECK(count > 0);
                    end = own + count;
                    REQUIRE(end <= shard.size(p.id));
                    REQUIRE(at + count <= whole.size(p.id));
                    for (int64_t i = 0; i < count; i++) held[size_t(own + i)]++, covered[size_t(at + i)]++;
                });
                if (p.id != wte) CHECK(end == shard.size(p.id));
                CHECK(std::all_of(held.begin(), held.end(), [](int times) { return times <= 1; }));
                const int64_t parts = p.split == Split::none ? 1 : int64_t(shards.size());
                if (p.id != wte) CHECK(shard.size(p.id) * parts == whole.size(p.id));
                CHECK(shard.size(p.id) == shards[0].size(p.id));
            }
            const auto padding = covered.begin() + elements(whole.config, p);
            const int times = p.split == Split::none ? int(shards.size()) : 1;
            CHECK(std::all_of(covered.begin(), padding, [&](int n) { return n == times; }));
            CHECK(std::all_of(padding, covered.end(), [](int n) { return n == 0; }));
        }
    });
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

TEST_CASE("a shard has the rows, columns or heads that its split says") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        for (const ParamSpec& p : param_table) {
            if (p.split == Split::none) continue;
            CAPTURE(p.name);
            std::vector<float> values(size_t(whole.size(p.id)));
            for (size_t i = 0; i < values.size(); i++) values[i] = float(i);
            std::vector<std::vector<float>> own;
            for (const ParamLayout& shard : shards) {
                own.emplace_back(size_t(shard.size(p.id)), NAN);
                take_shard(own.back().data(), values.data(), shard, p.id);
            }
            const int64_t cols = dim_size(whole.config, p.cols);
            int64_t wrong = 0;
            for (int64_t i = 0; i < elements(whole.config, p); i++) {
                const Place place = place_of(whole.config, p, int(shards.size()), i / cols, i % cols);
                wrong += own[size_t(place.shard)][size_t(place.index)] != values[size_t(i)];
            }
            CHECK(wrong == 0);
        }
    });
}

TEST_CASE("shards that are taken and put back give the whole tensor, and padding is zero") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        for (const ParamSpec& p : param_table) {
            CAPTURE(p.name);
            const auto values = initial(whole, p.id, 0, 42);
            std::vector<float> back(values.size(), 0.0f);
            int64_t zeros = 0;
            for (const ParamLayout& shard : shards) {
                std::vector<float> own(size_t(shard.size(p.id)), NAN);
                take_shard(own.data(), values.data(), shard, p.id);
                CHECK(std::none_of(own.begin(), own.end(), [](float x) { return std::isnan(x); }));
                zeros += std::count(own.begin(), own.end(), 0.0f);
                put_shard(back.data(), own.data(), shard, p.id);
            }
            CHECK(back == values);
            if (p.id == wte)  // no value of this seed is zero
                CHECK(zeros == int64_t(shards.size()) * shards[0].size(wte) - elements(whole.config, p));
        }
    });
}

TEST_CASE("the shards of the vocabulary are whole tiles, follow each other, and end with the vocabulary") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        int end = 0;
        for (const ParamLayout& shard : shards) {
            const VocabShard vocab = shard.vocab();
            CHECK(shard.rows(wte) % 128 == 0);
            CHECK(vocab.first == shard.shard.index * shard.rows(wte));
            CHECK(vocab.count >= 0);
            CHECK(vocab.count <= shard.rows(wte));
            if (vocab.count > 0) CHECK(vocab.first == end);
            end += vocab.count;
        }
        CHECK(end == whole.config.V);
    });
}

TEST_CASE("the initial values of a shard are those of the whole tensor") {
    for_each_division([](const ParamLayout& whole, const std::vector<ParamLayout>& shards) {
        for (const Param p : {wte, qkvw, attprojw, fcw, ln1w, qkvb}) {
            const auto values = initial(whole, p, 0, 7);
            for (const ParamLayout& shard : shards) {
                std::vector<float> want(size_t(shard.size(p))), got(want.size());
                take_shard(want.data(), values.data(), shard, p);
                for_each_run(shard, p, [&](int64_t own, int64_t at, int64_t count) {
                    init_param(got.data() + own, whole.config, p, 0, 7, at, at + count);
                });
                CHECK(got == want);
            }
        }
    });
}

TEST_CASE("buckets of a shard hold its tensors without overlap") {
    for_each_division([](const ParamLayout&, const std::vector<ParamLayout>& shards) {
        const ParamLayout& layout = shards.back();
        int64_t end = 0;
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b);
            CHECK(bucket.begin == end);
            end = bucket.end;
            int64_t size = 0;
            for (const ParamSpec& p : param_table)
                if (layout.bucket_of(p.id, std::max(b - 1, 0)) == b) size += round_up(layout.size(p.id), FLAT_ALIGN);
            CHECK(size == bucket.end - bucket.begin);
        }
        CHECK(end == layout.total);
    });
}

TEST_CASE("heads that do not divide into shards are refused, with the numbers that do") {
    const GPT2Config xl = config_by_name("d48");
    for (int count : {1, 5, 25}) CHECK_NOTHROW(ParamLayout(xl, 1, {0, count}));
    for (int count : {2, 3, 4, 8})
        CHECK_THROWS_WITH_AS(ParamLayout(xl, 1, {0, count}), doctest::Contains("25 heads; give one of 1, 5, 25"),
                             Error);
    CHECK_THROWS_WITH_AS(
        ParamLayout(config_by_name("d12"), 1, {0, 5}),
        doctest::Contains("--tensor-parallel 5 does not divide the model's 12 heads; give one of 1, 2, "
                          "3, 4, 6, 12"),
        Error);
}

TEST_CASE("impossible shapes are refused") {
    const auto refused = [](const GPT2Config& config, const char* why) {
        CHECK_THROWS_WITH_AS(check_config(config), doctest::Contains(why), Error);
        CHECK_THROWS_AS(ParamLayout{config}, Error);
    };
    refused({1024, 50257, 0, 12, 768}, "0 layers");
    refused({1024, 50257, 12, 0, 768}, "0 heads");
    refused({1024, 50257, 12, 12, 0}, "0 channels");
    refused({1024, 50257, 12, 1, 512}, "heads of 512 channels: at most 256; 512 channels need at least 2 heads");
    refused({0, 50257, 12, 12, 768}, "0 positions");
    refused({1024, -5, 12, 12, 768}, "-5 tokens");
    refused({1024, 50257, 1025, 12, 768}, "1025 layers");
    refused({1024, 50257, 12, 12, 65537}, "65537 channels");
    refused({1024, 50257, 12, 5, 768}, "768 channels are not a multiple of 5 heads; try --channels 770");
}

TEST_CASE("the largest shape allowed does not overflow") {
    const ParamLayout layout({1 << 20, 1 << 20, 1024, 1024, 65536});
    CHECK(layout.total > int64_t(1) << 45);
    CHECK(layout.total >= count_parameters(layout.config));
}
