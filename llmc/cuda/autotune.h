// autotune.h: what device_autotune (device.h) has timed and chosen, for everything here that has a choice, and the
// timing.
#pragma once
#include <algorithm>
#include <string>

#include "base/dtype.h"
#include "cuda/cuda_check.h"

namespace gpu {

// Whether to time. The choices are those of the file: what names the device, the library's version and the shape.
bool autotuning();
std::string choice_for(const std::string& what);  // empty: none yet
void keep_choice(const std::string& what, const std::string& choice);

struct Timer {
    cudaEvent_t start, stop;
    Timer() {
        CUDA_CHECK(cudaEventCreate(&start));
        CUDA_CHECK(cudaEventCreate(&stop));
    }
    ~Timer() { cudaEventDestroy(start), cudaEventDestroy(stop); }
    Timer(const Timer&) = delete;
};

// Milliseconds of what run queues on the stream: the least of some runs, after one that warms up.
template <class Run>
float least_ms(Stream stream, const Run& run) {
    constexpr int runs = 5;
    const Timer timer;
    float least = 0.0f;
    run();
    for (int i = 0; i < runs; i++) {
        float ms = 0.0f;
        CUDA_CHECK(cudaEventRecord(timer.start, stream));
        run();
        CUDA_CHECK(cudaEventRecord(timer.stop, stream));
        CUDA_CHECK(cudaEventSynchronize(timer.stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, timer.start, timer.stop));
        least = i == 0 ? ms : std::min(least, ms);
    }
    return least;
}

}  // namespace gpu
