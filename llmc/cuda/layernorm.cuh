// layernorm.cuh: LayerNorm over channels. Forward, alone and fused with the residual addition before it. Backward,
// which also adds the gradient of the residual stream and computes three parameter gradients of size C.
//
// Forward: a warp owns a row and keeps it in registers, so that each element is read and written once:
// 2*N*C*sizeof(floatX) bytes, or 4*N*C*sizeof(floatX) with the residual addition, which bounds the time (201 and 403 MB
// for N = 65536, C = 768, bf16). The variance takes a second pass over the registers: E[x^2] - E[x]^2 would cancel in
// float when |mean| >> std (test: mean far from zero).
//
// Backward: a row belongs to a team of warps, with one 16-byte vector per lane. A lane has the same channels in all
// rows of its team, so it keeps the sums of the three gradients over these rows in registers: 24 floats in bf16, at any
// C. cp.async loads the rows into shared memory one row ahead (double buffering), because the registers are taken by
// the sums; a lane reads only what it copied itself. Memory traffic: 4*N*C*sizeof(floatX) bytes, and 12*C bytes per
// block for the second stage (403 and 2.4 MB). The block and team of a row depend only on N and C, and no atomics are
// used, so the same inputs give the same bits.
#pragma once
#include "base/device.h"
#include "cuda/bias.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int LAYERNORM_WARPS = 8, LAYERNORM_MAX_VECS = 16;

// A warp's row of C channels in registers: lane i holds the vectors i, i + 32, ... of 16 bytes.
template <class floatX, int VECS>
struct RowOfWarp {
    using V = Vec<floatX>;
    static constexpr int stride = WARP_SIZE * V::size;
    V x[VECS];
    int first, C;
    float inv_C;  // 1 / C; a division among many live registers would make some spill

    __device__ RowOfWarp(int C) : first(int(threadIdx.x) % WARP_SIZE * V::size), C(C), inv_C(1.0f / float(C)) {}

    // Calls body(i, c) for each of the lane's vectors; x[i] begins at channel c.
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
        const float m = warp_sum(sum) * inv_C;
        float squares = 0.0f;
        for_each_vec([&](int i, int) {
            for (int k = 0; k < V::size; k++) squares += (float(x[i][k]) - m) * (float(x[i][k]) - m);
        });
        const float r = rsqrtf(warp_sum(squares) * inv_C + 1e-5f);
        for_each_vec([&](int i, int c) {
            const V w = load128(weight + c), b = load128(bias + c);
            V o;
            for (int k = 0; k < V::size; k++) o[k] = floatX((float(x[i][k]) - m) * r * float(w[k]) + float(b[k]));
            store128(out + int64_t(n) * C + c, o);  // not a streaming store: the next matmul reads it
        });
        if (threadIdx.x % WARP_SIZE == 0) {
            mean[n] = m;
            rstd[n] = r;
        }
    }
};

__device__ inline int row_of_warp() { return int(blockIdx.x * LAYERNORM_WARPS + threadIdx.x / WARP_SIZE); }

// out (N, C), mean, rstd (N) from inp (N, C), weight, bias (C).
// Grid: blocks of 8 warps, one warp per row. VECS: 16-byte vectors per lane, so C <= VECS * WARP_SIZE * Vec::size.
template <class floatX, int VECS>
__global__ void __launch_bounds__(LAYERNORM_WARPS* WARP_SIZE)
    layernorm_forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                             const floatX* bias, int N, int C) {
    const int n = row_of_warp();
    if (n >= N) return;  // the same for all lanes of a warp, so the shuffles have all lanes
    RowOfWarp<floatX, VECS> row(C);
    row.for_each_vec([&](int i, int c) { row.x[i] = load128(inp + int64_t(n) * C + c); });
    row.normalize(out, mean, rstd, weight, bias, n);
}

template <class floatX>
void check_layernorm_sizes(const char* op, int N, int C) {
    constexpr int size = Vec<floatX>::size, max_channels = LAYERNORM_MAX_VECS * WARP_SIZE * size;
    ENSURE(N >= 1 && C >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, C);
    ENSURE(C % size == 0 && C <= max_channels, "%s: %d channels must be a multiple of %d, at most %d", op, C, size,
           max_channels);
}

// Calls run(vecs), where vecs is the number of vectors per lane for rows of C channels, as a compile-time constant.
template <class floatX, class Run>
void with_row_vecs(const char* op, int N, int C, const Run& run) {
    check_layernorm_sizes<floatX>(op, N, C);
    with_constant<LAYERNORM_MAX_VECS>(ceil_div(C, WARP_SIZE * Vec<floatX>::size), run);
}

template <class floatX>
void gpu::layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                            const floatX* bias, int N, int C, Stream stream) {
    with_row_vecs<floatX>("layernorm_forward", N, C, [&](auto vecs) {
        simt::launch(layernorm_forward_kernel<floatX, vecs>, ceil_div(N, LAYERNORM_WARPS), LAYERNORM_WARPS * WARP_SIZE,
                     0, stream, out, mean, rstd, inp, weight, bias, N, C);
    });
}

// ---- Backward

// Warps per block. With 14, two blocks fit into the registers of an SM, and a block has two teams for rows of 1600
// channels. Only rows that need more than 14 warps use blocks of 16.
constexpr int LAYERNORM_BACKWARD_WARPS = 14, LAYERNORM_BACKWARD_WIDE = 16;
// Backward has several warps per row and one vector per lane; forward has one warp per row and several vectors.
static_assert(LAYERNORM_BACKWARD_WIDE == LAYERNORM_MAX_VECS);

// A block is divided into teams of warps; each team owns a row at a time.
struct LayerNormTeams {
    int warps, teams;  // warps per team, teams per block
};

template <class floatX>
LayerNormTeams layernorm_teams(int C) {
    const int warps = ceil_div(C, WARP_SIZE * Vec<floatX>::size);
    return {warps, warps > LAYERNORM_BACKWARD_WARPS ? 1 : LAYERNORM_BACKWARD_WARPS / warps};
}

// A lane's vectors in shared memory: those of dout, inp and dresidual for two stages (rows), and that of weight.
template <class floatX>
struct LayerNormBuffers {
    using V = Vec<floatX>;
    static constexpr int arrays = 3, stages = 2, count = arrays * stages + 1;
    V* lane_vectors;

    __device__ LayerNormBuffers() : lane_vectors(simt::dynamic_shared<V>() + threadIdx.x) {}
    // Zeros, for a lane past C (whole) or for a null dresidual: what no copy will fill. An asynchronous copy to memory
    // that was stored to before would need a fence.
    __device__ void clear(bool whole) {
        for (int i = 0; i < count; i++)
            if (whole || i % arrays == 2) lane_vectors[i * int(blockDim.x)] = V{};
    }
    __device__ V& at(int stage, int array) { return lane_vectors[(stage * arrays + array) * int(blockDim.x)]; }
    __device__ V& weight() { return lane_vectors[arrays * stages * int(blockDim.x)]; }
    static int64_t bytes(int threads) { return int64_t(count) * threads * int64_t(sizeof(V)); }
};

// A lane's gradient sums over rows, for its channels.
template <class floatX>
struct LayerNormSums {
    static constexpr int size = Vec<floatX>::size;
    float dweight[size], dbias[size], dbranch_bias[size];

    // Writes (first) or adds the sums to the lane's channels of out (3, width).
    __device__ void add_to(float* out, int width, bool first) const {
        UNROLL
        for (int k = 0; k < size; k++) {
            out[k] = dweight[k] + (first ? 0.0f : out[k]);
            out[width + k] = dbias[k] + (first ? 0.0f : out[width + k]);
            out[2 * width + k] = dbranch_bias[k] + (first ? 0.0f : out[2 * width + k]);
        }
    }
};

// dinp (N, C) from dout, inp, dresidual (N, C; dresidual may be null), weight (C), mean and rstd (N). partial (blocks,
// groups, C) receives each block's sums for dweight, dbias and, with 3 groups, dbranch_bias; sum_rows adds them.
//
// Grid: LayerNormBackward::blocks blocks of block.teams * block.warps warps. Team t of block b owns row b * teams + t
// and every (gridDim.x * teams)-th row after it. Dynamic shared memory holds the lanes' buffers, and at the end the
// sums of the block, which need no more space.
template <class floatX, int MAX_WARPS>
__global__ void __launch_bounds__(MAX_WARPS* WARP_SIZE, MAX_WARPS > LAYERNORM_BACKWARD_WARPS ? 1 : 2)
    layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const floatX* weight,
                              const float* mean, const float* rstd, const floatX* dresidual, int N, int C,
                              LayerNormTeams block, int groups) {
    using V = Vec<floatX>;
    SHARED(row_sums, float2[2][MAX_WARPS]);  // two stages, so that one barrier per row is enough
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, team = warp / block.warps;
    const int c = (warp % block.warps * WARP_SIZE + lane) * V::size, step = int(gridDim.x) * block.teams;
    LayerNormBuffers<floatX> buffers;
    LayerNormSums<floatX> sums = {};
    if (c >= C || !dresidual) buffers.clear(c >= C);
    if (c < C) buffers.weight() = load128(weight + c);

    const auto fetch = [&](int stage, int n) {
        if (c < C && n < N) {
            const int64_t at = int64_t(n) * C + c;
            cp_async_16(&buffers.at(stage, 0), dout + at);
            cp_async_16(&buffers.at(stage, 1), inp + at);
            if (dresidual) cp_async_16(&buffers.at(stage, 2), dresidual + at);
        }
        cp_async_commit();
    };
    int n = int(blockIdx.x) * block.teams + team, stage = 0;
    fetch(0, n);
    fetch(1, n + step);
    float next_mean = n < N ? mean[n] : 0.0f, next_rstd = n < N ? rstd[n] : 0.0f;

    // Every team makes as many iterations as the first one, because of the barrier. A team past N adds nothing.
    for (; n - team < N; n += step, stage ^= 1) {
        const float m = next_mean, r = next_rstd;
        if (n + step < N) {
            next_mean = mean[n + step];
            next_rstd = rstd[n + step];
        }
        cp_async_wait<1>();

        float total = 0.0f, total_norm = 0.0f;
        if (n < N) {
            const V dy = buffers.at(stage, 0), x = buffers.at(stage, 1), w = buffers.weight();
            UNROLL
            for (int k = 0; k < V::size; k++) {
                const float dnorm = float(dy[k]) * float(w[k]);
                total += dnorm;
                total_norm += dnorm * ((float(x[k]) - m) * r);
            }
        }
        total = warp_sum(total);
        total_norm = warp_sum(total_norm);
        if (lane == 0) row_sums[stage][warp] = {total, total_norm};
        __syncthreads();

        if (n < N) {
            total = 0.0f;
            total_norm = 0.0f;
            for (int i = team * block.warps; i < (team + 1) * block.warps; i++) {
                total += row_sums[stage][i].x;
                total_norm += row_sums[stage][i].y;
            }
            const float average = total / float(C), average_norm = total_norm / float(C);
            const V dy = buffers.at(stage, 0), x = buffers.at(stage, 1), w = buffers.weight();
            const V dres = buffers.at(stage, 2);
            V d;
            UNROLL
            for (int k = 0; k < V::size; k++) {
                const float norm = (float(x[k]) - m) * r, dnorm = float(dy[k]) * float(w[k]);
                d[k] = floatX(float(dres[k]) + r * (dnorm - average - norm * average_norm));
                sums.dweight[k] += float(dy[k]) * norm;
                sums.dbias[k] += float(dy[k]);
                sums.dbranch_bias[k] += float(d[k]);
            }
            if (c < C) store128(dinp + int64_t(n) * C + c, d);  // not a streaming store: the next matmul reads it
        }
        fetch(stage, n + 2 * step);
    }

    // The teams add their sums one after the other; then the block writes them.
    cp_async_wait<0>();
    __syncthreads();  // the buffers' memory is reused for the sums
    float* block_sums = simt::dynamic_shared<float>();
    const int width = block.warps * WARP_SIZE * V::size;
    for (int t = 0; t < block.teams; t++) {
        if (t == team) sums.add_to(block_sums + c, width, t == 0);
        __syncthreads();
    }
    for (int g = 0; g < groups; g++)
        for (int i = int(threadIdx.x); i < C; i += int(blockDim.x))
            partial[(int64_t(blockIdx.x) * groups + g) * C + i] = block_sums[g * width + i];
}

// The launch of layernorm_backward_kernel: as many blocks as the GPU runs at once, so that no block waits for another
// one. The sums are therefore the same in each run on one kind of GPU, and may differ in rounding on another kind.
template <class floatX>
struct LayerNormBackward {
    LayerNormTeams block;
    int threads, blocks;
    decltype(&layernorm_backward_kernel<floatX, LAYERNORM_BACKWARD_WARPS>) kernel;

    LayerNormBackward(int N, int C) : block(layernorm_teams<floatX>(C)) {
        threads = block.teams * block.warps * WARP_SIZE;
        kernel = block.warps > LAYERNORM_BACKWARD_WARPS ? layernorm_backward_kernel<floatX, LAYERNORM_BACKWARD_WIDE>
                                                        : layernorm_backward_kernel<floatX, LAYERNORM_BACKWARD_WARPS>;
        const int resident = simt::resident_blocks(kernel, threads, shared_bytes()), needed = ceil_div(N, block.teams);
        blocks = needed < resident ? needed : resident;
    }
    int64_t shared_bytes() const { return LayerNormBuffers<floatX>::bytes(threads); }
};

namespace gpu {

// Bytes of device_scratch that layernorm_backward uses.
template <class floatX>
int64_t layernorm_scratch_bytes(int N, int C) {
    return int64_t(LayerNormBackward<floatX>(N, C).blocks) * 3 * C * int64_t(sizeof(float));
}

}  // namespace gpu

template <class floatX>
void gpu::layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                             const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                             const floatX* dresidual, int N, int C, Stream stream) {
    check_layernorm_sizes<floatX>("layernorm_backward", N, C);
    const LayerNormBackward<floatX> launch(N, C);
    const int groups = dbranch_bias ? 3 : 2;
    float* partial = static_cast<float*>(device_scratch(layernorm_scratch_bytes<floatX>(N, C)));
    simt::launch(launch.kernel, launch.blocks, launch.threads, launch.shared_bytes(), stream, dinp, partial, dout, inp,
                 weight, mean, rstd, dresidual, N, C, launch.block, groups);
    sum_rows({{dweight, dbias, dbranch_bias}}, partial, launch.blocks, groups, C, true, stream);
}
