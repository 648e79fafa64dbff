// attention_mma.cuh: causal attention in bf16 on tensor cores, for heads of 64 and 128 channels, after FlashAttention-2
// (Dao 2023).
//
// A block owns a tile of queries (forward, dq) or of keys (dk, dv); each of its 4 warps owns 16 or 32 rows of the tile.
// The block loops over the tiles of the other operand that the causal mask leaves; cp.async loads them one tile ahead
// (double buffering). Scores and their gradients never leave the registers: the accumulator of one matmul is the A
// operand of the next. 32 rows per warp are faster than 16, because each ldmatrix (4 clocks of shared-memory bandwidth)
// then feeds four mma instructions instead of two. The rows of shared tiles are swizzled by XOR (SharedTile), so that
// no access has bank conflicts.
//
// Backward recomputes the scores in two kernels, one for dq and one for dk and dv. That takes 7 matmuls; 5 would be
// enough if dq were accumulated in memory over the tiles of keys. Such an accumulation needs either atomics, whose
// order differs from run to run, or one float copy of dq per tile of keys. At T = 1024, writing and summing these
// copies (4.5 on average) takes as long as the two extra matmuls. The dq kernel also computes delta = rowsum(dout *
// out), which the dk and dv kernel reads, because it has loaded dout anyway.
//
// Bound: tensor cores, with 4 FLOP (forward) and 14 FLOP (backward; the minimum is 10) per score, channel and head. At
// T = 1024, HS = 64, memory traffic (4 and 9 elements of C per token) takes a third of that time or less. Numerics: mma
// multiplies bf16 and accumulates in float; the softmax weights and their gradients are rounded to bf16 once, as
// operands. Exponentials are in base 2: one FMA computes scale * score - row_max. The rounding of its last term
// multiplies all weights of a row by the same factor of about 1, which the division by their sum removes.
#pragma once
#include <cmath>

#include "cuda/attention_heads.cuh"

constexpr int MMA_WARPS = 4, MMA_THREADS = MMA_WARPS * WARP_SIZE;

// Row and column of a lane's first element in the (16, 8) accumulator of mma_m16n8k16. Its other three elements are in
// the next column and 8 rows below.
__device__ inline int lane_row() { return int(threadIdx.x) % WARP_SIZE / 4; }
__device__ inline int lane_column() { return int(threadIdx.x) % 4 * 2; }

// A tile in shared memory: rows of HS channels, swizzled. Chunk c (16 bytes) of row r is stored at position
// c ^ (r % 8). ldmatrix reads the same chunk of eight rows at once; these lie in eight different groups of four banks.
template <int HS>
struct SharedTile {
    static constexpr int chunks = HS / 8;
    bf16* data;

    __device__ bf16* at(int row, int chunk) const { return data + row * HS + (chunk ^ (row & 7)) * 8; }
    __device__ SharedTile from(int row) const { return {data + row * HS}; }  // row: a multiple of 8

    // Called by the whole block: starts copying ROWS rows of a head, beginning at token `first`. Rows past the last
    // token are filled with zeros.
    template <int ROWS>
    __device__ void fetch(HeadRows<const bf16> head, int first, int T) const {
        constexpr int step = MMA_THREADS / chunks;  // the block copies `step` rows at a time
        static_assert(step % 8 == 0);               // so rows that are `step` apart have the same swizzle
        const int own_row = int(threadIdx.x) / chunks, chunk = int(threadIdx.x) % chunks;
        bf16* to = at(own_row, chunk);
        if (first + ROWS <= T) {  // the same for the whole block; offsets in `to` are constants
            const bf16* from = head.at(first + own_row, chunk * 8);
            UNROLL
            for (int row = 0; row < ROWS; row += step) {
                cp_async_16(to + row * HS, from);
                from += step * head.stride;
            }
            return;
        }
        UNROLL_BY(1)
        for (int row = 0; row < ROWS; row += step) {
            const int t = first + own_row + row;
            if (t < T)
                cp_async_16(to + row * HS, head.at(t, chunk * 8));
            else
                store128(to + row * HS, Vec<bf16>{});
        }
    }

    // The address that this lane passes to ldmatrix_x4 to load two neighbouring chunks of 16 rows: first both halves of
    // the rows, then the second chunk. `row` is a constant offset, so that a lane keeps few addresses. row: a
    // multiple of 8.
    __device__ const bf16* lane_at(int row, int chunk) const {
        const int lane = int(threadIdx.x) % WARP_SIZE;
        return at(lane % 16, chunk + lane / 16) + row * HS;
    }
    // Like lane_at, but both chunks of the first 8 rows come first. ldmatrix writes four neighbouring registers, and
    // mma reads its B fragment from two: in this order no register has to be moved.
    __device__ const bf16* lane_at_chunks_first(int row, int chunk) const {
        const int lane = int(threadIdx.x) % WARP_SIZE;
        return at(lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2) + row * HS;
    }
    // A fragment (16, 16): 16 rows beginning at `row`, 16 channels beginning at `chunk`.
    __device__ void load_a(uint32_t (&a)[4], int row, int chunk) const { ldmatrix_x4(a, lane_at(row, chunk)); }
    // Two B fragments (16, 8) of the tile's transpose: 16 channels beginning at `chunk`, of the 8 rows beginning at
    // `row` and of the next 8.
    __device__ void load_b_transposed(uint32_t (&b)[2][2], int row, int chunk) const {
        uint32_t r[4];
        ldmatrix_x4(r, lane_at_chunks_first(row, chunk));
        b[0][0] = r[0];
        b[0][1] = r[1];
        b[1][0] = r[2];
        b[1][1] = r[3];
    }
    // Two B fragments (16, 8) of the tile: 16 rows beginning at `row`, of the 8 channels of `chunk` and of the next 8.
    __device__ void load_b(uint32_t (&b)[2][2], int row, int chunk) const {
        uint32_t r[4];
        ldmatrix_x4_trans(r, lane_at(row, chunk));
        b[0][0] = r[0];
        b[0][1] = r[1];
        b[1][0] = r[2];
        b[1][1] = r[3];
    }
};

// The 16*R rows of a warp as A fragments. With KEEP they are loaded once and stay in registers; without KEEP they are
// loaded from the tile at each use, for kernels that are short of registers.
template <int HS, int R, bool KEEP>
struct RowFragments {
    SharedTile<HS> tile;
    uint32_t fragments[KEEP ? HS / 16 : 1][R][4];

    // The tile's copy must have completed.
    __device__ __forceinline__ explicit RowFragments(SharedTile<HS> tile) : tile(tile) {
        if constexpr (KEEP) {
            UNROLL
            for (int k = 0; k < HS / 16; k++) {
                UNROLL
                for (int i = 0; i < R; i++) tile.load_a(fragments[k][i], i * 16, 2 * k);
            }
        }
    }
    // a = the fragments of channels 16*k to 16*k + 15.
    __device__ __forceinline__ void get(uint32_t (&a)[R][4], int k) const {
        UNROLL
        for (int i = 0; i < R; i++) {
            if constexpr (KEEP) {
                UNROLL
                for (int r = 0; r < 4; r++) a[i][r] = fragments[k][i][r];
            } else {
                tile.load_a(a[i], i * 16, 2 * k);
            }
        }
    }
};

// acc (16*R, 8*N) += own (16*R, HS) * tile^T, for the first 8*N rows of the tile ("NT", as BLAS names it).
template <int HS, int R, int N, bool KEEP>
__device__ __forceinline__ void matmul_nt(float (&acc)[R][N][4], const RowFragments<HS, R, KEEP>& own,
                                          SharedTile<HS> tile) {
    UNROLL_BY(KEEP ? HS / 16 : 2)  // unrolled further, the compiler loads so far ahead that registers spill
    for (int k = 0; k < HS / 16; k++) {
        uint32_t a[R][4];
        own.get(a, k);
        UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t b[2][2];
            tile.load_b_transposed(b, n * 8, 2 * k);
            UNROLL
            for (int i = 0; i < R; i++) {
                mma_m16n8k16(acc[i][n], a[i], b[0]);
                mma_m16n8k16(acc[i][n + 1], a[i], b[1]);
            }
        }
    }
}

// An accumulator (16*R, 8*N), rounded to bf16, as A fragments of the next matmul. No data moves between lanes: in
// mma_m16n8k16 the elements that a lane holds of two accumulators (16, 8) are those that it must hold of one A fragment
// (16, 16).
template <int R, int N>
struct Bf16Fragments {
    uint32_t a[R][N / 2][4];

    Bf16Fragments() = default;
    __device__ __forceinline__ explicit Bf16Fragments(const float (&acc)[R][N][4]) {
        UNROLL
        for (int i = 0; i < R; i++) {
            UNROLL
            for (int n = 0; n < N; n++) {
                UNROLL
                for (int half = 0; half < 2; half++) set(i, half, n, acc[i][n][2 * half], acc[i][n][2 * half + 1]);
            }
        }
    }
    __device__ __forceinline__ void set(int i, int half, int n, float low, float high) {
        a[i][n / 2][n % 2 * 2 + half] = pack_bf16(low, high);
    }
    __device__ __forceinline__ float get(int i, int half, int n, int e) const {
        const uint32_t pair = a[i][n / 2][n % 2 * 2 + half];
        return __builtin_bit_cast(float, e ? pair & 0xffff0000u : pair << 16);
    }
};

// acc (16*R, HS) += weights (16*R, 8*N) * the first 8*N rows of the tile ("NN").
template <int HS, int R, int N>
__device__ __forceinline__ void matmul_nn(float (&acc)[R][HS / 8][4], const Bf16Fragments<R, N>& weights,
                                          SharedTile<HS> tile) {
    UNROLL
    for (int k = 0; k < N / 2; k++) {
        UNROLL
        for (int n = 0; n < HS / 8; n += 2) {
            uint32_t b[2][2];
            tile.load_b(b, k * 16, n);
            UNROLL
            for (int i = 0; i < R; i++) {
                mma_m16n8k16(acc[i][n], weights.a[i][k], b[0]);
                mma_m16n8k16(acc[i][n + 1], weights.a[i][k], b[1]);
            }
        }
    }
}

// Calls body(i, half, n, e, row, column) for every acc[i][n][2 * half + e] of this lane. row and column: its position
// in the warp's accumulator (16*R, 8*N).
template <int R, int N, class Body>
__device__ __forceinline__ void for_each_element(const Body& body) {
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            UNROLL
            for (int n = 0; n < N; n++) {
                UNROLL
                for (int e = 0; e < 2; e++)
                    body(i, half, n, e, i * 16 + half * 8 + lane_row(), n * 8 + lane_column() + e);
            }
        }
    }
}

// Stores acc * factor as bf16 to the rows of a head, beginning at token `first`. `own`: the warp's rows of a shared
// tile that is no longer read. The data pass through it, so that each store to global memory writes 16 bytes of a row.
template <int HS, int R>
__device__ __forceinline__ void store_rows(HeadRows<bf16> head, const float (&acc)[R][HS / 8][4],
                                           const float (&factor)[R][2], SharedTile<HS> own, int first, int T) {
    __syncwarp();
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            UNROLL
            for (int n = 0; n < HS / 8; n++) {
                const float f = factor[i][half], *x = &acc[i][n][2 * half];
                bf16* pair = own.at(i * 16 + half * 8 + lane_row(), n) + lane_column();
                *reinterpret_cast<uint32_t*>(pair) = pack_bf16(x[0] * f, x[1] * f);
            }
        }
    }
    __syncwarp();
    constexpr int chunks = HS / 8, rows_at_once = WARP_SIZE / chunks;
    const int lane = int(threadIdx.x) % WARP_SIZE, chunk = lane % chunks;
    UNROLL
    for (int i = 0; i < 16 * R / rows_at_once; i++) {
        const int row = i * rows_at_once + lane / chunks;
        if (first + row < T) store128_whole(head.at(first + row, chunk * 8), load128(own.at(row, chunk)));
    }
}

// ---- Forward

template <int HS>
struct ForwardTiles {
    static constexpr int row_tiles = HS == 64 ? 2 : 1, queries = MMA_WARPS * row_tiles * 16, keys = 64;
    static constexpr int64_t shared_bytes = (queries + 2 * 2 * keys) * HS * int64_t(sizeof(bf16));
};

// Online softmax of a warp's 16*R rows over the tiles of keys: the running maximum and sum of each row.
template <int R>
struct OnlineSoftmax {
    float row_max[R][2];  // maximum of the row's scores
    float sum[R][2];      // sum of the row's weights in this lane's columns

    __device__ OnlineSoftmax() {
        UNROLL
        for (int i = 0; i < R; i++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                row_max[i][half] = -INFINITY;
                sum[i][half] = 0.0f;
            }
        }
    }

    // weights = 2^(scale2 * (score - row_max)), with the maximum that includes these scores. Rescales out to it.
    template <int N, int CHANNEL_TILES>
    __device__ __forceinline__ void update(Bf16Fragments<R, N>& weights, float (&out)[R][CHANNEL_TILES][4],
                                           const float (&scores)[R][N][4], float scale2) {
        UNROLL
        for (int i = 0; i < R; i++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                float new_max = row_max[i][half];
                UNROLL
                for (int n = 0; n < N; n++) {
                    UNROLL
                    for (int e = 0; e < 2; e++) new_max = fmaxf(new_max, scores[i][n][2 * half + e]);
                }
                new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 1));  // four lanes hold a row
                new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 2));
                const float rescale = exp2_fast((row_max[i][half] - new_max) * scale2);
                row_max[i][half] = new_max;

                // The rounding error of new_max * scale2 scales all weights of the row by the same factor. Where that
                // factor could overflow, any two different scores are so far apart that every positive scale gives the
                // same weights; a power of two is used, whose product is exact.
                const float factor = fabsf(new_max) * scale2 < 0x1p30f ? scale2 : 0.125f, offset = new_max * factor;
                float row_sum = sum[i][half] * rescale;
                UNROLL
                for (int n = 0; n < N; n++) {
                    const float low = exp2_fast(fmaf(scores[i][n][2 * half], factor, -offset));
                    const float high = exp2_fast(fmaf(scores[i][n][2 * half + 1], factor, -offset));
                    row_sum += low + high;
                    weights.set(i, half, n, low, high);
                }
                sum[i][half] = row_sum;
                UNROLL
                for (int n = 0; n < CHANNEL_TILES; n++) {
                    UNROLL
                    for (int e = 0; e < 2; e++) out[i][n][2 * half + e] *= rescale;
                }
            }
        }
    }

    // reciprocal = 1 / the sums of the rows; stores lse of the rows, of which the first is query `first`.
    __device__ __forceinline__ void finish(float (&reciprocal)[R][2], float* lse, float scale, int first, int T) const {
        UNROLL
        for (int i = 0; i < R; i++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                float all = sum[i][half];
                all += __shfl_xor_sync(FULL_MASK, all, 1);
                all += __shfl_xor_sync(FULL_MASK, all, 2);
                reciprocal[i][half] = 1.0f / all;
                const int t = first + i * 16 + half * 8 + lane_row();
                if (lane_column() == 0 && t < T) lse[t] = row_max[i][half] * scale + logf(all);
            }
        }
    }
};

// out (B, T, C), lse (B, NH, T) from qkv (B, T, 3, NH, HS).
//
// Grid: attention_grid, one block of 4 warps per tile of 128 queries (64 for HS = 128), the last tile first because it
// attends to the most keys. A warp owns 32 (16) queries and loops over tiles of 64 keys.
template <int HS>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_forward_mma_kernel(bf16* out, float* lse, const bf16* qkv, AttentionShape shape) {
    using Tiles = ForwardTiles<HS>;
    constexpr int R = Tiles::row_tiles, N = Tiles::keys / 8;
    const int T = shape.T, first_query = block_tile_from_end() * Tiles::queries;
    const int warp_row = int(threadIdx.x) / WARP_SIZE * 16 * R, warp_query = first_query + warp_row;
    const auto q = HeadRows<const bf16>::of_qkv(qkv, shape, 0);
    const auto k = HeadRows<const bf16>::of_qkv(qkv, shape, 1);
    const auto v = HeadRows<const bf16>::of_qkv(qkv, shape, 2);

    const SharedTile<HS> queries{simt::dynamic_shared<bf16>()};
    const auto keys = [&](int stage) { return queries.from(Tiles::queries + 2 * stage * Tiles::keys); };
    const auto values = [&](int stage) { return keys(stage).from(Tiles::keys); };
    const auto fetch = [&](int tile) {
        keys(tile % 2).template fetch<Tiles::keys>(k, tile * Tiles::keys, T);
        values(tile % 2).template fetch<Tiles::keys>(v, tile * Tiles::keys, T);
        cp_async_commit();
    };
    queries.template fetch<Tiles::queries>(q, first_query, T);
    cp_async_commit();
    fetch(0);

    cp_async_wait<1>();
    __syncthreads();
    const RowFragments<HS, R, true> own(queries.from(warp_row));
    OnlineSoftmax<R> softmax;
    float o[R][HS / 8][4] = {};
    const int end = first_query + Tiles::queries < T ? first_query + Tiles::queries : T;
    const int tiles = ceil_div(end, Tiles::keys);
    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and no warp still reads the previous one, which fetch overwrites
        if (tile + 1 < tiles) fetch(tile + 1);
        __syncwarp();  // lanes may have taken different branches; ldmatrix and mma need all of them
        const int first_key = tile * Tiles::keys;
        if (first_key >= warp_query + 16 * R) continue;  // the whole tile is masked for this warp's queries

        float s[R][N][4] = {};
        matmul_nt(s, own, keys(tile % 2));
        if (first_key + Tiles::keys - 1 > warp_query)
            for_each_element<R, N>([&](int i, int half, int n, int e, int row, int column) {
                if (first_key + column > warp_query + row) s[i][n][2 * half + e] = -INFINITY;
            });
        __syncwarp();  // the mask's branches have diverged
        Bf16Fragments<R, N> weights;
        softmax.update(weights, o, s, shape.scale * LOG2_E);
        matmul_nn(o, weights, values(tile % 2));
    }

    float reciprocal[R][2];
    softmax.finish(reciprocal, lse + head_offset(shape), shape.scale, warp_query, T);
    store_rows(HeadRows<bf16>::of_out(out, shape), o, reciprocal, own.tile, warp_query, T);
}

// ---- Backward

template <int HS>
struct BackwardTiles {
    static constexpr int row_tiles = HS == 64 ? 2 : 1, rows = MMA_WARPS * row_tiles * 16;
    static constexpr int columns = HS == 64 ? 64 : 32;  // rows of a tile of the other operand
    static constexpr int64_t shared_bytes = 2 * (rows + 2 * columns) * HS * int64_t(sizeof(bf16));
};

// Per-query statistics of backward: log2-sum-exp, and delta = sum(dout * out). Queries past the last token have
// lse2 = infinity, so that their weights are 0.
struct QueryStatistics {
    float lse2, delta;

    // lse2 and a score have together a rounding error of up to 2^-22 * |lse2|. True if that error could change a weight
    // by more than a factor of 2.
    __device__ bool lse_is_huge() const { return fabsf(lse2) >= 0x1p22f; }
    // For a row whose lse is huge: the exponent score - lse2 without its rounding error. Different scores of that size
    // are far apart, so the largest one has exponent 0, and every other exponent is as good as -infinity. Without the
    // clamp, the exponent of the largest one could be anything, and its weight 0 or infinity.
    __device__ float clamp_exponent(float exponent) const {
        return exponent > fabsf(lse2) * -0x1p-22f ? 0.0f : exponent;
    }
};

// Computes delta = rowsum(dout * out) of the warp's 16*R queries, beginning at token `first`. Writes it to row_delta
// (shared memory) and to delta (global memory).
template <int HS, int R>
__device__ __forceinline__ void compute_delta(float* row_delta, float* delta, HeadRows<const bf16> dout,
                                              HeadRows<const bf16> out, int first, int T) {
    constexpr int chunks = HS / 8, rows_at_once = WARP_SIZE / chunks, steps = 16 * R / rows_at_once;
    const int lane = int(threadIdx.x) % WARP_SIZE, chunk = lane % chunks;
    Vec<bf16> x[steps], y[steps];  // apart from the sums, so that all loads are in flight at the same time
    UNROLL
    for (int i = 0; i < steps; i++) {
        const int t = first + i * rows_at_once + lane / chunks;
        const int token = t < T ? t : T - 1;  // a load without a condition; nothing depends on sums past the last token
        x[i] = load128(dout.at(token, chunk * 8));
        y[i] = load128cs(out.at(token, chunk * 8));
    }
    UNROLL
    for (int i = 0; i < steps; i++) {
        const int row = i * rows_at_once + lane / chunks, t = first + row;
        const Floats<bf16> a = widened(x[i]), b = widened(y[i]);
        float sum = 0.0f;
        UNROLL
        for (int c = 0; c < a.size; c++) sum += a[c] * b[c];
        for (int distance = chunks / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, distance);
        if (chunk == 0) {
            row_delta[row] = sum;
            if (t < T) delta[t] = sum;
        }
    }
    __syncwarp();
}

// Loads the statistics of a warp's 16*R queries, from token `first` on. row_delta: their delta in shared memory.
// Returns whether the lse of one of the lane's is huge.
template <int R>
__device__ __forceinline__ bool load_statistics(QueryStatistics (&rows)[R][2], const float* lse, const float* row_delta,
                                                int first, int T) {
    bool any_is_huge = false;
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = i * 16 + half * 8 + lane_row(), t = first + row;
            rows[i][half] = {t < T ? lse[t] * LOG2_E : INFINITY, row_delta[row]};
            any_is_huge = any_is_huge || rows[i][half].lse_is_huge();
        }
    }
    return any_is_huge;
}

// The statistics of a tile of QUERIES queries, each in registers of one thread, on the way to shared memory. Only
// publish reads these registers, so fetch does not wait for the loads. QUERIES is 0 for tiles of keys.
template <int QUERIES>
struct FetchedStatistics {
    float lse = INFINITY, delta = 0.0f;

    __device__ __forceinline__ void fetch(const float* all_lse, const float* all_delta, int first, int T) {
        if (int(threadIdx.x) >= QUERIES) return;
        const int t = first + int(threadIdx.x);
        lse = t < T ? all_lse[t] : INFINITY;
        delta = t < T ? all_delta[t] : 0.0f;
    }
    __device__ __forceinline__ void publish(QueryStatistics* to) const {
        if (int(threadIdx.x) < QUERIES) to[threadIdx.x] = {lse * LOG2_E, delta};
    }
};

// The statistics of the queries of a warp's scores: those of 8*N columns, in shared memory, or of its own rows.
template <bool OF_KEYS, int R>
struct ScoreStatistics {
    const QueryStatistics* columns;
    const QueryStatistics (&rows)[R][2];
    bool row_lse_is_huge;

    __device__ QueryStatistics at(int i, int half, int column) const {
        return OF_KEYS ? columns[column] : rows[i][half];
    }
    __device__ bool any_lse_is_huge() const {
        if (!OF_KEYS) return row_lse_is_huge;
        return __any_sync(FULL_MASK, columns[int(threadIdx.x) % WARP_SIZE].lse_is_huge());
    }
};

// Scores become weights: p = 2^(scale2 * p - lse2).
template <int R, int N, bool OF_KEYS>
__device__ __forceinline__ void weights_from_scores(float (&p)[R][N][4], float scale2,
                                                    const ScoreStatistics<OF_KEYS, R>& statistics) {
    for_each_element<R, N>([&](int i, int half, int n, int e, int, int c) {
        float& weight = p[i][n][2 * half + e];
        weight = fmaf(weight, scale2, -statistics.at(i, half, c).lse2);
    });
    if (statistics.any_lse_is_huge())
        for_each_element<R, N>([&](int i, int half, int n, int e, int, int c) {
            float& weight = p[i][n][2 * half + e];
            weight = statistics.at(i, half, c).clamp_exponent(weight);
        });
    for_each_element<R, N>([&](int i, int half, int n, int e, int, int) {
        float& weight = p[i][n][2 * half + e];
        weight = exp2_fast(weight);
    });
}

// Whether the causal mask hides all or some scores of rows from token first_row and columns from token first_column on.
struct Masked {
    bool all, some;
};
template <bool OF_KEYS>
__device__ __forceinline__ Masked masked_part(int first_row, int rows, int first_column, int columns) {
    const int first_query = OF_KEYS ? first_column : first_row, queries = OF_KEYS ? columns : rows;
    const int first_key = OF_KEYS ? first_row : first_column, keys = OF_KEYS ? rows : columns;
    return {first_key >= first_query + queries, first_key + keys - 1 > first_query};
}

// Adds what 8*N columns of the other operand give to the gradients of the warp's own rows: dx, with OF_KEYS also dy.
// The rows begin at token first_row, the columns at first_column.
template <int HS, bool OF_KEYS, int N, int R, int RY, int CY, bool KEEP>
__device__ __forceinline__ void add_gradients(float (&dx)[R][HS / 8][4], float (&dy)[RY][CY][4],
                                              const RowFragments<HS, R, KEEP>& x, const RowFragments<HS, R, KEEP>& y,
                                              SharedTile<HS> other_x, SharedTile<HS> other_y, int first_row,
                                              int first_column, bool some_masked, float scale2,
                                              const ScoreStatistics<OF_KEYS, R>& statistics) {
    static_assert(!OF_KEYS || 8 * N == WARP_SIZE);  // any_lse_is_huge has a column in each lane

    // ---- the weights p
    float p[R][N][4] = {};
    matmul_nt(p, x, other_x);
    weights_from_scores(p, scale2, statistics);
    if (some_masked)
        for_each_element<R, N>([&](int i, int half, int n, int e, int r, int c) {
            if (OF_KEYS ? first_row + r > first_column + c : first_column + c > first_row + r)
                p[i][n][2 * half + e] = 0.0f;
        });
    __syncwarp();  // the branches on single elements have diverged

    // ---- dv += p dout
    const Bf16Fragments weights(p);
    if constexpr (OF_KEYS) matmul_nn(dy, weights, other_y);

    // ---- dq += dscore k, or dk += dscore q, which store_gradients scales
    float dscore[R][N][4];
    for_each_element<R, N>([&](int i, int half, int n, int e, int, int c) {
        dscore[i][n][2 * half + e] = -statistics.at(i, half, c).delta;
    });
    matmul_nt(dscore, y, other_y);
    for_each_element<R, N>([&](int i, int half, int n, int e, int, int) {
        dscore[i][n][2 * half + e] *= OF_KEYS ? weights.get(i, half, n, e) : p[i][n][2 * half + e];
    });
    matmul_nn(dx, Bf16Fragments(dscore), other_x);
}

// Stores scale * dx as dq or dk, and dy as dv.
template <int HS, bool OF_KEYS, int R, int RY, int CY>
__device__ __forceinline__ void store_gradients(bf16* dqkv, const float (&dx)[R][HS / 8][4],
                                                const float (&dy)[RY][CY][4], SharedTile<HS> own_x,
                                                SharedTile<HS> own_y, int first, AttentionShape shape) {
    float scales[R][2], ones[R][2];
    UNROLL
    for (int i = 0; i < R; i++) {
        scales[i][0] = scales[i][1] = shape.scale;
        ones[i][0] = ones[i][1] = 1.0f;
    }
    const auto rows = [&](int part) { return HeadRows<bf16>::of_qkv(dqkv, shape, part); };
    store_rows(rows(OF_KEYS ? 1 : 0), dx, scales, own_x, first, shape.T);
    if constexpr (OF_KEYS) store_rows(rows(2), dy, ones, own_y, first, shape.T);
}

// dqkv (B, T, 3, NH, HS) from qkv (the same shape), dout and out (B, T, C), lse (B, NH, T); delta (B, NH, T). With
// p = 2^(scale2 * score - lse2), for each query and each key that it attends to:
//   dscore = p (dout.v - delta)        dq += scale dscore k        dk += scale dscore q        dv += p dout
// OF_KEYS = false: a block owns x = q, y = dout, and accumulates dx = dq over tiles of x = k, y = v. It writes delta.
// OF_KEYS = true: a block owns x = k, y = v, and accumulates dx = dk, dy = dv over tiles of x = q, y = dout. It reads
// delta, so it must be launched second.
//
// Grid: attention_grid, one block of 4 warps per tile of 128 rows (64 for HS = 128); the last queries, or the first
// keys, come first, because they have the most work. A warp owns 32 (16) rows and takes 32 columns of the other
// operand's tile at a time (16 for dq).
template <int HS, bool OF_KEYS>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_backward_mma_kernel(bf16* dqkv, float* delta, const bf16* dout, const bf16* out, const float* lse,
                                  const bf16* qkv, AttentionShape shape) {
    using Tiles = BackwardTiles<HS>;
    constexpr int R = Tiles::row_tiles, COLUMNS = Tiles::columns, N = OF_KEYS ? 4 : 2;
    const int T = shape.T, first_row = (OF_KEYS ? block_tile() : block_tile_from_end()) * Tiles::rows;
    const int warp_row = int(threadIdx.x) / WARP_SIZE * 16 * R, warp_token = first_row + warp_row;
    const auto of_qkv = [&](int part) { return HeadRows<const bf16>::of_qkv(qkv, shape, part); };
    const auto q = of_qkv(0), k = of_qkv(1), v = of_qkv(2), d = HeadRows<const bf16>::of_out(dout, shape);
    lse += head_offset(shape);
    delta += head_offset(shape);

    const SharedTile<HS> own_x{simt::dynamic_shared<bf16>()}, own_y = own_x.from(Tiles::rows);
    const auto other_x = [&](int tile) { return own_y.from(Tiles::rows + tile % 2 * 2 * COLUMNS); };
    const auto other_y = [&](int tile) { return other_x(tile).from(COLUMNS); };
    SHARED(column_statistics, QueryStatistics[2][OF_KEYS ? COLUMNS : 1]);
    SHARED(row_delta, float[OF_KEYS ? 1 : Tiles::rows]);
    FetchedStatistics<OF_KEYS ? COLUMNS : 0> fetched;
    const auto fetch = [&](int tile) {
        other_x(tile).template fetch<COLUMNS>(OF_KEYS ? q : k, tile * COLUMNS, T);
        other_y(tile).template fetch<COLUMNS>(OF_KEYS ? d : v, tile * COLUMNS, T);
        cp_async_commit();
        fetched.fetch(lse, delta, tile * COLUMNS, T);
    };

    // ---- own rows and the first tile, and own statistics
    const int end_row = first_row + Tiles::rows < T ? first_row + Tiles::rows : T;
    const int begin = OF_KEYS ? first_row / COLUMNS : 0, end = ceil_div(OF_KEYS ? T : end_row, COLUMNS);
    own_x.template fetch<Tiles::rows>(OF_KEYS ? k : q, first_row, T);
    own_y.template fetch<Tiles::rows>(OF_KEYS ? v : d, first_row, T);
    cp_async_commit();
    fetch(begin);
    fetched.publish(column_statistics[begin % 2]);
    QueryStatistics row_statistics[R][2] = {};
    bool row_lse_is_huge = false;  // one of this lane's rows
    if constexpr (!OF_KEYS) {
        compute_delta<HS, R>(row_delta + warp_row, delta, d, HeadRows<const bf16>::of_out(out, shape), warp_token, T);
        row_lse_is_huge = load_statistics(row_statistics, lse, row_delta + warp_row, warp_token, T);
    }

    // ---- gradients, tile by tile
    cp_async_wait<1>();
    __syncthreads();
    const RowFragments<HS, R, !OF_KEYS> x(own_x.from(warp_row)), y(own_y.from(warp_row));
    float dx[R][HS / 8][4] = {}, dy[OF_KEYS ? R : 1][OF_KEYS ? HS / 8 : 1][4] = {};
    for (int tile = begin; tile < end; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and no warp still reads the previous one, which fetch overwrites
        if (tile + 1 < end) fetch(tile + 1);
        __syncwarp();  // lanes may have taken different branches; ldmatrix and mma need all of them
        for (int column = 0; column < COLUMNS; column += 8 * N) {
            const Masked masked = masked_part<OF_KEYS>(warp_token, 16 * R, tile * COLUMNS + column, 8 * N);
            if (masked.all) continue;
            add_gradients<HS, OF_KEYS, N>(
                dx, dy, x, y, other_x(tile).from(column), other_y(tile).from(column), warp_token,
                tile * COLUMNS + column, masked.some, shape.scale * LOG2_E,
                {column_statistics[tile % 2] + (OF_KEYS ? column : 0), row_statistics, row_lse_is_huge});
        }
        if (tile + 1 < end) fetched.publish(column_statistics[(tile + 1) % 2]);
    }
    store_gradients<HS, OF_KEYS>(dqkv, dx, dy, x.tile, y.tile, warp_token, shape);
}

// ---- Launches

template <int HS>
void launch_attention_forward_mma(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, Stream stream) {
    using Tiles = ForwardTiles<HS>;
    simt::launch(attention_forward_mma_kernel<HS>, attention_grid(B, T, NH, Tiles::queries), MMA_THREADS,
                 Tiles::shared_bytes, stream, out, lse, qkv, attention_shape(T, NH, HS));
}

template <int HS>
void launch_attention_backward_mma(bf16* dqkv, float* delta, const bf16* dout, const bf16* out, const float* lse,
                                   const bf16* qkv, int B, int T, int NH, Stream stream) {
    using Tiles = BackwardTiles<HS>;
    const dim3 grid = attention_grid(B, T, NH, Tiles::rows);
    const AttentionShape shape = attention_shape(T, NH, HS);
    simt::launch(attention_backward_mma_kernel<HS, false>, grid, MMA_THREADS, Tiles::shared_bytes, stream, dqkv, delta,
                 dout, out, lse, qkv, shape);
    simt::launch(attention_backward_mma_kernel<HS, true>, grid, MMA_THREADS, Tiles::shared_bytes, stream, dqkv, delta,
                 dout, out, lse, qkv, shape);
}
