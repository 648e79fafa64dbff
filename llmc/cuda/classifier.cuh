// classifier.cuh: softmax and cross entropy over the vocabulary, alone and with the gradient in place; the sum of
// losses.
//
// A block owns a row. With the gradient it keeps the row in shared memory, so that logits are read once and written
// once: 2*N*Vp*sizeof(floatX) bytes, which bounds the time (13.2 GB for N = 65536, Vp = 50304, bf16). Such a row takes
// 100,608 bytes: two blocks to an SM of an H100, so that one computes while the other's row is on its way. A row that
// no shared memory holds (fp32, outside of the large chips) is read twice, the second time from the second-level cache:
// there one block to an SM has few enough rows under way. The last rows come first: the product that made the logits
// wrote them last, so the cache has some, and the product that reads the gradient begins with the first.
//
// The largest logit and the sum of exp(logit - largest) are made in one pass, the sum rescaled when a thread finds a
// larger one: no finite logit overflows, and a NaN is in the sum (tests: logits of 1e30 either way; NaN).
#pragma once
#include <cmath>

#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int CLASSIFIER_THREADS = 512;          // with the row in shared memory
constexpr int CLASSIFIER_DIRECT_THREADS = 1024;  // without
constexpr int CLASSIFIER_STATIC_BYTES = 512;     // of shared memory, at most, that the kernel declares beside the row

// The largest of some logits (from the lowest float on: minus infinity less that is minus infinity), and the sum of
// exp(logit - largest). __expf is right to 2^-21 and |logit - largest| * 2^-23, relatively; what is far below the
// largest does not matter.
struct SoftmaxSum {
    float largest = -0x1.fffffep127f, sum = 0.0f;

    template <class floatX>
    __device__ void add(const Vec<floatX>& x) {
        float top = largest;
        UNROLL
        for (int k = 0; k < x.size; k++) top = fmaxf(top, float(x[k]));
        if (top > largest) sum *= __expf(largest - top), largest = top;
        UNROLL
        for (int k = 0; k < x.size; k++) sum += __expf(float(x[k]) - largest);
    }

    // Of all threads of the block, which all get it.
    __device__ SoftmaxSum of_block() const {
        SoftmaxSum all;
        all.largest = block_max(largest);
        all.sum = block_sum(sum * __expf(largest - all.largest));
        return all;
    }
};

// Grid: a block for each row. IN_SHARED: the row is copied to dynamic shared memory, of V logits in whole vectors.
template <class floatX, bool IN_SHARED, bool GRADIENT>
__global__ void __launch_bounds__(IN_SHARED ? CLASSIFIER_THREADS : CLASSIFIER_DIRECT_THREADS)
    cross_entropy_kernel(floatX* gradient, float* losses, const floatX* logits, const int* targets, int V, int Vp,
                         float scale) {
    using Vector = Vec<floatX>;
    constexpr int size = Vector::size, threads = IN_SHARED ? CLASSIFIER_THREADS : CLASSIFIER_DIRECT_THREADS;
    constexpr int step = threads * size;
    const int n = int(gridDim.x - 1 - blockIdx.x), first = int(threadIdx.x) * size, target = targets[n];
    const floatX* row = logits + int64_t(n) * Vp;
    floatX* out = gradient + int64_t(n) * Vp;
    if (target < 0) {  // the whole block
        if (threadIdx.x == 0) losses[n] = 0.0f;
        if (GRADIENT)
            for (int v = first; v < Vp; v += step) store128(out + v, Vector{});
        return;
    }
    const float wanted = float(row[target]);  // before the gradient is there

    // A thread reads from shared memory what it copied itself.
    floatX* copy = nullptr;
    if constexpr (IN_SHARED) {
        copy = simt::dynamic_shared<floatX>();
        for (int v = first; v < V; v += step) cp_async_16(copy + v, row + v);
        cp_async_commit();
        cp_async_wait<0>();
    }
    const auto read = [&](int v) {
        Vector x = IN_SHARED ? load128(copy + v) : GRADIENT ? load128(row + v) : load128cs(row + v);
        if (v + size > V) {  // the last
            UNROLL
            for (int k = 0; k < size; k++)
                if (v + k >= V) x[k] = floatX(-INFINITY);
        }
        return x;
    };

    SoftmaxSum own;
    for (int v = first; v < V; v += step) own.add(read(v));
    const SoftmaxSum all = own.of_block();
    if (threadIdx.x == 0) losses[n] = logf(all.sum) + (all.largest - wanted);
    if (!GRADIENT) return;

    const float share = scale / all.sum;
    for (int v = first; v < Vp; v += step) {
        Vector d = {};
        if (v < V) {
            const Vector x = read(v);
            UNROLL
            for (int k = 0; k < size; k++) d[k] = floatX(__expf(float(x[k]) - all.largest) * share);
        }
        store128(out + v, d);  // plain store: the next product reads it
    }
    // Stored by the thread that stored the vector around it.
    if (first == target / size * size % step)
        out[target] = floatX((__expf(wanted - all.largest) / all.sum - 1.0f) * scale);
}

// total += scale * sum of losses. One block.
__global__ void __launch_bounds__(CLASSIFIER_DIRECT_THREADS)
    accumulate_loss_kernel(float* total, const float* losses, int N, float scale) {
    float sum = 0.0f;
    for (int n = int(threadIdx.x); n < N; n += CLASSIFIER_DIRECT_THREADS) sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += scale * sum;
}

// Dynamic shared memory that a block may have on this device.
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
void check_classifier_sizes(const char* op, int N, int V, int Vp) {
    ENSURE(N >= 1 && V >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, V);
    ENSURE(V <= Vp, "%s: a vocabulary of %d in rows of %d", op, V, Vp);
    ENSURE(Vp % Vec<floatX>::size == 0, "%s: rows of %d logits; must be a multiple of %d", op, Vp, Vec<floatX>::size);
}

template <class floatX>
void gpu::cross_entropy_forward(float* losses, const floatX* logits, const int* targets, int N, int V, int Vp,
                                Stream stream) {
    check_classifier_sizes<floatX>("cross_entropy_forward", N, V, Vp);
    simt::launch(cross_entropy_kernel<floatX, false, false>, N, CLASSIFIER_DIRECT_THREADS, 0, stream, nullptr, losses,
                 logits, targets, V, Vp, 0.0f);
}

template <class floatX>
void gpu::cross_entropy(floatX* logits, float* losses, const int* targets, int N, int V, int Vp, float scale,
                        Stream stream) {
    check_classifier_sizes<floatX>("cross_entropy", N, V, Vp);
    const int64_t row_bytes = int64_t(round_up(V, Vec<floatX>::size)) * int64_t(sizeof(floatX));
    if (row_bytes + CLASSIFIER_STATIC_BYTES <= shared_memory_limit())
        simt::launch(cross_entropy_kernel<floatX, true, true>, N, CLASSIFIER_THREADS, row_bytes, stream, logits, losses,
                     logits, targets, V, Vp, scale);
    else
        simt::launch(cross_entropy_kernel<floatX, false, true>, N, CLASSIFIER_DIRECT_THREADS, 0, stream, logits, losses,
                     logits, targets, V, Vp, scale);
}

inline void gpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream stream) {
    simt::launch(accumulate_loss_kernel, 1, CLASSIFIER_DIRECT_THREADS, 0, stream, total, losses, N, scale);
}
