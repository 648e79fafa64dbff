// matmul_fp32.cpp: fp32 products, and bf16 ones where there are no matrix units, by widening panels to fp32.
//
// The result is split into tasks whose sizes depend on the shape alone, and each is computed by one thread: the bits do
// not depend on the number of threads. A bf16 task widens at most a (TASK_ROWS, PANEL) and a (TASK_COLUMNS, PANEL)
// panel at a time and adds the products of the panels in fp32, so results are rounded once and the working memory is
// bounded. Bias, GELU and its derivative are applied to a task's result while it is in the cache.
#include <omp.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "../device.h"
#include "isa.h"
#include "matmul.h"

namespace cpu::fast {

namespace {

constexpr int TASK_ROWS = 512, TASK_COLUMNS = 768, PANEL = 512;  // at most
constexpr int MIN_TASKS = 16;                                    // where that leaves some hundred rows and columns
constexpr int GEMV_COLUMNS = 64;                                 // results per task of a product with one row

// exp for the GELU, written so that compilers turn loops over it into vector code: 2^n times a polynomial on
// [-ln 2 / 2, ln 2 / 2]; relative error 1e-7. NaN stays NaN.
inline __attribute__((always_inline)) float exp_inline(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
    const float n = shifted - 12582912.0f;
    const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 0.5f;
    p = p * f * f + f + 1.0f;
    return p * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
}

// The tanh-GELU is x times a logistic function: 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)).
inline __attribute__((always_inline)) float gelu(float x) {
    return x / (1.0f + exp_inline(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

inline __attribute__((always_inline)) float gelu_derivative(float x) {
    const float s = 1.0f / (1.0f + exp_inline(-1.5957691216f * (x + 0.044715f * x * x * x)));
    const float bend = s * (1.0f - s), slope = 1.5957691216f * x * (1.0f + 3 * 0.044715f * x * x);
    return bend == 0.0f ? s : s + bend * slope;  // slope may overflow
}

// What is done to a row of a task's result or operand.
struct RowBodies {
    template <class floatX>
    static inline __attribute__((always_inline)) void finish(floatX* out, floatX* pre_gelu, const float* sums,
                                                             const floatX* bias, int count) {
        for (int i = 0; i < count; i++) {
            const float x = bias ? sums[i] + float(bias[i]) : sums[i];
            if (pre_gelu) pre_gelu[i] = floatX(x);
            out[i] = floatX(pre_gelu ? gelu(x) : x);
        }
    }
    template <class floatX>
    static inline __attribute__((always_inline)) void finish_gradient(floatX* dinp, const float* sums,
                                                                      const floatX* pre_gelu, int count) {
        for (int i = 0; i < count; i++)
            dinp[i] = floatX(pre_gelu ? sums[i] * gelu_derivative(float(pre_gelu[i])) : sums[i]);
    }
    static inline __attribute__((always_inline)) void widen(float* wide, const bf16* narrow, int count) {
        for (int i = 0; i < count; i++) wide[i] = float(narrow[i]);
    }
    template <class floatX>
    static inline __attribute__((always_inline)) void add(float* sums, const floatX* x, int count) {
        for (int i = 0; i < count; i++) sums[i] += float(x[i]);
    }
    // In 16 interleaved partial sums, so that it can be vector code without reassociation.
    template <class floatX>
    static inline __attribute__((always_inline)) float dot(const floatX* x, const floatX* y, int count) {
        float partial[16] = {};
        int i = 0;
        for (; i + 16 <= count; i += 16)
            for (int k = 0; k < 16; k++) partial[k] += float(x[i + k]) * float(y[i + k]);
        for (; i < count; i++) partial[0] += float(x[i]) * float(y[i]);
        for (int width = 8; width > 0; width /= 2)
            for (int k = 0; k < width; k++) partial[k] += partial[k + width];
        return partial[0];
    }
};

// RowBodies compiled for each instruction set.
#define ROW_FUNCTIONS(name, target)                                                                              \
    struct name {                                                                                                \
        template <class floatX>                                                                                  \
        target static void finish(floatX* out, floatX* pre_gelu, const float* sums, const floatX* bias, int n) { \
            if (pre_gelu)                                                                                        \
                RowBodies::finish(out, pre_gelu, sums, bias, n);                                                 \
            else                                                                                                 \
                RowBodies::finish(out, static_cast<floatX*>(nullptr), sums, bias, n);                            \
        }                                                                                                        \
        template <class floatX>                                                                                  \
        target static void finish_gradient(floatX* dinp, const float* sums, const floatX* pre_gelu, int n) {     \
            RowBodies::finish_gradient(dinp, sums, pre_gelu, n);                                                 \
        }                                                                                                        \
        target static void widen(float* wide, const bf16* narrow, int n) { RowBodies::widen(wide, narrow, n); }  \
        template <class floatX>                                                                                  \
        target static void add(float* sums, const floatX* x, int n) {                                            \
            RowBodies::add(sums, x, n);                                                                          \
        }                                                                                                        \
        template <class floatX>                                                                                  \
        target static float dot(const floatX* x, const floatX* y, int n) {                                       \
            return RowBodies::dot(x, y, n);                                                                      \
        }                                                                                                        \
    }
ROW_FUNCTIONS(PlainRows, );
#if defined(__x86_64__)
ROW_FUNCTIONS(Avx2Rows, __attribute__((target("avx2,fma"))));
ROW_FUNCTIONS(Avx512Rows, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))));
#endif
#undef ROW_FUNCTIONS

// Calls run with the row functions of isa().
template <class Run>
void with_rows(const Run& run) {
#if defined(__x86_64__)
    if (isa() >= Isa::avx512) return run(Avx512Rows{});
    if (isa() >= Isa::avx2) return run(Avx2Rows{});
#endif
    run(PlainRows{});
}

// A matrix as sgemm reads it. transposed: stored (columns, rows).
template <class floatX>
struct Operand {
    const floatX* data;
    bool transposed;
    int ld;

    const floatX* at(int row, int column) const {
        return transposed ? data + int64_t(column) * ld + row : data + int64_t(row) * ld + column;
    }
};

int64_t widened_bytes_per_thread() {
    return int64_t(sizeof(float)) * (TASK_ROWS * TASK_COLUMNS + (TASK_ROWS + TASK_COLUMNS) * PANEL);
}

// The rows x columns block of an operand, as float, without gaps.
template <class Rows>
Operand<float> widened(float* wide, const Operand<bf16>& x, int row, int column, int rows, int columns) {
    const int stored_rows = x.transposed ? columns : rows, stored_columns = x.transposed ? rows : columns;
    for (int r = 0; r < stored_rows; r++)
        Rows::widen(wide + int64_t(r) * stored_columns, x.at(row, column) + int64_t(r) * x.ld, stored_columns);
    return {wide, x.transposed, stored_columns};
}

// The rows and columns of a task: as large as they may be, because sgemm packs its operands anew for each.
struct Task {
    int rows, columns;
};
Task task_of(int M, int N) {
    Task task = {TASK_ROWS, TASK_COLUMNS};
    const auto tasks = [&] { return ceil_div(M, task.rows) * ceil_div(N, task.columns); };
    if (tasks() < MIN_TASKS) task.rows /= 2;
    if (tasks() < MIN_TASKS) task.columns /= 2;
    return task;
}

// c (M, N) = a (M, K) b (K, N) + beta c in tasks. finish(row, column, columns, sums) gets each row of each task's
// result.
template <class Rows, class floatX, class Finish>
void product(float* c, int ldc, const Operand<floatX>& a, const Operand<floatX>& b, int M, int N, int K, float beta,
             const Finish& finish) {
    const Task task = task_of(M, N);
    const int row_tasks = ceil_div(M, task.rows), column_tasks = ceil_div(N, task.columns);
    float* scratch = nullptr;
    if (!std::is_same_v<floatX, float>)
        scratch = static_cast<float*>(device_scratch(widened_bytes_per_thread() * omp_get_max_threads()));

#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int ct = 0; ct < column_tasks; ct++)
        for (int rt = 0; rt < row_tasks; rt++) {
            const int row = rt * task.rows, rows = std::min(task.rows, M - row);
            const int column = ct * task.columns, columns = std::min(task.columns, N - column);
            float* sums = c ? c + int64_t(row) * ldc + column : nullptr;
            int ld = ldc;
            if constexpr (std::is_same_v<floatX, float>) {
                sgemm(sums, ld, a.at(row, 0), a.transposed, a.ld, b.at(0, column), b.transposed, b.ld, rows, columns, K,
                      beta);
            } else {
                float* own = scratch + widened_bytes_per_thread() / int64_t(sizeof(float)) * omp_get_thread_num();
                float *wide_a = own + TASK_ROWS * TASK_COLUMNS, *wide_b = wide_a + TASK_ROWS * PANEL;
                if (!c) sums = own, ld = columns;
                for (int k = 0; k < K; k += PANEL) {
                    const int depth = std::min(PANEL, K - k);
                    const auto x = widened<Rows>(wide_a, a, row, k, rows, depth);
                    const auto y = widened<Rows>(wide_b, b, k, column, depth, columns);
                    sgemm(sums, ld, x.data, x.transposed, x.ld, y.data, y.transposed, y.ld, rows, columns, depth,
                          k ? 1.0f : beta);
                }
            }
            for (int r = 0; r < rows; r++) finish(row + r, column, columns, sums + int64_t(r) * ld);
        }
}

// One row times the weight's rows: bound by reading the weight once.
template <class Rows, class floatX>
void forward_one_row(floatX* out, floatX* pre_gelu, const floatX* inp, const floatX* weight, const floatX* bias, int IC,
                     int OC) {
#pragma omp parallel for schedule(static)
    for (int first = 0; first < OC; first += GEMV_COLUMNS) {
        const int count = std::min(GEMV_COLUMNS, OC - first);
        float sums[GEMV_COLUMNS];
        for (int i = 0; i < count; i++) sums[i] = Rows::dot(inp, weight + int64_t(first + i) * IC, IC);
        Rows::finish(out + first, pre_gelu ? pre_gelu + first : nullptr, sums, bias ? bias + first : nullptr, count);
    }
}

template <class Rows, class floatX>
void column_sums(float* sums, const floatX* x, int N, int columns, bool accumulate) {
    constexpr int chunk = 256;
#pragma omp parallel for schedule(static)
    for (int first = 0; first < columns; first += chunk) {
        const int count = std::min(chunk, columns - first);
        float total[chunk] = {};
        for (int n = 0; n < N; n++) Rows::add(total, x + int64_t(n) * columns + first, count);
        for (int i = 0; i < count; i++) sums[first + i] = accumulate ? sums[first + i] + total[i] : total[i];
    }
}

// Where an fp32 product leaves its sums: in the result itself. bf16 results have no room for them.
inline float* as_float(float* x) { return x; }
inline float* as_float(bf16*) { return nullptr; }

}  // namespace

template <class floatX>
int64_t matmul_scratch_bytes(int, int, int) {
    return std::is_same_v<floatX, float> ? 0 : widened_bytes_per_thread() * omp_get_max_threads();
}

template <class floatX>
void matmul_forward(floatX* out, floatX* pre_gelu, const floatX* inp, Weight<floatX> weight, const floatX* bias, int N,
                    int IC, int OC, Stream) {
    with_rows([&]<class Rows>(Rows) {
        if (N == 1) return forward_one_row<Rows>(out, pre_gelu, inp, weight.rows, bias, IC, OC);
        const Operand<floatX> x{inp, false, IC}, w{weight.rows, true, IC};
        const bool finished = std::is_same_v<floatX, float> && !bias && !pre_gelu;
        product<Rows>(as_float(out), OC, x, w, N, OC, IC, 0.0f, [&](int n, int o, int count, const float* sums) {
            const int64_t at = int64_t(n) * OC + o;
            if (!finished)
                Rows::finish(out + at, pre_gelu ? pre_gelu + at : nullptr, sums, bias ? bias + o : nullptr, count);
        });
    });
}

template <class floatX>
void matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                     Weight<floatX> weight, const floatX* pre_gelu, int N, int IC, int OC, bool accumulate, Stream) {
    with_rows([&]<class Rows>(Rows) {
        const Operand<floatX> dy{dout, false, OC}, dy_transposed{dout, true, OC}, x{inp, false, IC};
        const Operand<floatX> w{weight.rows, false, IC};
        const bool finished = std::is_same_v<floatX, float> && !pre_gelu;
        product<Rows>(as_float(dinp), IC, dy, w, N, IC, OC, 0.0f, [&](int n, int i, int count, const float* sums) {
            const int64_t at = int64_t(n) * IC + i;
            if (!finished) Rows::finish_gradient(dinp + at, sums, pre_gelu ? pre_gelu + at : nullptr, count);
        });
        product<Rows>(dweight, IC, dy_transposed, x, OC, IC, N, accumulate ? 1.0f : 0.0f,
                      [](int, int, int, const float*) {});
        if (dbias) column_sums<Rows>(dbias, dout, N, OC, accumulate);
    });
}

template int64_t matmul_scratch_bytes<float>(int, int, int);
template int64_t matmul_scratch_bytes<bf16>(int, int, int);
INSTANTIATE(matmul_forward);
INSTANTIATE(matmul_backward);

}  // namespace cpu::fast
