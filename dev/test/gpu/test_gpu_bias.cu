// test_gpu_bias.cu: compares the gradient of a bias with sums in double, at GPT-2's widths and at awkward sizes.
#include "cuda/bias.cuh"
#include "gpu/on_gpu.h"

constexpr float before = 0.25f;  // the previous value of dbias, when it accumulates

template <class floatX>
static Tensor<float> bias_gradient(Tensor<floatX>& dout, int N, int OC, bool accumulate) {
    auto dbias = accumulate ? filled<float>(OC, before) : poisoned<float>(OC);
    auto working = poisoned<float>(gpu::bias_scratch_bytes<floatX>(N, OC) / int64_t(sizeof(float)));
    OnGpu<floatX> d(dout);
    OnGpu<float> result(dbias), scratch(working);
    gpu::bias_backward<floatX>(result, d, N, OC, accumulate, scratch, nullptr);
    result.back();
    return dbias;
}

// Tolerance: a sum of N terms of about 1 is about sqrt(N). The roundings of its additions grow like sqrt(N), and each
// is at most half an epsilon of the sum.
template <class floatX>
static void compare(int N, int OC) {
    CAPTURE(N);
    CAPTURE(OC);
    auto dout = random_tensor<floatX>(int64_t(N) * OC, 1);
    auto want = poisoned<float>(OC), want_added = poisoned<float>(OC);
    for (int c = 0; c < OC; c++) {
        double sum = 0.0;
        for (int n = 0; n < N; n++) sum += double(float(dout[int64_t(n) * OC + c]));
        want[c] = float(sum);
        want_added[c] = float(double(before) + sum);
    }
    const float error = std::sqrt(float(N)) * (4.0f + std::sqrt(float(N))) * epsilon<float>();
    const auto got = bias_gradient(dout, N, OC, false);
    expect_close("dbias =", got, want, 1, epsilon<float>(), error);
    expect_close("dbias +=", bias_gradient(dout, N, OC, true), want_added, 1, epsilon<float>(), error);
    expect_close("twice", bias_gradient(dout, N, OC, false), got, 1, 0.0f, 0.0f);
}

TEST_CASE_TEMPLATE("a bias gradient at GPT-2's widths is the column sums of dout", floatX, float, bf16) {
    for (int OC : {768, 1600, 2304, 4800}) compare<floatX>(65, OC);
    compare<floatX>(300, 768);  // three chunks
}

TEST_CASE_TEMPLATE("a bias gradient at awkward sizes is the column sums of dout", floatX, float, bf16) {
    for (int N : {1, 7, 17, 31, 32, 33, 65, 95, 96, 97, 127, 128, 129, 255, 257}) compare<floatX>(N, 8);
    for (int OC : {16, 24, 56, 64, 72, 120, 128, 136, 264}) compare<floatX>(40, OC);
    compare<floatX>(5000, 8);
}

TEST_CASE("a bias gradient is right with chunks longer than the shortest") {
    compare<bf16>(257, 64 * 390);  // two chunks, of up to 160 rows
}

TEST_CASE("a NaN in dout makes the gradient of its column NaN, and no other") {
    const int N = 130, OC = 16;
    auto dout = filled<bf16>(N * OC, 1.0f);
    dout[129 * OC + 5] = bf16(NAN);
    const auto dbias = bias_gradient(dout, N, OC, false);
    for (int c = 0; c < OC; c++) CHECK((c == 5 ? std::isnan(dbias[c]) : dbias[c] == float(N)));
}

TEST_CASE("a bias gradient with a channel count that is not a multiple of 16 bytes, or without rows, is refused") {
    bf16* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::bias_backward<bf16>(nullptr, none, 4, 100, false, nullptr, nullptr),
                         doctest::Contains("100 channels must be a multiple of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::bias_backward<bf16>(nullptr, none, 0, 64, false, nullptr, nullptr),
                         doctest::Contains("0 rows of 64"), Error);
}
