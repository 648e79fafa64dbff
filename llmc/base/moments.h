// moments.h: the 8-bit codes of the optimizer's moments (--moments 8bit; ops.inc describes them).
//
// A code is the upper bits of the float |x| + n, as in mu-law (ITU-T G.711), where n is 2^-7 of the block's power of
// two: relative steps for large values, and equal ones below n, for one addition more than the bits of x. The exponent
// is that of the largest |x| + n. A value between two codes becomes one of them by a random number, with a probability
// by its distance, so its expected value is exact: rounded to nearest, a mean that changes by less than half a step
// would stay as it is for ever. To encode what a block's codes say gives the same codes and exponent.
#pragma once
#include <cmath>

#include "base/dtype.h"

// A sign, 3 bits of exponent, 4 bits of mantissa.
struct SignedMoment {
    HOST_DEVICE INLINE static uint32_t below_code(uint32_t random) { return random >> 13; }
    HOST_DEVICE INLINE static uint32_t below_bf16(uint32_t random) { return random >> 16; }
    static constexpr int shift = 19;          // bits of a float's mantissa without those of a code
    static constexpr uint32_t largest = 127;  // code, without the sign
    static constexpr uint32_t least = 12;     // exponent of a block, so that all values are normal floats
};
// The root of the second moment: 3 bits of exponent, 5 bits of mantissa. It has at most 8 significant bits, so its
// square is exact in a float.
struct RootMoment {
    HOST_DEVICE INLINE static uint32_t below_code(uint32_t random) { return random & 0x3ffff; }
    HOST_DEVICE INLINE static uint32_t below_bf16(uint32_t random) { return random & 0xffff; }
    static constexpr int shift = 18;
    static constexpr uint32_t largest = 255, least = 76;  // the squares are normal floats, too
};

// The 32 random bits of element i of a block, from word i / 16 of Philox for the block's number: the upper ones round
// the first moment, the lower ones the second. One call of Philox serves 64 elements: with a call for 8, as for the
// weights, an update on a CPU takes twice as long. The bits are uniform, because each operation is a bijection.
HOST_DEVICE INLINE uint32_t moment_bits(uint32_t word, uint32_t i) {
    const uint32_t x = word + i * 0x9e3779b9u;
    return (x ^ x >> 16) * 0x7feb352du;
}

// The exponent of a block, by its largest magnitude. A block that was never written has 0, and codes of 0.
template <class Format>
HOST_DEVICE INLINE uint8_t block_exponent(float largest) {
    // n raises a magnitude from 1 - 2^-7 of a power of two on to it.
    const uint32_t exponent = (__builtin_bit_cast(uint32_t, largest) + (1u << 17)) >> 23;
    return uint8_t(exponent < Format::least ? Format::least : exponent < 254 ? exponent : 254);
}

// The bits of n.
template <class Format>
HOST_DEVICE INLINE uint32_t code_base(uint8_t exponent) {
    return (exponent > Format::least ? exponent - 7u : Format::least - 7u) << 23;
}

template <class Format>
HOST_DEVICE INLINE float moment_value(uint8_t code, uint8_t exponent) {
    const uint32_t magnitude = code & Format::largest, sign = uint32_t(code & ~Format::largest & 0xff) << 24;
    const uint32_t base = code_base<Format>(exponent), sum = (magnitude << Format::shift) + base;
    const float value = __builtin_bit_cast(float, sum) - __builtin_bit_cast(float, base);
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | sign);
}

// random: what is added to the bits below the code's, all of which it may set. A second moment that is not zero does
// not become zero, whatever the others in its block: the update would divide a first moment by epsilon alone.
template <class Format>
HOST_DEVICE INLINE uint8_t moment_code(float x, uint8_t exponent, uint32_t random) {
    constexpr bool has_sign = Format::largest < 128;
    const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffff;
    const uint32_t base = code_base<Format>(exponent);
    const float sum = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, base);
    const int rounded = int(__builtin_bit_cast(uint32_t, sum) + random - base) >> Format::shift;
    const int least = has_sign || magnitude == 0 ? 0 : 1;
    const int code = rounded < least ? least : rounded < int(Format::largest) ? rounded : int(Format::largest);
    return uint8_t(code | (has_sign ? bits >> 24 & 0x80 : 0));
}

// With this in place of random bits moment_code rounds to nearest.
template <class Format>
constexpr uint32_t TO_NEAREST = 1u << (Format::shift - 1);

// Calls run with the format of the first moment's codes, or of the second one's.
template <class Run>
void with_format(bool is_first, const Run& run) {
    is_first ? run(SignedMoment()) : run(RootMoment());
}

// Makes the codes of a block of `count` moments, by random bits, or to nearest without them. Returns its exponent.
template <class Format>
uint8_t encode_block(uint8_t* codes, const float* moments, int64_t count, const uint32_t* bits) {
    const auto stored = [&](int64_t i) { return Format::largest < 128 ? moments[i] : std::sqrt(moments[i]); };
    float largest = 0.0f;
    for (int64_t i = 0; i < count; i++) largest = std::fmax(largest, std::fabs(stored(i)));
    const uint8_t exponent = block_exponent<Format>(largest);
    for (int64_t i = 0; i < count; i++)
        codes[i] = moment_code<Format>(stored(i), exponent, bits ? Format::below_code(bits[i]) : TO_NEAREST<Format>);
    return exponent;
}

template <class Format>
void decode_block(float* moments, const uint8_t* codes, int64_t count, uint8_t exponent) {
    for (int64_t i = 0; i < count; i++) {
        const float x = moment_value<Format>(codes[i], exponent);
        moments[i] = Format::largest < 128 ? x : x * x;
    }
}
