// reference.cpp: the operations of the model in plain loops, in the order of a training step (ops.inc). This page
// says what the operations compute; tests compare all faster variants with it, and no other program links it. Sums are
// float, in the order of the indices, and each result is rounded to floatX once. Operations that have a single
// implementation, such as those on gradients, are in small_ops.cpp and in dispatch.cpp; the head, whose tests need a
// definition in double, is in dev/test/support/cases_head.h.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "base/random.h"
#include "cpu/variants.h"

namespace cpu::reference {

// ---- Embeddings: out[n] = wte[tokens[n]] + wpe[n % T]

template <class floatX>
void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                       VocabShard shard, Stream) {
#pragma omp parallel for
    for (int n = 0; n < B * T; n++) {
        const int row = shard.row(tokens[n]);
        for (int c = 0; c < C; c++) {
            const float token = row < 0 ? 0.0f : float(wte[int64_t(row) * C + c]);
            out[int64_t(n) * C + c] = floatX(token + (wpe ? float(wpe[int64_t(n % T) * C + c]) : 0.0f));
        }
    }
}

// dwte[tokens[n]] += dout[n], dwpe[n % T] += dout[n]. Serial, because several rows of dout may be added to the same
// row of dwte, and the order changes the rounding.
template <class floatX>
void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                        VocabShard shard, Stream) {
    for (int n = 0; n < B * T; n++) {
        const int row = shard.row(tokens[n]);
        for (int c = 0; c < C; c++) {
            const float d = float(dout[int64_t(n) * C + c]);
            if (row >= 0) dwte[int64_t(row) * C + c] += d;
            dwpe[int64_t(n % T) * C + c] += d;
        }
    }
}

// ---- LayerNorm: out = norm * weight + bias with norm = (inp - mean) * rstd and rstd = 1 / sqrt(variance + 1e-5), for
// each row of C channels. The variance takes two passes: E[x^2] - E[x]^2 would cancel in float where |mean| >> std.

template <class floatX>
void layernorm_forward(Out<floatX> out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX* x = inp + int64_t(n) * C;
        float sum = 0.0f, squares = 0.0f;
        for (int c = 0; c < C; c++) sum += float(x[c]);
        const float m = sum / C;
        for (int c = 0; c < C; c++) squares += (float(x[c]) - m) * (float(x[c]) - m);
        const float r = 1.0f / std::sqrt(squares / C + 1e-5f);
        for (int c = 0; c < C; c++)
            out.data[int64_t(n) * C + c] = floatX((float(x[c]) - m) * r * float(weight[c]) + float(bias[c]));
        mean[n] = m;
        rstd[n] = r;
    }
}

// With dnorm = dout * weight, and because mean and rstd depend on inp too:
//   dinp = dresidual + rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))    averages over a row's channels
//   dweight += sum over n of dout * norm, dbias += sum of dout, dbranch_bias += sum of the rounded dinp
template <class floatX>
void layernorm_backward(Out<floatX> dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                        const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                        const floatX* dresidual, int N, int C, Stream) {
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
            dinp.data[at] = floatX(residual + rstd[n] * (dnorm(n, c) - average - norm(n, c) * average_norm));
        }
    }
#pragma omp parallel for
    for (int c = 0; c < C; c++) {
        float dw = 0.0f, db = 0.0f, dbranch = 0.0f;
        for (int n = 0; n < N; n++) {
            dw += float(dout[int64_t(n) * C + c]) * norm(n, c);
            db += float(dout[int64_t(n) * C + c]);
            dbranch += float(dinp.data[int64_t(n) * C + c]);
        }
        dweight[c] += dw;
        dbias[c] += db;
        if (dbranch_bias) dbranch_bias[c] += dbranch;
    }
}

// ---- Matmul with its epilogues: out = inp weight^T + bias + residual, or out = gelu(pre_gelu)

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f, CUBIC = 0.044715f;

// 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3): GELU in its tanh approximation (Hendrycks and Gimpel 2016)
static float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x))); }

// 0.5 (1 + tanh u) + 0.5 x (1 - tanh(u)^2) u'. Where tanh u has rounded to +-1, the second term is 0 even if x^2 in u'
// overflows.
static float gelu_derivative(float x) {
    const float tanh_u = std::tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x)), sech2 = 1.0f - tanh_u * tanh_u;
    const float du = SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
    return 0.5f * (1.0f + tanh_u) + (sech2 == 0.0f ? 0.0f : 0.5f * x * sech2 * du);
}

template <class floatX>
void matmul_forward(const MatmulForward<floatX>& m, int N, int IC, int OC, Stream) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            const floatX *x = m.inp + int64_t(n) * IC, *w = m.weight.rows + int64_t(o) * IC;
            const int64_t at = int64_t(n) * OC + o;
            float sum = 0.0f;
            for (int i = 0; i < IC; i++) sum += float(x[i]) * float(w[i]);
            if (m.bias) sum += float(m.bias[o]);
            if (m.residual) sum += float(m.residual[at]);
            if (m.pre_gelu) m.pre_gelu[at] = floatX(sum);
            m.out.data[at] = floatX(m.pre_gelu ? gelu(sum) : sum);
        }
}

// dinp = dout weight * gelu'(pre_gelu), dweight += dout^T inp, dbias += sum over n of dout
template <class floatX>
void matmul_backward(const MatmulBackward<floatX>& m, int N, int IC, int OC, Stream) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < (m.dinp.data ? N : 0); n++) {
        std::vector<float> sums(IC);
        for (int o = 0; o < OC; o++)
            for (int i = 0; i < IC; i++)
                sums[i] += float(m.dout[int64_t(n) * OC + o]) * float(m.weight.rows[int64_t(o) * IC + i]);
        for (int i = 0; i < IC; i++) {
            const int64_t at = int64_t(n) * IC + i;
            m.dinp.data[at] = floatX(m.pre_gelu ? sums[i] * gelu_derivative(float(m.pre_gelu[at])) : sums[i]);
        }
    }
#pragma omp parallel for schedule(static)
    for (int o = 0; o < (m.dweight ? OC : 0); o++) {
        std::vector<float> sums(IC);
        float bias_sum = 0.0f;
        for (int n = 0; n < N; n++) {
            const float d = float(m.dout[int64_t(n) * OC + o]);
            for (int i = 0; i < IC; i++) sums[i] += d * float(m.inp[int64_t(n) * IC + i]);
            bias_sum += d;
        }
        for (int i = 0; i < IC; i++) {
            float& sum = m.dweight[int64_t(o) * IC + i];
            sum = m.accumulate ? sum + sums[i] : sums[i];
        }
        if (m.dbias) m.dbias[o] = m.accumulate ? m.dbias[o] + bias_sum : bias_sum;
    }
}

// ---- Residual stream: out = inp + bias + residual

template <class floatX>
void add_residual(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int N, int C, Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            const int64_t at = int64_t(n) * C + c;
            out[at] = floatX(float(inp[at]) + float(bias[c]) + float(residual[at]));
        }
}

// ---- Causal attention, one row of scores at a time: out[t] = sum over j <= t of softmax(scale * q[t].k[j]) v[j] with
// scale = 1 / sqrt(HS), and lse[t] = log(sum over j of exp(score)).

template <class floatX>
static float dot(const floatX* a, const floatX* b, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; i++) sum += float(a[i]) * float(b[i]);
    return sum;
}

// One head (rows, HS) as contiguous floats; stride: elements from one row of `head` to the next.
template <class floatX>
static std::vector<float> widen(const floatX* head, int rows, int HS, int64_t stride) {
    std::vector<float> wide(size_t(rows) * HS);
    for (int t = 0; t < rows; t++)
        for (int i = 0; i < HS; i++) wide[size_t(t) * HS + i] = float(head[t * stride + i]);
    return wide;
}

// Attention of one query (HS) to the first `keys` rows of k and v (T, HS): out (HS) is the weighted mean of the values.
// Returns log(sum(exp(score))). scores: scratch for `keys` floats.
template <class floatX>
static float attend(floatX* out, const float* query, const float* k, const float* v, float* scores, int keys, int HS) {
    const float scale = 1.0f / std::sqrt(float(HS));
    for (int t = 0; t < keys; t++) scores[t] = scale * dot(query, k + int64_t(t) * HS, HS);
    const float row_max = *std::max_element(scores, scores + keys);
    float sum = 0.0f;
    for (int t = 0; t < keys; t++) sum += scores[t] = std::exp(scores[t] - row_max);
    for (int i = 0; i < HS; i++) {
        float mean = 0.0f;
        for (int t = 0; t < keys; t++) mean += scores[t] / sum * v[int64_t(t) * HS + i];
        out[i] = floatX(mean);
    }
    return row_max + std::log(sum);
}

template <class floatX>
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream) {
    const int C = NH * HS;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            const floatX* head = qkv + int64_t(b) * T * 3 * C + h * HS;
            const auto q = widen(head, T, HS, 3 * C), k = widen(head + C, T, HS, 3 * C);
            const auto v = widen(head + 2 * C, T, HS, 3 * C);
            std::vector<float> scores(T);
            for (int t = 0; t < T; t++)
                lse[(int64_t(b) * NH + h) * T + t] = attend(out + (int64_t(b) * T + t) * C + h * HS, &q[size_t(t) * HS],
                                                            k.data(), v.data(), scores.data(), t + 1, HS);
        }
}

// With score = scale * q[t].k[j] and p = exp(score - lse[t]), for each query t and each key j <= t:
//   dv[j] += p dout[t]      dp = dout[t].v[j]      dscore = p (dp - D), where D = sum over j of p dp = dout[t].out[t]
//   dq[t] += scale dscore k[j]                     dk[j] += scale dscore q[t]
template <class floatX>
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv, int B,
                        int T, int NH, int HS, Stream) {
    const int C = NH * HS;
    const float scale = 1.0f / std::sqrt(float(HS));
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            const int64_t head = int64_t(b) * T * 3 * C + h * HS, head_out = int64_t(b) * T * C + h * HS;
            const auto q = widen(qkv + head, T, HS, 3 * C), k = widen(qkv + head + C, T, HS, 3 * C);
            const auto v = widen(qkv + head + 2 * C, T, HS, 3 * C);
            const auto o = widen(out + head_out, T, HS, C), d = widen(dout + head_out, T, HS, C);
            std::vector<float> dq(size_t(T) * HS), dk(size_t(T) * HS), dv(size_t(T) * HS);
            for (int t = 0; t < T; t++) {
                const float *qt = &q[size_t(t) * HS], *dt = &d[size_t(t) * HS];
                const float D = dot(dt, &o[size_t(t) * HS], HS);
                for (int j = 0; j <= t; j++) {
                    const size_t row = size_t(j) * HS;
                    const float p = std::exp(scale * dot(qt, &k[row], HS) - lse[(int64_t(b) * NH + h) * T + t]);
                    const float dscore = p * (dot(dt, &v[row], HS) - D);
                    for (int i = 0; i < HS; i++) {
                        dq[size_t(t) * HS + i] += scale * dscore * k[row + i];
                        dk[row + i] += scale * dscore * qt[i];
                        dv[row + i] += p * dt[i];
                    }
                }
            }
            for (int t = 0; t < T; t++)
                for (int i = 0; i < HS; i++) {
                    floatX* row = dqkv + head + int64_t(t) * 3 * C + i;
                    row[0] = floatX(dq[size_t(t) * HS + i]);
                    row[C] = floatX(dk[size_t(t) * HS + i]);
                    row[2 * C] = floatX(dv[size_t(t) * HS + i]);
                }
        }
}

template <class floatX>
void attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream) {
    const int C = NH * HS;
#pragma omp parallel for
    for (int h = 0; h < NH; h++) {
        const auto q = widen(qkv + int64_t(T - 1) * 3 * C + h * HS, 1, HS, 3 * C);
        const auto k = widen(qkv + C + h * HS, T, HS, 3 * C), v = widen(qkv + 2 * C + h * HS, T, HS, 3 * C);
        std::vector<float> scores(T);
        attend(out + h * HS, q.data(), k.data(), v.data(), scores.data(), T, HS);
    }
}

// ---- GELU on its own: out = gelu(inp), dinp = dout * gelu'(inp)

template <class floatX>
void gelu_forward(Out<floatX> out, const floatX* inp, int64_t count, Stream) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) out.data[i] = floatX(gelu(float(inp[i])));
}

template <class floatX>
void gelu_backward(Out<floatX> dinp, const floatX* inp, const floatX* dout, int64_t count, Stream) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) dinp.data[i] = floatX(float(dout[i]) * gelu_derivative(float(inp[i])));
}

// ---- Gradient norm and AdamW

// out = sum of x^2
void sum_of_squares(float* out, const float* x, int64_t count, Stream) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += double(x[i]) * double(x[i]);
    *out = float(sum);
}

// With g = grad * factor:  m = beta1 m + (1 - beta1) g    v = beta2 v + (1 - beta2) g^2
//   w -= lr * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps) + weight_decay * w)
// Without master weights w is rounded to bf16 stochastically, and so are moments that are not fp32.
template <class floatX>
void adamw(floatX* weight, float* master, Moment moment1, Moment moment2, const float* grad, const float* factor,
           int64_t begin, int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step, Stream) {
    if (!std::isfinite(*factor)) return;
    if constexpr (std::is_same_v<floatX, float>) master = weight;
    const Philox random{config.seed, ROUNDING_STREAMS + uint64_t(step)},
        moments{config.seed, MOMENT_STREAMS + uint64_t(step)};
    const float correction1 = float(1.0 - std::pow(double(config.beta1), step));
    const float correction2 = float(1.0 - std::pow(double(config.beta2), step));
    std::vector<float> m(static_cast<size_t>(count)), v(static_cast<size_t>(count));
    cpu::widen_moment(m.data(), moment1, WhichMoment::first, count, nullptr);
    cpu::widen_moment(v.data(), moment2, WhichMoment::second, count, nullptr);
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
    round_moment(moment1, m.data(), WhichMoment::first, begin, count, moments);
    round_moment(moment2, v.data(), WhichMoment::second, begin, count, moments);
}

#define OP(op) INSTANTIATE(op);
EACH_DEFINED(OP)

}  // namespace cpu::reference
