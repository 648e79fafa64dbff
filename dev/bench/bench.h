// bench.h: helpers of the benchmarks: timing of the fastest run, random operands, and results as JSON lines.
// Benchmarks print tables; they never pass or fail.
#pragma once
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "base/random.h"

// Seconds of the fastest run, of as many as fit in about `budget` seconds. The machine may be shared, and the fastest
// run is the least disturbed. Short runs are timed in groups, with one wait for the device per group.
template <class Run>
double best_seconds(const Run& run, double budget = 0.3) {
    constexpr double long_enough = 2e-3;
    const auto time = [&](int runs) {
        const double start = seconds_now();
        for (int i = 0; i < runs; i++) run();
        wait_for_device();
        return (seconds_now() - start) / runs;
    };
    time(1);  // not counted: it has page faults and sets up the device
    const int runs = std::clamp(int(long_enough / std::max(time(1), 1e-7)), 1, 1000);
    double best = 1e30, total = 0.0;
    for (int i = 0; i < 3 || total < budget; i++) {
        const double seconds = time(runs);
        best = std::min(best, seconds);
        total += seconds * runs;
    }
    return best;
}

// Standard normal numbers times scale. They are not zeros, because matrix units run faster on zeros.
template <class floatX>
DeviceBuffer<floatX> random_buffer(int64_t size, uint64_t seed, float scale = 1.0f) {
    DeviceBuffer<floatX> buffer(size, "a benchmark operand");
    const Philox random{seed, 0};
    // Long buffers repeat after 2^16 numbers, which is random enough for timings.
    std::vector<floatX> values(std::min<int64_t>(size, 65536));
    for (size_t i = 0; i < values.size(); i++) values[i] = floatX(scale * random.normal(i));
    for (int64_t i = 0; i < size; i += int64_t(values.size()))
        copy_to_device(buffer.data + i, values.data(),
                       std::min(int64_t(values.size()), size - i) * int64_t(sizeof(floatX)), nullptr);
    wait_for_device();
    return buffer;
}

// Appends JSON objects to a file, one per line. With an empty path it does nothing.
struct JsonLines {
    std::string path;

    // fields: the content of the object's braces
    void add(const std::string& fields) const {
        if (path.empty()) return;
        FILE* file = fopen(path.c_str(), "a");
        ENSURE(file, "cannot write %s", path.c_str());
        fprintf(file, "{%s}\n", fields.c_str());
        fclose(file);
    }
};
