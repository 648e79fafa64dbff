// test_classifier.cpp: softmax and cross entropy against their definition, at GPT-2's vocabulary and at awkward ones;
// known losses; huge logits; ignored targets; padded columns; NaN and infinity; the sum of the losses.
#include "support/each_variant.h"

struct Shape {
    int N, V, Vp;
};

constexpr float scale = 0.125f;

// Every fifth target is to be ignored.
static Tensor<int> some_targets(int N, int V) {
    auto targets = random_tokens(N, V, 2);
    for (int n = 4; n < N; n += 5) targets[n] = -1;
    return targets;
}

// Padded columns hold 1e9, which would drown every loss.
template <class floatX>
static Tensor<floatX> some_logits(Shape s, float spread) {
    auto logits = random_tensor<floatX>(int64_t(s.N) * s.Vp, 1, spread);
    for (int n = 0; n < s.N; n++)
        for (int v = s.V; v < s.Vp; v++) logits[int64_t(n) * s.Vp + v] = floatX(1e9f);
    return logits;
}

// Two orders of summing V positive terms differ by about sqrt(V) roundings of the sum, which the loss, its logarithm,
// has absolutely and each probability relatively.
template <class floatX>
static Results run(decltype(&cpu::cross_entropy_forward<floatX>) forward, decltype(&cpu::cross_entropy<floatX>) both,
                   Shape s, float spread) {
    const auto targets = some_targets(s.N, s.V);
    auto logits = some_logits<floatX>(s, spread);
    auto losses = poisoned<float>(s.N), losses2 = poisoned<float>(s.N);
    forward(losses.data(), logits.data(), targets.data(), s.N, s.V, s.Vp, nullptr);
    both(logits.data(), losses2.data(), targets.data(), s.N, s.V, s.Vp, scale, nullptr);
    const float error = 4.0f * std::sqrt(float(s.V)) * epsilon<float>() + 8 * epsilon<float>();
    Results r;
    r.push_back(result("losses", losses, 1, 2 * epsilon<float>(), error));
    r.push_back(result("losses with gradient", losses2, 1, 2 * epsilon<float>(), error));
    r.push_back(result("gradient", logits, s.Vp, rounding<floatX>() + error, error * scale * 0.125f));
    return r;
}

template <class floatX>
static void compare(Shape s, float spread = 2.0f) {
    CAPTURE(s.V);
    check_variants(run<floatX>(cpu::plain::cross_entropy_forward, cpu::plain::cross_entropy, s, spread),
                   [=] { return run<floatX>(cpu::cross_entropy_forward, cpu::cross_entropy, s, spread); });
}

TEST_CASE_TEMPLATE("cross entropy over GPT-2's vocabulary", floatX, float, bf16) { compare<floatX>({7, 50257, 50304}); }

TEST_CASE_TEMPLATE("cross entropy over awkward vocabularies", floatX, float, bf16) {
    for (int V : {1, 2, 7, 16, 17, 65, 127}) compare<floatX>({9, V, 128});
    compare<floatX>({65, 31, 31});
    compare<floatX>({9, 100, 128}, 1000.0f);
}

TEST_CASE_TEMPLATE("equal logits lose log V; gradients sum to zero; padding and ignored rows get none", floatX, float,
                   bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const int N = 3, V = 64, Vp = 72;
        auto logits = filled<floatX>(N * Vp, 3.0f);
        auto losses = poisoned<float>(N);
        Tensor<int> targets(N);
        targets[0] = 0, targets[1] = -1, targets[2] = V - 1;
        cpu::cross_entropy(logits.data(), losses.data(), targets.data(), N, V, Vp, 1.0f, nullptr);
        CHECK(double(losses[0]) == doctest::Approx(std::log(64.0)).epsilon(1e-6));
        CHECK(losses[1] == 0.0f);
        CHECK(losses[2] == losses[0]);
        for (int v = 0; v < Vp; v++) {
            CHECK(float(logits[v]) == (v == 0 ? 1.0f / 64 - 1 : v < V ? 1.0f / 64 : 0.0f));  // exact in bf16 as well
            CHECK(float(logits[Vp + v]) == 0.0f);
            CHECK(float(logits[2 * Vp + v]) == (v == V - 1 ? 1.0f / 64 - 1 : v < V ? 1.0f / 64 : 0.0f));
        }
    }
}

TEST_CASE_TEMPLATE("logits of 1e30 either way", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const int V = 33;
        const float huge = float(floatX(1e30f));
        auto logits = filled<floatX>(2 * V, -huge);
        logits[5] = floatX(huge), logits[V + 32] = floatX(huge);
        Tensor<int> targets(2);
        targets[0] = 5, targets[1] = 7;
        auto losses = poisoned<float>(2), forward = poisoned<float>(2);
        cpu::cross_entropy_forward(forward.data(), logits.data(), targets.data(), 2, V, V, nullptr);
        cpu::cross_entropy(logits.data(), losses.data(), targets.data(), 2, V, V, 1.0f, nullptr);
        for (const auto* l : {&losses, &forward}) {
            CHECK((*l)[0] == 0.0f);
            CHECK((*l)[1] == doctest::Approx(2.0 * double(huge)));
        }
        for (int v = 0; v < V; v++) {
            CHECK(float(logits[v]) == 0.0f);
            CHECK(float(logits[V + v]) == (v == 32 ? 1.0f : v == 7 ? -1.0f : 0.0f));
        }
    }
}

TEST_CASE_TEMPLATE("NaN and infinite logits give a NaN loss; minus infinity is a probability of 0", floatX, float,
                   bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const int V = 40;
        const float odd[] = {NAN, INFINITY, -INFINITY};
        for (int place : {0, 3, 20, 39})
            for (const float x : odd) {
                auto logits = filled<floatX>(V, 1.0f);
                logits[place] = floatX(x);
                Tensor<int> target(1);
                target[0] = 10;
                auto losses = poisoned<float>(1), forward = filled<float>(1, 0.0f);
                cpu::cross_entropy_forward(forward.data(), logits.data(), target.data(), 1, V, V, nullptr);
                cpu::cross_entropy(logits.data(), losses.data(), target.data(), 1, V, V, 1.0f, nullptr);
                CAPTURE(x);
                CAPTURE(place);
                if (x == -INFINITY) {
                    CHECK(double(forward[0]) == doctest::Approx(std::log(39.0)).epsilon(1e-6));
                    CHECK(forward[0] == losses[0]);
                    CHECK(float(logits[place]) == 0.0f);
                } else {
                    CHECK(std::isnan(forward[0]));
                    CHECK(std::isnan(losses[0]));
                }
            }
    }
}

TEST_CASE("losses are added up") {
    auto losses = filled<float>(1000, 0.1f), total = filled<float>(1, 5.0f);
    cpu::accumulate_loss(total.data(), losses.data(), 1000, 0.5f, nullptr);
    CHECK(double(total[0]) == doctest::Approx(5.0 + 1000 * 0.5 * double(0.1f)).epsilon(1e-7));
    losses[999] = NAN;
    cpu::accumulate_loss(total.data(), losses.data(), 1000, 0.5f, nullptr);
    CHECK(std::isnan(total[0]));
}

TEST_CASE("a vocabulary larger than its rows is refused") {
    float x = 0.0f;
    const int target = 0;
    CHECK_THROWS_WITH_AS(cpu::cross_entropy(&x, &x, &target, 1, 9, 8, 1.0f, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(cpu::cross_entropy_forward(&x, &x, &target, 1, 9, 8, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
}
