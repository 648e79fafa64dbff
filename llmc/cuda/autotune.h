// autotune.h: chooses among the algorithms of a library by time, and keeps the choices (base/device.h). Used for
// cuBLASLt's algorithms and cuDNN's plans.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "cuda/algorithm_choices.h"
#include "cuda/cuda_check.h"

namespace gpu {

// Whether a shape without a choice is to be timed now (device_time_algorithms).
bool timing_algorithms();
// The current choices. load_algorithms replaces them, and increases algorithms_version.
const AlgorithmChoices& algorithms();
void load_algorithms(const AlgorithmChoices& choices);
// Increases with each load_algorithms. A plan that was made at an earlier number is out of date.
int algorithms_version();
// A choice; the key names the device, the library's version and the shape. choice_for returns "" if there is none.
std::string choice_for(const std::string& key);
void keep_choice(const std::string& key, const std::string& choice);

struct Timer {
    cudaEvent_t start, stop;
    Timer() {
        CUDA_CHECK(cudaEventCreate(&start));
        CUDA_CHECK(cudaEventCreate(&stop));
    }
    ~Timer() {
        cudaEventDestroy(start);
        cudaEventDestroy(stop);
    }
    Timer(const Timer&) = delete;
};

// Time in milliseconds of the work that `run` queues on the stream. Infinite if run returns false: it cannot run.
template <class Run>
float measure_ms(const Timer& timer, Stream stream, const Run& run) {
    CUDA_CHECK(cudaEventRecord(timer.start, stream));
    if (!run()) return INFINITY;
    CUDA_CHECK(cudaEventRecord(timer.stop, stream));
    CUDA_CHECK(cudaEventSynchronize(timer.stop));
    float ms = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&ms, timer.start, timer.stop));
    return ms;
}

struct Fastest {
    size_t index;
    float ms, first_ms;  // times of the fastest candidate, and of the first that can run
};

// Times `count` candidates; run(i) queues candidate i, and returns false if it cannot run. Before that it runs the
// first one for warm_ms, because an idle GPU has a low clock, at which the first would seem slow. Each candidate is run
// twice, first to load its kernels. Those within a tenth of the best are run again. A candidate replaces an earlier one
// only if it is clearly faster, so that noise does not choose. After max_ms of work the remaining candidates are not
// tried. Returns nothing if none can run.
template <class Run>
std::optional<Fastest> fastest(Stream stream, size_t count, const Run& run) {
    constexpr float warm_ms = 10.0f, max_ms = 120.0f, near_ratio = 1.1f, faster_ratio = 0.98f;
    constexpr int more_runs = 4, max_warm_runs = 100;
    const Timer timer;
    const auto ms_of = [&](size_t i) { return measure_ms(timer, stream, [&] { return run(i); }); };
    float warmed = 0.0f;
    for (int n = 0; count > 0 && n < max_warm_runs && warmed < warm_ms; n++) warmed += ms_of(0);
    std::vector<float> ms(count, INFINITY);
    float spent = 0.0f;
    for (size_t i = 0; i < count && spent < max_ms; i++) {
        if (std::isinf(ms_of(i))) continue;
        ms[i] = ms_of(i);
        spent += 2 * ms[i];
    }
    const float least = count ? *std::min_element(ms.begin(), ms.end()) : INFINITY;
    std::optional<Fastest> best;
    for (size_t i = 0; i < count; i++) {
        if (std::isinf(ms[i])) continue;
        for (int n = 0; n < more_runs && ms[i] <= near_ratio * least; n++) ms[i] = std::min(ms[i], ms_of(i));
        if (!best) best = {i, ms[i], ms[i]};
        if (ms[i] < faster_ratio * best->ms) best = {i, ms[i], best->first_ms};
    }
    return best;
}

}  // namespace gpu
