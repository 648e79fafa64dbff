// test_gpu_classifier.cu: softmax and cross entropy of llmc/cuda against their definition in cpu::plain, at GPT-2's
// vocabulary and at awkward ones, with rows that shared memory holds and rows that it does not; known losses; huge
// logits; ignored targets; padded columns; NaN and infinity; the sum of the losses.
#include "cpu/variants.h"
#include "cuda/classifier.cuh"
#include "gpu/on_gpu.h"

struct Shape {
    int N, V, Vp;
};

constexpr float scale = 0.125f;

// Every fifth target is to be ignored; the first is in the first column, the second in the last.
static Tensor<int> some_targets(Shape s) {
    auto targets = random_tokens(s.N, s.V, 2);
    targets[0] = 0;
    if (s.N > 1) targets[1] = s.V - 1;
    for (int n = 4; n < s.N; n += 5) targets[n] = -1;
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

// Logits become their gradient; the two losses are of cross_entropy_forward and of cross_entropy.
struct Losses {
    Tensor<float> forward, both;
};
template <class floatX>
static Losses run(Tensor<floatX>& logits, Tensor<int>& targets, Shape s, float scale) {
    Losses losses{poisoned<float>(s.N), poisoned<float>(s.N)};
    OnGpu<floatX> x(logits);
    OnGpu<int> t(targets);
    OnGpu<float> forward(losses.forward), both(losses.both);
    gpu::cross_entropy_forward<floatX>(forward, x, t, s.N, s.V, s.Vp, nullptr);
    gpu::cross_entropy<floatX>(x, both, t, s.N, s.V, s.Vp, scale, nullptr);
    x.back(), forward.back(), both.back();
    return losses;
}

// Two orders of summing V positive terms differ by about sqrt(V) roundings of the sum, which the loss, its logarithm,
// has absolutely and each probability relatively. A GPU's exp(x) has an error of 2^-21 + |x| 2^-23, relatively: |x| is
// below 20 for what counts, unless spread is large, where the largest logit alone counts.
template <class floatX>
static void compare(Shape s, float spread = 2.0f) {
    CAPTURE(s.N);
    CAPTURE(s.V);
    auto targets = some_targets(s);
    auto logits = some_logits<floatX>(s, spread), want = some_logits<floatX>(s, spread);
    const auto losses = run(logits, targets, s, scale);
    auto want_losses = poisoned<float>(s.N);
    cpu::plain::cross_entropy<floatX>(want.data(), want_losses.data(), targets.data(), s.N, s.V, s.Vp, scale, nullptr);
    const float error = (4.0f * std::sqrt(float(s.V)) + 32.0f) * epsilon<float>();
    expect_close("losses", losses.forward, want_losses, 1, 2 * epsilon<float>(), error);
    expect_close("losses with gradient", losses.both, want_losses, 1, 2 * epsilon<float>(), error);
    expect_close("gradient", logits, want, s.Vp, rounding<floatX>() + error, error * scale * 0.125f);
}

TEST_CASE_TEMPLATE("cross entropy over GPT-2's vocabulary", floatX, float, bf16) { compare<floatX>({6, 50257, 50304}); }

TEST_CASE_TEMPLATE("cross entropy over awkward vocabularies", floatX, float, bf16) {
    for (int V : {1, 2, 7, 8, 9, 16, 17, 65, 127, 128}) compare<floatX>({9, V, 128});
    for (int V : {4095, 4096, 4097, 8191, 8192, 8193}) compare<floatX>({3, V, 8200});  // one off what 512 threads take
    compare<floatX>({65, 24, 24});
    compare<floatX>({9, 100, 128}, 1000.0f);
}

TEST_CASE_TEMPLATE("cross entropy over rows that no shared memory holds", floatX, float, bf16) {
    const int most = int(shared_memory_limit() - CLASSIFIER_STATIC_BYTES) / int(sizeof(floatX));
    compare<floatX>({2, most, most + 1000});
    compare<floatX>({2, most + 1, most + 1000});
    compare<floatX>({6, most + 1001, most + 1008});
}

TEST_CASE_TEMPLATE("equal logits lose log V; gradients sum to zero; padding and ignored rows get none", floatX, float,
                   bf16) {
    const Shape s{3, 64, 72};
    for (const float logit : {3.0f, 1e4f, -1e4f}) {
        auto logits = filled<floatX>(s.N * s.Vp, logit);
        Tensor<int> targets(s.N);
        targets[0] = 0, targets[1] = -1, targets[2] = s.V - 1;
        const auto [forward, losses] = run(logits, targets, s, 1.0f);
        CHECK(double(losses[0]) == doctest::Approx(std::log(64.0)).epsilon(1e-6));
        CHECK(losses[1] == 0.0f);
        CHECK(losses[2] == losses[0]);
        for (int n = 0; n < s.N; n++) CHECK(forward[n] == losses[n]);
        for (int v = 0; v < s.Vp; v++) {
            CHECK(float(logits[v]) == (v == 0 ? 1.0f / 64 - 1 : v < s.V ? 1.0f / 64 : 0.0f));  // exact in bf16 as well
            CHECK(float(logits[s.Vp + v]) == 0.0f);
            CHECK(float(logits[2 * s.Vp + v]) == (v == s.V - 1 ? 1.0f / 64 - 1 : v < s.V ? 1.0f / 64 : 0.0f));
        }
    }
}

TEST_CASE_TEMPLATE("logits of 1e30 either way", floatX, float, bf16) {
    const Shape s{2, 33, 40};
    const float huge = float(floatX(1e30f));
    auto logits = filled<floatX>(2 * s.Vp, -huge);
    logits[5] = floatX(huge), logits[s.Vp + 32] = floatX(huge);
    Tensor<int> targets(2);
    targets[0] = 5, targets[1] = 7;
    const auto [forward, losses] = run(logits, targets, s, 1.0f);
    for (const auto* l : {&losses, &forward}) {
        CHECK((*l)[0] == 0.0f);
        CHECK((*l)[1] == doctest::Approx(2.0 * double(huge)));
    }
    for (int v = 0; v < s.Vp; v++) {
        CHECK(float(logits[v]) == 0.0f);
        CHECK(float(logits[s.Vp + v]) == (v == 32 ? 1.0f : v == 7 ? -1.0f : 0.0f));
    }
}

TEST_CASE_TEMPLATE("NaN and infinite logits give a NaN loss; minus infinity is a probability of 0", floatX, float,
                   bf16) {
    const Shape s{1, 40, 48};
    const float odd[] = {NAN, INFINITY, -INFINITY};
    for (int place : {0, 3, 20, 39})
        for (const float x : odd) {
            CAPTURE(x);
            CAPTURE(place);
            auto logits = filled<floatX>(s.Vp, 1.0f);
            logits[place] = floatX(x);
            Tensor<int> target(1);
            target[0] = 10;
            const auto [forward, losses] = run(logits, target, s, 1.0f);
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

TEST_CASE("a row of minus infinity before a finite logit loses nothing") {
    const Shape s{1, 8000, 8000};
    auto logits = filled<bf16>(s.Vp, -INFINITY);
    logits[7999] = bf16(-3.0f);
    Tensor<int> target(1);
    target[0] = 7999;
    const auto [forward, losses] = run(logits, target, s, 1.0f);
    CHECK(forward[0] == 0.0f);
    CHECK(losses[0] == 0.0f);
}

static float accumulated(float before, Tensor<float>& losses, float scale) {
    auto total = filled<float>(1, before);
    OnGpu<float> t(total), l(losses);
    gpu::accumulate_loss(t, l, int(losses.size()), scale, nullptr);
    t.back();
    return total[0];
}

// A thread adds every 1024th, the block's tree the rest: some log2(1024) + N / 1024 roundings.
TEST_CASE("losses are added up") {
    for (int N : {1, 31, 33, 1000, 1023, 1024, 1025, 5000}) {
        auto losses = random_tensor<float>(N, 1, 1.0f, 10.0f);
        double sum = 0.0;
        for (int n = 0; n < N; n++) sum += double(losses[n]);
        const float got = accumulated(5.0f, losses, 0.5f);
        CHECK(double(got) == doctest::Approx(5.0 + 0.5 * sum).epsilon(16e-7));
        CHECK(accumulated(5.0f, losses, 0.5f) == got);
    }
    auto losses = filled<float>(1000, 0.1f);
    losses[999] = NAN;
    CHECK(std::isnan(accumulated(5.0f, losses, 0.5f)));
}

TEST_CASE("impossible rows of logits are refused") {
    float* x = nullptr;
    const int* target = nullptr;
    CHECK_THROWS_WITH_AS(gpu::cross_entropy(x, x, target, 1, 9, 8, 1.0f, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::cross_entropy_forward(x, x, target, 1, 9, 8, nullptr),
                         doctest::Contains("a vocabulary of 9 in rows of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::cross_entropy(x, x, target, 1, 9, 10, 1.0f, nullptr),
                         doctest::Contains("rows of 10 logits; must be a multiple of 4"), Error);
    CHECK_THROWS_WITH_AS(gpu::cross_entropy(x, x, target, 0, 9, 12, 1.0f, nullptr), doctest::Contains("0 rows of 9"),
                         Error);
}
