// cases_muon.h: the cases of Muon's operations that test_muon_ops.cpp and test_gpu_ops.cu share: the definitions of
// ops.inc, computed in double. Arrays have more elements than an operation is told of, and these must stay.
#pragma once
#include <algorithm>
#include <cmath>

#include "support/cases.h"

namespace muon_cases {

constexpr int64_t TAIL = 9;  // elements after the last
// Values here are below 6, and a result has at most 4 roundings of such values.
constexpr float ERROR = 4 * 6 * epsilon<float>();

// m, v and out after a step, where out is memory of its own or the gradients'.
template <class Backend>
void momentum(const Backend& backend, int64_t count, float value) {
    INFO(count, " elements, factor ", value);
    constexpr float mu = 0.9f;
    const AdamWConfig config = {.beta1 = 0.7f, .beta2 = 0.96f};
    const auto m = random_tensor<float>(count + TAIL, 1), v = random_tensor<float>(count + TAIL, 2, 0.1f, 3.0f);
    const auto factor = filled<float>(1, value);
    auto grad = random_tensor<float>(count + TAIL, 3);
    if (!std::isfinite(value)) grad[0] = value;
    for (const bool in_place : {false, true}) {
        auto want_m = copy_of(m), want_v = copy_of(v);
        auto want = in_place ? copy_of(grad) : random_tensor<float>(count + TAIL, 4);
        const auto before = copy_of(want);
        for (int64_t i = 0; i < count; i++) {
            want[i] = 0.0f;
            if (!std::isfinite(value)) continue;
            const double g = double(grad[i]) * double(value), share = 1 - double(mu), beta2 = double(config.beta2);
            const double mean = double(mu) * double(m[i]) + share * g;
            want_m[i] = float(mean);
            want_v[i] = float(beta2 * double(v[i]) + (1 - beta2) * g * g);
            want[i] = float(double(mu) * mean + share * g);
        }
        const auto outputs = [](const Tensor<float>& out, const Tensor<float>& m, const Tensor<float>& v) {
            return outputs_of(output("out", out, 1, 0.0f, ERROR), output("m", m, 1, 0.0f, ERROR),
                              output("v", v, 1, 8 * epsilon<float>(), 0.0f));
        };
        backend.compare(outputs(want, want_m, want_v), [&] {
            auto got = copy_of(before), got_m = copy_of(m), got_v = copy_of(v);
            const auto& from = in_place ? got : grad;
            backend.call(ops::muon_momentum, got, got_m, got_v, from, factor, count, mu, config);
            return outputs(got, got_m, got_v);
        });
    }
}

// With squares of 1e-12 the 1e-7 are a tenth of the norm. A matrix of zeros stays zero.
template <class floatX, class Backend>
void normalize(const Backend& backend, int64_t count) {
    CAPTURE(count);
    for (const float sum : {1e-12f, 20.0f, 0.0f}) {
        const auto x = random_tensor<float>(count + TAIL, 1, std::sqrt(sum)), squares = filled<float>(1, sum);
        const auto before = random_tensor<floatX>(count + TAIL, 2);
        auto want = poisoned<float>(count + TAIL);
        for (int64_t i = 0; i < count + TAIL; i++)
            want[i] = i < count ? float(double(x[i]) / (std::sqrt(double(sum)) + 1e-7)) : float(before[i]);
        const auto outputs = [](const auto& out) {
            return outputs_of(output("out", out, 1, rounding_step<floatX>(), 0));
        };
        backend.compare(outputs(want), [&] {
            auto got = copy_of(before);
            backend.call(ops::muon_normalize<floatX>, got, x, squares, count);
            return outputs(got);
        });
    }
}

// out is memory of its own or that of the square.
template <class floatX, class Backend>
void polynomial(const Backend& backend, int n) {
    CAPTURE(n);
    constexpr float a = 3.5f, b = -4.75f, c = 2.0f, largest = 6 * (4.75f + 2) + 3.5f;
    const int64_t count = int64_t(n) * n;
    const auto matrix = random_tensor<floatX>(count + TAIL, 1), square = random_tensor<floatX>(count + TAIL, 2);
    for (const bool in_place : {false, true}) {
        const auto before = in_place ? copy_of(square) : random_tensor<floatX>(count + TAIL, 3);
        auto want = poisoned<float>(count + TAIL);
        for (int64_t i = 0; i < count + TAIL; i++) {
            want[i] = float(before[i]);
            if (i >= count) continue;
            const double diagonal = i / n == i % n ? double(a) : 0.0;
            want[i] = float(double(b) * double(float(matrix[i])) + double(c) * double(float(square[i])) + diagonal);
        }
        const auto outputs = [](const auto& out) {
            return outputs_of(output("out", out, 1, rounding_step<floatX>(), 4 * largest * epsilon<float>()));
        };
        backend.compare(outputs(want), [&] {
            auto got = copy_of(before);
            backend.call(ops::muon_polynomial<floatX>, got, matrix, in_place ? got : square, n, a, b, c);
            return outputs(got);
        });
    }
}

// ---- the update

constexpr int64_t SHIFT = 3;  // the arrays of an update begin at any element

template <class floatX>
struct Weights {
    Tensor<floatX> weight;
    Tensor<float> master;  // of bf16 weights
    explicit Weights(int64_t count)
        : weight(random_tensor<floatX>(count + TAIL, 1)), master(random_tensor<float>(count + TAIL, 1)) {}

    template <class Backend>
    void update(const Backend& backend, bool has_master, const Tensor<floatX>& direction, float factor, float scale,
                float weight_decay, float lr) {
        const int64_t count = weight.size() - TAIL;
        const auto op = [=](floatX* weight, float* master, const floatX* direction, const float* factor,
                            Stream stream) {
            ops::muon_update<floatX>(weight + SHIFT, master ? master + SHIFT : nullptr, direction + SHIFT, factor, 5,
                                     count, scale, AdamWConfig{.weight_decay = weight_decay}, lr, 3, stream);
        };
        backend.call(op, weight, has_master ? &master : nullptr, direction, filled<float>(1, factor));
    }
};

// One copy of the weights in fp32 and another, rounded, in bf16; or fp32 weights alone.
template <class floatX, class Backend>
void update(const Backend& backend, int64_t count) {
    CAPTURE(count);
    constexpr bool has_master = sizeof(floatX) != sizeof(float);
    constexpr float scale = 1.5f, decay = 0.125f, lr = 0.3f;
    const Weights<floatX> before(count);
    const auto direction = random_tensor<floatX>(count + TAIL, 2);
    Tensor<float> want = copy_of(before.master);
    for (int64_t i = SHIFT; i < count + SHIFT; i++) {
        const double w = double(want[i]);
        want[i] = float(w - double(lr) * (double(scale) * double(float(direction[i])) + double(decay) * w));
    }
    const auto outputs = [](const auto& weights) { return outputs_of(output("weight", weights, 1, 0.0f, ERROR)); };
    backend.compare(outputs(want), [&] {
        Weights<floatX> got(count);
        got.update(backend, has_master, direction, 0.1f, scale, decay, lr);
        int64_t not_rounded = 0;
        for (int64_t i = 0; i < count + TAIL && has_master; i++)
            not_rounded += float(got.weight[i]) != float(floatX(got.master[i]));
        REQUIRE(not_rounded == 0);
        if constexpr (has_master)
            return outputs(got.master);
        else
            return outputs(got.weight);
    });
    for (const float factor : {NAN, INFINITY})
        for (const bool apart : {has_master, false})
            backend.on_each_variant([&] {
                Weights<floatX> got(count);
                got.update(backend, apart, direction, factor, scale, decay, lr);
                const bool same = same_bits(got.weight, before.weight) && same_bits(got.master, before.master);
                CHECK(same);
            });
}

// Without master weights the bits are those of Philox for seed, step and element, however the range is cut. All numbers
// are multiples of 2^-16 below 8, so that every backend computes the same value before it rounds.
template <class Backend>
void stochastic_rounding(const Backend& backend, int64_t count, std::initializer_list<int64_t> cuts) {
    const auto sixteenths = [&](uint64_t seed) {
        const auto numbers = random_tokens(count, 128, seed);
        Tensor<bf16> tensor(count);
        for (int64_t i = 0; i < count; i++) tensor[i] = bf16(float(numbers[i] - 64) / 16);
        return tensor;
    };
    const auto before = sixteenths(1), direction = sixteenths(2);
    const auto factor = filled<float>(1, 1.0f);
    AdamWConfig config = {.weight_decay = 0x1p-4f, .seed = 42};
    int step = 7;
    for (const int64_t begin : {int64_t(0), int64_t(5), (int64_t(1) << 35) - 21}) {
        CAPTURE(begin);
        config.seed += 3, step++;
        auto want = copy_of(before);
        const Philox random{config.seed, ROUNDING_STREAMS + uint64_t(step)};
        for (int64_t i = 0; i < count; i++) {
            const float w = float(want[i]);
            want[i] = round_randomly(w - 0x1p-6f * (0.5f * float(direction[i]) + config.weight_decay * w),
                                     random.bits16(uint64_t(begin + i)));
        }
        for (const int64_t cut : cuts)
            backend.compare(outputs_of(output("weight", want, 1, 0.0f, 0.0f)), [&] {
                auto got = copy_of(before);
                const auto in_cuts = [&](bf16* weight, const bf16* direction, const float* factor, Stream stream) {
                    for (int64_t i = 0; i < count; i += cut)
                        ops::muon_update<bf16>(weight + i, nullptr, direction + i, factor, begin + i,
                                               std::min(cut, count - i), 0.5f, config, 0x1p-6f, step, stream);
                };
                backend.call(in_cuts, got, direction, factor);
                return outputs_of(output("weight", got, 1, 0.0f, 0.0f));
            });
    }
}

}  // namespace muon_cases
