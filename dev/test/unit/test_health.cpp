// test_health.cpp: tests what is done about steps that are not finite or far above those before, and that a checkpoint
// keeps all that this depends on.
#include <cmath>

#include "support/refusal.h"
#include "support/test.h"
#include "train/health.h"
#include "train/silent_errors.h"

static Health health_of(const std::string& on_nan, const std::string& on_spike, double z = 6.0) {
    Health health;
    health.options = {on_nan, on_spike, z};
    return health;
}

// A step whose factor is what the device makes of these limits.
static Finding step(Health& health, int64_t number, float loss, float norm = 1.0f) {
    const StepLimits limits = health.limits_of(number);
    float factor = 1.0f;
    if (loss > limits.loss || norm > limits.norm) factor = INFINITY;
    if (!std::isfinite(loss) || !std::isfinite(norm)) factor = NAN;
    return health.examine({number, loss, norm, factor});
}

// Losses of 2 and 4 in turn: mean 3, standard deviation 1. The norms are those losses in half.
static void fill(Health& health, int64_t steps) {
    for (int64_t s = 0; s < steps; s++) REQUIRE(step(health, s, s % 2 ? 4.0f : 2.0f, s % 2 ? 2.0f : 1.0f).text == "");
}

TEST_CASE("a spike is z standard deviations above the mean of 128 steps") {
    Health health = health_of("halt", "skip");
    fill(health, 128);
    CHECK(health.limits_of(128).loss == FLT_MAX);  // from the steps up to 126
    fill(health, 2);
    CHECK(health.limits_of(130).loss == doctest::Approx(9.0));
    CHECK(health.limits_of(130).norm == doctest::Approx(4.5));
    const Finding spike = step(health, 130, 9.1f);
    CHECK(spike.verdict == Verdict::skip);
    CHECK(spike.skipped == "spike");
    CHECK(spike.text == "step 130: the loss is 9.1, above 9, the limit of the last 128 steps (--spike-z 6)");
    CHECK(step(health, 131, 8.9f, 4.6f).text.find("the gradient norm is 4.6, above 4.5") != std::string::npos);
    CHECK(step(health, 132, 8.9f).verdict == Verdict::good);  // the skipped steps are not in the window
}

TEST_CASE("--on-spike warn changes no step, and its spikes enter the window") {
    Health health = health_of("halt", "warn");
    fill(health, 130);
    const Finding spike = step(health, 130, 100.0f);
    CHECK(spike.verdict == Verdict::warn);
    CHECK(spike.skipped == "");
    CHECK(step(health, 132, 100.0f).verdict == Verdict::warn);
    CHECK(step(health, 134, 50.0f).verdict == Verdict::good);
    CHECK(step(health, 136, 3.0f, 100.0f).verdict == Verdict::good);  // a spike of the norm only
}

TEST_CASE("--spike-z 0 and equal losses find no spike") {
    Health off = health_of("halt", "skip", 0.0);
    fill(off, 130);
    CHECK(step(off, 130, 1e30f).verdict == Verdict::good);
    Health equal = health_of("halt", "skip");
    for (int64_t s = 0; s < 130; s++) step(equal, s, 3.0f);
    CHECK(step(equal, 130, 3.1f).verdict == Verdict::good);
}

TEST_CASE("a step that is not finite") {
    Health halts = health_of("halt", "skip");
    CHECK(step(halts, 0, NAN).verdict == Verdict::halt);
    Health skips = health_of("skip", "skip");
    for (int64_t s = 0; s < 9; s++) CHECK(step(skips, s, 1.0f, NAN).verdict == Verdict::skip);
    CHECK(step(skips, 9, 1.0f).verdict == Verdict::good);
    for (int64_t s = 10; s < 19; s++) CHECK(step(skips, s, INFINITY).verdict == Verdict::skip);
    const Finding last = step(skips, 19, INFINITY);
    CHECK(last.verdict == Verdict::halt);
    CHECK(last.text.find("the last of 10 steps in a row") != std::string::npos);
}

TEST_CASE("rollbacks end, and the failed step is left out") {
    Health health = health_of("rollback", "warn");
    for (int64_t failed : {5, 6, 7}) {
        CHECK(step(health, failed, NAN).verdict == Verdict::rollback);
        health.roll_back(failed);
        CHECK(health.leaves_out(failed));
        const Finding again = step(health, failed, 3.0f);
        CHECK(again.verdict == Verdict::skip);
        CHECK(again.skipped == "left_out");
        CHECK(step(health, failed, NAN).verdict == Verdict::skip);
        health.restore(health_of("rollback", "warn").json(), "trainer.json");  // of a checkpoint before all failures
        CHECK(health.leaves_out(5));
    }
    CHECK(step(health, 8, NAN).verdict == Verdict::halt);
}

TEST_CASE("a checkpoint keeps the windows, the limits and the steps that are left out") {
    Health before = health_of("rollback", "skip"), after = health_of("rollback", "skip");
    fill(before, 133);
    before.roll_back(140);
    after.restore(before.json(), "trainer.json");
    for (int64_t s = 133; s < 160; s++) {
        const float loss = s == 135 ? 20.0f : 2.0f + 0.1f * float(s % 7);
        const Finding a = step(before, s, loss), b = step(after, s, loss);
        CHECK(a.verdict == b.verdict);
        CHECK(a.text == b.text);
        CHECK(before.limits_of(s + 1).loss == after.limits_of(s + 1).loss);
    }
    CHECK(before.json() == after.json());
}

TEST_CASE("a damaged health is refused") {
    Health health = health_of("halt", "warn");
    health.restore("{}", "x");
    CHECK(refusal([&] { health.restore(R"({"losses":1})", "x"); }) == "65 x: the health of the run is damaged");
    std::string text = health.json();
    text.replace(text.find(R"("losses":[)"), 11, R"("losses":[1])");
    CHECK(refusal([&] { health.restore(text, "x"); }) ==
          "65 x: 1 losses and 0 norms; at most 128, and as many of both");
    const auto said = [&](const std::string& from, const std::string& to) {
        std::string changed = health.json();
        changed.replace(changed.find(from), from.size(), to);
        return refusal([&] { health.restore(changed, "x"); });
    };
    CHECK(said(R"("losses":[])", R"("losses":[1e300])") == "65 x: the health of the run has the number 1e+300");
    CHECK(said(R"("losses":[])", R"("losses":{})") == "65 x: the health of the run is damaged");
    for (const char* steps : {"-1", "1.5", "1e300", "18446744073709551615", "2147483648"})
        CHECK(said(R"("left_out":[])", format(R"("left_out":[%s])", steps))
                  .starts_with("65 x: the health of the run has the number of steps "));
    CHECK(said(R"("skipped_in_row":0)", R"("skipped_in_row":-3)") ==
          "65 x: the health of the run has the number of steps -3");
    CHECK(said(R"("skipped_in_row":0)", R"("skipped_in_row":2147483647)") == "");
    CHECK(step(health, 1, NAN).verdict == Verdict::halt);  // the count must not overflow
}

TEST_CASE("an infinite loss of a step that changes the weights is not kept: JSON has no infinity") {
    Health health = health_of("skip", "skip");
    CHECK(health.examine({0, INFINITY, 1.0f, 1.0f}).skipped == "");
    CHECK(health.losses.values.empty());
    CHECK(health.norms.values.empty());
    health.restore(health.json(), "trainer.json");
}

TEST_CASE("ranks whose weights differ from the majority are named") {
    const auto compare = [](const std::vector<char>& hashes, int tensor_parallel) {
        std::vector<std::string> of_ranks;
        for (char hash : hashes) of_ranks.push_back(std::string(16, hash) + " host" + std::to_string(of_ranks.size()));
        const std::string text = refusal([&] { check_weight_hashes(of_ranks, tensor_parallel, 9); });
        return text.substr(0, text.find(", although"));
    };
    CHECK(compare({'a', 'a', 'a'}, 1) == "");
    CHECK(compare({'a', 'a', 'b'}, 1) ==
          "17 step 9: rank 2 on host2 differs in its weights from the majority of the ranks");
    CHECK(compare({'b', 'a', 'a'}, 1) ==
          "17 step 9: rank 0 on host0 differs in its weights from the majority of the ranks");
    CHECK(compare({'a', 'b', 'a', 'c', 'a'}, 1).find(": rank 1 on host1, rank 3 on host3 differ in their") !=
          std::string::npos);
    CHECK(compare({'a', 'b'}, 1) ==
          "17 step 9: rank 0 on host0, rank 1 on host1: their weights differ, and no majority has "
          "the same");
    CHECK(compare({'a', 'b', 'a', 'b'}, 2) == "");
    CHECK(compare({'a', 'b', 'a', 'b', 'a', 'c'}, 2).find(": rank 5 on host5 differs") != std::string::npos);
}
