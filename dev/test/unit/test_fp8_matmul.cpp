// test_fp8_matmul.cpp: the shared cases of the FP8 matmuls (cases_fp8.h) on every CPU variant.
#include "support/cases_fp8.h"
#include "support/cpu_backend.h"

using namespace fp8_cases;

namespace {

struct Fp8OnCpu : CpuBackend {
    Scales scales;

    // The bounds of test_matmul.cpp, because both sides sum products of the same rounded operands. The definition sums
    // in double.
    Bound bound(Value value, int K, bool) const {
        const float sum_error = (8.0f * float(K) + 16.0f) * epsilon<float>() * scales.of(value);
        const bool of_parameters = value == Value::dweight || value == Value::dbias;
        return {of_parameters ? 4 * epsilon<float>() : epsilon<bf16>(), sum_error};
    }
};

const Fp8OnCpu cpu_backend;

}  // namespace

TEST_CASE("FP8 matmuls with every option agree with the definition") {
    for (const Shape s : {Shape{64, 64, 64}, {37, 48, 80}, {2, 96, 128}, {80, 16, 16}}) {
        const Inputs<bf16> in(s);
        for (const Options& options : {Options{.bias = false},
                                       {.gelu = true},
                                       {.bias = false, .gelu = true, .accumulate = true},
                                       {.accumulate = true},
                                       {.residual = true}})
            compare(cpu_backend, in, options);
    }
}

TEST_CASE("FP8 matmuls of large and small numbers, and of zeros, agree with the definition") {
    for (const Scales scales : {Scales{1e-4f, 0.02f, 1e-9f}, {300.0f, 0.02f, 1e3f}, {0.0f, 1.0f, 0.0f}}) {
        Fp8OnCpu backend;
        backend.scales = scales;
        compare(backend, scaled_inputs({48, 64, 96}, scales), {.bias = false});
    }
}

TEST_CASE("NaN and infinity are not rounded to the largest FP8 value") { not_finite(cpu_backend, {40, 64, 80}); }

TEST_CASE("a single row is multiplied in bf16") { single_row(cpu_backend, 96, 128); }

TEST_CASE("LayerNorm and GELU raise amax to the largest magnitude of their output") {
    amax_of_outputs(cpu_backend, 1, 16);
    amax_of_outputs(cpu_backend, 37, 80);
}
