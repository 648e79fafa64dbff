// gpu_health.h: what the readings of all ranks' GPUs (base/gpu_monitor.h) say in the log.
#pragma once
#include <string>
#include <vector>

#include "parallel/gradients.h"

// 0: unknown. The readings arrive with the gradients of the step, and are up to a second older.
struct GpuSummary {
    float temperature_c = 0.0f;  // gpu_temperature_c: the highest of all ranks
    int hottest_rank = 0;
    float sm_mhz = 0.0f;  // gpu_sm_mhz: the lowest clock of all ranks
    int slowest_rank = 0;
    float power_w = 0.0f;  // gpu_power_w: the highest of all ranks
    int clock_limits = 0;  // gpu_clock_limits: bits that at least one rank has
};

GpuSummary summarize_gpus(const RankStatus* statuses, int world_size);

// Warns of GPUs that are slowed down, once per rank and Slowdown.
struct SlowdownWarnings {
    std::vector<unsigned> warned;  // of each rank, a bit for each Slowdown

    // Returns at most one warning for each kind of Slowdown. The warning describes the first slow rank and names the
    // others. hosts: the host name of each rank.
    std::vector<std::string> add(const RankStatus* statuses, const std::vector<std::string>& hosts);
};
