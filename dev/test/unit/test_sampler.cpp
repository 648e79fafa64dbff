// test_sampler.cpp: compares the frequencies of sampled tokens with their probabilities, and tests logits with only one
// possible token.
#include "infer/generate.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "base/random.h"
#include "support/parse.h"
#include "support/refusal.h"

static const float INF = std::numeric_limits<float>::infinity();

static Sampler sampler(float temperature, int top_k, float top_p, uint64_t seed = 1) {
    Sampler s;
    s.temperature = temperature, s.top_k = top_k, s.top_p = top_p, s.seed = seed;
    return s;
}

static int sample(Sampler& s, const std::vector<float>& logits, uint64_t position, uint64_t text = 0) {
    return sample_token(s, logits.data(), int(logits.size()), text, position);
}

// The seeds are fixed, so this either always passes or always fails. A count of n draws with probability p has the
// standard deviation sqrt(n p (1 - p)). With a bound of 4.5 standard deviations and about 100 comparisons, a correct
// sampler fails with a probability below 1 in 1000.
static void check_frequencies(Sampler s, const std::vector<float>& logits, const std::vector<double>& probabilities) {
    const int draws = 40000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < draws; i++) counts[sample(s, logits, uint64_t(i))]++;
    for (size_t v = 0; v < logits.size(); v++) {
        const double p = probabilities[v];
        CAPTURE(v);
        CHECK(std::fabs(counts[v] - draws * p) <= 4.5 * std::sqrt(draws * p * (1.0 - p)));
    }
}

TEST_CASE("tokens above the tokenizer's vocabulary are never sampled, whatever their logits") {
    for (float temperature : {0.0f, 1.0f}) {
        Sampler s = sampler(temperature, 3, 1.0f);
        s.vocab_size = 2;
        for (uint64_t i = 0; i < 100; i++) CHECK(sample(s, {1.0f, 2.0f, 50.0f, std::nanf("")}, i) < 2);
    }
}

TEST_CASE("tokens have the frequencies of softmax(logits / temperature)") {
    const std::vector<float> logits = {0.0f, 1.0f, 2.0f, -3.0f};
    for (float temperature : {0.5f, 1.0f, 2.0f}) {
        std::vector<double> p(4);
        double total = 0.0;
        for (int v = 0; v < 4; v++) total += p[v] = std::exp(double(logits[v]) / double(temperature));
        for (double& x : p) x /= total;
        check_frequencies(sampler(temperature, 0, 1.0f), logits, p);
    }
}

TEST_CASE("top-k keeps the k most probable tokens, top-p the most probable that together reach p, at least one") {
    const std::vector<float> logits = {std::log(1.0f), std::log(4.0f), std::log(2.0f), std::log(3.0f)};
    const std::tuple<int, float, std::vector<double>> cases[] = {
        {1, 1.0f, {0.0, 1.0, 0.0, 0.0}},
        {2, 1.0f, {0.0, 4.0 / 7, 0.0, 3.0 / 7}},
        {1000, 1.0f, {0.1, 0.4, 0.2, 0.3}},
        {0, 0.65f, {0.0, 4.0 / 7, 0.0, 3.0 / 7}},  // 0.4 + 0.3
        {0, 0.75f, {0.0, 4.0 / 9, 2.0 / 9, 3.0 / 9}},
        {0, 0.01f, {0.0, 1.0, 0.0, 0.0}},
        {3, 0.5f, {0.0, 4.0 / 7, 0.0, 3.0 / 7}},  // after top-k: 4/9, then 7/9
    };
    for (const auto& [k, p, probabilities] : cases) {
        const int top_k = k;
        const float top_p = p;
        CAPTURE(top_k);
        CAPTURE(top_p);
        check_frequencies(sampler(1.0f, top_k, top_p), logits, probabilities);
    }
    // The lower ones of equal tokens are kept, also by temperature 0.
    check_frequencies(sampler(1.0f, 2, 1.0f), {1.0f, 1.0f, 1.0f}, {0.5, 0.5, 0.0});
    check_frequencies(sampler(0.0f, 0, 1.0f), {-1.0f, 3.0f, 3.0f}, {0.0, 1.0, 0.0});
}

TEST_CASE("a token depends on seed, text and position, not on earlier calls") {
    std::vector<float> logits(1000);
    for (int v = 0; v < 1000; v++) logits[v] = 2.0f * Philox{7, 7}.normal(uint64_t(v));
    Sampler a = sampler(1.0f, 50, 0.9f), b = a, other = sampler(1.0f, 50, 0.9f, 2);
    std::vector<int> forwards(200);
    for (int i = 0; i < 200; i++) forwards[i] = sample(a, logits, uint64_t(i), 3);
    int same_text = 0, same_seed = 0;
    for (int i = 199; i >= 0; i--) {
        CHECK(sample(b, logits, uint64_t(i), 3) == forwards[i]);
        same_text += forwards[i] == sample(a, logits, uint64_t(i), 4);
        same_seed += forwards[i] == sample(other, logits, uint64_t(i), 3);
    }
    CHECK(same_text < 100);
    CHECK(same_seed < 100);
}

TEST_CASE("a token whose logit is -infinity is never sampled, and large logits do not overflow") {
    std::vector<float> logits(65, -INF);
    logits[17] = -1e30f;
    for (Sampler s : {sampler(0.0f, 0, 0.1f), sampler(1e-30f, 1, 1.0f), sampler(1.0f, 5, 0.1f), sampler(1e3f, 0, 1.0f)})
        for (uint64_t i = 0; i < 50; i++) CHECK(sample(s, logits, i) == 17);
    check_frequencies(sampler(1e-3f, 0, 1.0f), {3e38f, -3e38f, 3e38f}, {0.5, 0.0, 0.5});
}

TEST_CASE("NaN and infinite logits are refused") {
    const auto refused = [](Sampler s, const std::vector<float>& logits) {
        return refusal([&] { sample(s, logits, 0); });
    };
    const Sampler fine = sampler(1.0f, 0, 1.0f);
    CHECK(contains(refused(fine, {0.0f, NAN}), "token 1 a logit of nan"));
    CHECK(contains(refused(fine, {0.0f, INF}), "token 1 a logit of inf"));
    CHECK(contains(refused(fine, {-INF, -INF}), "the logits of all 2 tokens are -infinity"));
}
