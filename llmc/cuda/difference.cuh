// difference.cuh: how much the results of two routes of one operation differ (autotune.h).
#pragma once
#include <cmath>
#include <vector>

#include "base/device.h"
#include "cuda/autotune.h"
#include "cuda/simt.h"

constexpr int DIFFERENCE_THREADS = 512;

// ratios[y][x] = |a - b| / |b| over part y of rows_per_block rows, 0 where both are zeros; a, b (rows, gridDim.y,
// width). Each block reads its elements once. Grid: up to DIFFERENCE_PIECES blocks of 512 threads for the rows, one for
// each part.
template <class T>
__global__ void __launch_bounds__(DIFFERENCE_THREADS)
    difference_kernel(float* ratios, const T* a, const T* b, int64_t rows, int width, int64_t rows_per_block) {
    const int64_t begin = int64_t(blockIdx.x) * rows_per_block;
    const int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
    float difference = 0.0f, norm = 0.0f;
    for (int64_t i = threadIdx.x; i < (end - begin) * width; i += DIFFERENCE_THREADS) {
        const int64_t at = ((begin + i / width) * gridDim.y + blockIdx.y) * width + i % width;
        const float x = float(a[at]), y = float(b[at]);
        difference += (x - y) * (x - y);
        norm += y * y;
    }
    difference = block_sum(difference);
    norm = block_sum(norm);
    if (threadIdx.x == 0)
        ratios[blockIdx.y * gridDim.x + blockIdx.x] = difference == 0.0f ? 0.0f : sqrtf(difference / norm);
}

template <class T>
float gpu::largest_difference(const T* a, const T* b, int64_t rows, int parts, int width, void* ratios, Stream stream) {
    constexpr int64_t least = 64;  // a single row may be 0 but for rounding, as a first query's gradient
    const int64_t per_block = std::max(least, ceil_div<int64_t>(rows, DIFFERENCE_PIECES));
    const dim3 grid(unsigned(ceil_div(rows, per_block)), unsigned(parts));
    float* const on_device = static_cast<float*>(ratios);
    simt::launch(difference_kernel<T>, grid, DIFFERENCE_THREADS, 0, stream, on_device, a, b, rows, width, per_block);
    std::vector<float> all(grid.x * grid.y);
    copy_to_host(all.data(), on_device, int64_t(all.size() * sizeof(float)), stream);
    wait_for_stream(stream);
    float largest = 0.0f;
    for (const float ratio : all) {
        if (std::isnan(ratio)) return ratio;
        largest = std::max(largest, ratio);
    }
    return largest;
}
