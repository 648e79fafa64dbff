// residual.cuh: adds a matmul's output, its bias and the residual stream, where the sums of the matmul are divided over
// the ranks.
//
// A thread owns 16 bytes. It moves 3*N*C*sizeof(floatX) bytes, which bounds the time (302 MB for N = 65536, C = 768,
// bf16); the C biases come from the nearest caches.
#pragma once
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int RESIDUAL_THREADS = 256;

// out (N, C) = inp (N, C) + bias (C) + residual (N, C); out may be inp. count is N * C.
// Grid: blocks of 256 threads, a thread per 16 bytes.
template <class floatX>
__global__ void __launch_bounds__(RESIDUAL_THREADS)
    add_residual_kernel(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int64_t count,
                        int C) {
    using V = Vec<floatX>;
    const int64_t i = (int64_t(blockIdx.x) * RESIDUAL_THREADS + threadIdx.x) * V::size;
    if (i >= count) return;
    const V x = load128cs(inp + i), r = load128cs(residual + i), b = load128(bias + i % C);
    V sum;
    UNROLL
    for (int k = 0; k < V::size; k++) sum[k] = floatX(float(x[k]) + float(b[k]) + float(r[k]));
    store128(out + i, sum);  // not a streaming store: LayerNorm reads it next
}

template <class floatX>
void gpu::add_residual(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int N, int C,
                       Stream stream) {
    ENSURE(N >= 1 && C >= 1, "add_residual of %d rows of %d: there must be at least one of each", N, C);
    ENSURE(C % Vec<floatX>::size == 0, "add_residual: %d channels must be a multiple of %d", C, Vec<floatX>::size);
    const int64_t count = int64_t(N) * C;
    simt::launch(add_residual_kernel<floatX>, blocks_for(count, RESIDUAL_THREADS * Vec<floatX>::size), RESIDUAL_THREADS,
                 0, stream, out, inp, residual, bias, count, C);
}
