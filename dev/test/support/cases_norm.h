// cases_norm.h: the cases of gradient norm, gradient clipping, and sums and conversions of gradients that test_ops.cpp
// and test_gpu_ops.cu share.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/moments.h"
#include "support/cases.h"

namespace norm_cases {

template <class Backend>
float squares_of(const Backend& backend, const Tensor<float>& x) {
    auto out = poisoned<float>(1);
    backend.call(ops::sum_of_squares, out, x, x.size());
    return out[0];
}

// roundings: the allowed error, because the backend may add the positive numbers in another order.
template <class Backend>
void compare_squares(const Backend& backend, int64_t count, float roundings) {
    CAPTURE(count);
    const auto x = random_tensor<float>(count, 1, 1.0f, 0.5f);
    const auto outputs = [&](const auto& where, const auto& op) {
        auto out = poisoned<float>(1);
        where.call(op, out, x, count);
        return outputs_of(output("squares", out, 1, roundings * epsilon<float>(), 0.0f));
    };
    backend.compare(outputs(OnHost{}, cpu::reference::sum_of_squares),
                    [&] { return outputs(backend, ops::sum_of_squares); });
    backend.on_each_variant([&] { CHECK(squares_of(backend, x) == squares_of(backend, x)); });
}

template <class Backend>
void known_squares(const Backend& backend) {
    backend.on_each_variant([&] {
        auto x = filled<float>(5000, 2.0f);
        CHECK(squares_of(backend, x) == 20000.0f);
        x[4999] = 1e30f;
        CHECK(std::isinf(squares_of(backend, x)));
        x[4999] = NAN;
        CHECK(std::isnan(squares_of(backend, x)));
    });
}

template <class Backend>
void accumulated_gradients(const Backend& backend, std::initializer_list<int64_t> counts) {
    for (const int64_t count : counts) {
        const auto x = random_tensor<float>(count, 1);
        auto sum = random_tensor<float>(count, 2), want = copy_of(sum);
        for (int64_t i = 0; i < count; i++) want[i] += x[i];
        backend.call(ops::accumulate_gradients, sum, x, count);
        expect_close(format("%lld gradients", static_cast<long long>(count)), sum, want, 1, 0.0f, 0.0f);
    }
}

// round_randomly rounds each addition. Its random bits depend on the element, the addition, the step and the seed, and
// not on where the buffer is cut. The mean over many of these bits is the exact sum.
template <class Backend>
void rounded_sums(const Backend& backend, int64_t count, int64_t cut) {
    const auto add = [&](Tensor<bf16>& sum, const Tensor<float>& x, int64_t begin, uint64_t seed, int addition) {
        const auto in_cuts = [&](bf16* sum, const float* x, Stream stream) {
            for (int64_t i = 0; i < count; i += cut)
                ops::accumulate_rounded(sum + i, x + i, begin + i, std::min(cut, count - i), seed, 7, addition, stream);
        };
        backend.call(in_cuts, sum, x);
    };
    auto x = random_tensor<float>(count, 1);
    const float special[] = {NAN, INFINITY, -3e38f, 1e-42f, 0.0f, -0x1p-133f};
    std::copy_n(special, 6, x.data());
    auto sum = filled<bf16>(count + 64, 0.0f), want = copy_of(sum);
    const int64_t begin = (int64_t(1) << 35) - 64;
    for (const int addition : {0, 1, 65537}) {
        const Philox random{42, uint64_t(0x5adc) << 48 | uint64_t(addition % 65536) << 32 | 7};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t word = random(uint64_t(begin + i) / 64)[size_t((begin + i) % 64 / 16)];
            const uint32_t bits = moment_bits(word, uint32_t((begin + i) % 64)) >> 16;
            want[i] = round_randomly(float(want[i]) + x[i], bits);
        }
        add(sum, x, begin, 42, addition);
    }
    int64_t wrong = 0;
    for (int64_t i = 0; i < count + 64; i++)
        wrong += std::isnan(float(want[i])) ? !std::isnan(float(sum[i])) : sum[i].bits != want[i].bits;
    CHECK(wrong == 0);

    // 1 + 16 additions of 2^-11, a sixteenth of the distance of bf16s there, which rounding to nearest would ignore.
    double total = 0.0;
    const auto step = filled<float>(count, 0x1p-11f);
    sum = filled<bf16>(count, 1.0f);
    for (int addition = 0; addition < 16; addition++) add(sum, step, 0, 1, addition);
    for (int64_t i = 0; i < count; i++) total += double(float(sum[i])) - 1.0;
    const double mean = total / double(count), deviation = 0x1p-7 * std::sqrt(16 * 15.0) / 16;  // of 16 roundings
    CHECK(std::fabs(mean - 0x1p-7) < 4 * deviation / std::sqrt(double(count)));
}

// Gradients are rounded as the constructor of bf16 rounds, and nothing behind them is written.
template <class Backend>
void converted_gradients(const Backend& backend, std::initializer_list<int64_t> counts) {
    for (const int64_t count : counts) {
        CAPTURE(count);
        auto x = random_tensor<float>(count, 1);
        const float special[] = {NAN, INFINITY, 1.0f + 0x1p-8f, 1.0f + 0x3p-8f, -0.0f, 1e-42f};
        std::copy_n(special, std::min<int64_t>(count, 6), x.data());
        auto rounded = poisoned<bf16>(count + 64);
        auto widened = poisoned<float>(count + 64);
        backend.call(ops::round_gradients, rounded, x, count);
        backend.call(ops::widen_gradients, widened, rounded, count);
        int64_t wrong = 0;
        for (int64_t i = 0; i < count + 64; i++) {
            const bf16 want(i < count ? x[i] : NAN);
            if (std::isnan(float(want)))
                wrong += !std::isnan(float(rounded[i])) || !std::isnan(widened[i]);
            else
                wrong += rounded[i].bits != want.bits || !(widened[i] == float(want));
        }
        CHECK(wrong == 0);
    }
}

template <class Backend>
void clip_factors(const Backend& backend) {
    struct Case {
        float squares, max_norm, before, factor, loss = 2.0f;
        StepLimits limits = {};
    };
    const Case cases[] = {{16.0f, 1.0f, 0.5f, 0.25f},
                          {0.25f, 1.0f, 0.5f, 1.0f},
                          {16.0f, 4.0f, 0.5f, 1.0f},
                          {16.0f, 0.0f, 0.5f, 1.0f},
                          {INFINITY, 1.0f, 0.5f, NAN},
                          {NAN, 1.0f, 0.5f, NAN},
                          {16.0f, 0.0f, NAN, NAN},
                          {16.0f, 1.0f, 0.5f, NAN, NAN},
                          {16.0f, 1.0f, 0.5f, NAN, INFINITY},
                          {16.0f, 1.0f, 0.5f, 0.25f, 2.0f, {2.0f, 4.0f}},
                          {16.0f, 1.0f, 0.5f, INFINITY, 2.1f, {2.0f, 4.0f}},
                          {16.1f, 0.0f, 0.5f, INFINITY, 2.0f, {2.0f, 4.0f}},
                          {16.0f, 1.0f, INFINITY, 0.25f},  // a step after one that exceeded a limit
                          {16.0f, 1.0f, NAN, NAN, 2.1f, {2.0f, 4.0f}},
                          {NAN, 1.0f, 0.5f, NAN, 2.1f, {2.0f, 4.0f}},
                          {0.0f, 1.0f, 0.5f, INFINITY, 0.0f, {-FLT_MAX, -1.0f}}};
    for (const Case& c : cases) {
        CAPTURE(c.squares);
        CAPTURE(c.loss);
        const auto squares = filled<float>(1, c.squares), loss = filled<float>(1, c.loss);
        auto factor = filled<float>(1, c.before), norm = poisoned<float>(1);
        backend.call(ops::clip_factor, norm, factor, squares, loss, c.max_norm, c.limits);
        const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
        CHECK(same(factor[0], c.factor));
        CHECK(same(norm[0], std::sqrt(c.squares)));
    }
}

}  // namespace norm_cases
