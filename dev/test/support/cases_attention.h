// cases_attention.h: the cases of causal attention that test_attention.cpp, test_matrix_attention.cpp and
// test_gpu_attention.cu share.
#pragma once
#include <algorithm>

#include "support/cases.h"

namespace attention_cases {

struct Shape {
    int B, T, NH, HS;
    int C() const { return NH * HS; }
    int64_t tokens() const { return int64_t(B) * T; }
};

template <class floatX>
struct Ops {
    decltype(&cpu::attention_forward<floatX>) forward;
    decltype(&cpu::attention_backward<floatX>) backward;
    decltype(&cpu::attention_decode<floatX>) decode;
};
template <class floatX>
const Ops<floatX> definition{cpu::reference::attention_forward<floatX>, cpu::reference::attention_backward<floatX>,
                             cpu::reference::attention_decode<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::attention_forward<floatX>, ops::attention_backward<floatX>,
                         ops::attention_decode<floatX>};

template <class floatX>
struct Forward {
    Tensor<floatX> out;  // (B, T, C)
    Tensor<float> lse;   // (B, NH, T)
};

template <class Backend, class floatX>
Forward<floatX> forward(const Backend& backend, const Ops<floatX>& ops, Shape s, const Tensor<floatX>& qkv) {
    Forward<floatX> r{poisoned<floatX>(s.tokens() * s.C()), poisoned<float>(s.tokens() * s.NH)};
    backend.call(ops.forward, r.out, r.lse, qkv, s.B, s.T, s.NH, s.HS);
    return r;
}

template <class Backend, class floatX>
Tensor<floatX> backward(const Backend& backend, const Ops<floatX>& ops, Shape s, const Tensor<floatX>& qkv,
                        const Tensor<floatX>& dout, const Forward<floatX>& of_forward) {
    auto dqkv = poisoned<floatX>(s.tokens() * 3 * s.C());
    backend.call(ops.backward, dqkv, dout, of_forward.out, of_forward.lse, qkv, s.B, s.T, s.NH, s.HS);
    return dqkv;
}

// Decodes the last token of the first sequence.
template <class Backend, class floatX>
Tensor<floatX> decode(const Backend& backend, const Ops<floatX>& ops, Shape s, const Tensor<floatX>& qkv) {
    auto decoded = poisoned<floatX>(s.C());
    backend.call(ops.decode, decoded, qkv, s.T, s.NH, s.HS);
    return decoded;
}

// Additional errors of a backend's arithmetic, for the bounds below.
struct Bounds {
    float operands = 0.0f;  // rounding of attention weights to bf16 operands of matrix units, for values of about 1
    float lse_relative = 0.0f, lse_absolute = 0.0f;  // error of the logarithm
};

// Compares with the definition. Backward gets the definition's out and lse, so that an error of forward does not hide
// an error of backward. Here and below, `ops` are those under test.
//
// The bound for float arithmetic: A score is a sum of HS products of standard normal numbers, divided by sqrt(HS). Two
// orders of summing it differ by about sqrt(HS) roundings, and two orders of summing over T keys by about sqrt(T). The
// absolute error of a score is the relative error of its attention weight. Weights and gradients are multiplied by
// numbers of up to about 5. Each result is rounded to floatX once.
//
// The bound for matrix units: Attention weights p and their gradients are rounded to bf16, which changes a number by at
// most 1/512 of it (half a step), with a standard deviation of 1/512/sqrt(3). out is a mean of values with weights p,
// where the sum of p^2 is at most 1. The gradients are sums over rows of dscore / sqrt(HS) and over columns of p, whose
// root of the sum of squares is below about 2; the first keys, which the most queries see, have the largest. So 6
// standard deviations are 6 * 2 * (1/512) / sqrt(3) = 1.7 steps of bf16 for gradients, and half of that for out.
template <class floatX, class Backend>
void compare(const Backend& backend, Shape s, Bounds bounds = {}, float scale = 1.0f,
             const Ops<floatX>& ops = tested<floatX>) {
    INFO("B=", s.B, " T=", s.T, " NH=", s.NH, " HS=", s.HS);
    const auto qkv = random_tensor<floatX>(s.tokens() * 3 * s.C(), 1, scale);
    const auto dout = random_tensor<floatX>(s.tokens() * s.C(), 2);
    const auto given = forward(OnHost{}, definition<floatX>, s, qkv);
    const float sum_error = 4.0f * (std::sqrt(float(s.HS)) + std::sqrt(float(s.T))) * epsilon<float>() * scale * scale;
    const float step = rounding_step<floatX>(), operands = bounds.operands * scale;
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        const auto r = forward(where, ops, s, qkv);
        return outputs_of(
            output("out", r.out, s.C(), step, sum_error + 0.85f * operands),
            output("lse", r.lse, s.T, bounds.lse_relative, sum_error + bounds.lse_absolute),
            output("dqkv", backward(where, ops, s, qkv, dout, given), 3 * s.C(), step, 4 * sum_error + 1.7f * operands),
            output("decoded", decode(where, ops, s, qkv), s.C(), step, sum_error));
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, ops); });
}

template <class floatX, class Backend>
void same_bits_twice(const Backend& backend, Shape s, const Ops<floatX>& ops = tested<floatX>) {
    CAPTURE(s.HS);
    const auto qkv = random_tensor<floatX>(s.tokens() * 3 * s.C(), 1);
    const auto dout = random_tensor<floatX>(s.tokens() * s.C(), 2);
    backend.on_each_variant([&] {
        const auto bits = [&] {
            const auto r = forward(backend, ops, s, qkv);
            return outputs_of(output("out", r.out, 1, 0, 0), output("lse", r.lse, 1, 0, 0),
                              output("dqkv", backward(backend, ops, s, qkv, dout, r), 1, 0, 0));
        };
        expect_same_bits("", bits(), bits());
    });
}

// Key t is the unit vector t, and query t is 1000 times the unit vector of one earlier position. So the weight of that
// position is 1. The weight of every other position is exp(-1000 / sqrt(HS)), which is at most 4e-39, or the smallest
// number that the exp of a variant returns. lse_error: the allowed error of lse, 0 where 1000 / sqrt(HS) is exact.
template <class floatX, class Backend>
void one_hot_queries(const Backend& backend, int HS, float lse_error, const Ops<floatX>& ops = tested<floatX>) {
    CAPTURE(HS);
    const int T = 64, C = HS;
    const Shape s{1, T, 1, HS};
    auto qkv = filled<floatX>(T * 3 * C, 0.0f);
    const auto chosen_key = [](int t) { return t * 7 % (t + 1); };
    for (int t = 0; t < T; t++) {
        qkv[t * 3 * C + chosen_key(t)] = floatX(1000.0f);
        qkv[t * 3 * C + C + t] = floatX(1.0f);
        for (int i = 0; i < HS; i++) qkv[t * 3 * C + 2 * C + i] = floatX(float(t + i));
    }
    backend.on_each_variant([&] {
        const auto [out, lse] = forward(backend, ops, s, qkv);
        for (int t = 0; t < T; t++) {
            CHECK(std::fabs(lse[t] - 1000.0f / std::sqrt(float(HS))) <= lse_error);
            for (int i = 0; i < HS; i++) CHECK(std::fabs(float(out[t * C + i]) - float(chosen_key(t) + i)) < 1e-30f);
        }
    });
}

// Scores of up to 1e32 do not overflow. In each row one key has the whole weight. So out is this key's value, dv is a
// sum of rows of dout, and dq and dk would be 0 without rounding errors. Backward cannot compute the weights from lse
// alone: from scores of about 1e7 on, the rounding error of lse is too large for an exponent.
//
// rounding: the relative error of a weight and of a product. On tensor cores it is a step of bf16: with scores below
// 1e9 an unnormalized weight may be 2^-0.5 to 2^0.5, and is rounded before it is divided by itself. In float arithmetic
// out is exact.
template <class floatX, class Backend>
void far_scores(const Backend& backend, int HS, float magnitude, bool on_tensor_cores,
                const Ops<floatX>& ops = tested<floatX>) {
    INFO("HS=", HS, " magnitude=", magnitude);
    const Shape s{1, 140, 1, HS};
    auto qkv = random_tensor<floatX>(s.tokens() * 3 * HS, 1);
    const auto dout = random_tensor<floatX>(s.tokens() * HS, 2);
    for (int64_t i = 0; i < qkv.size(); i++)
        if (i / HS % 3 < 2) qkv[i] = floatX(float(qkv[i]) * magnitude);
    const auto want = forward(OnHost{}, definition<floatX>, s, qkv);
    auto dv = filled<float>(s.tokens() * HS, 0.0f);
    for (int t = 0; t < s.T; t++) {
        int key = 0;
        while (key < t && std::memcmp(&want.out[t * HS], &qkv[(key * 3 + 2) * HS], size_t(HS) * sizeof(floatX)) != 0)
            key++;
        for (int i = 0; i < HS; i++) dv[key * HS + i] += float(dout[t * HS + i]);
    }
    // The terms of a score may cancel, so its error is bounded by the size of its terms, 10 magnitude^2 each.
    const float lse_error = 10.0f * magnitude * magnitude * float(HS) * epsilon<float>();
    const float rounding = on_tensor_cores ? epsilon<floatX>() : float(HS) * epsilon<float>();
    // dout * v is at most 5 sqrt(HS), and a query or key at most 5 magnitude. Up to T queries see a key.
    const float left = rounding * 5.0f * std::sqrt(float(HS)) * 5.0f * magnitude / std::sqrt(float(HS));

    backend.on_each_variant([&] {
        const auto got = forward(backend, ops, s, qkv);
        expect_close("out", got.out, want.out, HS, on_tensor_cores ? rounding : 0.0f, 0.0f);
        expect_close("lse", got.lse, want.lse, s.T, 1e-5f, lse_error);
        const auto dqkv = backward(backend, ops, s, qkv, dout, got);
        auto got_dv = poisoned<float>(dv.size());
        for (int t = 0; t < s.T; t++)
            for (int i = 0; i < HS; i++) {
                const floatX* row = dqkv.data() + t * 3 * HS + i;
                CHECK(std::fabs(float(row[0])) <= left);
                CHECK(std::fabs(float(row[HS])) <= float(s.T) * left);
                got_dv[t * HS + i] = float(row[2 * HS]);
            }
        expect_close("dv", got_dv, dv, HS, epsilon<floatX>(), float(s.T) * epsilon<float>());
    });
}

// All queries from the key's position on see the key, and no earlier one does. With key 0 no row has a number left.
template <class floatX, class Backend>
void nan_in_a_key(const Backend& backend, int T, int key, int HS, const Ops<floatX>& ops = tested<floatX>) {
    CAPTURE(HS);
    const Shape s{1, T, 1, HS};
    auto qkv = random_tensor<floatX>(s.tokens() * 3 * s.C(), 1);
    const auto dout = random_tensor<floatX>(s.tokens() * s.C(), 2);
    qkv[key * 3 * s.C() + s.C() + 3] = floatX(NAN);
    backend.on_each_variant([&] {
        const auto got = forward(backend, ops, s, qkv);
        for (int t = 0; t < T; t++) {
            CAPTURE(t);
            CHECK(std::isnan(float(got.out[t * s.C()])) == (t >= key));
            CHECK(std::isnan(got.lse[t]) == (t >= key));
        }
        const auto dqkv = backward(backend, ops, s, qkv, dout, got);
        const auto gradient = [&](int t, int part) { return float(dqkv[(t * 3 + part) * s.C()]); };
        for (int part = 0; part < 3; part++) CHECK(std::isnan(gradient(key, part)));
        CHECK(std::isnan(gradient(T - 1, 0)));
        CHECK(std::isnan(float(decode(backend, ops, s, qkv)[0])));
    });
}

inline void refuse_no_heads_and_no_tokens() {
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(ops::attention_backward(&x, &x, &x, &x, &x, 1, 1, 0, 8, nullptr),
                         doctest::Contains("attention_backward of 1 sequences of 1 tokens, 0 heads"), Error);
    CHECK_THROWS_WITH_AS(ops::attention_decode(&x, &x, 0, 1, 8, nullptr), doctest::Contains("of 0 tokens"), Error);
}

}  // namespace attention_cases
