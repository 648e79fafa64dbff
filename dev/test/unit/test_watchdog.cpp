// test_watchdog.cpp: tests the limits of the phases, and time in which the process did not run. test_watchdog.sh stops
// real ranks.
#include "parallel/watchdog.h"

#include <doctest/doctest.h>

#include <cmath>

#include "support/temporary.h"

TEST_CASE("the limit of each phase") {
    const Timeouts usual;
    CHECK(limit_of(Phase::start, usual, 0, 5, 7) == 300);
    CHECK(limit_of(Phase::checkpoint, usual, 1, 5, 0) == 600);
    for (Phase phase : {Phase::step, Phase::validation, Phase::sample, Phase::end}) {
        CHECK(limit_of(phase, usual, 0.5, 5000, 0) == 120);  // at least
        CHECK(limit_of(phase, usual, 30, 5000, 0) == 600);   // 20 median steps
        CHECK(limit_of(phase, usual, 30, 5000, 64) == 664);
        CHECK(limit_of(phase, usual, 0, 5, 0) == 300);  // the first step: as the start
        CHECK(limit_of(phase, usual, 0, 5000, 0) == 5000);
        CHECK(limit_of(phase, {300, 600, 3}, 30, 5000, 0) == 3);
        CHECK(std::isinf(limit_of(phase, {300, 600, 0}, 30, 5, 0)));
    }
    CHECK(std::isinf(limit_of(Phase::start, {0, 600}, 0, 5, 0)));
    CHECK(std::isinf(limit_of(Phase::step, {0, 600}, 0, 5, 0)));
    CHECK(std::isinf(limit_of(Phase::checkpoint, {300, 0}, 0, 5, 0)));
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
