// head.cuh: the head (ops.inc): the losses of the logits, and their gradients, around matmuls.
//
// On Hopper our matmul may write e itself (matmul_routes.h): then nothing passes over the logits, and without `keep`
// nothing stores them. Else they are cuBLASLt's.
//
// With `keep`, one kernel passes over cuBLASLt's logits. It reads each once and writes e over it: 2*N*Vp*sizeof(floatX)
// bytes, which bound the time (13.2 GB for N = 65536, Vp = 50304, bf16). A block owns a row. Blocks take the last rows
// first: the matmul that computed the logits wrote them last, so some are still in the L2 cache, and the matmuls that
// read e begin with the first rows. The factors of a row, f and -f S, are applied to tensors of C columns, never to e.
//
// Without `keep`, the matmul writes the logits in float, and the kernel only adds up. So the losses are as exact as
// float, whatever floatX is; the memory holds the logits of as many rows at a time as fit.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/embedding.cuh"
#include "cuda/matmul.h"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int HEAD_WARPS = 8;          // where a warp owns a row
constexpr int HEAD_THREADS = 512;      // where a block owns a row of logits
constexpr int HEAD_LOADS = 2;          // loads in flight per thread there
constexpr int HEAD_ELEMENTWISE = 256;  // threads of a block where each owns one number of a row
constexpr int LOSS_SUM_THREADS = 1024;

// target_logits (N) = the products of inp[n] and the target's row, or 0. Grid: blocks of 8 warps, a warp per row.
template <class floatX>
__global__ void __launch_bounds__(HEAD_WARPS* WARP_SIZE)
    head_targets_kernel(float* target_logits, HeadInput<floatX> head) {
    constexpr int size = Vec<floatX>::size;
    const int lane = threadIdx.x % WARP_SIZE, n = int(blockIdx.x * HEAD_WARPS + threadIdx.x / WARP_SIZE);
    if (n >= head.N) return;
    const int column = head.shard.row(head.targets[n]);
    float sum = 0.0f;
    for (int c = lane * size; column >= 0 && c < head.C; c += WARP_SIZE * size) {
        const auto x = widened(load128(head.inp + int64_t(n) * head.C + c));
        const auto w = widened(load128(head.weight.rows + int64_t(column) * head.C + c));
        UNROLL
        for (int k = 0; k < size; k++) sum += x[k] * w[k];
    }
    sum = warp_sum(sum);
    if (lane == 0) target_logits[n] = sum;
}

// sums (N) = S of logits (N, Vp). With KEEP, e replaces the logits; rows of ignored targets are zeros.
// Grid: N blocks, one per row. A thread owns every 512th vector of 16 bytes of the row.
template <class floatX, bool KEEP>
__global__ void __launch_bounds__(HEAD_THREADS)
    head_exponentials_kernel(float* sums, floatX* logits, const float* target_logits, const int* targets,
                             VocabShard shard, int Vp) {
    constexpr int size = Vec<floatX>::size, step = HEAD_THREADS * size;
    const int n = int(gridDim.x - 1 - blockIdx.x), target = targets[n], column = shard.row(target);
    const int end = target < 0 ? 0 : shard.count;  // from here on e is 0
    const float target_logit = target_logits[n];
    floatX* row = logits + int64_t(n) * Vp;
    float sum = 0.0f;
    const auto exponentials = [&](Floats<floatX> x, int v) {
        UNROLL
        for (int k = 0; k < size; k++) {
            const float exponent = x[k] - target_logit;
            x[k] = exp_fast(exponent > HEAD_LIMIT ? HEAD_LIMIT : exponent);  // NaN stays NaN, unlike with fminf
        }
        if (v + size > end || unsigned(column - v) < unsigned(size)) {
            UNROLL
            for (int k = 0; k < size; k++)
                if (v + k >= end || v + k == column) x[k] = 0.0f;
        }
        UNROLL
        for (int k = 0; k < size; k++) sum += x[k];
        return x;
    };
    UNROLL_BY(1)
    for (int v = int(threadIdx.x) * size; v < (KEEP ? Vp : end); v += HEAD_LOADS * step) {
        Vec<floatX> x[HEAD_LOADS] = {};
        UNROLL
        for (int i = 0; i < HEAD_LOADS; i++)
            if (v + i * step < end) x[i] = KEEP ? load128(row + v + i * step) : load128cs(row + v + i * step);
        UNROLL
        for (int i = 0; i < HEAD_LOADS; i++) {
            const auto e = exponentials(widened(x[i]), v + i * step);
            // Not a streaming store: the next matmul reads e.
            if (KEEP && v + i * step < Vp) store128(row + v + i * step, rounded(e));
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[n] = sum;
}

// losses (N) = log(1 + sums); 0 where the target is ignored. Grid: blocks of 256 threads, a thread per row.
__global__ void __launch_bounds__(HEAD_ELEMENTWISE)
    head_losses_kernel(float* losses, const float* sums, const int* targets, int N) {
    const int n = int(blockIdx.x) * HEAD_ELEMENTWISE + int(threadIdx.x);
    if (n < N) losses[n] = targets[n] < 0 ? 0.0f : log1pf(sums[n]);
}

// out (N) = the sum of parts (shards, N), in their order. Grid: as head_losses_kernel.
__global__ void __launch_bounds__(HEAD_ELEMENTWISE)
    sum_of_shards_kernel(float* out, const float* parts, int shards, int N) {
    const int n = int(blockIdx.x) * HEAD_ELEMENTWISE + int(threadIdx.x);
    if (n >= N) return;
    float sum = 0.0f;
    for (int i = 0; i < shards; i++) sum += parts[int64_t(i) * N + n];
    out[n] = sum;
}

// Reads as many floats as a Vec<floatX> has elements.
template <class floatX>
__device__ Floats<floatX> load_floats(const float* p) {
    Floats<floatX> x;
    UNROLL
    for (int i = 0; i < x.size; i += Vec<float>::size) {
        const Vec<float> v = load128(p + i);
        UNROLL
        for (int k = 0; k < v.size; k++) x[i + k] = v[k];
    }
    return x;
}

// Applies the factors of rows, with which backward makes gradients from e: f = scale / (1 + S), and c = -f S at the
// target. product (N, C) = e W, in float, because the parts of dinp cancel where all rows of W have something in
// common: dinp (N, C) = f product + c W[target], if the target is in this shard. dinp may be product. scaled (N, C) = f
// inp; factors (N) = c. With S of 1e30 f itself may be too small for float. Grid: blocks of 8 warps, a warp per row.
template <class floatX>
__global__ void __launch_bounds__(HEAD_WARPS* WARP_SIZE)
    head_factors_kernel(floatX* dinp, floatX* scaled, float* factors, const float* product, const float* sums,
                        HeadInput<floatX> head, float scale) {
    constexpr int size = Vec<floatX>::size;
    const int lane = threadIdx.x % WARP_SIZE, n = int(blockIdx.x * HEAD_WARPS + threadIdx.x / WARP_SIZE);
    if (n >= head.N) return;
    const int column = head.shard.row(head.targets[n]);
    const float inverse = 1.0f / (1.0f + sums[n]), at_target = -sums[n] * inverse;
    for (int c = lane * size; c < head.C; c += WARP_SIZE * size) {
        const int64_t at = int64_t(n) * head.C + c;
        Floats<floatX> x = widened(load128(head.inp + at)), dx = load_floats<floatX>(product + at), w = {};
        if (column >= 0) w = widened(load128(head.weight.rows + int64_t(column) * head.C + c));
        UNROLL
        for (int k = 0; k < size; k++) {
            dx[k] = (dx[k] * inverse + at_target * w[k]) * scale;
            x[k] = x[k] * inverse * scale;
        }
        store128(dinp + at, rounded(dx));
        store128(scaled + at, rounded(x));  // not a streaming store: the next matmul reads it
    }
    if (lane == 0) factors[n] = at_target * scale;
}

// total (1) += scale * sum of losses (N). Grid: one block.
__global__ void __launch_bounds__(LOSS_SUM_THREADS)
    accumulate_loss_kernel(float* total, const float* losses, int N, float scale) {
    float sum = 0.0f;
    for (int n = int(threadIdx.x); n < N; n += LOSS_SUM_THREADS) sum += losses[n];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total += scale * sum;
}

// ---- Launchers

template <class floatX>
void check_head_sizes(const char* op, const HeadInput<floatX>& head) {
    constexpr int size = Vec<floatX>::size;
    check_head(op, head);
    ENSURE(head.C % size == 0 && head.Vp % size == 0, "%s: rows of %d channels and %d logits; must be multiples of %d",
           op, head.C, head.Vp, size);
}

namespace gpu {

// Layout of head_backward's scratch memory: what cuBLASLt and the sums by token use, which it calls, then its own (the
// operands of head_factors_kernel). With base = nullptr it only computes the size, `bytes`.
template <class floatX>
struct HeadScratch {
    EmbeddingScratch sums;
    float* product;  // without memory in fp32, where dinp takes its place
    floatX* scaled;
    float* factors;
    int64_t bytes;

    HeadScratch(void* base, int N, int C) : sums(base, N, C) {
        Arena memory{base, std::max(cublaslt_scratch_bytes(C), sums.bytes)};
        const int64_t count = int64_t(N) * C;
        product = memory.take<float>(sizeof(floatX) == sizeof(float) ? 0 : count);
        scaled = memory.take<floatX>(count);
        factors = memory.take<float>(N);
        bytes = memory.used;
    }
};

}  // namespace gpu

// Rows of logits in floatX that take the memory of one in float.
template <class floatX>
constexpr int ROWS_OF_FLOATS = int(sizeof(float) / sizeof(floatX));

template <class floatX>
int64_t gpu::head_bytes(int N, int, int Vp, bool) {
    return int64_t(round_up(N, ROWS_OF_FLOATS<floatX>)) * Vp * int64_t(sizeof(floatX));
}

template <class floatX>
void gpu::head_targets(float* target_logits, const HeadInput<floatX>& head, Stream stream) {
    check_head_sizes("head_targets", head);
    simt::launch(head_targets_kernel<floatX>, ceil_div(head.N, HEAD_WARPS), HEAD_WARPS * WARP_SIZE, 0, stream,
                 target_logits, head);
}

template <class T>
void gpu::head_exponentials(T* logits, const HeadRows& head, int rows, int Vp, Stream stream) {
    auto kernel = head_exponentials_kernel<T, true>;
    if constexpr (sizeof(T) == sizeof(float))
        if (!head.keep) kernel = head_exponentials_kernel<T, false>;
    INVARIANT(head.keep || sizeof(T) == sizeof(float), "sums of exponentials of %d rows of rounded logits", rows);
    simt::launch(kernel, rows, HEAD_THREADS, 0, stream, head.sums, logits, head.target_logits, head.targets, head.shard,
                 Vp);
}

template <class floatX>
void gpu::head_forward(float* sums, void* exponentials, const float* target_logits, const HeadInput<floatX>& head,
                       bool keep, Stream stream) {
    check_head_sizes("head_forward", head);
    MatmulShape shape = {Kind::forward, Epilogue::exponentials, operands_of<floatX>, head.Vp, head.N, head.C};
    shape.to_float = !keep && !is_by_wgmma(shape);
    const int at_once = shape.to_float ? ceil_div(head.N, ROWS_OF_FLOATS<floatX>) : head.N;
    for (int n = 0; n < head.N; n += at_once) {
        shape.n = std::min(at_once, head.N - n);
        matmul<floatX>({.shape = shape,
                        .a = head.weight.rows,
                        .b = head.inp + int64_t(n) * head.C,
                        .out = exponentials,
                        .head = {sums + n, target_logits + n, head.targets + n, head.shard, keep}},
                       stream);
    }
}

inline void gpu::head_losses(float* losses, const float* sums, const int* targets, int N, Stream stream) {
    INVARIANT(N >= 1, "head_losses of %d rows: there must be at least one", N);
    simt::launch(head_losses_kernel, blocks_for(N, HEAD_ELEMENTWISE), HEAD_ELEMENTWISE, 0, stream, losses, sums,
                 targets, N);
}

template <class floatX>
void gpu::head_backward(floatX* dinp, float* dweight, void* exponentials, const float* sums,
                        const HeadInput<floatX>& head, float scale, bool accumulate, Stream stream) {
    check_head_sizes("head_backward", head);
    check_sort_keys("head_backward", head.shard);
    const int N = head.N, C = head.C, Vp = head.Vp;
    const HeadScratch<floatX> scratch(device_scratch(HeadScratch<floatX>(nullptr, N, C).bytes), N, C);
    float* product = scratch.product;
    if constexpr (std::is_same_v<floatX, float>) product = dinp;
    MatmulShape shape = {Kind::input_gradient, Epilogue::nothing, operands_of<floatX>, C, N, Vp};
    shape.to_float = true;
    cublaslt_matmul<floatX>({.shape = shape, .a = head.weight.rows, .b = exponentials, .out = product}, stream);
    simt::launch(head_factors_kernel<floatX>, ceil_div(N, HEAD_WARPS), HEAD_WARPS * WARP_SIZE, 0, stream, dinp,
                 scratch.scaled, scratch.factors, product, sums, head, scale);
    cublaslt_matmul<floatX>({.shape = {Kind::weight_gradient, Epilogue::nothing, operands_of<floatX>, C, Vp, N},
                             .a = scratch.scaled,
                             .b = exponentials,
                             .out = dweight,
                             .accumulate = accumulate},
                            stream);
    add_by_token(dweight, head.inp, scratch.factors, head.targets, N, C, head.shard, scratch.sums, stream);
}

inline void gpu::sum_of_shards(float* out, const float* parts, int shards, int N, Stream stream) {
    INVARIANT(shards >= 1 && N >= 1, "sum_of_shards of %d shards of %d rows: there must be at least one of each",
              shards, N);
    simt::launch(sum_of_shards_kernel, blocks_for(N, HEAD_ELEMENTWISE), HEAD_ELEMENTWISE, 0, stream, out, parts, shards,
                 N);
}

inline void gpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream stream) {
    simt::launch(accumulate_loss_kernel, 1, LOSS_SUM_THREADS, 0, stream, total, losses, N, scale);
}
