// adamw.cuh: the AdamW update (Loshchilov and Hutter 2019) over flat buffers.
//
// A thread owns as many elements as 16 bytes of floatX hold, so that every access is 16 bytes wide. In bf16 30 bytes
// move per parameter (gradient read; master, m, v read and written; weight written), in fp32 28, which bounds the time
// (3.7 GB for 124M parameters). The clip factor is read on the device: the host never waits for the norm.
#pragma once
#include <cmath>

#include "../ops.h"
#include "simt.h"

// What is the same for all elements: config, and the corrections of the moments' start from zero.
struct AdamWStep {
    float beta1, beta2, correction1, correction2, eps, lr, weight_decay;
};

// The new value of a weight w; m and v in place.
__device__ inline float adamw_element(float w, float& m, float& v, float g, float decay, const AdamWStep& s) {
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    const float update = (m / s.correction1) / (sqrtf(v / s.correction2) + s.eps);
    return w - s.lr * (update + decay * w);
}

// For float, master is weight.
template <class floatX>
__global__ void __launch_bounds__(256)
    adamw_kernel(floatX* weight, float* master, float* m, float* v, const float* grad, const float* factor,
                 int64_t count, int64_t decayed, AdamWStep s) {
    using V = Vec<float>;
    constexpr int own = Vec<floatX>::size, vecs = own / V::size;
    const float f = *factor;
    if (std::isnan(f)) return;  // every thread of every block: the step is not taken
    const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * own;
    if (first + own > count) {  // the last few
        for (int64_t i = first; i < count; i++) {
            const float next =
                adamw_element(master[i], m[i], v[i], grad[i] * f, i < decayed ? s.weight_decay : 0.0f, s);
            master[i] = next;
            weight[i] = floatX(next);
        }
        return;
    }
    Vec<floatX> rounded;
    for (int j = 0; j < vecs; j++) {
        const int64_t at = first + j * V::size;
        const V g = load128cs(grad + at);
        V w = load128cs(master + at), mi = load128cs(m + at), vi = load128cs(v + at);
        for (int k = 0; k < V::size; k++) {
            w[k] = adamw_element(w[k], mi[k], vi[k], g[k] * f, at + k < decayed ? s.weight_decay : 0.0f, s);
            rounded[j * V::size + k] = floatX(w[k]);
        }
        store128cs(m + at, mi);
        store128cs(v + at, vi);
        if constexpr (sizeof(floatX) != sizeof(float)) store128cs(master + at, w);
    }
    store128(weight + first, rounded);  // the next forward pass reads it
}

template <class floatX>
void gpu::adamw(floatX* weight, float* master, float* m, float* v, const float* grad, const float* factor,
                int64_t count, int64_t decayed, AdamWConfig config, float lr, int step, Stream stream) {
    ENSURE(step >= 1, "adamw: step %d; steps count from 1", step);
    ENSURE(decayed >= 0 && decayed <= count, "adamw: %lld of %lld elements decayed", static_cast<long long>(decayed),
           static_cast<long long>(count));
    if (count == 0) return;
    if constexpr (sizeof(floatX) == sizeof(float)) master = weight;
    const AdamWStep s = {config.beta1,
                         config.beta2,
                         float(1.0 - std::pow(double(config.beta1), step)),
                         float(1.0 - std::pow(double(config.beta2), step)),
                         config.eps,
                         lr,
                         config.weight_decay};
    constexpr int threads = 256;
    simt::launch(adamw_kernel<floatX>, blocks_for(count, threads * Vec<floatX>::size), threads, 0, stream, weight,
                 master, m, v, grad, factor, count, decayed, s);
}
