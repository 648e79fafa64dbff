// bench.h: what the benchmarks share: the best of several timings, random operands, results as JSON lines. Benchmarks
// print tables and never pass or fail.
#pragma once
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "base/random.h"

// Seconds of the fastest run, repeated for about `budget` seconds. The machine may be shared: the fastest run is the
// one that says what the code can do. Short runs are timed several at once, so that a GPU is not waited for after each.
template <class Run>
double best_seconds(const Run& run, double budget = 0.3) {
    constexpr double long_enough = 2e-3;
    const auto time = [&](int runs) {
        const double start = seconds_now();
        for (int i = 0; i < runs; i++) run();
        wait_for_device();
        return (seconds_now() - start) / runs;
    };
    time(1);  // page faults and first-time set-up
    const int runs = std::clamp(int(long_enough / std::max(time(1), 1e-7)), 1, 1000);
    double best = 1e30, total = 0.0;
    for (int i = 0; i < 3 || total < budget; i++) {
        const double seconds = time(runs);
        best = std::min(best, seconds);
        total += seconds * runs;
    }
    return best;
}

// Standard normal numbers times scale. Zeros would not do: matrix units run faster on them.
template <class floatX>
DeviceBuffer<floatX> random_buffer(int64_t size, uint64_t seed, float scale = 1.0f) {
    DeviceBuffer<floatX> buffer(size, "a benchmark operand");
    const Philox random{seed, 0};
    // Long ones repeat after 2^16: they need not be good random numbers.
    std::vector<floatX> values(std::min<int64_t>(size, 65536));
    for (size_t i = 0; i < values.size(); i++) values[i] = floatX(scale * random.normal(i));
    for (int64_t i = 0; i < size; i += int64_t(values.size()))
        copy_to_device(buffer.data + i, values.data(),
                       std::min(int64_t(values.size()), size - i) * int64_t(sizeof(floatX)), nullptr);
    wait_for_device();
    return buffer;
}

// A file of one JSON object per line, appended to; with an empty path, none. fields: without the braces.
struct JsonLines {
    std::string path;

    void add(const std::string& fields) const {
        if (path.empty()) return;
        FILE* file = fopen(path.c_str(), "a");
        ENSURE(file, "cannot write %s", path.c_str());
        fprintf(file, "{%s}\n", fields.c_str());
        fclose(file);
    }
};
