// matrix_head.h: the head (ops/ops.inc) in bf16 on matrix units. Compiled as matrix_matmul.h is.
//
// The logits exist as sums of a 32 x 32 block only, in the first-level cache. The epilogue of their matmul writes the
// exponentials e twice, packed as the operands of both matmuls of backward: rows as A of e W, columns as B of
// (f X)^T e, the transposed gradient of the weight. To pack them that way takes two shuffles for two rows of a block,
// where columns as A would take a transposition. The gradient is transposed instead, when it is added to dweight: it
// has C rows, and e has as many as there are tokens.
#pragma once
#include <cmath>

#include "cpu/matrix_matmul.h"

namespace cpu::VARIANT {

namespace {

// The layout of `exponentials` (head_bytes), for n = N rounded up to whole micro-panels.
struct HeadMemory {
    bf16 *inp, *scaled;            // (n, C) packed: the input of the head; (C, n): the input times f
    bf16 *e_rows, *e_columns;      // (n, Vp) and (Vp, n) packed; only with `keep`
    float* block_sums;             // (panels of Vp, n): sums of e over 32 columns
    float *shift, *factor, *pull;  // (n): a log2(e), f, -f S
    int* columns;                  // (n): the target's column in the shard, or -1
    int64_t bytes;

    HeadMemory(void* base, int N, int C, int Vp, bool keep) {
        Arena arena{base, PAGE};
        const int n = round_up(N, PANEL);
        inp = arena.take<bf16>(operand_size(n, C));
        scaled = arena.take<bf16>(operand_size(n, C));
        e_rows = arena.take<bf16>(keep ? operand_size(n, Vp) : 0);
        e_columns = arena.take<bf16>(keep ? operand_size(n, Vp) : 0);
        block_sums = arena.take<float>(int64_t(n) * panels_of(Vp));
        shift = arena.take<float>(n), factor = arena.take<float>(n), pull = arena.take<float>(n);
        columns = arena.take<int>(n);
        bytes = arena.bytes;
    }
};

// block_sums, and with KEEP e_rows and e_columns, from the logits' sums.
template <bool KEEP>
struct ExponentialEpilogue {
    HeadMemory memory;
    int n_panels, v_panels, vocabulary;  // vocabulary: columns before the padding

    INLINE void prefetch(int, int, int, int) const {}

    // r0 and r1 are even.
    INLINE void apply(const float* sums, int i, int j, int r0, int r1) const {
        const uint32_t in_vocabulary = lane_mask32(vocabulary - j * PANEL);
        float* block_sums = memory.block_sums + (int64_t(j) * n_panels + i) * PANEL;
        for (int r = r0; r < r1; r += 2) {
            const __m512i x = row(sums, block_sums, i, j, r, in_vocabulary);
            const __m512i y = row(sums, block_sums, i, j, r + 1, in_vocabulary);
            if (!KEEP) continue;
            bf16* rows = pair_at(memory.e_rows, i, j, v_panels) + PANEL * r;
            bf16* columns = pair_at(memory.e_columns, j, i, n_panels) + TILE / PANEL * r;
            store_line<true>(rows, x);
            store_line<true>(rows + PANEL, y);
            store_line<true>(columns, interleave(x, y, 0));
            store_line<true>(columns + TILE, interleave(x, y, 1));
        }
    }

    // e of row r, rounded.
    INLINE __m512i row(const float* sums, float* block_sums, int i, int j, int r, uint32_t in_vocabulary) const {
        const int n = i * PANEL + r;
        const uint32_t lane = uint32_t(memory.columns[n] - j * PANEL);
        const __mmask32 mask = in_vocabulary & ~(lane < PANEL ? 1u << lane : 0u);
        const __m512 shift = broadcast(memory.shift[n]);
        const auto e = [&](int half) {
            const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(sums + PANEL * r + 16 * half), broadcast(LOG2_E), shift);
            // min returns its second operand where one is NaN, so NaN stays.
            return _mm512_maskz_mov_ps(__mmask16(mask >> (16 * half)),
                                       exp2_16(_mm512_min_ps(broadcast(HEAD_LIMIT * LOG2_E), x)));
        };
        const __m512 first = e(0), second = e(1);
        block_sums[r] = _mm512_reduce_add_ps(_mm512_add_ps(first, second));
        return round_pair_to_bf16(first, second);
    }
};

// dinp (N, C) = f sums + pull W[target]. sums = e W.
struct HeadInputEpilogue {
    HeadMemory memory;
    bf16* dinp;
    const bf16* weight;
    int N, C;

    INLINE void prefetch(int, int, int, int) const {}

    INLINE void apply(const float* sums, int i, int j, int r0, int r1) const {
        r1 = std::min(r1, N - i * PANEL);
        const int column = j * PANEL;
        const __mmask32 mask = lane_mask32(C - column);
        for (int r = r0; r < r1; r++) {
            const int n = i * PANEL + r, target = memory.columns[n];
            const __m512 factor = broadcast(memory.factor[n]), pull = broadcast(memory.pull[n]);
            __m512 x0 = _mm512_mul_ps(_mm512_load_ps(sums + PANEL * r), factor);
            __m512 x1 = _mm512_mul_ps(_mm512_load_ps(sums + PANEL * r + 16), factor);
            if (target >= 0) {
                const __m512i w = _mm512_maskz_loadu_epi16(mask, weight + int64_t(target) * C + column);
                x0 = _mm512_fmadd_ps(pull, widen(_mm512_castsi512_si256(w)), x0);
                x1 = _mm512_fmadd_ps(pull, widen(_mm512_extracti64x4_epi64(w, 1)), x1);
            }
            store_row<false>(dinp + int64_t(n) * C + column, x0, x1, mask);
        }
    }
};

// dweight (Vp, C) = the transposed sums (C, Vp), or += if accumulate.
struct TransposedWeightEpilogue {
    float* dweight;
    int Vp, C;
    bool accumulate;

    INLINE void prefetch(int i, int j, int r0, int r1) const {
        if (accumulate) prefetch_rows(dweight, Vp, C, j, i, r0, r1);
    }

    INLINE void apply(const float* sums, int i, int j, int r0, int r1) const {
        if (r0 == PANEL || r1 < PANEL) return;  // a transposition takes whole blocks
        for (int row = 0; row < PANEL; row += 16)
            for (int column = 0; column < PANEL; column += 16)
                store(sums + row * PANEL + column, i * PANEL + row, j * PANEL + column);
    }

    // 16 rows c and 16 columns v of the sums.
    INLINE void store(const float* sums, int c, int v) const {
        __m512i x[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) x[r] = _mm512_load_si512(sums + r * PANEL);
        transpose(x);
        const __mmask16 mask = lane_mask16(C - c);
        float* to = dweight + int64_t(v) * C + c;
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++, to += C) {
            if (v + r >= Vp) return;
            const __m512 before = accumulate ? _mm512_maskz_loadu_ps(mask, to) : broadcast(0.0f);
            _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, _mm512_castsi512_ps(x[r])));
        }
    }
};

// dweight[target] += pull inp[n], in the order of n. Threads share the channels.
void add_target_rows(float* dweight, const HeadMemory& memory, const HeadInput<bf16>& head) {
#pragma omp for schedule(static) nowait
    for (int c = 0; c < head.C; c += 16)
        for (int n = 0; n < head.N; n++) {
            if (memory.columns[n] < 0) continue;
            const __mmask16 mask = lane_mask16(head.C - c);
            float* to = dweight + int64_t(memory.columns[n]) * head.C + c;
            const __m512 x = load16(head.inp + int64_t(n) * head.C + c, mask);
            _mm512_mask_storeu_ps(to, mask,
                                  _mm512_fmadd_ps(broadcast(memory.pull[n]), x, _mm512_maskz_loadu_ps(mask, to)));
        }
}

// inp (N, C) times its factors, rounded, with columns as the outer dimension.
void pack_scaled(const HeadMemory& memory, const HeadInput<bf16>& head) {
    for_each_block(head.inp, head.N, head.C, [&](const __m512i(&inp)[32], int r, int c) {
        __m512i x[32];
        for (int k = 0; k < 32; k++) {
            const __m512 factor = broadcast(memory.factor[r * PANEL + k]);
            x[k] = round_pair_to_bf16(_mm512_mul_ps(widen(_mm512_castsi512_si256(inp[k])), factor),
                                      _mm512_mul_ps(widen(_mm512_extracti64x4_epi64(inp[k], 1)), factor));
        }
        pack_columns_as_a(pair_at(memory.scaled, c, r, panels_of(head.N)), x);
    });
}

// This thread's sums of a matmul.
float* task_sums(void* scratch) { return static_cast<float*>(scratch) + TASK_SUMS * omp_get_thread_num(); }

int64_t all_task_sums() { return TASK_SUMS * omp_get_max_threads() * int64_t(sizeof(float)); }

}  // namespace

int64_t head_bytes(int N, int C, int Vp, bool keep) { return HeadMemory(nullptr, N, C, Vp, keep).bytes; }

void head_forward(float* sums, void* exponentials, const float* target_logits, const HeadInput<bf16>& head, bool keep,
                  Stream) {
    const HeadMemory memory(exponentials, head.N, head.C, head.Vp, keep);
    const int n_panels = panels_of(head.N), v_panels = panels_of(head.Vp), c_panels = panels_of(head.C);
    const PackedOperand inp = packed_operand(memory.inp, n_panels, c_panels);
    const PackedOperand weight = packed_forward(head.weight.packed, head.Vp, head.C);
    void* scratch = cpu::scratch(all_task_sums());
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (int n = 0; n < n_panels * PANEL; n++) {
            memory.shift[n] = n < head.N ? target_logits[n] * LOG2_E : 0.0f;
            memory.columns[n] = n < head.N ? head.shard.row(head.targets[n]) : -1;
        }
        for_each_block(head.inp, head.N, head.C, [&](const __m512i(&x)[32], int r, int c) {
            pack_rows_as_a(pair_at(memory.inp, r, c, c_panels), x);
        });
#pragma omp barrier
        if (keep)
            matmul(task_sums(scratch), inp, weight,
                   ExponentialEpilogue<true>{memory, n_panels, v_panels, head.shard.count});
        else
            matmul(task_sums(scratch), inp, weight,
                   ExponentialEpilogue<false>{memory, n_panels, v_panels, head.shard.count});
#pragma omp barrier
#pragma omp for schedule(static)
        for (int n = 0; n < head.N; n++) {
            double sum = 0.0;
            for (int j = 0; j < v_panels; j++) sum += double(memory.block_sums[int64_t(j) * n_panels * PANEL + n]);
            sums[n] = float(sum);
        }
    }
}

void head_backward(bf16* dinp, float* dweight, void* exponentials, const float* sums, const HeadInput<bf16>& head,
                   float scale, bool accumulate, Stream) {
    const HeadMemory memory(exponentials, head.N, head.C, head.Vp, true);
    const int n_panels = panels_of(head.N), v_panels = panels_of(head.Vp), c_panels = panels_of(head.C);
    void* scratch = cpu::scratch(all_task_sums());
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int n = 0; n < n_panels * PANEL; n++) {
            const bool counts = n < head.N && head.targets[n] >= 0;
            memory.factor[n] = counts ? scale / (1.0f + sums[n]) : 0.0f;
            memory.pull[n] = counts ? -scale * (sums[n] / (1.0f + sums[n])) : 0.0f;
        }
        pack_scaled(memory, head);
#pragma omp barrier
        matmul(task_sums(scratch), packed_operand(memory.e_rows, n_panels, v_panels),
               packed_backward(head.weight.packed, head.Vp, head.C),
               HeadInputEpilogue{memory, dinp, head.weight.rows, head.N, head.C});
        matmul(task_sums(scratch), packed_operand(memory.scaled, c_panels, n_panels),
               packed_operand(memory.e_columns, v_panels, n_panels),
               TransposedWeightEpilogue{dweight, head.Vp, head.C, accumulate});
#pragma omp barrier
        add_target_rows(dweight, memory, head);
    }
}

// ---- all operations

const Variant variant{.of_float = {},
                      .of_bf16 = {.matmul_scratch_bytes = matmul_scratch_bytes,
                                  .scratch_bytes = scratch_bytes,
                                  .measure_peak_flops = measure_peak_flops,
                                  .packed_bytes = packed_bytes,
                                  .pack_weight = pack_weight,
                                  .matmul_forward = matmul_forward,
                                  .matmul_backward = matmul_backward,
                                  .attention_forward = attention_forward,
                                  .attention_backward = attention_backward,
                                  .head_bytes = head_bytes,
                                  .head_forward = head_forward,
                                  .head_backward = head_backward}};

}  // namespace cpu::VARIANT
