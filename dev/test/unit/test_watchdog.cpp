// test_watchdog.cpp: tests the limits of the phases, and time in which the process did not run. test_watchdog.sh stops
// real ranks.
#include "parallel/watchdog.h"

#include <doctest/doctest.h>

#include <cmath>

#include "support/temporary.h"

static constexpr Phase step_phases[] = {Phase::step, Phase::sample, Phase::end, Phase::evaluation, Phase::generation};

TEST_CASE("the limit of the start") {
    CHECK(limit_of(Phase::start, {}, {}) == 300);
    CHECK(limit_of(Phase::start, {}, {.step = 100, .first_step = 5000}) == 300);
    CHECK(limit_of(Phase::start, {}, {.largest_read = 500}) == 500);
    CHECK(limit_of(Phase::start, {.start = 3}, {.largest_read = 500}) == 3);
    CHECK(std::isinf(limit_of(Phase::start, {.start = 0}, {})));
}

TEST_CASE("the limit of a step") {
    for (Phase phase : step_phases) {
        CHECK(limit_of(phase, {}, {.step = 0.5, .first_step = 5000}) == 120);  // the least limit
        CHECK(limit_of(phase, {}, {.step = 30, .first_step = 5000}) == 600);   // 20 median steps
        CHECK(limit_of(phase, {}, {.first_step = 5}) == 300);                  // the first step: as the start
        CHECK(limit_of(phase, {}, {.first_step = 5000}) == 5000);
        CHECK(limit_of(phase, {}, {.first_step = 5, .largest_read = 500}) == 500);
        CHECK(limit_of(phase, {.step = 3}, {.step = 30}) == 3);
        CHECK(limit_of(phase, {.validation = 3, .checkpoint = 4}, {.step = 30, .validation_batch = 90}) == 600);
        CHECK(std::isinf(limit_of(phase, {.step = 0}, {.step = 30})));
        CHECK(std::isinf(limit_of(phase, {.start = 0}, {.first_step = 5})));
    }
}

TEST_CASE("the limit of a validation follows its batches, before the first one the steps") {
    CHECK(limit_of(Phase::validation, {}, {.step = 100, .validation_batch = 30}) == 600);
    CHECK(limit_of(Phase::validation, {}, {.step = 100, .validation_batch = 0.5}) == 120);
    CHECK(limit_of(Phase::validation, {}, {.step = 100}) == 2000);
    CHECK(limit_of(Phase::validation, {}, {.first_step = 5000}) == 5000);
    CHECK(limit_of(Phase::validation, {.step = 3}, {.step = 100, .validation_batch = 30}) == 600);
    CHECK(limit_of(Phase::validation, {.validation = 7}, {.step = 100, .validation_batch = 30}) == 7);
    CHECK(std::isinf(limit_of(Phase::validation, {.validation = 0}, {.step = 100})));
}

TEST_CASE("the limit of a checkpoint follows the saves, before the first one its bytes") {
    CHECK(limit_of(Phase::checkpoint, {}, {.step = 100}) == 300);
    CHECK(limit_of(Phase::checkpoint, {}, {.first_save = 900}) == 900);
    CHECK(limit_of(Phase::checkpoint, {}, {.longest_save = 2, .first_save = 900}) == 300);  // the least limit
    CHECK(limit_of(Phase::checkpoint, {}, {.longest_save = 200, .first_save = 900}) == 2000);
    CHECK(limit_of(Phase::checkpoint, {.checkpoint = 5}, {.longest_save = 200}) == 5);
    CHECK(std::isinf(limit_of(Phase::checkpoint, {.checkpoint = 0}, {})));
    CHECK(slow_disk_seconds(100'000'000) == 2);
}

TEST_CASE("a rank that waits for rank 0 has the larger limit, not the sum") {
    CHECK(limit_of(Phase::step, {}, {.step = 1, .permitted = 300}) == 301);  // the save and one step
    CHECK(limit_of(Phase::step, {}, {.step = 1, .permitted = 60}) == 120);
    CHECK(limit_of(Phase::step, {.step = 5}, {.step = 1, .permitted = 3}) == 5);
    CHECK(limit_of(Phase::validation, {.validation = 5}, {.step = 1, .permitted = 300}) == 301);
    CHECK(std::isinf(limit_of(Phase::step, {.step = 0}, {.step = 1, .permitted = 300})));
    CHECK(std::isinf(limit_of(Phase::step, {}, {.step = 1, .permitted = INFINITY})));
    CHECK(PhaseTimes{.step = 1, .permitted = 300}.without_permitted().permitted == 0);
}

TEST_CASE("the median of the last steps") {
    StepTimes steps;
    CHECK(steps.median() == 0);
    for (double seconds : {9.0, 1.0, 2.0}) steps.add(seconds);
    CHECK(steps.median() == 2);
    for (size_t i = 0; i < StepTimes::STEPS; i++) steps.add(5);
    CHECK(steps.median() == 5);
    CHECK(steps.seconds.size() == StepTimes::STEPS);
}

TEST_CASE("time without progress") {
    StallClock clock;
    CHECK(clock.tick(1000.0, 1) == 0);
    for (int i = 1; i <= 50; i++) clock.tick(1000.0 + 0.1 * i, 1);
    CHECK(clock.waited == doctest::Approx(5.0));
    CHECK(clock.tick(1005.1, 2) == 0);
    CHECK(clock.tick(1005.2, 2) == doctest::Approx(0.1));
}

TEST_CASE("time in which the process did not run does not count") {
    StallClock clock;
    clock.tick(1000.0, 1);
    clock.tick(1000.1, 1);
    CHECK(clock.tick(9000.0, 1) < 1.0);  // stopped for 8,000 s
    CHECK(clock.tick(9000.1, 1) < 1.0);
    const double waited = clock.waited;
    for (int i = 2; i < 100; i++) clock.tick(9000.0 + 0.1 * i, 1, true);  // waits for a reader of its output
    CHECK(clock.waited == waited);
    CHECK(clock.tick(8000.0, 1) >= 0);  // no clock runs backwards, but if one did, nothing would be subtracted
    CHECK(clock.waited < 1.0);
}

TEST_CASE("reports of an earlier run are not taken for new ones") {
    const TemporaryDirectory dir;
    CHECK(NewReports("").find().empty());
    std::filesystem::create_directory(dir / "errors");
    write_bytes(dir / "errors/rank_0.json", "{}");
    std::filesystem::last_write_time(dir / "errors/rank_0.json", std::filesystem::file_time_type());
    const NewReports reports(dir.path);
    CHECK(reports.find().empty());
    write_bytes(dir / "errors/rank_1.json", "{}");
    REQUIRE(reports.find().size() == 1);
    CHECK(reports.find()[0].first == 1);
    write_bytes(dir / "errors/rank_0.json", "{}");
    CHECK(reports.find().size() == 2);
    std::filesystem::remove_all(dir / "errors");
    CHECK(reports.find().empty());
}
