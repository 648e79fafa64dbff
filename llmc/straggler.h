// straggler.h: which rank the others wait for.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "common.h"
#include "gradients.h"

// A rank is slow when its own work takes 1.3 times that of the median rank, over many steps.
struct Straggler {
    static constexpr int STEPS = 20;
    static constexpr double SLOW = 1.3;

    std::vector<double> sums;  // ms of each rank, over `steps`
    int steps = 0;

    // said: of each rank, in a step. Returns a line to print, after every STEPS steps at most; else nothing.
    std::string add(const Said* said, int world_size) {
        if (world_size == 1) return "";
        sums.resize(world_size);
        for (int rank = 0; rank < world_size; rank++) sums[rank] += double(said[rank].busy_ms);
        if (++steps < STEPS) return "";
        std::vector<double> sorted = sums;
        std::sort(sorted.begin(), sorted.end());
        const double median = sorted[(world_size - 1) / 2];
        const auto slowest = std::max_element(sums.begin(), sums.end());
        std::string line;
        if (*slowest > SLOW * median)
            line = format(
                "rank %d is slow: %.0f ms of its own work in a step, the rank in the middle %.0f ms (mean of "
                "%d steps)",
                int(slowest - sums.begin()), *slowest / steps, median / steps, steps);
        std::fill(sums.begin(), sums.end(), 0.0);
        steps = 0;
        return line;
    }
};
