// gelu.cpp: reference implementation of GELU in its tanh approximation (Hendrycks and Gimpel 2016).
#include "cpu/variants.h"

#include <cmath>

static constexpr float sqrt_2_over_pi = 0.7978845608028654f, cubic = 0.044715f;

template <class floatX>
void cpu::plain::gelu_forward(floatX* out, const floatX* inp, int64_t count, Stream) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        const float x = float(inp[i]);
        out[i] = floatX(0.5f * x * (1.0f + std::tanh(sqrt_2_over_pi * (x + cubic * x * x * x))));
    }
}

// The derivative is 0.5 (1 + tanh u) + 0.5 x (1 - tanh(u)^2) u'. If tanh u has rounded to +-1, the second term is 0
// even where x^2 in u' overflows.
template <class floatX>
void cpu::plain::gelu_backward(floatX* dinp, const floatX* inp, const floatX* dout, int64_t count, Stream) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        const float x = float(inp[i]);
        const float tanh_u = std::tanh(sqrt_2_over_pi * (x + cubic * x * x * x));
        const float du = sqrt_2_over_pi * (1.0f + 3.0f * cubic * x * x);
        const float sech2 = 1.0f - tanh_u * tanh_u;
        const float slope = 0.5f * (1.0f + tanh_u) + (sech2 == 0.0f ? 0.0f : 0.5f * x * sech2 * du);
        dinp[i] = floatX(float(dout[i]) * slope);
    }
}

INSTANTIATE(cpu::plain::gelu_forward);
INSTANTIATE(cpu::plain::gelu_backward);
