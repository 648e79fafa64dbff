// moments.h: the 8-bit codes of the optimizer's moments (--moments 8bit; ops.inc describes them).
//
// A block's exponent is that of its largest magnitude. The largest code is one step below the next power of two, and
// the codes reach 16 powers of two down. A value between two codes becomes one of them by a random number, with a
// probability by its distance, so its expected value is exact: rounded to nearest, a mean that changes by less than
// half a step would stay as it is for ever. To encode what a block's codes say gives the same codes and exponent.
#pragma once
#include "base/dtype.h"

// A sign, 4 bits of exponent, 3 bits of mantissa.
struct SignedMoment {
    HOST_DEVICE INLINE static uint32_t below_code(uint32_t random) { return random >> 12; }
    HOST_DEVICE INLINE static uint32_t below_bf16(uint32_t random) { return random >> 16; }
    static constexpr int shift = 20;          // bits of a float's mantissa without those of a code
    static constexpr uint32_t largest = 127;  // code, without the sign
    static constexpr uint32_t least = 16;     // exponent of a block, so that all values are normal floats
};
// The root of the second moment: 4 bits of exponent, 4 bits of mantissa. Its square has at most 10 bits, so it is
// exact in a float.
struct RootMoment {
    HOST_DEVICE INLINE static uint32_t below_code(uint32_t random) { return random & 0x7ffff; }
    HOST_DEVICE INLINE static uint32_t below_bf16(uint32_t random) { return random & 0xffff; }
    static constexpr int shift = 19;
    static constexpr uint32_t largest = 255, least = 79;  // the squares are normal floats, too
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
    const uint32_t exponent = __builtin_bit_cast(uint32_t, largest) >> 23;
    return uint8_t(exponent > Format::least ? exponent : Format::least);
}

// Bits of the float that the code 0 would have, if it were not zero.
template <class Format>
HOST_DEVICE INLINE uint32_t code_base(uint8_t exponent) {
    return (exponent > Format::least ? exponent - 15u : Format::least - 15u) << 23;
}

template <class Format>
HOST_DEVICE INLINE float moment_value(uint8_t code, uint8_t exponent) {
    const uint32_t magnitude = code & Format::largest, sign = uint32_t(code & ~Format::largest & 0xff) << 24;
    const uint32_t bits = (magnitude << Format::shift) + code_base<Format>(exponent);
    return __builtin_bit_cast(float, (magnitude ? bits : 0) | sign);
}

// random: what is added to the bits below the code's, all of which it may set. A second moment that is not zero does
// not become zero, whatever the others in its block: the update would divide a first moment by epsilon alone.
template <class Format>
HOST_DEVICE INLINE uint8_t moment_code(float x, uint8_t exponent, uint32_t random) {
    constexpr bool has_sign = Format::largest < 128;
    const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffff;
    const int rounded = int(magnitude + random - code_base<Format>(exponent)) >> Format::shift;
    const int least = has_sign || magnitude == 0 ? 0 : 1;
    const int code = rounded < least ? least : rounded < int(Format::largest) ? rounded : int(Format::largest);
    return uint8_t(code | (has_sign ? bits >> 24 & 0x80 : 0));
}

// With this in place of random bits moment_code rounds to nearest.
template <class Format>
constexpr uint32_t TO_NEAREST = 1u << (Format::shift - 1);
