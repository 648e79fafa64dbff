// layernorm.cpp: reference implementation of LayerNorm over channels.
#include "cpu/variants.h"

#include <cmath>

// Normalizes x (C). The variance takes two passes: E[x^2] - E[x]^2 would cancel in float where |mean| >> std.
template <class floatX>
static void normalize_row(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* weight,
                          const floatX* bias, int C) {
    float sum = 0.0f, squares = 0.0f;
    for (int c = 0; c < C; c++) sum += float(x[c]);
    const float m = sum / C;
    for (int c = 0; c < C; c++) squares += (float(x[c]) - m) * (float(x[c]) - m);
    const float r = 1.0f / std::sqrt(squares / C + 1e-5f);
    for (int c = 0; c < C; c++) out[c] = floatX((float(x[c]) - m) * r * float(weight[c]) + float(bias[c]));
    *mean = m;
    *rstd = r;
}

template <class floatX>
void cpu::plain::layernorm_forward(floatX* out, float* mean, float* rstd, float*, const floatX* inp,
                                   const floatX* weight, const floatX* bias, int N, int C, Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const int64_t row = int64_t(n) * C;
        normalize_row(out + row, mean + n, rstd + n, inp + row, weight, bias, C);
    }
}

// With norm = (inp - mean) * rstd and dnorm = dout * weight, where mean and rstd depend on inp too, LayerNorm's input
// gradient is rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm)). The averages are over a row's channels.
template <class floatX>
void cpu::plain::layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* dbranch_bias, float*,
                                    const floatX* dout, const floatX* inp, const floatX* weight, const float* mean,
                                    const float* rstd, const floatX* dresidual, int N, int C, Stream) {
    const auto norm = [&](int n, int c) { return (float(inp[int64_t(n) * C + c]) - mean[n]) * rstd[n]; };
    const auto dnorm = [&](int n, int c) { return float(dout[int64_t(n) * C + c]) * float(weight[c]); };
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        float average = 0.0f, average_norm = 0.0f;
        for (int c = 0; c < C; c++) {
            average += dnorm(n, c) / C;
            average_norm += dnorm(n, c) * norm(n, c) / C;
        }
        for (int c = 0; c < C; c++) {
            const int64_t at = int64_t(n) * C + c;
            const float residual = dresidual ? float(dresidual[at]) : 0.0f;
            dinp[at] = floatX(residual + rstd[n] * (dnorm(n, c) - average - norm(n, c) * average_norm));
        }
    }
#pragma omp parallel for
    for (int c = 0; c < C; c++) {
        float dw = 0.0f, db = 0.0f, dbranch = 0.0f;
        for (int n = 0; n < N; n++) {
            dw += float(dout[int64_t(n) * C + c]) * norm(n, c);
            db += float(dout[int64_t(n) * C + c]);
            dbranch += float(dinp[int64_t(n) * C + c]);
        }
        dweight[c] += dw;
        dbias[c] += db;
        if (dbranch_bias) dbranch_bias[c] += dbranch;
    }
}

INSTANTIATE(cpu::plain::layernorm_forward);
INSTANTIATE(cpu::plain::layernorm_backward);
