// cross_entropy.cpp: reference implementation of softmax and cross entropy over the vocabulary, and the sum of the
// losses.
#include "cpu/variants.h"

#include <cmath>

// Of one row of logits (V): row_max is the largest logit, row_sum the sum of exp(logit - row_max), which cannot
// overflow, and loss the loss of the target. A NaN logit makes row_sum NaN.
struct RowStats {
    float row_max, row_sum, loss;
};

template <class floatX>
static RowStats row_stats(const floatX* logits, int target, int V) {
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int v = 0; v < V; v++)  // not std::fmax, which crashes gcc 12 for arm64 in a loop over bf16
        row_max = float(logits[v]) > row_max ? float(logits[v]) : row_max;
    for (int v = 0; v < V; v++) row_sum += std::exp(float(logits[v]) - row_max);
    return {row_max, row_sum, std::log(row_sum) + (row_max - float(logits[target]))};
}

template <class floatX>
void cpu::plain::cross_entropy_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                       Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++)
        losses[n] = targets[n] < 0 ? 0.0f : row_stats(logits + int64_t(n) * Vp, targets[n], V).loss;
}

template <class floatX>
void cpu::plain::cross_entropy(floatX* logits, float* losses, const int* targets, int N, int V, int Vp, float scale,
                               Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = logits + int64_t(n) * Vp;
        const bool ignored = targets[n] < 0;
        const RowStats s = ignored ? RowStats{} : row_stats(row, targets[n], V);
        losses[n] = s.loss;
        for (int v = 0; v < Vp; v++) {
            const float indicator = v == targets[n] ? 1.0f : 0.0f;
            row[v] = floatX(ignored || v >= V ? 0.0f
                                              : (std::exp(float(row[v]) - s.row_max) / s.row_sum - indicator) * scale);
        }
    }
}

void cpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream) {
    double sum = 0.0;
    for (int n = 0; n < N; n++) sum += double(losses[n]);
    *total = float(double(*total) + double(scale) * sum);
}

INSTANTIATE(cpu::plain::cross_entropy_forward);
INSTANTIATE(cpu::plain::cross_entropy);
