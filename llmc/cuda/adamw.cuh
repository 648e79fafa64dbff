// adamw.cuh: the AdamW update (Loshchilov and Hutter 2019) over flat buffers, in one launch.
//
// A thread owns as many elements as 16 bytes of floatX hold, so that every access is 16 bytes wide. In bf16 30 bytes
// move per parameter (gradient read; master, m, v read and written; weight written), without master 24, in fp32 28,
// which bounds the time (3.7 GB for 124M parameters). The clip factor is read on the device: the host never waits for
// the norm. Without master a thread's eight roundings take one call of Philox, some 60 instructions of integers.
#pragma once
#include <cmath>

#include "base/random.h"
#include "cuda/simt.h"
#include "ops/ops.h"

// What is the same for all elements: config, and the corrections of the moments' start from zero.
struct AdamWStep {
    float beta1, beta2, correction1, correction2, eps, lr, weight_decay;
    Philox random;
};

// The new value of a weight w; m and v in place.
__device__ inline float adamw_element(float w, float& m, float& v, float g, float decay, const AdamWStep& s) {
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    const float update = (m / s.correction1) / (sqrtf(v / s.correction2) + s.eps);
    return w - s.lr * (update + decay * w);
}

// Where the weight at full precision is.
enum class Master { apart, weight_itself };

template <class floatX, Master WHERE>
__global__ void __launch_bounds__(256)
    adamw_kernel(floatX* weight, float* master, float* m, float* v, const float* grad, const float* factor,
                 int64_t begin, int64_t count, DecayPattern decay, AdamWStep s) {
    using V = Vec<float>;
    constexpr int own = Vec<floatX>::size, vecs = own / V::size;
    constexpr bool apart = WHERE == Master::apart, at_random = !apart && sizeof(floatX) != sizeof(float);
    static_assert(FLAT_ALIGN % own == 0);
    const float f = *factor;
    if (std::isnan(f)) return;  // every thread of every block: the step is not taken
    const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * own;
    if (first >= count) return;
    const float own_decay = decay.run(begin + first).decays ? s.weight_decay : 0.0f;  // FLAT_ALIGN: the same for all
    uint32_t random[4] = {};
    if constexpr (at_random) s.random.words(random, uint64_t(begin + first) / own);

    Vec<floatX> weights;
    if constexpr (!apart) weights = load128(weight + first);
    UNROLL
    for (int j = 0; j < vecs; j++) {
        const int64_t at = first + j * V::size;
        const V g = load128cs(grad + at);
        V w, mi = load128cs(m + at), vi = load128cs(v + at);
        if constexpr (apart) w = load128cs(master + at);
        UNROLL
        for (int k = 0; k < V::size; k++) {
            floatX& rounded = weights[j * V::size + k];
            if constexpr (!apart) w[k] = float(rounded);
            w[k] = adamw_element(w[k], mi[k], vi[k], g[k] * f, own_decay, s);
            if constexpr (at_random)
                rounded = round_randomly(w[k], Philox::bits16(random, j * V::size + k));
            else
                rounded = floatX(w[k]);
        }
        store128cs(m + at, mi);
        store128cs(v + at, vi);
        if constexpr (apart) store128cs(master + at, w);
    }
    store128(weight + first, weights);  // the next forward pass reads it
}

template <class floatX>
void gpu::adamw(floatX* weight, float* master, float* m, float* v, const float* grad, const float* factor,
                int64_t begin, int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step,
                Stream stream) {
    check_adamw(begin, count, decay, step);
    if (count == 0) return;
    const AdamWStep s = {config.beta1,
                         config.beta2,
                         float(1.0 - std::pow(double(config.beta1), step)),
                         float(1.0 - std::pow(double(config.beta2), step)),
                         config.eps,
                         lr,
                         config.weight_decay,
                         {config.seed, ROUNDING_STREAMS + uint64_t(step)}};
    constexpr int threads = 256;
    const auto launch = [&](auto kernel) {
        simt::launch(kernel, blocks_for(count, threads * Vec<floatX>::size), threads, 0, stream, weight, master, m, v,
                     grad, factor, begin, count, decay, s);
    };
    if constexpr (sizeof(floatX) != sizeof(float))
        if (master) return launch(adamw_kernel<floatX, Master::apart>);
    launch(adamw_kernel<floatX, Master::weight_itself>);
}
