// matrix_matmul.h: bf16 products from panels, and the packed copies of weights. Compiled for AMX (amx.cpp) and for
// AVX512-BF16 (avx512bf16.cpp), into the namespace MATRIX_VARIANT of the including file.
//
// A product packs its activations into tiles (panels.h), then computes blocks of the result as tasks: the inner
// dimension in steps of DEPTH tile pairs, so that the running panel of B (16 KiB) stays in the first-level cache and
// the block's panels of A and sums stay in the second (2 MiB). Sums live in compact 32 x 32 blocks: in rows of the
// result they would meet in few cache sets whenever the row is a multiple of 4 KiB. When the last step is done, bias,
// GELU or its derivative are applied while the 32 x 32 sums are in the first-level cache, and the result is rounded and
// stored, once.
//
// Every element is one chain of additions in the order of the inner dimension, whatever the tasks: the bits depend
// neither on the number of threads nor on how the work is split.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "cpu/variants.h"
#include "cpu/matmul.h"
#include "cpu/memory.h"
#include "cpu/panels.h"

namespace cpu::MATRIX_VARIANT {

namespace {

constexpr int DEPTH = 8;  // tile pairs of one step along the inner dimension: 256 numbers

// An operand in tiles: panels of `depth` tile pairs, `stride` numbers from one panel to the next.
struct Packed {
    const bf16* data;
    int panels, depth;
    int64_t stride;

    const bf16* at(int panel, int k) const { return data + panel * stride + int64_t(k) * TILE_PAIR; }
};

Packed packed(const bf16* data, int panels, int depth) { return {data, panels, depth, int64_t(depth) * TILE_PAIR}; }

int64_t operand_size(int outer, int inner) { return int64_t(panels_of(outer)) * panels_of(inner) * TILE_PAIR; }

// The copy for the forward product, then that for the input gradient.
Packed packed_forward(const void* copies, int OC, int IC) {
    return packed(static_cast<const bf16*>(copies), panels_of(OC), panels_of(IC));
}
Packed packed_backward(const void* copies, int OC, int IC) {
    return packed(static_cast<const bf16*>(copies) + operand_size(OC, IC), panels_of(IC), panels_of(OC));
}

// Panels of the result that make one task: as many as leave room in the second-level cache for their sums (4 KiB each),
// but several tasks for each thread.
struct Split {
    int rows, columns, row_tasks, column_tasks;
};
constexpr int TASK_PANELS = 128, TASK_ROWS = 16;

Split split(int row_panels, int column_panels) {
    int rows = std::min(TASK_ROWS, row_panels), columns = std::min(TASK_PANELS / rows, column_panels);
    const auto tasks = [&] { return ceil_div(row_panels, rows) * ceil_div(column_panels, columns); };
    while (tasks() < 3 * omp_get_num_threads() && rows * columns > 4)
        if (rows > columns)
            rows = ceil_div(rows, 2);
        else
            columns = ceil_div(columns, 2);
    return {rows, columns, ceil_div(row_panels, rows), ceil_div(column_panels, columns)};
}

// A task of a product: panels i0 ... i1 - 1 of a times panels j0 ... j1 - 1 of b.
struct Task {
    int i0, i1, j0, j1;

    Task(const Split& split, const Packed& a, const Packed& b, int number) {
        // The larger operand is walked through once, and the smaller one, which the caches may hold, again and again.
        const bool walk_b = b.panels > a.panels;
        const int row = walk_b ? number % split.row_tasks : number / split.column_tasks;
        const int column = walk_b ? number / split.row_tasks : number % split.column_tasks;
        i0 = row * split.rows, i1 = std::min(a.panels, i0 + split.rows);
        j0 = column * split.columns, j1 = std::min(b.panels, j0 + split.columns);
    }
};

// To be called by all threads of a parallel region, which does not wait at the end. store.rows(sums, i, j, r0, r1) gets
// rows r0 ... r1 - 1 of each 32 x 32 block of a b, in rows of 32 floats, at panel i of a and panel j of b. scratch: the
// calling thread's sums of a task.
template <class Store>
void multiply(float* scratch, const Packed& a, const Packed& b, const Store& store) {
    const Split s = split(a.panels, b.panels);
    const int tasks = s.row_tasks * s.column_tasks;
#pragma omp for schedule(dynamic, 1) nowait
    for (int number = 0; number < tasks; number++) {
        const Task task(s, a, b, number), next(s, a, b, std::min(number + omp_get_num_threads(), tasks - 1));
        const int rows = task.i1 - task.i0, columns = task.j1 - task.j0;
        const TileRegisters registers;
        struct {
            const float* sums = nullptr;
            int i = 0, j = 0;
        } finished;  // stored while the next block is computed: the stores alone would wait for memory
        for (int k = 0; k < a.depth; k += DEPTH) {
            const int depth = std::min(DEPTH, a.depth - k), rows_per_step = ceil_div(PANEL, depth);
            const bool last = k + depth == a.depth;
            // While this step runs, fetch what the next one reads: each product a part of one panel of a and of b.
            const Task& then = last ? next : task;
            const int then_k = last ? 0 : k + depth;
            Ahead ahead;
            ahead.a_lines = ceil_div(TILE_PAIR * 2 / 64, columns), ahead.b_lines = ceil_div(TILE_PAIR * 2 / 64, rows);
            for (int j = 0; j < columns; j++)
                for (int i = 0; i < rows; i++) {
                    float* sums = scratch + (j * rows + i) * BLOCK;
                    const int a_part = depth * ahead.a_lines * 64, b_part = depth * ahead.b_lines * 64;
                    ahead.a =
                        reinterpret_cast<const char*>(a.at(std::min(then.i0 + i, then.i1 - 1), then_k)) + j * a_part;
                    ahead.b =
                        reinterpret_cast<const char*>(b.at(std::min(then.j0 + j, then.j1 - 1), then_k)) + i * b_part;
                    multiply_panels(sums, a.at(task.i0 + i, k), b.at(task.j0 + j, k), depth, k > 0, [&](int step) {
                        ahead.step();
                        if (last)
                            store.fetch(task.i0 + i, task.j0 + j, std::min(PANEL, step * rows_per_step),
                                        std::min(PANEL, (step + 1) * rows_per_step));
                        if (finished.sums)
                            store.rows(finished.sums, finished.i, finished.j, std::min(PANEL, step * rows_per_step),
                                       std::min(PANEL, (step + 1) * rows_per_step));
                    });
                    if (last) finished = {sums, task.i0 + i, task.j0 + j};
                }
        }
        store.rows(finished.sums, finished.i, finished.j, 0, PANEL);
    }
    _mm_sfence();  // streaming stores are seen by other threads after the next barrier
}

constexpr int64_t SUMS = int64_t(TASK_PANELS) * BLOCK;  // floats per thread

// Working memory, handed out piece by piece.
struct Pieces {
    void* base;  // null: only counts
    int64_t bytes = 0;

    template <class T>
    T* take(int64_t count) {
        T* piece = base ? reinterpret_cast<T*>(static_cast<char*>(base) + bytes) : nullptr;
        bytes += round_up<int64_t>(count * int64_t(sizeof(T)), 4096);
        return piece;
    }
};

// Packs a row-major matrix (rows, columns) block by block; all threads of a parallel region, without waiting. pack gets
// the block's 32 rows in x, its panel row and its panel column.
template <class Pack>
void for_each_block(const bf16* matrix, int rows, int columns, const Pack& pack) {
    constexpr int group = 8;  // panel columns
    const int row_panels = panels_of(rows), column_panels = panels_of(columns);
#pragma omp for collapse(2) schedule(static) nowait
    for (int r = 0; r < row_panels; r++)
        for (int c0 = 0; c0 < column_panels; c0 += group)
            for (int c = c0; c < std::min(column_panels, c0 + group); c++) {
                __m512i x[32];
                load_block(x, matrix + int64_t(r) * PANEL * columns + c * PANEL, columns, rows - r * PANEL,
                           columns - c * PANEL);
                pack(x, r, c);
            }
}

bf16* pair_at(bf16* packed, int panel, int k, int depth) { return packed + (int64_t(panel) * depth + k) * TILE_PAIR; }

// A part of the lines of a row-major matrix at block (i, j), rows r0 ... r1 - 1, into the first-level cache.
template <class T>
FORCE_INLINE void fetch_rows(const T* matrix, int rows, int columns, int i, int j, int r0, int r1) {
    const T* from = matrix + int64_t(i * PANEL + r0) * columns + j * PANEL;
    for (int r = r0; r < std::min(r1, rows - i * PANEL); r++, from += columns)
        for (int line = 0; line < PANEL * int(sizeof(T)); line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(from) + line, _MM_HINT_T0);
}

// What becomes of the sums of a forward product.
struct ForwardStore {
    bf16 *out, *pre_gelu;
    const bf16* bias;
    int N, OC;

    FORCE_INLINE void fetch(int, int, int, int) const {}

    FORCE_INLINE void rows(const float* sums, int i, int j, int r0, int r1) const {
        r1 = std::min(r1, N - i * PANEL);
        whole_lines(out, OC, j * PANEL) ? store<true>(sums, i, j, r0, r1) : store<false>(sums, i, j, r0, r1);
    }

    template <bool STREAM>
    FORCE_INLINE void store(const float* sums, int i, int j, int r0, int r1) const {
        const int column = j * PANEL;
        const __mmask32 mask = first_of_32(OC - column);
        __m512 bias0 = all(0.0f), bias1 = all(0.0f);
        if (bias) {
            const __m512i x = _mm512_maskz_loadu_epi16(mask, bias + column);
            bias0 = widen(_mm512_castsi512_si256(x)), bias1 = widen(_mm512_extracti64x4_epi64(x, 1));
        }
        int64_t at = int64_t(i * PANEL + r0) * OC + column;
        for (int r = r0; r < r1; r++, at += OC) {
            __m512 x0 = _mm512_add_ps(_mm512_load_ps(sums + PANEL * r), bias0);
            __m512 x1 = _mm512_add_ps(_mm512_load_ps(sums + PANEL * r + 16), bias1);
            if (pre_gelu) {
                store_row<STREAM>(pre_gelu + at, x0, x1, mask);
                x0 = gelu16(x0), x1 = gelu16(x1);
            }
            store_row<STREAM>(out + at, x0, x1, mask);
        }
    }
};

struct InputGradientStore {
    bf16* dinp;
    const bf16* pre_gelu;
    const float* partial;  // of PartialStore, or null
    int N, IC;

    FORCE_INLINE void fetch(int i, int j, int r0, int r1) const {
        if (pre_gelu) fetch_rows(pre_gelu, N, IC, i, j, r0, r1);
    }

    FORCE_INLINE void rows(const float* sums, int i, int j, int r0, int r1) const {
        r1 = std::min(r1, N - i * PANEL);
        whole_lines(dinp, IC, j * PANEL) ? store<true>(sums, i, j, r0, r1) : store<false>(sums, i, j, r0, r1);
    }

    template <bool STREAM>
    FORCE_INLINE void store(const float* sums, int i, int j, int r0, int r1) const {
        const int column = j * PANEL;
        const __mmask32 mask = first_of_32(IC - column);
        int64_t at = int64_t(i * PANEL + r0) * IC + column;
        for (int r = r0; r < r1; r++, at += IC) {
            __m512 x0 = _mm512_load_ps(sums + PANEL * r), x1 = _mm512_load_ps(sums + PANEL * r + 16);
            if (partial) {
                const float* before = partial + (int64_t(i) * panels_of(IC) + j) * BLOCK + PANEL * r;
                x0 = _mm512_add_ps(_mm512_load_ps(before), x0), x1 = _mm512_add_ps(_mm512_load_ps(before + 16), x1);
            }
            if (pre_gelu) {
                const __m512i x = _mm512_maskz_loadu_epi16(mask, pre_gelu + at);
                x0 = _mm512_mul_ps(x0, gelu_derivative16(widen(_mm512_castsi512_si256(x))));
                x1 = _mm512_mul_ps(x1, gelu_derivative16(widen(_mm512_extracti64x4_epi64(x, 1))));
            }
            store_row<STREAM>(dinp + at, x0, x1, mask);
        }
    }
};

struct WeightGradientStore {
    float* dweight;
    int OC, IC;
    bool accumulate;

    FORCE_INLINE void fetch(int i, int j, int r0, int r1) const {
        if (accumulate) fetch_rows(dweight, OC, IC, i, j, r0, r1);
    }

    FORCE_INLINE void rows(const float* sums, int i, int j, int r0, int r1) const {
        r1 = std::min(r1, OC - i * PANEL);
        if (!accumulate && whole_lines(dweight, IC, j * PANEL))
            store<true>(sums, i, j, r0, r1);
        else
            store<false>(sums, i, j, r0, r1);
    }

    template <bool STREAM>
    FORCE_INLINE void store(const float* sums, int i, int j, int r0, int r1) const {
        const int column = j * PANEL;
        const __mmask16 mask0 = first_of_16(IC - column), mask1 = first_of_16(IC - column - 16);
        float* to = dweight + int64_t(i * PANEL + r0) * IC + column;
        for (int r = r0; r < r1; r++, to += IC) {
            __m512 x0 = _mm512_load_ps(sums + PANEL * r), x1 = _mm512_load_ps(sums + PANEL * r + 16);
            if (accumulate) {
                x0 = _mm512_add_ps(x0, _mm512_maskz_loadu_ps(mask0, to));
                x1 = _mm512_add_ps(x1, _mm512_maskz_loadu_ps(mask1, to + 16));
            }
            if constexpr (STREAM) {
                _mm512_stream_ps(to, x0);
                _mm512_stream_ps(to + 16, x1);
            } else {
                _mm512_mask_storeu_ps(to, mask0, x0);
                _mm512_mask_storeu_ps(to + 16, mask1, x1);
            }
        }
    }
};

// The sums of an input gradient over a part of the output channels, on their way to the next part.
struct PartialStore {
    float* partial;  // 32 x 32 blocks, columns panels in a row of blocks
    int columns;
    bool first;

    FORCE_INLINE void fetch(int, int, int, int) const {}

    FORCE_INLINE void rows(const float* sums, int i, int j, int r0, int r1) const {
        float* to = partial + (int64_t(i) * columns + j) * BLOCK;
        for (int x = r0 * PANEL; x < r1 * PANEL; x += 16)
            _mm512_store_ps(to + x, first ? _mm512_load_ps(sums + x)
                                          : _mm512_add_ps(_mm512_load_ps(to + x), _mm512_load_ps(sums + x)));
    }
};

// Adds the 32 rows of a packed block (pack_rows) to two vectors of sums, of the even and of the odd columns.
FORCE_INLINE void add_rows(__m512& even, __m512& odd, const bf16* pair) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    for (int r = 0; r < 32; r++) {
        const __m512i x = _mm512_load_si512(pair + 32 * r);
        even = _mm512_add_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)));
        odd = _mm512_add_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(x, high)));
    }
}

// Both copies of a weight, by all threads of a parallel region, without waiting.
void pack_both(void* packed, const bf16* weight, int OC, int IC) {
    bf16 *forward = static_cast<bf16*>(packed), *backward = forward + operand_size(OC, IC);
    const int row_panels = panels_of(OC), column_panels = panels_of(IC);
    for_each_block(weight, OC, IC, [&](const __m512i(&x)[32], int r, int c) {
        pack_rows_as_b<true>(pair_at(forward, r, c, column_panels), x);
        pack_columns_as_b<true>(pair_at(backward, c, r, row_panels), x);
    });
    _mm_sfence();  // as in multiply
}

// How a product is cut so that its working memory stays bounded: rows at a time, and in backward output channels.
constexpr int MAX_ROWS = 4096;
constexpr int MAX_PACKED = 8 << 20;  // numbers of dout that are packed at a time, twice
constexpr int BIAS_PANELS = 4;       // row panels whose bias gradients are summed in one go

int rows_at_a_time(int N) { return std::min(N, MAX_ROWS); }
int channels_at_a_time(int rows, int OC) {
    const int channels = MAX_PACKED / (panels_of(rows) * PANEL) / PANEL * PANEL;
    return std::min(round_up(OC, PANEL), channels);
}

// Working memory of the backward product.
struct BackwardScratch {
    bf16* own_copy;  // of the weight, where the caller has none
    bf16 *inp, *dout_rows, *dout_columns;
    float *partial, *bias_sums, *sums;

    // Lays it out from base, which may be null, and returns its size in bytes.
    int64_t lay_out(void* base, int N, int IC, int OC) {
        Pieces pieces{base};
        const int rows = rows_at_a_time(N), channels = channels_at_a_time(rows, OC);
        own_copy = pieces.take<bf16>(2 * operand_size(OC, IC));
        inp = pieces.take<bf16>(operand_size(rows, IC));
        dout_rows = pieces.take<bf16>(operand_size(rows, channels));
        dout_columns = pieces.take<bf16>(operand_size(rows, channels));
        partial = pieces.take<float>(channels < OC ? operand_size(rows, IC) : 0);
        bias_sums = pieces.take<float>(int64_t(ceil_div(panels_of(rows), BIAS_PANELS)) * round_up(OC, PANEL));
        sums = pieces.take<float>(SUMS * omp_get_max_threads());
        return pieces.bytes;
    }
};

// The gradients of one product of at most MAX_ROWS rows.
struct Backward {
    const bf16 *dout, *inp, *pre_gelu;
    bf16* dinp;
    float *dweight, *dbias;
    Packed weight;
    int N, IC, OC;
    bool accumulate;
    BackwardScratch scratch;
    int n_panels = panels_of(N), ic_panels = panels_of(IC);

    // Of a parallel region: all threads.
    void run() const {
        for_each_block(inp, N, IC, [&](const __m512i(&x)[32], int r, int c) {
            pack_columns_as_b(pair_at(scratch.inp, c, r, n_panels), x);
        });
        const int channels = channels_at_a_time(N, OC);
        for (int o = 0; o < OC; o += channels) {
            pack_dout(o, std::min(channels, OC - o));
#pragma omp barrier
            part(o, std::min(channels, OC - o));
#pragma omp barrier
        }
        if (dbias) bias_gradient();
    }

    // Output channels o ... of dout as both operands, and the sums of their columns.
    void pack_dout(int o, int channels) const {
        const int panels = panels_of(channels), chunks = ceil_div(n_panels, BIAS_PANELS);
#pragma omp for collapse(2) schedule(static) nowait
        for (int chunk = 0; chunk < chunks; chunk++)
            for (int c = 0; c < panels; c++) {
                __m512 even = all(0.0f), odd = all(0.0f);
                for (int r = chunk * BIAS_PANELS; r < std::min(n_panels, (chunk + 1) * BIAS_PANELS); r++) {
                    __m512i x[32];
                    const int column = o + c * PANEL;
                    load_block(x, dout + int64_t(r) * PANEL * OC + column, OC, N - r * PANEL, OC - column);
                    bf16* rows = pair_at(scratch.dout_rows, r, c, panels);
                    pack_rows(rows, x);
                    pack_columns(pair_at(scratch.dout_columns, c, r, n_panels), x);
                    if (dbias) add_rows(even, odd, rows);
                }
                float* to = bias_sums(chunk) + o + c * PANEL;
                _mm512_store_ps(to, even);
                _mm512_store_ps(to + 16, odd);
            }
    }

    // What these output channels give: a part of the sums of dinp, and their rows of dweight.
    void part(int o, int channels) const {
        float* sums = scratch.sums + SUMS * omp_get_thread_num();
        const int panels = panels_of(channels);
        const bool first = o == 0, last = o + channels == OC;
        const Packed rows = packed(scratch.dout_rows, n_panels, panels);
        const Packed w{weight.at(0, o / PANEL), ic_panels, panels, weight.stride};
        if (last)
            multiply(sums, rows, w, InputGradientStore{dinp, pre_gelu, first ? nullptr : scratch.partial, N, IC});
        else
            multiply(sums, rows, w, PartialStore{scratch.partial, ic_panels, first});
        multiply(sums, packed(scratch.dout_columns, panels, n_panels), packed(scratch.inp, ic_panels, n_panels),
                 WeightGradientStore{dweight + int64_t(o) * IC, channels, IC, accumulate});
    }

    float* bias_sums(int chunk) const { return scratch.bias_sums + int64_t(chunk) * round_up(OC, PANEL); }

    void bias_gradient() const {
#pragma omp for schedule(static) nowait
        for (int o = 0; o < OC; o++) {
            const int at = o / PANEL * PANEL + o % PANEL / 2 + o % 2 * 16;  // even columns, then odd ones
            float sum = 0.0f;
            for (int chunk = 0; chunk < ceil_div(n_panels, BIAS_PANELS); chunk++) sum += bias_sums(chunk)[at];
            dbias[o] = accumulate ? dbias[o] + sum : sum;
        }
    }
};

}  // namespace

template <>
int64_t packed_bytes<bf16>(int OC, int IC) {
    return 2 * operand_size(OC, IC) * int64_t(sizeof(bf16));
}

template <>
void pack_weight<bf16>(void* packed, const bf16* weight, int OC, int IC, Stream) {
#pragma omp parallel
    pack_both(packed, weight, OC, IC);
}

// Backward takes more than forward.
int64_t matmul_scratch_bytes(int N, int IC, int OC) { return BackwardScratch().lay_out(nullptr, N, IC, OC); }

template <>
void matmul_forward<bf16>(bf16* out, bf16* pre_gelu, const bf16* inp, Weight<bf16> weight, const bf16* bias, int N,
                          int IC, int OC, Stream) {
    Pieces pieces{cpu::scratch(matmul_scratch_bytes(N, IC, OC))};
    bf16* own_copy = pieces.take<bf16>(2 * operand_size(OC, IC));
    bf16* packed_inp = pieces.take<bf16>(operand_size(rows_at_a_time(N), IC));
    float* sums = pieces.take<float>(SUMS * omp_get_max_threads());
    const int depth = panels_of(IC);
    const Packed w = packed_forward(weight.packed ? weight.packed : own_copy, OC, IC);
#pragma omp parallel
    {
        if (!weight.packed) pack_both(own_copy, weight.rows, OC, IC);
        for (int64_t n = 0; n < N; n += MAX_ROWS) {
            const int rows = std::min(N - int(n), MAX_ROWS);
            for_each_block(inp + n * IC, rows, IC, [&](const __m512i(&x)[32], int r, int c) {
                pack_rows(pair_at(packed_inp, r, c, depth), x);
            });
#pragma omp barrier
            bf16* pre = pre_gelu ? pre_gelu + n * OC : nullptr;
            multiply(sums + SUMS * omp_get_thread_num(), packed(packed_inp, panels_of(rows), depth), w,
                     ForwardStore{out + n * OC, pre, bias, rows, OC});
#pragma omp barrier
        }
    }
}

template <>
void matmul_backward<bf16>(bf16* dinp, float* dweight, float* dbias, const bf16* dout, const bf16* inp,
                           Weight<bf16> weight, const bf16* pre_gelu, int N, int IC, int OC, bool accumulate, Stream) {
    BackwardScratch scratch;
    scratch.lay_out(cpu::scratch(matmul_scratch_bytes(N, IC, OC)), N, IC, OC);
    const Packed w = packed_backward(weight.packed ? weight.packed : scratch.own_copy, OC, IC);
#pragma omp parallel
    {
        if (!weight.packed) pack_both(scratch.own_copy, weight.rows, OC, IC);
        for (int64_t n = 0; n < N; n += MAX_ROWS) {
            const bf16* pre = pre_gelu ? pre_gelu + n * IC : nullptr;
            Backward{dout + n * OC,
                     inp + n * IC,
                     pre,
                     dinp + n * IC,
                     dweight,
                     dbias,
                     w,
                     std::min(N - int(n), MAX_ROWS),
                     IC,
                     OC,
                     accumulate || n > 0,
                     scratch}
                .run();
#pragma omp barrier
        }
    }
}

double measure_peak_flops() {
    double flops = 0.0;
#pragma omp parallel reduction(+ : flops)
    {
        const TileRegisters registers;
        std::vector<bf16> memory(3 * DEPTH * TILE_PAIR);
        for (size_t i = 0; i < memory.size(); i++)
            memory[i] = bf16(float(i * 37 % 101) - 50.0f);  // zeros would be faster
        const auto* a = reinterpret_cast<bf16*>(round_up<uintptr_t>(uintptr_t(memory.data()), 64));
        alignas(64) float sums[BLOCK];
        const auto run = [&] { multiply_panels(sums, a, a + DEPTH * TILE_PAIR, DEPTH, false); };
        flops = peak_of(
            [&] {
                for (int i = 0; i < 100; i++) run();
            },
            200.0 * PANEL * PANEL * PANEL * DEPTH);
    }
    return flops;
}

}  // namespace cpu::MATRIX_VARIANT
