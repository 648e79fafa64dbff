// cases_adamw.h: the cases of AdamW that test_adamw.cpp and test_gpu_ops.cu share. Steps are compared with the
// definition; weights without master weights are rounded stochastically.
#pragma once
#include <algorithm>

#include "support/cases.h"

namespace adamw_cases {

constexpr float LR = 1e-2f;

template <class floatX>
using Op = decltype(&cpu::adamw<floatX>);

// The pattern of a buffer with one bucket, whose first `decayed` elements decay.
inline DecayPattern first_ones(int64_t count, int64_t decayed) { return {count, decayed, FLAT_ALIGN, 0}; }

enum class Master { apart, weight_itself };

template <class floatX>
struct State {
    Tensor<floatX> weight;
    Tensor<float> master, m, v;
    bool has_master;
    explicit State(int64_t count, Master where = Master::apart)
        : weight(random_tensor<floatX>(count, 1)),
          master(random_tensor<float>(count, 1)),
          m(filled<float>(count, 0.0f)),
          v(filled<float>(count, 0.0f)),
          has_master(where == Master::apart && sizeof(floatX) != sizeof(float)) {}
    Tensor<float>* masters() { return has_master ? &master : nullptr; }
    Tensor<float> weights() const {  // the master weights, or the weights if there are none
        Tensor<float> w(weight.size());
        for (int64_t i = 0; i < w.size(); i++) w[i] = has_master ? master[i] : float(weight[i]);
        return w;
    }
};

// Gradients span magnitudes from 1e-12 to 1.
inline float gradient_at(int64_t i, int step) {
    return Philox{100 + uint64_t(step), 0}.normal(uint64_t(i)) * std::pow(10.0f, -float(i % 13));
}
inline Tensor<float> gradient(int64_t count, int step) {
    Tensor<float> grad(count);
    for (int64_t i = 0; i < count; i++) grad[i] = gradient_at(i, step);
    return grad;
}

// An update is at most about LR * (1 + decay), and about 8 roundings are made on the way to it. The weight, of about 1,
// is rounded once per step.
inline float update_error(int steps) { return float(steps) * (8 * LR + 1) * epsilon<float>(); }

// m is a sum of terms of up to about 0.2. They may cancel, so its error is bounded absolutely. The moments are zero
// before step `first`.
template <class floatX, class Backend>
void compare(const Backend& backend, int steps, int64_t count, DecayPattern decay, int64_t begin = 0, int first = 1) {
    INFO("count=", count, " begin=", begin, " decayed=", decay.first_decayed, " first=", first);
    std::vector<Tensor<float>> grads;
    for (int i = 0; i < steps; i++) grads.push_back(gradient(count, first + i));
    const auto factor = filled<float>(1, 0.5f);
    const auto outputs = [&](const auto& where, Op<floatX> op) {
        State<floatX> s(count);
        for (int i = 0; i < steps; i++)
            where.call(op, s.weight, s.masters(), s.m, s.v, grads[i], factor, begin, count, decay, AdamWConfig{}, LR,
                       first + i);
        int64_t not_rounded = 0;
        for (int64_t i = 0; i < count && s.has_master; i++)
            not_rounded += float(s.weight[i]) != float(floatX(s.master[i]));
        REQUIRE(not_rounded == 0);
        const float roundings = float(steps) * epsilon<float>();
        return outputs_of(output("weight", s.weights(), 1, roundings, update_error(steps)),
                          output("m", s.m, 1, 2 * roundings, roundings * 0.1f),
                          output("v", s.v, 1, 4 * roundings, 1e-30f));
    };
    backend.compare(outputs(OnHost{}, cpu::reference::adamw<floatX>),
                    [&] { return outputs(backend, ops::adamw<floatX>); });
}

// Several counts in one bucket, of which no, some or all elements decay.
template <class floatX, class Backend>
void awkward_counts(const Backend& backend, int steps) {
    for (int64_t count : {64, 128, 192, 1088})
        for (int64_t decayed : {int64_t(0), count / 128 * 64, count})
            compare<floatX>(backend, steps, count, first_ones(count, decayed));
    compare<floatX>(backend, steps, 5056, first_ones(5056, 2496));
}

template <class floatX, class Backend>
void several_buckets(const Backend& backend, int steps) {
    const DecayPattern decay = {256, 192, 320, 128};
    compare<floatX>(backend, steps, 2240, decay);            // the range ends within a bucket
    compare<floatX>(backend, steps, 1088, decay, 64);        // it begins within the first bucket
    compare<floatX>(backend, steps, 320, decay, 576, 1000);  // it is one of the later buckets; other corrections
    compare<floatX>(backend, steps, 2112, decay, 704);       // it begins within one of the later buckets
    compare<floatX>(backend, steps, 704, {64, 0, 64, 64});   // every bucket but the first decays
    const int64_t far = int64_t(1) << 40;                    // an index that does not fit into 32 bits
    compare<floatX>(backend, steps, 1088, {far, far - 64, 320, 128}, far - 128);
    compare<floatX>(backend, steps, 1088, decay, far);
}

// ---- weights without master weights, which are rounded stochastically

// One step with gradients of zero and a decay of 2^-10. Every backend computes weight - 2^-10 * weight exactly, and
// then rounds it to the 8 significant bits of bf16. Each call updates `cut` elements.
template <class Backend>
Tensor<bf16> decayed_once(const Backend& backend, Op<bf16> op, const Tensor<bf16>& start, int64_t begin, int step,
                          uint64_t seed = 42, int64_t cut = 1 << 30) {
    const int64_t count = start.size();
    const AdamWConfig config = {0.5f, 0.5f, 1.0f, 0x1p-10f, seed};
    const DecayPattern all = {FLAT_ALIGN, FLAT_ALIGN, FLAT_ALIGN, FLAT_ALIGN};
    auto weight = copy_of(start);
    auto m = filled<float>(count, 0.0f), v = filled<float>(count, 0.0f);
    const auto grad = filled<float>(count, 0.0f), factor = filled<float>(1, 1.0f);
    const auto in_cuts = [&](bf16* weight, float* m, float* v, const float* grad, const float* factor, Stream stream) {
        for (int64_t i = 0; i < count; i += cut)
            op(weight + i, nullptr, m + i, v + i, grad + i, factor, begin + i, std::min(cut, count - i), all, config,
               1.0f, step, stream);
    };
    backend.call(in_cuts, weight, m, v, grad, factor);
    return weight;
}

// The bits are those of Philox for seed, step and element, and do not depend on the number of elements per call.
template <class Backend>
void stochastic_rounding(const Backend& backend, int64_t count, std::initializer_list<int64_t> cuts) {
    // Counters of Philox below, across and above 2^32, where the counter needs a second word. One call of Philox serves
    // 8 elements.
    uint64_t seed = 42;
    int step = 7;
    for (const int64_t begin : {int64_t(0), int64_t(64), int64_t(192), (int64_t(1) << 35) - 320, int64_t(1) << 35}) {
        CAPTURE(begin);
        seed += 3, step++;
        const auto start = random_tensor<bf16>(count, 1);
        Tensor<bf16> want(count);
        const Philox random{seed, ROUNDING_STREAMS + uint64_t(step)};
        for (int64_t i = 0; i < count; i++) {
            const float w = float(start[i]);
            want[i] = round_randomly(w - 0x1p-10f * w, random.bits16(uint64_t(begin + i)));
        }
        std::vector<int64_t> all_cuts = {count};
        all_cuts.insert(all_cuts.end(), cuts.begin(), cuts.end());
        for (const int64_t cut : all_cuts)
            backend.compare(outputs_of(output("weight", want, 1, 0.0f, 0.0f)), [&] {
                const auto got = decayed_once(backend, ops::adamw<bf16>, start, begin, step, seed, cut);
                return outputs_of(output("weight", got, 1, 0.0f, 0.0f));
            });
    }
}

inline Tensor<float> squares_of_random(int64_t count, uint64_t seed) {
    auto x = random_tensor<float>(count, seed);
    for (int64_t i = 0; i < count; i++) x[i] *= x[i];
    return x;
}

// Zeros must stay zero, because padding is zero in every buffer.
template <class Backend>
void zeros_and_nan_without_masters(const Backend& backend) {
    auto start = filled<bf16>(64, 0.0f);
    start[3] = bf16(NAN);
    start[4] = bf16(INFINITY);
    start[5] = bf16(-3.0e38f);
    backend.on_each_variant([&] {
        const auto end = decayed_once(backend, ops::adamw<bf16>, start, 0, 1);
        for (int i = 0; i < 64; i++) CHECK((float(end[i]) == 0.0f) == (i < 3 || i > 5));
        CHECK(std::isnan(float(end[3])));
        CHECK(std::isnan(float(end[4])));  // infinity - infinity
        CHECK(float(end[5]) == doctest::Approx(-3.0e38).epsilon(0.01));
    });
}

// ---- nothing to do

template <class floatX, class Backend>
void factor_not_finite(const Backend& backend, float value) {
    const auto grad = random_tensor<float>(128, 3), factor = filled<float>(1, value);
    for (const Master where : {Master::apart, Master::weight_itself})
        backend.on_each_variant([&] {
            State<floatX> s(128, where);
            const State<floatX> untouched(128, where);
            backend.call(ops::adamw<floatX>, s.weight, s.masters(), s.m, s.v, grad, factor, int64_t(0), int64_t(128),
                         first_ones(128, 64), AdamWConfig{}, LR, 1);
            const bool same = same_bits(s.weight, untouched.weight) && same_bits(s.master, untouched.master) &&
                              same_bits(s.m, untouched.m) && same_bits(s.v, untouched.v);
            CHECK(same);
        });
}

inline void no_elements_and_impossible_steps() {
    float one = 1.0f;
    ops::adamw(&one, &one, &one, &one, &one, &one, 64, 0, first_ones(64, 64), AdamWConfig{}, LR, 1, nullptr);
    CHECK(one == 1.0f);
    const auto refused = [](int64_t begin, int64_t count, DecayPattern decay, int step, const char* text) {
        float x = 0.0f;
        CHECK_THROWS_WITH_AS(ops::adamw(&x, &x, &x, &x, &x, &x, begin, count, decay, AdamWConfig{}, LR, step, nullptr),
                             doctest::Contains((std::string("internal error: adamw: ") + text).c_str()), Error);
    };
    refused(0, 64, first_ones(64, 0), 0, "step 0; steps count from 1");
    refused(0, 65, first_ones(64, 0), 1, "65 elements from 0 on: multiples of 64");
    refused(-64, 64, first_ones(64, 0), 1, "64 elements from -64 on");
    refused(0, 64, first_ones(64, 128), 1, "128 of a bucket of 64 elements decay");
    refused(0, 64, {64, 0, 0, 0}, 1, "buckets of no elements");
}

}  // namespace adamw_cases
