// test_gpu_ops.cu: compares GELU, the gradient norm, gradient conversions and AdamW of llmc/cuda with their definitions
// in cpu::plain, at GPT-2's sizes and at awkward ones, in bf16 and fp32. The same source runs on a GPU and in the
// emulator.
#include <cstring>

#include "cuda/adamw.cuh"
#include "cuda/gelu.cuh"
#include "cuda/norm.cuh"
#include "gpu/gpu_backend.h"
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

constexpr int adamw_steps = 5;
constexpr float adamw_lr = 1e-2f;

// The decay pattern of one bucket, of whose elements the first `decayed` decay.
static DecayPattern first_ones(int64_t count, int64_t decayed) { return {count, decayed, FLAT_ALIGN, 0}; }

template <class floatX>
struct AdamWState {
    Tensor<floatX> weight;
    Tensor<float> master, m, v;
    explicit AdamWState(int64_t count)
        : weight(random_tensor<floatX>(count, 1)),
          master(random_tensor<float>(count, 1)),
          m(filled<float>(count, 0.0f)),
          v(filled<float>(count, 0.0f)) {}
};

template <class floatX>
static void compare_adamw(int64_t count, DecayPattern decay, int64_t begin = 0) {
    CAPTURE(count);
    CAPTURE(decay.first_decayed);
    constexpr bool masters = sizeof(floatX) != sizeof(float);
    AdamWState<floatX> got(count), want(count);
    auto factor = filled<float>(1, 0.5f);
    {
        OnGpu<floatX> weight(got.weight);
        OnGpu<float> master(got.master), m(got.m), v(got.v), f(factor);
        for (int step = 1; step <= adamw_steps; step++) {
            auto grads = random_tensor<float>(count, 100 + uint64_t(step));
            for (int64_t i = 0; i < count; i++) grads[i] *= std::pow(10.0f, -float(i % 13));
            OnGpu<float> grad(grads);
            gpu::adamw<floatX>(weight, masters ? master.device : nullptr, m, v, grad, f, begin, count, decay,
                               AdamWConfig{}, adamw_lr, step, nullptr);
            cpu::plain::adamw<floatX>(want.weight.data(), masters ? want.master.data() : nullptr, want.m.data(),
                                      want.v.data(), grads.data(), factor.data(), begin, count, decay, AdamWConfig{},
                                      adamw_lr, step, nullptr);
            check_cuda(cudaDeviceSynchronize());  // before grad is freed
        }
        weight.back(), master.back(), m.back(), v.back();
    }
    // m is a sum of terms of up to about 0.2, which may cancel. An update is at most about lr * (1 + decay) and has
    // about 8 roundings; the weight, of about 1, is rounded in each step.
    const float update_error = adamw_steps * (8 * adamw_lr + 1) * epsilon<float>();
    expect_close("m", got.m, want.m, 1, 2 * adamw_steps * epsilon<float>(), adamw_steps * epsilon<float>() * 0.1f);
    expect_close("v", got.v, want.v, 1, 4 * adamw_steps * epsilon<float>(), 1e-30f);
    expect_close("master", got.master, want.master, 1, adamw_steps * epsilon<float>(), update_error);
    expect_close("weight", got.weight, want.weight, 1, rounding_step<floatX>(), update_error);
    if (masters)
        for (int64_t i = 0; i < count; i++) REQUIRE(float(got.weight[i]) == float(floatX(got.master[i])));
}

TEST_CASE_TEMPLATE("AdamW of any count and with any decayed part agrees with the definition", floatX, float, bf16) {
    for (int64_t count : {64, 128, 192, 1088})
        for (int64_t decayed : {int64_t(0), count / 128 * 64, count})
            compare_adamw<floatX>(count, first_ones(count, decayed));
    compare_adamw<floatX>(5056, first_ones(5056, 2496));  // several blocks, the last one partly filled
}

TEST_CASE_TEMPLATE("AdamW of a range that begins in any bucket decays the right elements", floatX, float, bf16) {
    const DecayPattern decay = {256, 192, 320, 128};
    compare_adamw<floatX>(2240, decay);           // ends within a bucket
    compare_adamw<floatX>(1088, decay, 64);       // begins within the first
    compare_adamw<floatX>(320, decay, 576);       // is one later bucket
    compare_adamw<floatX>(2112, decay, 704);      // begins within a later bucket
    compare_adamw<floatX>(704, {64, 0, 64, 64});  // every bucket decays wholly, except the first
    const int64_t far = int64_t(1) << 40;         // an index that needs more than 32 bits
    compare_adamw<floatX>(1088, {far, far - 64, 320, 128}, far - 128);
    compare_adamw<floatX>(1088, decay, far);
}

// One step in which only decay changes the weights, by 2^-10 of their value, so that all operands are exact in float,
// with or without FMA. op: gpu::adamw or cpu::plain::adamw; it is called for `cut` elements at a time.
static Tensor<bf16> decayed_once(decltype(&gpu::adamw<bf16>) op, int64_t count, int64_t begin, int step, uint64_t seed,
                                 int64_t cut) {
    auto weight = random_tensor<bf16>(count, 1);
    auto zeros = filled<float>(count, 0.0f), m = filled<float>(count, 0.0f), v = filled<float>(count, 0.0f);
    auto factor = filled<float>(1, 1.0f);
    const AdamWConfig config = {0.5f, 0.5f, 1.0f, 0x1p-10f, seed};
    const DecayPattern all = {FLAT_ALIGN, FLAT_ALIGN, FLAT_ALIGN, FLAT_ALIGN};
    const auto run = [&](bf16* w, float* m, float* v, const float* grad, const float* f) {
        for (int64_t i = 0; i < count; i += cut)
            op(w + i, nullptr, m + i, v + i, grad + i, f, begin + i, std::min(cut, count - i), all, config, 1.0f, step,
               nullptr);
    };
    if (op != &gpu::adamw<bf16>) {
        run(weight.data(), m.data(), v.data(), zeros.data(), factor.data());
        return weight;
    }
    OnGpu<bf16> w(weight);
    OnGpu<float> first(m), second(v), grad(zeros), f(factor);
    run(w, first, second, grad, f);
    w.back();
    return weight;
}

TEST_CASE("AdamW without masters rounds with the bits of the definition, however the range is cut") {
    const int64_t count = 6208;
    for (const int64_t begin : {int64_t(0), int64_t(192), (int64_t(1) << 35) - 320}) {
        const auto want = decayed_once(cpu::plain::adamw, count, begin, 3, 42, count);
        CHECK(same_bits(decayed_once(gpu::adamw, count, begin, 3, 42, count), want));
        CHECK(same_bits(decayed_once(gpu::adamw, count, begin, 3, 42, 1088), want));
        CHECK_FALSE(same_bits(decayed_once(gpu::adamw, count, begin, 4, 42, count), want));
        CHECK_FALSE(same_bits(decayed_once(gpu::adamw, count, begin, 3, 43, count), want));
        CHECK_FALSE(same_bits(decayed_once(gpu::adamw, count, begin + 64, 3, 42, count), want));
    }
}

// The floats before rounding differ by about 2^-22 of the weight, and neighbouring bf16 values by 2^-8, so one in 2^14
// weights may be rounded the other way.
TEST_CASE("one step of AdamW without master weights agrees with the definition") {
    const int64_t count = 5056;
    const DecayPattern decay = {256, 192, 320, 128};
    AdamWState<bf16> got(count), want(count);
    auto grads = random_tensor<float>(count, 100), factor = filled<float>(1, 0.5f);
    for (AdamWState<bf16>* s : {&got, &want})
        for (int64_t i = 0; i < count; i++) {
            s->m[i] = grads[i] * grads[i];
            s->v[i] = std::fabs(s->master[i]);
        }
    OnGpu<bf16> weight(got.weight);
    OnGpu<float> m(got.m), v(got.v), grad(grads), f(factor);
    gpu::adamw<bf16>(weight, nullptr, m, v, grad, f, 64, count, decay, AdamWConfig{}, adamw_lr, 3, nullptr);
    cpu::plain::adamw<bf16>(want.weight.data(), nullptr, want.m.data(), want.v.data(), grads.data(), factor.data(), 64,
                            count, decay, AdamWConfig{}, adamw_lr, 3, nullptr);
    weight.back(), m.back(), v.back();
    int different = 0;
    for (int64_t i = 0; i < count; i++) different += got.weight[i].bits != want.weight[i].bits;
    CHECK(different <= 4);
    expect_close("weight", got.weight, want.weight, 1, epsilon<bf16>(), 1e-4f);
    expect_close("m", got.m, want.m, 1, 8 * epsilon<float>(), 1e-7f);
    expect_close("v", got.v, want.v, 1, 8 * epsilon<float>(), 1e-30f);
}

TEST_CASE_TEMPLATE("AdamW with a NaN factor changes nothing", floatX, float, bf16) {
    for (const Master where : {Master::separate, Master::weight_itself}) {
        AdamWState<floatX> s(128);
        const AdamWState<floatX> untouched(128);
        auto grad = random_tensor<float>(128, 3), factor = filled<float>(1, NAN);
        OnGpu<floatX> weight(s.weight);
        OnGpu<float> master(s.master), m(s.m), v(s.v), g(grad), f(factor);
        float* masters = where == Master::separate && sizeof(floatX) != 4 ? master.device : nullptr;
        gpu::adamw<floatX>(weight, masters, m, v, g, f, 0, 128, first_ones(128, 64), AdamWConfig{}, adamw_lr, 1,
                           nullptr);
        weight.back(), master.back(), m.back(), v.back();
        expect_close("weight", s.weight, untouched.weight, 1, 0.0f, 0.0f);
        expect_close("master", s.master, untouched.master, 1, 0.0f, 0.0f);
        expect_close("m", s.m, untouched.m, 1, 0.0f, 0.0f);
        expect_close("v", s.v, untouched.v, 1, 0.0f, 0.0f);
    }
}

TEST_CASE("AdamW of no elements does nothing, and invalid steps, counts and decay patterns are refused") {
    float* none = nullptr;
    gpu::adamw(none, none, none, none, none, none, 64, 0, first_ones(64, 0), AdamWConfig{}, 1e-2f, 1, nullptr);
    const auto refused = [&](int64_t begin, int64_t count, DecayPattern decay, int step, const char* text) {
        CHECK_THROWS_WITH_AS(
            gpu::adamw(none, none, none, none, none, none, begin, count, decay, AdamWConfig{}, 1e-2f, step, nullptr),
            doctest::Contains(text), Error);
    };
    refused(0, 64, first_ones(64, 0), 0, "step 0; steps count from 1");
    refused(0, 65, first_ones(64, 0), 1, "65 elements from 0 on: multiples of 64");
    refused(0, 64, first_ones(64, 128), 1, "128 of a bucket of 64 elements decay");
}
