// norm.cuh: operations on flat gradient buffers: the global norm, the clip factor, accumulation, and conversion between
// fp32 and bf16.
//
// For the norm, each block sums the squares of a fixed range of the gradients, and one block then adds the sums of the
// blocks. The order depends only on count, and no atomics are used, so the same gradients give the same bits. The norm
// reads 4*count bytes once, which bounds its time (498 MB for 124M parameters).
#pragma once
#include <cmath>

#include "base/device.h"
#include "cuda/moments.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int NORM_THREADS = 512, NORM_MAX_BLOCKS = 1024;

// partial[blockIdx.x] = sum of x^2 over the block's range of per_block elements, a multiple of 4. x (count).
// Grid: up to NORM_MAX_BLOCKS blocks of 512 threads; a thread owns every 512th vector of 16 bytes in the range.
__global__ void __launch_bounds__(NORM_THREADS)
    squares_kernel(float* partial, const float* x, int64_t count, int64_t per_block) {
    using V = Vec<float>;
    const int64_t begin = int64_t(blockIdx.x) * per_block, end = begin + per_block < count ? begin + per_block : count;
    float sum = 0.0f;
    int64_t i = begin + threadIdx.x * V::size;
    for (; i + V::size <= end; i += NORM_THREADS * V::size) {
        const V v = load128(x + i);  // not a streaming load: AdamW reads the gradients next, partly from the L2 cache
        for (int k = 0; k < V::size; k++) sum += v[k] * v[k];
    }
    for (; i < end; i++) sum += x[i] * x[i];  // one thread has the elements that do not fill a vector
    const float total = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// out (1) = sum of partial (count), count <= NORM_MAX_BLOCKS. Grid: one block, one element per thread.
__global__ void __launch_bounds__(NORM_MAX_BLOCKS) sum_partials_kernel(float* out, const float* partial, int count) {
    const float total = block_sum(int(threadIdx.x) < count ? partial[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) *out = total;
}

// sum (count) += x (count). Grid: a thread per 16 bytes. Moves 12*count bytes.
__global__ void __launch_bounds__(NORM_THREADS) accumulate_kernel(float* sum, const float* x, int64_t count) {
    using V = Vec<float>;
    const int64_t i = (int64_t(blockIdx.x) * NORM_THREADS + threadIdx.x) * V::size;
    if (i >= count) return;
    V total = load128(sum + i);
    const V addend = load128(x + i);
    for (int k = 0; k < V::size; k++) total[k] += addend[k];
    store128(sum + i, total);
}

// sum (count) += x (count), rounded stochastically; `begin` is the first element's index. Grid: a thread per 16 bytes
// of bf16. Moves 8*count bytes.
__global__ void __launch_bounds__(NORM_THREADS)
    accumulate_rounded_kernel(bf16* sum, const float* x, int64_t begin, int64_t count, Philox random) {
    using V = Vec<float>;
    constexpr int per_thread = Vec<bf16>::size;
    const int64_t i = (int64_t(blockIdx.x) * NORM_THREADS + threadIdx.x) * per_thread;
    if (i >= count) return;
    const V low = load128cs(x + i), high = load128cs(x + i + V::size);
    const MomentBits<per_thread> bits(random, begin + i);
    Vec<bf16> total = load128(sum + i);
    UNROLL
    for (int k = 0; k < per_thread; k++) {
        const float addend = k < V::size ? low[k] : high[k - V::size];
        total[k] = round_randomly(float(total[k]) + addend, SignedMoment::below_bf16(bits[k]));
    }
    store128(sum + i, total);
}

// out (count) = x (count), rounded to nearest. Grid: a thread per 16 bytes of bf16. Moves 6*count bytes.
__global__ void __launch_bounds__(NORM_THREADS) round_kernel(bf16* out, const float* x, int64_t count) {
    using V = Vec<float>;
    const int64_t i = (int64_t(blockIdx.x) * NORM_THREADS + threadIdx.x) * Vec<bf16>::size;
    if (i >= count) return;
    const V low = load128cs(x + i), high = load128cs(x + i + V::size);  // streaming: the next access is a write
    Vec<bf16> rounded;
    UNROLL
    for (int k = 0; k < V::size; k++) {
        rounded[k] = bf16(low[k]);
        rounded[V::size + k] = bf16(high[k]);
    }
    store128(out + i, rounded);
}

// out (count) = x (count), widened to float. Grid: a thread per 16 bytes of bf16. Moves 6*count bytes.
__global__ void __launch_bounds__(NORM_THREADS) widen_kernel(float* out, const bf16* x, int64_t count) {
    using V = Vec<float>;
    const int64_t i = (int64_t(blockIdx.x) * NORM_THREADS + threadIdx.x) * Vec<bf16>::size;
    if (i >= count) return;
    const Vec<bf16> rounded = load128cs(x + i);
    V low, high;
    UNROLL
    for (int k = 0; k < V::size; k++) {
        low[k] = float(rounded[k]);
        high[k] = float(rounded[V::size + k]);
    }
    store128(out + i, low);
    store128(out + i + V::size, high);
}

// norm (1) = sqrt(squares (1)). factor (1) = max_norm / norm if norm > max_norm > 0, else 1; it becomes NaN if it was
// NaN or if the norm or the loss is not finite, and infinite if one of them exceeds its limit. Grid: one warp, of which
// one thread works.
__global__ void clip_factor_kernel(float* norm, float* factor, const float* squares, const float* loss, float max_norm,
                                   StepLimits limits) {
    if (threadIdx.x > 0) return;
    const float n = sqrtf(*squares);
    *norm = n;
    if (std::isnan(*factor) || !std::isfinite(n) || !std::isfinite(*loss))
        *factor = nanf("");
    else if (n > limits.norm || *loss > limits.loss)
        *factor = INFINITY;
    else
        *factor = max_norm > 0.0f && n > max_norm ? max_norm / n : 1.0f;
}

inline void gpu::sum_of_squares(float* out, const float* x, int64_t count, Stream stream) {
    constexpr int64_t step = NORM_THREADS * Vec<float>::size;
    const int64_t per_block = round_up(ceil_div(count > 0 ? count : 1, int64_t(NORM_MAX_BLOCKS)), step);
    const int blocks = count > 0 ? int(ceil_div(count, per_block)) : 1;
    float* partial = static_cast<float*>(device_scratch(NORM_MAX_BLOCKS * sizeof(float)));
    simt::launch(squares_kernel, blocks, NORM_THREADS, 0, stream, partial, x, count, per_block);
    simt::launch(sum_partials_kernel, 1, NORM_MAX_BLOCKS, 0, stream, out, partial, blocks);
}

inline int gradient_blocks(const char* name, int64_t count, int64_t per_thread) {
    ENSURE(count % FLAT_ALIGN == 0, "%s: %lld elements; a multiple of %lld", name, static_cast<long long>(count),
           static_cast<long long>(FLAT_ALIGN));
    return narrow(ceil_div(count, NORM_THREADS * per_thread));
}

inline void gpu::accumulate_gradients(float* sum, const float* x, int64_t count, Stream stream) {
    const int blocks = gradient_blocks("accumulate_gradients", count, Vec<float>::size);
    if (blocks > 0) simt::launch(accumulate_kernel, blocks, NORM_THREADS, 0, stream, sum, x, count);
}

inline void gpu::accumulate_rounded(bf16* sum, const float* x, int64_t begin, int64_t count, uint64_t seed, int step,
                                    int addition, Stream stream) {
    check_range(begin, count, step);
    const int blocks = gradient_blocks("accumulate_rounded", count, Vec<bf16>::size);
    const Philox random{seed, sum_stream(step, addition)};
    if (blocks > 0)
        simt::launch(accumulate_rounded_kernel, blocks, NORM_THREADS, 0, stream, sum, x, begin, count, random);
}

inline void gpu::round_gradients(bf16* out, const float* x, int64_t count, Stream stream) {
    const int blocks = gradient_blocks("round_gradients", count, Vec<bf16>::size);
    if (blocks > 0) simt::launch(round_kernel, blocks, NORM_THREADS, 0, stream, out, x, count);
}

inline void gpu::widen_gradients(float* out, const bf16* x, int64_t count, Stream stream) {
    const int blocks = gradient_blocks("widen_gradients", count, Vec<bf16>::size);
    if (blocks > 0) simt::launch(widen_kernel, blocks, NORM_THREADS, 0, stream, out, x, count);
}

inline void gpu::clip_factor(float* norm, float* factor, const float* squares, const float* loss, float max_norm,
                             StepLimits limits, Stream stream) {
    simt::launch(clip_factor_kernel, 1, WARP_SIZE, 0, stream, norm, factor, squares, loss, max_norm, limits);
}
