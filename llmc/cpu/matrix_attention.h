// matrix_attention.h: causal attention in bf16 on matrix units, for heads of 32, 64, 96 or 128 channels. Compiled for
// AMX (amx.cpp) and for AVX512-BF16 (avx512bf16.cpp), into the namespace VARIANT of the including file.
//
// A task is one head of one sequence. It packs the head's q, k and v (matrix_microkernel.h) and visits blocks of 32
// queries by 32 keys; it skips the blocks above the diagonal. No T x T matrix is stored. Forward keeps the scores of 32
// queries for up to FORWARD_KEYS key blocks and computes their exact softmax; longer sequences take several such
// chunks of keys, rescaled online. Backward keeps P^T and dS^T of a chunk of CHUNK x CHUNK blocks, 1 MiB together, in
// the second-level cache. Scores, softmax and all sums are float; P and dS are rounded to bf16 as operands. The chunks'
// sizes are constants, so the bits do not depend on the number of threads.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "cpu/matrix_microkernel.h"
#include "cpu/memory.h"
#include "cpu/variants.h"

namespace cpu::VARIANT {

namespace {

constexpr int FORWARD_KEYS = 64;  // blocks of 32 keys: the scores take 256 KiB
constexpr int CHUNK = 16;         // blocks of 32 queries, and of 32 keys, in backward

// One head of q, k, v, out or one of their gradients (T, HS); ld: numbers from one row to the next.
struct Head {
    bf16* data;
    int T, HS, ld;
};

// Scratch memory of a task of forward. The operands are packed.
struct ForwardScratch {
    bf16 *q, *k, *v;
    float *score, *sums;
    bf16* p;
    int64_t bytes;

    ForwardScratch(void* base, int T, int HS) {
        const int64_t blocks = panels_of(T), keys = std::min<int64_t>(blocks, FORWARD_KEYS);
        Arena arena{base, 0, 64};
        for (bf16** operand : {&q, &k, &v}) *operand = arena.take<bf16>(blocks * PANEL * HS);
        score = arena.take<float>(keys * BLOCK);
        p = arena.take<bf16>(keys * BLOCK);
        sums = arena.take<float>(PANEL * HS);
        bytes = round_up<int64_t>(arena.used, 4096);
    }
};

// Scratch memory of a task of backward.
struct HeadScratch {
    bf16 *k_a, *v_a;           // A operands; inner dimension: channels
    bf16 *q_b, *dout_b;        // B operands; inner dimension: channels
    bf16* k_t;                 // A operand; inner dimension: tokens
    bf16 *q_cols, *dout_cols;  // B operands; inner dimension: tokens
    bf16 *p_t, *ds_t;          // P^T and dS^T of a chunk, A operands; inner dimension: queries
    bf16* ds_b;                // dS^T of one block of queries, B operand; inner dimension: keys
    float *dq_t, *dk_sums, *dv_sums, *s, *dp;
    int64_t bytes;

    HeadScratch(void* base, int T, int HS) {
        const int64_t size = int64_t(panels_of(T)) * PANEL * HS;
        Arena arena{base, 0, 64};
        for (bf16** operand : {&k_a, &v_a, &q_b, &dout_b, &k_t, &q_cols, &dout_cols}) *operand = arena.take<bf16>(size);
        for (bf16** operand : {&p_t, &ds_t}) *operand = arena.take<bf16>(int64_t(CHUNK) * CHUNK * BLOCK);
        ds_b = arena.take<bf16>(CHUNK * BLOCK);
        dq_t = arena.take<float>(size);
        for (float** sums : {&dk_sums, &dv_sums}) *sums = arena.take<float>(int64_t(CHUNK) * PANEL * HS);
        for (float** block : {&s, &dp}) *block = arena.take<float>(BLOCK);
        bytes = round_up<int64_t>(arena.used, 4096);
    }
};

// Packs a head by one of the four pack functions. Its rows are tokens and its columns are channels.
template <auto PACK>
void pack_head(bf16* packed, const Head& head) {
    const int blocks = panels_of(head.T), channels = head.HS / PANEL;
    for (int i = 0; i < blocks; i++)
        for (int c = 0; c < channels; c++) {
            __m512i x[32];
            load_block(x, head.data + int64_t(i) * PANEL * head.ld + c * PANEL, head.ld, head.T - i * PANEL, PANEL);
            PACK(pair_of<PACK>(packed, i, c, blocks, channels), x);
        }
}

// The keys of 32 that query r of a block may attend to. diagonal: the block is on the diagonal; otherwise it is all.
INLINE __mmask32 visible_keys(bool diagonal, int r) { return diagonal ? lane_mask32(r + 1) : ~0u; }

// Stores 32 rows of a head, from row block * 32 on: sums (HS / 32 blocks of 32 x 32) times factor[row], or 1 if it is
// null.
void store_block(const Head& head, int block, const float* sums, const float* factor = nullptr) {
    for (int c = 0; c < head.HS / PANEL; c++)
        for (int r = 0; r < std::min(PANEL, head.T - block * PANEL); r++)
            store_row(head.data + int64_t(block * PANEL + r) * head.ld + c * PANEL,
                      broadcast_row(factor ? factor[r] : 1.0f) * load_row(sums + c * BLOCK + r * PANEL), ~0u);
}

// Returns scale * score - offset for 16 scores. The offset (row_max or lse) is a rounded product, so this product is
// rounded as well; a fused multiply-subtract would leave the rounding error, which is 32 from 1e9 on and overflows exp.
// Compilers do not fuse a multiplication that names its rounding.
INLINE __m512 exponent(float scale, const float* score, __m512 offset) {
    const __m512 scaled =
        _mm512_mul_round_ps(broadcast(scale), _mm512_load_ps(score), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_sub_ps(scaled, offset);
}

// ---- Forward

// The softmax of 32 queries over the key chunks so far.
struct Softmax {
    alignas(64) float row_max[PANEL], row_sum[PANEL];  // largest scale * score, sum of exp(scale * score - row_max)
    alignas(64) float rescale[PANEL];                  // exp(old row_max - new row_max): a factor for earlier sums
};

// out = q k^T for query block i and key blocks j0 to j1 - 1, one 32 x 32 block after the other. Sets softmax.row_max
// and softmax.rescale to include these keys.
void compute_scores(float* out, Softmax& softmax, const bf16* q, const bf16* k, int i, int j0, int j1, int channels,
                    float scale) {
    alignas(64) float block_max[PANEL][16];
    for (int r = 0; r < PANEL; r++) _mm512_store_ps(block_max[r], broadcast(-INFINITY));
    for (int j = j0; j < j1; j++) {
        float* s = out + (j - j0) * BLOCK;
        microkernel(s, q + int64_t(i) * channels * TILE_PAIR, k + int64_t(j) * channels * TILE_PAIR, channels, false);
        for (int r = 0; r < PANEL; r++) {
            const __mmask32 mask = visible_keys(i == j, r);
            const Row score = load_row(s + r * PANEL);
            __m512 x = _mm512_load_ps(block_max[r]);
            x = _mm512_mask_max_ps(x, __mmask16(mask), x, score.first);
            x = _mm512_mask_max_ps(x, __mmask16(mask >> 16), x, score.second);
            _mm512_store_ps(block_max[r], x);
        }
    }
    for (int r = 0; r < PANEL; r++) {
        const float old_max = softmax.row_max[r];
        const float new_max = std::max(old_max, scale * _mm512_reduce_max_ps(_mm512_load_ps(block_max[r])));
        softmax.rescale[r] = old_max == new_max ? 1.0f : std::exp(old_max - new_max);
        softmax.row_max[r] = new_max;
    }
}

// p = exp(scale * score - row_max) as an A operand, 0 where masked. Updates softmax.row_sum.
void compute_exponentials(bf16* p, Softmax& softmax, const float* score, int i, int j0, int j1, float scale) {
    alignas(64) float sums[PANEL][16] = {};
    for (int j = j0; j < j1; j++, score += BLOCK, p += TILE_PAIR)
        for (int r = 0; r < PANEL; r++) {
            const __m512 row_max = broadcast(softmax.row_max[r]);
            const __m512 x0 = exponent(scale, score + r * PANEL, row_max);
            const __m512 x1 = exponent(scale, score + r * PANEL + 16, row_max);
            const Row weights = mask_row(visible_keys(i == j, r), {exp16(x0), exp16(x1)});
            const __m512 sum = _mm512_add_ps(weights.first, weights.second);
            _mm512_store_ps(sums[r], _mm512_add_ps(_mm512_load_ps(sums[r]), sum));
            _mm512_store_si512(p + r * 32, round_row(weights));
        }
    for (int r = 0; r < PANEL; r++)
        softmax.row_sum[r] = softmax.row_sum[r] * softmax.rescale[r] + _mm512_reduce_add_ps(_mm512_load_ps(sums[r]));
}

// Forward of one head: out, q, k, v (T, HS), lse (T).
void head_forward(const Head& out, float* lse, const Head& q, const Head& k, const Head& v,
                  const ForwardScratch& scratch) {
    float* const sums = scratch.sums;
    const int T = q.T, HS = q.HS, blocks = panels_of(T), channels = HS / PANEL;
    const float scale = 1.0f / std::sqrt(float(HS));
    pack_head<pack_rows_as_a>(scratch.q, q);
    pack_head<pack_rows_as_b>(scratch.k, k);
    pack_head<pack_columns_as_b>(scratch.v, v);

    for (int i = 0; i < blocks; i++) {
        Softmax softmax;
        std::fill_n(softmax.row_max, PANEL, -INFINITY);
        std::fill_n(softmax.row_sum, PANEL, 0.0f);
        for (int j0 = 0; j0 <= i; j0 += FORWARD_KEYS) {
            const int j1 = std::min(i + 1, j0 + FORWARD_KEYS);
            compute_scores(scratch.score, softmax, scratch.q, scratch.k, i, j0, j1, channels, scale);
            compute_exponentials(scratch.p, softmax, scratch.score, i, j0, j1, scale);
            if (j0 > 0)
                for (int c = 0; c < channels; c++)
                    for (int r = 0; r < PANEL; r++) {
                        float* const x = sums + c * BLOCK + r * PANEL;
                        save_row(x, load_row(x) * broadcast_row(softmax.rescale[r]));
                    }
            for (int c = 0; c < channels; c++)
                microkernel(sums + c * BLOCK, scratch.p, scratch.v + (int64_t(c) * blocks + j0) * TILE_PAIR, j1 - j0,
                            j0 > 0);
        }
        alignas(64) float factor[PANEL];
        for (int r = 0; r < PANEL; r++) {
            factor[r] = 1.0f / softmax.row_sum[r];
            if (i * PANEL + r < T) lse[i * PANEL + r] = softmax.row_max[r] + std::log(softmax.row_sum[r]);
        }
        store_block(out, i, sums, factor);
    }
}

// ---- Backward: with P = exp(scale q k^T - lse), dP = dout v^T and D = row sums of dout * out,
//      dS = scale P (dP - D), dq = dS k, dk = dS^T q, dv = P^T dout.
//
// Blocks of P and dS are computed transposed, a row for each key. In this layout their rows are A operands for dk and
// dv, and pairs of their rows are the B operand of dq^T = k^T dS^T. Only dq must be transposed, once.

// lse and D of the 32 queries of a block.
struct QueryStats {
    alignas(64) float lse[PANEL], D[PANEL];
};

QueryStats query_stats(const Head& out, const Head& dout, const float* lse, int block) {
    QueryStats stats = {};
    for (int r = 0; r < std::min(PANEL, out.T - block * PANEL); r++) {
        const int64_t t = block * PANEL + r;
        __m512 sum = broadcast(0.0f);
        for (int c = 0; c < out.HS; c += 16)
            sum = _mm512_fmadd_ps(load16(out.data + t * out.ld + c, 0xffff),
                                  load16(dout.data + t * dout.ld + c, 0xffff), sum);
        stats.D[r] = _mm512_reduce_add_ps(sum);
        stats.lse[r] = lse[t];
    }
    return stats;
}

// A key's row of P^T and of dS^T: 32 queries, as bf16.
struct KeyRow {
    __m512i p, ds;
};

// s and dp: the key's row of the sums k q^T and v dout^T. diagonal: queries before the key (0 to 31) are masked.
INLINE KeyRow key_row(const float* s, const float* dp, const QueryStats& queries, int key, bool diagonal, float scale) {
    const __mmask32 mask = diagonal ? ~0u << key : ~0u;  // queries at or after the key
    __m512 p[2], ds[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const int at = 16 * half;
        const __m512 x = exponent(scale, s + at, _mm512_load_ps(queries.lse + at));
        p[half] = _mm512_maskz_mov_ps(__mmask16(mask >> at), exp16(x));
        ds[half] = _mm512_mul_ps(_mm512_mul_ps(p[half], broadcast(scale)),
                                 _mm512_sub_ps(_mm512_load_ps(dp + at), _mm512_load_ps(queries.D + at)));
    }
    return {round_pair_to_bf16(p[0], p[1]), round_pair_to_bf16(ds[0], ds[1])};
}

// P^T and dS^T of a block (32 keys, 32 queries) from its sums s and dp: p_t and ds_t are tile pairs of A operands for
// dv and dk, ds_b is a tile pair of the B operand for dq^T.
INLINE void probability_blocks(bf16* p_t, bf16* ds_t, bf16* ds_b, const float* s, const float* dp,
                               const QueryStats& queries, bool diagonal, float scale) {
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

// Transposes a 32 x 32 block of sums in place.
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

// Backward of one head. All matrices are (T, HS), lse is (T).
struct HeadBackward : HeadScratch {
    Head dq, dk, dv, dout, out;
    const float* lse;
    Head q, k, v;
    int blocks = panels_of(q.T), channels = q.HS / PANEL;
    float scale = 1.0f / std::sqrt(float(q.HS));

    void run() {
        pack_head<pack_rows_as_a>(k_a, k);
        pack_head<pack_rows_as_a>(v_a, v);
        pack_head<pack_rows_as_b>(q_b, q);
        pack_head<pack_rows_as_b>(dout_b, dout);
        pack_head<pack_columns_as_a>(k_t, k);
        pack_head<pack_columns_as_b>(q_cols, q);
        pack_head<pack_columns_as_b>(dout_cols, dout);
        for (int j0 = 0; j0 < blocks; j0 += CHUNK) {
            const int j1 = std::min(blocks, j0 + CHUNK);
            for (int i0 = j0; i0 < blocks; i0 += CHUNK) {
                const int i1 = std::min(blocks, i0 + CHUNK);
                for (int i = i0; i < i1; i++) backward_queries(i, i0, j0, std::min(j1, i + 1));
                for (int j = j0; j < j1; j++) backward_keys(j, j0, i0, i1);
            }
            for (int j = j0; j < j1; j++) {
                store_block(dk, j, dk_sums + int64_t(j - j0) * channels * BLOCK);
                store_block(dv, j, dv_sums + int64_t(j - j0) * channels * BLOCK);
            }
        }
    }

    // Computes P^T and dS^T of query block i and key blocks j0 to j1 - 1, and adds their part to dq.
    void backward_queries(int i, int i0, int j0, int j1) {
        const QueryStats stats = query_stats(out, dout, lse, i);
        for (int j = j0; j < j1; j++) {
            microkernel(s, k_a + int64_t(j) * channels * TILE_PAIR, q_b + int64_t(i) * channels * TILE_PAIR, channels,
                        false);
            microkernel(dp, v_a + int64_t(j) * channels * TILE_PAIR, dout_b + int64_t(i) * channels * TILE_PAIR,
                        channels, false);
            const int64_t at = (int64_t(j - j0) * CHUNK + i - i0) * TILE_PAIR;
            probability_blocks(p_t + at, ds_t + at, ds_b + (j - j0) * TILE_PAIR, s, dp, stats, i == j, scale);
        }
        float* sums = dq_t + int64_t(i) * channels * BLOCK;
        for (int c = 0; c < channels; c++)
            microkernel(sums + c * BLOCK, k_t + (int64_t(c) * blocks + j0) * TILE_PAIR, ds_b, j1 - j0, j0 > 0);
        if (j1 < i + 1) return;
        for (int c = 0; c < channels; c++) transpose_block(sums + c * BLOCK);
        store_block(dq, i, sums);
    }

    // Adds the part of query blocks i0 to i1 - 1 to dk and dv of key block j.
    void backward_keys(int j, int j0, int i0, int i1) {
        const int first = std::max(i0, j);
        const int64_t from = (int64_t(j - j0) * CHUNK + first - i0) * TILE_PAIR;
        for (int c = 0; c < channels; c++) {
            const int64_t to = (int64_t(j - j0) * channels + c) * BLOCK;
            const int64_t inside = (int64_t(c) * blocks + first) * TILE_PAIR;
            microkernel(dk_sums + to, ds_t + from, q_cols + inside, i1 - first, i0 > j0);
            microkernel(dv_sums + to, p_t + from, dout_cols + inside, i1 - first, i0 > j0);
        }
    }
};

// Calls run(scratch, head, statistics) for each head of each sequence: head(matrix, index, ld) is its part of a matrix
// with ld numbers in a row, of which part `index` (q, k, v) has the heads; statistics is the place of its lse.
template <class Scratch, class Run>
void for_each_head(int B, int T, int NH, int HS, const Run& run) {
    const int64_t own = Scratch(nullptr, T, HS).bytes;
    char* memory = static_cast<char*>(cpu::scratch(own * omp_get_max_threads()));
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++) {
            const TileRegisters registers;
            const auto head = [&](const bf16* matrix, int index, int ld) {
                return Head{const_cast<bf16*>(matrix) + int64_t(b) * T * ld + (index * NH + h) * HS, T, HS, ld};
            };
            run(Scratch(memory + own * omp_get_thread_num(), T, HS), head, (int64_t(b) * NH + h) * T);
            _mm_sfence();  // as in matmul
        }
}

}  // namespace

int64_t scratch_bytes(int, int T, int C, int NH, int) {
    const int HS = C / NH;
    return std::max(ForwardScratch(nullptr, T, HS).bytes, HeadScratch(nullptr, T, HS).bytes) * omp_get_max_threads();
}

void attention_forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream) {
    const int C = NH * HS;
    for_each_head<ForwardScratch>(B, T, NH, HS, [&](const ForwardScratch& scratch, const auto& head, int64_t at) {
        head_forward(head(out, 0, C), lse + at, head(qkv, 0, 3 * C), head(qkv, 1, 3 * C), head(qkv, 2, 3 * C), scratch);
    });
}

void attention_backward(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B, int T,
                        int NH, int HS, Stream) {
    const int C = NH * HS;
    for_each_head<HeadScratch>(B, T, NH, HS, [&](const HeadScratch& scratch, const auto& head, int64_t at) {
        const auto part = [&](const bf16* matrix, int index) { return head(matrix, index, 3 * C); };
        HeadBackward task{scratch,         part(dqkv, 0), part(dqkv, 1), part(dqkv, 2), head(dout, 0, C),
                          head(out, 0, C), lse + at,      part(qkv, 0),  part(qkv, 1),  part(qkv, 2)};
        task.run();
    });
}

}  // namespace cpu::VARIANT
