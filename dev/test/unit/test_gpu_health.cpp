// Tests of the log's summary of all ranks' GPUs, and of the warnings of GPUs that are slowed down.
#include "train/gpu_health.h"

#include "parallel/straggler.h"
#include "support/test.h"

static GpuReading hot(float temperature, int limits) { return {temperature, 1140, 1980, 310, float(limits)}; }

TEST_CASE("the names of NVML's limits are those of nvidia-smi") {
    CHECK(clock_limit_names(0) == "");
    CHECK(clock_limit_names(0x01) == "");  // an idle GPU
    CHECK(clock_limit_names(0x04 | 0x08 | 0x20 | 0x40 | 0x80) ==
          "sw_power_cap hw_slowdown sw_thermal_slowdown hw_thermal_slowdown hw_power_brake_slowdown");
}

TEST_CASE("a reading is described without what is unknown") {
    CHECK(describe_reading({}) == "");
    CHECK(describe_reading({87, 1140, 1980, 310.4f, 0x20}) == "87 C, 1140 of 1980 MHz, 310 W (sw_thermal_slowdown)");
    CHECK(describe_reading({0, 1140, 0, 0, 0}) == "1140 MHz");
    CHECK(describe_reading({0, 0, 1980, 0, 0x80}) == "(hw_power_brake_slowdown)");
}

TEST_CASE("the most specific cause of a slowdown counts") {
    CHECK(slowdown_of(hot(60, 0x04)) == Slowdown::none);
    CHECK(slowdown_of(hot(60, 0x08 | 0x04)) == Slowdown::hardware);
    CHECK(slowdown_of(hot(60, 0x08 | 0x80)) == Slowdown::power_brake);
    CHECK(slowdown_of(hot(60, 0x08 | 0x80 | 0x40)) == Slowdown::heat);
    CHECK(slowdown_of(hot(60, 0x20)) == Slowdown::heat);
}

TEST_CASE("the summary has the hottest and the slowest rank, and skips ranks without a value") {
    RankStatus statuses[4] = {};
    CHECK(summarize_gpus(statuses, 4).temperature_c == 0);
    CHECK(summarize_gpus(statuses, 4).sm_mhz == 0);
    statuses[1].gpu = {60, 1500, 1980, 400, 0x04};
    statuses[2].gpu = {70, 0, 0, 300, 0x40};
    statuses[3].gpu = {65, 1400, 1980, 0, 0};
    const GpuSummary all = summarize_gpus(statuses, 4);
    CHECK(all.temperature_c == 70);
    CHECK(all.hottest_rank == 2);
    CHECK(all.sm_mhz == 1400);
    CHECK(all.slowest_rank == 3);
    CHECK(all.power_w == 400);
    CHECK(all.clock_limits == 0x44);
}

TEST_CASE("each rank and cause gets one warning, in one line per cause") {
    const std::vector<std::string> hosts = {"h0", "h0", "h1", "h1"};
    RankStatus statuses[4] = {};
    SlowdownWarnings warnings;
    CHECK(warnings.add(statuses, hosts).empty());
    statuses[1].gpu = hot(90, 0x40);
    statuses[2].gpu = hot(50, 0x08);
    statuses[3].gpu = hot(91, 0x20);
    CHECK(warnings.add(statuses, hosts) ==
          std::vector<std::string>{
              "rank 1 on h0: heat limits the clock of its GPU: 90 C, 1140 of 1980 MHz, 310 W (hw_thermal_slowdown); "
              "also rank 3 on h1",
              "rank 2 on h1: its hardware limits the clock of its GPU: 50 C, 1140 of 1980 MHz, 310 W (hw_slowdown)"});
    CHECK(warnings.add(statuses, hosts).empty());
    statuses[1].gpu = hot(50, 0x80);
    statuses[0].gpu = hot(92, 0x40);
    const std::vector<std::string> later = warnings.add(statuses, hosts);
    REQUIRE(later.size() == 2);
    CHECK(later[0].starts_with("rank 0 on h0: heat limits"));
    CHECK(later[1].starts_with("rank 1 on h0: the power brake of its machine limits"));
}

TEST_CASE("the warning about a slow rank says that its GPU is slowed down") {
    RankStatus statuses[2] = {{0, 100}, {0, 200}};
    statuses[1].gpu = hot(90, 0x40);
    Straggler straggler;
    std::string line;
    for (int i = 0; i < Straggler::STEPS; i++) line += straggler.add(statuses, 2, 200);
    CHECK(line.starts_with("rank 1 is slow: "));
    CHECK(line.ends_with("; heat limits the clock of its GPU: 90 C, 1140 of 1980 MHz, 310 W (hw_thermal_slowdown)"));
    statuses[1].gpu = hot(70, 0x04);
    Straggler other;
    for (int i = 0; i < Straggler::STEPS; i++) line = other.add(statuses, 2, 200);
    CHECK(line.ends_with("that of the median rank 100 ms"));
}
