// microkernel_fp32.h: the innermost loops of the fp32 matmul in BLIS's scheme, written once and compiled for each
// instruction set: packing of operands into micro-panels, the microkernel, and the epilogues of result rows.
//
// c (M, N) = a (M, K) b (K, N). A micro-panel of a is MR of its rows, and one of b is NR of its columns: a block of MR
// x NR sums fills the vector registers. A micro-panel is stored in the order of k, with the MR (or NR) elements of one
// k together.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/dtype.h"

namespace cpu::fp32 {

constexpr int CACHE_LINE = 64;  // bytes
constexpr int KC = 384;  // K is cut into blocks of KC; with MR = 14, a micro-panel of a is half a first-level cache

#define INLINE inline __attribute__((always_inline))

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

// exp for the GELU, written so that compilers vectorize loops over it: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
// The relative error is 1e-7. NaN stays NaN.
INLINE float exp_inline(float x) {
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

// The tanh-GELU is x times a logistic function: 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), with
// u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float GELU_SLOPE = 1.5957691216f, GELU_CUBIC = 0.044715f;  // 2 sqrt(2 / pi)
INLINE float exp_minus_2u(float x) { return exp_inline(-GELU_SLOPE * (x + GELU_CUBIC * x * x * x)); }
INLINE float gelu(float x) { return x / (1.0f + exp_minus_2u(x)); }

// d gelu / dx = s + s (1 - s) x 2u', where s is the logistic function of 2u. x 2u' may overflow where s (1 - s) is 0.
INLINE float gelu_derivative(float x) {
    const float s = 1.0f / (1.0f + exp_minus_2u(x));
    const float ds = s * (1.0f - s), x_2du = GELU_SLOPE * x * (1.0f + 3 * GELU_CUBIC * x * x);
    return ds == 0.0f ? s : s + ds * x_2du;
}

// VectorOf<LANES>::type: a vector of LANES floats that may lie anywhere in memory and alias other types.
template <int LANES>
struct VectorOf;
template <>
struct VectorOf<2> {
    typedef float type __attribute__((vector_size(8), aligned(4), may_alias));
};
template <>
struct VectorOf<4> {
    typedef float type __attribute__((vector_size(16), aligned(4), may_alias));
};
template <>
struct VectorOf<8> {
    typedef float type __attribute__((vector_size(32), aligned(4), may_alias));
};
template <>
struct VectorOf<16> {
    typedef float type __attribute__((vector_size(64), aligned(4), may_alias));
};

// The loops for vectors of LANES floats. A micro-panel has MR rows of a, or NR columns of b, which are two vectors.
template <int LANES, int ROWS>
struct KernelLoops {
    static constexpr int MR = ROWS, NR = 2 * LANES;
    using vec = typename VectorOf<LANES>::type;

    // Packs x (rows, depth) into ceil(rows / WIDTH) micro-panels of WIDTH rows each; the last one is padded with zero
    // rows. panels[panel][k][row], widened to float. The loops follow x's contiguous dimension. If x is transposed, a
    // contiguous stretch is a part of one stored row: it is too short for the hardware prefetcher to find the next
    // stored row, so the loop prefetches by hand.
    template <int WIDTH, class floatX>
    static INLINE void pack(float* panels, const Operand<floatX>& x, int rows, int depth) {
        const int full_rows = rows / WIDTH * WIDTH;  // rows in full micro-panels
        if (x.transposed)
            for (int k = 0; k < depth; k++) {
                constexpr int prefetch_distance = 16;  // stored rows
                const floatX* row = x.at(0, k).data;
                const floatX* prefetched = x.at(0, std::min(k + prefetch_distance, depth - 1)).data;
                for (int i = 0; i < full_rows; i += CACHE_LINE / int(sizeof(floatX)))
                    __builtin_prefetch(prefetched + i, 0, 2);
                for (int i = 0; i < full_rows; i += WIDTH)
                    copy<WIDTH>(panels + int64_t(i) * depth + k * WIDTH, row + i);
            }
        else
            for (int i = 0; i < full_rows; i += WIDTH) pack_rows<WIDTH>(panels + int64_t(i) * depth, x.at(i, 0), depth);
        if (full_rows < rows) {
            float* edge = panels + int64_t(full_rows) * depth;
            std::fill(edge, edge + WIDTH * depth, 0.0f);
            for (int i = full_rows; i < rows; i++)
                for (int k = 0; k < depth; k++) edge[k * WIDTH + i - full_rows] = float(*x.at(i, k).data);
        }
    }
    // Packs x (WIDTH, depth), not transposed, into one micro-panel.
    template <int WIDTH, class floatX>
    static INLINE void pack_rows(float* panel, const Operand<floatX>& x, int depth) {
        int k = 0;
        for (; k + LANES <= depth; k += LANES) pack_transposed<WIDTH>(panel + k * WIDTH, x.data + k, x.ld);
        for (; k < depth; k++)
            for (int i = 0; i < WIDTH; i++) panel[k * WIDTH + i] = float(x.data[int64_t(i) * x.ld + k]);
    }
    // panel (LANES, WIDTH) = the transpose of x (WIDTH, LANES). Each call transposes LANES rows of x, from FIRST on, in
    // registers; recursion over FIRST covers the others.
    template <int WIDTH, int FIRST = 0, class floatX>
    static INLINE void pack_transposed(float* panel, const floatX* x, int64_t ld) {
        constexpr int count = std::min(LANES, WIDTH - FIRST);
        alignas(sizeof(vec)) vec rows[LANES];  // behind a reference clang forgets that a vec may lie anywhere
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) load(rows[i], x + (FIRST + std::min(i, count - 1)) * ld);
        swap_squares<1>(rows);
        swap_squares<2>(rows);
        if constexpr (LANES > 4) swap_squares<4>(rows);
        if constexpr (LANES > 8) swap_squares<8>(rows);
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++) store<count>(panel + k * WIDTH + FIRST, rows[k]);
        if constexpr (FIRST + LANES < WIDTH) pack_transposed<WIDTH, FIRST + LANES>(panel, x, ld);
    }
    template <class floatX>
    static INLINE void load(vec& v, const floatX* x) {
        alignas(sizeof(vec)) float widened[LANES];
        for (int i = 0; i < LANES; i++) widened[i] = float(x[i]);
        v = *reinterpret_cast<const vec*>(widened);
    }
    static INLINE void load(vec& v, const float* x) { v = *reinterpret_cast<const vec*>(x); }
    // Stores the first COUNT lanes by vector stores; memcpy would move them through integer registers.
    template <int COUNT>
    static INLINE void store(float* to, const vec& v) {
        store_lanes<0, COUNT>(to, v, std::make_integer_sequence<int, int(std::bit_floor(unsigned(COUNT)))>());
    }
    // Stores COUNT lanes from lane FROM on: the largest power of two of them at once, then the others by recursion.
    template <int FROM, int COUNT, int... I>
    static INLINE void store_lanes(float* to, const vec& v, std::integer_sequence<int, I...>) {
        constexpr int width = sizeof...(I), left = COUNT - width;
        *reinterpret_cast<typename VectorOf<width>::type*>(to) = __builtin_shufflevector(v, v, (FROM + I)...);
        if constexpr (left > 0)
            store_lanes<FROM + width, left>(to + width, v,
                                            std::make_integer_sequence<int, int(std::bit_floor(unsigned(left)))>());
    }
    // Copies COUNT elements. The local array is there because compilers copy one element at a time where they cannot
    // rule out that `to` and `from` overlap.
    template <int COUNT, class floatX>
    static INLINE void copy(float* to, const floatX* from) {
        float widened[COUNT];
        for (int i = 0; i < COUNT; i++) widened[i] = float(from[i]);
        for (int i = 0; i < COUNT; i++) to[i] = widened[i];
    }
    template <int COUNT>
    static INLINE void copy(float* to, const float* from) {
        constexpr int width = std::min(LANES, int(std::bit_floor(unsigned(COUNT))));
        using part = typename VectorOf<width>::type;
        *reinterpret_cast<part*>(to) = *reinterpret_cast<const part*>(from);
        if constexpr (COUNT > width) copy<COUNT - width>(to + width, from + width);
    }
    // One step of transposing a LANES x LANES matrix: swaps the off-diagonal SIZE x SIZE squares (Eklundh 1972).
    template <int SIZE>
    static INLINE void swap_squares(vec (&rows)[LANES]) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & SIZE)) swap_squares<SIZE>(rows[i], rows[i + SIZE], std::make_integer_sequence<int, LANES>());
    }
    template <int SIZE, int... I>
    static INLINE void swap_squares(vec& upper, vec& lower, std::integer_sequence<int, I...>) {
        const vec old_upper = upper;
        upper = __builtin_shufflevector(old_upper, lower, (I & SIZE ? LANES + I - SIZE : I)...);
        lower = __builtin_shufflevector(old_upper, lower, (I & SIZE ? LANES + I : I + SIZE)...);
    }

    // c (MR, NR) = a b, or += if accumulate, for one micro-panel of a and one of b with `depth` steps of k. The MR x NR
    // sums stay in registers. Each step broadcasts MR elements of a, which are in the first-level cache, and loads two
    // vectors of b, which are in the second.
    static INLINE void microkernel(float* c, int64_t ldc, const float* a, const float* b, int depth, bool accumulate) {
        constexpr int prefetch_distance = 16;  // steps of k
        alignas(sizeof(vec)) vec sums[MR][2] = {};
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++)
            for (int half = 0; half < 2; half++) __builtin_prefetch(c + i * ldc + half * LANES);
        for (int k = 0; k < depth; k++, a += MR, b += NR) {
            const vec b0 = *reinterpret_cast<const vec*>(b), b1 = *reinterpret_cast<const vec*>(b + LANES);
#pragma GCC unroll 2
            for (int i = 0; i < NR; i += CACHE_LINE / int(sizeof(float)))
                __builtin_prefetch(b + prefetch_distance * NR + i);
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const vec x = a[i] - vec{};  // a broadcast; + vec{} would be a real addition, because -0 + 0 is 0
                sums[i][0] += x * b0;
                sums[i][1] += x * b1;
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
            vec *out0 = reinterpret_cast<vec*>(c + i * ldc), *out1 = reinterpret_cast<vec*>(c + i * ldc + LANES);
            *out0 = accumulate ? *out0 + sums[i][0] : sums[i][0];
            *out1 = accumulate ? *out1 + sums[i][1] : sums[i][1];
        }
    }

    // Epilogue of matmul_forward: bias, residual and GELU for `count` elements of a row; all three may be null. sums
    // may be out itself: without `omp simd` the compilers' overlap test would then choose the scalar loop.
    template <class floatX>
    static INLINE void forward_epilogue(floatX* out, floatX* pre_gelu, const float* sums, const floatX* bias,
                                        const floatX* residual, int count) {
#pragma omp simd
        for (int i = 0; i < count; i++) {
            float x = bias ? sums[i] + float(bias[i]) : sums[i];
            if (residual) x += float(residual[i]);
            if (pre_gelu) pre_gelu[i] = floatX(x);
            out[i] = floatX(pre_gelu ? gelu(x) : x);
        }
    }
    // Epilogue of matmul_backward's input gradient: the GELU's derivative. pre_gelu may be null.
    template <class floatX>
    static INLINE void dinp_epilogue(floatX* dinp, const float* sums, const floatX* pre_gelu, int count) {
#pragma omp simd
        for (int i = 0; i < count; i++)
            dinp[i] = floatX(pre_gelu ? sums[i] * gelu_derivative(float(pre_gelu[i])) : sums[i]);
    }
    // sums (count) += x (count)
    template <class floatX>
    static INLINE void add(float* sums, const floatX* x, int count) {
        for (int i = 0; i < count; i++) sums[i] += float(x[i]);
    }
    // The dot product of x (count) and y (count), as 16 interleaved partial sums: vector code needs no reassociation.
    template <class floatX>
    static INLINE float dot(const floatX* x, const floatX* y, int count) {
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

// Defines struct `name`: KernelLoops<lanes, mr> compiled with the attribute `target`.
#define KERNELS_FOR(name, lanes, mr, target)                                                                      \
    struct name : KernelLoops<lanes, mr> {                                                                        \
        using Loops = KernelLoops<lanes, mr>;                                                                     \
        template <class floatX>                                                                                   \
        target static void pack_a(float* panels, const Operand<floatX>& a, int rows, int depth) {                 \
            Loops::template pack<Loops::MR>(panels, a, rows, depth);                                              \
        }                                                                                                         \
        template <class floatX>                                                                                   \
        target static void pack_b(float* panels, const Operand<floatX>& b, int columns, int depth) {              \
            Loops::template pack<Loops::NR>(panels, b.transpose(), columns, depth);                               \
        }                                                                                                         \
        target static void microkernel(float* c, int64_t ldc, const float* a, const float* b, int depth,          \
                                       bool accumulate) {                                                         \
            Loops::microkernel(c, ldc, a, b, depth, accumulate);                                                  \
        }                                                                                                         \
        template <class floatX>                                                                                   \
        target static void forward_epilogue(floatX* out, floatX* pre_gelu, const float* sums, const floatX* bias, \
                                            const floatX* residual, int count) {                                  \
            if (pre_gelu)                                                                                         \
                Loops::forward_epilogue(out, pre_gelu, sums, bias, static_cast<const floatX*>(nullptr), count);   \
            else                                                                                                  \
                Loops::forward_epilogue(out, static_cast<floatX*>(nullptr), sums, bias, residual, count);         \
        }                                                                                                         \
        template <class floatX>                                                                                   \
        target static void dinp_epilogue(floatX* dinp, const float* sums, const floatX* pre_gelu, int count) {    \
            Loops::dinp_epilogue(dinp, sums, pre_gelu, count);                                                    \
        }                                                                                                         \
        template <class floatX>                                                                                   \
        target static void add(float* sums, const floatX* x, int count) {                                         \
            Loops::add(sums, x, count);                                                                           \
        }                                                                                                         \
        template <class floatX>                                                                                   \
        target static float dot(const floatX* x, const floatX* y, int count) {                                    \
            return Loops::dot(x, y, count);                                                                       \
        }                                                                                                         \
    }
#if defined(__x86_64__)
KERNELS_FOR(Plain, 4, 6, );
KERNELS_FOR(Avx2, 8, 6, __attribute__((target("avx2,fma"))));
KERNELS_FOR(Avx512, 16, 14, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))));
#else
KERNELS_FOR(Plain, 4, 10, );  // arm64 has 32 registers; with 12 rows gcc 12 keeps some sums in memory
#endif
#undef KERNELS_FOR
#undef INLINE

}  // namespace cpu::fp32
