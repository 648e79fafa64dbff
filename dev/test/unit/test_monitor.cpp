// test_monitor.cpp: tests which steps count as outliers, the warning about a slow rank, and the comparison of replicas.
#include "train/monitor.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <vector>

#include "base/host.h"
#include "support/refusal.h"

static Outliers outliers_of(bool skip_nan, double z) {
    Outliers outliers;
    outliers.skip_nan = skip_nan, outliers.z = z;
    return outliers;
}

// A step whose factor is what the device computes with these limits (ops::clip_factor).
static Outliers::Finding step(Outliers& outliers, int64_t number, float loss, float norm = 1.0f) {
    const StepLimits limits = outliers.limits_of(number);
    float factor = 1.0f;
    if (loss > limits.loss || norm > limits.norm) factor = INFINITY;
    if (!std::isfinite(loss) || !std::isfinite(norm)) factor = NAN;
    return outliers.add(number, loss, norm, factor);
}

// Losses of 2 and 4 in turn: mean 3, standard deviation 1. The norms are half of these losses.
static void fill(Outliers& outliers, int64_t steps) {
    for (int64_t s = 0; s < steps; s++) REQUIRE(step(outliers, s, s % 2 ? 4.0f : 2.0f, s % 2 ? 2.0f : 1.0f).text == "");
}

TEST_CASE("a spike is z standard deviations above the mean of 128 steps") {
    Outliers outliers = outliers_of(false, 6.0);
    fill(outliers, 128);
    CHECK(outliers.limits_of(128).loss == FLT_MAX);  // from the steps up to 126
    fill(outliers, 2);
    CHECK(outliers.limits_of(130).loss == doctest::Approx(9.0));
    CHECK(outliers.limits_of(130).norm == doctest::Approx(4.5));
    const Outliers::Finding spike = step(outliers, 130, 9.1f);
    CHECK_FALSE(spike.ends_run);
    CHECK(spike.skipped == "spike");
    CHECK(spike.text == "step 130: the loss is 9.1, above 9, the limit of the last 128 steps (--spike-z 6)");
    CHECK(step(outliers, 131, 8.9f, 4.6f).text.find("the gradient norm is 4.6, above 4.5") != std::string::npos);
    CHECK(step(outliers, 132, 8.9f).text == "");  // the skipped steps are not in the window
}

TEST_CASE("--spike-z 0 and equal losses find no spike") {
    Outliers off = outliers_of(false, 0.0);
    fill(off, 130);
    CHECK(step(off, 130, 1e30f).text == "");
    Outliers equal = outliers_of(false, 6.0);
    for (int64_t s = 0; s < 130; s++) step(equal, s, 3.0f);
    CHECK(step(equal, 130, 3.1f).text == "");
}

TEST_CASE("with --on-nan skip the tenth step in a row that is not finite ends the run") {
    Outliers skips = outliers_of(true, 6.0);
    for (int64_t s = 0; s < 9; s++) CHECK_FALSE(step(skips, s, 1.0f, NAN).ends_run);
    CHECK(step(skips, 9, 1.0f).text == "");
    for (int64_t s = 10; s < 19; s++) CHECK(step(skips, s, INFINITY).skipped == "non_finite");
    CHECK(step(skips, 19, INFINITY).ends_run);
}

TEST_CASE("a checkpoint keeps the windows, and damaged ones are refused") {
    Outliers before = outliers_of(true, 6.0), after = outliers_of(true, 6.0);
    fill(before, 133);
    after.restore(before.json(), "trainer.json");
    for (int64_t s = 133; s < 160; s++) {
        const float loss = s == 135 ? 20.0f : 2.0f + 0.1f * float(s % 7);
        CHECK(step(before, s, loss).text == step(after, s, loss).text);
        CHECK(before.limits_of(s + 1).loss == after.limits_of(s + 1).loss);
    }
    CHECK(before.json() == after.json());
    after.restore(nullptr, "x");
    CHECK(refusal([&] {
              after.restore({{"losses", 1}}, "x");
          }) == "65 x: the losses and norms of the last steps are damaged");
    Json changed = Outliers().json();
    changed["skipped_in_row"] = 2147483647;
    after.restore(changed, "x");
    CHECK(step(after, 1, NAN).ends_run);  // the count must not overflow
}

// The warnings of a run whose ranks need `ms` for their own work in each step. All ranks end a step with the slowest.
struct StragglerRun {
    Stragglers stragglers;

    std::string steps(const std::vector<float>& ms, int count) {
        std::vector<RankStatus> statuses;
        for (float x : ms) statuses.push_back({0.0f, x});
        const float step_ms = *std::max_element(ms.begin(), ms.end());
        std::string line;
        for (int i = 0; i < count; i++) line += stragglers.add(statuses.data(), int(statuses.size()), double(step_ms));
        return line;
    }
};

TEST_CASE("a warning names the rank that is slow over many steps, or that pauses in one") {
    StragglerRun run, pauses;
    CHECK(run.steps({100, 110, 90, 100}, 2 * Stragglers::STEPS) == "");
    CHECK(run.steps({100, 100, 160, 100}, Stragglers::STEPS - 1) == "");
    CHECK(run.steps({100, 100, 160, 100}, 1) ==
          "rank 2 is slow: the others waited 1.20 s for it in 20 steps, which took 3.20 s; its own work takes 160 ms "
          "per step, that of the median rank 100 ms");
    CHECK(StragglerRun().steps({100}, 5 * Stragglers::STEPS) == "");
    CHECK(pauses.steps({60'010, 10}, 1) == "");
    CHECK(
        pauses.steps({10, 10}, 19).starts_with("rank 0 is slow: the others waited 60.00 s for it in 20 steps, which"));
}

TEST_CASE("there is no warning about less than 50 ms or a tenth of 20 steps, and at most one in 100 steps") {
    CHECK(StragglerRun().steps({5, 7}, Stragglers::STEPS) == "");
    CHECK(StragglerRun().steps({5, 8}, Stragglers::STEPS) != "");
    CHECK(StragglerRun().steps({1000, 1105}, Stragglers::STEPS) == "");
    CHECK(StragglerRun().steps({1000, 1115}, Stragglers::STEPS) != "");
    StragglerRun run;
    CHECK(run.steps({100, 200}, Stragglers::STEPS) != "");
    CHECK(run.steps({100, 200}, 99) == "");
    CHECK(run.steps({100, 200}, 1) != "");
    CHECK(run.steps({100, 200}, 80) == "");
    CHECK(run.steps({300, 100}, Stragglers::STEPS).starts_with("rank 0 is slow: the others waited 4.00 s"));
}

// A rank whose calls get what the other ranks have said in an earlier call.
struct SaidComm : Comm {
    std::vector<std::string> said;
    std::vector<std::string> all_gather_text(const std::string& text) override {
        said[size_t(rank)] = text;
        return said;
    }
};

// The result of check_replicas on the last of the ranks whose weights are these numbers, in groups of tp neighbours.
static std::string compare(const std::vector<float>& weights, int tp) {
    SaidComm world;
    Comm group;
    group.world_size = tp;
    world.said.resize(weights.size(), std::string(17, ' '));
    std::string result;
    for (world.rank = 0; world.rank < int(weights.size()); world.rank++)
        result = refusal([&] {
            check_replicas({world, nullptr, nullptr, world, group}, &weights[size_t(world.rank)], sizeof(float), 8,
                           nullptr);
        });
    return result;
}

TEST_CASE("ranks whose weights differ from the others are named") {
    const std::string own = " on " + host_name();
    CHECK(compare({1, 1, 1}, 1) == "");
    CHECK(compare({1, 2, 1, 2}, 2) == "");
    CHECK(compare({1, 3, 1}, 1)
              .starts_with("17 step 8: the weights of rank 1" + own + " differ from those of the other ranks, "));
    CHECK(compare({1, 2, 1, 3}, 2)
              .starts_with("17 step 8: the weights of rank 1" + own + ", rank 3" + own + " differ from each "));
}
