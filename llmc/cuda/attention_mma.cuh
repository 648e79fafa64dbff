// attention_mma.cuh: causal attention in bf16 on tensor cores, for heads of 64 and 128 channels, in the way of
// FlashAttention-2 (Dao 2023).
//
// A block owns a tile of queries (forward, dq) or of keys (dk, dv), a warp 16 or 32 rows of it, and walks over the
// tiles of the other side that it sees, which cp.async brings one ahead. Scores and their gradients never leave the
// registers: what a product leaves there is what the next one takes as its operand. 32 rows per warp, because each
// ldmatrix (4 clocks of the shared memory's bandwidth) then feeds four mma instead of two. Rows of shared tiles are
// xored (SharedTile), so that no access has bank conflicts.
//
// Backward recomputes the scores in two kernels, one for dq and one for dk and dv: 7 products where 5 would do if dq
// were added up in memory over the tiles of keys. That takes atomics, whose order is not the same in every run, or a
// copy of dq in float per tile of keys, and at T = 1024 writing and summing these (4.5 copies on average) takes as long
// as the two products. The dq kernel also makes delta = sum of dout * out, which dk and dv need: dout is there anyway.
//
// Bound: 4 and 14 FLOP per score, channel and head (10 are needed); at T = 1024, HS = 64, memory (4 and 9 numbers of C
// per token) takes a third of the time or less. Numbers: products of bf16 summed in float; the weights and their
// gradients are rounded to bf16 once, as operands. Base-2 exponentials: one FMA makes scale * score - largest, and
// every weight of a row has the same factor of about 1 from its rounding, which the division by their sum removes.
#pragma once
#include <cmath>

#include "cuda/attention_heads.cuh"

constexpr int MMA_WARPS = 4, MMA_THREADS = MMA_WARPS * WARP_SIZE;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// The place of a lane's first number in the sums of mma_m16n8k16; the others are a column and 8 rows on.
__device__ inline int lane_row() { return int(threadIdx.x) % WARP_SIZE / 4; }
__device__ inline int lane_column() { return int(threadIdx.x) % 4 * 2; }

// Rows of HS channels in shared memory. Row r has its chunk c of 16 bytes at place c ^ (r % 8): the same chunk of eight
// rows, which ldmatrix reads at once, is in eight different groups of four banks.
template <int HS>
struct SharedTile {
    static constexpr int chunks = HS / 8;
    bf16* data;

    __device__ bf16* at(int row, int chunk) const { return data + row * HS + (chunk ^ (row & 7)) * 8; }
    __device__ SharedTile from(int row) const { return {data + row * HS}; }  // row: a multiple of 8

    // Starts to copy ROWS rows of a head, from token first on, by the whole block; past the last token they are zeros.
    template <int ROWS>
    __device__ void fetch(HeadRows<const bf16> head, int first, int T) const {
        const int chunk = int(threadIdx.x) % chunks;
        UNROLL_BY(1)
        for (int i = 0; i < ROWS * chunks / MMA_THREADS; i++) {
            const int row = int(threadIdx.x) / chunks + i * (MMA_THREADS / chunks);
            if (first + row < T)
                cp_async_16(at(row, chunk), head.at(first + row, chunk * 8));
            else
                store128(at(row, chunk), Vec<bf16>{});
        }
    }

    // What a lane names of two chunks of 16 rows. All loads have this one pattern, and row is a constant offset, so
    // that a lane keeps few addresses. row: a multiple of 8.
    __device__ const bf16* lane_at(int row, int chunk) const {
        const int lane = int(threadIdx.x) % WARP_SIZE;
        return at(lane % 16, chunk + lane / 16) + row * HS;
    }
    // A (16, 16): rows from row on, 16 channels from the chunk on.
    __device__ void load_a(uint32_t (&a)[4], int row, int chunk) const { ldmatrix_x4(a, lane_at(row, chunk)); }
    // Two B (16, 8): 16 channels from the chunk on, of the 8 rows from row on, and of the next 8.
    __device__ void load_b_of_rows(uint32_t (&b)[2][2], int row, int chunk) const {
        uint32_t r[4];
        ldmatrix_x4(r, lane_at(row, chunk));
        b[0][0] = r[0], b[0][1] = r[2], b[1][0] = r[1], b[1][1] = r[3];
    }
    // Two B (16, 8): 16 rows from row on, of the 8 channels of the chunk, and of the next 8.
    __device__ void load_b_of_channels(uint32_t (&b)[2][2], int row, int chunk) const {
        uint32_t r[4];
        ldmatrix_x4_trans(r, lane_at(row, chunk));
        b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
    }
};

// The 16 R rows of a warp as the left operand: read from the tile once, or each time where registers are short.
template <int HS, int R, bool KEEP>
struct OwnRows {
    SharedTile<HS> tile;
    uint32_t kept[KEEP ? HS / 16 : 1][R][4];

    // Once the tile has landed.
    __device__ __forceinline__ explicit OwnRows(SharedTile<HS> tile) : tile(tile) {
        if constexpr (KEEP) {
            UNROLL
            for (int k = 0; k < HS / 16; k++) UNROLL
            for (int i = 0; i < R; i++) tile.load_a(kept[k][i], i * 16, 2 * k);
        }
    }
    // Channels from 16 k on.
    __device__ __forceinline__ void get(uint32_t (&a)[R][4], int k) const {
        UNROLL
        for (int i = 0; i < R; i++) {
            if constexpr (KEEP) {
                UNROLL
                for (int r = 0; r < 4; r++) a[i][r] = kept[k][i][r];
            } else {
                tile.load_a(a[i], i * 16, 2 * k);
            }
        }
    }
};

// sums += own * tile^T: the warp's rows with 8 N rows of the tile, over all channels.
template <int HS, int R, int N, bool KEEP>
__device__ __forceinline__ void multiply_rows(float (&sums)[R][N][4], const OwnRows<HS, R, KEEP>& own,
                                              SharedTile<HS> tile) {
    UNROLL_BY(KEEP ? HS / 16 : 2)  // with more, the compiler loads so far ahead that registers spill
    for (int k = 0; k < HS / 16; k++) {
        uint32_t a[R][4];
        own.get(a, k);
        UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t b[2][2];
            tile.load_b_of_rows(b, n * 8, 2 * k);
            UNROLL
            for (int i = 0; i < R; i++) {
                mma_m16n8k16(sums[i][n], a[i], b[0]);
                mma_m16n8k16(sums[i][n + 1], a[i], b[1]);
            }
        }
    }
}

// The sums of a product as the left operand of the next one: what a lane holds of two column tiles is what it must hold
// of 16 rows.
template <int R, int N>
struct Rounded {
    uint32_t a[R][N / 2][4];

    Rounded() = default;
    __device__ __forceinline__ explicit Rounded(const float (&sums)[R][N][4]) {
        UNROLL
        for (int i = 0; i < R; i++) UNROLL
        for (int n = 0; n < N; n++) UNROLL
        for (int half = 0; half < 2; half++) set(i, half, n, sums[i][n][2 * half], sums[i][n][2 * half + 1]);
    }
    __device__ __forceinline__ void set(int i, int half, int n, float low, float high) {
        a[i][n / 2][n % 2 * 2 + half] = pack_bf16(low, high);
    }
    __device__ __forceinline__ float get(int i, int half, int n, int e) const {
        const uint32_t pair = a[i][n / 2][n % 2 * 2 + half];
        return __builtin_bit_cast(float, e ? pair & 0xffff0000u : pair << 16);
    }
};

// sums += weights * tile: weights for 8 N rows of the tile.
template <int HS, int R, int N>
__device__ __forceinline__ void multiply_channels(float (&sums)[R][HS / 8][4], const Rounded<R, N>& weights,
                                                  SharedTile<HS> tile) {
    UNROLL
    for (int k = 0; k < N / 2; k++) {
        UNROLL
        for (int n = 0; n < HS / 8; n += 2) {
            uint32_t b[2][2];
            tile.load_b_of_channels(b, k * 16, n);
            UNROLL
            for (int i = 0; i < R; i++) {
                mma_m16n8k16(sums[i][n], weights.a[i][k], b[0]);
                mma_m16n8k16(sums[i][n + 1], weights.a[i][k], b[1]);
            }
        }
    }
}

// body(i, half, n, e, row, column) for the sums[i][n][2 * half + e] of a lane, row and column as the warp counts them.
template <int R, int N, class Body>
__device__ __forceinline__ void for_each_sum(const Body& body) {
    UNROLL
    for (int i = 0; i < R; i++) UNROLL
    for (int half = 0; half < 2; half++) UNROLL
    for (int n = 0; n < N; n++) UNROLL
    for (int e = 0; e < 2; e++) body(i, half, n, e, i * 16 + half * 8 + lane_row(), n * 8 + lane_column() + e);
}

// Rows of a head = sums * factor, from token first on; by way of the warp's own rows of a tile that nobody reads any
// more, so that 16 bytes of a row are written at once.
template <int HS, int R>
__device__ __forceinline__ void store_rows(HeadRows<bf16> head, const float (&sums)[R][HS / 8][4],
                                           const float (&factor)[R][2], SharedTile<HS> own, int first, int T) {
    __syncwarp();
    UNROLL
    for (int i = 0; i < R; i++) UNROLL
    for (int half = 0; half < 2; half++) UNROLL
    for (int n = 0; n < HS / 8; n++) {
        const float f = factor[i][half], *x = &sums[i][n][2 * half];
        bf16* pair = own.at(i * 16 + half * 8 + lane_row(), n) + lane_column();
        *reinterpret_cast<uint32_t*>(pair) = pack_bf16(x[0] * f, x[1] * f);
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

// The softmax of a warp's rows as it grows over tiles of keys.
template <int R>
struct OnlineSoftmax {
    float largest[R][2], sum[R][2];  // of the scores; of the weights in this lane's columns

    __device__ OnlineSoftmax() {
        UNROLL
        for (int i = 0; i < R; i++) UNROLL
        for (int half = 0; half < 2; half++) largest[i][half] = -INFINITY, sum[i][half] = 0.0f;
    }

    // weights = 2^(scale2 * (score - largest)); out is brought to the new largest.
    template <int N, int CHANNEL_TILES>
    __device__ __forceinline__ void update(Rounded<R, N>& weights, float (&out)[R][CHANNEL_TILES][4],
                                           const float (&scores)[R][N][4], float scale2) {
        UNROLL
        for (int i = 0; i < R; i++) UNROLL
        for (int half = 0; half < 2; half++) {
            float m = largest[i][half];
            UNROLL
            for (int n = 0; n < N; n++) UNROLL
            for (int e = 0; e < 2; e++) m = fmaxf(m, scores[i][n][2 * half + e]);
            m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, 1));  // the four lanes of a row
            m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, 2));
            const float rescale = exp2_fast((largest[i][half] - m) * scale2);
            largest[i][half] = m;

            // The rounding of m * scale2 is a factor of all weights of the row. Where it could overflow, different
            // scores are so far apart that any positive scale gives the same weights: one that rounds nothing.
            const float factor = fabsf(m) * scale2 < 0x1p30f ? scale2 : 0.125f, offset = m * factor;
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
            for (int n = 0; n < CHANNEL_TILES; n++) UNROLL
            for (int e = 0; e < 2; e++) out[i][n][2 * half + e] *= rescale;
        }
    }
};

// Grid: a block per tile of queries, the last ones first: they see the most keys.
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
    const OwnRows<HS, R, true> own(queries.from(warp_row));
    OnlineSoftmax<R> softmax;
    float o[R][HS / 8][4] = {};
    const int end = first_query + Tiles::queries < T ? first_query + Tiles::queries : T;
    const int tiles = ceil_div(end, Tiles::keys);
    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there, and everyone has left the one before, which the next fetch overwrites
        if (tile + 1 < tiles) fetch(tile + 1);
        const int first_key = tile * Tiles::keys;
        if (first_key >= warp_query + 16 * R) continue;  // all in the future of this warp's queries

        float s[R][N][4] = {};
        multiply_rows(s, own, keys(tile % 2));
        if (first_key + Tiles::keys - 1 > warp_query)
            for_each_sum<R, N>([&](int i, int half, int n, int e, int row, int column) {
                if (first_key + column > warp_query + row) s[i][n][2 * half + e] = -INFINITY;
            });
        Rounded<R, N> weights;
        softmax.update(weights, o, s, shape.scale * LOG2_E);
        multiply_channels(o, weights, values(tile % 2));
    }

    float reciprocal[R][2];
    UNROLL
    for (int i = 0; i < R; i++) UNROLL
    for (int half = 0; half < 2; half++) {
        float sum = softmax.sum[i][half];
        sum += __shfl_xor_sync(FULL_MASK, sum, 1);
        sum += __shfl_xor_sync(FULL_MASK, sum, 2);
        reciprocal[i][half] = 1.0f / sum;
        const int t = warp_query + i * 16 + half * 8 + lane_row();
        if (lane_column() == 0 && t < T)
            lse[head_offset(shape) + t] = softmax.largest[i][half] * shape.scale + logf(sum);
    }
    store_rows(HeadRows<bf16>::of_out(out, shape), o, reciprocal, own.tile, warp_query, T);
}

// ---- Backward

template <int HS>
struct BackwardTiles {
    static constexpr int row_tiles = HS == 64 ? 2 : 1, rows = MMA_WARPS * row_tiles * 16;
    static constexpr int columns = HS == 64 ? 64 : 32;  // rows of the other side, of which a warp takes 32 at a time
    static constexpr int64_t shared_bytes = 2 * (rows + 2 * columns) * HS * int64_t(sizeof(bf16));
};

// What a query's row has of both kernels: its log-sum-exp in base 2, and delta. Past the last token the weights are 0.
struct QueryStatistics {
    float lse2, delta;

    // Whether what rounds lse2 and a score, by 2^-22 of lse2 together, is a factor of more than 2 in a weight.
    __device__ bool far() const { return fabsf(lse2) >= 0x1p22f; }
    // The difference of a score and lse2 if no rounding hides which keys have all the weight. So large, different
    // scores are far apart: the largest one's difference is 0, and that of another one as good as -infinity. Without
    // this the largest one's may be anything, and its weight 0 or infinity.
    __device__ float settled(float difference) const {
        return difference > fabsf(lse2) * -0x1p-22f ? 0.0f : difference;
    }
};

// delta of the warp's queries, from token first on, in memory and in row_delta.
template <int HS, int R>
__device__ __forceinline__ void sum_delta(float* row_delta, float* delta, HeadRows<const bf16> dout,
                                          HeadRows<const bf16> out, int first, int T) {
    constexpr int chunks = HS / 8, rows_at_once = WARP_SIZE / chunks;
    const int lane = int(threadIdx.x) % WARP_SIZE, chunk = lane % chunks;
    UNROLL
    for (int i = 0; i < 16 * R / rows_at_once; i++) {
        const int row = i * rows_at_once + lane / chunks, t = first + row;
        float sum = 0.0f;
        if (t < T) {
            const auto x = load128(dout.at(t, chunk * 8)), y = load128cs(out.at(t, chunk * 8));
            for (int c = 0; c < x.size; c++) sum += float(x[c]) * float(y[c]);
        }
        for (int distance = chunks / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, distance);
        if (chunk == 0) {
            row_delta[row] = sum;
            if (t < T) delta[t] = sum;
        }
    }
    __syncwarp();
}

// With p = 2^(scale2 * score - lse2), and for each query and key that it sees
//   dscore = p (dout.v - delta)        dq += scale dscore k        dk += scale dscore q        dv += p dout
// a block owns x = q, y = dout and sums dx = dq over tiles of x = k, y = v; or, OF_KEYS, owns x = k, y = v and sums
// dx = dk, dy = dv over tiles of x = q, y = dout. Grid: a block per tile, the last queries or the first keys first.
// delta is written by the former and read by the latter.
template <int HS, bool OF_KEYS>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_backward_mma_kernel(bf16* dqkv, float* delta, const bf16* dout, const bf16* out, const float* lse,
                                  const bf16* qkv, AttentionShape shape) {
    using Tiles = BackwardTiles<HS>;
    constexpr int R = Tiles::row_tiles, COLUMNS = Tiles::columns, N = OF_KEYS ? 4 : 2;
    const int T = shape.T, first_row = (OF_KEYS ? block_tile() : block_tile_from_end()) * Tiles::rows;
    const int warp = int(threadIdx.x) / WARP_SIZE, warp_row = warp * 16 * R, warp_token = first_row + warp_row;
    const auto q = HeadRows<const bf16>::of_qkv(qkv, shape, 0);
    const auto k = HeadRows<const bf16>::of_qkv(qkv, shape, 1);
    const auto v = HeadRows<const bf16>::of_qkv(qkv, shape, 2);
    const auto d = HeadRows<const bf16>::of_out(dout, shape);
    lse += head_offset(shape), delta += head_offset(shape);

    const SharedTile<HS> own_x{simt::dynamic_shared<bf16>()}, own_y = own_x.from(Tiles::rows);
    const auto other_x = [&](int stage) { return own_y.from(Tiles::rows + 2 * stage * COLUMNS); };
    const auto other_y = [&](int stage) { return other_x(stage).from(COLUMNS); };
    SHARED(column_statistics, QueryStatistics[2][OF_KEYS ? COLUMNS : 1]);
    SHARED(row_delta, float[OF_KEYS ? 1 : Tiles::rows]);
    QueryStatistics fetched = {};  // a thread brings those of a query, by way of registers: no wait at the fetch
    const auto fetch = [&](int tile) {
        other_x(tile % 2).template fetch<COLUMNS>(OF_KEYS ? q : k, tile * COLUMNS, T);
        other_y(tile % 2).template fetch<COLUMNS>(OF_KEYS ? d : v, tile * COLUMNS, T);
        cp_async_commit();
        const int t = tile * COLUMNS + int(threadIdx.x);
        if (OF_KEYS && threadIdx.x < COLUMNS)
            fetched = t < T ? QueryStatistics{lse[t] * LOG2_E, delta[t]} : QueryStatistics{INFINITY, 0.0f};
    };
    const auto publish = [&](int tile) {
        if (OF_KEYS && threadIdx.x < COLUMNS) column_statistics[tile % 2][threadIdx.x] = fetched;
    };
    const auto any_far = [&](int stage, int column) {  // of the 32 queries that a warp takes at a time
        static_assert(!OF_KEYS || 8 * N == WARP_SIZE);
        return __any_sync(FULL_MASK, column_statistics[stage][column + int(threadIdx.x) % WARP_SIZE].far());
    };

    const int end_row = first_row + Tiles::rows < T ? first_row + Tiles::rows : T;
    const int begin = OF_KEYS ? first_row / COLUMNS : 0, end = ceil_div(OF_KEYS ? T : end_row, COLUMNS);
    own_x.template fetch<Tiles::rows>(OF_KEYS ? k : q, first_row, T);
    own_y.template fetch<Tiles::rows>(OF_KEYS ? v : d, first_row, T);
    cp_async_commit();
    fetch(begin);
    publish(begin);

    QueryStatistics row_statistics[R][2] = {};
    bool rows_far = false;  // any of this lane's
    if constexpr (!OF_KEYS) {
        sum_delta<HS, R>(row_delta + warp_row, delta, d, HeadRows<const bf16>::of_out(out, shape), warp_token, T);
        UNROLL
        for (int i = 0; i < R; i++) UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = i * 16 + half * 8 + lane_row(), t = warp_token + row;
            row_statistics[i][half] = {t < T ? lse[t] * LOG2_E : INFINITY, row_delta[warp_row + row]};
            rows_far = rows_far || row_statistics[i][half].far();
        }
    }

    cp_async_wait<1>();
    __syncthreads();
    const OwnRows<HS, R, !OF_KEYS> x(own_x.from(warp_row)), y(own_y.from(warp_row));
    float dx[R][HS / 8][4] = {}, dy[OF_KEYS ? R : 1][OF_KEYS ? HS / 8 : 1][4] = {};
    const float scale2 = shape.scale * LOG2_E;
    for (int tile = begin; tile < end; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there, and everyone has left the one before, which the next fetch overwrites
        if (tile + 1 < end) fetch(tile + 1);
        for (int column = 0; column < COLUMNS; column += 8 * N) {
            const int other_token = tile * COLUMNS + column;
            const int first_query = OF_KEYS ? other_token : warp_token, queries = OF_KEYS ? 8 * N : 16 * R;
            const int first_key = OF_KEYS ? warp_token : other_token, keys = OF_KEYS ? 16 * R : 8 * N;
            if (first_key >= first_query + queries) continue;  // all in the future
            const bool masked = first_key + keys - 1 > first_query;
            const SharedTile<HS> chunk_x = other_x(tile % 2).from(column), chunk_y = other_y(tile % 2).from(column);
            const auto statistics = [&](int i, int half, int c) {
                return OF_KEYS ? column_statistics[tile % 2][column + c] : row_statistics[i][half];
            };

            float p[R][N][4] = {};
            multiply_rows(p, x, chunk_x);
            for_each_sum<R, N>([&](int i, int half, int n, int e, int, int c) {
                float& weight = p[i][n][2 * half + e];
                weight = fmaf(weight, scale2, -statistics(i, half, c).lse2);
            });
            if (OF_KEYS ? any_far(tile % 2, column) : rows_far)
                for_each_sum<R, N>([&](int i, int half, int n, int e, int, int c) {
                    float& weight = p[i][n][2 * half + e];
                    weight = statistics(i, half, c).settled(weight);
                });
            for_each_sum<R, N>([&](int i, int half, int n, int e, int, int) {
                float& weight = p[i][n][2 * half + e];
                weight = exp2_fast(weight);
            });
            if (masked)
                for_each_sum<R, N>([&](int i, int half, int n, int e, int r, int c) {
                    if (OF_KEYS ? warp_token + r > other_token + c : other_token + c > warp_token + r)
                        p[i][n][2 * half + e] = 0.0f;
                });
            const Rounded weights(p);
            if constexpr (OF_KEYS) multiply_channels(dy, weights, chunk_y);

            float dscore[R][N][4];
            for_each_sum<R, N>([&](int i, int half, int n, int e, int, int c) {
                dscore[i][n][2 * half + e] = -statistics(i, half, c).delta;
            });
            multiply_rows(dscore, y, chunk_y);
            for_each_sum<R, N>([&](int i, int half, int n, int e, int, int) {
                dscore[i][n][2 * half + e] *= OF_KEYS ? weights.get(i, half, n, e) : p[i][n][2 * half + e];
            });
            multiply_channels(dx, Rounded(dscore), chunk_x);
        }
        if (tile + 1 < end) publish(tile + 1);
    }

    float scales[R][2], ones[R][2];
    UNROLL
    for (int i = 0; i < R; i++) scales[i][0] = scales[i][1] = shape.scale, ones[i][0] = ones[i][1] = 1.0f;
    const auto rows = [&](int part) { return HeadRows<bf16>::of_qkv(dqkv, shape, part); };
    store_rows(rows(OF_KEYS ? 1 : 0), dx, scales, x.tile, warp_token, T);
    if constexpr (OF_KEYS) store_rows(rows(2), dy, ones, y.tile, warp_token, T);
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
