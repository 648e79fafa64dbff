// attention_plain.cuh: causal attention in float arithmetic: for fp32, and for bf16 heads that attention_mma.cuh has no
// kernel for.
//
// A block of 16 x 16 threads owns a tile of queries (forward, dq) or of keys (dk, dv) and walks over the tiles of the
// other side that it sees; all are floats in shared memory. A thread has every 16th row of its tile and every 16th
// score of such a row, or four channels of every 64. Nothing of size T x T is stored, sums have a fixed order, and
// backward recomputes the scores in its two kernels, as attention_mma.cuh does and says why.
//
// Bound: the FMA units: 4 FLOP per score, channel and head forward, 14 backward, with two 16-byte reads of shared
// memory for 8 of them.
#pragma once
#include <cmath>

#include "cuda/attention_heads.cuh"

constexpr int PLAIN_SIDE = 16, PLAIN_THREADS = PLAIN_SIDE * PLAIN_SIDE;

__device__ inline int plain_row() { return int(threadIdx.x) / PLAIN_SIDE; }
__device__ inline int plain_column() { return int(threadIdx.x) % PLAIN_SIDE; }

// Heads of up to 64 GROUPS channels; a thread has R rows, so that backward's four tiles fit the 99 KB that every GPU
// has.
template <int GROUPS>
struct PlainTiles {
    static constexpr int R = GROUPS == 1 ? 4 : GROUPS == 2 ? 2 : 1, rows = PLAIN_SIDE * R;
    static constexpr int stride = 64 * GROUPS + 4;           // of a row: 8 rows in a row are in different banks
    static constexpr int weight_stride = rows + PLAIN_SIDE;  // two rows in a row are in different banks
    static constexpr int tile = rows * stride, weights = rows * weight_stride;  // floats
    static constexpr int64_t forward_bytes = (3 * tile + weights) * int64_t(sizeof(float));
    static constexpr int64_t backward_bytes = (4 * tile + weights) * int64_t(sizeof(float));
    static_assert(backward_bytes + 2 * rows * 4 <= 101376);
};

// Copies rows of a head, from token first on; what is past the last token or channel becomes zero.
template <class floatX, int GROUPS>
__device__ void load_rows(float* tile, HeadRows<const floatX> head, int first, const AttentionShape& s) {
    using Tiles = PlainTiles<GROUPS>;
    constexpr int size = Vec<floatX>::size, chunks = 64 * GROUPS / size;
    UNROLL_BY(2)
    for (int i = int(threadIdx.x); i < Tiles::rows * chunks; i += PLAIN_THREADS) {
        const int row = i / chunks, channel = i % chunks * size;
        Vec<floatX> x = {};
        if (first + row < s.T && channel < s.HS) x = load128(head.at(first + row, channel));
        for (int c = 0; c < size; c++) tile[row * Tiles::stride + channel + c] = float(x[c]);
    }
}

// acc[i][j] = row i of a thread's rows in a, times row j of its columns' in b.
template <int GROUPS, int R>
__device__ void multiply_plain_rows(float (&acc)[R][R], const float* a, const float* b) {
    constexpr int stride = PlainTiles<GROUPS>::stride;
    UNROLL
    for (int i = 0; i < R; i++) UNROLL
    for (int j = 0; j < R; j++) acc[i][j] = 0.0f;
    UNROLL_BY(4 / R)  // more than 64 FMAs at once take registers that spill
    for (int c = 0; c < 64 * GROUPS; c += 4) {
        Vec<float> x[R], y[R];
        UNROLL
        for (int i = 0; i < R; i++) {
            x[i] = load128(a + (plain_row() + i * PLAIN_SIDE) * stride + c);
            y[i] = load128(b + (plain_column() + i * PLAIN_SIDE) * stride + c);
        }
        UNROLL
        for (int i = 0; i < R; i++) UNROLL
        for (int j = 0; j < R; j++) UNROLL
        for (int e = 0; e < 4; e++) acc[i][j] += x[i][e] * y[j][e];
    }
}

// acc += weights * tile, for four channels of every 64 from 4 * plain_column() on.
template <int GROUPS, int R>
__device__ void multiply_plain_channels(float (&acc)[R][GROUPS][4], const float* weights, const float* tile) {
    using Tiles = PlainTiles<GROUPS>;
    for (int k = 0; k < Tiles::rows; k++) UNROLL
    for (int g = 0; g < GROUPS; g++) {
        const auto x = load128(tile + k * Tiles::stride + 64 * g + 4 * plain_column());
        UNROLL
        for (int i = 0; i < R; i++) {
            const float w = weights[(plain_row() + i * PLAIN_SIDE) * Tiles::weight_stride + k];
            UNROLL
            for (int e = 0; e < 4; e++) acc[i][g][e] += w * x[e];
        }
    }
}

// Keeps a thread's weights for multiply_plain_channels, which all threads call after a barrier.
template <int GROUPS, int R>
__device__ void store_weights(float* weights, const float (&acc)[R][R]) {
    UNROLL
    for (int i = 0; i < R; i++) UNROLL
    for (int j = 0; j < R; j++)
        weights[(plain_row() + i * PLAIN_SIDE) * PlainTiles<GROUPS>::weight_stride + plain_column() + j * PLAIN_SIDE] =
            acc[i][j];
}

// Rows of a head = acc * factor, from token first on.
template <class floatX, int GROUPS, int R>
__device__ void store_plain_rows(HeadRows<floatX> head, const float (&acc)[R][GROUPS][4], const float (&factor)[R],
                                 int first, const AttentionShape& s) {
    UNROLL
    for (int i = 0; i < R; i++) UNROLL
    for (int g = 0; g < GROUPS; g++) {
        const int t = first + plain_row() + i * PLAIN_SIDE, channel = 64 * g + 4 * plain_column();
        if (t >= s.T || channel >= s.HS) continue;
        UNROLL
        for (int e = 0; e < 4; e++) *head.at(t, channel + e) = floatX(acc[i][g][e] * factor[i]);
    }
}

// Over the 16 threads of a row.
__device__ inline float plain_row_max(float x) {
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, distance));
    return x;
}
__device__ inline float plain_row_sum(float x) {
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_MASK, x, distance);
    return x;
}

// Grid: a block per tile of queries, the last ones first.
template <class floatX, int GROUPS>
__global__ void __launch_bounds__(PLAIN_THREADS, 2)
    attention_forward_plain_kernel(floatX* out, float* lse, const floatX* qkv, AttentionShape s) {
    using Tiles = PlainTiles<GROUPS>;
    constexpr int R = Tiles::R;
    const int first_query = block_tile_from_end() * Tiles::rows;
    float* q = simt::dynamic_shared<float>();
    float *k = q + Tiles::tile, *v = k + Tiles::tile, *weights = v + Tiles::tile;
    const auto rows = [&](int part) { return HeadRows<const floatX>::of_qkv(qkv, s, part); };
    load_rows<floatX, GROUPS>(q, rows(0), first_query, s);

    float o[R][GROUPS][4] = {}, largest[R], sum[R];
    UNROLL
    for (int i = 0; i < R; i++) largest[i] = -INFINITY, sum[i] = 0.0f;
    for (int first_key = 0; first_key <= first_query; first_key += Tiles::rows) {
        __syncthreads();  // everyone has left the keys and values before
        load_rows<floatX, GROUPS>(k, rows(1), first_key, s);
        load_rows<floatX, GROUPS>(v, rows(2), first_key, s);
        __syncthreads();
        float x[R][R];
        multiply_plain_rows<GROUPS, R>(x, q, k);
        UNROLL
        for (int i = 0; i < R; i++) {
            float m = largest[i];
            UNROLL
            for (int j = 0; j < R; j++) {
                const bool future =
                    first_key + plain_column() + j * PLAIN_SIDE > first_query + plain_row() + i * PLAIN_SIDE;
                x[i][j] = future ? -INFINITY : rounded_product(x[i][j], s.scale);
                m = fmaxf(m, x[i][j]);
            }
            m = plain_row_max(m);
            const float rescale = expf(largest[i] - m);
            largest[i] = m;
            sum[i] *= rescale;
            UNROLL
            for (int j = 0; j < R; j++) sum[i] += x[i][j] = expf(x[i][j] - m);
            UNROLL
            for (int g = 0; g < GROUPS; g++) UNROLL
            for (int e = 0; e < 4; e++) o[i][g][e] *= rescale;
        }
        store_weights<GROUPS, R>(weights, x);
        __syncwarp();  // a row's weights come from 16 lanes of one warp, and go to the same
        multiply_plain_channels<GROUPS, R>(o, weights, v);
    }

    float reciprocal[R];
    UNROLL
    for (int i = 0; i < R; i++) {
        const float total = plain_row_sum(sum[i]);
        const int t = first_query + plain_row() + i * PLAIN_SIDE;
        reciprocal[i] = 1.0f / total;
        if (plain_column() == 0 && t < s.T) lse[head_offset(s) + t] = largest[i] + logf(total);
    }
    store_plain_rows<floatX, GROUPS, R>(HeadRows<floatX>::of_out(out, s), o, reciprocal, first_query, s);
}

// delta = sum of dout * out for each query, (B, NH, T). Grid: a warp per query and head.
template <class floatX>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_delta_kernel(float* delta, const floatX* dout, const floatX* out, AttentionShape s) {
    using V = Vec<floatX>;
    const int t = block_tile() * (PLAIN_THREADS / WARP_SIZE) + int(threadIdx.x) / WARP_SIZE;
    if (t >= s.T) return;  // whole warps leave
    const int lane = int(threadIdx.x) % WARP_SIZE;
    float sum = 0.0f;
    for (int c = lane * V::size; c < s.HS; c += WARP_SIZE * V::size) {
        const V x = load128(HeadRows<const floatX>::of_out(dout, s).at(t, c));
        const V y = load128cs(HeadRows<const floatX>::of_out(out, s).at(t, c));
        for (int e = 0; e < V::size; e++) sum += float(x[e]) * float(y[e]);
    }
    sum = warp_sum(sum);
    if (lane == 0) delta[head_offset(s) + t] = sum;
}

// As attention_backward_mma_kernel: a block owns x = q, y = dout and makes dx = dq from tiles of x = k, y = v; or,
// OF_KEYS, owns x = k, y = v and makes dx = dk, dy = dv from tiles of x = q, y = dout.
template <class floatX, int GROUPS, bool OF_KEYS>
__global__ void __launch_bounds__(PLAIN_THREADS, 2)
    attention_backward_plain_kernel(floatX* dqkv, const float* delta, const floatX* dout, const float* lse,
                                    const floatX* qkv, AttentionShape s) {
    using Tiles = PlainTiles<GROUPS>;
    constexpr int R = Tiles::R;
    const int first_row = (OF_KEYS ? block_tile() : block_tile_from_end()) * Tiles::rows;
    float* own_x = simt::dynamic_shared<float>();
    float *own_y = own_x + Tiles::tile, *x = own_y + Tiles::tile, *y = x + Tiles::tile, *weights = y + Tiles::tile;
    SHARED(query_lse, float[Tiles::rows]);
    SHARED(query_delta, float[Tiles::rows]);
    lse += head_offset(s), delta += head_offset(s);
    const auto load_queries = [&](float* q, float* d, int first) {
        load_rows<floatX, GROUPS>(q, HeadRows<const floatX>::of_qkv(qkv, s, 0), first, s);
        load_rows<floatX, GROUPS>(d, HeadRows<const floatX>::of_out(dout, s), first, s);
        const int row = int(threadIdx.x), t = first + row;
        if (row < Tiles::rows) {
            query_lse[row] = t < s.T ? lse[t] : INFINITY;  // past the last token the weights are 0
            query_delta[row] = t < s.T ? delta[t] : 0.0f;
        }
    };
    const auto load_keys = [&](float* k, float* v, int first) {
        load_rows<floatX, GROUPS>(k, HeadRows<const floatX>::of_qkv(qkv, s, 1), first, s);
        load_rows<floatX, GROUPS>(v, HeadRows<const floatX>::of_qkv(qkv, s, 2), first, s);
    };
    OF_KEYS ? load_keys(own_x, own_y, first_row) : load_queries(own_x, own_y, first_row);

    float dx[R][GROUPS][4] = {}, dy[R][GROUPS][4] = {};
    const int begin = OF_KEYS ? first_row : 0, end = OF_KEYS ? s.T : first_row + 1;
    for (int first = begin; first < end; first += Tiles::rows) {
        __syncthreads();  // everyone has left the tiles before
        OF_KEYS ? load_queries(x, y, first) : load_keys(x, y, first);
        __syncthreads();
        float p[R][R], dscore[R][R];
        multiply_plain_rows<GROUPS, R>(p, own_x, x);
        multiply_plain_rows<GROUPS, R>(dscore, own_y, y);
        UNROLL
        for (int i = 0; i < R; i++) UNROLL
        for (int j = 0; j < R; j++) {
            const int row = plain_row() + i * PLAIN_SIDE, column = plain_column() + j * PLAIN_SIDE;
            const int query = OF_KEYS ? column : row;
            const bool future = OF_KEYS ? first_row + row > first + column : first + column > first_row + row;
            p[i][j] = future ? 0.0f : expf(rounded_product(p[i][j], s.scale) - query_lse[query]);
            dscore[i][j] = p[i][j] * (dscore[i][j] - query_delta[query]);
        }
        if constexpr (OF_KEYS) {
            store_weights<GROUPS, R>(weights, p);
            __syncwarp();  // a row's weights come from 16 lanes of one warp, and go to the same
            multiply_plain_channels<GROUPS, R>(dy, weights, y);
            __syncwarp();
        }
        store_weights<GROUPS, R>(weights, dscore);
        __syncwarp();
        multiply_plain_channels<GROUPS, R>(dx, weights, x);
    }

    float scales[R], ones[R];
    UNROLL
    for (int i = 0; i < R; i++) scales[i] = s.scale, ones[i] = 1.0f;
    const auto rows = [&](int part) { return HeadRows<floatX>::of_qkv(dqkv, s, part); };
    store_plain_rows<floatX, GROUPS, R>(rows(OF_KEYS ? 1 : 0), dx, scales, first_row, s);
    if constexpr (OF_KEYS) store_plain_rows<floatX, GROUPS, R>(rows(2), dy, ones, first_row, s);
}

// ---- Launches

template <class floatX>
void launch_attention_forward_plain(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS,
                                    Stream stream) {
    with_constant<4>(ceil_div(HS, 64), [&](auto groups) {
        using Tiles = PlainTiles<groups>;
        simt::launch(attention_forward_plain_kernel<floatX, groups>, attention_grid(B, T, NH, Tiles::rows),
                     PLAIN_THREADS, Tiles::forward_bytes, stream, out, lse, qkv, attention_shape(T, NH, HS));
    });
}

template <class floatX>
void launch_attention_backward_plain(floatX* dqkv, float* delta, const floatX* dout, const floatX* out,
                                     const float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream stream) {
    const AttentionShape shape = attention_shape(T, NH, HS);
    simt::launch(attention_delta_kernel<floatX>, attention_grid(B, T, NH, PLAIN_THREADS / WARP_SIZE), PLAIN_THREADS, 0,
                 stream, delta, dout, out, shape);
    with_constant<4>(ceil_div(HS, 64), [&](auto groups) {
        using Tiles = PlainTiles<groups>;
        const dim3 grid = attention_grid(B, T, NH, Tiles::rows);
        simt::launch(attention_backward_plain_kernel<floatX, groups, false>, grid, PLAIN_THREADS, Tiles::backward_bytes,
                     stream, dqkv, delta, dout, lse, qkv, shape);
        simt::launch(attention_backward_plain_kernel<floatX, groups, true>, grid, PLAIN_THREADS, Tiles::backward_bytes,
                     stream, dqkv, delta, dout, lse, qkv, shape);
    });
}
