// matmul_fp32.cpp: fp32 products, and bf16 ones where there are no matrix units, widened to fp32 where they are packed.
//
// The operands are copied into strips, in the order in which the innermost product (strips.h) reads them: DEPTH of
// the inner dimension at a time, b by all threads together, a by each thread for its own task. A strip of a stays in
// the first-level cache while a piece of b passes it, which stays in the second (after Goto and van de Geijn 2008).
// Every element of the result is a sum in the order of k, so the bits depend neither on the number of threads nor on
// the cut into tasks.
// Bias, GELU and its derivative are applied to a piece of the result while it is in the cache.
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/isa.h"
#include "cpu/matmul.h"
#include "cpu/memory.h"
#include "cpu/strips.h"

namespace cpu::fast {

namespace {

using strips::DEPTH, strips::Operand;

constexpr int MOST_STRIPS = 24, FEWEST_STRIPS = 6;      // of a, per task: 512 KiB, and enough to pay for packed b
constexpr int PIECE_STRIPS = 8;                         // of b, until the result is finished: 384 KiB
constexpr int PACK_STRIPS = 2;                          // of b, packed by a thread in one go
constexpr int CHUNK_ROWS = 2048, CHUNK_COLUMNS = 3072;  // of the result at a time; rows: where it has no room for sums
constexpr int GEMV_COLUMNS = 64;                        // results per task of a product with one row

// Calls run with the loops of isa().
template <class Run>
auto with_strips(const Run& run) {
#if defined(__x86_64__)
    if (isa() >= Isa::avx512) return run(strips::Avx512{});
    if (isa() >= Isa::avx2) return run(strips::Avx2{});
#endif
    return run(strips::Plain{});
}

// How the tasks of a product are cut, for at most M rows and N columns. The bits do not depend on it: every element of
// the result is summed in the order of k, in pieces of DEPTH.
template <class Strips>
struct Cut {
    int M, strips, row_tasks, columns, tasks;  // columns of a task, whole strips
    Cut(int M, int N) : M(M), strips(ceil_div(M, Strips::rows)) {
        const int threads = omp_get_max_threads();
        row_tasks = round_up(ceil_div(strips, MOST_STRIPS), threads);
        row_tasks = std::max(1, std::min(row_tasks, strips / FEWEST_STRIPS));
        const int column_tasks = row_tasks % threads == 0 ? 1 : ceil_div(2 * threads, row_tasks);
        columns = round_up(ceil_div(N, column_tasks), Strips::columns);
        tasks = row_tasks * ceil_div(N, columns);
    }
    // Where the rows of a task begin; those of the next one follow. The first tasks have the strip more that some have, so
    // that threads which take two tasks each end together.
    int begin(int task) const {
        const int fewer = strips / row_tasks, with_more = strips % row_tasks;
        return std::min(M, (task * fewer + std::min(task, with_more)) * Strips::rows);
    }
};

int chunk_rows(int M, bool in_place) { return in_place ? M : std::min(M, CHUNK_ROWS); }

// Floats of working memory: packed strips of b for two blocks, of a for each thread, and sums where the result has no
// room for them.
template <class Strips>
struct Workspace {
    static constexpr int64_t packed_a = int64_t(DEPTH) * MOST_STRIPS * Strips::rows;
    int64_t packed_b, sums;
    Workspace(int M, int N, bool in_place) {
        const int columns = std::min(N, CHUNK_COLUMNS), rows = chunk_rows(M, in_place);
        packed_b = int64_t(DEPTH) * round_up(columns, Strips::columns);
        sums = in_place ? 0 : int64_t(rows) * columns;
    }
    int64_t bytes() const { return int64_t(sizeof(float)) * (2 * packed_b + packed_a * omp_get_max_threads() + sums); }
};

// c (rows, columns) = or += packed strips of a times packed strips of b.
template <class Strips>
void multiply_packed(float* c, int ldc, const float* a, const float* b, int rows, int columns, int depth, bool add) {
    float tile[Strips::rows * Strips::columns];
    for (int i = 0; i < rows; i += Strips::rows)
        for (int j = 0; j < columns; j += Strips::columns) {
            float* at = c + int64_t(i) * ldc + j;
            const float *strip_a = a + int64_t(i) * depth, *strip_b = b + int64_t(j) * depth;
            const int height = std::min(Strips::rows, rows - i), width = std::min(Strips::columns, columns - j);
            if (height == Strips::rows && width == Strips::columns) {
                Strips::multiply(at, ldc, strip_a, strip_b, depth, add);
                continue;
            }
            for (int r = 0; r < height && add; r++)
                std::copy_n(at + int64_t(r) * ldc, width, tile + r * Strips::columns);
            Strips::multiply(tile, Strips::columns, strip_a, strip_b, depth, add);
            for (int r = 0; r < height; r++) std::copy_n(tile + r * Strips::columns, width, at + int64_t(r) * ldc);
        }
}

// A chunk of the result, and DEPTH or fewer steps of the inner dimension for it.
struct Block {
    int row, rows, column, columns, k, depth;
};

// c (M, N) = or += a (M, K) b (K, N); c may be null: the sums are then working memory. finish(row, column, columns,
// sums) gets every row of the result, in pieces, once it is complete.
template <class Strips, class floatX, class Finish>
struct Product {
    float* c;
    Operand<floatX> a, b;
    int M, N, K;
    bool accumulate;
    Finish finish;
    int height = chunk_rows(M, c != nullptr), chunks = ceil_div(N, CHUNK_COLUMNS), depths = ceil_div(K, DEPTH);
    Workspace<Strips> workspace{M, N, c != nullptr};
    float* packed_b = static_cast<float*>(scratch(workspace.bytes()));
    float *packed_a = packed_b + 2 * workspace.packed_b, *own = packed_a + workspace.packed_a * omp_get_max_threads();

    Block block(int i) const {
        const int chunk = i / depths, k = i % depths * DEPTH;
        const int row = chunk / chunks * height, column = chunk % chunks * CHUNK_COLUMNS;
        return {row, std::min(height, M - row), column, std::min(CHUNK_COLUMNS, N - column), k, std::min(DEPTH, K - k)};
    }
    float* packed_b_of(int i) const { return packed_b + i % 2 * workspace.packed_b; }

    // One block after the other, with one wait for each. The last tasks beside the products of one are to pack b of the
    // next: they are small, so that the threads end together.
    void run() const {
        const int blocks = ceil_div(M, height) * chunks * depths;
#pragma omp parallel
        for (int i = 0; i <= blocks; i++) {
            const Block now = block(std::max(i - 1, 0)), next = block(std::min(i, blocks - 1));
            const Cut<Strips> cut(now.rows, now.columns);
            const int tasks = i > 0 ? cut.tasks : 0, packs = i < blocks ? ceil_div(next.columns, PACK_COLUMNS) : 0;
#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < tasks + packs; task++)
                task < tasks ? multiply(now, cut, task, packed_b_of(i + 1)) : pack(next, task - tasks, packed_b_of(i));
        }
    }

    static constexpr int PACK_COLUMNS = PACK_STRIPS * Strips::columns;

    void pack(const Block& block, int task, float* to) const {
        const int column = task * PACK_COLUMNS, columns = std::min(PACK_COLUMNS, block.columns - column);
        Strips::pack_b(to + int64_t(column) * block.depth, b.from(block.k, block.column + column), columns,
                       block.depth);
    }

    void multiply(const Block& block, const Cut<Strips>& cut, int task, const float* from) const {
        constexpr int piece = PIECE_STRIPS * Strips::columns;
        const int part = task % cut.row_tasks, first = cut.begin(part), rows = cut.begin(part + 1) - first;
        const int begin = task / cut.row_tasks * cut.columns, end = std::min(begin + cut.columns, block.columns);
        const int row = block.row + first, ld = c ? N : block.columns;
        float* own_a = packed_a + workspace.packed_a * omp_get_thread_num();
        float* sums = c ? c + int64_t(row) * N + block.column : own + int64_t(first) * ld;
        Strips::pack_a(own_a, a.from(row, block.k), rows, block.depth);
        for (int j = begin; j < end; j += piece) {
            const int columns = std::min(piece, end - j);
            multiply_packed<Strips>(sums + j, ld, own_a, from + int64_t(j) * block.depth, rows, columns, block.depth,
                                    accumulate || block.k > 0);
            if (block.k + block.depth == K)
                for (int r = 0; r < rows; r++) finish(row + r, block.column + j, columns, sums + int64_t(r) * ld + j);
        }
    }
};

template <class Strips, class floatX, class Finish>
void product(float* c, const Operand<floatX>& a, const Operand<floatX>& b, int M, int N, int K, bool accumulate,
             const Finish& finish) {
    Product<Strips, floatX, Finish>{c, a, b, M, N, K, accumulate, finish}.run();
}

// One row times the weight's rows: bound by reading the weight once.
template <class Strips, class floatX>
void forward_one_row(floatX* out, floatX* pre_gelu, const floatX* inp, const floatX* weight, const floatX* bias, int IC,
                     int OC) {
#pragma omp parallel for schedule(static)
    for (int first = 0; first < OC; first += GEMV_COLUMNS) {
        const int count = std::min(GEMV_COLUMNS, OC - first);
        float sums[GEMV_COLUMNS];
        for (int i = 0; i < count; i++) sums[i] = Strips::dot(inp, weight + int64_t(first + i) * IC, IC);
        Strips::finish(out + first, pre_gelu ? pre_gelu + first : nullptr, sums, bias ? bias + first : nullptr, count);
    }
}

template <class Strips, class floatX>
void column_sums(float* sums, const floatX* x, int N, int columns, bool accumulate) {
    constexpr int chunk = 256;
#pragma omp parallel for schedule(static)
    for (int first = 0; first < columns; first += chunk) {
        const int count = std::min(chunk, columns - first);
        float total[chunk] = {};
        for (int n = 0; n < N; n++) Strips::add(total, x + int64_t(n) * columns + first, count);
        for (int i = 0; i < count; i++) sums[first + i] = accumulate ? sums[first + i] + total[i] : total[i];
    }
}

// Where an fp32 product leaves its sums: in the result itself. bf16 results have no room for them.
inline float* as_float(float* x) { return x; }
inline float* as_float(bf16*) { return nullptr; }

}  // namespace

template <class floatX>
int64_t matmul_scratch_bytes(int N, int IC, int OC) {
    constexpr bool in_place = std::is_same_v<floatX, float>;
    return with_strips([&]<class Strips>(Strips) {
        using Space = Workspace<Strips>;
        return std::max({Space(N, OC, in_place).bytes(), Space(N, IC, in_place).bytes(), Space(OC, IC, true).bytes()});
    });
}

template <class floatX>
void matmul_forward(floatX* out, floatX* pre_gelu, const floatX* inp, Weight<floatX> weight, const floatX* bias, int N,
                    int IC, int OC, Stream) {
    with_strips([&]<class Strips>(Strips) {
        if (N == 1) return forward_one_row<Strips>(out, pre_gelu, inp, weight.rows, bias, IC, OC);
        const Operand<floatX> x{inp, false, IC}, w{weight.rows, true, IC};
        const bool finished = std::is_same_v<floatX, float> && !bias && !pre_gelu;
        product<Strips>(as_float(out), x, w, N, OC, IC, false, [&](int n, int o, int count, const float* sums) {
            const int64_t at = int64_t(n) * OC + o;
            if (!finished)
                Strips::finish(out + at, pre_gelu ? pre_gelu + at : nullptr, sums, bias ? bias + o : nullptr, count);
        });
    });
}

template <class floatX>
void matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                     Weight<floatX> weight, const floatX* pre_gelu, int N, int IC, int OC, bool accumulate, Stream) {
    with_strips([&]<class Strips>(Strips) {
        const Operand<floatX> dy{dout, false, OC}, dy_transposed{dout, true, OC}, x{inp, false, IC};
        const Operand<floatX> w{weight.rows, false, IC};
        const bool finished = std::is_same_v<floatX, float> && !pre_gelu;
        product<Strips>(as_float(dinp), dy, w, N, IC, OC, false, [&](int n, int i, int count, const float* sums) {
            const int64_t at = int64_t(n) * IC + i;
            if (!finished) Strips::finish_gradient(dinp + at, sums, pre_gelu ? pre_gelu + at : nullptr, count);
        });
        product<Strips>(dweight, dy_transposed, x, OC, IC, N, accumulate, [](int, int, int, const float*) {});
        if (dbias) column_sums<Strips>(dbias, dout, N, OC, accumulate);
    });
}

template int64_t matmul_scratch_bytes<float>(int, int, int);
template int64_t matmul_scratch_bytes<bf16>(int, int, int);
INSTANTIATE(matmul_forward);
INSTANTIATE(matmul_backward);

double measure_peak_flops() {
    return with_strips([]<class Strips>(Strips) {
        double flops = 0.0;
#pragma omp parallel reduction(+ : flops)
        {
            constexpr int rows = Strips::rows, columns = Strips::columns;
            std::vector<float> a(DEPTH * rows, 1.0f), b(DEPTH * columns, 1.0f), c(rows * columns);
            flops = peak_of([&] { Strips::multiply(c.data(), columns, a.data(), b.data(), DEPTH, false); },
                            2.0 * rows * columns * DEPTH);
        }
        return flops;
    });
}

}  // namespace cpu::fast
