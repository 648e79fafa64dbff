// test_gelu.cpp: GELU and its slope against their definition and against the formula in double; huge inputs; NaN.
#include "support/each_variant.h"

template <class floatX>
static Results run(decltype(&cpu::gelu_forward<floatX>) forward, decltype(&cpu::gelu_backward<floatX>) backward,
                   int64_t count) {
    const auto inp = random_tensor<floatX>(count, 1, 3.0f), dout = random_tensor<floatX>(count, 2);
    auto out = poisoned<floatX>(count), dinp = poisoned<floatX>(count);
    forward(out.data(), inp.data(), count, nullptr);
    backward(dinp.data(), inp.data(), dout.data(), count, nullptr);
    // The definition loses digits of 1 + tanh where tanh is near -1: an error of 2 roundings of 1 times |x| <= 12, and
    // in the slope times u' as well, where 1 - tanh^2 is not yet 0.
    Results r;
    r.push_back(result("out", out, 1, rounding<floatX>(), 12 * 2 * epsilon<float>()));
    r.push_back(result("dinp", dinp, 1, rounding<floatX>(), 64 * epsilon<float>()));
    return r;
}

template <class floatX>
static void compare(int64_t count) {
    check_variants(run<floatX>(cpu::plain::gelu_forward, cpu::plain::gelu_backward, count),
                   [=] { return run<floatX>(cpu::gelu_forward, cpu::gelu_backward, count); });
}

TEST_CASE_TEMPLATE("GELU of an MLP's activations", floatX, float, bf16) { compare<floatX>(16 * 3072); }
TEST_CASE_TEMPLATE("GELU of awkward counts", floatX, float, bf16) {
    for (int count : {1, 7, 15, 16, 17, 65, (1 << 14) + 1}) compare<floatX>(count);
}

// 0.5 x (1 + tanh u) = x / (1 + e^-2u), which loses no digits; the slope is s + x s (1 - s) 2u'. An error of one
// rounding in 2u moves e^-2u by |2u| roundings.
TEST_CASE("GELU is its formula in double, and finite for any input") {
    for (const Isa level : available_isas(Isa::avx512)) {
        const RunsOn setting(level, 2);
        std::vector<float> points = {0.0f, -0.0f, 1.0f, -1.0f, 1e-30f, -1e-30f, 1e4f, -1e4f, 1e30f, -1e30f};
        for (float x = -12.0f; x <= 12.0f; x += 0.0137f) points.push_back(x);
        const int64_t count = int64_t(points.size());
        auto inp = filled<float>(count, 0.0f), out = poisoned<float>(count), dinp = poisoned<float>(count);
        const auto dout = filled<float>(count, 1.0f);
        for (int64_t i = 0; i < count; i++) inp[i] = points[i];
        cpu::gelu_forward(out.data(), inp.data(), count, nullptr);
        cpu::gelu_backward(dinp.data(), inp.data(), dout.data(), count, nullptr);
        for (int64_t i = 0; i < count; i++) {
            const double x = std::fmax(std::fmin(double(points[i]), 1e9), -1e9),
                         slope = 2 * std::sqrt(2 / std::acos(-1));
            const double two_u = slope * (x + 0.044715 * x * x * x), s = 1 / (1 + std::exp(-two_u));
            const double bend = s == 0 || s == 1 ? 0 : x * s * (1 - s) * slope * (1 + 3 * 0.044715 * x * x);
            const double roundings = 8 * double(epsilon<float>()) * (1 + std::fmin(std::fabs(two_u), 90.0));
            const double cancelled = level == Isa::plain ? 64 * double(epsilon<float>()) : 1e-36;
            CAPTURE(x);
            CHECK(std::fabs(double(out[i]) - s * double(points[i])) <=
                  roundings * std::fabs(s * points[i]) + cancelled);
            CHECK(std::fabs(double(dinp[i]) - (s + bend)) <= roundings * (std::fabs(s) + std::fabs(bend)) + cancelled);
        }
    }
}

TEST_CASE_TEMPLATE("GELU at chosen points", floatX, float, bf16) {
    const double points[][2] = {{0.0, 0.0}, {1.0, 0.84119199}, {-1.0, -0.15880801}, {3.0, 2.99636264}, {100.0, 100.0}};
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 1);
        for (const auto& [x, y] : points) {
            const auto inp = filled<floatX>(1, float(x));
            auto out = poisoned<floatX>(1);
            cpu::gelu_forward(out.data(), inp.data(), 1, nullptr);
            CHECK(std::fabs(double(float(out[0])) - y) <= double(rounding<floatX>()) * std::fabs(y));
        }
    }
}

TEST_CASE_TEMPLATE("dinp may be dout, and NaN stays NaN", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto inp = random_tensor<floatX>(67, 1), d = random_tensor<floatX>(67, 2), apart = poisoned<floatX>(67);
        inp[40] = floatX(NAN);
        auto out = filled<floatX>(67, 0.0f);
        cpu::gelu_backward(apart.data(), inp.data(), d.data(), 67, nullptr);
        cpu::gelu_backward(d.data(), inp.data(), d.data(), 67, nullptr);
        cpu::gelu_forward(out.data(), inp.data(), 67, nullptr);
        for (int i = 0; i < 67; i++) {
            CHECK((i == 40) == std::isnan(float(d[i])));
            CHECK((i == 40) == std::isnan(float(out[i])));
            if (i != 40) CHECK(float(d[i]) == float(apart[i]));
        }
    }
}
