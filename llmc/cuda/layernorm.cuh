// layernorm.cuh: LayerNorm over channels: forward, alone and fused with the residual sum before it; and backward, which
// also adds the gradient that went past it and makes the gradients of three vectors of C.
//
// Forward: a warp owns a row and keeps it in registers, so memory is touched once: 2*N*C*sizeof(floatX) bytes, with the
// sum 4*N*C*sizeof(floatX), which bounds the time (201 and 403 MB for N = 65536, C = 768, bf16). Variance is two-pass
// over the registers: E[x^2] - E[x]^2 would cancel in float when |mean| >> std (test: mean far from zero).
//
// Backward: as many warps as a row takes of 16-byte vectors own it together, one vector per lane. So a lane has the
// same channels in every row that it sees, and sums the three gradients over them in registers at any width: 24 floats
// in bf16. Rows come through shared memory, one turn ahead, because registers are for the sums; a lane reads there what
// it copied itself. Bytes: 4*N*C*sizeof(floatX), and 12*C per block for the second stage (403 and 2.4 MB). Which block
// and team has a row depends on N and C alone, and there are no atomics: the same inputs give the same bits.
#pragma once
#include "base/device.h"
#include "cuda/bias.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int LAYERNORM_WARPS = 8, LAYERNORM_MAX_VECS = 16;

// What a lane holds of a row of C channels: vectors of 16 bytes, a warp's width apart.
template <class floatX, int VECS>
struct RowOfWarp {
    using V = Vec<floatX>;
    static constexpr int stride = WARP_SIZE * V::size;
    V x[VECS];
    int first, C;
    float share;  // of one channel in an average; a division among many live registers would spill some

    __device__ RowOfWarp(int C) : first(int(threadIdx.x) % WARP_SIZE * V::size), C(C), share(1.0f / float(C)) {}

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
        const float m = warp_sum(sum) * share;
        float squares = 0.0f;
        for_each_vec([&](int i, int) {
            for (int k = 0; k < V::size; k++) squares += (float(x[i][k]) - m) * (float(x[i][k]) - m);
        });
        const float r = rsqrtf(warp_sum(squares) * share + 1e-5f);
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

template <class floatX>
void check_layernorm_sizes(const char* op, int N, int C) {
    constexpr int size = Vec<floatX>::size, most = LAYERNORM_MAX_VECS * WARP_SIZE * size;
    ENSURE(N >= 1 && C >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, C);
    ENSURE(C % size == 0 && C <= most, "%s: %d channels must be a multiple of %d, at most %d", op, C, size, most);
}

// run gets the vectors per lane that rows of C channels take, as a constant.
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

template <class floatX>
void gpu::residual_layernorm_forward(floatX* sum, floatX* out, float* mean, float* rstd, const floatX* a,
                                     const floatX* b, const floatX* weight, const floatX* bias, int N, int C,
                                     Stream stream) {
    with_row_vecs<floatX>("residual_layernorm_forward", N, C, [&](auto vecs) {
        simt::launch(residual_layernorm_forward_kernel<floatX, vecs>, ceil_div(N, LAYERNORM_WARPS),
                     LAYERNORM_WARPS * WARP_SIZE, 0, stream, sum, out, mean, rstd, a, b, weight, bias, N, C);
    });
}

// ---- backward

constexpr int LAYERNORM_BACKWARD_BLOCKS = 264;  // two for each SM of an H100
// Warps of a block: 14 are the most that two blocks of an SM have registers for, and what a row of 1600 channels takes
// twice; only rows of more than 14 warps have blocks of 16.
constexpr int LAYERNORM_BACKWARD_WARPS = 14, LAYERNORM_BACKWARD_WIDE = 16;
static_assert(LAYERNORM_BACKWARD_WIDE == LAYERNORM_MAX_VECS);  // one vector per lane here, one warp per row there

// The warps of a block work in teams, each with a row of its own.
struct LayerNormTeams {
    int warps, teams;  // of a team; of a block
};

template <class floatX>
LayerNormTeams layernorm_teams(int C) {
    const int warps = ceil_div(C, WARP_SIZE * Vec<floatX>::size);
    return {warps, warps > LAYERNORM_BACKWARD_WARPS ? 1 : LAYERNORM_BACKWARD_WARPS / warps};
}

template <class floatX>
int layernorm_backward_blocks(int N, int C) {
    const int blocks = ceil_div(N, layernorm_teams<floatX>(C).teams);
    return blocks < LAYERNORM_BACKWARD_BLOCKS ? blocks : LAYERNORM_BACKWARD_BLOCKS;
}

// What one lane has in shared memory: its vectors of dout, inp and dresidual, of two rows, and of weight.
template <class floatX>
struct LayerNormSlots {
    using V = Vec<floatX>;
    static constexpr int arrays = 3, turns = 2, count = arrays * turns + 1;
    V* own;

    __device__ LayerNormSlots() : own(simt::dynamic_shared<V>() + threadIdx.x) {
        for (int i = 0; i < count; i++) own[i * int(blockDim.x)] = V{};  // for lanes past C, and no dresidual
    }
    __device__ V& at(int turn, int array) { return own[(turn * arrays + array) * int(blockDim.x)]; }
    __device__ V& weight() { return own[arrays * turns * int(blockDim.x)]; }
    static int64_t bytes(int threads) { return int64_t(count) * threads * int64_t(sizeof(V)); }
};

// The sums over rows that a lane makes for its channels.
template <class floatX>
struct LayerNormSums {
    static constexpr int size = Vec<floatX>::size;
    float dweight[size], dbias[size], dbranch_bias[size];

    // To or onto the lane's channels of (3, width) floats.
    __device__ void add_to(float* out, int width, bool first) const {
        UNROLL
        for (int k = 0; k < size; k++) {
            out[k] = dweight[k] + (first ? 0.0f : out[k]);
            out[width + k] = dbias[k] + (first ? 0.0f : out[width + k]);
            out[2 * width + k] = dbranch_bias[k] + (first ? 0.0f : out[2 * width + k]);
        }
    }
};

// partial (blocks, groups, C): the block's sums for dweight, dbias and, with 3 groups, dbranch_bias. Dynamic shared
// memory: the slots; at the end the sums of the block, which take no more.
template <class floatX, int MOST_WARPS>
__global__ void __launch_bounds__(MOST_WARPS* WARP_SIZE, MOST_WARPS > LAYERNORM_BACKWARD_WARPS ? 1 : 2)
    layernorm_backward_kernel(floatX* dinp, float* partial, const floatX* dout, const floatX* inp, const floatX* weight,
                              const float* mean, const float* rstd, const floatX* dresidual, int N, int C,
                              LayerNormTeams block, int groups) {
    using V = Vec<floatX>;
    SHARED(row_sums, float2[2][MOST_WARPS]);  // of two turns: one barrier per turn is enough
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, team = warp / block.warps;
    const int c = (warp % block.warps * WARP_SIZE + lane) * V::size, step = int(gridDim.x) * block.teams;
    LayerNormSlots<floatX> slots;
    LayerNormSums<floatX> sums = {};
    if (c < C) slots.weight() = load128(weight + c);

    const auto fetch = [&](int turn, int n) {
        if (c < C && n < N) {
            const int64_t at = int64_t(n) * C + c;
            cp_async_16(&slots.at(turn, 0), dout + at);
            cp_async_16(&slots.at(turn, 1), inp + at);
            if (dresidual) cp_async_16(&slots.at(turn, 2), dresidual + at);
        }
        cp_async_commit();
    };
    int n = int(blockIdx.x) * block.teams + team, turn = 0;
    fetch(0, n), fetch(1, n + step);
    float next_mean = n < N ? mean[n] : 0.0f, next_rstd = n < N ? rstd[n] : 0.0f;

    // All teams take as many turns as the first: the barrier is for all. A team past N has nothing to add.
    for (; n - team < N; n += step, turn ^= 1) {
        const float m = next_mean, r = next_rstd;
        if (n + step < N) next_mean = mean[n + step], next_rstd = rstd[n + step];
        cp_async_wait<1>();

        float total = 0.0f, total_norm = 0.0f;
        if (n < N) {
            const V dy = slots.at(turn, 0), x = slots.at(turn, 1), w = slots.weight();
            UNROLL
            for (int k = 0; k < V::size; k++) {
                const float dnorm = float(dy[k]) * float(w[k]);
                total += dnorm;
                total_norm += dnorm * ((float(x[k]) - m) * r);
            }
        }
        total = warp_sum(total), total_norm = warp_sum(total_norm);
        if (lane == 0) row_sums[turn][warp] = {total, total_norm};
        __syncthreads();

        if (n < N) {
            total = 0.0f, total_norm = 0.0f;
            for (int i = team * block.warps; i < (team + 1) * block.warps; i++)
                total += row_sums[turn][i].x, total_norm += row_sums[turn][i].y;
            const float average = total / float(C), average_norm = total_norm / float(C);
            const V dy = slots.at(turn, 0), x = slots.at(turn, 1), past = slots.at(turn, 2), w = slots.weight();
            V d;
            UNROLL
            for (int k = 0; k < V::size; k++) {
                const float norm = (float(x[k]) - m) * r, dnorm = float(dy[k]) * float(w[k]);
                d[k] = floatX(float(past[k]) + r * (dnorm - average - norm * average_norm));
                sums.dweight[k] += float(dy[k]) * norm;
                sums.dbias[k] += float(dy[k]);
                sums.dbranch_bias[k] += float(d[k]);
            }
            if (c < C) store128(dinp + int64_t(n) * C + c, d);  // plain store: the next product reads it
        }
        fetch(turn, n + 2 * step);
    }

    // The teams one after the other, then all of the block's sums.
    cp_async_wait<0>();
    __syncthreads();  // the slots become the sums
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

namespace gpu {

// Bytes of device_scratch that layernorm_backward takes.
template <class floatX>
int64_t layernorm_scratch_bytes(int N, int C) {
    return int64_t(layernorm_backward_blocks<floatX>(N, C)) * 3 * C * int64_t(sizeof(float));
}

}  // namespace gpu

template <class floatX>
void gpu::layernorm_backward(floatX* dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                             const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                             const floatX* dresidual, int N, int C, Stream stream) {
    check_layernorm_sizes<floatX>("layernorm_backward", N, C);
    const LayerNormTeams block = layernorm_teams<floatX>(C);
    const int blocks = layernorm_backward_blocks<floatX>(N, C), threads = block.teams * block.warps * WARP_SIZE;
    const int groups = dbranch_bias ? 3 : 2;
    float* partial = static_cast<float*>(device_scratch(layernorm_scratch_bytes<floatX>(N, C)));
    const auto kernel = block.warps > LAYERNORM_BACKWARD_WARPS
                            ? layernorm_backward_kernel<floatX, LAYERNORM_BACKWARD_WIDE>
                            : layernorm_backward_kernel<floatX, LAYERNORM_BACKWARD_WARPS>;
    simt::launch(kernel, blocks, threads, LayerNormSlots<floatX>::bytes(threads), stream, dinp, partial, dout, inp,
                 weight, mean, rstd, dresidual, N, C, block, groups);
    sum_rows({{dweight, dbias, dbranch_bias}}, partial, blocks, groups, C, true, stream);
}
