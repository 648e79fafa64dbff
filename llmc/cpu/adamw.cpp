// adamw.cpp: reference implementation of the AdamW update.
#include "cpu/variants.h"

#include <cmath>
#include <type_traits>

#include "base/random.h"

template <class floatX>
void cpu::plain::adamw(floatX* weight, float* master, float* m, float* v, const float* grad, const float* factor,
                       int64_t begin, int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step,
                       Stream) {
    if (!std::isfinite(*factor)) return;
    if constexpr (std::is_same_v<floatX, float>) master = weight;
    const Philox random{config.seed, ROUNDING_STREAMS + uint64_t(step)};
    const float correction1 = float(1.0 - std::pow(double(config.beta1), step));
    const float correction2 = float(1.0 - std::pow(double(config.beta2), step));
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        const float g = grad[i] * *factor;
        m[i] = config.beta1 * m[i] + (1.0f - config.beta1) * g;
        v[i] = config.beta2 * v[i] + (1.0f - config.beta2) * g * g;
        const float update = (m[i] / correction1) / (std::sqrt(v[i] / correction2) + config.eps);
        float w = master ? master[i] : float(weight[i]);
        w -= lr * (update + (decay.run(begin + i).decays ? config.weight_decay : 0.0f) * w);
        if (master) {
            master[i] = w;
            weight[i] = floatX(w);
        } else {
            weight[i] = floatX(round_randomly(w, random.bits16(uint64_t(begin + i))));
        }
    }
}

INSTANTIATE(cpu::plain::adamw);
