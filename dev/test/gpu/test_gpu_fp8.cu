// test_gpu_fp8.cu: the shared cases of the FP8 matmuls (cases_fp8.h) on the GPU or in the emulator, and tests of the
// kernels that convert tensors to FP8.
#include "cuda/autotune.h"
#include "cuda/matmul.h"
#include "gpu/gpu_backend.h"
#include "support/cases_fp8.h"

using namespace fp8_cases;

struct Fp8OnGpu : GpuBackend {
    // The bounds of test_gpu_matmul.cu, because both sides have the same FP8 operands. In addition, tensor cores of
    // sm_90 add 32 products at a time and keep 14 bits of their sum. Each of these steps loses up to 2^-13 of the
    // largest partial sum, which is a few times sqrt(K).
    Bound bound(Value value, int K, bool gelu) const {
        const float root = std::sqrt(float(K)), step = epsilon<bf16>();
        const float lost = emulated || value == Value::dbias ? 0.0f : (float(K) / 32 + 1) * 0x1p-13f * 4 * root;
        const float sum_error = 4.0f * float(K) * epsilon<float>() / 2 + lost;
        switch (value) {
            case Value::out:  // our GELU kernel reads the rounded sum, and its derivative is at most 1.13
                return {2 * step, sum_error + (gelu ? 5.0f * root * step / 4 : 0.0f)};
            case Value::pre_gelu:
                return {step, sum_error};
            case Value::dinp:
                return {(gelu ? 2.0f : 1.0f) * step + 8 * epsilon<float>(),
                        sum_error + (gelu ? 64 * epsilon<float>() * root + fused_gelu_error(K) : 0.0f)};
            default:
                return {epsilon<float>(), sum_error + epsilon<float>()};
        }
    }
};

static const Fp8OnGpu gpu_backend;

TEST_CASE("FP8 matmuls of awkward sizes agree with the definition, with GELU fused and separate") {
    for (const bool fused : {true, false}) {
        set_fused_epilogues(fused);
        for (const Shape s : {Shape{2, 16, 16}, {7, 48, 80}, {17, 80, 16}, {130, 64, 144}}) {
            const Inputs<bf16> in(s);
            for (const Options& options : {Options{.bias = false},
                                           {.gelu = true},
                                           {.residual = true},
                                           {.bias = false, .gelu = true, .accumulate = true},
                                           {.accumulate = true}})
                compare(gpu_backend, in, options);
        }
        gpu::load_algorithms({});  // discards the plans
    }
    set_fused_epilogues(true);
}

TEST_CASE("FP8 matmuls of NaN and infinity, of a single row (in bf16) and of zeros") {
    not_finite(gpu_backend, {40, 64, 80});
    single_row(gpu_backend, 96, 128);
    compare(gpu_backend, scaled_inputs({40, 64, 80}, {0.0f, 1.0f, 0.0f}), {});
}

TEST_CASE("FP8 matmuls of widths that are not a multiple of 16 are refused") {
    char packed;
    const Weight<bf16> weight = {nullptr, nullptr, {.packed = &packed}};
    CHECK_THROWS_WITH_AS(
        gpu::matmul_forward<bf16>({.out = nullptr, .inp = nullptr, .weight = weight}, 4, 64, 72, nullptr),
        doctest::Contains("(4, 64) and (64, 72): the widths must be multiples of 16"), Error);
}

// ---- the kernels

// Checks the results of cast_to_fp8: the codes by rows, and the codes transposed and padded with zeros. If both are
// wanted, it also returns the sums of the columns.
template <class Format>
static void check_cast(int R, int C, bool with_rows, bool with_transposed) {
    const int padded_R = round_up(R, 16);
    auto x = random_tensor<bf16>(int64_t(R) * C, uint64_t(R + C), 3.0f);
    auto rows = filled<float>(int64_t(R) * C / 4, 0.0f), transposed = filled<float>(int64_t(padded_R) * C / 4, 0.0f);
    auto amax = filled<float>(1, largest(x)), inverse = poisoned<float>(1);
    OnGpu<bf16> on_x(x);
    auto sums = poisoned<float>(int64_t(ceil_div(R, FP8_ROWS)) * C);
    OnGpu<float> on_rows(rows), on_transposed(transposed), on_amax(amax), on_inverse(inverse), on_sums(sums);
    const auto codes = [](OnGpu<float>& on, bool wanted) {
        return wanted ? reinterpret_cast<uint8_t*>(on.device) : nullptr;
    };
    gpu::cast_to_fp8<Format>(codes(on_rows, with_rows), codes(on_transposed, with_transposed), on_inverse,
                             with_rows && with_transposed ? on_sums.device : nullptr, on_x, on_amax, R, C, nullptr);
    wait_for_device();
    on_rows.back(), on_transposed.back(), on_inverse.back(), on_sums.back();

    const Fp8Scale s = fp8_scale<Format>(largest(x));
    CHECK(inverse[0] == s.inverse);
    const auto* row_codes = reinterpret_cast<const uint8_t*>(rows.data());
    const auto* transposed_codes = reinterpret_cast<const uint8_t*>(transposed.data());
    int wrong_rows = 0, wrong_transposed = 0;
    for (int r = 0; r < padded_R; r++)
        for (int c = 0; c < C; c++) {
            const int want = r < R ? fp8_code<Format>(float(x[int64_t(r) * C + c]) * s.scale) : 0;
            if (r < R && with_rows) wrong_rows += row_codes[int64_t(r) * C + c] != want;
            if (with_transposed) wrong_transposed += transposed_codes[int64_t(c) * padded_R + r] != want;
        }
    CAPTURE(R);
    CAPTURE(C);
    CHECK(wrong_rows == 0);
    CHECK(wrong_transposed == 0);
    if (!with_rows || !with_transposed) return;
    for (int64_t i = 0; i < sums.size(); i++) {
        const int begin = int(i / C) * FP8_ROWS, end = std::min(R, begin + FP8_ROWS);
        double sum = 0.0, magnitudes = 0.0;
        for (int r = begin; r < end; r++) {
            const double value = double(float(x[int64_t(r) * C + i % C]));
            sum += value;
            magnitudes += std::fabs(value);
        }
        CHECK(std::fabs(double(sums[i]) - sum) <= double(epsilon<float>()) * 12 * magnitudes);  // 4 + 2 + 8 additions
    }
}

TEST_CASE_TEMPLATE("FP8 codes by rows and transposed agree with the definition", Format, E4M3, E5M2) {
    for (const int R : {1, 4, 16, 127, 128, 129, 200})
        for (const int C : {16, 48, 64, 80, 144}) check_cast<Format>(R, C, true, true);
    check_cast<Format>(70, 96, true, false);
    check_cast<Format>(70, 96, false, true);
}

TEST_CASE("LayerNorm, GELU and raise_amax raise amax to the largest magnitude, wherever it is") {
    for (const int N : {1, 7, 8, 300})
        for (const int C : {16, 256, 768, 1600}) amax_of_outputs(gpu_backend, N, C);
    for (const int64_t count : {1, 7, 8, 2047, 40000})
        for (const int64_t at : {int64_t(0), count / 2, count - 1})
            for (const float largest : {-100.0f, -INFINITY, NAN}) {
                CAPTURE(count);
                CAPTURE(at);
                auto x = random_tensor<bf16>(count, 5);
                auto amax = filled<float>(1, 0.0f);
                x[at] = bf16(largest);
                OnGpu<bf16> on_x(x);
                OnGpu<float> on_amax(amax);
                gpu::raise_amax(on_amax, on_x, 0, nullptr);  // the maximum of nothing
                gpu::raise_amax(on_amax, on_x, count, nullptr);
                wait_for_device();
                on_amax.back();
                CHECK((std::isnan(largest) ? std::isnan(amax[0]) : amax[0] == -largest));
            }
}

#ifdef SIMT_EMULATOR
TEST_CASE("FP8 is refused on a GPU that has none") {
    const simt::Config as_it_was = simt::config;
    for (const int compute_capability : {86, 89}) {
        simt::config.compute_capability = compute_capability;
        if (compute_capability == 89) CHECK_NOTHROW(device_check_fp8());
        if (compute_capability == 86)
            CHECK_THROWS_WITH_AS(device_check_fp8(), doctest::Contains("and FP8 needs 8.9"), Error);
    }
    simt::config = as_it_was;
}
#endif
