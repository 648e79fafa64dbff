// matrix_head.h: the head (ops/ops.inc) in bf16 on matrix units. Compiled as matrix_matmul.h is.
//
// A task of forward owns up to MOST_ROWS micro-panels of rows and a part of the vocabulary, which it visits in
// strips of STRIP micro-panels. The logits of a strip exist as sums of 32 x 32 blocks only. Their epilogue packs the
// exponentials e twice. Those packed as rows stay in the second-level cache, where e W reads them at once: its sums,
// without the rows' factors, are all that backward needs for dinp. Those packed as columns, B of the transposed
// gradient of the weight, (f X)^T e, are stored. Columns as A would take a transposition; the gradient is transposed
// instead, when it is added to dweight: it has C rows, and e has as many as there are tokens.
//
// The parts depend on the vocabulary alone, and their sums are added in order: the bits do not depend on the threads.
#pragma once
#include <cmath>

#include "cpu/matrix_matmul.h"

namespace cpu::VARIANT {

namespace {

constexpr int STRIP = KC;                       // micro-panels
constexpr int MOST_PARTS = 4, LEAST_PART = 64;  // parts of the vocabulary for threads to share, in micro-panels
constexpr int MOST_ROWS = 8;                    // micro-panels, whose strip fits into TASK_SUMS
constexpr int TASK_BYTES = 640 << 10;           // share of the second-level cache for a task

int part_panels(int v_panels) { return round_up(std::max(ceil_div(v_panels, MOST_PARTS), LEAST_PART), STRIP); }
int parts_of(int v_panels) { return ceil_div(v_panels, part_panels(v_panels)); }

// The layout of `exponentials` (head_bytes), for n = N rounded up to whole micro-panels.
struct HeadMemory {
    bf16* inp;                     // the input of the head packed, (n, C); in backward that times f, (C, n)
    bf16* e;                       // (Vp, n) packed; only with `keep`
    float* products;               // (parts, n, C) in 32 x 32 blocks: e W; only with `keep`
    float* strip_sums;             // (strips, n): sums of e over the columns of a strip
    float *shift, *factor, *pull;  // (n): a log2(e), f, -f S
    int* columns;                  // (n): the target's column in the shard, or -1
    bool keep;
    int64_t bytes;

    HeadMemory(void* base, int N, int C, int Vp, bool keep) : keep(keep) {
        Arena arena{base, 0, PAGE};
        const int n = round_up(N, PANEL), v_panels = panels_of(Vp);
        inp = arena.take<bf16>(operand_size(n, C));
        e = arena.take<bf16>(keep ? operand_size(n, Vp) : 0);
        products = arena.take<float>(keep ? parts_of(v_panels) * operand_size(n, C) : 0);
        strip_sums = arena.take<float>(int64_t(n) * ceil_div(v_panels, STRIP));
        shift = arena.take<float>(n), factor = arena.take<float>(n), pull = arena.take<float>(n);
        columns = arena.take<int>(n);
        bytes = arena.used;
    }
};

// A task of forward keeps this of a strip, in its thread's scratch memory (TASK_SUMS).
struct Strip {
    float *sums, *lanes;  // the logits' sums; the exponentials' (rows, 16)
    bf16* e;              // packed as A

    explicit Strip(void* scratch) {
        Arena arena{scratch, 0, 64};
        sums = arena.take<float>(MOST_ROWS * STRIP * BLOCK);
        lanes = arena.take<float>(MOST_ROWS * PANEL * 16);
        e = arena.take<bf16>(MOST_ROWS * STRIP * TILE_PAIR);
    }
};

// The exponentials of a strip from the sums of its logits: strip.lanes, and with memory.keep strip.e and memory.e.
struct ExponentialEpilogue {
    HeadMemory memory;
    Strip strip;
    int row, column, n_panels;  // the first micro-panels of the task and of the strip; micro-panels of n
    int vocabulary;             // columns before the padding

    INLINE void prefetch(int, int, int, int) const {}

    // r0 and r1 are even.
    INLINE void apply(const float* sums, int i, int j, int r0, int r1) const {
        const uint32_t in_vocabulary = lane_mask32(vocabulary - j * PANEL);
        const __m512i first = _mm512_set1_epi32(j * PANEL), size = _mm512_set1_epi32(PANEL);
        const auto targets = [&](int half) {  // rows whose target is in this block
            const __m512i column = _mm512_loadu_si512(memory.columns + i * PANEL + 16 * half);
            return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(column, first), size);
        };
        if (in_vocabulary == ~0u && !(targets(0) | targets(1)))
            rows<false>(sums, i, j, r0, r1, in_vocabulary);
        else
            rows<true>(sums, i, j, r0, r1, in_vocabulary);
    }

    template <bool MASK>
    __attribute__((noinline)) void rows(const float* sums, int i, int j, int r0, int r1, uint32_t in_vocabulary) const {
        bf16* rows = pair_at(strip.e, i - row, j - column, STRIP);
        bf16* columns = pair_at(memory.e, j, i, n_panels);
        for (int r = r0; r < r1; r += 2) {
            const __m512i x = exponentials<MASK>(sums, i, j, r, in_vocabulary);
            const __m512i y = exponentials<MASK>(sums, i, j, r + 1, in_vocabulary);
            if (!memory.keep) continue;
            _mm512_store_si512(rows + PANEL * r, x);
            _mm512_store_si512(rows + PANEL * r + PANEL, y);
            for (int half = 0; half < 2; half++)
                _mm512_stream_si512(reinterpret_cast<__m512i*>(columns + half * TILE + TILE / PANEL * r),
                                    interleave(x, y, half));
        }
    }

    // Those of row r, rounded.
    template <bool MASK>
    INLINE __m512i exponentials(const float* sums, int i, int j, int r, uint32_t in_vocabulary) const {
        const int n = i * PANEL + r;
        const __m512 shift = broadcast(memory.shift[n]);
        const auto e = [&](int half) {
            const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(sums + PANEL * r + 16 * half), broadcast(LOG2_E), shift);
            // min returns its second operand where one is NaN, so NaN stays.
            return exp2_16(_mm512_min_ps(broadcast(HEAD_LIMIT * LOG2_E), x));
        };
        Row x = {e(0), e(1)};
        if (MASK) {
            const uint32_t lane = uint32_t(memory.columns[n] - j * PANEL);
            x = mask_row(in_vocabulary & ~(lane < PANEL ? 1u << lane : 0u), x);
        }
        float* lanes = strip.lanes + (n - row * PANEL) * 16;
        _mm512_store_ps(lanes, _mm512_add_ps(_mm512_load_ps(lanes), _mm512_add_ps(x.first, x.second)));
        return round_row(x);
    }
};

// A task of forward: the rows of inp and micro-panels v0 to v1 - 1 of the vocabulary. products: its sums e W.
void head_task(const HeadMemory& memory, float* products, const Strip& strip, const PackedOperand& inp,
               const HeadInput<bf16>& head, int v0, int v1) {
    const int v_panels = panels_of(head.Vp), c_panels = panels_of(head.C);
    const auto* packed = static_cast<const bf16*>(head.weight.packed);  // two operands
    const PackedOperand forward = packed_operand(packed, v_panels, c_panels);
    const PackedOperand backward = packed_operand(packed + operand_size(head.Vp, head.C), c_panels, v_panels);
    const int rows = inp.panels * PANEL, n = panels_of(head.N) * PANEL;
    const TileRegisters registers;
    for (int v = v0; v < v1; v += STRIP) {
        const int width = std::min(STRIP, v1 - v);
        const PackedOperand e{strip.e, inp.panels, width, STRIP * TILE_PAIR};
        const PackedOperand w{backward.at(0, v), backward.panels, width, backward.stride};
        std::fill_n(strip.lanes, rows * 16, 0.0f);
        multiply(strip.sums, inp, forward.part(v, width), e, w, false,
                 ExponentialEpilogue{memory, strip, inp.first, v, n / PANEL, head.shard.count});
        float* sums = memory.strip_sums + int64_t(v / STRIP) * n + inp.first * PANEL;
        for (int r = 0; r < rows; r++) sums[r] = _mm512_reduce_add_ps(_mm512_load_ps(strip.lanes + 16 * r));
        if (memory.keep)
            multiply(products, e, w, inp, forward.part(std::min(v + STRIP, v1 - width), width), v > v0, NoEpilogue{});
    }
}

// Micro-panels of rows of a task of forward. Each thread has several tasks, of equal size if possible.
int head_rows(int n_panels, int c_panels, int parts) {
    const int bytes = (c_panels + STRIP) * (2 * TILE_PAIR + 4 * BLOCK);  // bytes of one micro-panel
    const int most = std::clamp(TASK_BYTES / bytes, 1, MOST_ROWS);
    const int tasks = std::max(ceil_div(n_panels, most), ceil_div(4 * omp_get_num_threads(), parts));
    return ceil_div(n_panels, tasks);
}

// All threads of a parallel region call it; there is no barrier at its end.
void head_tasks(const HeadMemory& memory, const Strip& strip, const HeadInput<bf16>& head) {
    const int n_panels = panels_of(head.N), v_panels = panels_of(head.Vp), c_panels = panels_of(head.C);
    const int part = part_panels(v_panels), parts = parts_of(v_panels), rows = head_rows(n_panels, c_panels, parts);
    const PackedOperand inp = packed_operand(memory.inp, n_panels, c_panels);
#pragma omp for collapse(2) schedule(dynamic, 1) nowait
    for (int p = 0; p < parts; p++)
        for (int i = 0; i < n_panels; i += rows) {
            float* products = memory.products + (int64_t(p) * n_panels + i) * c_panels * BLOCK;
            head_task(memory, products, strip, inp.part(i, std::min(rows, n_panels - i)), head, p * part,
                      std::min(v_panels, (p + 1) * part));
        }
    _mm_sfence();  // as in matmul
}

// dinp (N, C) = f e W + pull W[target]. All threads of a parallel region call it; there is no barrier at its end.
void input_gradient(bf16* dinp, const HeadMemory& memory, const HeadInput<bf16>& head) {
    const int n_panels = panels_of(head.N), c_panels = panels_of(head.C), parts = parts_of(panels_of(head.Vp));
#pragma omp for schedule(static) nowait
    for (int n = 0; n < head.N; n++)
        for (int j = 0; j < c_panels; j++) {
            const int column = j * PANEL, target = memory.columns[n];
            const __mmask32 mask = lane_mask32(head.C - column);
            Row x = broadcast_row(0.0f);
            for (int p = 0; p < parts; p++)
                x = x + load_row(memory.products + n % PANEL * PANEL +
                                 ((int64_t(p) * n_panels + n / PANEL) * c_panels + j) * BLOCK);
            x = x * broadcast_row(memory.factor[n]);
            if (target >= 0) {
                const Row w = load_row(head.weight.rows + int64_t(target) * head.C + column, mask);
                const __m512 pull = broadcast(memory.pull[n]);
                x = {_mm512_fmadd_ps(pull, w.first, x.first), _mm512_fmadd_ps(pull, w.second, x.second)};
            }
            store_row(dinp + int64_t(n) * head.C + column, x, mask);
        }
}

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
        for (int k = 0; k < 32; k++) x[k] = round_row(widen_row(inp[k]) * broadcast_row(memory.factor[r * PANEL + k]));
        pack_columns_as_a(pair_at(memory.inp, c, r, panels_of(head.N)), x);
    });
}

// Scratch for the sums of all threads.
float* all_sums() {
    return static_cast<float*>(cpu::scratch(TASK_SUMS * omp_get_max_threads() * int64_t(sizeof(float))));
}

}  // namespace

int64_t head_bytes(int N, int C, int Vp, bool keep) { return HeadMemory(nullptr, N, C, Vp, keep).bytes; }

void head_forward(float* sums, void* exponentials, const float* target_logits, const HeadInput<bf16>& head, bool keep,
                  Stream) {
    const HeadMemory memory(exponentials, head.N, head.C, head.Vp, keep);
    const int n_panels = panels_of(head.N), strips = ceil_div(panels_of(head.Vp), STRIP);
    float* scratch = all_sums();
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (int n = 0; n < n_panels * PANEL; n++) {
            memory.shift[n] = n < head.N ? target_logits[n] * LOG2_E : 0.0f;
            memory.columns[n] = n < head.N ? head.shard.row(head.targets[n]) : -1;
        }
        pack_matrix<pack_rows_as_a>(memory.inp, head.inp, head.N, head.C);
#pragma omp barrier
        head_tasks(memory, Strip(scratch + TASK_SUMS * omp_get_thread_num()), head);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int n = 0; n < head.N; n++) {
            double sum = 0.0;
            for (int i = 0; i < strips; i++) sum += double(memory.strip_sums[int64_t(i) * n_panels * PANEL + n]);
            sums[n] = float(sum);
        }
    }
}

void head_backward(bf16* dinp, float* dweight, void* exponentials, const float* sums, const HeadInput<bf16>& head,
                   float scale, bool accumulate, Stream) {
    const HeadMemory memory(exponentials, head.N, head.C, head.Vp, true);
    const int n_panels = panels_of(head.N);
    float* scratch = all_sums();
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
        input_gradient(dinp, memory, head);
        matmul(scratch, packed_operand(memory.inp, panels_of(head.C), n_panels),
               packed_operand(memory.e, panels_of(head.Vp), n_panels),
               TransposedWeightEpilogue{dweight, head.Vp, head.C, accumulate});
#pragma omp barrier
        add_target_rows(dweight, memory, head);
    }
}

// ---- all operations

const Variant variant{.of_float = {},
                      .of_bf16 = {.matmul_scratch_bytes = matmul_scratch_bytes,
                                  .batch_scratch_bytes = batch_scratch_bytes,
                                  .scratch_bytes = scratch_bytes,
                                  .run_microkernel = run_microkernel,
                                  .packed_bytes = packed_bytes,
                                  .pack_weight = pack_weight,
                                  .matmul_batch = matmul_batch,
                                  .matmul_forward = matmul_forward,
                                  .matmul_backward = matmul_backward,
                                  .attention_forward = attention_forward,
                                  .attention_backward = attention_backward,
                                  .head_bytes = head_bytes,
                                  .head_forward = head_forward,
                                  .head_backward = head_backward}};

}  // namespace cpu::VARIANT
