// test_schedule.cpp: the learning rate of every step under each of the four schedules.
#include "train/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

static std::vector<double> rates(Decay decay, double final_fraction, int64_t warmup, int64_t steps,
                                 double cooldown = 0.2) {
    const Schedule schedule{decay, 6e-4, final_fraction, warmup, steps, cooldown};
    std::vector<double> out;
    for (int64_t step = 0; step < steps; step++) out.push_back(learning_rate(schedule, step));
    return out;
}

TEST_CASE("no rate is 0 or above the peak, and the last is exactly the final rate") {
    for (const Decay decay : {Decay::linear, Decay::cosine, Decay::wsd})
        for (double final_fraction : {0.0, 0.1, 1.0})
            for (const auto& [warmup_steps, steps] :
                 {std::pair(0, 2), std::pair(1, 3), std::pair(9, 10), std::pair(0, 1001), std::pair(500, 1001),
                  std::pair(1000, 1001)}) {
                const int warmup = warmup_steps;
                CAPTURE(int(decay));
                CAPTURE(final_fraction);
                CAPTURE(warmup);
                const auto r = rates(decay, final_fraction, warmup, steps);
                CHECK(r.back() == 6e-4 * final_fraction);
                CHECK(r.front() > 0.0);
                CHECK(*std::max_element(r.begin(), r.end()) == 6e-4);
            }
}

TEST_CASE("warmup rises in equal steps to the peak, then the rate never rises, and without warmup it starts there") {
    for (const Decay decay : {Decay::constant, Decay::linear, Decay::cosine, Decay::wsd}) {
        const auto r = rates(decay, 0.1, 4, 100);
        for (int step = 0; step < 4; step++) CHECK(r[step] == doctest::Approx(6e-4 * (step + 1) / 4).epsilon(1e-12));
        for (size_t step = 4; step < r.size(); step++) CHECK(r[step] <= r[step - 1]);
        CHECK(rates(decay, 0.1, 0, 100)[0] == 6e-4);
    }
    CHECK(rates(Decay::constant, 0.1, 0, 50).back() == 6e-4);
}

TEST_CASE("the schedules between their ends, and steps beyond the end, which keep the last rate") {
    // After a quarter of the steps linear has fallen by a quarter of the range, cosine by (1 - cos(pi / 4)) / 2. wsd is
    // constant until its last fifth, and after a quarter of that at three quarters.
    const auto expect = [](Decay decay, double final_fraction, size_t step, double fraction) {
        CHECK(rates(decay, final_fraction, 0, 101)[step] == doctest::Approx(6e-4 * fraction).epsilon(1e-12));
    };
    expect(Decay::linear, 0.0, 25, 0.75);
    expect(Decay::linear, 0.1, 50, 0.55);
    expect(Decay::cosine, 0.0, 25, 0.8535533905932737);
    expect(Decay::cosine, 0.1, 50, 0.55);
    expect(Decay::wsd, 0.0, 80, 1.0);
    expect(Decay::wsd, 0.0, 85, 0.75);
    CHECK(rates(Decay::cosine, 0.0, 10, 10).back() == 6e-4);  // warmup only
    const Schedule s = Schedule{Decay::cosine, 6e-4, 0.1, 0, 10, 0.2};
    CHECK(learning_rate(s, int64_t(1) << 60) == learning_rate(s, 9));
}

TEST_CASE("the cooldown of wsd takes its fraction of the steps, at least one, and never starts in the warmup") {
    const struct {
        double cooldown;
        int64_t warmup, steps, peak_end;
    } rows[] = {{0.2, 2, 7, 6},  {0.2, 0, 8, 7}, {0.29, 0, 100, 71}, {0.5, 5, 10, 5},
                {0.9, 5, 10, 5}, {1, 0, 10, 1},  {1e-9, 3, 10, 9},   {0.2, 10, 10, 10}};
    for (const auto& row : rows) {
        const auto r = rates(Decay::wsd, 0.0, row.warmup, row.steps, row.cooldown);
        CHECK(std::count(r.begin() + std::max<int64_t>(row.warmup - 1, 0), r.end(), 6e-4) ==
              row.peak_end - std::max<int64_t>(row.warmup - 1, 0));
        CHECK(steps_to_peak_end(Schedule{Decay::wsd, 6e-4, 0.0, row.warmup, row.steps, row.cooldown}) == row.peak_end);
        // A longer run has the same rates up to there.
        const auto longer = rates(Decay::wsd, 0.0, row.warmup, 3 * row.steps, row.cooldown / 3);
        CHECK(std::equal(r.begin(), r.begin() + row.peak_end, longer.begin()));
    }
}
