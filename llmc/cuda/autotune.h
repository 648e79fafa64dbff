// autotune.h: timing of alternative algorithms, and the cache file of device_autotune (base/device.h) that keeps the
// fastest. Used for cuBLASLt's algorithms and cuDNN's plans.
#pragma once
#include <algorithm>
#include <string>

#include "base/dtype.h"
#include "cuda/cuda_check.h"

namespace gpu {

// Whether alternatives are to be timed (--autotune).
bool autotuning();
// Entries of the cache file. The key names the device, the library's version and the shape. choice_for returns an empty
// string if the file has no entry; keep_choice writes the file.
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

// Time in milliseconds of the work that `run` queues on the stream: the minimum of several runs after a warm-up run.
template <class Run>
float measure_ms(Stream stream, const Run& run) {
    constexpr int runs = 5;
    const Timer timer;
    float min_ms = 0.0f;
    run();
    for (int i = 0; i < runs; i++) {
        float ms = 0.0f;
        CUDA_CHECK(cudaEventRecord(timer.start, stream));
        run();
        CUDA_CHECK(cudaEventRecord(timer.stop, stream));
        CUDA_CHECK(cudaEventSynchronize(timer.stop));
        CUDA_CHECK(cudaEventElapsedTime(&ms, timer.start, timer.stop));
        min_ms = i == 0 ? ms : std::min(min_ms, ms);
    }
    return min_ms;
}

}  // namespace gpu
