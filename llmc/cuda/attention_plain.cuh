// attention_plain.cuh: causal attention in float arithmetic on the FMA units, for fp32, and for bf16 head sizes that
// attention_mma.cuh does not support.
//
// A block of 16 x 16 threads owns a tile of queries (forward, dq) or of keys (dk, dv), and loops over the tiles of the
// other operand that the causal mask leaves. All tiles are floats in shared memory. A thread owns every 16th row of its
// tile, and in these rows every 16th score, or four of every 64 channels. No (T, T) matrix is stored, sums have a fixed
// order, and backward recomputes the scores in two kernels, as attention_mma.cuh does; the reasons are given there.
//
// Bound: the FMA units, with 4 FLOP (forward) and 14 FLOP (backward) per score, channel and head, and two 16-byte
// reads of shared memory for every 8 of them.
#pragma once
#include <cmath>

#include "cuda/attention_heads.cuh"

constexpr int PLAIN_SIDE = 16, PLAIN_THREADS = PLAIN_SIDE * PLAIN_SIDE;

__device__ inline int plain_row() { return int(threadIdx.x) / PLAIN_SIDE; }
__device__ inline int plain_column() { return int(threadIdx.x) % PLAIN_SIDE; }

// Tile sizes for heads of up to 64*GROUPS channels. R: rows per thread, chosen so that backward's four tiles fit into
// the 99 KB of shared memory that every GPU has.
template <int GROUPS>
struct PlainTiles {
    static constexpr int R = GROUPS == 1 ? 4 : GROUPS == 2 ? 2 : 1, rows = PLAIN_SIDE * R;
    static constexpr int stride = 64 * GROUPS + 4;           // 8 consecutive rows are in different banks
    static constexpr int weight_stride = rows + PLAIN_SIDE;  // 2 consecutive rows are in different banks
    static constexpr int tile = rows * stride, weights = rows * weight_stride;  // sizes in floats
    static constexpr int64_t forward_bytes = (3 * tile + weights) * int64_t(sizeof(float));
    static constexpr int64_t backward_bytes = (4 * tile + weights) * int64_t(sizeof(float));
    static_assert(backward_bytes + 2 * rows * 4 <= 101376);
};

// Copies rows of a head to shared memory, beginning at token `first`. Elements past the last token or channel become
// zero.
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

// acc (R, R) = this thread's scores of a * b^T: acc[i][j] = dot product of the thread's i-th row of a and of the j-th
// row of b that belongs to its columns.
template <int GROUPS, int R>
__device__ void plain_matmul_nt(float (&acc)[R][R], const float* a, const float* b) {
    constexpr int stride = PlainTiles<GROUPS>::stride;
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int j = 0; j < R; j++) acc[i][j] = 0.0f;
    }
    UNROLL_BY(4 / R)  // with more than 64 FMAs per iteration, registers spill
    for (int c = 0; c < 64 * GROUPS; c += 4) {
        Vec<float> x[R], y[R];
        UNROLL
        for (int i = 0; i < R; i++) {
            x[i] = load128(a + (plain_row() + i * PLAIN_SIDE) * stride + c);
            y[i] = load128(b + (plain_column() + i * PLAIN_SIDE) * stride + c);
        }
        UNROLL
        for (int i = 0; i < R; i++) {
            UNROLL
            for (int j = 0; j < R; j++) {
                UNROLL
                for (int e = 0; e < 4; e++) acc[i][j] += x[i][e] * y[j][e];
            }
        }
    }
}

// acc (R, GROUPS, 4) += this thread's elements of weights * tile: R rows, and of every 64 channels the four beginning
// at 4 * plain_column().
template <int GROUPS, int R>
__device__ void plain_matmul_nn(float (&acc)[R][GROUPS][4], const float* weights, const float* tile) {
    using Tiles = PlainTiles<GROUPS>;
    for (int k = 0; k < Tiles::rows; k++) {
        UNROLL
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
}

// Stores this thread's weights to shared memory, for plain_matmul_nn. Call __syncthreads before plain_matmul_nn reads
// them.
template <int GROUPS, int R>
__device__ void store_weights(float* weights, const float (&acc)[R][R]) {
    constexpr int stride = PlainTiles<GROUPS>::weight_stride;
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int j = 0; j < R; j++)
            weights[(plain_row() + i * PLAIN_SIDE) * stride + plain_column() + j * PLAIN_SIDE] = acc[i][j];
    }
}

// Stores acc * factor to the rows of a head, beginning at token `first`.
template <class floatX, int GROUPS, int R>
__device__ void store_plain_rows(HeadRows<floatX> head, const float (&acc)[R][GROUPS][4], const float (&factor)[R],
                                 int first, const AttentionShape& s) {
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int g = 0; g < GROUPS; g++) {
            const int t = first + plain_row() + i * PLAIN_SIDE, channel = 64 * g + 4 * plain_column();
            if (t >= s.T || channel >= s.HS) continue;
            UNROLL
            for (int e = 0; e < 4; e++) *head.at(t, channel + e) = floatX(acc[i][g][e] * factor[i]);
        }
    }
}

// Maximum and sum over the 16 threads that own a row.
__device__ inline float plain_row_max(float x) {
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, distance));
    return x;
}
__device__ inline float plain_row_sum(float x) {
    for (int distance = PLAIN_SIDE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_MASK, x, distance);
    return x;
}

// Online softmax over one more tile of keys: x becomes exp(score - row_max) from the dot products of queries and keys.
// Where row_max rises, sum (only over this thread's columns) and o are rescaled to the new maximum.
template <int GROUPS, int R>
__device__ void update_softmax(float (&x)[R][R], float (&o)[R][GROUPS][4], float (&row_max)[R], float (&sum)[R],
                               int first_query, int first_key, float scale) {
    UNROLL
    for (int i = 0; i < R; i++) {
        float new_max = row_max[i];
        UNROLL
        for (int j = 0; j < R; j++) {
            const bool future =
                first_key + plain_column() + j * PLAIN_SIDE > first_query + plain_row() + i * PLAIN_SIDE;
            x[i][j] = future ? -INFINITY : mul_rn(x[i][j], scale);
            new_max = fmaxf(new_max, x[i][j]);
        }
        new_max = plain_row_max(new_max);
        const float rescale = expf(row_max[i] - new_max);
        row_max[i] = new_max;
        sum[i] *= rescale;
        UNROLL
        for (int j = 0; j < R; j++) {
            x[i][j] = expf(x[i][j] - new_max);
            sum[i] += x[i][j];
        }
        UNROLL
        for (int g = 0; g < GROUPS; g++) {
            UNROLL
            for (int e = 0; e < 4; e++) o[i][g][e] *= rescale;
        }
    }
}

// out (B, T, C), lse (B, NH, T) from qkv (B, T, 3, NH, HS).
//
// Grid: attention_grid, one block of 256 threads per tile of PlainTiles::rows queries, the last tile first because it
// attends to the most keys.
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

    float o[R][GROUPS][4] = {}, row_max[R], sum[R];
    UNROLL
    for (int i = 0; i < R; i++) {
        row_max[i] = -INFINITY;
        sum[i] = 0.0f;
    }
    for (int first_key = 0; first_key <= first_query; first_key += Tiles::rows) {
        __syncthreads();  // no thread still reads the previous keys and values
        load_rows<floatX, GROUPS>(k, rows(1), first_key, s);
        load_rows<floatX, GROUPS>(v, rows(2), first_key, s);
        __syncthreads();
        float x[R][R];
        plain_matmul_nt<GROUPS, R>(x, q, k);
        update_softmax<GROUPS, R>(x, o, row_max, sum, first_query, first_key, s.scale);
        store_weights<GROUPS, R>(weights, x);
        __syncwarp();  // not __syncthreads: only the 16 lanes that write a row's weights read them
        plain_matmul_nn<GROUPS, R>(o, weights, v);
    }

    float reciprocal[R];
    UNROLL
    for (int i = 0; i < R; i++) {
        const float total = plain_row_sum(sum[i]);
        const int t = first_query + plain_row() + i * PLAIN_SIDE;
        reciprocal[i] = 1.0f / total;
        if (plain_column() == 0 && t < s.T) lse[head_offset(s) + t] = row_max[i] + logf(total);
    }
    store_plain_rows<floatX, GROUPS, R>(HeadRows<floatX>::of_out(out, s), o, reciprocal, first_query, s);
}

// delta (B, NH, T) = rowsum(dout * out) over a head's channels; dout and out (B, T, C).
//
// Grid: attention_grid with tiles of 8 queries; a warp owns one query of one head.
template <class floatX>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_delta_kernel(float* delta, const floatX* dout, const floatX* out, AttentionShape s) {
    using V = Vec<floatX>;
    const int t = block_tile() * (PLAIN_THREADS / WARP_SIZE) + int(threadIdx.x) / WARP_SIZE;
    if (t >= s.T) return;  // the same for all lanes of a warp
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

// Softmax and its gradient in one tile. On entry p is the dot products of queries and keys, dscore that of dout and
// values; on return p is the softmax's weights, dscore the gradient of the scaled scores. With OF_KEYS the tile's rows
// are keys and its columns queries, otherwise the other way around.
template <bool OF_KEYS, int R>
__device__ void softmax_backward(float (&p)[R][R], float (&dscore)[R][R], const float* query_lse,
                                 const float* query_delta, int first_row, int first_column, float scale) {
    UNROLL
    for (int i = 0; i < R; i++) {
        UNROLL
        for (int j = 0; j < R; j++) {
            const int row = plain_row() + i * PLAIN_SIDE, column = plain_column() + j * PLAIN_SIDE;
            const int query = OF_KEYS ? column : row;
            const bool future =
                OF_KEYS ? first_row + row > first_column + column : first_column + column > first_row + row;
            p[i][j] = future ? 0.0f : expf(mul_rn(p[i][j], scale) - query_lse[query]);
            dscore[i][j] = p[i][j] * (dscore[i][j] - query_delta[query]);
        }
    }
}

// dqkv from qkv, dout, lse and delta; formulas and shapes are those of attention_backward_mma_kernel.
// OF_KEYS = false: a block owns x = q, y = dout, and accumulates dx = dq over tiles of x = k, y = v.
// OF_KEYS = true: a block owns x = k, y = v, and accumulates dx = dk, dy = dv over tiles of x = q, y = dout.
//
// Grid: attention_grid, one block of 256 threads per tile of PlainTiles::rows rows; the last queries, or the first
// keys, come first, because they have the most work.
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
    lse += head_offset(s);
    delta += head_offset(s);
    const auto load_queries = [&](float* q, float* d, int first) {
        load_rows<floatX, GROUPS>(q, HeadRows<const floatX>::of_qkv(qkv, s, 0), first, s);
        load_rows<floatX, GROUPS>(d, HeadRows<const floatX>::of_out(dout, s), first, s);
        const int row = int(threadIdx.x), t = first + row;
        if (row < Tiles::rows) {
            query_lse[row] = t < s.T ? lse[t] : INFINITY;  // so that weights past the last token are 0
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
        __syncthreads();  // no thread still reads the previous tiles
        OF_KEYS ? load_queries(x, y, first) : load_keys(x, y, first);
        __syncthreads();
        float p[R][R], dscore[R][R];
        plain_matmul_nt<GROUPS, R>(p, own_x, x);
        plain_matmul_nt<GROUPS, R>(dscore, own_y, y);
        softmax_backward<OF_KEYS, R>(p, dscore, query_lse, query_delta, first_row, first, s.scale);
        if constexpr (OF_KEYS) {
            store_weights<GROUPS, R>(weights, p);
            __syncwarp();  // not __syncthreads: only the 16 lanes that write a row's weights read them
            plain_matmul_nn<GROUPS, R>(dy, weights, y);
            __syncwarp();
        }
        store_weights<GROUPS, R>(weights, dscore);
        __syncwarp();
        plain_matmul_nn<GROUPS, R>(dx, weights, x);
    }

    float scales[R], ones[R];
    UNROLL
    for (int i = 0; i < R; i++) {
        scales[i] = s.scale;
        ones[i] = 1.0f;
    }
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
