// vector_matmul.h: the fp32 matmul, and the bf16 matmul where no matrix unit is used: packing widens bf16 to fp32.
// Compiled for the instruction set of the including file, into its namespace VARIANT.
//
// The loops are those of BLIS (after Goto and van de Geijn 2008). K is cut into blocks of KC. For each block, all
// threads together pack b, and each thread packs the rows of a that its task needs, into micro-panels in the order
// in which the microkernel reads them (vector_microkernel.h). A micro-panel of a stays in the first-level cache while a
// block of b, which stays in the second-level cache, passes it.
//
// Every element of the result is a sum in the order of k, so its bits depend neither on the number of threads nor on
// how the work is cut into tasks. The epilogue (bias, residual, GELU or its derivative) is applied to a part of the
// result while that part is in the cache.
#pragma once
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "cpu/memory.h"
#include "cpu/variants.h"
#include "cpu/vector_microkernel.h"

namespace cpu::VARIANT {

namespace {

constexpr int MAX_TASK_PANELS = 24, MIN_TASK_PANELS = 6;  // micro-panels of a: 512 KiB, and enough to pay for packed b
constexpr int BLOCK_COLUMNS = 8 * NR;                     // columns of b, computed one after another: 384 KiB
constexpr int PACK_PANELS = 2;                            // micro-panels of b that one task packs
constexpr int MAX_ROWS = 2048;                            // rows of a result block, whose sums are in scratch
constexpr int NC = 3072;                                  // columns of a result block
static_assert(NC % BLOCK_COLUMNS == 0);
constexpr int GEMV_COLUMNS = 64;  // results per task where N = 1

// How a result block (M, N) is cut into tasks: row_tasks ranges of rows, times ranges of `columns` columns. A range of
// rows is whole micro-panels of a, and a range of columns begins at a multiple of unit.
struct BlockTasks {
    int M, panels, row_tasks, columns, tasks;  // panels: number of micro-panels of a; tasks: number of tasks
    BlockTasks(int M, int N, int unit) : M(M), panels(ceil_div(M, MR)) {
        const int threads = omp_get_max_threads();
        row_tasks = round_up(ceil_div(panels, MAX_TASK_PANELS), threads);
        row_tasks = std::max(1, std::min(row_tasks, panels / MIN_TASK_PANELS));
        const int column_tasks = row_tasks % threads == 0 ? 1 : ceil_div(2 * threads, row_tasks);
        columns = round_up(ceil_div(N, column_tasks), unit);
        tasks = row_tasks * ceil_div(N, columns);
    }
    // The first row of a range; it ends where the next one begins. If the micro-panels cannot be divided evenly, the
    // first ranges have one more than the others: threads that take two tasks each then end together.
    int first_row(int range) const {
        const int quotient = panels / row_tasks, remainder = panels % row_tasks;
        return std::min(M, (range * quotient + std::min(range, remainder)) * MR);
    }
};

int block_rows(int M, bool in_place) { return in_place ? M : std::min(M, MAX_ROWS); }

// Scratch memory of a matmul.
struct MatmulScratch {
    float* packed_b[2];  // two blocks
    float* packed_a;     // A_SIZE for each thread
    // The sums of one result block, unless they are in place (in c). If K is one block, they are complete at once, and
    // each thread has room for BLOCK_COLUMNS columns of them, which stay in its cache.
    float* sums;
    int64_t bytes;
    static constexpr int64_t A_SIZE = int64_t(KC) * MAX_TASK_PANELS * MR * COPIES;
    static constexpr int64_t COMPLETE_SUMS = int64_t(MAX_TASK_PANELS) * MR * BLOCK_COLUMNS;

    MatmulScratch(void* base, int M, int N, int K, bool in_place) {
        const int columns = std::min(N, NC), threads = omp_get_max_threads();
        Arena arena{base, 0, 64};
        for (float*& block : packed_b) block = arena.take<float>(int64_t(KC) * round_up(columns, NR));
        packed_a = arena.take<float>(A_SIZE * threads);
        const int64_t all = int64_t(block_rows(M, in_place)) * columns;
        sums = arena.take<float>(in_place ? 0 : K <= KC ? COMPLETE_SUMS * threads : all);
        bytes = arena.used;
    }
};

// c (rows, columns) = a b, or += if accumulate, for packed a (rows, depth) and packed b (depth, columns). Where c ends
// inside a micro-panel, the microkernel computes a whole tile apart from c.
void macrokernel(float* c, int ldc, const float* a, const float* b, int rows, int columns, int depth, bool accumulate) {
    float tile[MR * NR];
    for (int i = 0; i < rows; i += MR)
        for (int j = 0; j < columns; j += NR) {
            float* c_tile = c + int64_t(i) * ldc + j;
            const float *a_panel = a + int64_t(i) * depth * COPIES, *b_panel = b + int64_t(j) * depth;
            const int height = std::min(MR, rows - i), width = std::min(NR, columns - j);
            if (height == MR && width == NR) {
                microkernel(c_tile, ldc, a_panel, b_panel, depth, accumulate);
                continue;
            }
            for (int r = 0; r < height && accumulate; r++) std::copy_n(c_tile + int64_t(r) * ldc, width, tile + r * NR);
            microkernel(tile, NR, a_panel, b_panel, depth, accumulate);
            for (int r = 0; r < height; r++) std::copy_n(tile + r * NR, width, c_tile + int64_t(r) * ldc);
        }
}

// A block of the result (rows, columns) and the block of k (depth <= KC) that is added to it.
struct Block {
    int row, rows, column, columns, k, depth;
};

// A reference to a function of (row, column, columns, sums), or none. With the function's type as a parameter compilers
// would make the matmul's loops again for each one.
struct Epilogue {
    const void* body = nullptr;
    void (*call)(const void* body, int row, int column, int columns, const float* sums) = nullptr;

    Epilogue() = default;
    template <class Body>
    Epilogue(const Body& function) : body(&function) {
        call = [](const void* body, int row, int column, int columns, const float* sums) {
            (*static_cast<const Body*>(body))(row, column, columns, sums);
        };
    }
};

// c (M, N) = a (M, K) b (K, N), or += if accumulate. c may be null: the sums are then kept in scratch.
// The epilogue is called when the sums of `columns` elements of a row are complete; every element of the result is in
// one such call. With unit = BLOCK_COLUMNS each call's columns begin at a multiple of it.
template <class floatX>
struct Matmul {
    float* c;
    Operand<floatX> a, b;
    int M, N, K;
    bool accumulate;
    Epilogue epilogue;
    int unit;
    bool in_place = c != nullptr;
    int height = block_rows(M, in_place), column_blocks = ceil_div(N, NC), k_blocks = ceil_div(K, KC);
    MatmulScratch scratch{cpu::scratch(MatmulScratch(nullptr, M, N, K, in_place).bytes), M, N, K, in_place};

    Block block(int i) const {
        const int result_block = i / k_blocks, k = i % k_blocks * KC;
        const int row = result_block / column_blocks * height, column = result_block % column_blocks * NC;
        return {row, std::min(height, M - row), column, std::min(NC, N - column), k, std::min(KC, K - k)};
    }

    // Computes the blocks in order, with one barrier for each. The tasks of one parallel loop compute block i - 1 and,
    // after that, pack b for block i. The packing tasks are last because they are small: the threads end together.
    void run() const {
        const int blocks = ceil_div(M, height) * column_blocks * k_blocks;
#pragma omp parallel
        for (int i = 0; i <= blocks; i++) {
            const Block current = block(std::max(i - 1, 0)), next = block(std::min(i, blocks - 1));
            const BlockTasks grid(current.rows, current.columns, unit);
            const int tasks = i > 0 ? grid.tasks : 0, packs = i < blocks ? ceil_div(next.columns, PACK_COLUMNS) : 0;
#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < tasks + packs; task++)
                task < tasks ? compute_task(current, grid, task, scratch.packed_b[(i + 1) % 2])
                             : pack_task(next, task - tasks, scratch.packed_b[i % 2]);
        }
    }

    static constexpr int PACK_COLUMNS = PACK_PANELS * NR;

    // Packs the PACK_COLUMNS columns of b (block.depth, block.columns) that belong to one packing task.
    void pack_task(const Block& block, int task, float* packed) const {
        const int column = task * PACK_COLUMNS, columns = std::min(PACK_COLUMNS, block.columns - column);
        pack<NR>(packed + int64_t(column) * block.depth, b.at(block.k, block.column + column).transpose(), columns,
                 block.depth);
    }

    void compute_task(const Block& block, const BlockTasks& grid, int task, const float* block_b) const {
        const int range = task % grid.row_tasks, first = grid.first_row(range);
        const int rows = grid.first_row(range + 1) - first;
        const int begin = task / grid.row_tasks * grid.columns, end = std::min(begin + grid.columns, block.columns);
        const int row = block.row + first;
        const bool complete = !in_place && k_blocks == 1;
        const int ld = in_place ? N : complete ? BLOCK_COLUMNS : block.columns;
        float* own_a = scratch.packed_a + MatmulScratch::A_SIZE * omp_get_thread_num();
        float* sums = in_place   ? c + int64_t(row) * N + block.column
                      : complete ? scratch.sums + MatmulScratch::COMPLETE_SUMS * omp_get_thread_num()
                                 : scratch.sums + int64_t(first) * ld;
        pack<MR>(own_a, a.at(row, block.k), rows, block.depth);
        repeat(own_a, int64_t(round_up(rows, MR)) * block.depth);
        for (int j = begin; j < end; j += BLOCK_COLUMNS) {
            const int columns = std::min(BLOCK_COLUMNS, end - j);
            float* const part = complete ? sums : sums + j;
            macrokernel(part, ld, own_a, block_b + int64_t(j) * block.depth, rows, columns, block.depth,
                        accumulate || block.k > 0);
            if (epilogue.call && block.k + block.depth == K)
                for (int r = 0; r < rows; r++)
                    epilogue.call(epilogue.body, row + r, block.column + j, columns, part + int64_t(r) * ld);
        }
    }
};

template <class floatX>
void blocked_matmul(float* c, const Operand<floatX>& a, const Operand<floatX>& b, int M, int N, int K, bool accumulate,
                    const Epilogue& epilogue, int unit = NR) {
    Matmul<floatX>{c, a, b, M, N, K, accumulate, epilogue, unit}.run();
}

// matmul_forward for N = 1: inp (IC), weight (OC, IC), out (OC). It is bound by reading the weight once.
template <class floatX>
void forward_one_row(const MatmulForward<floatX>& m, int IC, int OC) {
#pragma omp parallel for schedule(static)
    for (int first = 0; first < OC; first += GEMV_COLUMNS) {
        const int count = std::min(GEMV_COLUMNS, OC - first);
        float sums[GEMV_COLUMNS];
        for (int i = 0; i < count; i++) sums[i] = dot(m.inp, m.weight.rows + int64_t(first + i) * IC, IC);
        forward_epilogue(m.out.data + first, m.pre_gelu ? m.pre_gelu + first : nullptr, sums,
                         m.bias ? m.bias + first : nullptr, m.residual ? m.residual + first : nullptr, count);
    }
}

// Where the fp32 sums of a result are kept: in the result itself, or in scratch (null) if the result is bf16.
inline float* sums_in(float* result) { return result; }
inline float* sums_in(bf16*) { return nullptr; }

}  // namespace

// sums (columns) = the column sums of x (N, columns), or += if accumulate.
template <class floatX>
void column_sums(float* sums, const floatX* x, int N, int columns, bool accumulate) {
    constexpr int chunk = 256;
#pragma omp parallel for schedule(static)
    for (int first = 0; first < columns; first += chunk) {
        const int count = std::min(chunk, columns - first);
        float total[chunk] = {};
        for (int n = 0; n < N; n++)
            for (int i = 0; i < count; i++) total[i] += float(x[int64_t(n) * columns + first + i]);
        for (int i = 0; i < count; i++) sums[first + i] = accumulate ? sums[first + i] + total[i] : total[i];
    }
}

template <class floatX>
int64_t matmul_scratch_bytes(int N, int IC, int OC) {
    constexpr bool in_place = std::is_same_v<floatX, float>;
    const int64_t forward = MatmulScratch(nullptr, N, OC, IC, in_place).bytes;
    const int64_t input = MatmulScratch(nullptr, N, IC, OC, in_place).bytes;
    return std::max(std::max(forward, input), MatmulScratch(nullptr, OC, IC, N, true).bytes);
}

template <class floatX>
void matmul_forward(const MatmulForward<floatX>& m, int N, int IC, int OC, Stream) {
    if (N == 1) return forward_one_row(m, IC, OC);
    const Operand<floatX> x{m.inp, false, IC}, w{m.weight.rows, true, IC};
    const auto epilogue = [&](int n, int o, int count, const float* sums) {
        const int64_t at = int64_t(n) * OC + o;
        forward_epilogue(m.out.data + at, m.pre_gelu ? m.pre_gelu + at : nullptr, sums, m.bias ? m.bias + o : nullptr,
                         m.residual ? m.residual + at : nullptr, count);
    };
    const bool none = std::is_same_v<floatX, float> && !m.bias && !m.pre_gelu && !m.residual;
    blocked_matmul(sums_in(m.out.data), x, w, N, OC, IC, false, none ? Epilogue() : epilogue);
}

template <class floatX>
void matmul_backward(const MatmulBackward<floatX>& m, int N, int IC, int OC, Stream) {
    const Operand<floatX> dy{m.dout, false, OC}, dy_transposed{m.dout, true, OC}, x{m.inp, false, IC};
    const Operand<floatX> w{m.weight.rows, false, IC};
    floatX* const dinp = m.dinp.data;
    const auto epilogue = [&](int n, int i, int count, const float* sums) {
        const int64_t at = int64_t(n) * IC + i;
        dinp_epilogue(dinp + at, sums, m.pre_gelu ? m.pre_gelu + at : nullptr, count);
    };
    const bool none = std::is_same_v<floatX, float> && !m.pre_gelu;
    if (dinp) blocked_matmul(sums_in(dinp), dy, w, N, IC, OC, false, none ? Epilogue() : epilogue);
    if (!m.dweight) return;
    blocked_matmul(m.dweight, dy_transposed, x, OC, IC, N, m.accumulate, {});
    if (m.dbias) column_sums(m.dbias, m.dout, N, OC, m.accumulate);
}

inline double run_microkernel(const void* operands) {
    static_assert(KC * (MR * COPIES + NR) * sizeof(float) <= MICROKERNEL_BYTES);
    constexpr int times = 100;
    const float* a = static_cast<const float*>(operands);
    float c[MR * NR];
    for (int i = 0; i < times; i++) {
        microkernel(c, NR, a, a + KC * MR * COPIES, KC, false);
        asm volatile("" ::"r"(c) : "memory");  // else compilers leave out sums that are not used
    }
    return 2.0 * times * MR * NR * KC;
}

}  // namespace cpu::VARIANT
