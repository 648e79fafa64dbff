// cases_cross_entropy.h: the cases of softmax, cross entropy and the sum of losses that test_cross_entropy.cpp and
// test_gpu_cross_entropy.cu share.
#pragma once
#include "support/cases.h"

namespace cross_entropy_cases {

struct Shape {
    int N, V, Vp;
};

constexpr float SCALE = 0.125f;

template <class floatX>
struct Ops {
    decltype(&cpu::cross_entropy_forward<floatX>) forward;
    decltype(&cpu::cross_entropy<floatX>) both;
};
template <class floatX>
const Ops<floatX> definition{cpu::plain::cross_entropy_forward<floatX>, cpu::plain::cross_entropy<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::cross_entropy_forward<floatX>, ops::cross_entropy<floatX>};

// Random targets. The first is token 0, the second is token V - 1, and every fifth is ignored.
inline Tensor<int> some_targets(Shape s) {
    auto targets = random_tokens(s.N, s.V, 2);
    targets[0] = 0;
    if (s.N > 1) targets[1] = s.V - 1;
    for (int n = 4; n < s.N; n += 5) targets[n] = -1;
    return targets;
}

// Random logits. The padded columns hold 1e9, so that an operation which reads them has a wrong loss.
template <class floatX>
Tensor<floatX> some_logits(Shape s, float spread) {
    auto logits = random_tensor<floatX>(int64_t(s.N) * s.Vp, 1, spread);
    for (int n = 0; n < s.N; n++)
        for (int v = s.V; v < s.Vp; v++) logits[int64_t(n) * s.Vp + v] = floatX(1e9f);
    return logits;
}

// The losses of cross_entropy_forward and of cross_entropy, and the gradient of the logits.
template <class floatX>
struct Losses {
    Tensor<float> forward, both;
    Tensor<floatX> gradient;
};

template <class Backend, class floatX>
Losses<floatX> run(const Backend& backend, const Ops<floatX>& ops, const Tensor<floatX>& logits,
                   const Tensor<int>& targets, Shape s, float scale) {
    Losses<floatX> r{poisoned<float>(s.N), poisoned<float>(s.N), copy_of(logits)};
    backend.call(ops.forward, r.forward, logits, targets, s.N, s.V, s.Vp);
    backend.call(ops.both, r.gradient, r.both, targets, s.N, s.V, s.Vp, scale);
    return r;
}

// Two sums of V positive terms in different orders differ by about sqrt(V) roundings of the sum. This is the absolute
// error of the loss, which is the logarithm of the sum, and the relative error of each probability. exp_roundings: the
// relative error of the backend's exp and log, in roundings.
template <class floatX, class Backend>
void compare(const Backend& backend, float exp_roundings, Shape s, float spread = 2.0f) {
    CAPTURE(s.N);
    CAPTURE(s.V);
    CAPTURE(spread);
    const auto targets = some_targets(s);
    const auto logits = some_logits<floatX>(s, spread);
    const float error = (4.0f * std::sqrt(float(s.V)) + exp_roundings) * epsilon<float>();
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        const auto r = run(where, ops, logits, targets, s, SCALE);
        Outputs outputs;
        outputs.push_back(output("losses", r.forward, 1, 2 * epsilon<float>(), error));
        outputs.push_back(output("losses with gradient", r.both, 1, 2 * epsilon<float>(), error));
        outputs.push_back(
            output("gradient", r.gradient, s.Vp, rounding_step<floatX>() + error, error * SCALE * 0.125f));
        return outputs;
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, tested<floatX>); });
}

// The loss is log V, the gradients of a row sum to zero, and padding and ignored rows have none.
template <class floatX, class Backend>
void equal_logits(const Backend& backend) {
    const Shape s{3, 64, 72};
    Tensor<int> targets(s.N);
    targets[0] = 0;
    targets[1] = -1;
    targets[2] = s.V - 1;
    for (const float logit : {3.0f, 1e4f, -1e4f})
        backend.on_each_variant([&] {
            CAPTURE(logit);
            const auto r = run(backend, tested<floatX>, filled<floatX>(s.N * s.Vp, logit), targets, s, 1.0f);
            CHECK(double(r.both[0]) == doctest::Approx(std::log(64.0)).epsilon(1e-6));
            CHECK(r.both[1] == 0.0f);
            CHECK(r.both[2] == r.both[0]);
            CHECK(same_bits(r.forward, r.both));
            const Tensor<floatX>& g = r.gradient;
            for (int v = 0; v < s.Vp; v++) {
                const float other = v < s.V ? 1.0f / 64 : 0.0f;  // exact in bf16 as well
                CHECK(float(g[v]) == (v == 0 ? 1.0f / 64 - 1 : other));
                CHECK(float(g[s.Vp + v]) == 0.0f);
                CHECK(float(g[2 * s.Vp + v]) == (v == s.V - 1 ? 1.0f / 64 - 1 : other));
            }
        });
}

// A row with the largest logit at its target, and one with the largest logit elsewhere.
template <class floatX, class Backend>
void huge_logits(const Backend& backend, int Vp) {
    const Shape s{2, 33, Vp};
    const float huge = float(floatX(1e30f));
    auto logits = filled<floatX>(2 * Vp, -huge);
    logits[5] = floatX(huge);
    logits[Vp + 32] = floatX(huge);
    Tensor<int> targets(2);
    targets[0] = 5;
    targets[1] = 7;
    backend.on_each_variant([&] {
        const auto r = run(backend, tested<floatX>, logits, targets, s, 1.0f);
        for (const auto* losses : {&r.both, &r.forward}) {
            CHECK((*losses)[0] == 0.0f);
            CHECK((*losses)[1] == doctest::Approx(2.0 * double(huge)));
        }
        for (int v = 0; v < s.V; v++) {
            CHECK(float(r.gradient[v]) == 0.0f);
            CHECK(float(r.gradient[Vp + v]) == (v == 32 ? 1.0f : v == 7 ? -1.0f : 0.0f));
        }
    });
}

template <class floatX, class Backend>
void not_finite_logits(const Backend& backend, int V, int Vp) {
    CAPTURE(V);
    const Shape s{1, V, Vp};
    Tensor<int> target(1);
    target[0] = 10;
    for (int place : {0, 3, 20, V - 1})
        for (const float x : {NAN, INFINITY, -INFINITY})
            backend.on_each_variant([&] {
                CAPTURE(x);
                CAPTURE(place);
                auto logits = filled<floatX>(Vp, 1.0f);
                logits[place] = floatX(x);
                const auto r = run(backend, tested<floatX>, logits, target, s, 1.0f);
                if (x == -INFINITY) {
                    CHECK(double(r.forward[0]) == doctest::Approx(std::log(double(V - 1))).epsilon(1e-6));
                    CHECK(r.forward[0] == r.both[0]);
                    CHECK(float(r.gradient[place]) == 0.0f);
                } else {
                    CHECK(std::isnan(r.forward[0]));
                    CHECK(std::isnan(r.both[0]));
                }
            });
}

template <class floatX, class Backend>
void one_finite_logit(const Backend& backend, int V) {
    CAPTURE(V);
    const Shape s{1, V, round_up(V, 8)};
    auto logits = filled<floatX>(s.Vp, -INFINITY);
    logits[V - 1] = floatX(-3.0f);
    Tensor<int> target(1);
    target[0] = V - 1;
    backend.on_each_variant([&] {
        const auto r = run(backend, tested<floatX>, logits, target, s, 1.0f);
        CHECK(r.forward[0] == 0.0f);
        CHECK(r.both[0] == 0.0f);
        int64_t nonzero = 0;
        for (int v = 0; v < s.V; v++) nonzero += float(r.gradient[v]) != 0.0f;
        CHECK(nonzero == 0);
    });
}

// tolerance: the allowed relative error of the sum.
template <class Backend>
void sum_of_losses(const Backend& backend, double tolerance) {
    const auto total_of = [&](const Tensor<float>& losses) {
        auto total = filled<float>(1, 5.0f);
        backend.call(ops::accumulate_loss, total, losses, int(losses.size()), 0.5f);
        return total[0];
    };
    const auto check = [&](const Tensor<float>& losses) {
        CAPTURE(losses.size());
        double sum = 0.0;
        for (int64_t n = 0; n < losses.size(); n++) sum += double(losses[n]);
        const float got = total_of(losses);
        CHECK(double(got) == doctest::Approx(5.0 + 0.5 * sum).epsilon(tolerance));
        CHECK(total_of(losses) == got);
    };
    for (int N : {1, 31, 33, 1000, 1023, 1024, 1025, 5000}) check(random_tensor<float>(N, 1, 1.0f, 10.0f));
    auto losses = filled<float>(1000, 0.1f);
    check(losses);
    losses[999] = NAN;
    CHECK(std::isnan(total_of(losses)));
}

inline void refuse_impossible_rows() {
    float x = 0.0f;
    const int target = 0;
    CHECK_THROWS_WITH_AS(ops::cross_entropy(&x, &x, &target, 1, 9, 8, 1.0f, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy_forward(&x, &x, &target, 1, 9, 8, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::cross_entropy(&x, &x, &target, 0, 9, 12, 1.0f, nullptr), doctest::Contains("0 rows of 9"),
                         Error);
}

}  // namespace cross_entropy_cases
