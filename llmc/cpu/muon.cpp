// muon.cpp: the elementwise operations of Muon, whose matmuls are the model's. Memory bounds their time.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/random.h"
#include "ops/ops.h"

void cpu::muon_momentum(float* out, float* m, float* v, const float* grad, const float* factor, int64_t count, float mu,
                        AdamWConfig config, Stream) {
    const float f = *factor;
    if (!std::isfinite(f)) return void(std::fill_n(out, count, 0.0f));
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        const float g = grad[i] * f;
        m[i] = mu * m[i] + (1.0f - mu) * g;
        v[i] = config.beta2 * v[i] + (1.0f - config.beta2) * g * g;
        out[i] = mu * m[i] + (1.0f - mu) * g;
    }
}

template <class floatX>
void cpu::muon_normalize(floatX* out, const float* inp, const float* squares, int64_t count, Stream) {
    const float scale = 1.0f / (std::sqrt(*squares) + 1e-7f);
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) out[i] = floatX(inp[i] * scale);
}

template <class floatX>
void cpu::muon_polynomial(floatX* out, const floatX* matrix, const floatX* square, int n, float a, float b, float c,
                          Stream) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n; row++) {
        for (int64_t i = row * n; i < (row + 1) * n; i++)
            out[i] = floatX(b * float(matrix[i]) + c * float(square[i]) + (i == row * (n + 1) ? a : 0.0f));
    }
}

template <class floatX>
void cpu::muon_update(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t begin,
                      int64_t count, float scale, AdamWConfig config, float lr, int step, Stream) {
    if (!std::isfinite(*factor)) return;
    if constexpr (std::is_same_v<floatX, float>) master = weight;
    const Philox random{config.seed, ROUNDING_STREAMS + uint64_t(step)};
    const auto next = [&](float w, int64_t i) {
        return w - lr * (scale * float(direction[i]) + config.weight_decay * w);
    };
    if (master) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; i++) weight[i] = floatX(master[i] = next(master[i], i));
    } else {
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < count; i++)
            weight[i] = floatX(round_randomly(next(float(weight[i]), i), random.bits16(uint64_t(begin + i))));
    }
}

INSTANTIATE(cpu::muon_normalize);
INSTANTIATE(cpu::muon_polynomial);
INSTANTIATE(cpu::muon_update);
