// matrix_attention.h: causal attention in bf16 from panels, for heads of 32, 64, 96 or 128 channels. Compiled for AMX
// (amx.cpp) and for AVX512-BF16 (avx512bf16.cpp), into the namespace MATRIX_VARIANT of the including file.
//
// A task is one head of one sequence. It packs the head's q, k, v (panels.h) and goes through blocks of 32 queries by
// 32 keys; what lies above the diagonal is skipped. T x T numbers are never stored: forward keeps the scores of 32
// queries for up to FORWARD_KEYS keys and takes their exact softmax (longer sequences: in chunks of keys, rescaled
// online); backward keeps P^T and dS^T of CHUNK x CHUNK blocks, 1 MiB in all, in the second-level cache. Scores,
// softmax and all sums are float; P and dS are rounded to bf16 as operands. Chunks are constants, so bits do not depend
// on threads.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cpu/variants.h"
#include "cpu/matmul.h"
#include "cpu/memory.h"
#include "cpu/panels.h"

namespace cpu::MATRIX_VARIANT {

namespace {

constexpr int FORWARD_KEYS = 64;  // panels of 32: the scores take 256 KiB
constexpr int CHUNK = 16;         // panels of queries and of keys in backward

// One head of q, k, v, out or one of their gradients: T rows of HS channels, ld numbers apart.
struct Head {
    bf16* data;
    int T, HS, ld;
};

// Memory of one thread, handed out piece by piece.
struct Arena {
    char* next;
    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(next);
        next += round_up<int64_t>(count * int64_t(sizeof(T)), 64);
        return piece;
    }
};

int64_t forward_bytes(int T, int HS) {
    const int64_t blocks = panels_of(T), keys = std::min<int64_t>(blocks, FORWARD_KEYS), head = blocks * PANEL * HS;
    return 3 * head * int64_t(sizeof(bf16)) + keys * BLOCK * int64_t(sizeof(float) + sizeof(bf16)) +
           PANEL * HS * int64_t(sizeof(float)) + 4096;
}

int64_t backward_bytes(int T, int HS) {
    const int64_t head = int64_t(panels_of(T)) * PANEL * HS;
    return head * int64_t(7 * sizeof(bf16) + sizeof(float)) + int64_t(2 * CHUNK + 1) * CHUNK * BLOCK * sizeof(bf16) +
           (2 * int64_t(CHUNK) * PANEL * HS + 2 * BLOCK) * int64_t(sizeof(float)) + 4096;
}

// Panels of 32 tokens, the channels inside (pack_rows, pack_rows_as_b), or panels of 32 channels, the tokens inside
// (pack_columns, pack_columns_as_b): the latter are as many pairs apart as there are blocks of tokens.
template <class Pack>
void pack_head(bf16* packed, const Head& head, bool tokens_inside, const Pack& pack) {
    const int blocks = panels_of(head.T), channels = head.HS / PANEL;
    for (int i = 0; i < blocks; i++)
        for (int c = 0; c < channels; c++) {
            __m512i x[32];
            load_block(x, head.data + int64_t(i) * PANEL * head.ld + c * PANEL, head.ld, head.T - i * PANEL, PANEL);
            pack(packed + int64_t(tokens_inside ? c * blocks + i : i * channels + c) * TILE_PAIR, x);
        }
}

void pack_as_a(bf16* packed, const Head& head) {
    pack_head(packed, head, false, [](bf16* pair, const __m512i(&x)[32]) { pack_rows(pair, x); });
}
void pack_as_b(bf16* packed, const Head& head) {
    pack_head(packed, head, false, [](bf16* pair, const __m512i(&x)[32]) { pack_rows_as_b(pair, x); });
}
void pack_as_a_tokens_inside(bf16* packed, const Head& head) {
    pack_head(packed, head, true, [](bf16* pair, const __m512i(&x)[32]) { pack_columns(pair, x); });
}
void pack_as_b_tokens_inside(bf16* packed, const Head& head) {
    pack_head(packed, head, true, [](bf16* pair, const __m512i(&x)[32]) { pack_columns_as_b(pair, x); });
}

// Keys that query r of a block sees among the first and the last 16 of 32 keys.
struct Visible {
    __mmask16 first, last;
    Visible(bool diagonal, int r)
        : first(diagonal ? first_of_16(r + 1) : 0xffff), last(diagonal ? first_of_16(r + 1 - 16) : 0xffff) {}
};

// Rows block * 32 ... of a head from sums: 32-column blocks, times factor[r].
template <bool STREAM>
void store_rows(const Head& head, int block, const float* sums, const float* factor) {
    for (int c = 0; c < head.HS / PANEL; c++)
        for (int r = 0; r < std::min(PANEL, head.T - block * PANEL); r++) {
            const __m512 f = all(factor ? factor[r] : 1.0f);
            const float* x = sums + c * BLOCK + r * PANEL;
            store_row<STREAM>(head.data + int64_t(block * PANEL + r) * head.ld + c * PANEL,
                              _mm512_mul_ps(f, _mm512_load_ps(x)), _mm512_mul_ps(f, _mm512_load_ps(x + 16)), ~0u);
        }
}

void store_block(const Head& head, int block, const float* sums, const float* factor = nullptr) {
    if (whole_lines(head.data, head.ld, 0))
        store_rows<true>(head, block, sums, factor);
    else
        store_rows<false>(head, block, sums, factor);
}

// ---- Forward

// The softmax of 32 queries as it grows over chunks of keys.
struct Softmax {
    alignas(64) float largest[PANEL], sum[PANEL];  // of scale * score, and of exp(scale * score - largest)
    alignas(64) float rescale[PANEL];              // what the last chunk made of the sums before it
};

// Scores of query block i and keys j0 ... j1 - 1, 32 x 32 blocks one after the other; then softmax.largest and rescale.
void scores(float* out, Softmax& softmax, const bf16* q, const bf16* k, int i, int j0, int j1, int channels,
            float scale) {
    alignas(64) float best[PANEL][16];
    for (int r = 0; r < PANEL; r++) _mm512_store_ps(best[r], all(-INFINITY));
    for (int j = j0; j < j1; j++) {
        float* s = out + (j - j0) * BLOCK;
        multiply_panels(s, q + int64_t(i) * channels * TILE_PAIR, k + int64_t(j) * channels * TILE_PAIR, channels,
                        false);
        for (int r = 0; r < PANEL; r++) {
            const Visible visible(i == j, r);
            __m512 x = _mm512_load_ps(best[r]);
            x = _mm512_mask_max_ps(x, visible.first, x, _mm512_load_ps(s + r * PANEL));
            x = _mm512_mask_max_ps(x, visible.last, x, _mm512_load_ps(s + r * PANEL + 16));
            _mm512_store_ps(best[r], x);
        }
    }
    for (int r = 0; r < PANEL; r++) {
        const float before = softmax.largest[r],
                    now = std::max(before, scale * _mm512_reduce_max_ps(_mm512_load_ps(best[r])));
        softmax.rescale[r] = before == now ? 1.0f : std::exp(before - now);
        softmax.largest[r] = now;
    }
}

// p = exp(scale * score - largest) as an A operand, and its sums.
void exponentials(bf16* p, Softmax& softmax, const float* score, int i, int j0, int j1, float scale) {
    alignas(64) float sums[PANEL][16] = {};
    for (int j = j0; j < j1; j++, score += BLOCK, p += TILE_PAIR)
        for (int r = 0; r < PANEL; r++) {
            const Visible visible(i == j, r);
            const __m512 largest = all(softmax.largest[r]);
            const __m512 x0 = _mm512_fmsub_ps(all(scale), _mm512_load_ps(score + r * PANEL), largest);
            const __m512 x1 = _mm512_fmsub_ps(all(scale), _mm512_load_ps(score + r * PANEL + 16), largest);
            const __m512 p0 = _mm512_maskz_mov_ps(visible.first, exp16(x0));
            const __m512 p1 = _mm512_maskz_mov_ps(visible.last, exp16(x1));
            _mm512_store_ps(sums[r], _mm512_add_ps(_mm512_load_ps(sums[r]), _mm512_add_ps(p0, p1)));
            _mm512_store_si512(p + r * 32, narrow(p0, p1));
        }
    for (int r = 0; r < PANEL; r++)
        softmax.sum[r] = softmax.sum[r] * softmax.rescale[r] + _mm512_reduce_add_ps(_mm512_load_ps(sums[r]));
}

void head_forward(const Head& out, float* lse, const Head& q, const Head& k, const Head& v, Arena arena) {
    const int T = q.T, HS = q.HS, blocks = panels_of(T), channels = HS / PANEL;
    const float scale = 1.0f / std::sqrt(float(HS));
    const int64_t size = int64_t(blocks) * PANEL * HS;
    bf16 *packed_q = arena.take<bf16>(size), *packed_k = arena.take<bf16>(size), *packed_v = arena.take<bf16>(size);
    float* score = arena.take<float>(int64_t(std::min(blocks, FORWARD_KEYS)) * BLOCK);
    bf16* p = arena.take<bf16>(int64_t(std::min(blocks, FORWARD_KEYS)) * BLOCK);
    float* sums = arena.take<float>(PANEL * HS);
    pack_as_a(packed_q, q);
    pack_as_b(packed_k, k);
    pack_as_b_tokens_inside(packed_v, v);

    for (int i = 0; i < blocks; i++) {
        Softmax softmax;
        std::fill_n(softmax.largest, PANEL, -INFINITY);
        std::fill_n(softmax.sum, PANEL, 0.0f);
        for (int j0 = 0; j0 <= i; j0 += FORWARD_KEYS) {
            const int j1 = std::min(i + 1, j0 + FORWARD_KEYS);
            scores(score, softmax, packed_q, packed_k, i, j0, j1, channels, scale);
            exponentials(p, softmax, score, i, j0, j1, scale);
            if (j0 > 0)
                for (int c = 0; c < channels; c++)
                    for (int r = 0; r < PANEL; r++)
                        for (float* x : {sums + c * BLOCK + r * PANEL, sums + c * BLOCK + r * PANEL + 16})
                            _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), all(softmax.rescale[r])));
            for (int c = 0; c < channels; c++)
                multiply_panels(sums + c * BLOCK, p, packed_v + (int64_t(c) * blocks + j0) * TILE_PAIR, j1 - j0,
                                j0 > 0);
        }
        alignas(64) float factor[PANEL];
        for (int r = 0; r < PANEL; r++) {
            factor[r] = 1.0f / softmax.sum[r];
            if (i * PANEL + r < T) lse[i * PANEL + r] = softmax.largest[r] + std::log(softmax.sum[r]);
        }
        store_block(out, i, sums, factor);
    }
}

// ---- Backward: with P = exp(scale q k^T - lse), dP = dout v^T and D = row sums of dout * out,
//      dS = scale P (dP - D), dq = dS k, dk = dS^T q, dv = P^T dout.
//
// Blocks of P and dS are computed transposed, a row for each key: as they are, their rows are then A operands for dk
// and dv, and pairs of rows the B operand for dq^T = k^T dS^T. Only dq has to be turned back, once.

// Of the 32 queries of a block.
struct QueryNumbers {
    alignas(64) float lse[PANEL], D[PANEL];
};

QueryNumbers query_numbers(const Head& out, const Head& dout, const float* lse, int block) {
    QueryNumbers numbers = {};
    for (int r = 0; r < std::min(PANEL, out.T - block * PANEL); r++) {
        const int64_t t = block * PANEL + r;
        __m512 sum = all(0.0f);
        for (int c = 0; c < out.HS; c += 16)
            sum = _mm512_fmadd_ps(load16(out.data + t * out.ld + c, 0xffff),
                                  load16(dout.data + t * dout.ld + c, 0xffff), sum);
        numbers.D[r] = _mm512_reduce_add_ps(sum);
        numbers.lse[r] = lse[t];
    }
    return numbers;
}

// Rows of P^T and dS^T for a key: 32 queries, as bf16.
struct KeyRow {
    __m512i p, ds;
};

FORCE_INLINE KeyRow key_row(const float* s, const float* dp, const QueryNumbers& queries, int key, bool diagonal,
                            float scale) {
    const __mmask32 sees = diagonal ? ~0u << key : ~0u;  // queries from the key on
    __m512 p[2], ds[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const int at = 16 * half;
        const __m512 x = _mm512_fmsub_ps(all(scale), _mm512_load_ps(s + at), _mm512_load_ps(queries.lse + at));
        p[half] = _mm512_maskz_mov_ps(__mmask16(sees >> at), exp16(x));
        ds[half] = _mm512_mul_ps(_mm512_mul_ps(p[half], all(scale)),
                                 _mm512_sub_ps(_mm512_load_ps(dp + at), _mm512_load_ps(queries.D + at)));
    }
    return {narrow(p[0], p[1]), narrow(ds[0], ds[1])};
}

// Panels of A operands for dv and dk, and of the B operand for dq^T, from the sums of a block.
FORCE_INLINE void probabilities(bf16* p_t, bf16* ds_t, bf16* ds_b, const float* s, const float* dp,
                                const QueryNumbers& queries, bool diagonal, float scale) {
    for (int r = 0; r < PANEL; r += 2) {
        const KeyRow even = key_row(s + r * PANEL, dp + r * PANEL, queries, r, diagonal, scale);
        const KeyRow odd = key_row(s + (r + 1) * PANEL, dp + (r + 1) * PANEL, queries, r + 1, diagonal, scale);
        _mm512_store_si512(p_t + r * PANEL, even.p);
        _mm512_store_si512(p_t + (r + 1) * PANEL, odd.p);
        _mm512_store_si512(ds_t + r * PANEL, even.ds);
        _mm512_store_si512(ds_t + (r + 1) * PANEL, odd.ds);
        for (int half = 0; half < 2; half++)
            _mm512_store_si512(ds_b + half * TILE + r / 2 * PANEL, interleave(even.ds, odd.ds, half));
    }
}

// A 32 x 32 block of sums, turned in place.
void transpose_block(float* block) {
    __m512i quarter[2][2][16];
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            for (int r = 0; r < 16; r++) quarter[i][j][r] = _mm512_load_si512(block + (16 * i + r) * PANEL + 16 * j);
            transpose(quarter[i][j]);
        }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            for (int r = 0; r < 16; r++) _mm512_store_si512(block + (16 * i + r) * PANEL + 16 * j, quarter[j][i][r]);
}

struct HeadBackward {
    Head dq, dk, dv;
    Head dout, out, q, k, v;
    const float* lse;
    int blocks, channels;
    float scale;
    bf16 *k_a, *v_a;           // A operands: a block's channels inside
    bf16 *q_b, *dout_b;        // B operands: the same
    bf16* k_t;                 // A operand: tokens inside
    bf16 *q_cols, *dout_cols;  // B operands: the same
    bf16 *p_t, *ds_t, *ds_b;   // P^T and dS^T of a chunk, panels of keys, queries inside; dS of one block of queries
    float *dq_t, *dk_sums, *dv_sums, *s, *dp;

    HeadBackward(const Head& dq, const Head& dk, const Head& dv, const Head& dout, const Head& out, const float* lse,
                 const Head& q, const Head& k, const Head& v, Arena arena)
        : dq(dq),
          dk(dk),
          dv(dv),
          dout(dout),
          out(out),
          q(q),
          k(k),
          v(v),
          lse(lse),
          blocks(panels_of(q.T)),
          channels(q.HS / PANEL),
          scale(1.0f / std::sqrt(float(q.HS))) {
        const int64_t size = int64_t(blocks) * PANEL * q.HS;
        for (bf16** operand : {&k_a, &v_a, &q_b, &dout_b, &k_t, &q_cols, &dout_cols}) *operand = arena.take<bf16>(size);
        for (bf16** operand : {&p_t, &ds_t}) *operand = arena.take<bf16>(int64_t(CHUNK) * CHUNK * BLOCK);
        ds_b = arena.take<bf16>(CHUNK * BLOCK);
        dq_t = arena.take<float>(size);
        for (float** sums : {&dk_sums, &dv_sums}) *sums = arena.take<float>(int64_t(CHUNK) * PANEL * q.HS);
        for (float** block : {&s, &dp}) *block = arena.take<float>(BLOCK);
    }

    void run() {
        pack_as_a(k_a, k), pack_as_a(v_a, v), pack_as_b(q_b, q), pack_as_b(dout_b, dout);
        pack_as_a_tokens_inside(k_t, k), pack_as_b_tokens_inside(q_cols, q), pack_as_b_tokens_inside(dout_cols, dout);
        for (int j0 = 0; j0 < blocks; j0 += CHUNK) {
            const int j1 = std::min(blocks, j0 + CHUNK);
            for (int i0 = j0; i0 < blocks; i0 += CHUNK) {
                const int i1 = std::min(blocks, i0 + CHUNK);
                for (int i = i0; i < i1; i++) queries(i, i0, j0, std::min(j1, i + 1));
                for (int j = j0; j < j1; j++) keys(j, j0, i0, i1);
            }
            for (int j = j0; j < j1; j++) {
                store_block(dk, j, dk_sums + int64_t(j - j0) * channels * BLOCK);
                store_block(dv, j, dv_sums + int64_t(j - j0) * channels * BLOCK);
            }
        }
    }

    // P^T and dS^T of query block i and keys j0 ... j1 - 1, and what they add to dq.
    void queries(int i, int i0, int j0, int j1) {
        const QueryNumbers numbers = query_numbers(out, dout, lse, i);
        for (int j = j0; j < j1; j++) {
            multiply_panels(s, k_a + int64_t(j) * channels * TILE_PAIR, q_b + int64_t(i) * channels * TILE_PAIR,
                            channels, false);
            multiply_panels(dp, v_a + int64_t(j) * channels * TILE_PAIR, dout_b + int64_t(i) * channels * TILE_PAIR,
                            channels, false);
            const int64_t at = (int64_t(j - j0) * CHUNK + i - i0) * TILE_PAIR;
            probabilities(p_t + at, ds_t + at, ds_b + (j - j0) * TILE_PAIR, s, dp, numbers, i == j, scale);
        }
        float* sums = dq_t + int64_t(i) * channels * BLOCK;
        for (int c = 0; c < channels; c++)
            multiply_panels(sums + c * BLOCK, k_t + (int64_t(c) * blocks + j0) * TILE_PAIR, ds_b, j1 - j0, j0 > 0);
        if (j1 < i + 1) return;
        for (int c = 0; c < channels; c++) transpose_block(sums + c * BLOCK);
        store_block(dq, i, sums);
    }

    // What the query blocks i0 ... i1 - 1 add to dk and dv of key block j.
    void keys(int j, int j0, int i0, int i1) {
        const int first = std::max(i0, j);
        const int64_t from = (int64_t(j - j0) * CHUNK + first - i0) * TILE_PAIR;
        for (int c = 0; c < channels; c++) {
            const int64_t to = (int64_t(j - j0) * channels + c) * BLOCK;
            const int64_t inside = (int64_t(c) * blocks + first) * TILE_PAIR;
            multiply_panels(dk_sums + to, ds_t + from, q_cols + inside, i1 - first, i0 > j0);
            multiply_panels(dv_sums + to, p_t + from, dout_cols + inside, i1 - first, i0 > j0);
        }
    }
};

void check_head_size(int HS) {
    ENSURE(HS % PANEL == 0 && HS <= 128, "attention from panels: %d channels per head; it takes 32, 64, 96 or 128", HS);
}

}  // namespace

int64_t attention_scratch_bytes(int T, int HS) {
    return round_up<int64_t>(std::max(forward_bytes(T, HS), backward_bytes(T, HS)), 4096) * omp_get_max_threads();
}

template <>
void attention_forward<bf16>(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream) {
    check_head_size(HS);
    const int C = NH * HS;
    const int64_t own = round_up<int64_t>(forward_bytes(T, HS), 4096);
    char* scratch = static_cast<char*>(cpu::scratch(own * omp_get_max_threads()));
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            const TileRegisters registers;
            const auto part = [&](int which) {
                bf16* rows = const_cast<bf16*>(qkv) + int64_t(b) * T * 3 * C + which * C + h * HS;
                return Head{rows, T, HS, 3 * C};
            };
            head_forward({out + int64_t(b) * T * C + h * HS, T, HS, C}, lse + (int64_t(b) * NH + h) * T, part(0),
                         part(1), part(2), {scratch + own * omp_get_thread_num()});
            _mm_sfence();
        }
}

template <>
void attention_backward<bf16>(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B,
                              int T, int NH, int HS, Stream) {
    check_head_size(HS);
    const int C = NH * HS;
    const int64_t own = round_up<int64_t>(backward_bytes(T, HS), 4096);
    char* scratch = static_cast<char*>(cpu::scratch(own * omp_get_max_threads()));
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            const TileRegisters registers;
            const auto part = [&](const bf16* matrix, int which, int ld) {
                return Head{const_cast<bf16*>(matrix) + int64_t(b) * T * ld + which * C + h * HS, T, HS, ld};
            };
            HeadBackward(part(dqkv, 0, 3 * C), part(dqkv, 1, 3 * C), part(dqkv, 2, 3 * C), part(dout, 0, C),
                         part(out, 0, C), lse + (int64_t(b) * NH + h) * T, part(qkv, 0, 3 * C), part(qkv, 1, 3 * C),
                         part(qkv, 2, 3 * C), {scratch + own * omp_get_thread_num()})
                .run();
            _mm_sfence();
        }
}

}  // namespace cpu::MATRIX_VARIANT
