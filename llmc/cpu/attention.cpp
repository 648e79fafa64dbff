// attention.cpp: reference implementation of causal attention. It keeps one row of scores at a time, no T x T matrix.
#include "cpu/variants.h"

#include <algorithm>
#include <cmath>
#include <vector>

static float dot(const float* a, const float* b, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; i++) sum += a[i] * b[i];
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
void cpu::plain::attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream) {
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

template <class floatX>
void cpu::plain::attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream) {
    const int C = NH * HS;
#pragma omp parallel for
    for (int h = 0; h < NH; h++) {
        const auto q = widen(qkv + int64_t(T - 1) * 3 * C + h * HS, 1, HS, 3 * C);
        const auto k = widen(qkv + C + h * HS, T, HS, 3 * C), v = widen(qkv + 2 * C + h * HS, T, HS, 3 * C);
        std::vector<float> scores(T);
        attend(out + h * HS, q.data(), k.data(), v.data(), scores.data(), T, HS);
    }
}

// With score = scale * q[t].k[j] and p = exp(score - lse[t]), for each query t and each key j <= t:
//   dv[j] += p dout[t]      dp = dout[t].v[j]      dscore = p (dp - D), where D = sum over j of p dp = dout[t].out[t]
//   dq[t] += scale dscore k[j]                     dk[j] += scale dscore q[t]
template <class floatX>
void cpu::plain::attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                                    const floatX* qkv, int B, int T, int NH, int HS, Stream) {
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

INSTANTIATE(cpu::plain::attention_forward);
INSTANTIATE(cpu::plain::attention_decode);
INSTANTIATE(cpu::plain::attention_backward);
