// cross_entropy.cpp: reference implementation of softmax and cross entropy over the vocabulary, and the sum of the
// losses.
#include "cpu/variants.h"

#include <algorithm>
#include <cmath>
#include <limits>

// Statistics of a row of logits (V): row_max is the largest one, row_sum the sum of exp(logit - row_max), which cannot
// overflow. A NaN logit makes row_sum NaN. row_max starts at the lowest float, because -infinity minus it is -infinity:
// where all logits of a shard are -infinity, row_sum is 0.
struct RowStats {
    float row_max = std::numeric_limits<float>::lowest(), row_sum = 0.0f;

    float loss(float target_logit) const { return std::log(row_sum) + (row_max - target_logit); }
    float lse() const { return std::log(row_sum) + row_max; }
};

template <class floatX>
static RowStats row_stats(const floatX* logits, int V) {
    RowStats s;
    for (int v = 0; v < V; v++)  // not std::fmax, which crashes gcc 12 for arm64 in a loop over bf16
        s.row_max = float(logits[v]) > s.row_max ? float(logits[v]) : s.row_max;
    for (int v = 0; v < V; v++) s.row_sum += std::exp(float(logits[v]) - s.row_max);
    return s;
}

template <class floatX>
void cpu::plain::cross_entropy_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                       Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX* row = logits + int64_t(n) * Vp;
        losses[n] = targets[n] < 0 ? 0.0f : row_stats(row, V).loss(float(row[targets[n]]));
    }
}

template <class floatX>
void cpu::plain::cross_entropy(floatX* logits, float* losses, const int* targets, int N, int V, int Vp, float scale,
                               Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = logits + int64_t(n) * Vp;
        const bool ignored = targets[n] < 0;
        const RowStats s = ignored ? RowStats{} : row_stats(row, V);
        losses[n] = ignored ? 0.0f : s.loss(float(row[targets[n]]));
        for (int v = 0; v < Vp; v++) {
            const float indicator = v == targets[n] ? 1.0f : 0.0f;
            row[v] = floatX(ignored || v >= V ? 0.0f
                                              : (std::exp(float(row[v]) - s.row_max) / s.row_sum - indicator) * scale);
        }
    }
}

template <class floatX>
void cpu::plain::cross_entropy_shard(float* partials, const floatX* logits, const int* targets, int N, VocabShard shard,
                                     int Vp, Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const floatX* row = logits + int64_t(n) * Vp;
        const int column = shard.row(targets[n]);
        float* partial = partials + int64_t(n) * 2;
        partial[0] = targets[n] < 0 ? -INFINITY : row_stats(row, shard.count).lse();
        partial[1] = column < 0 ? -INFINITY : float(row[column]);
    }
}

template <class floatX>
void cpu::plain::cross_entropy_shard_backward(floatX* logits, const float* lse, const int* targets, int N,
                                              VocabShard shard, int Vp, float scale, Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        floatX* row = logits + int64_t(n) * Vp;
        const int column = shard.row(targets[n]);
        for (int v = 0; v < Vp; v++) {
            const float indicator = v == column ? 1.0f : 0.0f;
            row[v] = floatX(
                targets[n] < 0 || v >= shard.count ? 0.0f : (std::exp(float(row[v]) - lse[n]) - indicator) * scale);
        }
    }
}

// The target's logit is the largest of the shards' second numbers: all but one of them are -infinity.
void cpu::cross_entropy_combine(float* losses, float* lse, const float* partials, const int* targets, int shards, int N,
                                Stream) {
    INVARIANT(shards >= 1 && N >= 1,
              "cross_entropy_combine of %d shards of %d rows: there must be at least one of each", shards, N);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        RowStats s;
        float target_logit = -INFINITY;
        for (int i = 0; i < shards; i++) {
            const float* partial = partials + (int64_t(i) * N + n) * 2;
            s.row_max = std::max(s.row_max, partial[0]);
            target_logit = std::max(target_logit, partial[1]);
        }
        for (int i = 0; i < shards; i++) s.row_sum += std::exp(partials[(int64_t(i) * N + n) * 2] - s.row_max);
        lse[n] = s.lse();
        losses[n] = targets[n] < 0 ? 0.0f : lse[n] - target_logit;
    }
}

void cpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream) {
    double sum = 0.0;
    for (int n = 0; n < N; n++) sum += double(losses[n]);
    *total = float(double(*total) + double(scale) * sum);
}

INSTANTIATE(cpu::plain::cross_entropy_forward);
INSTANTIATE(cpu::plain::cross_entropy);
INSTANTIATE(cpu::plain::cross_entropy_shard);
INSTANTIATE(cpu::plain::cross_entropy_shard_backward);
