// test_gpu_ops.cu: compares GELU, the gradient norm, gradient conversions and AdamW of llmc/cuda with their definitions
// in cpu::plain, at GPT-2's sizes and at awkward ones, in bf16 and fp32. The same source runs on a GPU and in the
// emulator.
#include <cstring>

#include "cuda/adamw.cuh"
#include "cuda/gelu.cuh"
#include "cuda/norm.cuh"
#include "gpu/gpu_backend.h"
#include "support/cases_adamw.h"
#include "support/cases_gelu.h"
#include "support/cases_norm.h"

static const GpuBackend gpu_backend;

// ---- bf16

// A thread rounds floats whose upper 16 bits are its index and every 4096th value after it, each with six different
// lower 16 bits.
constexpr int ROUNDING_STRIDE = 4096;
HOST_DEVICE static uint32_t rounded_case(int upper, int i) {
    const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    return uint32_t(upper) << 16 | lower[i];
}
__global__ void rounding_kernel(uint16_t* out) {
    for (int upper = int(blockIdx.x * blockDim.x + threadIdx.x); upper < 65536; upper += ROUNDING_STRIDE)
        for (int i = 0; i < 6; i++) out[upper * 6 + i] = bf16(__builtin_bit_cast(float, rounded_case(upper, i))).bits;
}

TEST_CASE("every kind of float rounds to the same bf16 on the device as on the host, and NaN to NaN") {
    auto got = random_tokens(65536 * 3, 1, 1);  // two 16-bit results each
    OnGpu<int> out(got);
    simt::launch(rounding_kernel, ROUNDING_STRIDE / 256, 256, 0, nullptr, reinterpret_cast<uint16_t*>(out.device));
    out.back();
    int wrong = 0;
    for (int upper = 0; upper < 65536; upper++)
        for (int i = 0; i < 6; i++) {
            const bf16 want(__builtin_bit_cast(float, rounded_case(upper, i)));
            bf16 result;
            std::memcpy(&result, reinterpret_cast<const uint16_t*>(got.data()) + upper * 6 + i, sizeof(result));
            const bool both_nan = std::isnan(float(want)) && std::isnan(float(result));
            wrong += result.bits != want.bits && !both_nan;
        }
    CHECK(wrong == 0);
}

// ---- GELU

TEST_CASE_TEMPLATE("GELU of an MLP's activations, and of awkward counts, is the definition's", floatX, float, bf16) {
    for (int count : {1, 3, 4, 7, 8, 17, 65, 2048, 2049, 4 * 3072}) gelu_cases::compare<floatX>(gpu_backend, count);
}

TEST_CASE("GELU is its formula in double, and finite for any finite input") {
    gelu_cases::formula_in_double(gpu_backend, [] { return 1e-36; });
    gelu_cases::huge_inputs(gpu_backend);
}

TEST_CASE_TEMPLATE("GELU has known values at chosen points", floatX, float, bf16) {
    gelu_cases::known_points<floatX>(gpu_backend);
}

TEST_CASE_TEMPLATE("dinp of GELU may be dout, and NaN stays NaN", floatX, float, bf16) {
    gelu_cases::in_place_with_nan<floatX>(gpu_backend);
}

// ---- Gradient norm and conversions

// A thread adds up to count / 2048 + 4 squares, all positive, and the tree of 15 levels adds the rest.
TEST_CASE("the sum of squares of any count is the definition's, and has the same bits twice") {
    for (const int64_t count : {1, 3, 4, 7, 17, 65, 2047, 2048, 2049, 100003})
        norm_cases::compare_squares(gpu_backend, count, 20.0f + std::sqrt(float(count) / 2048));
}

TEST_CASE("a sum of squares that overflows is infinite, and one with a NaN is NaN") {
    norm_cases::known_squares(gpu_backend);
}

TEST_CASE("gradients are added to, each to its own") {
    norm_cases::accumulated_gradients(gpu_backend, {64, 2048, 4096 + 64});
    CHECK_THROWS_AS(gpu::accumulate_gradients(nullptr, nullptr, 7, nullptr), Error);
}

TEST_CASE("gradients are rounded to nearest and widened, and nothing around them is") {
    norm_cases::converted_gradients(gpu_backend, {64, 4096, 8192 + 64});
    CHECK_THROWS_AS(gpu::round_gradients(nullptr, nullptr, 7, nullptr), Error);
    CHECK_THROWS_AS(gpu::widen_gradients(nullptr, nullptr, 7, nullptr), Error);
}

TEST_CASE("gradients are clipped where their norm exceeds the largest; a factor of NaN stays NaN") {
    norm_cases::clip_factors(gpu_backend);
}

// ---- AdamW

constexpr int ADAMW_STEPS = 5;

TEST_CASE_TEMPLATE("AdamW of any count, decaying any part, is the definition's", floatX, float, bf16) {
    adamw_cases::awkward_counts<floatX>(gpu_backend, ADAMW_STEPS);  // up to more blocks than one, and part of one
}

TEST_CASE_TEMPLATE("AdamW of several buckets, from any of them on, is the definition's", floatX, float, bf16) {
    adamw_cases::several_buckets<floatX>(gpu_backend, ADAMW_STEPS);
}

TEST_CASE_TEMPLATE("AdamW is the paper's, in double", floatX, float, bf16) {
    adamw_cases::formula_in_double<floatX>(gpu_backend);
}

TEST_CASE_TEMPLATE("decay reaches the first elements of each bucket, wherever a call begins", floatX, float, bf16) {
    adamw_cases::decay_alone<floatX>(gpu_backend);
}

TEST_CASE("without masters a weight is rounded by the bits of seed, step and element, however the range is cut") {
    adamw_cases::stochastic_rounding(gpu_backend, 6208, {1088});
}

TEST_CASE("steps, seeds and elements have their own draws") { adamw_cases::independent_draws(gpu_backend, 1 << 13); }

TEST_CASE("one step without masters is that of the definition") {
    adamw_cases::one_step_without_masters(gpu_backend, 5056, {256, 192, 320, 128}, 64, 4);
}

TEST_CASE("the mean of weights without masters takes steps that bf16 cannot") {
    adamw_cases::mean_of_small_steps(gpu_backend, 1 << 11);
}

TEST_CASE("without masters zeros stay zeros, and a NaN a NaN") {
    adamw_cases::zeros_and_nan_without_masters(gpu_backend);
}

TEST_CASE_TEMPLATE("a NaN factor leaves everything as it is", floatX, float, bf16) {
    adamw_cases::nan_factor<floatX>(gpu_backend);
}

TEST_CASE("AdamW of no elements does nothing, and impossible steps are refused") {
    adamw_cases::no_elements_and_impossible_steps();
}
