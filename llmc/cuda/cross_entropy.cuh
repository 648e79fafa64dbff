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
constexpr int CROSS_ENTROPY_DIRECT_THREADS = 1024;  // block size without
constexpr int CROSS_ENTROPY_STATIC_BYTES = 512;     // upper bound of the kernel's static shared memory
constexpr int CROSS_ENTROPY_PARTS = 4;              // of a row, copied to shared memory one after the other

// Running maximum of logits, and sum of exp(logit - max). The maximum starts at the lowest finite float, because
// -infinity minus it is -infinity, where -infinity minus -infinity would be NaN. The relative error of exp_fast grows
// only for logits far below the maximum, which contribute little.
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
    floatX* out = gradient + int64_t(n) * Vp;
    if (target < 0) {  // the same for the whole block
        if (threadIdx.x == 0) losses[n] = 0.0f;
        if (GRADIENT)
            for (int v = own.first; v < Vp; v += own.step) store128(out + v, Vec<floatX>{});
        return;
    }
    const float target_logit = float(row[target]);  // before the gradient overwrites it

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
    if constexpr (IN_SHARED) {
        const int part = ceil_div(V, own.step * CROSS_ENTROPY_PARTS) * own.step;
        const auto end_of = [&](int i, int last) { return last - i * part < part ? last : (i + 1) * part; };
        UNROLL_BY(1)
        for (int i = 0; i < CROSS_ENTROPY_PARTS; i++) {
            UNROLL_BY(4)
            for (int v = i * part + own.first; v < end_of(i, V); v += own.step) cp_async_16(shared_row + v, row + v);
            cp_async_commit();
        }
        with_each_constant<CROSS_ENTROPY_PARTS>([&](auto i) {
            cp_async_wait<CROSS_ENTROPY_PARTS - 1 - i>();
            add(i * part, end_of(i, own.whole));
        });
    } else {
        add(0, own.whole);
    }
    if (own.owns_partial()) own_sum.add(own.cut(read(own.whole)));
    const SoftmaxSum all = own_sum.of_block();
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
    // By the thread that stored the vector that contains it, so that the order is certain.
    if (own.owns(target)) out[target] = floatX((exp_fast(target_logit - all.row_max) / all.sum - 1.0f) * scale);
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

inline void gpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream stream) {
    simt::launch(accumulate_loss_kernel, 1, CROSS_ENTROPY_DIRECT_THREADS, 0, stream, total, losses, N, scale);
}
