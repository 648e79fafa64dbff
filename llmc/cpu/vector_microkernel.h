// vector_microkernel.h: the innermost loops of the fp32 matmul in BLIS's scheme, for the instruction set of the
// including file: packing of operands into micro-panels, the microkernel, and the epilogues of result rows.
//
// c (M, N) = a (M, K) b (K, N). A micro-panel of a is MR of its rows, and one of b is NR of its columns: a block of MR
// x NR sums fills the vector registers. A micro-panel is stored in the order of k, with the MR (or NR) elements of one
// k together.
#pragma once
#include <algorithm>
#include <bit>
#include <utility>

#include "base/dtype.h"
#include "cpu/vec.h"

namespace cpu::VARIANT {
namespace {

constexpr int CACHE_LINE = 64;  // bytes
#if defined(__x86_64__) && !defined(__AVX2__)
constexpr int COPIES =
    VL;  // SSE2's broadcasts take the units that multiply and add: packed a has each element VL times
#else
constexpr int COPIES = 1;
#endif
constexpr int KC = COPIES > 1 ? 192 : 384;  // K is cut into blocks of KC: a micro-panel of a fits a first-level cache

#if defined(__AVX512F__)
constexpr int MR = 14;
#elif defined(__aarch64__)
constexpr int MR = 10;  // arm64 has 32 registers; with 12 rows gcc 12 keeps some sums in memory
#else
constexpr int MR = 6;  // rows whose sums fit into 16 registers
#endif
constexpr int NR = 2 * VL;

// A matrix operand. transposed: it is stored as (columns, rows). ld: elements from one stored row to the next.
template <class floatX>
struct Operand {
    const floatX* data;
    bool transposed;
    int ld;

    // The submatrix that begins at (row, column).
    Operand at(int row, int column) const {
        return {transposed ? data + int64_t(column) * ld + row : data + int64_t(row) * ld + column, transposed, ld};
    }
    Operand transpose() const { return {data, !transposed, ld}; }
};

// A vector of LANES floats that may lie anywhere in memory and alias other types.
template <int LANES>
struct VectorOf {
    typedef float type __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
};

// Stores COUNT lanes from lane FROM on: the largest power of two of them at once, then the others by recursion. memcpy
// would move them through integer registers.
template <int COUNT, int FROM, int... I>
INLINE void store_lanes(float* to, floatv v, std::integer_sequence<int, I...>) {
    constexpr int width = sizeof...(I), left = COUNT - width;
    *reinterpret_cast<typename VectorOf<width>::type*>(to) = __builtin_shufflevector(v, v, (FROM + I)...);
    if constexpr (left > 0)
        store_lanes<left, FROM + width>(to + width, v,
                                        std::make_integer_sequence<int, int(std::bit_floor(unsigned(left)))>());
}

// panel (VL, WIDTH) = the transpose of x (WIDTH, VL). Each call transposes VL rows of x, from FIRST on, in registers;
// recursion over FIRST covers the others.
template <int WIDTH, int FIRST = 0, class floatX>
INLINE void pack_transposed(float* panel, const floatX* x, int64_t ld) {
    constexpr int count = std::min(VL, WIDTH - FIRST);
    floatv rows[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) rows[i] = load(x + (FIRST + std::min(i, count - 1)) * ld);
    transpose(rows);
#pragma GCC unroll 16
    for (int k = 0; k < VL; k++)
        store_lanes<count, 0>(panel + k * WIDTH + FIRST, rows[k],
                              std::make_integer_sequence<int, int(std::bit_floor(unsigned(count)))>());
    if constexpr (FIRST + VL < WIDTH) pack_transposed<WIDTH, FIRST + VL>(panel, x, ld);
}

// Packs x (WIDTH, depth), not transposed, into one micro-panel.
template <int WIDTH, class floatX>
INLINE void pack_rows(float* panel, const Operand<floatX>& x, int depth) {
    int k = 0;
    for (; k + VL <= depth; k += VL) pack_transposed<WIDTH>(panel + k * WIDTH, x.data + k, x.ld);
    for (; k < depth; k++)
        for (int i = 0; i < WIDTH; i++) panel[k * WIDTH + i] = float(x.data[int64_t(i) * x.ld + k]);
}

// Copies COUNT elements. The local array is there because compilers copy one element at a time where they cannot rule
// out that `to` and `from` overlap.
template <int COUNT, class floatX>
INLINE void copy(float* to, const floatX* from) {
    float widened[COUNT];
    for (int i = 0; i < COUNT; i++) widened[i] = float(from[i]);
    for (int i = 0; i < COUNT; i++) to[i] = widened[i];
}
template <int COUNT>
INLINE void copy(float* to, const float* from) {
    constexpr int width = std::min(VL, int(std::bit_floor(unsigned(COUNT))));
    using part = typename VectorOf<width>::type;
    *reinterpret_cast<part*>(to) = *reinterpret_cast<const part*>(from);
    if constexpr (COUNT > width) copy<COUNT - width>(to + width, from + width);
}

// Packs x (rows, depth) into ceil(rows / WIDTH) micro-panels of WIDTH rows each; the last one is padded with zero rows.
// panels[panel][k][row], widened to float. The loops follow x's contiguous dimension. If x is transposed, a contiguous
// stretch is a part of one stored row: it is too short for the hardware prefetcher to find the next stored row, so the
// loop prefetches by hand.
template <int WIDTH, class floatX>
void pack(float* panels, const Operand<floatX>& x, int rows, int depth) {
    const int full_rows = rows / WIDTH * WIDTH;  // rows in full micro-panels
    if (x.transposed)
        for (int k = 0; k < depth; k++) {
            constexpr int prefetch_distance = 16;  // stored rows
            const floatX* row = x.at(0, k).data;
            const floatX* prefetched = x.at(0, std::min(k + prefetch_distance, depth - 1)).data;
            for (int i = 0; i < full_rows; i += CACHE_LINE / int(sizeof(floatX)))
                __builtin_prefetch(prefetched + i, 0, 2);
            for (int i = 0; i < full_rows; i += WIDTH) copy<WIDTH>(panels + int64_t(i) * depth + k * WIDTH, row + i);
        }
    else
        for (int i = 0; i < full_rows; i += WIDTH) pack_rows<WIDTH>(panels + int64_t(i) * depth, x.at(i, 0), depth);
    if (full_rows < rows) {
        float* edge = panels + int64_t(full_rows) * depth;
        __builtin_memset(edge, 0, WIDTH * depth * sizeof(float));
        for (int i = full_rows; i < rows; i++)
            for (int k = 0; k < depth; k++) edge[k * WIDTH + i - full_rows] = float(*x.at(i, k).data);
    }
}

// Repeats each of `count` elements COPIES times, in place.
INLINE void repeat(float* x, int64_t count) {
    if constexpr (COPIES > 1)
        for (int64_t i = count - 1; i >= 0; i--) store(x + i * COPIES, broadcast(x[i]));
}

// c (MR, NR) = a b, or += if accumulate, for one micro-panel of a and one of b with `depth` steps of k. The MR x NR
// sums stay in registers. Each step broadcasts MR elements of a, which are in the first-level cache, or loads their
// copies, and loads two vectors of b, which are in the second.
void microkernel(float* c, int64_t ldc, const float* a, const float* b, int depth, bool accumulate) {
    constexpr int prefetch_distance = 16;  // steps of k
    floatv sums[MR][2] = {};
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
        for (int half = 0; half < 2; half++) __builtin_prefetch(c + i * ldc + half * VL);
    for (int k = 0; k < depth; k++, a += MR * COPIES, b += NR) {
        const floatv b0 = load(b), b1 = load(b + VL);
#pragma GCC unroll 2
        for (int i = 0; i < NR; i += CACHE_LINE / int(sizeof(float)))
            __builtin_prefetch(b + prefetch_distance * NR + i);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            const floatv x = COPIES > 1 ? load(a + i * COPIES) : broadcast(a[i]);
            sums[i][0] = multiply_add(x, b0, sums[i][0]);
            sums[i][1] = multiply_add(x, b1, sums[i][1]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float* out = c + i * ldc + half * VL;
            store(out, accumulate ? load(out) + sums[i][half] : sums[i][half]);
        }
}

// out = sums + bias + residual, or its GELU, for `count` elements of a row: the epilogue of matmul_forward. pre_gelu,
// bias and residual may be null.
template <class floatX>
void forward_epilogue(floatX* out, floatX* pre_gelu, const float* sums, const floatX* bias, const floatX* residual,
                      int count) {
    for_vectors(count, [=](int64_t i, auto width) {
        floatv x = load(sums + i, width);
        if (bias) x += load(bias + i, width);
        if (residual) x += load(residual + i, width);
        if (pre_gelu) store(pre_gelu + i, x, width);
        store(out + i, pre_gelu ? gelu(x) : x, width);
    });
}

// Epilogue of matmul_backward's input gradient: the GELU's derivative. pre_gelu may be null.
template <class floatX>
void dinp_epilogue(floatX* dinp, const float* sums, const floatX* pre_gelu, int count) {
    for_vectors(count, [=](int64_t i, auto width) {
        const floatv x = load(sums + i, width);
        store(dinp + i, pre_gelu ? x * gelu_derivative(load(pre_gelu + i, width)) : x, width);
    });
}

// The dot product of x (count) and y (count), as 16 interleaved partial sums: vector code needs no reassociation.
template <class floatX>
float dot(const floatX* x, const floatX* y, int count) {
    float partial[16] = {};
    int i = 0;
    for (; i + 16 <= count; i += 16)
        for (int k = 0; k < 16; k++) partial[k] += float(x[i + k]) * float(y[i + k]);
    for (; i < count; i++) partial[0] += float(x[i]) * float(y[i]);
    for (int width = 8; width > 0; width /= 2)
        for (int k = 0; k < width; k++) partial[k] += partial[k + width];
    return partial[0];
}

}  // namespace
}  // namespace cpu::VARIANT
