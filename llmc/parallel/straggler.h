// straggler.h: detects a slow rank that the other ranks wait for.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "base/common.h"
#include "parallel/gradients.h"

// All ranks end a step together, so a slow rank costs the others its own work time minus that of the median rank.
// Differences of a few percent, or of milliseconds in all, are noise.
struct Straggler {
    static constexpr int STEPS = 20;          // steps over which times are summed
    static constexpr int SILENT_STEPS = 100;  // steps after a warning in which there is no other warning
    static constexpr double SHARE = 0.1;      // least cost that is reported, as a fraction of the time of these steps
    static constexpr double LEAST_MS = 50;    // least cost that is reported, in ms over these steps

    std::vector<double> own_ms;  // of each rank, summed over `steps`
    double all_ms = 0.0;
    int steps = 0, silent = 0;

    // statuses: the statuses of all ranks, in a step that took step_ms. Returns a line to print, at most every
    // SILENT_STEPS steps, or an empty string.
    std::string add(const RankStatus* statuses, int world_size, double step_ms) {
        if (world_size == 1) return "";
        own_ms.resize(world_size);
        for (int rank = 0; rank < world_size; rank++) own_ms[rank] += double(statuses[rank].last_own_ms);
        all_ms += step_ms;
        silent = std::max(0, silent - 1);
        if (++steps < STEPS) return "";
        const std::string line = silent > 0 ? "" : slowest(statuses);
        if (!line.empty()) silent = SILENT_STEPS;
        std::fill(own_ms.begin(), own_ms.end(), 0.0);
        all_ms = 0.0, steps = 0;
        return line;
    }

    std::string slowest(const RankStatus* statuses) const {
        std::vector<double> sorted = own_ms;
        std::sort(sorted.begin(), sorted.end());
        const double most = sorted.back(), median = sorted[(sorted.size() - 1) / 2], cost = most - median;
        if (cost < LEAST_MS || cost < SHARE * all_ms) return "";
        const int rank = int(std::max_element(own_ms.begin(), own_ms.end()) - own_ms.begin());
        std::string line = format(
            "rank %d is slow: the others waited %.2f s for it in %d steps, which took %.2f s; its own work "
            "takes %.0f ms per step, that of the median rank %.0f ms",
            rank, cost / 1e3, steps, all_ms / 1e3, most / steps, median / steps);
        const GpuReading& gpu = statuses[rank].gpu;
        if (const Slowdown slowdown = slowdown_of(gpu); slowdown != Slowdown::none)
            line +=
                format("; %s limits the clock of its GPU: %s", slowdown_text(slowdown), describe_reading(gpu).c_str());
        return line;
    }
};
