// test_gpu_ops.cu: the operations of llmc/cuda against their definitions in cpu::plain, at GPT-2's sizes and at awkward
// ones, in bf16 and fp32. The same source runs on a GPU and in the emulator.
#include "../../llmc/cpu/forms.h"
#include "../../llmc/cuda/adamw.cuh"
#include "../../llmc/cuda/gelu.cuh"
#include "../../llmc/cuda/norm.cuh"
#include "on_gpu.h"

// ---- GELU

template <class floatX>
static void compare_gelu(int64_t count) {
    CAPTURE(count);
    auto inp = random_tensor<floatX>(count, 1, 3.0f), dout = random_tensor<floatX>(count, 2);
    auto out = poisoned<floatX>(count), dinp = poisoned<floatX>(count), want = poisoned<floatX>(count);
    OnGpu<floatX> x(inp), dy(dout), y(out), dx(dinp);
    gpu::gelu_forward<floatX>(y, x, count, nullptr);
    gpu::gelu_backward<floatX>(dx, x, dy, count, nullptr);
    y.back(), dx.back();
    // The definition loses digits of 1 + tanh where tanh is near -1 (test_gelu.cpp).
    cpu::plain::gelu_forward<floatX>(want.data(), inp.data(), count, nullptr);
    expect_close("out", out, want, 1, rounding<floatX>(), 12 * 2 * epsilon<float>());
    cpu::plain::gelu_backward<floatX>(want.data(), inp.data(), dout.data(), count, nullptr);
    expect_close("dinp", dinp, want, 1, rounding<floatX>(), 64 * epsilon<float>());
}

TEST_CASE_TEMPLATE("GELU of an MLP's activations, and of awkward counts", floatX, float, bf16) {
    for (int count : {1, 3, 4, 7, 8, 17, 65, 2048, 2049, 4 * 3072}) compare_gelu<floatX>(count);
}

TEST_CASE("GELU is finite for any finite input, NaN stays NaN, and dinp may be dout") {
    const float points[] = {0.0f, -0.0f, 1e4f, -1e4f, 1e30f, -1e30f, NAN, 1.0f};
    const float outs[] = {0.0f, 0.0f, 1e4f, 0.0f, 1e30f, 0.0f, NAN, 0.84119199f};
    const float slopes[] = {0.5f, 0.5f, 1.0f, 0.0f, 1.0f, 0.0f, NAN, 1.08296403f};
    auto inp = filled<float>(8, 0.0f), out = poisoned<float>(8), d = filled<float>(8, 1.0f);
    for (int i = 0; i < 8; i++) inp[i] = points[i];
    OnGpu<float> x(inp), y(out), dy(d);
    gpu::gelu_forward<float>(y, x, 8, nullptr);
    gpu::gelu_backward<float>(dy, x, dy, 8, nullptr);
    y.back(), dy.back();
    for (int i = 0; i < 8; i++) {
        CAPTURE(points[i]);
        if (std::isnan(points[i])) {
            CHECK((std::isnan(out[i]) && std::isnan(d[i])));
            continue;
        }
        CHECK(std::fabs(out[i] - outs[i]) <= 1e-6f * std::fabs(outs[i]));
        CHECK(std::fabs(d[i] - slopes[i]) <= 1e-6f);
    }
}

// ---- gradient norm

static float squares_of(Tensor<float>& x) {
    auto out = poisoned<float>(1);
    OnGpu<float> result(out), values(x);
    gpu::sum_of_squares(result, values, x.size(), nullptr);
    result.back();
    return out[0];
}

TEST_CASE("the sum of squares of any count, twice with the same bits") {
    for (const int64_t count : {1, 3, 4, 7, 17, 65, 2047, 2048, 2049, 100003}) {
        CAPTURE(count);
        auto x = random_tensor<float>(count, 1, 1.0f, 0.5f);
        auto want = poisoned<float>(1);
        cpu::plain::sum_of_squares(want.data(), x.data(), count, nullptr);
        const float got = squares_of(x);
        // A thread adds up to count / 2048 + 4 squares, all positive, and the tree of 15 levels adds the rest.
        CHECK(std::fabs(got - want[0]) <= (20.0f + std::sqrt(float(count) / 2048)) * epsilon<float>() * want[0]);
        CHECK(squares_of(x) == got);
    }
}

TEST_CASE("a sum of squares that overflows, and one that is NaN") {
    auto x = filled<float>(5000, 2.0f);
    CHECK(squares_of(x) == 20000.0f);
    x[4999] = 1e30f;
    CHECK(std::isinf(squares_of(x)));
    x[4999] = NAN;
    CHECK(std::isnan(squares_of(x)));
}

TEST_CASE("the factor that clips, and NaN that stays") {
    const float cases[][4] = {// squares, largest norm, factor before, factor
                              {16.0f, 1.0f, 0.5f, 0.25f}, {0.25f, 1.0f, 0.5f, 1.0f}, {16.0f, 4.0f, 0.5f, 1.0f},
                              {16.0f, 0.0f, 0.5f, 1.0f},  {0.0f, 1.0f, 0.5f, 1.0f},  {INFINITY, 1.0f, 0.5f, NAN},
                              {NAN, 0.0f, 0.5f, NAN},     {16.0f, 1.0f, NAN, NAN}};
    for (const auto& c : cases) {
        CAPTURE(c[0]);
        auto squares = filled<float>(1, c[0]), factor = filled<float>(1, c[2]), norm = poisoned<float>(1);
        OnGpu<float> s(squares), f(factor), n(norm);
        gpu::clip_factor(n, f, s, c[1], nullptr);
        f.back(), n.back();
        CHECK((factor[0] == c[3] || (std::isnan(factor[0]) && std::isnan(c[3]))));
        CHECK((norm[0] == std::sqrt(c[0]) || std::isnan(c[0])));
    }
}

// ---- AdamW

constexpr int adamw_steps = 5;
constexpr float adamw_lr = 1e-2f;

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
static void compare_adamw(int64_t count, int64_t decayed, float clip = 0.5f) {
    CAPTURE(count);
    CAPTURE(decayed);
    constexpr bool masters = sizeof(floatX) != sizeof(float);
    AdamWState<floatX> got(count), want(count);
    auto factor = filled<float>(1, clip);
    {
        OnGpu<floatX> weight(got.weight);
        OnGpu<float> master(got.master), m(got.m), v(got.v), f(factor);
        for (int step = 1; step <= adamw_steps; step++) {
            auto grads = random_tensor<float>(count, 100 + uint64_t(step));
            for (int64_t i = 0; i < count; i++) grads[i] *= std::pow(10.0f, -float(i % 13));
            OnGpu<float> grad(grads);
            gpu::adamw<floatX>(weight, masters ? master.device : nullptr, m, v, grad, f, count, decayed, AdamWConfig{},
                               adamw_lr, step, nullptr);
            cpu::plain::adamw<floatX>(want.weight.data(), masters ? want.master.data() : nullptr, want.m.data(),
                                      want.v.data(), grads.data(), factor.data(), count, decayed, AdamWConfig{},
                                      adamw_lr, step, nullptr);
            check_cuda(cudaDeviceSynchronize());  // grads goes away
        }
        weight.back(), master.back(), m.back(), v.back();
    }
    // m sums terms of up to about 0.2, which may cancel. An update is at most about lr * (1 + decay), with some 8
    // roundings; the weight, of about 1, is rounded in each step.
    const float update_error = adamw_steps * (8 * adamw_lr + 1) * epsilon<float>();
    expect_close("m", got.m, want.m, 1, 2 * adamw_steps * epsilon<float>(), adamw_steps * epsilon<float>() * 0.1f);
    expect_close("v", got.v, want.v, 1, 4 * adamw_steps * epsilon<float>(), 1e-30f);
    expect_close("master", got.master, want.master, 1, adamw_steps * epsilon<float>(), update_error);
    expect_close("weight", got.weight, want.weight, 1, rounding<floatX>(), update_error);
    if (masters)
        for (int64_t i = 0; i < count; i++) REQUIRE(float(got.weight[i]) == float(floatX(got.master[i])));
}

TEST_CASE_TEMPLATE("AdamW of any count, decaying any part", floatX, float, bf16) {
    for (int64_t count : {1, 7, 8, 17, 65, 1000})
        for (int64_t decayed : {int64_t(0), count / 2, count}) compare_adamw<floatX>(count, decayed);
    compare_adamw<floatX>(5003, 2501);
}

TEST_CASE_TEMPLATE("a NaN factor leaves everything as it is", floatX, float, bf16) {
    AdamWState<floatX> s(100);
    const AdamWState<floatX> untouched(100);
    auto grad = random_tensor<float>(100, 3), factor = filled<float>(1, NAN);
    OnGpu<floatX> weight(s.weight);
    OnGpu<float> master(s.master), m(s.m), v(s.v), g(grad), f(factor);
    gpu::adamw<floatX>(weight, sizeof(floatX) == 4 ? nullptr : master.device, m, v, g, f, 100, 50, AdamWConfig{},
                       adamw_lr, 1, nullptr);
    weight.back(), master.back(), m.back(), v.back();
    expect_close("weight", s.weight, untouched.weight, 1, 0.0f, 0.0f);
    expect_close("master", s.master, untouched.master, 1, 0.0f, 0.0f);
    expect_close("m", s.m, untouched.m, 1, 0.0f, 0.0f);
    expect_close("v", s.v, untouched.v, 1, 0.0f, 0.0f);
}

TEST_CASE("impossible steps of AdamW are refused") {
    float* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::adamw(none, none, none, none, none, none, 1, 0, AdamWConfig{}, 1e-2f, 0, nullptr),
                         doctest::Contains("step 0; steps count from 1"), Error);
    CHECK_THROWS_WITH_AS(gpu::adamw(none, none, none, none, none, none, 1, 2, AdamWConfig{}, 1e-2f, 1, nullptr),
                         doctest::Contains("2 of 1 elements decayed"), Error);
}
