// vector_attention.h: causal attention in vector registers, for vector_ops.h. float, and bf16 where there is no AMX.
//
// Scores are kept transposed, a row for each key and a lane for each of 32 queries. So softmax needs no sums across
// lanes, and all products are one loop, c += a b, that reads single numbers of a, in either order, and whole rows of b:
// keys and values are used as they lie in memory (widened and packed a block at a time, for the sake of the cache), and
// only queries and results are transposed, once per block. A query block goes through the keys in blocks and keeps a
// running maximum and sum, so that nothing grows with T * T.
//
// Bound: 4 HS flops forward, 10 HS backward, for each pair of query and key, at fp32's FMA rate.

namespace cpu::VECTOR_VARIANT {

constexpr int QUERIES = 32;      // in a block: the width of a panel of scores
constexpr int KEYS = 64;         // in a block
constexpr int QUERY_BLOCKS = 4;  // of a task: those that share the widened keys and values

static_assert(QUERIES % (2 * VL) == 0);

// ---- c (rows, columns) += a b, or = a b; a[r * a_row + k * a_depth], b (depth, columns); columns a multiple of 32.

// ROWS rows by 2 VL columns, in registers.
template <bool ADD, int ROWS>
static inline void product_tile(float* c, int ldc, const float* a, int a_row, int a_depth, const float* b, int ldb,
                                int depth) {
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
            const floatv x = broadcast(a[r * a_row + k * a_depth]);
            left[r] += x * b_left;
            right[r] += x * b_right;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        store(c + r * ldc, left[r]);
        store(c + r * ldc + VL, right[r]);
    }
}

template <bool ADD>
static void product(float* c, int ldc, const float* a, int a_row, int a_depth, const float* b, int ldb, int rows,
                    int columns, int depth) {
    constexpr int ROWS = VL == 8 ? 4 : 8;  // fills the registers: AVX2 has 16 of them, AVX-512 and NEON 32
    for (int column = 0; column < columns; column += 2 * VL) {
        int r = 0;
        for (; r + ROWS <= rows; r += ROWS)
            product_tile<ADD, ROWS>(c + r * ldc + column, ldc, a + r * a_row, a_row, a_depth, b + column, ldb, depth);
        for (; r < rows; r++)
            product_tile<ADD, 1>(c + r * ldc + column, ldc, a + r * a_row, a_row, a_depth, b + column, ldb, depth);
    }
}

// ---- blocks in and out of memory

// A head's channels in panels of 32, the rest of the last panel zero.
static int padded(int HS) { return round_up(HS, 32); }

// out (count, HSp) = scale * rows, which start stride elements after each other.
template <class floatX>
static void read_rows(float* out, const floatX* rows, int64_t stride, int count, int HS, float scale) {
    const int HSp = padded(HS);
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
            store(rows + r * stride + i, load(in + r * padded(HS) + i, width), width);
        });
}

// out (columns, rows) = in (rows, columns); both multiples of VL.
static void transpose_block(float* out, const float* in, int rows, int columns) {
    for (int r = 0; r < rows; r += VL)
        for (int c = 0; c < columns; c += VL) {
            floatv x[VL];
            for (int i = 0; i < VL; i++) x[i] = load(in + (r + i) * columns + c);
            transpose(x);
            for (int i = 0; i < VL; i++) store(out + (c + i) * rows + r, x[i]);
        }
}

// Lane i of the vector that starts at query `first` may see keys up to its own place.
static inline floatv hide_later_keys(floatv score, int first, int key, float hidden) {
    uintv query;
    for (int i = 0; i < VL; i++) query[i] = uint32_t(first + i);
    return query >= uint32_t(key) ? score : broadcast(hidden);
}

static int smaller(int a, int b) { return a < b ? a : b; }

// ---- forward

// A block of queries on its way through the keys.
struct QueryBlock {
    float* query;    // (HSp, QUERIES), times 1 / sqrt(HS)
    float* out;      // (HSp, QUERIES) sum of weight * value so far
    float* largest;  // (QUERIES) score so far
    float* total;    // (QUERIES) sum of weights exp(score - largest)
};

// Takes in `keys` keys from first_key on; scores: (KEYS, QUERIES) to work in.
static void attend(const QueryBlock& block, float* scores, const float* k, const float* v, int first_query,
                   int first_key, int keys, int HS) {
    const int HSp = padded(HS);
    product<false>(scores, QUERIES, k, HSp, 1, block.query, QUERIES, keys, QUERIES, HS);
    for (int i = 0; i < QUERIES; i += VL) {
        if (first_key + keys > first_query + i)
            for (int j = 0; j < keys; j++) {
                float* s = scores + j * QUERIES + i;
                store(s, hide_later_keys(load(s), first_query + i, first_key + j, -__builtin_inff()));
            }
        const floatv before = load(block.largest + i);
        floatv top = before;
        for (int j = 0; j < keys; j++) top = larger(load(scores + j * QUERIES + i), top);
        const floatv shrink = exp(before - top);
        floatv total = load(block.total + i) * shrink;
        for (int j = 0; j < keys; j++) {
            const floatv weight = exp(load(scores + j * QUERIES + i) - top);
            store(scores + j * QUERIES + i, weight);
            total += weight;
        }
        store(block.largest + i, top);
        store(block.total + i, total);
        for (int d = 0; d < HS; d++) store(block.out + d * QUERIES + i, load(block.out + d * QUERIES + i) * shrink);
    }
    product<true>(block.out, QUERIES, v, 1, HSp, scores, QUERIES, HS, QUERIES, keys);
}

// The floats that a task works in, cut from one piece of scratch.
struct Cutter {
    float *next, *end;
    float* cut(int64_t count) {
        float* piece = next;
        next += count;
        assert(next <= end);
        return piece;
    }
};

static int64_t forward_floats(int HS) {
    return QUERY_BLOCKS * (2 * padded(HS) + 2) * QUERIES + (2 * padded(HS) + QUERIES) * KEYS + QUERIES * padded(HS);
}

// Queries first .. last - 1 of one head: qkv and out point to the head's first row, lse to its first number.
template <class floatX>
static void attention_forward_task(floatX* out, float* lse, const floatX* qkv, int first, int last, int C, int HS,
                                   float* scratch) {
    const int HSp = padded(HS), blocks = ceil_div(last - first, QUERIES);
    const float scale = 1.0f / sqrtf(float(HS));
    Cutter room{scratch, scratch + forward_floats(HS)};
    float *k = room.cut(KEYS * HSp), *v = room.cut(KEYS * HSp), *scores = room.cut(KEYS * QUERIES);
    float* rows = room.cut(QUERIES * HSp);
    QueryBlock block[QUERY_BLOCKS];
    for (int i = 0; i < blocks; i++) {
        block[i] = {room.cut(HSp * QUERIES), room.cut(HSp * QUERIES), room.cut(QUERIES), room.cut(QUERIES)};
        const int t = first + i * QUERIES, count = smaller(QUERIES, last - t);
        __builtin_memset(rows + count * HSp, 0, (QUERIES - count) * HSp * sizeof(float));
        read_rows(rows, qkv + int64_t(t) * 3 * C, 3 * C, count, HS, scale);
        transpose_block(block[i].query, rows, QUERIES, HSp);
        __builtin_memset(block[i].out, 0, HSp * QUERIES * sizeof(float));
        for (int q = 0; q < QUERIES; q++) block[i].largest[q] = -__builtin_inff(), block[i].total[q] = 0.0f;
    }
    for (int key = 0; key < last; key += KEYS) {
        const int keys = smaller(KEYS, last - key);
        const floatX* head = qkv + int64_t(key) * 3 * C;
        read_rows(k, head + C, 3 * C, keys, HS, 1.0f);
        read_rows(v, head + 2 * C, 3 * C, keys, HS, 1.0f);
        for (int i = 0; i < blocks; i++) {
            const int t = first + i * QUERIES, seen = smaller(keys, t + QUERIES - key);
            if (seen > 0) attend(block[i], scores, k, v, t, key, seen, HS);
        }
    }
    for (int i = 0; i < blocks; i++) {
        const int t = first + i * QUERIES, count = smaller(QUERIES, last - t);
        for (int q = 0; q < count; q++) lse[t + q] = block[i].largest[q] + logf(block[i].total[q]);
        for (int q = 0; q < QUERIES; q += VL) {
            const floatv share = 1.0f / load(block[i].total + q);
            for (int d = 0; d < HSp; d++)
                store(block[i].out + d * QUERIES + q, load(block[i].out + d * QUERIES + q) * share);
        }
        transpose_block(rows, block[i].out, HSp, QUERIES);
        write_rows(out + int64_t(t) * C, C, rows, count, HS);
    }
}

static int64_t backward_floats(int T, int HS) {
    const int64_t HSp = padded(HS);
    return 4 * T * HSp + (6 * HSp + 2 + 2 * KEYS) * QUERIES;
}

static int64_t attention_scratch_bytes(int T, int HS) {
    const int64_t forward = forward_floats(HS), backward = backward_floats(T, HS);
    return round_up<int64_t>((forward > backward ? forward : backward) * sizeof(float), 64);
}

// A task is four blocks of queries of one head; the last ones, which see the most keys, are handed out first.
template <class floatX>
void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int NH, int HS, Stream) {
    const int C = NH * HS, task_queries = QUERY_BLOCKS * QUERIES, parts = ceil_div(T, task_queries);
    const int64_t floats = attention_scratch_bytes(T, HS) / int64_t(sizeof(float));
    float* scratch = static_cast<float*>(cpu::scratch(floats * omp_get_max_threads() * int64_t(sizeof(float))));
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int part = parts - 1; part >= 0; part--)
        for (int head = 0; head < B * NH; head++) {
            const int b = head / NH, h = head % NH, first = part * task_queries;
            attention_forward_task(out + int64_t(b) * T * C + h * HS, lse + int64_t(head) * T,
                                   qkv + int64_t(b) * T * 3 * C + h * HS, first, smaller(first + task_queries, T), C,
                                   HS, scratch + floats * omp_get_thread_num());
        }
}

// ---- backward

// weights = exp(scores - lse) and scores' gradient = weights * (dweights - mean), in place, for one block of each.
static void softmax_backward(float* weights, float* dscores, const float* lse, const float* mean, int first_query,
                             int first_key, int keys) {
    for (int i = 0; i < QUERIES; i += VL) {
        const bool diagonal = first_key + keys > first_query + i;
        const floatv log_sum = load(lse + i), average = load(mean + i);
        for (int j = 0; j < keys; j++) {
            float *w = weights + j * QUERIES + i, *d = dscores + j * QUERIES + i;
            floatv weight = exp(load(w) - log_sum);
            if (diagonal) weight = hide_later_keys(weight, first_query + i, first_key + j, 0.0f);
            store(w, weight);
            store(d, weight * (load(d) - average));
        }
    }
}

// One head. Keys, values and their gradients stay in the second cache as floats (4 T HS of them) while the blocks of
// queries go by.
template <class floatX>
static void attention_backward_task(floatX* dqkv, const floatX* dout, const floatX* out, const float* lse,
                                    const floatX* qkv, int T, int C, int HS, float* scratch) {
    const int HSp = padded(HS);
    const float scale = 1.0f / sqrtf(float(HS));
    Cutter room{scratch, scratch + backward_floats(T, HS)};
    float *k = room.cut(int64_t(T) * HSp), *v = room.cut(int64_t(T) * HSp);
    float *dk = room.cut(int64_t(T) * HSp), *dv = room.cut(int64_t(T) * HSp);
    float *q = room.cut(QUERIES * HSp), *q_t = room.cut(QUERIES * HSp);  // (QUERIES, HSp) and transposed
    float *d = room.cut(QUERIES * HSp), *d_t = room.cut(QUERIES * HSp);  // the rows of dout
    float *dq_t = room.cut(QUERIES * HSp), *rows = room.cut(QUERIES * HSp);
    float *log_sum = room.cut(QUERIES), *mean = room.cut(QUERIES);
    float *weights = room.cut(KEYS * QUERIES), *dscores = room.cut(KEYS * QUERIES);
    read_rows(k, qkv + C, 3 * C, T, HS, 1.0f);
    read_rows(v, qkv + 2 * C, 3 * C, T, HS, 1.0f);
    __builtin_memset(dk, 0, 2 * int64_t(T) * HSp * sizeof(float));

    for (int t = 0; t < T; t += QUERIES) {
        const int count = smaller(QUERIES, T - t);
        if (count < QUERIES)
            for (float* block : {q, d}) __builtin_memset(block, 0, QUERIES * HSp * sizeof(float));
        read_rows(q, qkv + int64_t(t) * 3 * C, 3 * C, count, HS, scale);
        read_rows(d, dout + int64_t(t) * C, C, count, HS, 1.0f);
        read_rows(rows, out + int64_t(t) * C, C, count, HS, 1.0f);
        for (int i = 0; i < QUERIES; i++) {  // a missing query weighs nothing
            floatv products = {};
            for (int c = 0; c < HSp && i < count; c += VL) products += load(d + i * HSp + c) * load(rows + i * HSp + c);
            mean[i] = sum(products);
            log_sum[i] = i < count ? lse[t + i] : __builtin_inff();
        }
        transpose_block(q_t, q, QUERIES, HSp);
        transpose_block(d_t, d, QUERIES, HSp);
        __builtin_memset(dq_t, 0, QUERIES * HSp * sizeof(float));
        for (int key = 0; key < t + count; key += KEYS) {
            const int keys = smaller(KEYS, t + count - key);
            const int64_t row = int64_t(key) * HSp;
            product<false>(weights, QUERIES, k + row, HSp, 1, q_t, QUERIES, keys, QUERIES, HS);
            product<false>(dscores, QUERIES, v + row, HSp, 1, d_t, QUERIES, keys, QUERIES, HS);
            softmax_backward(weights, dscores, log_sum, mean, t, key, keys);
            product<true>(dq_t, QUERIES, k + row, 1, HSp, dscores, QUERIES, HS, QUERIES, keys);
            product<true>(dk + row, HSp, dscores, QUERIES, 1, q, HSp, keys, HSp, QUERIES);
            product<true>(dv + row, HSp, weights, QUERIES, 1, d, HSp, keys, HSp, QUERIES);
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
    const int64_t floats = attention_scratch_bytes(T, HS) / int64_t(sizeof(float));
    float* scratch = static_cast<float*>(cpu::scratch(floats * omp_get_max_threads() * int64_t(sizeof(float))));
#pragma omp parallel for schedule(dynamic)
    for (int head = 0; head < B * NH; head++) {
        const int b = head / NH, h = head % NH;
        const int64_t row = int64_t(b) * T * C + h * HS, row_qkv = int64_t(b) * T * 3 * C + h * HS;
        attention_backward_task(dqkv + row_qkv, dout + row, out + row, lse + int64_t(head) * T, qkv + row_qkv, T, C, HS,
                                scratch + floats * omp_get_thread_num());
    }
}

// ---- one query

// A task is a head: its keys and values are read once, 64 of each at a time.
template <class floatX>
static void attention_decode_task(floatX* out, const floatX* qkv, int T, int C, int HS) {
    constexpr int max_vectors = 256 / VL;  // dispatch.cpp refuses larger heads
    const float scale = 1.0f / sqrtf(float(HS));
    floatv query[max_vectors], result[max_vectors];
    for_vectors(HS, [&](int64_t i, auto width) {
        query[i / VL] = scale * load(qkv + int64_t(T - 1) * 3 * C + i, width);
        result[i / VL] = floatv{};
    });
    float largest_score = -__builtin_inff();
    floatv total = {};
    for (int first = 0; first < T; first += KEYS) {
        const int keys = smaller(KEYS, T - first);
        const floatX *k = qkv + int64_t(first) * 3 * C + C, *v = k + C;
        float weights[KEYS];
        floatv top = broadcast(largest_score);
        for (int j = 0; j < KEYS; j++) weights[j] = -__builtin_inff();
        for (int j = 0; j < keys; j++) {
            floatv products = {};
            for_vectors(HS, [&](int64_t i, auto width) {
                products += query[i / VL] * load(k + int64_t(j) * 3 * C + i, width);
            });
            weights[j] = sum(products);
        }
        for (int j = 0; j < KEYS; j += VL) top = larger(load(weights + j), top);
        const float before = largest_score;
        largest_score = largest(top);
        const floatv shrink = exp(broadcast(before - largest_score));
        total *= shrink;
        for (int j = 0; j < KEYS; j += VL) {
            const floatv weight = exp(load(weights + j) - largest_score);
            store(weights + j, weight);
            total += weight;
        }
        for_vectors(HS, [&](int64_t i, auto width) {
            floatv x = result[i / VL] * shrink;
            for (int j = 0; j < keys; j++) x += weights[j] * load(v + int64_t(j) * 3 * C + i, width);
            result[i / VL] = x;
        });
    }
    const float share = 1.0f / sum(total);
    for_vectors(HS, [&](int64_t i, auto width) { store(out + i, result[i / VL] * share, width); });
}

template <class floatX>
void attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS, Stream) {
#pragma omp parallel for schedule(dynamic)
    for (int h = 0; h < NH; h++) attention_decode_task(out + h * HS, qkv + h * HS, T, NH * HS, HS);
}

}  // namespace cpu::VECTOR_VARIANT
