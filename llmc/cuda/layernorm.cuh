// layernorm.cuh: LayerNorm over channels: forward, and backward, which also adds the gradient of the residual stream
// and computes three parameter gradients of size C.
//
// Forward: a warp owns a row and keeps it in registers, so that each element is read and written once. These
// 2*N*C*sizeof(floatX) bytes bound the time (201 MB for N = 65536, C = 768, bf16). The variance takes a second pass
// over the registers: E[x^2] - E[x]^2 would cancel in float when |mean| >> std (test: mean far from zero).
//
// Backward: a row belongs to a team of warps, with one 16-byte vector per lane. A lane has the same channels in all
// rows of its team, so it keeps the sums of the three gradients over these rows in registers: 24 floats in bf16, at any
// C. cp.async loads the rows into shared memory one row ahead (double buffering), because the registers are taken by
// the sums; a lane reads only what it copied itself. Memory traffic: 4*N*C*sizeof(floatX) bytes, and 12*C bytes per
// block for the second stage (403 and 2.4 MB). The block and team of a row depend only on N and C, and no atomics are
// used, so the same inputs give the same bits. Each number of warps in a team has its own kernel, in which the division
// into teams and all addresses of shared memory are constants: 291 instructions for each row and warp at C = 768 (bf16,
// sm_90a).
#pragma once
#include "base/device.h"
#include "cuda/amax.cuh"
#include "cuda/bias.cuh"
#include "cuda/simt.h"
#include "ops/ops.h"

constexpr int LAYERNORM_WARPS = 8;
// Rows of up to 16 vectors per lane have a kernel for each number of vectors. Longer ones share a kernel for
// 20 vectors, which are the 5,120 channels of GPT-3 13B in bf16.
constexpr int LAYERNORM_MANY_VECS = 16, LAYERNORM_MAX_VECS = 20;

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

    // Writes (x - mean) * rstd * weight + bias, and the two statistics of row n. Returns the lane's largest output.
    __device__ Amax normalize(floatX* out, float* mean, float* rstd, const floatX* weight, const floatX* bias, int n) {
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
        Amax largest;
        for_each_vec([&](int i, int c) {
            const V w = load128(weight + c), b = load128(bias + c);
            V o;
            for (int k = 0; k < V::size; k++) o[k] = floatX((float(x[i][k]) - m) * r * float(w[k]) + float(b[k]));
            store128(out + int64_t(n) * C + c, o);  // not a streaming store: the next matmul reads it
            largest.add(o);
        });
        if (threadIdx.x % WARP_SIZE == 0) {
            mean[n] = m;
            rstd[n] = r;
        }
        return largest;
    }
};

__device__ inline int row_of_warp() { return int(blockIdx.x * LAYERNORM_WARPS + threadIdx.x / WARP_SIZE); }

// out (N, C), mean, rstd (N) from inp (N, C), weight, bias (C). With AMAX, *amax is raised to the largest magnitude of
// out; a constant, because it takes up to 30 registers.
// Grid: blocks of 8 warps, one warp per row. VECS: 16-byte vectors per lane, so C <= VECS * WARP_SIZE * Vec::size.
template <class floatX, int VECS, bool AMAX>
__global__ void __launch_bounds__(LAYERNORM_WARPS* WARP_SIZE)
    layernorm_forward_kernel(floatX* out, float* mean, float* rstd, float* amax, const floatX* inp,
                             const floatX* weight, const floatX* bias, int N, int C) {
    const int n = row_of_warp();
    Amax largest;
    if (n < N) {  // the same for all lanes of a warp, so the shuffles have all lanes
        RowOfWarp<floatX, VECS> row(C);
        row.for_each_vec([&](int i, int c) { row.x[i] = load128(inp + int64_t(n) * C + c); });
        largest = row.normalize(out, mean, rstd, weight, bias, n);
    }
    if constexpr (AMAX) largest.raise_by_block(amax);
}

template <class floatX>
void check_layernorm_sizes(const char* op, int N, int C) {
    constexpr int size = Vec<floatX>::size, max_channels = LAYERNORM_MAX_VECS * WARP_SIZE * size;
    ENSURE(N >= 1 && C >= 1, "%s of %d rows of %d: there must be at least one of each", op, N, C);
    ENSURE(C % size == 0 && C <= max_channels, "%s: %d channels must be a multiple of %d, at most %d", op, C, size,
           max_channels);
}

// Calls run(vecs), where vecs is the number of vectors of each lane if one warp has rows of C channels, or more, as a
// compile-time constant. It is also the number of warps if each lane has one vector.
template <class floatX, class Run>
void with_row_vecs(const char* op, int N, int C, const Run& run) {
    check_layernorm_sizes<floatX>(op, N, C);
    const int vecs = ceil_div(C, WARP_SIZE * Vec<floatX>::size);
    if (vecs > LAYERNORM_MANY_VECS) return run(std::integral_constant<int, LAYERNORM_MAX_VECS>{});
    with_constant<LAYERNORM_MANY_VECS>(vecs, run);
}

template <class floatX>
void gpu::layernorm_forward(Out<floatX> out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                            const floatX* bias, int N, int C, Stream stream) {
    with_row_vecs<floatX>("layernorm_forward", N, C, [&](auto vecs) {
        auto kernel = layernorm_forward_kernel<floatX, vecs, false>;
        if constexpr (std::is_same_v<floatX, bf16>)
            if (out.amax) kernel = layernorm_forward_kernel<floatX, vecs, true>;
        simt::launch(kernel, ceil_div(N, LAYERNORM_WARPS), LAYERNORM_WARPS * WARP_SIZE, 0, stream, out.data, mean, rstd,
                     out.amax, inp, weight, bias, N, C);
    });
}

// ---- Backward

// Warps per block. With 14, two blocks fit into the registers of an SM, and a block has two teams for rows of 1600
// channels. Only rows that need more than 14 warps use blocks of 16.
constexpr int LAYERNORM_BACKWARD_WARPS = 14;

// A block is divided into teams of WARPS warps; each team owns a row at a time, and each lane 16 bytes of it.
template <class floatX, int WARPS>
struct LayerNormTeam {
    using V = Vec<floatX>;
    static constexpr int teams = WARPS > LAYERNORM_BACKWARD_WARPS ? 1 : LAYERNORM_BACKWARD_WARPS / WARPS;
    static constexpr int lanes = WARPS * WARP_SIZE, threads = teams * lanes;
    static constexpr int blocks_per_sm = WARPS > LAYERNORM_BACKWARD_WARPS ? 1 : 2;
    int team = int(threadIdx.x) / lanes, lane = int(threadIdx.x) % lanes, c = lane * V::size;  // c: the first channel
};

// A lane's vectors in shared memory: those of dout, inp and dresidual for two stages (rows), and that of weight.
template <class floatX, int THREADS>
struct LayerNormBuffers {
    using V = Vec<floatX>;
    static constexpr int arrays = 3, stages = 2, count = arrays * stages + 1;
    static constexpr int64_t bytes = int64_t(count) * THREADS * int64_t(sizeof(V));
    V* lane_vectors;

    __device__ LayerNormBuffers() : lane_vectors(simt::dynamic_shared<V>() + threadIdx.x) {}
    // Zeros, for a lane past C (whole) or for a null dresidual: what no copy will fill. An asynchronous copy to memory
    // that was stored to before would need a fence.
    __device__ void clear(bool whole) {
        for (int i = 0; i < count; i++)
            if (whole || i % arrays == 2) lane_vectors[i * THREADS] = V{};
    }
    __device__ V& at(int stage, int array) { return lane_vectors[(stage * arrays + array) * THREADS]; }
    __device__ V& weight() { return lane_vectors[arrays * stages * THREADS]; }
    // Starts the copies of the lane's vectors, which begin at element `from` of the arrays.
    __device__ void fetch(int stage, const floatX* dout, const floatX* inp, const floatX* dresidual, int64_t from) {
        cp_async_16(&at(stage, 0), dout + from);
        cp_async_16(&at(stage, 1), inp + from);
        if (dresidual) cp_async_16(&at(stage, 2), dresidual + from);
    }
};

// Two sums over the C channels of a row: of dnorm = dout * weight, and of dnorm * norm, where
// norm = (inp - mean) * rstd.
struct LayerNormDots {
    float dnorm = 0.0f, dnorm_norm = 0.0f;

    // Adds a lane's channels.
    template <class floatX>
    __device__ void add(const Floats<floatX>& dy, const Floats<floatX>& x, const Floats<floatX>& w, float mean,
                        float rstd) {
        UNROLL
        for (int k = 0; k < x.size; k++) {
            const float d = dy[k] * w[k];
            dnorm += d;
            dnorm_norm += d * ((x[k] - mean) * rstd);
        }
    }
    // Called by the whole block: the sum of the lane's team. warp_sums: of all warps; the next call needs another
    // array, since this one is still read when the function returns.
    template <int WARPS>
    __device__ LayerNormDots of_team(float2* warp_sums, int team) const {
        const float2 sum = {warp_sum(dnorm), warp_sum(dnorm_norm)};
        if (threadIdx.x % WARP_SIZE == 0) warp_sums[threadIdx.x / WARP_SIZE] = sum;
        __syncthreads();
        LayerNormDots total;
        UNROLL
        for (int i = 0; i < WARPS; i++) {
            total.dnorm += warp_sums[team * WARPS + i].x;
            total.dnorm_norm += warp_sums[team * WARPS + i].y;
        }
        return total;
    }
};

// A lane's gradient sums over rows, for its channels.
template <class floatX>
struct LayerNormSums {
    static constexpr int size = Vec<floatX>::size, groups = 3, dweight = 0, dbias = 1, dbranch_bias = 2;
    float sums[groups][size] = {};

    // Adds a row, and returns its dinp. The averages are those of dnorm and of dnorm * norm over C.
    __device__ Vec<floatX> add_row(const Floats<floatX>& dy, const Floats<floatX>& x, const Floats<floatX>& w,
                                   const Floats<floatX>& dresidual, float mean, float rstd, float average,
                                   float average_norm) {
        Floats<floatX> d;
        UNROLL
        for (int k = 0; k < size; k++) {
            const float norm = (x[k] - mean) * rstd, dnorm = dy[k] * w[k];
            d[k] = dresidual[k] + rstd * (dnorm - average - norm * average_norm);
            sums[dweight][k] += dy[k] * norm;
            sums[dbias][k] += dy[k];
        }
        const Vec<floatX> dinp = rounded(d);
        d = widened(dinp);
        UNROLL
        for (int k = 0; k < size; k++) sums[dbranch_bias][k] += d[k];
        return dinp;
    }

    // Called by the whole block: the first team's lanes get the sums of all teams. `exchange`: shared memory for all
    // sums of a block. Neighbouring lanes access neighbouring floats, so no banks conflict.
    template <class Team>
    __device__ void add_teams(float* exchange, const Team& own) {
        const auto at = [&](int team, int g, int k) -> float& {
            return exchange[(g * size + k) * Team::threads + team * Team::lanes + own.lane];
        };
        for_each([&](int g, int k) { at(own.team, g, k) = sums[g][k]; });
        __syncthreads();
        if (own.team > 0) return;
        UNROLL_BY(1)
        for (int t = 1; t < Team::teams; t++) for_each([&](int g, int k) { sums[g][k] += at(t, g, k); });
    }
    // Writes the lane's channels of the first `count` groups: out (count, C), c the first of them.
    __device__ void store(float* out, int count, int C, int c) const {
        constexpr int floats = Vec<float>::size;
        UNROLL
        for (int g = 0; g < groups; g++) {
            UNROLL
            for (int k = 0; k < size; k += floats)
                if (g < count)
                    store128(out + int64_t(g) * C + c + k,
                             Vec<float>{{sums[g][k], sums[g][k + 1], sums[g][k + 2], sums[g][k + 3]}});
        }
    }

    template <class Body>
    __device__ static void for_each(const Body& body) {
        UNROLL
        for (int g = 0; g < groups; g++) {
            UNROLL
            for (int k = 0; k < size; k++) body(g, k);
        }
    }
};

// dinp (N, C) from dout, inp, dresidual (N, C; dresidual may be null), weight (C), mean and rstd (N). partial (blocks,
// groups, C) receives each block's sums for dweight, dbias and, with 3 groups, dbranch_bias; sum_rows adds them. With
// amax, *amax is raised to the largest magnitude of dinp.
//
// Grid: LayerNormBackward::blocks blocks of teams of WARPS warps. Team t of block b owns row b * teams + t and every
// (gridDim.x * teams)-th row after it. Dynamic shared memory holds the lanes' buffers, and at the end the sums of the
// block, which need no more space.
template <class floatX, int WARPS>
__global__ void __launch_bounds__(LayerNormTeam<floatX, WARPS>::threads, LayerNormTeam<floatX, WARPS>::blocks_per_sm)
    layernorm_backward_kernel(floatX* dinp, float* partial, float* amax, const floatX* dout, const floatX* inp,
                              const floatX* weight, const float* mean, const float* rstd, const floatX* dresidual,
                              int N, int C, int groups) {
    using Team = LayerNormTeam<floatX, WARPS>;
    SHARED(warp_sums, float2[2][Team::threads / WARP_SIZE]);  // two stages, so that one barrier per row is enough
    const Team own;
    const bool has_channels = own.c < C;
    const int step = int(gridDim.x) * Team::teams;
    const float inv_C = 1.0f / float(C);
    LayerNormBuffers<floatX, Team::threads> buffers;
    LayerNormSums<floatX> sums;
    Amax largest;
    if (!has_channels || !dresidual) buffers.clear(!has_channels);
    if (has_channels) buffers.weight() = load128(weight + own.c);

    const auto fetch = [&](int stage, int n) {
        if (has_channels && n < N) buffers.fetch(stage, dout, inp, dresidual, int64_t(n) * C + own.c);
        cp_async_commit();
    };
    int n = int(blockIdx.x) * Team::teams + own.team, stage = 0;
    fetch(0, n);
    fetch(1, n + step);
    float next_mean = n < N ? mean[n] : 0.0f, next_rstd = n < N ? rstd[n] : 0.0f;

    // Every team makes as many iterations as the first one, because of the barrier. A team past N adds nothing.
    for (; n - own.team < N; n += step, stage ^= 1) {
        const float m = next_mean, r = next_rstd;
        if (n + step < N) {
            next_mean = mean[n + step];
            next_rstd = rstd[n + step];
        }
        cp_async_wait<1>();

        // Read from shared memory here and again below: there are no registers to keep them.
        const auto dy = [&] { return widened(buffers.at(stage, 0)); };
        const auto x = [&] { return widened(buffers.at(stage, 1)); };
        const auto w = [&] { return widened(buffers.weight()); };
        LayerNormDots dots;
        if (n < N) dots.add<floatX>(dy(), x(), w(), m, r);
        dots = dots.template of_team<WARPS>(warp_sums[stage], own.team);
        if (n < N) {
            const Vec<floatX> d = sums.add_row(dy(), x(), w(), widened(buffers.at(stage, 2)), m, r, dots.dnorm * inv_C,
                                               dots.dnorm_norm * inv_C);
            if (has_channels) store128(dinp + int64_t(n) * C + own.c, d);  // not streaming: the next matmul reads it
            if (amax && has_channels) largest.add(d);
        }
        fetch(stage, n + 2 * step);
    }

    if (amax) largest.raise_by_warp(amax);
    cp_async_wait<0>();
    __syncthreads();  // the buffers' memory is reused for the sums
    static_assert(sizeof(sums) <= LayerNormBuffers<floatX, Team::threads>::bytes / Team::threads);
    sums.add_teams(simt::dynamic_shared<float>(), own);
    if (own.team == 0 && has_channels) sums.store(partial + int64_t(blockIdx.x) * groups * C, groups, C, own.c);
}

// The launch of layernorm_backward_kernel: as many blocks as the GPU runs at once, so that no block waits for another
// one. The sums are therefore the same in each run on one kind of GPU, and may differ in rounding on another kind.
template <class floatX>
struct LayerNormBackward {
    int threads = 0, blocks = 0;
    int64_t shared_bytes = 0;
    decltype(&layernorm_backward_kernel<floatX, 1>) kernel = nullptr;

    LayerNormBackward(int N, int C) {
        with_row_vecs<floatX>("layernorm_backward", N, C, [&](auto warps) {
            using Team = LayerNormTeam<floatX, warps>;
            threads = Team::threads;
            shared_bytes = LayerNormBuffers<floatX, Team::threads>::bytes;
            kernel = layernorm_backward_kernel<floatX, warps>;
            const int resident = simt::resident_blocks(kernel, threads, shared_bytes),
                      needed = ceil_div(N, Team::teams);
            blocks = needed < resident ? needed : resident;
        });
    }

    // Bytes of device_scratch that the blocks' sums take.
    int64_t scratch_bytes(int C) const { return int64_t(blocks) * 3 * C * int64_t(sizeof(float)); }
};

template <class floatX>
void gpu::layernorm_backward(Out<floatX> dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                             const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                             const floatX* dresidual, int N, int C, Stream stream) {
    const LayerNormBackward<floatX> launch(N, C);
    const int groups = dbranch_bias ? 3 : 2;
    float* partial = static_cast<float*>(device_scratch(launch.scratch_bytes(C)));
    simt::launch(launch.kernel, launch.blocks, launch.threads, launch.shared_bytes, stream, dinp.data, partial,
                 dinp.amax, dout, inp, weight, mean, rstd, dresidual, N, C, groups);
    sum_rows({{dweight, dbias, dbranch_bias}}, partial, launch.blocks, groups, C, true, stream);
}

// Tests include this file for its constants and sizes, and test the kernels that ops.cu instantiates.
INSTANTIATED_ELSEWHERE(gpu::layernorm_forward);
INSTANTIATED_ELSEWHERE(gpu::layernorm_backward);
