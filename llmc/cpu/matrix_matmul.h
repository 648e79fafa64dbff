// matrix_matmul.h: bf16 matmul on matrix units, and the head's packed copy of its weight. Compiled for AMX (amx.cpp)
// and for AVX512-BF16 (avx512bf16.cpp), into the namespace VARIANT of the including file.
//
// A matmul packs both operands into tiles (matrix_microkernel.h): a copy of the weights for each direction would take
// twice their memory, and packing takes 1 % of the time of a matmul of 1,000 rows. Its tasks then compute blocks of the
// result, in steps of KC tile pairs along the inner dimension: the current micro-panel of B (16 KiB) stays in the
// first-level cache, and the task's micro-panels of A and its sums stay in the second (2 MiB). The sums are compact 32
// x 32 blocks: in rows as long as those of the result, they would fall into few cache sets whenever a row is a
// multiple of 4 KiB. After the last step the epilogue (bias, residual, GELU or its derivative) runs while the 32 x 32
// sums are in the first-level cache, and the result is rounded and stored, once.
//
// Every element is one chain of additions in the order of the inner dimension, whatever the tasks are: the bits depend
// neither on the number of threads nor on the task grid.
#pragma once
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "cpu/matrix_attention.h"
#include "cpu/matrix_microkernel.h"
#include "cpu/memory.h"
#include "cpu/variants.h"

namespace cpu::VARIANT {

namespace {

constexpr int KC = 8;  // tile pairs of one step along the inner dimension: 256 numbers

// A packed operand, or a part of one: `panels` micro-panels from number `first` on, of `depth` tile pairs each,
// `stride` numbers apart. data: micro-panel `first`.
struct PackedOperand {
    const bf16* data;
    int panels, depth;
    int64_t stride;
    int first = 0;

    const bf16* at(int panel, int k) const { return data + panel * stride + int64_t(k) * TILE_PAIR; }
    PackedOperand part(int begin, int count) const { return {at(begin, 0), count, depth, stride, begin}; }
};

PackedOperand packed_operand(const bf16* data, int panels, int depth) {
    return {data, panels, depth, int64_t(depth) * TILE_PAIR};
}

// The bf16 numbers of a packed operand.
int64_t operand_size(int outer, int inner) { return int64_t(panels_of(outer)) * panels_of(inner) * TILE_PAIR; }

// The size of a task in micro-panels (rows of a, columns of b), and the number of tasks. A task is as large as the room
// for its sums in the second-level cache (4 KiB per block) allows, but each thread has several tasks.
struct TaskGrid {
    int rows, columns, row_tasks, column_tasks;
};
constexpr int TASK_PANELS = 128, TASK_ROWS = 16;
constexpr int64_t TASK_SUMS = int64_t(TASK_PANELS) * BLOCK;  // floats per thread

TaskGrid task_grid(int row_panels, int column_panels) {
    int rows = std::min(TASK_ROWS, row_panels), columns = std::min(TASK_PANELS / rows, column_panels);
    const auto tasks = [&] { return ceil_div(row_panels, rows) * ceil_div(column_panels, columns); };
    while (tasks() < 3 * omp_get_num_threads() && rows * columns > 4)
        if (rows > columns)
            rows = ceil_div(rows, 2);
        else
            columns = ceil_div(columns, 2);
    return {rows, columns, ceil_div(row_panels, rows), ceil_div(column_panels, columns)};
}

// Task `number` of the grid: its micro-panels of a and of b.
struct Task {
    PackedOperand a, b;

    Task(const TaskGrid& grid, const PackedOperand& all_a, const PackedOperand& all_b, int number) {
        // The tasks read the larger operand once. They read the smaller one, which the caches may hold, many times.
        const bool walk_b = all_b.panels > all_a.panels;
        const int row = walk_b ? number % grid.row_tasks : number / grid.column_tasks;
        const int column = walk_b ? number / grid.row_tasks : number % grid.column_tasks;
        a = all_a.part(row * grid.rows, std::min(grid.rows, all_a.panels - row * grid.rows));
        b = all_b.part(column * grid.columns, std::min(grid.columns, all_b.panels - column * grid.columns));
    }
};

// For a product whose sums are the result.
struct NoEpilogue {
    INLINE void prefetch(int, int, int, int) const {}
    INLINE void apply(const float*, int, int, int, int) const {}
};

// sums = a b, or += if accumulate, for the micro-panels of a task: block (i, j) of the sums is number i * b.panels + j.
// epilogue.apply(sums, i, j, r0, r1) gets each complete block, at micro-panel i of the whole a and j of the whole b, an
// even number of rows (r0 to r1 - 1) at a time. next_a and next_b, which are multiplied next, are prefetched. If
// `lower` is set, only the blocks on and below the diagonal of the whole product are computed.
template <class Epilogue>
void multiply(float* sums, const PackedOperand& a, const PackedOperand& b, const PackedOperand& next_a,
              const PackedOperand& next_b, bool accumulate, const Epilogue& epilogue, bool lower = false) {
    // Blocks that one step completes take turns in two places, which stay in the first-level cache.
    const bool in_turns = a.depth <= KC && !std::is_same_v<Epilogue, NoEpilogue>;
    struct {
        const float* sums = nullptr;
        int i = 0, j = 0;
    } pending;  // the block whose epilogue runs beside the next microkernel, which hides the stores' latency
    for (int k = 0; k < a.depth; k += KC) {
        const int depth = std::min(KC, a.depth - k), rows_per_step = round_up(ceil_div(PANEL, depth), 2);
        const bool last = k + depth == a.depth;
        // Prefetch a for the next step, and b for the next column: each microkernel call takes a part of a micro-panel.
        const PackedOperand &later_a = last ? next_a : a, &later_b = last ? next_b : b;
        const int later_k = last ? 0 : k + depth;
        Prefetcher prefetcher;
        prefetcher.a_lines = ceil_div(TILE_PAIR * 2 / 64, b.panels);
        prefetcher.b_lines = ceil_div(TILE_PAIR * 2 / 64, a.panels);
        const int a_part = depth * prefetcher.a_lines * 64, b_part = depth * prefetcher.b_lines * 64;
        int turn = 0;
        for (int j = 0; j < b.panels; j++)
            for (int i = lower ? std::max(0, b.first + j - a.first) : 0; i < a.panels; i++) {
                float* block = sums + int64_t(in_turns ? (turn ^= 1) : i * b.panels + j) * BLOCK;
                prefetcher.a =
                    reinterpret_cast<const char*>(later_a.at(std::min(i, later_a.panels - 1), later_k)) + j * a_part;
                const bf16* next_panel = j + 1 < b.panels ? b.at(j + 1, k) : later_b.at(0, later_k);
                prefetcher.b = reinterpret_cast<const char*>(next_panel) + i * b_part;
                microkernel(block, a.at(i, k), b.at(j, k), depth, accumulate || k > 0, [&](int step) {
                    const int r0 = std::min(PANEL, step * rows_per_step), r1 = std::min(PANEL, r0 + rows_per_step);
                    prefetcher.step();
                    if (last) epilogue.prefetch(a.first + i, b.first + j, r0, r1);
                    if (pending.sums) epilogue.apply(pending.sums, pending.i, pending.j, r0, r1);
                });
                if (last) pending = {block, a.first + i, b.first + j};
            }
    }
    if (pending.sums) epilogue.apply(pending.sums, pending.i, pending.j, 0, PANEL);
}

// The matmul a b, without its result, which is up to the epilogue. All threads of a parallel region call it; there is
// no barrier at its end. scratch: TASK_SUMS floats for each thread.
template <class Epilogue>
void matmul(float* scratch, const PackedOperand& a, const PackedOperand& b, const Epilogue& epilogue,
            bool lower = false) {
    const TaskGrid grid = task_grid(a.panels, b.panels);
    const int tasks = grid.row_tasks * grid.column_tasks;
#pragma omp for schedule(dynamic, 1) nowait
    for (int number = 0; number < tasks; number++) {
        const Task task(grid, a, b, number), next(grid, a, b, std::min(number + omp_get_num_threads(), tasks - 1));
        const TileRegisters registers;
        multiply(scratch + TASK_SUMS * omp_get_thread_num(), task.a, task.b, next.a, next.b, false, epilogue, lower);
    }
    _mm_sfence();  // streaming stores are seen by other threads after the next barrier
}

constexpr int64_t PAGE = 4096;  // alignment of arrays in scratch memory

// Calls pack(x, r, c) for each 32 x 32 block of a row-major matrix (rows, columns): x is the block's rows, r and c its
// position in blocks. All threads of a parallel region call it; there is no barrier at its end.
template <class Pack>
void for_each_block(const bf16* matrix, int rows, int columns, const Pack& pack) {
    constexpr int group = 8;  // columns of blocks
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

// Packs a row-major matrix (rows, columns) by one of the four pack functions, as for_each_block.
template <auto PACK>
void pack_matrix(bf16* packed, const bf16* matrix, int rows, int columns) {
    for_each_block(matrix, rows, columns, [&](const __m512i(&x)[32], int r, int c) {
        PACK(pair_of<PACK>(packed, r, c, panels_of(rows), panels_of(columns)), x);
    });
}

// Prefetches rows r0 to r1 - 1 of block (i, j) of a row-major matrix (rows, columns) into the first-level cache.
template <class T>
INLINE void prefetch_rows(const T* matrix, int rows, int columns, int i, int j, int r0, int r1) {
    const T* from = matrix + int64_t(i * PANEL + r0) * columns + j * PANEL;
    for (int r = r0; r < std::min(r1, rows - i * PANEL); r++, from += columns)
        for (int line = 0; line < PANEL * int(sizeof(T)); line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(from) + line, _MM_HINT_T0);
}

// ---- Epilogues: prefetch(), and later apply(), of rows r0 to r1 - 1 of the sums (32, 32) of block (i, j).

// Calls body(x, at, mask) for those of the rows that are in the result, a row-major matrix (rows, columns): x are the
// sums, `at` is the place of the first of them, and mask has the lanes that are columns.
template <class Body>
INLINE void for_rows(const float* sums, int rows, int columns, int i, int j, int r0, int r1, const Body& body) {
    const __mmask32 mask = lane_mask32(columns - j * PANEL);
    for (int r = r0; r < std::min(r1, rows - i * PANEL); r++)
        body(load_row(sums + PANEL * r), int64_t(i * PANEL + r) * columns + j * PANEL, mask);
}

// out (N, OC) = sums + bias + residual, or GELU of it; pre_gelu (N, OC) = sums + bias. bias, residual and pre_gelu may
// be null.
struct ForwardEpilogue {
    bf16 *out, *pre_gelu;
    const bf16 *bias, *residual;
    int N, OC;

    INLINE void prefetch(int i, int j, int r0, int r1) const {
        if (residual) prefetch_rows(residual, N, OC, i, j, r0, r1);
    }

    void apply(const float* sums, int i, int j, int r0, int r1) const {
        const int column = j * PANEL;
        const Row bias_row = bias ? load_row(bias + column, lane_mask32(OC - column)) : broadcast_row(0.0f);
        for_rows(sums, N, OC, i, j, r0, r1, [&](Row x, int64_t at, __mmask32 mask) {
            x = x + bias_row;
            if (residual) x = x + load_row(residual + at, mask);
            if (pre_gelu) {
                store_row(pre_gelu + at, x, mask);
                x = {gelu16(x.first), gelu16(x.second)};
            }
            store_row(out + at, x, mask);
        });
    }
};

// dinp (N, IC) = sums gelu'(pre_gelu). pre_gelu may be null.
struct InputGradientEpilogue {
    bf16* dinp;
    const bf16* pre_gelu;
    int N, IC;

    INLINE void prefetch(int i, int j, int r0, int r1) const {
        if (pre_gelu) prefetch_rows(pre_gelu, N, IC, i, j, r0, r1);
    }

    void apply(const float* sums, int i, int j, int r0, int r1) const {
        for_rows(sums, N, IC, i, j, r0, r1, [&](Row x, int64_t at, __mmask32 mask) {
            if (pre_gelu) {
                const Row y = load_row(pre_gelu + at, mask);
                x = x * Row{gelu_derivative16(y.first), gelu_derivative16(y.second)};
            }
            store_row(dinp + at, x, mask);
        });
    }
};

// dweight (OC, IC) = sums, or += if accumulate.
struct WeightGradientEpilogue {
    float* dweight;
    int OC, IC;
    bool accumulate;

    INLINE void prefetch(int i, int j, int r0, int r1) const {
        if (accumulate) prefetch_rows(dweight, OC, IC, i, j, r0, r1);
    }

    void apply(const float* sums, int i, int j, int r0, int r1) const {
        for_rows(sums, OC, IC, i, j, r0, r1, [&](Row x, int64_t at, __mmask32 mask) {
            const __mmask16 mask0 = __mmask16(mask), mask1 = __mmask16(mask >> 16);
            float* const to = dweight + at;
            if (!accumulate && can_stream(to, mask)) {
                _mm512_stream_ps(to, x.first);
                _mm512_stream_ps(to + 16, x.second);
                return;
            }
            if (accumulate) x = x + Row{_mm512_maskz_loadu_ps(mask0, to), _mm512_maskz_loadu_ps(mask1, to + 16)};
            _mm512_mask_storeu_ps(to, mask0, x.first);
            _mm512_mask_storeu_ps(to + 16, mask1, x.second);
        });
    }
};

// Adds the 32 rows of a block packed by pack_rows_as_a to the sums of its even columns, `first`, and of its odd
// columns.
INLINE void add_rows(Row& sums, const bf16* pair) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000));
    for (int r = 0; r < 32; r++) {
        const __m512i x = _mm512_load_si512(pair + 32 * r);
        sums =
            sums + Row{_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_and_si512(x, high))};
    }
}

// Makes x (N, N) symmetric: each block below the diagonal is copied, transposed, to its place above. All threads of a
// parallel region call it; there is no barrier at its end.
void mirror(bf16* x, int N) {
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t r = 1; r < panels_of(N); r++)
        for (int64_t c = 0; c < r; c++) {
            __m512i block[32];
            alignas(64) bf16 transposed[TILE_PAIR];
            load_block(block, x + (r * N + c) * PANEL, N, N - int(r) * PANEL, PANEL);
            pack_columns_as_a(transposed, block);
            for (int i = 0; i < PANEL; i++)
                _mm512_mask_storeu_epi16(x + (c * PANEL + i) * N + r * PANEL, lane_mask32(N - int(r) * PANEL),
                                         _mm512_load_si512(transposed + PANEL * i));
        }
}

// These bound the scratch memory: a matmul runs on blocks of rows.
constexpr int MAX_ROWS = 4096;
constexpr int MAX_PACKED = 8 << 20;  // numbers of dout that are packed at a time, as two operands
constexpr int BIAS_PANELS = 4;       // micro-panels of rows that share one partial sum of the bias gradient

int row_block(int N, int OC) {
    const int rows = std::max(1, MAX_PACKED / round_up(OC, PANEL) / PANEL) * PANEL;
    return std::min(N, std::min(MAX_ROWS, rows));
}

// Scratch memory of matmul_backward.
struct BackwardScratch {
    bf16* weight;                          // packed for the input gradient
    bf16 *inp, *dout_rows, *dout_columns;  // packed operands; rows and columns are the outer dimension
    float *bias_sums, *sums;
    int64_t bytes;

    BackwardScratch(void* base, int N, int IC, int OC) {
        Arena arena{base, 0, PAGE};
        const int rows = row_block(N, OC);
        weight = arena.take<bf16>(operand_size(OC, IC));
        inp = arena.take<bf16>(operand_size(rows, IC));
        dout_rows = arena.take<bf16>(operand_size(rows, OC));
        dout_columns = arena.take<bf16>(operand_size(rows, OC));
        bias_sums = arena.take<float>(int64_t(ceil_div(panels_of(rows), BIAS_PANELS)) * round_up(OC, PANEL));
        sums = arena.take<float>(TASK_SUMS * omp_get_max_threads());
        bytes = arena.used;
    }
};

// Scratch memory of matmul_batch: the packed operands of as many products as share a parallel region.
struct BatchScratch {
    static constexpr int64_t NUMBERS = 4 << 20;  // in both operands: 8 MiB, or 14 matrices (192, 768) twice
    int64_t left_size, right_size;
    int at_once;
    bf16 *lefts, *rights;
    float* sums;
    int64_t bytes;

    BatchScratch(void* base, int N, int IC, int OC) : left_size(operand_size(N, IC)), right_size(operand_size(OC, IC)) {
        Arena arena{base, 0, PAGE};
        at_once = int(std::max<int64_t>(1, NUMBERS / (left_size + right_size)));
        lefts = arena.take<bf16>(at_once * left_size);
        rights = arena.take<bf16>(at_once * right_size);
        sums = arena.take<float>(TASK_SUMS * omp_get_max_threads());
        bytes = arena.used;
    }
    bf16* left(int64_t i) const { return lefts + i * left_size; }
    bf16* right(int64_t i) const { return rights + i * right_size; }
};

// matmul_backward for a block of N rows. Operands that no result needs are not packed.
struct Backward {
    MatmulBackward<bf16> m;
    int N, IC, OC;
    BackwardScratch scratch;
    int n_panels = panels_of(N), ic_panels = panels_of(IC), oc_panels = panels_of(OC);

    // All threads of a parallel region call it, when the weight is packed.
    void run() const {
        if (m.dweight) pack_matrix<pack_columns_as_b>(scratch.inp, m.inp, N, IC);
        pack_dout();
#pragma omp barrier
        if (m.dinp.data)
            matmul(scratch.sums, packed_operand(scratch.dout_rows, n_panels, oc_panels),
                   packed_operand(scratch.weight, ic_panels, oc_panels),
                   InputGradientEpilogue{m.dinp.data, m.pre_gelu, N, IC});
        if (m.dweight)
            matmul(scratch.sums, packed_operand(scratch.dout_columns, oc_panels, n_panels),
                   packed_operand(scratch.inp, ic_panels, n_panels),
                   WeightGradientEpilogue{m.dweight, OC, IC, m.accumulate});
        if (m.dbias) bias_gradient();
    }

    // Packs dout as the operands of both matmuls, and sums its columns for dbias. The sums are of packed rows.
    void pack_dout() const {
        const int chunks = ceil_div(n_panels, BIAS_PANELS);
#pragma omp for collapse(2) schedule(static) nowait
        for (int chunk = 0; chunk < chunks; chunk++)
            for (int c = 0; c < oc_panels; c++) {
                Row sums = broadcast_row(0.0f);
                for (int r = chunk * BIAS_PANELS; r < std::min(n_panels, (chunk + 1) * BIAS_PANELS); r++) {
                    __m512i x[32];
                    load_block(x, m.dout + int64_t(r) * PANEL * OC + c * PANEL, OC, N - r * PANEL, OC - c * PANEL);
                    bf16* rows = pair_at(scratch.dout_rows, r, c, oc_panels);
                    if (m.dinp.data || m.dbias) pack_rows_as_a(rows, x);
                    if (m.dweight) pack_columns_as_a(pair_at(scratch.dout_columns, c, r, n_panels), x);
                    if (m.dbias) add_rows(sums, rows);
                }
                save_row(bias_sums(chunk) + c * PANEL, sums);
            }
    }

    float* bias_sums(int chunk) const { return scratch.bias_sums + int64_t(chunk) * oc_panels * PANEL; }

    void bias_gradient() const {
#pragma omp for schedule(static) nowait
        for (int o = 0; o < OC; o++) {
            const int at = o / PANEL * PANEL + o % PANEL / 2 + o % 2 * 16;  // even columns, then odd ones
            float sum = 0.0f;
            for (int chunk = 0; chunk < ceil_div(n_panels, BIAS_PANELS); chunk++) sum += bias_sums(chunk)[at];
            m.dbias[o] = m.accumulate ? m.dbias[o] + sum : sum;
        }
    }
};

}  // namespace

int64_t packed_bytes(int OC, int IC) { return 2 * operand_size(OC, IC) * int64_t(sizeof(bf16)); }

void pack_weight(void* packed, const bf16* weight, int OC, int IC, Stream) {
    bf16 *forward = static_cast<bf16*>(packed), *backward = forward + operand_size(OC, IC);
#pragma omp parallel
    {
        // The copies are large and are not read soon: they pass the caches.
        const auto stream = [](bf16* to, const bf16* pair) {
            for (int i = 0; i < TILE_PAIR; i += 32)
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(pair + i));
        };
        for_each_block(weight, OC, IC, [&](const __m512i(&x)[32], int r, int c) {
            alignas(64) bf16 pair[TILE_PAIR];
            pack_rows_as_b(pair, x);
            stream(pair_at(forward, r, c, panels_of(IC)), pair);
            pack_columns_as_b(pair, x);
            stream(pair_at(backward, c, r, panels_of(OC)), pair);
        });
        _mm_sfence();  // as in matmul
    }
}

// Backward needs more scratch than forward.
int64_t matmul_scratch_bytes(int N, int IC, int OC) { return BackwardScratch(nullptr, N, IC, OC).bytes; }

void matmul_forward(const MatmulForward<bf16>& m, int N, int IC, int OC, Stream) {
    const int block = row_block(N, OC), depth = panels_of(IC);
    Arena arena{cpu::scratch(matmul_scratch_bytes(N, IC, OC)), 0, PAGE};
    bf16* packed_weight = arena.take<bf16>(operand_size(OC, IC));
    bf16* packed_inp = arena.take<bf16>(operand_size(block, IC));
    float* sums = arena.take<float>(TASK_SUMS * omp_get_max_threads());
#pragma omp parallel
    {
        pack_matrix<pack_rows_as_b>(packed_weight, m.weight.rows, OC, IC);
        for (int64_t n = 0; n < N; n += block) {
            const int rows = std::min(N - int(n), block);
            pack_matrix<pack_rows_as_a>(packed_inp, m.inp + n * IC, rows, IC);
#pragma omp barrier
            bf16* pre_gelu = m.pre_gelu ? m.pre_gelu + n * OC : nullptr;
            const bf16* residual = m.residual ? m.residual + n * OC : nullptr;
            matmul(sums, packed_operand(packed_inp, panels_of(rows), depth),
                   packed_operand(packed_weight, panels_of(OC), depth),
                   ForwardEpilogue{m.out.data + n * OC, pre_gelu, m.bias, residual, rows, OC});
#pragma omp barrier
        }
    }
}

void matmul_backward(const MatmulBackward<bf16>& m, int N, int IC, int OC, Stream) {
    const BackwardScratch scratch(cpu::scratch(matmul_scratch_bytes(N, IC, OC)), N, IC, OC);
    const int block = row_block(N, OC);
#pragma omp parallel
    {
        if (m.dinp.data) pack_matrix<pack_columns_as_b>(scratch.weight, m.weight.rows, OC, IC);
        for (int64_t n = 0; n < N; n += block) {
            MatmulBackward<bf16> part = m;
            part.dout += n * OC;
            if (m.dweight) part.inp += n * IC;
            if (m.pre_gelu) part.pre_gelu += n * IC;
            if (m.dinp.data) part.dinp.data += n * IC;
            part.accumulate |= n > 0;
            Backward{part, std::min(N - int(n), block), IC, OC, scratch}.run();
#pragma omp barrier
        }
    }
}

int64_t batch_scratch_bytes(int N, int IC, int OC) { return BatchScratch(nullptr, N, IC, OC).bytes; }

void matmul_batch(bf16* out, const bf16* left, const bf16* right, bool transposed, int count, int N, int IC, int OC,
                  Stream) {
    const BatchScratch scratch(cpu::scratch(batch_scratch_bytes(N, IC, OC)), N, IC, OC);
    // x x^T is symmetric: the elements above the diagonal have the same products in the same order, so the same bits.
    const bool symmetric = transposed && left == right && N == OC;
#pragma omp parallel
    for (int first = 0; first < count; first += scratch.at_once) {
        const int end = std::min(count, first + scratch.at_once);
        for (int64_t i = first; i < end; i++) {
            pack_matrix<pack_rows_as_a>(scratch.left(i - first), left + i * N * IC, N, IC);
            if (transposed)
                pack_matrix<pack_rows_as_b>(scratch.right(i - first), right + i * OC * IC, OC, IC);
            else
                pack_matrix<pack_columns_as_b>(scratch.right(i - first), right + i * IC * OC, IC, OC);
        }
#pragma omp barrier
        for (int64_t i = first; i < end; i++)
            matmul(scratch.sums, packed_operand(scratch.left(i - first), panels_of(N), panels_of(IC)),
                   packed_operand(scratch.right(i - first), panels_of(OC), panels_of(IC)),
                   ForwardEpilogue{out + i * N * OC, nullptr, nullptr, nullptr, N, OC}, symmetric);
#pragma omp barrier
        for (int64_t i = first; i < end && symmetric; i++) mirror(out + i * N * N, N);
    }
}

double run_microkernel(const void* operands) {
    static_assert(2 * KC * TILE_PAIR * sizeof(bf16) <= MICROKERNEL_BYTES);
    constexpr int times = 100;
    const TileRegisters registers;
    const bf16* a = static_cast<const bf16*>(operands);
    alignas(64) float sums[BLOCK];
    for (int i = 0; i < times; i++) microkernel(sums, a, a + KC * TILE_PAIR, KC, false);
    return 2.0 * times * PANEL * PANEL * PANEL * KC;
}

}  // namespace cpu::VARIANT
