// muon.cuh: the elementwise operations of Muon (train/muon.h), whose matmuls are the model's.
//
// A thread owns one element, because a rank's shard may begin at any element of a matrix. A warp then reads and writes
// 64 or 128 consecutive bytes of each array.
//
// Memory traffic bounds the time of muon_momentum and muon_update. The first moves 24 bytes per element. The second
// moves 12 (in bf16 direction read, master read and written, weight written), or 6 in bf16 without master weights. The
// matrices of muon_normalize (6 bytes in bf16, 8 in fp32) and muon_polynomial (6 and 12) are those of one iteration,
// which the L2 cache holds.
#pragma once
#include <cmath>

#include "base/random.h"
#include "cuda/simt.h"
#include "ops/ops.h"

// Grid of all kernels here: blocks of 256 threads, a thread per element.
constexpr int MUON_THREADS = 256;

__device__ inline int64_t muon_element() { return int64_t(blockIdx.x) * MUON_THREADS + threadIdx.x; }

__global__ void __launch_bounds__(MUON_THREADS)
    muon_momentum_kernel(float* out, float* m, float* v, const float* grad, const float* factor, int64_t count,
                         float mu, float beta2) {
    const int64_t i = muon_element();
    if (i >= count) return;
    const float f = *factor;
    if (!std::isfinite(f)) {  // the same for all threads
        out[i] = 0.0f;
        return;
    }
    const float g = grad[i] * f, mean = mu * m[i] + (1.0f - mu) * g;
    v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
    m[i] = mean;
    out[i] = mu * mean + (1.0f - mu) * g;
}

template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_normalize_kernel(floatX* out, const float* inp, const float* squares, int64_t count) {
    const int64_t i = muon_element();
    if (i < count) out[i] = floatX(inp[i] * (1.0f / (sqrtf(*squares) + 1e-7f)));
}

// The elements of the diagonal are n + 1 apart.
template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_polynomial_kernel(floatX* out, const floatX* matrix, const floatX* square, int n, float a, float b, float c) {
    const int64_t i = muon_element();
    if (i >= int64_t(n) * n) return;
    const float diagonal = uint64_t(i) % (uint64_t(n) + 1) == 0 ? a : 0.0f;
    out[i] = floatX(b * float(matrix[i]) + c * float(square[i]) + diagonal);
}

// master is null if weight holds the only copy of the value: in fp32, or without master weights.
template <class floatX>
__global__ void __launch_bounds__(MUON_THREADS)
    muon_update_kernel(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t begin,
                       int64_t count, float scale, float weight_decay, float lr, Philox random) {
    const int64_t i = muon_element();
    if (i >= count || !std::isfinite(*factor)) return;
    const float w = master ? master[i] : float(weight[i]);
    const float next = w - lr * (scale * float(direction[i]) + weight_decay * w);
    if (master) master[i] = next;
    if (master || sizeof(floatX) == sizeof(float)) {
        weight[i] = floatX(next);
    } else {
        uint32_t words[4];
        random.words(words, uint64_t(begin + i) / 8);
        weight[i] = floatX(round_randomly(next, Philox::bits16(words, int((begin + i) % 8))));
    }
}

template <class... P>
void launch_muon(void (*kernel)(P...), int64_t count, Stream stream, std::type_identity_t<P>... args) {
    if (count > 0) simt::launch(kernel, blocks_for(count, MUON_THREADS), MUON_THREADS, 0, stream, args...);
}

inline void gpu::muon_momentum(float* out, float* m, float* v, const float* grad, const float* factor, int64_t count,
                               float mu, AdamWConfig config, Stream stream) {
    launch_muon(muon_momentum_kernel, count, stream, out, m, v, grad, factor, count, mu, config.beta2);
}

template <class floatX>
void gpu::muon_normalize(floatX* out, const float* inp, const float* squares, int64_t count, Stream stream) {
    launch_muon(muon_normalize_kernel<floatX>, count, stream, out, inp, squares, count);
}

template <class floatX>
void gpu::muon_polynomial(floatX* out, const floatX* matrix, const floatX* square, int n, float a, float b, float c,
                          Stream stream) {
    launch_muon(muon_polynomial_kernel<floatX>, int64_t(n) * n, stream, out, matrix, square, n, a, b, c);
}

template <class floatX>
void gpu::muon_update(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t begin,
                      int64_t count, float scale, AdamWConfig config, float lr, int step, Stream stream) {
    if constexpr (sizeof(floatX) == sizeof(float)) master = nullptr;
    launch_muon(muon_update_kernel<floatX>, count, stream, weight, master, direction, factor, begin, count, scale,
                config.weight_decay, lr, Philox{config.seed, ROUNDING_STREAMS + uint64_t(step)});
}
