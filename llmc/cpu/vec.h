// vec.h: arithmetic on a vector register of VL floats by GNU vector extensions, the same source for every instruction
// set. Loads widen bf16 to float, and stores round float to bf16.
//
// The translation units that include it are each compiled for one instruction set. Everything is in a nameless
// namespace: of an inline function with external linkage the linker keeps one copy for the whole program, perhaps one
// with AVX-512 instructions. For the same reason this file includes few others.
#pragma once
#include <cstdint>
#include <utility>

#include "base/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>  // for operations that the GNU extensions lack
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cpu {
namespace {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float floatv __attribute__((vector_size(4 * VL)));
typedef uint32_t uintv __attribute__((vector_size(4 * VL)));
typedef int32_t intv __attribute__((vector_size(4 * VL)));
typedef uint64_t longv __attribute__((vector_size(4 * VL)));  // VL / 2 lanes
typedef uint16_t shortv __attribute__((vector_size(2 * VL)));
typedef uint8_t bytev __attribute__((vector_size(VL)));
typedef uint8_t bytesv __attribute__((vector_size(4 * VL)));  // 4 VL lanes

// The same vectors at any address, aliasing any type.
typedef float floatv_memory __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t shortv_memory __attribute__((vector_size(2 * VL), aligned(2), may_alias));

// The lanes that a load or store touches: all of them, or the first `lanes`. A partial load sets the others to 0.
struct Full {
    static constexpr int lanes = VL;
};
struct Partial {
    int lanes;
};

// Calls body(index, width) for every VL of count elements; width is Full, or Partial for the last ones.
template <class Body>
INLINE void for_vectors(int64_t count, Body body) {
    int64_t i = 0;
    for (; i + VL <= count; i += VL) body(i, Full{});
    if (i < count) body(i, Partial{int(count - i)});
}

INLINE floatv broadcast(float x) { return x - floatv{}; }  // not x + 0, which is a real addition: -0 + 0 is 0

// Conversions between 16 and 32 bits. __builtin_convertvector is several instructions with gcc 12, on arm64 four loads.
INLINE uintv to_uint(shortv x) {
#if defined(__AVX512F__)
    return (uintv)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
#elif defined(__AVX2__)
    return (uintv)_mm256_cvtepu16_epi32((__m128i)x);
#elif defined(__aarch64__)
    return (uintv)vmovl_u16((uint16x4_t)x);
#else
    return __builtin_convertvector(x, uintv);
#endif
}
INLINE shortv to_short(uintv x) {
#if defined(__AVX512F__)
    return (shortv)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x);
#else
    return __builtin_convertvector(x, shortv);
#endif
}

INLINE floatv widen(shortv x) {
#if defined(__aarch64__)
    return (floatv)vshll_n_u16((uint16x4_t)x, 16);
#else
    return (floatv)(to_uint(x) << 16);
#endif
}

// Cuts off the lower 16 bits, after `below` is added to them. A NaN stays a quiet NaN.
INLINE shortv cut_to_bf16(floatv x, uintv below) {
    const uintv u = (uintv)x;
    return to_short((x == x ? u + below : u | 0x400000) >> 16);
}
INLINE uintv half_to_even(floatv x) { return ((uintv)x >> 16 & 1) + 0x7fff; }
// Rounds to nearest, ties to even.
INLINE shortv round_to_bf16(floatv x) { return cut_to_bf16(x, half_to_even(x)); }

INLINE floatv load(const float* p, Full = {}) { return *reinterpret_cast<const floatv_memory*>(p); }
INLINE floatv load(const bf16* p, Full = {}) { return widen(*reinterpret_cast<const shortv_memory*>(p)); }
INLINE void store(float* p, floatv x, Full = {}) { *reinterpret_cast<floatv_memory*>(p) = x; }

// Stores lanes of 16 bits.
INLINE void store(bf16* p, shortv x, Full = {}) { *reinterpret_cast<shortv_memory*>(p) = x; }
INLINE void store(bf16* p, shortv x, Partial partial) { __builtin_memcpy(p, &x, partial.lanes * sizeof(bf16)); }

INLINE void store(bf16* p, floatv x, auto width) { store(p, round_to_bf16(x), width); }
INLINE void store(bf16* p, floatv x) { store(p, x, Full{}); }

// Stores lanes rounded stochastically with 16 random bits each, the same as round_randomly of random.h.
template <class Width = Full>
INLINE void store_stochastic(bf16* p, floatv x, uintv random, Width width = {}) {
    store(p, cut_to_bf16(x, ((uintv)x & 0x7fffffff) >= 0x7f7f0000 ? half_to_even(x) : random), width);
}

INLINE uintv load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (uintv)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p)));
#elif defined(__AVX2__)
    return (uintv)_mm256_cvtepu8_epi32(_mm_loadu_si64(p));
#else
    bytev x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, uintv);
#endif
}
// The lanes of four vectors as bytes, in order. Byte is int8_t or uint8_t; values outside of its range become its end.
template <class Byte, int... L>
INLINE bytesv to_bytes(const intv (&x)[4], std::integer_sequence<int, L...>) {
    constexpr bool is_signed = Byte(-1) < 0;
#if defined(__x86_64__)
#if defined(__AVX512BW__)
    const auto low = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]);
    const auto high = _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]);
    const auto packed = (intv)(is_signed ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high));
#elif defined(__AVX2__)
    const auto low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    const auto high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const auto packed = (intv)(is_signed ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high));
#else
    const auto low = _mm_packs_epi32((__m128i)x[0], (__m128i)x[1]);
    const auto high = _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]);
    const auto packed = (intv)(is_signed ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high));
#endif
    // Each part of 128 bits has 4 lanes of every vector.
    return (bytesv)__builtin_shufflevector(packed, packed, (L % (VL / 4) * 4 + L / (VL / 4))...);
#else
    constexpr int least = is_signed ? -128 : 0, most = least + 255;
    bytesv bytes;
    for (int i = 0; i < 4 * VL; i++) {
        const int lane = x[i / VL][i % VL];
        bytes[i] = uint8_t(lane < least ? least : lane > most ? most : lane);
    }
    return bytes;
#endif
}
template <class Byte>
INLINE bytesv to_bytes(const intv (&x)[4]) {
    return to_bytes<Byte>(x, std::make_integer_sequence<int, VL>());
}

INLINE floatv load(const float* p, Partial partial) {
    floatv x = {};
    __builtin_memcpy(&x, p, partial.lanes * sizeof(float));
    return x;
}
INLINE floatv load(const bf16* p, Partial partial) {
    shortv x = {};
    __builtin_memcpy(&x, p, partial.lanes * sizeof(bf16));
    return widen(x);
}
INLINE void store(float* p, floatv x, Partial partial) { __builtin_memcpy(p, &x, partial.lanes * sizeof(float)); }

// x in the lanes that width touches, `other` in the rest.
INLINE floatv mask_lanes(floatv x, float, Full) { return x; }
INLINE floatv mask_lanes(floatv x, float other, Partial partial) {
    for (int i = partial.lanes; i < VL; i++) x[i] = other;
    return x;
}

// a * b + c, rounded once where the instruction set can. Compilers fuse nothing by themselves (-ffp-contract=off), as
// each would choose others.
INLINE floatv multiply_add(floatv a, floatv b, floatv c) {
#if defined(__AVX512F__)
    return (floatv)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (floatv)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floatv)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE floatv max(floatv a, floatv b) { return a > b ? a : b; }  // b where either is NaN

// 0 where x < limit, else value. On arm64 gcc 12 compiles ?: to x >= limit and two tests for NaN, hence the intrinsics.
INLINE floatv zero_below(floatv x, float limit, floatv value) {
#if defined(__aarch64__)
    return (floatv)vbicq_u32((uint32x4_t)value, vcltq_f32((float32x4_t)x, vdupq_n_f32(limit)));
#else
    return x < limit ? floatv{} : value;
#endif
}

INLINE intv max(intv a, intv b) { return a > b ? a : b; }
INLINE bytesv max(bytesv a, bytesv b) { return a > b ? a : b; }

// The lanes combined by op, as a binary tree.
template <int HALF = VL / 2, class V, class Op, int... L>
INLINE auto reduce(V x, const Op& op, std::integer_sequence<int, L...> lanes) {
    const V pairs = op(x, __builtin_shufflevector(x, x, (L ^ HALF)...));
    if constexpr (HALF > 1)
        return reduce<HALF / 2>(pairs, op, lanes);
    else
        return pairs[0];
}
template <class V>
INLINE auto reduce_max(V x) {
    return reduce(
        x, [](V a, V b) { return max(a, b); }, std::make_integer_sequence<int, VL>());
}
INLINE float reduce_sum(floatv x) {
    return reduce(
        x, [](floatv a, floatv b) { return a + b; }, std::make_integer_sequence<int, VL>());
}

INLINE floatv square_root(floatv x) {
#pragma omp simd
    for (int i = 0; i < VL; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

// e^x with a relative error of 1e-7; 0 below -87.3, infinity above 88.3, NaN for NaN. x = n ln 2 + f with |f| <= ln 2 /
// 2, and e^f = 1 + f + f^2 q(f), with q fitted to the smallest relative error (3e-9). Adding 1.5 * 2^23 rounds x / ln 2
// to n, and leaves n in the low bits of the sum. n ln 2 is subtracted in two parts; the first part of ln 2 has so few
// digits that its product with n is exact.
INLINE floatv exp(floatv x) {
    const floatv rounder = broadcast(0x1.8p23f);
    const floatv shifted = multiply_add(x, broadcast(1.44269504f), rounder), n = shifted - rounder;
    const floatv f = multiply_add(n, broadcast(2.1219444e-4f), multiply_add(n, broadcast(-0.693359375f), x));
    floatv q = multiply_add(f, broadcast(1.3814466e-3f), broadcast(8.368781e-3f));
    q = multiply_add(q, f, broadcast(4.1668393e-2f));
    q = multiply_add(q, f, broadcast(1.666652e-1f));
    q = multiply_add(q, f, broadcast(4.9999994e-1f));
    const floatv power = (floatv)(((uintv)shifted << 23) + 0x3f800000);  // 2^n
    const floatv value = (multiply_add(q, f * f, f) + 1.0f) * power;
    const floatv bounded = x > 88.3f ? broadcast(__builtin_inff()) : value;
    return zero_below(x, -87.3f, bounded);
}

// tanh-GELU as x s, where s = 1 / (1 + exp(-2u)) is the logistic function of 2u and u = sqrt(2/pi) (x + 0.044715 x^3).
// s is (1 + tanh u) / 2 without its cancellation for negative u.
constexpr float gelu_slope = 1.5957691216f, gelu_cubic = 0.044715f;  // 2 sqrt(2/pi)

INLINE floatv logistic_2u(floatv x) {
    return 1.0f / (1.0f + exp(-gelu_slope * x * multiply_add(gelu_cubic * x, x, broadcast(1.0f))));
}
INLINE floatv gelu(floatv x) { return x * logistic_2u(x); }

// d gelu / dx = s + s (1 - s) x 2u'. Beyond |x| = 12, s is below 1e-38 or 1, and x^3 may overflow: x is clamped there.
INLINE floatv gelu_derivative(floatv x) {
    x = x > 12.0f ? broadcast(12.0f) : x;
    x = x < -12.0f ? broadcast(-12.0f) : x;
    const floatv s = logistic_2u(x), slope = multiply_add(3 * gelu_cubic * x, x, broadcast(1.0f));
    return multiply_add(s * (1.0f - s), gelu_slope * x * slope, s);
}

// One step of a transposition, for rows a = x[i] and b = x[i + HALF]: swaps the lanes of a whose number has the bit
// HALF with the lanes of b whose number lacks it.
template <int HALF, class V, int... L>
INLINE void swap_lanes(V& a, V& b, std::integer_sequence<int, L...>) {
    constexpr int lanes = sizeof...(L);
    const V new_a = __builtin_shufflevector(a, b, (L & HALF ? L - HALF + lanes : L)...);
    const V new_b = __builtin_shufflevector(a, b, (L & HALF ? L + lanes : L + HALF)...);
    a = new_a;
    b = new_b;
}

// x[i][j] = x[j][i]. With the largest HALF first the fp32 matmul is 2 % slower on AVX-512.
template <int HALF = 1>
INLINE void transpose(floatv (&x)[VL]) {
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++)
        if (!(i & HALF)) swap_lanes<HALF>(x[i], x[i + HALF], std::make_integer_sequence<int, VL>{});
    if constexpr (2 * HALF < VL) transpose<2 * HALF>(x);
}

// The products of the lanes' lower halves with y.
INLINE longv multiply_low(longv x, uint32_t y) {
#if defined(__AVX512F__)
    return (longv)_mm512_maskz_mul_epu32(0xff, (__m512i)x, _mm512_set1_epi64(y));
#elif defined(__AVX2__)
    return (longv)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(y));
#elif defined(__x86_64__)
    return (longv)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(y));
#elif defined(__aarch64__)
    return (longv)vmull_n_u32(vmovn_u64((uint64x2_t)x), y);
#else
    return (x & 0xffffffff) * y;
#endif
}

// words (VL, 4) = those of VL indices from `first` on by Philox{seed, stream} of random.h, which are the bits16 of 8 VL
// consecutive elements. A lane has an index, and its words are the lanes' lower halves: what is above them is ignored.
INLINE void random_words(uint32_t (*words)[4], uint64_t seed, uint64_t stream, uint64_t first) {
    constexpr int lanes = VL / 2;
    for (int begin = 0; begin < VL; begin += lanes) {
        longv index;  // the even lanes, then the odd ones, so that they are in order after swap_lanes
        for (int i = 0; i < lanes; i++) index[i] = uint64_t(i % 2 * (lanes / 2) + i / 2);
        index += first + uint64_t(begin);
        longv x[4] = {index, index >> 32, longv{} + stream, longv{} + (stream >> 32)};
        uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            const longv p0 = multiply_low(x[0], 0xD2511F53), p2 = multiply_low(x[2], 0xCD9E8D57);
            x[0] = p2 >> 32 ^ x[1] ^ key[0], x[1] = p2;
            x[2] = p0 >> 32 ^ x[3] ^ key[1], x[3] = p0;
            key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
        }
        longv low = (x[0] & 0xffffffff) | x[1] << 32, high = (x[2] & 0xffffffff) | x[3] << 32;
        swap_lanes<1>(low, high, std::make_integer_sequence<int, lanes>{});
        __builtin_memcpy(words + begin, &low, sizeof low);
        __builtin_memcpy(words + begin + lanes / 2, &high, sizeof high);
    }
}

}  // namespace
}  // namespace cpu
