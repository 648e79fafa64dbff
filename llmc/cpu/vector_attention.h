// vector_attention.h: causal attention in vector registers. For float, and for bf16 on CPUs
// without a matrix unit, for heads that matrix_attention.h does not take, and for attention_decode.
//
// Scores are stored transposed: a row for each key, a column for each of 32 queries, so that a lane is a query. Softmax
// then needs no sums across lanes. Every matmul is one loop c += a b, which broadcasts elements of a, with any strides,
// and loads rows of b. Keys and values keep their layout (a block at a time is widened to float and packed for the
// cache); only queries and results are transposed, once per block. A block of queries visits the keys in blocks and
// keeps a running maximum and sum (online softmax), so no memory grows with T * T.
//
// The bound is fp32's FMA rate: 4 HS FLOP forward and 10 HS FLOP backward for each pair of query and key.
#pragma once
#include <math.h>  // C functions: std::log(float) is an inline function with external linkage
#include <omp.h>

#include <algorithm>

#include "cpu/memory.h"
#include "cpu/variants.h"
#include "cpu/vec.h"
#include "cpu/vector_microkernel.h"

namespace cpu::VARIANT {

constexpr int QUERIES = 32;      // queries in a block
constexpr int KEYS = 64;         // keys in a block
constexpr int QUERY_BLOCKS = 4;  // blocks in a forward task; they share the widened keys and values

static_assert(QUERIES % (2 * VL) == 0);

// ---- matmul: c (rows, columns) = a b, or += if ADD. Element (r, k) of a is a[r * a_row_stride + k * a_k_stride]; b is
// (depth, columns); columns is a multiple of 32.

// ROWS rows and 2 VL columns of c, with the sums in registers.
template <bool ADD, int ROWS>
static inline void matmul_tile(float* c, int ldc, const float* a, int a_row_stride, int a_k_stride, const float* b,
                               int ldb, int depth) {
    floatv left[ROWS], right[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        left[r] = ADD ? load(c + r * ldc) : floatv{};
        right[r] = ADD ? load(c + r * ldc + VL) : floatv{};
    }
    for (int k = 0; k < depth; k++) {
        const floatv b_left = load(b + k * ldb), b_right = load(b + k * ldb + VL);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const floatv x = broadcast(a[r * a_row_stride + k * a_k_stride]);
            left[r] = multiply_add(x, b_left, left[r]);
            right[r] = multiply_add(x, b_right, right[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        store(c + r * ldc, left[r]);
        store(c + r * ldc + VL, right[r]);
    }
}

template <bool ADD>
static void matmul(float* c, int ldc, const float* a, int a_row_stride, int a_k_stride, const float* b, int ldb,
                   int rows, int columns, int depth) {
#if defined(__AVX512F__) || defined(__aarch64__)
    constexpr int ROWS = 8;  // fills the 32 registers
#else
    constexpr int ROWS = 4;  // rows that 16 registers hold
#endif
    for (int column = 0; column < columns; column += 2 * VL) {
        int r = 0;
        for (; r + ROWS <= rows; r += ROWS)
            matmul_tile<ADD, ROWS>(c + r * ldc + column, ldc, a + r * a_row_stride, a_row_stride, a_k_stride,
                                   b + column, ldb, depth);
        for (; r < rows; r++)
            matmul_tile<ADD, 1>(c + r * ldc + column, ldc, a + r * a_row_stride, a_row_stride, a_k_stride, b + column,
                                ldb, depth);
    }
}

// ---- loads and stores of blocks

// Returns HSp: the channels of a head, HS, padded with zeros to a multiple of 32.
static int padded_channels(int HS) { return round_up(HS, 32); }

// out (count, HSp) = scale * rows (count, HS), padded; stride: elements from one row to the next.
template <class floatX>
static void read_rows(float* out, const floatX* rows, int64_t stride, int count, int HS, float scale) {
    const int HSp = padded_channels(HS);
    for (int r = 0; r < count; r++) {
        for_vectors(HS, [&](int64_t i, auto width) {
            store(out + r * HSp + i, scale * load(rows + r * stride + i, width), width);
        });
        for (int i = HS; i < HSp; i++) out[r * HSp + i] = 0.0f;
    }
}

template <class floatX>
static void write_rows(floatX* rows, int64_t stride, const float* in, int count, int HS) {
    for (int r = 0; r < count; r++)
        for_vectors(HS, [&](int64_t i, auto width) {
            store(rows + r * stride + i, load(in + r * padded_channels(HS) + i, width), width);
        });
}

// out (columns, rows) = the transpose of in (rows, columns); both are multiples of VL.
static void transpose_block(float* out, const float* in, int rows, int columns) {
    for (int r = 0; r < rows; r += VL)
        for (int c = 0; c < columns; c += VL) {
            floatv x[VL];
            for (int i = 0; i < VL; i++) x[i] = load(in + (r + i) * columns + c);
            transpose(x);
            for (int i = 0; i < VL; i++) store(out + (c + i) * rows + r, x[i]);
        }
}

// masked_value in the lanes whose query is before the key, score in the others. Lane i is query first + i.
static inline floatv causal_mask(floatv score, int first, int key, float masked_value) {
    uintv query = {};
    for (int i = 0; i < VL; i++) query[i] = uint32_t(first + i);
    return query >= uint32_t(key) ? score : broadcast(masked_value);
}

// ---- forward

// A block of queries and its online softmax over the keys so far.
struct QueryBlock {
    float* query;    // (HSp, QUERIES), times 1 / sqrt(HS)
    float* out;      // (HSp, QUERIES), the sum of weight * value
    float* row_max;  // (QUERIES), the maximum of the scores
    float* row_sum;  // (QUERIES), the sum of the weights exp(score - row_max)
};

// Attends to keys first_key to first_key + keys - 1: k, v (keys, HSp). scores (KEYS, QUERIES) is scratch.
static void attend(const QueryBlock& block, float* scores, const float* k, const float* v, int first_query,
                   int first_key, int keys, int HS) {
    const int HSp = padded_channels(HS);
    matmul<false>(scores, QUERIES, k, HSp, 1, block.query, QUERIES, keys, QUERIES, HS);
    for (int i = 0; i < QUERIES; i += VL) {
        if (first_key + keys > first_query + i)
            for (int j = 0; j < keys; j++) {
                float* s = scores + j * QUERIES + i;
                store(s, causal_mask(load(s), first_query + i, first_key + j, -__builtin_inff()));
            }
        const floatv old_max = load(block.row_max + i);
        floatv new_max = old_max;
        for (int j = 0; j < keys; j++) new_max = max(load(scores + j * QUERIES + i), new_max);
        const floatv rescale = exp(old_max - new_max);
        floatv row_sum = load(block.row_sum + i) * rescale;
        for (int j = 0; j < keys; j++) {
            const floatv weight = exp(load(scores + j * QUERIES + i) - new_max);
            store(scores + j * QUERIES + i, weight);
            row_sum += weight;
        }
        store(block.row_max + i, new_max);
        store(block.row_sum + i, row_sum);
        for (int d = 0; d < HS; d++) store(block.out + d * QUERIES + i, load(block.out + d * QUERIES + i) * rescale);
    }
    matmul<true>(block.out, QUERIES, v, 1, HSp, scores, QUERIES, HS, QUERIES, keys);
}

// Scratch memory of a forward task.
struct ForwardScratch {
    float *k, *v, *scores, *rows;
    QueryBlock blocks[QUERY_BLOCKS];
    int64_t bytes;

    ForwardScratch(void* base, int HS) {
        const int HSp = padded_channels(HS);
        Arena arena{base, 0, 64};
        k = arena.take<float>(KEYS * HSp), v = arena.take<float>(KEYS * HSp);
        scores = arena.take<float>(KEYS * QUERIES), rows = arena.take<float>(QUERIES * HSp);
        for (QueryBlock& block : blocks) {
            block.query = arena.take<float>(HSp * QUERIES), block.out = arena.take<float>(HSp * QUERIES);
            block.row_max = arena.take<float>(QUERIES), block.row_sum = arena.take<float>(QUERIES);
        }
        bytes = arena.used;
    }
};

// Queries first to last - 1 of one head. qkv (T, 3C), out (T, C) and lse (T) point to the head's first element.
template <class floatX>
static void attention_forward_task(floatX* out, float* lse, const floatX* qkv, int first, int last, int C, int HS,
                                   void* memory) {
    const int HSp = padded_channels(HS), blocks = ceil_div(last - first, QUERIES);
    const float scale = 1.0f / sqrtf(float(HS));
    const auto [k, v, scores, rows, block, bytes] = ForwardScratch(memory, HS);
    for (int i = 0; i < blocks; i++) {
        const int t = first + i * QUERIES, count = std::min(QUERIES, last - t);
        __builtin_memset(rows + count * HSp, 0, (QUERIES - count) * HSp * sizeof(float));
        read_rows(rows, qkv + int64_t(t) * 3 * C, 3 * C, count, HS, scale);
        transpose_block(block[i].query, rows, QUERIES, HSp);
        __builtin_memset(block[i].out, 0, HSp * QUERIES * sizeof(float));
        for (int q = 0; q < QUERIES; q++) block[i].row_max[q] = -__builtin_inff(), block[i].row_sum[q] = 0.0f;
    }
    for (int key = 0; key < last; key += KEYS) {
        const int keys = std::min(KEYS, last - key);
        const floatX* head = qkv + int64_t(key) * 3 * C;
        read_rows(k, head + C, 3 * C, keys, HS, 1.0f);
        read_rows(v, head + 2 * C, 3 * C, keys, HS, 1.0f);
        for (int i = 0; i < blocks; i++) {
            const int t = first + i * QUERIES, seen = std::min(keys, t + QUERIES - key);
            if (seen > 0) attend(block[i], scores, k, v, t, key, seen, HS);
        }
    }
    for (int i = 0; i < blocks; i++) {
        const int t = first + i * QUERIES, count = std::min(QUERIES, last - t);
        for (int q = 0; q < count; q++) lse[t + q] = block[i].row_max[q] + logf(block[i].row_sum[q]);
        for (int q = 0; q < QUERIES; q += VL) {
            const floatv inverse_sum = 1.0f / load(block[i].row_sum + q);
            for (int d = 0; d < HSp; d++)
                store(block[i].out + d * QUERIES + q, load(block[i].out + d * QUERIES + q) * inverse_sum);
        }
        transpose_block(rows, block[i].out, HSp, QUERIES);
        write_rows(out + int64_t(t) * C, C, rows, count, HS);
    }
}

// Scratch memory of a backward task; _t: transposed.
struct BackwardScratch {
    float *k, *v, *dk, *dv;    // (T, HSp)
    float *q, *dy, *rows;      // (QUERIES, HSp)    dy: the rows of dout
    float *q_t, *dy_t, *dq_t;  // (HSp, QUERIES)
    float *block_lse, *D;      // (QUERIES)
    float *weights, *dscores;  // (KEYS, QUERIES)
    int64_t bytes;

    BackwardScratch(void* base, int T, int HS) {
        const int64_t HSp = padded_channels(HS);
        Arena arena{base, 0, 64};
        for (float** array : {&k, &v, &dk, &dv}) *array = arena.take<float>(T * HSp);
        for (float** array : {&q, &q_t, &dy, &dy_t, &dq_t, &rows}) *array = arena.take<float>(QUERIES * HSp);
        for (float** array : {&block_lse, &D}) *array = arena.take<float>(QUERIES);
        for (float** array : {&weights, &dscores}) *array = arena.take<float>(KEYS * QUERIES);
        bytes = arena.used;
    }
};

static int64_t attention_scratch_bytes(int T, int HS) {
    return std::max(ForwardScratch(nullptr, HS).bytes, BackwardScratch(nullptr, T, HS).bytes);
}

// A task is QUERY_BLOCKS blocks of queries of one head. The loop starts with the last queries: they see the most keys.
template <class floatX>
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream) {
    const int C = NH * HS, task_queries = QUERY_BLOCKS * QUERIES, ranges = ceil_div(T, task_queries);
    const int64_t bytes = attention_scratch_bytes(T, HS);
    char* scratch = static_cast<char*>(cpu::scratch(bytes * omp_get_max_threads()));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int range = ranges - 1; range >= 0; range--)
        for (int head = 0; head < B * NH; head++) {
            const int b = head / NH, h = head % NH, first = range * task_queries;
            attention_forward_task(out + int64_t(b) * T * C + h * HS, lse + int64_t(head) * T,
                                   qkv + int64_t(b) * T * 3 * C + h * HS, first, std::min(first + task_queries, T), C,
                                   HS, scratch + bytes * omp_get_thread_num());
        }
}

// ---- backward

// weights = exp(scores - lse) and dscores = weights * (dweights - D), in place: weights holds the scores, and dscores
// holds dweights (keys, QUERIES). lse, D (QUERIES).
static void softmax_backward(float* weights, float* dscores, const float* lse, const float* D, int first_query,
                             int first_key, int keys) {
    for (int i = 0; i < QUERIES; i += VL) {
        const bool diagonal = first_key + keys > first_query + i;
        const floatv lse_lanes = load(lse + i), D_lanes = load(D + i);
        for (int j = 0; j < keys; j++) {
            float *w = weights + j * QUERIES + i, *d = dscores + j * QUERIES + i;
            floatv weight = exp(load(w) - lse_lanes);
            if (diagonal) weight = causal_mask(weight, first_query + i, first_key + j, 0.0f);
            store(w, weight);
            store(d, weight * (load(d) - D_lanes));
        }
    }
}

// One head. Keys, values and their gradients stay in the second-level cache as 4 T HS floats while the loop runs over
// the blocks of queries. D = row sums of dout * out.
template <class floatX>
static void attention_backward_task(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                                    const floatX* qkv, int T, int C, int HS, void* memory) {
    const int HSp = padded_channels(HS);
    const float scale = 1.0f / sqrtf(float(HS));
    const auto [k, v, dk, dv, q, dy, rows, q_t, dy_t, dq_t, block_lse, D, weights, dscores, bytes] =
        BackwardScratch(memory, T, HS);
    read_rows(k, qkv + C, 3 * C, T, HS, 1.0f);
    read_rows(v, qkv + 2 * C, 3 * C, T, HS, 1.0f);
    __builtin_memset(dk, 0, 2 * int64_t(T) * HSp * sizeof(float));

    for (int t = 0; t < T; t += QUERIES) {
        const int count = std::min(QUERIES, T - t);
        if (count < QUERIES)
            for (float* block : {q, dy}) __builtin_memset(block, 0, QUERIES * HSp * sizeof(float));
        read_rows(q, qkv + int64_t(t) * 3 * C, 3 * C, count, HS, scale);
        read_rows(dy, dout + int64_t(t) * C, C, count, HS, 1.0f);
        read_rows(rows, out + int64_t(t) * C, C, count, HS, 1.0f);
        for (int i = 0; i < QUERIES; i++) {  // rows after the last query: lse = infinity, so their weights are 0
            floatv dot = {};
            for (int c = 0; c < HSp && i < count; c += VL) dot += load(dy + i * HSp + c) * load(rows + i * HSp + c);
            D[i] = reduce_sum(dot);
            block_lse[i] = i < count ? lse[t + i] : __builtin_inff();
        }
        transpose_block(q_t, q, QUERIES, HSp);
        transpose_block(dy_t, dy, QUERIES, HSp);
        __builtin_memset(dq_t, 0, QUERIES * HSp * sizeof(float));
        for (int key = 0; key < t + count; key += KEYS) {
            const int keys = std::min(KEYS, t + count - key);
            const int64_t row = int64_t(key) * HSp;
            matmul<false>(weights, QUERIES, k + row, HSp, 1, q_t, QUERIES, keys, QUERIES, HS);
            matmul<false>(dscores, QUERIES, v + row, HSp, 1, dy_t, QUERIES, keys, QUERIES, HS);
            softmax_backward(weights, dscores, block_lse, D, t, key, keys);
            matmul<true>(dq_t, QUERIES, k + row, 1, HSp, dscores, QUERIES, HS, QUERIES, keys);
            matmul<true>(dk + row, HSp, dscores, QUERIES, 1, q, HSp, keys, HSp, QUERIES);
            matmul<true>(dv + row, HSp, weights, QUERIES, 1, dy, HSp, keys, HSp, QUERIES);
        }
        transpose_block(rows, dq_t, HSp, QUERIES);
        for (int i = 0; i < QUERIES * HSp; i += VL) store(rows + i, scale * load(rows + i));
        write_rows(dqkv + int64_t(t) * 3 * C, 3 * C, rows, count, HS);
    }
    write_rows(dqkv + C, 3 * C, dk, T, HS);
    write_rows(dqkv + 2 * C, 3 * C, dv, T, HS);
}

template <class floatX>
void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv, int B,
                        int T, int NH, int HS, Stream) {
    const int C = NH * HS;
    const int64_t bytes = attention_scratch_bytes(T, HS);
    char* scratch = static_cast<char*>(cpu::scratch(bytes * omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < B * NH; head++) {
        const int b = head / NH, h = head % NH;
        const int64_t row = int64_t(b) * T * C + h * HS, row_qkv = int64_t(b) * T * 3 * C + h * HS;
        attention_backward_task(dqkv + row_qkv, dout + row, out + row, lse + int64_t(head) * T, qkv + row_qkv, T, C, HS,
                                scratch + bytes * omp_get_thread_num());
    }
}

// ---- decode: one query

// One head: out (HS), qkv (T, 3C) from the head's first element on. weights: scratch (T).
template <class floatX>
static void attention_decode_task(floatX* out, const floatX* qkv, float* weights, int T, int C, int HS) {
    const floatX *k = qkv + C, *v = k + C, *query = qkv + int64_t(T - 1) * 3 * C;
    const float scale = 1.0f / sqrtf(float(HS));
    float row_max = -__builtin_inff();
    for (int t = 0; t < T; t++) {
        weights[t] = scale * dot(query, k + int64_t(t) * 3 * C, HS);
        row_max = std::max(row_max, weights[t]);
    }
    floatv sum = {};
    for_vectors(T, [&](int64_t t, auto width) {
        const floatv weight = exp(load(weights + t, width) - row_max);
        store(weights + t, weight, width);
        sum += mask_lanes(weight, 0.0f, width);
    });
    const float inverse_sum = 1.0f / reduce_sum(sum);
    for_vectors(HS, [&](int64_t i, auto width) {
        floatv mean = {};
        for (int t = 0; t < T; t++) mean += weights[t] * load(v + int64_t(t) * 3 * C + i, width);
        store(out + i, mean * inverse_sum, width);
    });
}

template <class floatX>
void attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream) {
    float* const weights =
        static_cast<float*>(cpu::scratch(int64_t(T) * omp_get_max_threads() * int64_t(sizeof(float))));
#pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < NH; h++)
        attention_decode_task(out + h * HS, qkv + h * HS, weights + int64_t(T) * omp_get_thread_num(), T, NH * HS, HS);
}

}  // namespace cpu::VARIANT
