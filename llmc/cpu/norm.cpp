// norm.cpp: reference implementation of the gradients' sum of squares; conversions of gradients; the clip factor.
#include "cpu/variants.h"

#include <cmath>
#include <limits>

void cpu::plain::sum_of_squares(float* out, const float* x, int64_t count, Stream) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += double(x[i]) * double(x[i]);
    *out = float(sum);
}

void cpu::accumulate_gradients(float* sum, const float* x, int64_t count, Stream) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) sum[i] += x[i];
}

void cpu::round_gradients(bf16* out, const float* x, int64_t count, Stream) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) out[i] = bf16(x[i]);
}

void cpu::widen_gradients(float* out, const bf16* x, int64_t count, Stream) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) out[i] = float(x[i]);
}

void cpu::clip_factor(float* norm, float* factor, const float* squares, const float* loss, float max_norm,
                      StepLimits limits, Stream) {
    *norm = std::sqrt(*squares);
    if (std::isnan(*factor) || !std::isfinite(*norm) || !std::isfinite(*loss))
        *factor = std::numeric_limits<float>::quiet_NaN();
    else if (*norm > limits.norm || *loss > limits.loss)
        *factor = std::numeric_limits<float>::infinity();
    else
        *factor = max_norm > 0.0f && *norm > max_norm ? max_norm / *norm : 1.0f;
}
