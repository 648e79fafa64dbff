// bench.h: what the benchmarks share: the best of several timings, and random operands. Benchmarks print tables and
// never pass or fail.
#pragma once
#include <algorithm>
#include <cstdio>

#include "../../llmc/common.h"
#include "../../llmc/device.h"
#include "../../llmc/random.h"

// Seconds of the fastest of at least 3 runs, repeated for about `budget` seconds. The machine may be shared: the
// fastest run is the one that says what the code can do.
template <class Run>
double best_seconds(const Run& run, double budget = 0.3) {
    run();  // page faults and first-time set-up
    double best = 1e30, total = 0.0;
    for (int i = 0; i < 3 || total < budget; i++) {
        const double start = seconds_now();
        run();
        wait_for_device();
        const double seconds = seconds_now() - start;
        best = std::min(best, seconds);
        total += seconds;
    }
    return best;
}

// Standard normal numbers times scale. Zeros would not do: matrix units run faster on them.
template <class floatX>
DeviceBuffer<floatX> random_buffer(int64_t size, uint64_t seed, float scale = 1.0f) {
    DeviceBuffer<floatX> buffer(size, "a benchmark operand");
    const Philox random{seed, 0};
    // Long ones repeat after 2^16: they need not be good random numbers.
    for (int64_t i = 0; i < size; i++)
        buffer.data[i] = i < 65536 ? floatX(scale * random.normal(uint64_t(i))) : buffer.data[i - 65536];
    return buffer;
}
