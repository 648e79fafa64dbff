// test_schedule.cpp: the learning rate of every step under each of the four schedules.
#include "train/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/refusal.h"

static std::vector<double> rates(const char* name, double final_fraction, int64_t warmup, int64_t steps) {
    const Schedule schedule = make_schedule(name, 6e-4, final_fraction, warmup, steps);
    std::vector<double> out;
    for (int64_t step = 0; step < steps; step++) out.push_back(learning_rate(schedule, step));
    return out;
}

TEST_CASE("the first rate is above 0, no rate exceeds the peak, and the last is exactly the final rate") {
    for (const char* name : {"linear", "cosine", "wsd"})
        for (double final_fraction : {0.0, 0.1, 1.0})
            for (int64_t steps : {2, 3, 10, 1001})
                for (int64_t warmup : {int64_t(0), int64_t(1), steps / 10, steps / 2, steps - 1}) {
                    CAPTURE(name);
                    CAPTURE(final_fraction);
                    CAPTURE(steps);
                    CAPTURE(warmup);
                    const auto r = rates(name, final_fraction, warmup, steps);
                    CHECK(r.back() == 6e-4 * final_fraction);
                    CHECK(r.front() > 0.0);
                    CHECK(*std::max_element(r.begin(), r.end()) == 6e-4);
                }
}

TEST_CASE("warmup rises in equal steps to the peak, then the rate never rises, and without warmup it starts there") {
    for (const char* name : {"constant", "linear", "cosine", "wsd"}) {
        const auto r = rates(name, 0.1, 4, 100);
        for (int step = 0; step < 4; step++) CHECK(r[step] == doctest::Approx(6e-4 * (step + 1) / 4).epsilon(1e-12));
        for (size_t step = 4; step < r.size(); step++) CHECK(r[step] <= r[step - 1]);
        CHECK(rates(name, 0.1, 0, 100)[0] == 6e-4);
    }
    CHECK(rates("constant", 0.1, 0, 50).back() == 6e-4);
}

TEST_CASE("the linear and cosine schedules are at the middle rate half way") {
    for (const char* name : {"linear", "cosine"})
        CHECK(rates(name, 0.1, 0, 101)[50] == doctest::Approx(6e-4 * 0.55).epsilon(1e-12));
    // After a quarter of the steps linear has fallen by a quarter of the range, cosine by (1 - cos(pi / 4)) / 2.
    CHECK(rates("linear", 0.0, 0, 101)[25] == doctest::Approx(6e-4 * 0.75).epsilon(1e-12));
    CHECK(rates("cosine", 0.0, 0, 101)[25] == doctest::Approx(6e-4 * 0.8535533905932737).epsilon(1e-12));
}

TEST_CASE("the wsd schedule is constant, then falls as 1 - sqrt over the last fifth") {
    const auto r = rates("wsd", 0.0, 10, 101);
    CHECK(r[80] == 6e-4);
    CHECK(r[81] < 6e-4);
    CHECK(r[85] == doctest::Approx(6e-4 * 0.5).epsilon(1e-12));  // after a quarter of the last fifth: 1 - sqrt(1/4)
}

TEST_CASE("a run of warmup only ends at the peak, and steps beyond the end keep the last rate") {
    CHECK(rates("cosine", 0.0, 10, 10).back() == 6e-4);
    CHECK(rates("cosine", 0.0, 0, 1).back() == 6e-4);
    const Schedule s = make_schedule("cosine", 6e-4, 0.1, 0, 10);
    CHECK(learning_rate(s, 10) == learning_rate(s, 9));
    CHECK(learning_rate(s, int64_t(1) << 60) == learning_rate(s, 9));
}

TEST_CASE("unknown schedules and impossible values are refused") {
    const auto refused = [](const char* name, double peak, double final_fraction, int64_t warmup) {
        return refusal([&] { make_schedule(name, peak, final_fraction, warmup, 10); });
    };
    CHECK(refused("cosin", 1e-3, 0.1, 0).starts_with("2 --schedule cosin is not known"));
    CHECK(refused("cosine", 1e-3, 0.1, 11).starts_with("2 --warmup 11 does not fit"));
    CHECK(refused("cosine", NAN, 0.1, 0).starts_with("2 --lr "));
    CHECK(refused("cosine", -1e-3, 0.1, 0).starts_with("2 --lr "));
    CHECK(refused("cosine", 1e-3, 1.1, 0).starts_with("2 --final-lr-fraction "));
}
