// cross_entropy.cuh: softmax and cross entropy over the vocabulary, with or without the gradient (in place of the
// logits), and the sum of losses.
//
// A block owns a row of logits. With the gradient it keeps the row in shared memory, so that the logits are read once
// and written once: 2*N*Vp*sizeof(floatX) bytes, which bounds the time (13.2 GB for N = 65536, Vp = 50304, bf16). Such
// a row takes 100,608 bytes, so an SM of an H100 holds two blocks: one computes while the other loads its row. A row
// that does not fit into shared memory (fp32, except on the large chips) is read twice, the second time from the L2
// cache; with one block per SM, few enough rows are in flight for the cache to hold them. Blocks take the last rows
// first: the matmul that computed the logits wrote them last, so some are still in the cache, and the matmul that reads
// the gradient begins with the first rows.
//
// One pass computes the row's maximum and the sum of exp(logit - max); a thread rescales its sum when it finds a larger
// logit. With the row in shared memory it works on the parts of the row that have arrived. Such a pass over bf16 takes
// 7.1 instructions for each logit and the pass that writes the gradient 6.3 (sm_90a); the two exponentials of a logit
// occupy the special function unit for the time of 16 others, so they are the bound of the arithmetic: 1.9 ms for the
// size above on an H100 at 1.75 GHz, with the rescaling. The exponent is (logit - max) * log2(e). One FMA of logit,
// log2(e) and max * log2(e) would save two instructions and no time; its error grows with max, and a logit of 1e30
// would need a special case.
//
// No finite logit overflows, and a NaN among the logits makes the sum NaN (tests: logits of 1e30 and -1e30;
// NaN).
#pragma once
#include <cmath>

#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int CROSS_ENTROPY_THREADS = 512;          // block size with the row in shared memory
constexpr int CROSS_ENTROPY_DIRECT_THREADS = 1024;  // block size with the row in memory
constexpr int CROSS_ENTROPY_STATIC_BYTES = 512;     // upper bound of the kernel's static shared memory
constexpr int CROSS_ENTROPY_PARTS = 4;              // parts in which a row is copied to shared memory

// Running maximum of logits, and sum of exp(logit - max). The maximum starts at the lowest finite float, because
// -infinity minus it is -infinity, where -infinity minus -infinity would be NaN. The relative error of exp_fast grows
// only for logits far below the maximum, which contribute little. An exponent by one FMA, logit * log2(e) - max *
// log2(e), would be less exact for large logits, and save no time: the exponentials' unit is the busy one.
struct SoftmaxSum {
    float row_max = -0x1.fffffep127f, sum = 0.0f;

    template <class floatX>
    __device__ void add(const Floats<floatX>& x) {
        float new_max = row_max;
        UNROLL
        for (int k = 0; k < x.size; k++) new_max = fmaxf(new_max, x[k]);
        if (new_max > row_max) {
            sum *= exp_fast(row_max - new_max);
            row_max = new_max;
        }
        UNROLL
        for (int k = 0; k < x.size; k++) sum += exp_fast(x[k] - row_max);
    }

    // Combines the threads of the block; every thread gets the result.
    __device__ SoftmaxSum of_block() const {
        SoftmaxSum all;
        all.row_max = block_max(row_max);
        all.sum = block_sum(sum * exp_fast(row_max - all.row_max));
        return all;
    }
};

// The vectors of a row of V logits that one thread of a block owns: every THREADS-th. The last vector of a row may be
// partial, that is, have fewer logits than elements. It is apart, so that no loop over whole vectors tests for it.
template <class floatX, int THREADS>
struct OwnVectors {
    static constexpr int size = Vec<floatX>::size, step = THREADS * size;
    int first, whole, V;  // `whole`: the logits in whole vectors, and where the partial vector begins

    __device__ explicit OwnVectors(int V) : first(int(threadIdx.x) * size), whole(V / size * size), V(V) {}

    __device__ bool owns(int v) const { return first == v / size * size % step; }
    __device__ bool owns_partial() const { return whole < V && owns(whole); }
    // The partial vector with -infinity past the row's end.
    __device__ Floats<floatX> cut(Floats<floatX> x) const {
        UNROLL
        for (int k = 0; k < size; k++)
            if (whole + k >= V) x[k] = -INFINITY;
        return x;
    }
};

// Copies a row to shared memory in parts. Calls add(begin, end) for each part as soon as it has arrived; the partial
// vector is in no such range, but has arrived on return. A thread copies the vectors that it owns.
template <class floatX, int THREADS, class Add>
__device__ void copy_row(floatX* shared_row, const floatX* row, const OwnVectors<floatX, THREADS>& own,
                         const Add& add) {
    const int part = ceil_div(own.V, own.step * CROSS_ENTROPY_PARTS) * own.step;
    const auto end_of = [&](int i, int last) { return last - i * part < part ? last : (i + 1) * part; };
    UNROLL_BY(1)
    for (int i = 0; i < CROSS_ENTROPY_PARTS; i++) {
        UNROLL_BY(4)
        for (int v = i * part + own.first; v < end_of(i, own.V); v += own.step) cp_async_16(shared_row + v, row + v);
        cp_async_commit();
    }
    with_each_constant<CROSS_ENTROPY_PARTS>([&](auto i) {
        cp_async_wait<CROSS_ENTROPY_PARTS - 1 - i>();
        add(i * part, end_of(i, own.whole));
    });
}

// losses[n] = -log(softmax(logits[n])[targets[n]]). With GRADIENT, gradient[n, v] = scale * (softmax(logits[n])[v] -
// (v == targets[n])) for v < V, and 0 for the padding up to Vp; gradient may be logits. A row whose target is negative
// has loss 0 and gradient 0. logits, gradient (N, Vp); losses, targets (N).
//
// Grid: N blocks, one per row. IN_SHARED: the block first copies the row to dynamic shared memory (V logits, rounded up
// to whole vectors). A thread owns every 512th (without IN_SHARED: 1024th) vector of 16 bytes of the row.
template <class floatX, bool IN_SHARED, bool GRADIENT>
__global__ void __launch_bounds__(IN_SHARED ? CROSS_ENTROPY_THREADS : CROSS_ENTROPY_DIRECT_THREADS)
    cross_entropy_kernel(floatX* gradient, float* losses, const floatX* logits, const int* targets, int V, int Vp,
                         float scale) {
    const OwnVectors<floatX, IN_SHARED ? CROSS_ENTROPY_THREADS : CROSS_ENTROPY_DIRECT_THREADS> own(V);
    const int n = int(gridDim.x - 1 - blockIdx.x), target = targets[n];
    const floatX* row = logits + int64_t(n) * Vp;
    floatX* out = GRADIENT ? gradient + int64_t(n) * Vp : nullptr;
    if (target < 0) {  // the same for the whole block
        if (threadIdx.x == 0) losses[n] = 0.0f;
        if (GRADIENT)
            for (int v = own.first; v < Vp; v += own.step) store128(out + v, Vec<floatX>{});
        return;
    }
    const floatX target_element = row[target];  // before the gradient overwrites it

    // No barrier: a thread reads from shared memory only what it copied itself.
    floatX* shared_row = nullptr;
    if constexpr (IN_SHARED) shared_row = simt::dynamic_shared<floatX>();
    const auto read = [&](int v) {
        return widened(IN_SHARED ? load128(shared_row + v) : GRADIENT ? load128(row + v) : load128cs(row + v));
    };
    SoftmaxSum own_sum;
    const auto add = [&](int begin, int end) {
        for (int v = begin + own.first; v < end; v += own.step) own_sum.add(read(v));
    };
    if constexpr (IN_SHARED)
        copy_row(shared_row, row, own, add);
    else
        add(0, own.whole);
    if (own.owns_partial()) own_sum.add(own.cut(read(own.whole)));
    const SoftmaxSum all = own_sum.of_block();
    const float target_logit = float(target_element);  // the first use: up to here no thread waits for this load
    if (threadIdx.x == 0) losses[n] = logf(all.sum) + (all.row_max - target_logit);
    if (!GRADIENT) return;

    const float factor = scale / all.sum;
    const auto gradient_of = [&](Floats<floatX> x) {
        UNROLL
        for (int k = 0; k < x.size; k++) x[k] = exp_fast(x[k] - all.row_max) * factor;
        return rounded(x);
    };
    // Not streaming stores: the next matmul reads the gradient.
    UNROLL_BY(IN_SHARED ? 2 : 1)  // without shared memory there are half as many registers
    for (int v = own.first; v < own.whole; v += own.step) store128(out + v, gradient_of(read(v)));
    if (own.owns_partial()) store128(out + own.whole, gradient_of(own.cut(read(own.whole))));
    UNROLL_BY(1)
    for (int v = round_up(V, own.size) + own.first; v < Vp; v += own.step) store128(out + v, Vec<floatX>{});
    // The thread that stored the target's vector stores the target, too, so that the order is certain.
    if (own.owns(target)) out[target] = floatX((exp_fast(target_logit - all.row_max) / all.sum - 1.0f) * scale);
}

// ---- Cross entropy when the ranks divide the vocabulary
//
// Two passes over the logits: the first reads them, the second, after the exchange of the partial sums, reads and
// writes them. A block owns a row. A shard's row is too short to be worth a copy in shared memory: GPT-2's
// vocabulary in 8 shards has rows of 12.6 KB in bf16.

constexpr int CROSS_ENTROPY_SHARD_THREADS = 256;

// partials[n] = {log of the sum of exp(logit) over the shard's columns, the target's logit}; -infinity where the shard
// has none, and both in ignored rows. partials (N, 2), logits (N, Vp), targets (N).
//
// Grid: N blocks, one per row. A thread owns every 256th vector of 16 bytes of the row.
template <class floatX>
__global__ void __launch_bounds__(CROSS_ENTROPY_SHARD_THREADS)
    cross_entropy_shard_kernel(float* partials, const floatX* logits, const int* targets, VocabShard shard, int Vp) {
    const OwnVectors<floatX, CROSS_ENTROPY_SHARD_THREADS> own(shard.count);
    const int n = int(gridDim.x - 1 - blockIdx.x), target = targets[n], column = shard.row(target);
    const floatX* row = logits + int64_t(n) * Vp;
    float lse = -INFINITY;
    if (target >= 0) {  // the same for the whole block
        SoftmaxSum own_sum;
        UNROLL_BY(2)
        for (int v = own.first; v < own.whole; v += own.step) own_sum.add(widened(load128(row + v)));
        if (own.owns_partial()) own_sum.add(own.cut(widened(load128(row + own.whole))));
        const SoftmaxSum all = own_sum.of_block();
        lse = logf(all.sum) + all.row_max;
    }
    if (threadIdx.x != 0) return;
    partials[2 * int64_t(n)] = lse;
    partials[2 * int64_t(n) + 1] = column < 0 ? -INFINITY : float(row[column]);
}

// lse[n] = log of the sum of exp over all shards; losses[n] = lse[n] - the target's logit, which is the largest of the
// shards' second numbers, because all others are -infinity. partials (shards, N, 2); losses, lse, targets (N).
// Grid: blocks of 256 threads, a thread per row.
__global__ void __launch_bounds__(CROSS_ENTROPY_SHARD_THREADS)
    cross_entropy_combine_kernel(float* losses, float* lse, const float* partials, const int* targets, int shards,
                                 int N) {
    const int n = int(blockIdx.x) * CROSS_ENTROPY_SHARD_THREADS + int(threadIdx.x);
    if (n >= N) return;
    const auto partial = [&](int shard) { return partials + (int64_t(shard) * N + n) * 2; };
    SoftmaxSum all;
    float target_logit = -INFINITY;
    for (int i = 0; i < shards; i++) {
        all.row_max = fmaxf(all.row_max, partial(i)[0]);
        target_logit = fmaxf(target_logit, partial(i)[1]);
    }
    for (int i = 0; i < shards; i++) all.sum += expf(partial(i)[0] - all.row_max);
    lse[n] = logf(all.sum) + all.row_max;
    losses[n] = targets[n] < 0 ? 0.0f : lse[n] - target_logit;
}

// logits[n, v] = (exp(logits[n, v] - lse[n]) - (v is the target's column)) * scale, and 0 in ignored rows and padded
// columns. logits (N, Vp); lse, targets (N). Grid: as cross_entropy_shard_kernel. The blocks begin with the first rows,
// which that kernel read last.
template <class floatX>
__global__ void __launch_bounds__(CROSS_ENTROPY_SHARD_THREADS)
    cross_entropy_shard_backward_kernel(floatX* logits, const float* lse, const int* targets, VocabShard shard, int Vp,
                                        float scale) {
    const int n = int(blockIdx.x), target = targets[n], column = shard.row(target);
    const OwnVectors<floatX, CROSS_ENTROPY_SHARD_THREADS> own(target < 0 ? 0 : shard.count);
    const float row_lse = lse[n];
    floatX* row = logits + int64_t(n) * Vp;
    const bool owns_target = column >= 0 && own.owns(column);
    const float target_logit = owns_target ? float(row[column]) : 0.0f;
    const auto gradient_of = [&](Floats<floatX> x) {
        UNROLL
        for (int k = 0; k < x.size; k++) x[k] = exp_fast(x[k] - row_lse) * scale;
        return rounded(x);
    };
    // Not streaming stores: the next matmul reads the gradient.
    UNROLL_BY(2)
    for (int v = own.first; v < own.whole; v += own.step) store128(row + v, gradient_of(widened(load128(row + v))));
    if (own.owns_partial()) store128(row + own.whole, gradient_of(own.cut(widened(load128(row + own.whole)))));
    UNROLL_BY(1)
    for (int v = round_up(own.V, own.size) + own.first; v < Vp; v += own.step) store128(row + v, Vec<floatX>{});
    if (owns_target) row[column] = floatX((exp_fast(target_logit - row_lse) - 1.0f) * scale);
}

// total (1) += scale * sum of losses (N). Grid: one block.
__global__ void __launch_bounds__(CROSS_ENTROPY_DIRECT_THREADS)
    accumulate_loss_kernel(float* total, const float* losses, int N, float scale) {
    float sum = 0.0f;
    for (int n = int(threadIdx.x); n < N; n += CROSS_ENTROPY_DIRECT_THREADS) sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += scale * sum;
}

// Bytes of dynamic shared memory that a block can have on this device.
inline int64_t shared_memory_limit() {
    static const int64_t limit = [] {
        int device = 0;
        cudaDeviceProp properties;
        if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
            fail(EXIT_INTERNAL, "the device does not say how much shared memory it has");
        return int64_t(properties.sharedMemPerBlockOptin);
    }();
    return limit;
}

template <class floatX>
void check_cross_entropy_sizes(const char* op, int N, int V, int Vp) {
    ENSURE(N >= 1 && V >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, V);
    ENSURE(V <= Vp, "%s: a vocabulary of %d in rows of %d", op, V, Vp);
    ENSURE(Vp % Vec<floatX>::size == 0, "%s: rows of %d logits; must be a multiple of %d", op, Vp, Vec<floatX>::size);
}

template <class floatX>
void gpu::cross_entropy_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                Stream stream) {
    check_cross_entropy_sizes<floatX>("cross_entropy_forward", N, V, Vp);
    simt::launch(cross_entropy_kernel<floatX, false, false>, N, CROSS_ENTROPY_DIRECT_THREADS, 0, stream, nullptr,
                 losses, logits, targets, V, Vp, 0.0f);
}

template <class floatX>
void gpu::cross_entropy(floatX* logits, float* losses, const int* targets, int N, int V, int Vp, float scale,
                        Stream stream) {
    check_cross_entropy_sizes<floatX>("cross_entropy", N, V, Vp);
    const int64_t row_bytes = int64_t(round_up(V, Vec<floatX>::size)) * int64_t(sizeof(floatX));
    if (row_bytes + CROSS_ENTROPY_STATIC_BYTES <= shared_memory_limit())
        simt::launch(cross_entropy_kernel<floatX, true, true>, N, CROSS_ENTROPY_THREADS, row_bytes, stream, logits,
                     losses, logits, targets, V, Vp, scale);
    else
        simt::launch(cross_entropy_kernel<floatX, false, true>, N, CROSS_ENTROPY_DIRECT_THREADS, 0, stream, logits,
                     losses, logits, targets, V, Vp, scale);
}

template <class floatX>
void check_cross_entropy_shard(const char* op, int N, VocabShard shard, int Vp) {
    ENSURE(N >= 1 && Vp >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, Vp);
    check_vocab_shard(op, shard);
    ENSURE(shard.count <= Vp, "%s: a shard of %d tokens in rows of %d", op, shard.count, Vp);
    ENSURE(Vp % Vec<floatX>::size == 0, "%s: rows of %d logits; must be a multiple of %d", op, Vp, Vec<floatX>::size);
}

template <class floatX>
void gpu::cross_entropy_shard(float* partials, const floatX* logits, const int* targets, int N, VocabShard shard,
                              int Vp, Stream stream) {
    check_cross_entropy_shard<floatX>("cross_entropy_shard", N, shard, Vp);
    simt::launch(cross_entropy_shard_kernel<floatX>, N, CROSS_ENTROPY_SHARD_THREADS, 0, stream, partials, logits,
                 targets, shard, Vp);
}

inline void gpu::cross_entropy_combine(float* losses, float* lse, const float* partials, const int* targets, int shards,
                                       int N, Stream stream) {
    ENSURE(shards >= 1 && N >= 1, "cross_entropy_combine of %d shards of %d rows: there must be at least one of each",
           shards, N);
    simt::launch(cross_entropy_combine_kernel, blocks_for(N, CROSS_ENTROPY_SHARD_THREADS), CROSS_ENTROPY_SHARD_THREADS,
                 0, stream, losses, lse, partials, targets, shards, N);
}

template <class floatX>
void gpu::cross_entropy_shard_backward(floatX* logits, const float* lse, const int* targets, int N, VocabShard shard,
                                       int Vp, float scale, Stream stream) {
    check_cross_entropy_shard<floatX>("cross_entropy_shard_backward", N, shard, Vp);
    simt::launch(cross_entropy_shard_backward_kernel<floatX>, N, CROSS_ENTROPY_SHARD_THREADS, 0, stream, logits, lse,
                 targets, shard, Vp, scale);
}

inline void gpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream stream) {
    simt::launch(accumulate_loss_kernel, 1, CROSS_ENTROPY_DIRECT_THREADS, 0, stream, total, losses, N, scale);
}
