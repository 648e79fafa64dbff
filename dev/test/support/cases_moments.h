// cases_moments.h: the cases of moments in bf16 and in 8 bits (ops.inc) that test_moments.cpp and test_gpu_ops.cu
// share: single steps against the definition, and 1,000 steps against moments in double.
#pragma once
#include <cmath>
#include <cstring>

#include "base/moments.h"
#include "support/cases_adamw.h"

namespace moment_cases {

using enum WhichMoment;
constexpr uint64_t SEED = 0x123456789;
constexpr MomentDtype NARROW[] = {MomentDtype::bf16, MomentDtype::block8};

// A moment in the memory of floats: of `count` elements, then their exponents.
inline Moment moment_in(float* memory, int64_t count, MomentDtype dtype) {
    const bool in_codes = dtype == MomentDtype::block8;
    return {memory, in_codes ? reinterpret_cast<uint8_t*>(memory) + count : nullptr, dtype};
}

inline Tensor<float> widened(const Tensor<float>& memory, WhichMoment which, MomentDtype dtype) {
    Tensor<float> out(memory.size());
    const Moment moment = moment_in(const_cast<float*>(memory.data()), memory.size(), dtype);
    cpu::widen_moment(out.data(), moment, which, memory.size(), nullptr);
    return out;
}

inline Tensor<float> narrowed(const Tensor<float>& values, WhichMoment which, MomentDtype dtype) {
    auto memory = filled<float>(values.size(), 0.0f);
    cpu::store_moment(moment_in(memory.data(), values.size(), dtype), values.data(), which, values.size(), nullptr);
    return memory;
}

template <class floatX>
struct Run {
    adamw_cases::State<floatX> state;
    MomentDtype dtype;

    Run(int64_t count, adamw_cases::Master where, MomentDtype dtype) : state(count, where), dtype(dtype) {}
    // One step; each call of op updates `cut` elements.
    template <class Where>
    void step(const Where& where, adamw_cases::Op<floatX> op, const Tensor<float>& grad, int number, int64_t begin = 0,
              float weight_decay = 0.1f, int64_t cut = 1 << 30) {
        const int64_t count = grad.size();
        const auto factor = filled<float>(1, 1.0f);
        const AdamWConfig config = {.weight_decay = weight_decay, .seed = SEED};
        const auto in_cuts = [&](floatX* weight, float* master, float* m, float* v, const float* grad,
                                 const float* factor, Stream stream) {
            const Moment first = moment_in(m, count, dtype), second = moment_in(v, count, dtype);
            for (int64_t i = 0; i < count; i += cut)
                op(weight + i, master ? master + i : nullptr, first.from(i), second.from(i), grad + i, factor,
                   begin + i, std::min(cut, count - i), {count, count / 128 * 64, FLAT_ALIGN, 0}, config,
                   adamw_cases::LR, number, stream);
        };
        where.call(in_cuts, state.weight, state.masters(), state.m, state.v, grad, factor);
    }
    Tensor<float> m() const { return widened(state.m, first, dtype); }
    Tensor<float> v() const { return widened(state.v, second, dtype); }
};

// Elements of a that are not those of b, and whether none is further away than `relative`.
inline std::pair<int64_t, bool> compared(const Tensor<float>& a, const Tensor<float>& b, float relative) {
    int64_t different = 0;
    bool close = true;
    for (int64_t i = 0; i < a.size(); i++) {
        different += a[i] != b[i];
        close &= std::fabs(a[i] - b[i]) <= relative * std::max(std::fabs(a[i]), std::fabs(b[i])) + 1e-30f;
    }
    return {different, close};
}

// Backend and definition round the same sums by the same random bits, so only sums that differ in their last bits may
// become neighbours: codes, an eighth apart where values are larger than n, or values of bf16. One step, so that
// these differences do not add up. Weights without master weights differ by about 2^-22 before they are rounded to
// bf16, whose neighbours are 2^-8 apart.
template <class floatX, class Backend>
void one_step(const Backend& backend, int64_t count, adamw_cases::Master where, int64_t cut) {
    for (const MomentDtype dtype : NARROW) {
        CAPTURE(int(dtype));
        const auto grad = adamw_cases::gradient(count, 1);
        const int64_t begin = 5 * FLAT_ALIGN;
        const auto after = [&](const auto& on, adamw_cases::Op<floatX> op, int64_t cut) {
            Run<floatX> run(count, where, dtype);
            run.state.m = narrowed(random_tensor<float>(count, 5), first, dtype);
            run.state.v = narrowed(adamw_cases::squares_of_random(count, 6), second, dtype);
            run.step(on, op, grad, 3, begin, 0.1f, cut);
            return run;
        };
        const auto want = after(OnHost{}, cpu::reference::adamw<floatX>, count);
        backend.on_each_variant([&] {
            const auto got = after(backend, ops::adamw<floatX>, count);
            const auto in_cuts = after(backend, ops::adamw<floatX>, cut);
            CHECK(same_bits(got.state.m, in_cuts.state.m));
            CHECK(same_bits(got.state.v, in_cuts.state.v));
            CHECK(same_bits(got.state.weight, in_cuts.state.weight));
            for (const auto& [a, b] : {std::pair(got.m(), want.m()), {got.v(), want.v()}}) {
                const auto [different, close] = compared(a, b, 0.13f);
                CHECK(different <= 1 + (count >> 9));
                CHECK(close);
            }
            if (sizeof(floatX) == 2 && where == adamw_cases::Master::weight_itself)
                CHECK(compared(got.state.weights(), want.state.weights(), 0.0f).first <= 4 + (count >> 12));
            expect_close("weight", got.state.weights(), want.state.weights(), 1,
                         where == adamw_cases::Master::apart ? 1e-5f : epsilon<floatX>(), 1e-4f);
        });
    }
}

// The bits that round the first step's means are those of Philox for seed, step and element, of a stream that rounds no
// weights: that of random.h.
template <class Backend>
void random_bits(const Backend& backend) {
    constexpr int64_t count = (1 << 16) + 192, begin = 5 * FLAT_ALIGN;
    constexpr int step = 7;
    const auto grad = random_tensor<float>(count, 1), factor = filled<float>(1, 1.0f);
    Tensor<float> means(count), want(count);
    auto codes = filled<float>(count, 0.0f);
    const Philox random{SEED, (uint64_t(0x5adb) << 48) + step};
    for (int64_t i = 0; i < count; i++) {
        const uint32_t e = i % FLAT_ALIGN, word = random(uint64_t((begin + i) / FLAT_ALIGN))[e / 16];
        means[i] = (1.0f - 0.9f) * grad[i];
        want[i] = float(round_randomly(means[i], moment_bits(word, e) >> 16));
    }
    cpu::round_moment(moment_in(codes.data(), count, MomentDtype::block8), means.data(), first, begin, count, random);
    backend.on_each_variant([&] {
        Run<float> run(count, adamw_cases::Master::weight_itself, MomentDtype::bf16);
        run.step(backend, ops::adamw<float>, grad, step, begin);
        CHECK(same_bits(run.m(), want));
        for (const MomentDtype dtype : NARROW) {
            auto out = filled<float>(count, 0.0f), memory = filled<float>(count, 0.0f);
            const auto muon = [=](float* out, float* m, const float* grad, const float* factor, Stream stream) {
                ops::muon_momentum(out, moment_in(m, count, dtype), grad, factor, begin, count, 0.9f, SEED, step,
                                   stream);
            };
            backend.call(muon, out, memory, grad, factor);
            if (dtype == MomentDtype::bf16)
                CHECK(same_bits(widened(memory, first, dtype), want));
            else
                CHECK(same_bits(memory, codes));
        }
    });
}

// ---- 1,000 steps

// The kinds of blocks, and the standard deviation of element i's gradients in them.
enum Kind { usual, one_huge, zeros, subnormal, fading, KINDS };
inline float deviation(Kind kind, int64_t i, int step) {
    switch (kind) {
        case usual:
            return std::pow(10.0f, -float(i % 4) / 2.0f);
        case one_huge:
            return i % FLAT_ALIGN == 7 ? 1e4f : 1e-7f;
        case zeros:
            return 0.0f;
        case subnormal:
            return 1e-39f;
        default:
            return step <= 100 ? 1.0f : 0.0f;  // moments that shrink towards zero
    }
}
constexpr int64_t EACH = 4 * FLAT_ALIGN;  // elements of a kind
constexpr Kind kind_of(int64_t i) { return Kind(i / EACH); }

inline Tensor<float> gradients(int step) {
    Tensor<float> grad(KINDS * EACH);
    for (int64_t i = 0; i < grad.size(); i++)
        grad[i] = Philox{uint64_t(step), 7}.normal(uint64_t(i)) * deviation(kind_of(i), i, step);
    return grad;
}

struct Exact {
    double m = 0.0, v = 0.0;
    void step(double g, const AdamWConfig& c) {
        m = double(c.beta1) * m + (1 - double(c.beta1)) * g;
        v = double(c.beta2) * v + (1 - double(c.beta2)) * g * g;
    }
};

// No step is longer than one of exact moments can be, times 2. Where all elements matter, the mean of v is exact, and m
// is off by less than a quarter of the root of v.
template <class floatX, class Backend>
void thousand_steps(const Backend& backend, int steps) {
    for (const MomentDtype dtype : NARROW) {
        CAPTURE(int(dtype));
        backend.on_each_variant([&] {
            const int64_t count = KINDS * EACH;
            Run<floatX> run(count, adamw_cases::Master::apart, dtype);
            std::vector<Exact> exact(static_cast<size_t>(count));
            double longest = 0.0, ratio = 0.0, error = 0.0;
            int64_t seen = 0;
            for (int step = 1; step <= steps; step++) {
                const auto grad = gradients(step), before = run.state.weights();
                run.step(backend, ops::adamw<floatX>, grad, step, 0, 0.0f);
                const auto after = run.state.weights(), m = run.m(), v = run.v();
                for (int64_t i = 0; i < count; i++) {
                    Exact& e = exact[size_t(i)];
                    e.step(double(grad[i]), {});
                    longest =
                        std::max(longest, std::isfinite(after[i]) ? double(std::fabs(after[i] - before[i])) : 1e9);
                    if (kind_of(i) != usual || step <= 100) continue;
                    seen++;
                    ratio += double(v[i]) / e.v;
                    error += std::pow((double(m[i]) - e.m) / std::sqrt(e.v), 2);
                }
            }
            // (1 - beta1) / sqrt(1 - beta2) times the sum of (beta1 / sqrt(beta2))^n is 5.85.
            CHECK(longest < double(adamw_cases::LR) * 2 * 5.85);
            CHECK(std::fabs(ratio / double(seen) - 1.0) < 0.02);
            CHECK(std::sqrt(error / double(seen)) < (dtype == MomentDtype::bf16 ? 0.005 : 0.015));
            const auto m = run.m(), v = run.v();
            int64_t not_zero = 0;
            for (int64_t i = 0; i < count; i++) not_zero += kind_of(i) == zeros && (m[i] != 0.0f || v[i] != 0.0f);
            CHECK(not_zero == 0);
        });
    }
}

// ---- conversion

template <class Backend>
void stored_again(const Backend& backend, WhichMoment which, int64_t count) {
    for (const MomentDtype dtype : NARROW) {
        CAPTURE(int(dtype));
        Tensor<float> values(count);
        for (int64_t i = 0; i < count; i++) {
            const int power = (int(i / FLAT_ALIGN % 50) - 25) * (which == first ? 5 : 2);
            const float x = std::ldexp(Philox{9, 9}.normal(uint64_t(i)), power);
            values[i] = which == first ? x : x * x;
        }
        const auto memory = narrowed(values, which, dtype), wide = widened(memory, which, dtype);
        backend.on_each_variant([&] {
            auto got = filled<float>(count, 1.0f), again = filled<float>(count, 0.0f);
            const auto widen = [&](float* out, float* memory, Stream stream) {
                ops::widen_moment(out, moment_in(memory, count, dtype), which, count, stream);
            };
            const auto store = [&](float* memory, const float* values, Stream stream) {
                ops::store_moment(moment_in(memory, count, dtype), values, which, count, stream);
            };
            auto from = copy_of(memory);
            backend.call(widen, got, from);
            CHECK(same_bits(got, wide));
            backend.call(store, again, got);
            CHECK(same_bits(again, memory));
            backend.call(store, again, values);
            CHECK(same_bits(again, memory));
        });
    }
}

}  // namespace moment_cases
