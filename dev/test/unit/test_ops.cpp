// test_ops.cpp: the shared cases of the small operations on every CPU variant, as test_gpu_ops.cu has them on the GPU:
// GELU, the residual stream, the gradient norm, clipping, and sums and conversions of gradients.
#include "support/cases_gelu.h"
#include "support/cases_norm.h"
#include "support/cases_residual.h"
#include "support/cpu_backend.h"

static const CpuBackend cpu_backend;

TEST_CASE_TEMPLATE("GELU of an MLP's activations, and of awkward counts, agrees with the definition", floatX, float,
                   bf16) {
    for (int count : {1, 3, 4, 7, 8, 15, 16, 17, 65, 2048, 2049, (1 << 14) + 1, 16 * 3072})
        gelu_cases::compare<floatX>(cpu_backend, count);
    gelu_cases::in_place_with_nan<floatX>(cpu_backend);
}

TEST_CASE("GELU is its formula in double, and finite for any finite input") {
    gelu_cases::formula_in_double(CpuBackend{{}, available_isas(Isa::avx512)}, [] { return 240 * 0x1p-126; });
}

TEST_CASE_TEMPLATE("a matmul's output, its bias and the residual stream are added and rounded once", floatX, float,
                   bf16) {
    residual_cases::compare<floatX>(cpu_backend, 70, 768);
    for (const int C : {1, 7, 15, 16, 17, 33}) residual_cases::compare<floatX>(cpu_backend, 65, C);
}

// A lane adds up to count / 1024 / 16 + 64 positive squares in float. The error in roundings is about the square root
// of that number.
TEST_CASE("the sum of squares of any count agrees with the definition, and is NaN if an element is NaN") {
    for (const int64_t count : {0, 1, 3, 7, 17, 64, 65, 4095, 4096, 4097, 100003, 1 << 20, (1 << 21) + 4097})
        norm_cases::compare_squares(cpu_backend, count, 8.0f + std::sqrt(float(count) / (1024 * 16) + 64));
    norm_cases::known_squares(cpu_backend);
}

TEST_CASE("gradients are added, rounded to nearest and widened exactly, and nothing past the end is written") {
    norm_cases::accumulated_gradients(cpu_backend, {0, 64, 4096, (1 << 20) + 64});
    norm_cases::converted_gradients(cpu_backend, {0, 64, (1 << 20) + 64});
}

TEST_CASE("sums of gradients in bf16 are rounded by seed, step, addition and element alone, and exact on average") {
    cpu_backend.on_each_variant([] { norm_cases::rounded_sums(cpu_backend, (1 << 16) + 1728, (1 << 16) + 1024); });
}

TEST_CASE("clip_factor limits the norm, and a NaN factor stays NaN") { norm_cases::clip_factors(cpu_backend); }
