// strips.h: the loops of the fp32 products, written once and compiled for each instruction set: packing of operands
// into strips, the innermost product, and what is done to rows of its result.
//
// A strip of an operand is so many of its rows (of a) or columns (of b) that their products fill the registers; its
// elements lie one step of the inner dimension after the other.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/dtype.h"

namespace cpu::strips {

constexpr int LINE = 64;    // bytes of a line of the caches
constexpr int DEPTH = 384;  // steps of the inner dimension at a time: a strip of a takes half of a first-level cache

#define INLINE inline __attribute__((always_inline))

// A matrix as the products read it. transposed: stored (columns, rows).
template <class floatX>
struct Operand {
    const floatX* data;
    bool transposed;
    int ld;

    Operand from(int row, int column) const {
        return {transposed ? data + int64_t(column) * ld + row : data + int64_t(row) * ld + column, transposed, ld};
    }
    Operand other_way() const { return {data, !transposed, ld}; }
};

// exp for the GELU, written so that compilers turn loops over it into vector code: 2^n times a polynomial on
// [-ln 2 / 2, ln 2 / 2]; relative error 1e-7. NaN stays NaN.
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

// The tanh-GELU is x times a logistic function: 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)).
INLINE float gelu(float x) { return x / (1.0f + exp_inline(-1.5957691216f * (x + 0.044715f * x * x * x))); }

INLINE float gelu_derivative(float x) {
    const float s = 1.0f / (1.0f + exp_inline(-1.5957691216f * (x + 0.044715f * x * x * x)));
    const float bend = s * (1.0f - s), slope = 1.5957691216f * x * (1.0f + 3 * 0.044715f * x * x);
    return bend == 0.0f ? s : s + bend * slope;  // slope may overflow
}

template <int LANES>
struct VectorOf;  // of so many floats, anywhere in memory
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

// A strip is ROWS rows of a, or two vectors of LANES columns of b.
template <int LANES, int ROWS>
struct Bodies {
    static constexpr int rows = ROWS, columns = 2 * LANES;
    using vec = typename VectorOf<LANES>::type;

    // The first `count` rows of x over `depth` columns as strips of WIDTH rows, the last one filled up with zeros. It
    // reads along what is contiguous. Of a transposed x that is a piece of each stored row: too short for the hardware
    // to see that the next one follows, so it is fetched by hand.
    template <int WIDTH, class floatX>
    static INLINE void pack(float* strips, const Operand<floatX>& x, int count, int depth) {
        const int whole = count / WIDTH * WIDTH;
        if (x.transposed)
            for (int k = 0; k < depth; k++) {
                constexpr int ahead = 16;  // stored rows
                const floatX *row = x.from(0, k).data, *later = x.from(0, std::min(k + ahead, depth - 1)).data;
                for (int i = 0; i < whole; i += LINE / int(sizeof(floatX))) __builtin_prefetch(later + i, 0, 2);
                for (int i = 0; i < whole; i += WIDTH) copy<WIDTH>(strips + int64_t(i) * depth + k * WIDTH, row + i);
            }
        else
            for (int i = 0; i < whole; i += WIDTH) pack_rows<WIDTH>(strips + int64_t(i) * depth, x.from(i, 0), depth);
        if (whole < count) {
            float* last = strips + int64_t(whole) * depth;
            std::fill(last, last + WIDTH * depth, 0.0f);
            for (int i = whole; i < count; i++)
                for (int k = 0; k < depth; k++) last[k * WIDTH + i - whole] = float(*x.from(i, k).data);
        }
    }
    template <int WIDTH, class floatX>
    static INLINE void pack_rows(float* strip, const Operand<floatX>& x, int depth) {
        int k = 0;
        for (; k + LANES <= depth; k += LANES) pack_squares<WIDTH>(strip + k * WIDTH, x.data + k, x.ld);
        for (; k < depth; k++)
            for (int i = 0; i < WIDTH; i++) strip[k * WIDTH + i] = float(x.data[int64_t(i) * x.ld + k]);
    }
    // LANES columns of a strip, transposed in registers, a vector of its rows at a time.
    template <int WIDTH, int FIRST = 0, class floatX>
    static INLINE void pack_squares(float* strip, const floatX* x, int64_t ld) {
        constexpr int count = std::min(LANES, WIDTH - FIRST);
        vec rows[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) load(rows[i], x + (FIRST + std::min(i, count - 1)) * ld);
        exchange<1>(rows);
        exchange<2>(rows);
        if constexpr (LANES > 4) exchange<4>(rows);
        if constexpr (LANES > 8) exchange<8>(rows);
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++) store<count>(strip + k * WIDTH + FIRST, rows[k]);
        if constexpr (FIRST + LANES < WIDTH) pack_squares<WIDTH, FIRST + LANES>(strip, x, ld);
    }
    template <class floatX>
    static INLINE void load(vec& v, const floatX* x) {
        float widened[LANES];
        for (int i = 0; i < LANES; i++) widened[i] = float(x[i]);
        v = *reinterpret_cast<const vec*>(widened);
    }
    static INLINE void load(vec& v, const float* x) { v = *reinterpret_cast<const vec*>(x); }
    // The first COUNT lanes in vectors, where memcpy would take them through integer registers.
    template <int COUNT>
    static INLINE void store(float* to, const vec& v) {
        store_part<0, COUNT>(to, v, std::make_integer_sequence<int, int(std::bit_floor(unsigned(COUNT)))>());
    }
    template <int FROM, int COUNT, int... I>
    static INLINE void store_part(float* to, const vec& v, std::integer_sequence<int, I...>) {
        constexpr int width = sizeof...(I), left = COUNT - width;
        *reinterpret_cast<typename VectorOf<width>::type*>(to) = __builtin_shufflevector(v, v, (FROM + I)...);
        if constexpr (left > 0)
            store_part<FROM + width, left>(to + width, v,
                                           std::make_integer_sequence<int, int(std::bit_floor(unsigned(left)))>());
    }
    // COUNT elements, which the compilers would take one at a time: for all that they know, the two overlap.
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
    // A step of a transposition: the squares of SIZE beside the diagonal change places (Eklundh 1972).
    template <int SIZE>
    static INLINE void exchange(vec (&rows)[LANES]) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & SIZE)) exchange<SIZE>(rows[i], rows[i + SIZE], std::make_integer_sequence<int, LANES>());
    }
    template <int SIZE, int... I>
    static INLINE void exchange(vec& upper, vec& lower, std::integer_sequence<int, I...>) {
        const vec above = upper;
        upper = __builtin_shufflevector(above, lower, (I & SIZE ? LANES + I - SIZE : I)...);
        lower = __builtin_shufflevector(above, lower, (I & SIZE ? LANES + I : I + SIZE)...);
    }

    // c (rows, columns) = or += a strip of a times a strip of b. The sums stay in registers; each step broadcasts ROWS
    // elements of a from the first-level cache, and loads two vectors of b, which come from the second.
    static INLINE void multiply(float* c, int64_t ldc, const float* a, const float* b, int depth, bool add) {
        constexpr int ahead = 16;  // steps
        vec sums[ROWS][2] = {};
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
            for (int half = 0; half < 2; half++) __builtin_prefetch(c + i * ldc + half * LANES);
        for (int k = 0; k < depth; k++, a += ROWS, b += 2 * LANES) {
            const vec b0 = *reinterpret_cast<const vec*>(b), b1 = *reinterpret_cast<const vec*>(b + LANES);
#pragma GCC unroll 2
            for (int i = 0; i < 2 * LANES; i += LINE / int(sizeof(float)))
                __builtin_prefetch(b + ahead * 2 * LANES + i);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                const vec x = a[i] - vec{};  // not x + 0, which would be an addition: -0 + 0 is 0
                sums[i][0] += x * b0;
                sums[i][1] += x * b1;
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            vec *out0 = reinterpret_cast<vec*>(c + i * ldc), *out1 = reinterpret_cast<vec*>(c + i * ldc + LANES);
            *out0 = add ? *out0 + sums[i][0] : sums[i][0];
            *out1 = add ? *out1 + sums[i][1] : sums[i][1];
        }
    }

    // The rows of a result. simd: sums may be out itself, and compilers would take the scalar loop where they find the
    // two to overlap.
    template <class floatX>
    static INLINE void finish(floatX* out, floatX* pre_gelu, const float* sums, const floatX* bias, int count) {
#pragma omp simd
        for (int i = 0; i < count; i++) {
            const float x = bias ? sums[i] + float(bias[i]) : sums[i];
            if (pre_gelu) pre_gelu[i] = floatX(x);
            out[i] = floatX(pre_gelu ? gelu(x) : x);
        }
    }
    template <class floatX>
    static INLINE void finish_gradient(floatX* dinp, const float* sums, const floatX* pre_gelu, int count) {
#pragma omp simd
        for (int i = 0; i < count; i++)
            dinp[i] = floatX(pre_gelu ? sums[i] * gelu_derivative(float(pre_gelu[i])) : sums[i]);
    }
    template <class floatX>
    static INLINE void add(float* sums, const floatX* x, int count) {
        for (int i = 0; i < count; i++) sums[i] += float(x[i]);
    }
    // In 16 interleaved partial sums, so that it can be vector code without reassociation.
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

// Bodies compiled for an instruction set.
#define STRIPS_OF(name, lanes, rows_of_a, target)                                                                    \
    struct name : Bodies<lanes, rows_of_a> {                                                                         \
        using Body = Bodies<lanes, rows_of_a>;                                                                       \
        template <class floatX>                                                                                      \
        target static void pack_a(float* strip, const Operand<floatX>& x, int count, int depth) {                    \
            Body::template pack<Body::rows>(strip, x, count, depth);                                                 \
        }                                                                                                            \
        template <class floatX>                                                                                      \
        target static void pack_b(float* strip, const Operand<floatX>& x, int count, int depth) {                    \
            Body::template pack<Body::columns>(strip, x.other_way(), count, depth);                                  \
        }                                                                                                            \
        target static void multiply(float* c, int64_t ldc, const float* a, const float* b, int depth, bool add) {    \
            Body::multiply(c, ldc, a, b, depth, add);                                                                \
        }                                                                                                            \
        template <class floatX>                                                                                      \
        target static void finish(floatX* out, floatX* pre_gelu, const float* sums, const floatX* bias, int count) { \
            if (pre_gelu)                                                                                            \
                Body::finish(out, pre_gelu, sums, bias, count);                                                      \
            else                                                                                                     \
                Body::finish(out, static_cast<floatX*>(nullptr), sums, bias, count);                                 \
        }                                                                                                            \
        template <class floatX>                                                                                      \
        target static void finish_gradient(floatX* dinp, const float* sums, const floatX* pre_gelu, int count) {     \
            Body::finish_gradient(dinp, sums, pre_gelu, count);                                                      \
        }                                                                                                            \
        template <class floatX>                                                                                      \
        target static void add(float* sums, const floatX* x, int count) {                                            \
            Body::add(sums, x, count);                                                                               \
        }                                                                                                            \
        template <class floatX>                                                                                      \
        target static float dot(const floatX* x, const floatX* y, int count) {                                       \
            return Body::dot(x, y, count);                                                                           \
        }                                                                                                            \
    }
#if defined(__x86_64__)
STRIPS_OF(Plain, 4, 6, );
STRIPS_OF(Avx2, 8, 6, __attribute__((target("avx2,fma"))));
STRIPS_OF(Avx512, 16, 14, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))));
#else
STRIPS_OF(Plain, 4, 10, );  // arm64 has 32 registers; with 12 rows gcc 12 keeps some sums in memory
#endif
#undef STRIPS_OF
#undef INLINE

}  // namespace cpu::strips
