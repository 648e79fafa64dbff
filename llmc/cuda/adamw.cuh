// adamw.cuh: the AdamW update (Loshchilov and Hutter 2019) over flat buffers, in one launch.
//
// A thread owns four elements, so each access of a warp to an fp32 array covers 512 consecutive bytes. If it owned
// eight, each access would cover only half of every sector of 32 bytes. In bf16 without master weights a thread owns
// eight nevertheless: one call of Philox, about 60 integer instructions, gives the random bits for eight roundings.
//
// Memory traffic bounds the time. In bf16 it is 30 bytes per parameter (gradient read; master, m and v read and
// written; weight written), 24 without master weights, and in fp32 28: 3.7 GB for 124M parameters in bf16. Moments in
// bf16 take 8 of them less, in 8 bits 12. The kernel reads the clip factor from device memory, so the host never waits
// for the norm.
#pragma once
#include <cmath>

#include "base/random.h"
#include "cuda/moments.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

// Constants of one optimizer step. inverse1 and inverse2 are the reciprocals of the moments' bias corrections, 1 -
// beta^step, so that an element takes one division instead of three. With these reciprocals the update has two more
// roundings than the definition, of 2^-24 each.
struct AdamWStep {
    float beta1, beta2, inverse1, inverse2, eps, lr, weight_decay;
    Philox random, of_moments;
};

// Returns the new value of weight w. Updates the moments m and v in place.
__device__ inline float adamw_element(float w, float& m, float& v, float g, float decay, const AdamWStep& s) {
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    const float update = (m * s.inverse1) / (sqrtf(v * s.inverse2) + s.eps);
    return w - s.lr * (update + decay * w);
}

// Where the fp32 master weight is: in a buffer of its own, or nowhere else than in `weight` (fp32 training, and bf16
// without master weights).
enum class Master { separate, weight_itself };

// The elements of a thread.
template <class floatX, Master MASTER>
constexpr int adamw_per_thread = MASTER == Master::separate ? Vec<float>::size : Vec<floatX>::size;

// weight, master, m, v (count) =, from grad (count) and the clip factor (1). Element 0 of the buffers has index `begin`
// in the flat parameter buffer, which decides its weight decay and its random bits.
//
// Grid: blocks of 256 threads; a thread owns adamw_per_thread consecutive elements. Threads of the last warp that own
// none compute the first elements once more, because the others' shuffles need them.
template <class floatX, Master MASTER, MomentDtype MOMENTS>
__global__ void __launch_bounds__(256)
    adamw_kernel(floatX* weight, float* master, Moment m, Moment v, const float* grad, const float* factor,
                 int64_t begin, int64_t count, DecayPattern decay, AdamWStep s) {
    using V = Vec<float>;
    using enum WhichMoment;
    constexpr int per_thread = adamw_per_thread<floatX, MASTER>, vecs = per_thread / V::size;
    constexpr bool has_master = MASTER == Master::separate;
    constexpr bool stochastic = !has_master && sizeof(floatX) != sizeof(float);  // rounding of the weights
    static_assert(FLAT_ALIGN % per_thread == 0);
    const float f = *factor;
    if (!std::isfinite(f)) return;  // the same for all threads: the step is skipped
    const int64_t own = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * per_thread;
    const bool inside = own < count;
    const int64_t first_own = inside ? own : 0;
    // All elements of a thread have the same decay, because runs are multiples of FLAT_ALIGN.
    const float weight_decay = decay.run(begin + first_own).decays ? s.weight_decay : 0.0f;
    uint32_t random[4] = {};
    if constexpr (stochastic) s.random.words(random, uint64_t(begin + first_own) / per_thread);

    Vec<floatX, per_thread> weights;
    if constexpr (!has_master) weights = load128(weight + first_own);
    float means[per_thread], squares[per_thread];
    load_moment<MOMENTS, first>(means, m, first_own);
    load_moment<MOMENTS, second>(squares, v, first_own);
    UNROLL
    for (int j = 0; j < vecs; j++) {
        const int64_t at = first_own + j * V::size;
        const V g = load128cs(grad + at);
        V w;
        if constexpr (has_master) w = load128cs(master + at);
        UNROLL
        for (int k = 0; k < V::size; k++) {
            const int e = j * V::size + k;
            if constexpr (!has_master) w[k] = float(weights[e]);
            w[k] = adamw_element(w[k], means[e], squares[e], g[k] * f, weight_decay, s);
            if constexpr (stochastic)
                weights[e] = round_randomly(w[k], Philox::bits16(random, e));
            else
                weights[e] = floatX(w[k]);
        }
        if constexpr (has_master)
            if (inside) store128cs(master + at, w);
    }
    const MomentBits<per_thread> bits(s.of_moments, begin + first_own);
    save_moment<MOMENTS, first>(m, first_own, means, &bits, inside);
    save_moment<MOMENTS, second>(v, first_own, squares, &bits, inside);
    if (!inside) return;
    // Not streaming stores: the next forward pass reads the weights.
    if constexpr (has_master)
        store64(weight + first_own, weights);
    else
        store128(weight + first_own, weights);
}

template <class floatX>
void gpu::adamw(floatX* weight, float* master, Moment m, Moment v, const float* grad, const float* factor,
                int64_t begin, int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step,
                Stream stream) {
    check_adamw(begin, count, decay, step);
    if (count == 0) return;
    const AdamWStep s = {config.beta1,
                         config.beta2,
                         float(1.0 / (1.0 - std::pow(double(config.beta1), step))),
                         float(1.0 / (1.0 - std::pow(double(config.beta2), step))),
                         config.eps,
                         lr,
                         config.weight_decay,
                         {config.seed, ROUNDING_STREAMS + uint64_t(step)},
                         {config.seed, MOMENT_STREAMS + uint64_t(step)}};
    constexpr int threads = 256;
    const auto launch = [&](auto master_is) {
        with_moments(m.dtype, [&](auto moments) {
            simt::launch(adamw_kernel<floatX, master_is, moments>,
                         blocks_for(count, threads * adamw_per_thread<floatX, master_is>), threads, 0, stream, weight,
                         master, m, v, grad, factor, begin, count, decay, s);
        });
    };
    if constexpr (sizeof(floatX) != sizeof(float))
        if (master) return launch(std::integral_constant<Master, Master::separate>());
    launch(std::integral_constant<Master, Master::weight_itself>());
}
