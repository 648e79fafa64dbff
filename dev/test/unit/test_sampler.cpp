// test_sampler.cpp: compares the frequencies of sampled tokens with their probabilities, and tests logits with only one
// possible token.
#include "infer/sampler.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/common.h"
#include "base/random.h"

static const float INF = std::numeric_limits<float>::infinity();

static Sampler sampler(float temperature, int top_k, float top_p, uint64_t seed = 1) {
    Sampler s;
    s.temperature = temperature, s.top_k = top_k, s.top_p = top_p, s.seed = seed;
    return s;
}

static std::vector<float> random_logits(int V) {
    std::vector<float> logits(V);
    for (int v = 0; v < V; v++) logits[v] = 2.0f * Philox{7, 7}.normal(uint64_t(v));
    return logits;
}

// The seeds are fixed, so this either always passes or always fails. A count of n draws with probability p has the
// standard deviation sqrt(n p (1 - p)). With a bound of 4.5 standard deviations and about 100 comparisons, a correct
// sampler fails with a probability below 1 in 1000.
static void check_frequencies(Sampler s, const std::vector<float>& logits, const std::vector<double>& probabilities) {
    const int draws = 40000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < draws; i++) counts[sample_token(s, logits.data(), int(logits.size()), 0, uint64_t(i))]++;
    for (size_t v = 0; v < logits.size(); v++) {
        const double p = probabilities[v];
        CAPTURE(v);
        CHECK(std::fabs(counts[v] - draws * p) <= 4.5 * std::sqrt(draws * p * (1.0 - p)));
    }
}

TEST_CASE("temperature 0 takes the most probable token, and of equal ones the lower") {
    const std::vector<float> logits = {-1.0f, 3.0f, 2.0f, 3.0f};
    auto s = sampler(0.0f, 0, 1.0f);
    for (uint64_t i = 0; i < 20; i++) CHECK(sample_token(s, logits.data(), 4, 0, i) == 1);
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

TEST_CASE("top-k keeps the k most probable tokens in their proportions") {
    const std::vector<float> logits = {std::log(1.0f), std::log(4.0f), std::log(2.0f), std::log(3.0f)};
    check_frequencies(sampler(1.0f, 2, 1.0f), logits, {0.0, 4.0 / 7, 0.0, 3.0 / 7});
    check_frequencies(sampler(1.0f, 1, 1.0f), logits, {0.0, 1.0, 0.0, 0.0});
    check_frequencies(sampler(1.0f, 4, 1.0f), logits, {0.1, 0.4, 0.2, 0.3});
    check_frequencies(sampler(1.0f, 1000, 1.0f), logits, {0.1, 0.4, 0.2, 0.3});
}

TEST_CASE("top-p keeps the most probable tokens that together reach p, at least one") {
    const std::vector<float> logits = {std::log(1.0f), std::log(4.0f), std::log(2.0f), std::log(3.0f)};
    check_frequencies(sampler(1.0f, 0, 0.65f), logits, {0.0, 4.0 / 7, 0.0, 3.0 / 7});  // 0.4 + 0.3
    check_frequencies(sampler(1.0f, 0, 0.75f), logits, {0.0, 4.0 / 9, 2.0 / 9, 3.0 / 9});
    check_frequencies(sampler(1.0f, 0, 0.01f), logits, {0.0, 1.0, 0.0, 0.0});
    check_frequencies(sampler(1.0f, 3, 0.5f), logits, {0.0, 4.0 / 7, 0.0, 3.0 / 7});  // after top-k: 4/9, then 7/9
}

TEST_CASE("of equal tokens at the border of top-k the lower ones are kept") {
    const std::vector<float> logits(100, 1.0f);
    auto s = sampler(1.0f, 3, 1.0f);
    for (uint64_t i = 0; i < 200; i++) CHECK(sample_token(s, logits.data(), 100, 0, i) < 3);
}

TEST_CASE("a token depends on seed, text and position, not on earlier calls") {
    const auto logits = random_logits(1000);
    auto a = sampler(1.0f, 50, 0.9f), b = sampler(1.0f, 50, 0.9f), other = sampler(1.0f, 50, 0.9f, 2);
    std::vector<int> forwards(200), backwards(200);
    for (int i = 0; i < 200; i++) forwards[i] = sample_token(a, logits.data(), 1000, 3, uint64_t(i));
    for (int i = 199; i >= 0; i--) backwards[i] = sample_token(b, logits.data(), 1000, 3, uint64_t(i));
    CHECK(forwards == backwards);
    int same_text = 0, same_seed = 0;
    for (int i = 0; i < 200; i++) {
        same_text += forwards[i] == sample_token(a, logits.data(), 1000, 4, uint64_t(i));
        same_seed += forwards[i] == sample_token(other, logits.data(), 1000, 3, uint64_t(i));
    }
    CHECK(same_text < 100);
    CHECK(same_seed < 100);
}

TEST_CASE("a token whose logit is -infinity is never sampled, and the only other token always is") {
    std::vector<float> logits(65, -INF);
    logits[17] = -1e30f;
    for (float temperature : {0.0f, 1e-30f, 1.0f, 1000.0f})
        for (int top_k : {0, 1, 5})
            for (float top_p : {0.1f, 1.0f}) {
                auto s = sampler(temperature, top_k, top_p);
                for (uint64_t i = 0; i < 50; i++) CHECK(sample_token(s, logits.data(), 65, 0, i) == 17);
            }
    logits[64] = -1e30f;
    auto s = sampler(1.0f, 0, 1.0f);
    for (uint64_t i = 0; i < 200; i++) {
        const int v = sample_token(s, logits.data(), 65, 0, i);
        CHECK((v == 17 || v == 64));
    }
}

TEST_CASE("large logits do not overflow") {
    const std::vector<float> logits = {3e38f, -3e38f, 3e38f};
    auto s = sampler(1e-3f, 0, 1.0f);
    int counts[3] = {};
    for (uint64_t i = 0; i < 1000; i++) counts[sample_token(s, logits.data(), 3, 0, i)]++;
    CHECK(counts[1] == 0);
    CHECK(counts[0] > 400);
    CHECK(counts[2] > 400);
}

TEST_CASE("a vocabulary of one token always gives that token") {
    const float logit = -5.0f;
    auto s = sampler(1.0f, 0, 0.5f);
    CHECK(sample_token(s, &logit, 1, 0, 0) == 0);
}

TEST_CASE("NaN and infinite logits and impossible settings are refused") {
    auto s = sampler(1.0f, 0, 1.0f);
    const std::vector<float> with_nan = {0.0f, NAN}, with_inf = {0.0f, INF}, none = {-INF, -INF}, fine = {0.0f, 0.0f};
    const std::vector<float> with_negative_nan = {0.0f, -NAN};
    CHECK_THROWS_WITH_AS(sample_token(s, with_negative_nan.data(), 2, 0, 0), doctest::Contains("a logit of nan"),
                         Error);
    CHECK_THROWS_WITH_AS(sample_token(s, with_nan.data(), 2, 0, 0), doctest::Contains("token 1 a logit of nan"), Error);
    CHECK_THROWS_WITH_AS(sample_token(s, with_inf.data(), 2, 0, 0), doctest::Contains("token 1 a logit of inf"), Error);
    CHECK_THROWS_WITH_AS(sample_token(s, none.data(), 2, 0, 0),
                         doctest::Contains("the logits of all 2 tokens are -infinity"), Error);
    for (Sampler bad : {sampler(-1.0f, 0, 1.0f), sampler(NAN, 0, 1.0f), sampler(1.0f, -1, 1.0f), sampler(1.0f, 0, 0.0f),
                        sampler(1.0f, 0, 1.1f)})
        CHECK_THROWS_AS(sample_token(bad, fine.data(), 2, 0, 0), Error);
}
