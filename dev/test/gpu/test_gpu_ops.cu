// test_gpu_ops.cu: the shared cases of GELU, of add_residual, of gradients and their norm, of AdamW, its moments
// and Muon (cases_gelu.h, cases_residual.h, cases_norm.h, cases_adamw.h, cases_moments.h, cases_muon.h) on the kernels
// of llmc/cuda; and rounding to bf16 on the device. The same source runs on a GPU and in the emulator.
#include <cstring>

#include "gpu/gpu_backend.h"
#include "support/cases_adamw.h"
#include "support/cases_gelu.h"
#include "support/cases_moments.h"
#include "support/cases_muon.h"
#include "support/cases_norm.h"
#include "support/cases_residual.h"

static const GpuBackend gpu_backend;

// ---- bf16

// Thread i rounds the floats whose upper 16 bits are i, i + 4096, ..., each with six different lower halves.
constexpr int ROUNDING_STRIDE = 4096;
HOST_DEVICE static uint32_t rounded_case(int upper, int i) {
    const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    return uint32_t(upper) << 16 | lower[i];
}
__global__ void rounding_kernel(uint16_t* out) {
    for (int upper = int(blockIdx.x * blockDim.x + threadIdx.x); upper < 65536; upper += ROUNDING_STRIDE)
        for (int i = 0; i < 6; i++) out[upper * 6 + i] = bf16(__builtin_bit_cast(float, rounded_case(upper, i))).bits;
}

TEST_CASE("every kind of float rounds to the same bf16 on the device and on the host, and NaN to NaN") {
    auto got = random_tokens(65536 * 3, 1, 1);  // each int holds two 16-bit results
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

TEST_CASE_TEMPLATE("GELU of an MLP's activations, and of awkward counts, agrees with the definition", floatX, float,
                   bf16) {
    for (int count : {1, 3, 4, 7, 8, 17, 65, 2048, 2049, 4 * 3072}) gelu_cases::compare<floatX>(gpu_backend, count);
}

TEST_CASE("GELU is its formula in double, and finite for any finite input") {
    // The kernel replaces s = 1 / (1 + e^-2u) by 0 where it is below 2^-126, which begins at x = -10. There the
    // derivative is -229 s, and left of it smaller.
    gelu_cases::formula_in_double(gpu_backend, [] { return 240 * 0x1p-126; });
}

TEST_CASE_TEMPLATE("dinp of GELU may be dout, and NaN stays NaN", floatX, float, bf16) {
    gelu_cases::in_place_with_nan<floatX>(gpu_backend);
}

// ---- residual stream

TEST_CASE_TEMPLATE("a matmul's output, its bias and the residual stream are added and rounded once", floatX, float,
                   bf16) {
    residual_cases::compare<floatX>(gpu_backend, 7, 768);
    for (const int C : {8, 24, 264}) residual_cases::compare<floatX>(gpu_backend, 65, C);
}

TEST_CASE("add_residual of no rows, or of ragged rows, is refused") {
    residual_cases::refuse_no_rows();
    bf16* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::add_residual<bf16>(none, none, none, none, 1, 12, nullptr),
                         doctest::Contains("add_residual: 12 channels must be a multiple of 8"), Error);
}

// ---- gradient norm

// Rounding bound: a thread adds up to count / 2048 + 4 squares, all positive. A reduction tree of 15 levels adds the
// sums of the threads.
TEST_CASE("the sum of squares of any count agrees with the definition, and has the same bits in two runs") {
    for (const int64_t count : {1, 3, 4, 7, 17, 65, 2047, 2048, 2049, 100003})
        norm_cases::compare_squares(gpu_backend, count, 20.0f + std::sqrt(float(count) / 2048));
}

TEST_CASE("sums of squares that overflow or have a NaN, and clip_factor") {
    norm_cases::known_squares(gpu_backend);
    norm_cases::clip_factors(gpu_backend);
}

TEST_CASE("gradients are accumulated, rounded to nearest and widened, and nothing is written past the end") {
    norm_cases::accumulated_gradients(gpu_backend, {64, 2048, 4096 + 64});
    norm_cases::converted_gradients(gpu_backend, {64, 4096, 8192 + 64});
    norm_cases::rounded_sums(gpu_backend, 4096 + 64, 640);
    CHECK_THROWS_AS(gpu::accumulate_gradients(nullptr, nullptr, 7, nullptr), Error);
    CHECK_THROWS_AS(gpu::accumulate_rounded(nullptr, nullptr, 0, 7, 1, 1, 0, nullptr), Error);
    CHECK_THROWS_AS(gpu::round_gradients(nullptr, nullptr, 7, nullptr), Error);
    CHECK_THROWS_AS(gpu::widen_gradients(nullptr, nullptr, 7, nullptr), Error);
}

// ---- AdamW

constexpr int ADAMW_STEPS = 5;

TEST_CASE_TEMPLATE("AdamW agrees with the definition, of any count, decayed part and range", floatX, float, bf16) {
    adamw_cases::awkward_counts<floatX>(gpu_backend, ADAMW_STEPS);  // less than a thread block, and several
    adamw_cases::several_buckets<floatX>(gpu_backend, ADAMW_STEPS);
    for (float value : {NAN, INFINITY}) adamw_cases::factor_not_finite<floatX>(gpu_backend, value);
}

TEST_CASE("without master weights the rounding depends on seed, step and element alone, however the range is cut") {
    adamw_cases::stochastic_rounding(gpu_backend, 6208, {1088});
}

TEST_CASE("without master weights zeros stay zero, and impossible steps are refused") {
    adamw_cases::zeros_and_nan_without_masters(gpu_backend);
    adamw_cases::no_elements_and_impossible_steps();
}

TEST_CASE("a step with moments in bf16 or in codes agrees with the definition, however the range is cut") {
    for (const int64_t count : {64, 1088, 5056}) {
        moment_cases::one_step<float>(gpu_backend, count, adamw_cases::Master::weight_itself, 320);
        moment_cases::one_step<bf16>(gpu_backend, count, adamw_cases::Master::apart, 64);
        moment_cases::one_step<bf16>(gpu_backend, count, adamw_cases::Master::weight_itself, 128);
    }
}

TEST_CASE("moments are rounded by seed, step and element") { moment_cases::random_bits(gpu_backend); }

TEST_CASE("moments stay near the exact ones, zeros stay zero, and no block makes an update explode") {
    moment_cases::thousand_steps<float>(gpu_backend, 200);
}

TEST_CASE("moments that were widened are stored as they were, at every magnitude") {
    moment_cases::stored_again(gpu_backend, moment_cases::first, 50 * FLAT_ALIGN);
    moment_cases::stored_again(gpu_backend, moment_cases::second, 50 * FLAT_ALIGN);
}

// ---- Muon

TEST_CASE("Muon's momentum is Nesterov's, also in place, and a factor that is not finite changes only its output") {
    for (const int64_t count : {0, 64, 1088, 5056}) muon_cases::momentum(gpu_backend, count, 0.5f);
    for (const float factor : {NAN, INFINITY}) muon_cases::momentum(gpu_backend, 320, factor);
}

TEST_CASE_TEMPLATE("Muon's other operations agree with their formulas, and write nothing else", floatX, float, bf16) {
    for (const int64_t count : {0, 1, 255, 5001}) muon_cases::update<floatX>(gpu_backend, count);
    for (const auto& [rows, cols] : {std::pair(1, 1), {7, 7}, {33, 40}, {5, 131}, {64, 64}}) {
        muon_cases::stack<floatX>(gpu_backend, rows, cols);
        muon_cases::unstack<floatX>(gpu_backend, rows, cols);
    }
    for (const int n : {1, 2, 7, 33, 64}) muon_cases::polynomial<floatX>(gpu_backend, n);
}

TEST_CASE("without master weights Muon's rounding depends on seed, step and element alone") {
    muon_cases::stochastic_rounding(gpu_backend, 5001, {5001, 77});
}
