// test_gpu_head.cu: the shared cases of the head (cases_head.h) on the kernels of llmc/cuda and cuBLASLt's matmuls, at
// GPT-2's vocabulary and at awkward ones. The same source runs on a GPU and in the emulator.
#include "gpu/gpu_backend.h"
#include "support/cases_head.h"

using namespace head_cases;

static const GpuBackend gpu_backend;

// The exp(x) of a GPU has a relative error of 2^-21 + |x| 2^-23. With `keep`, bf16 logits are rounded, by up to 2^-9 of
// the largest: as much as this changes the loss. Half of it is the relative error of e in the mean. 3e-3: the roundings
// of e, and of the operands and results of backward's matmuls.
template <class floatX>
static Bounds bounds_of(double largest_logit) {
    constexpr double exact_loss = 1e-6;
    if (sizeof(floatX) == 4) return {exact_loss, exact_loss, largest_logit > 100.0 ? 1e-4 : 1e-5, 1e-5};
    const double gradient = 0x1p-10 * largest_logit + 3e-3;
    return {exact_loss, 0x1p-9, gradient, gradient};
}

template <class floatX>
static void compare(Shape s, const Kind& kind = KINDS[0], bool accumulate = false) {
    const Inputs<floatX> in = inputs_of<floatX>(s, kind);
    head_cases::compare(gpu_backend, in, accumulate, bounds_of<floatX>(largest_logit(in)));
}

TEST_CASE_TEMPLATE("losses and gradients of five kinds of logits agree with double", floatX, float, bf16) {
    for (const Kind& kind : KINDS)
        for (const int shards : {1, 3}) {
            INFO(kind.name);
            compare<floatX>({40, 96, 1000, shards}, kind, shards == 1);
        }
}

TEST_CASE("gradients are as exact as those from logits that are rounded to bf16") {
    const auto rounded = [](double x) { return double(float(bf16(float(x)))); };
    for (const Kind& kind : KINDS) {
        INFO(kind.name);
        const Inputs<bf16> in = inputs_of<bf16>({40, 96, 1000}, kind);
        const Results want = define(in, false, exact), got = run(gpu_backend, in, false);
        Results before = define(in, false, rounded);
        for (int64_t i = 0; i < before.dinp.size(); i++) before.dinp[i] = float(bf16(before.dinp[i]));
        CHECK(distance(got.dinp, want.dinp) <= 1.01 * distance(before.dinp, want.dinp));
        CHECK(distance(got.dweight, want.dweight) <= 1.01 * distance(before.dweight, want.dweight));
    }
}

TEST_CASE_TEMPLATE("the head over awkward vocabularies agrees with double", floatX, float, bf16) {
    awkward_shapes<floatX>(gpu_backend, bounds_of<floatX>(3.0), 8);
    compare<floatX>({3, 8, 50257});
    compare<floatX>({9, 8, 50257, 2});
    for (const int V : {2, 7, 8, 9, 16, 17, 65, 127, 128}) compare<floatX>({9, 8, V});
    // A block has 512 threads, each with two vectors of 16 bytes at a time.
    for (const int V : {2047, 2049, 4095, 4096, 4097, 8191, 8193, 16385}) compare<floatX>({3, 8, V});
}

TEST_CASE_TEMPLATE("targets that occur in many rows are added up, with the same bits in two runs", floatX, float,
                   bf16) {
    for (const int N : {31, 32, 33, 150}) compare<floatX>({N, 16, 2});
    const Inputs<floatX> in = inputs_of<floatX>({300, 264, 12, 2}, KINDS[1]);
    const Results a = run(gpu_backend, in, true), b = run(gpu_backend, in, true);
    CHECK(same_bits(a.losses, b.losses));
    CHECK(same_bits(a.dinp, b.dinp));
    CHECK(same_bits(a.dweight, b.dweight));
}

TEST_CASE_TEMPLATE("losses of 2 to 1,000 nats have gradients that point the right way", floatX, float, bf16) {
    large_losses<floatX>(gpu_backend);
}

TEST_CASE_TEMPLATE("NaN gives a NaN loss, and ignored targets count nowhere", floatX, float, bf16) {
    not_finite<floatX>(gpu_backend);
}

// A thread adds every 1024th loss, and a tree adds the sums of the threads: log2(1024) + N / 1024 roundings.
TEST_CASE("losses are added up, with the same bits in two runs") { sum_of_losses(gpu_backend, 16e-7); }

TEST_CASE("a head of no rows, of impossible shards, or of ragged rows is refused") {
    refuse_impossible_heads();
    const HeadInput<bf16> ragged{nullptr, {nullptr, nullptr}, nullptr, {0, 9}, 1, 12, 16};
    CHECK_THROWS_WITH_AS(gpu::head_forward<bf16>(nullptr, nullptr, nullptr, ragged, true, nullptr),
                         doctest::Contains("head_forward: rows of 12 channels and 16 logits; must be multiples of 8"),
                         Error);
    const HeadInput<bf16> large{nullptr, {nullptr, nullptr}, nullptr, {0, 1 << 24}, 1, 8, 1 << 24};
    CHECK_THROWS_WITH_AS(gpu::head_backward<bf16>(nullptr, nullptr, nullptr, nullptr, large, 1.0f, false, nullptr),
                         doctest::Contains("head_backward: a vocabulary of 16777216 tokens; at most 16777215"), Error);
}
