// layernorm.cuh: LayerNorm over channels, forward, alone and fused with the residual sum before it.
//
// A warp owns a row and keeps it in registers, so memory is touched once: 2*N*C*sizeof(floatX) bytes, with the sum
// 4*N*C*sizeof(floatX), which bounds the time (201 and 403 MB for N = 65536, C = 768, bf16). Variance is two-pass over
// the registers: E[x^2] - E[x]^2 would cancel in float when |mean| >> std (test: mean far from zero).
#pragma once
#include "../ops.h"
#include "simt.h"

constexpr int LAYERNORM_WARPS = 8, LAYERNORM_MAX_VECS = 16;

// What a lane holds of a row of C channels: vectors of 16 bytes, a warp's width apart.
template <class floatX, int VECS>
struct RowOfWarp {
    using V = Vec<floatX>;
    static constexpr int stride = WARP_SIZE * V::size;
    V x[VECS];
    int first, C;

    __device__ RowOfWarp(int C) : first(int(threadIdx.x) % WARP_SIZE * V::size), C(C) {}

    // body(i, c): vector i begins at channel c.
    template <class Body>
    __device__ void for_each_vec(const Body& body) const {
        UNROLL
        for (int i = 0; i < VECS; i++)
            if (first + i * stride < C) body(i, first + i * stride);
    }

    // Writes (x - mean) * rstd * weight + bias, and the two statistics of row n.
    __device__ void normalize(floatX* out, float* mean, float* rstd, const floatX* weight, const floatX* bias, int n) {
        float sum = 0.0f;
        for_each_vec([&](int i, int) {
            for (int k = 0; k < V::size; k++) sum += float(x[i][k]);
        });
        const float m = warp_sum(sum) / float(C);
        float squares = 0.0f;
        for_each_vec([&](int i, int) {
            for (int k = 0; k < V::size; k++) squares += (float(x[i][k]) - m) * (float(x[i][k]) - m);
        });
        const float r = rsqrtf(warp_sum(squares) / float(C) + 1e-5f);
        for_each_vec([&](int i, int c) {
            const V w = load128(weight + c), b = load128(bias + c);
            V o;
            for (int k = 0; k < V::size; k++) o[k] = floatX((float(x[i][k]) - m) * r * float(w[k]) + float(b[k]));
            store128(out + int64_t(n) * C + c, o);  // plain store: the next product reads it
        });
        if (threadIdx.x % WARP_SIZE == 0) mean[n] = m, rstd[n] = r;
    }
};

__device__ inline int row_of_warp() { return int(blockIdx.x * LAYERNORM_WARPS + threadIdx.x / WARP_SIZE); }

// Grid: one warp per row. VECS: 16-byte vectors per lane, so C <= VECS * WARP_SIZE * Vec::size.
template <class floatX, int VECS>
__global__ void __launch_bounds__(LAYERNORM_WARPS* WARP_SIZE)
    layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                             const floatX* bias, int N, int C) {
    const int n = row_of_warp();
    if (n >= N) return;  // whole warps leave, so the shuffles still see all lanes
    RowOfWarp<floatX, VECS> row(C);
    row.for_each_vec([&](int i, int c) { row.x[i] = load128(inp + int64_t(n) * C + c); });
    row.normalize(out, mean, rstd, weight, bias, n);
}

template <class floatX, int VECS>
__global__ void __launch_bounds__(LAYERNORM_WARPS* WARP_SIZE)
    residual_layernorm_forward_kernel(floatX* sum, floatX* out, float* mean, float* rstd, const floatX* a,
                                      const floatX* b, const floatX* weight, const floatX* bias, int N, int C) {
    const int n = row_of_warp();
    if (n >= N) return;
    RowOfWarp<floatX, VECS> row(C);
    row.for_each_vec([&](int i, int c) {
        const int64_t at = int64_t(n) * C + c;
        const auto x = load128cs(a + at), y = load128cs(b + at);  // streaming: not read again in this pass
        for (int k = 0; k < x.size; k++) row.x[i][k] = floatX(float(x[k]) + float(y[k]));
        store128(sum + at, row.x[i]);
    });
    row.normalize(out, mean, rstd, weight, bias, n);
}

// run gets the vectors per lane that rows of C channels take, as a constant.
template <class floatX, class Run>
void with_row_vecs(const char* op, int N, int C, const Run& run) {
    constexpr int size = Vec<floatX>::size, per_warp = WARP_SIZE * size, most = LAYERNORM_MAX_VECS * per_warp;
    ENSURE(N >= 1 && C >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, C);
    ENSURE(C % size == 0 && C <= most, "%s: %d channels must be a multiple of %d, at most %d", op, C, size, most);
    with_constant<LAYERNORM_MAX_VECS>(ceil_div(C, per_warp), run);
}

template <class floatX>
void gpu::layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                            const floatX* bias, int N, int C, Stream stream) {
    with_row_vecs<floatX>("layernorm_forward", N, C, [&](auto vecs) {
        simt::launch(layernorm_forward_kernel<floatX, vecs>, ceil_div(N, LAYERNORM_WARPS), LAYERNORM_WARPS * WARP_SIZE,
                     0, stream, out, mean, rstd, inp, weight, bias, N, C);
    });
}

template <class floatX>
void gpu::residual_layernorm_forward(floatX* sum, floatX* out, float* mean, float* rstd, const floatX* a,
                                     const floatX* b, const floatX* weight, const floatX* bias, int N, int C,
                                     Stream stream) {
    with_row_vecs<floatX>("residual_layernorm_forward", N, C, [&](auto vecs) {
        simt::launch(residual_layernorm_forward_kernel<floatX, vecs>, ceil_div(N, LAYERNORM_WARPS),
                     LAYERNORM_WARPS * WARP_SIZE, 0, stream, sum, out, mean, rstd, a, b, weight, bias, N, C);
    });
}
