// classifier.cpp: softmax and cross entropy over the vocabulary, the definition; and the sum of the losses.
#include "cpu/variants.h"

#include <cmath>

// Largest logit, sum of exp(logit - largest), and the loss of the target made of them: no exp overflows. A NaN among
// the logits is in the sum.
struct RowSum {
    float largest, sum, loss;
};

template <class floatX>
static RowSum row_sum(const floatX* logits, int target, int V) {
    float largest = -INFINITY, sum = 0.0f;
    for (int v = 0; v < V; v++)  // not std::fmax: in a loop over bf16 it crashes gcc 12 for arm64
        largest = float(logits[v]) > largest ? float(logits[v]) : largest;
    for (int v = 0; v < V; v++) sum += std::exp(float(logits[v]) - largest);
    return {largest, sum, std::log(sum) + (largest - float(logits[target]))};
}

template <class floatX>
void cpu::plain::cross_entropy_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                       Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++)
        losses[n] = targets[n] < 0 ? 0.0f : row_sum(logits + int64_t(n) * Vp, targets[n], V).loss;
}

template <class floatX>
void cpu::plain::cross_entropy(floatX* logits, float* losses, const int* targets, int N, int V, int Vp, float scale,
                               Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = logits + int64_t(n) * Vp;
        const bool ignored = targets[n] < 0;
        const RowSum s = ignored ? RowSum{} : row_sum(row, targets[n], V);
        losses[n] = s.loss;
        for (int v = 0; v < Vp; v++) {
            const float wanted = v == targets[n] ? 1.0f : 0.0f;
            row[v] = floatX(ignored || v >= V ? 0.0f : (std::exp(float(row[v]) - s.largest) / s.sum - wanted) * scale);
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
