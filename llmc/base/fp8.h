// fp8.h: the two 8-bit floating-point formats of --precision fp8 (Micikevicius et al. 2022), and the scale of a tensor.
//
// E4M3 is for activations and weights. It has no infinities; NaN has all bits of exponent and mantissa set. E5M2 is for
// gradients; it is laid out like an IEEE type, with infinities and NaNs.
#pragma once
#include "base/dtype.h"

struct E4M3 {
    static constexpr int mantissa = 3, bias = 7;  // bits of the mantissa, bias of the exponent
    static constexpr uint32_t max_code = 0x7e, first_nan = 0x7f;
    static constexpr int max_exponent = 8;  // the largest value is 1.75 * 2^max_exponent
    static constexpr float max = 448.0f;
};
struct E5M2 {
    static constexpr int mantissa = 2, bias = 15;
    static constexpr uint32_t max_code = 0x7b, first_nan = 0x7d;
    static constexpr int max_exponent = 15;
    static constexpr float max = 57344.0f;
};

// The code of the nearest value, ties to even. Larger magnitudes, infinity too, become the largest value, as with
// cvt.satfinite on a GPU. NaN stays NaN.
template <class Format>
HOST_DEVICE INLINE uint8_t fp8_code(float x) {
    constexpr int shift = 23 - Format::mantissa;
    // A float of this size has the distance to the next float that FP8's subnormal values have, so adding it to a
    // number rounds the number to a multiple of that distance.
    constexpr uint32_t to_steps = uint32_t(127 + 24 - Format::bias - Format::mantissa) << 23;
    const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffff;
    const float sum = __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, to_steps);
    const uint32_t subnormal = __builtin_bit_cast(uint32_t, sum) - to_steps;
    const uint32_t rounded = (magnitude + (1u << (shift - 1)) - 1 + (magnitude >> shift & 1)) >> shift;
    const uint32_t normal = rounded - (uint32_t(127 - Format::bias) << Format::mantissa);
    const bool is_normal = magnitude >= uint32_t(128 - Format::bias) << 23;
    const uint32_t code = is_normal ? normal : subnormal;
    const uint32_t finite = code < Format::max_code ? code : Format::max_code;
    return uint8_t((magnitude > 0x7f800000 ? 0x7f : finite) | (bits >> 24 & 0x80));
}

template <class Format>
HOST_DEVICE INLINE float fp8_value(uint8_t code) {
    constexpr int shift = 23 - Format::mantissa;
    constexpr uint32_t step = uint32_t(128 - Format::bias - Format::mantissa) << 23;  // spacing of the smallest values
    const uint32_t magnitude = code & 0x7f;
    const float subnormal = float(int(magnitude)) * __builtin_bit_cast(float, step);
    const uint32_t normal = (magnitude << shift) + (uint32_t(127 - Format::bias) << 23);
    const bool is_normal = magnitude >= 1u << Format::mantissa;
    const uint32_t finite = is_normal ? normal : __builtin_bit_cast(uint32_t, subnormal);
    const uint32_t special = magnitude < Format::first_nan ? 0x7f800000 : 0x7fc00000;
    const uint32_t bits = magnitude > Format::max_code ? special : finite;
    return __builtin_bit_cast(float, bits | uint32_t(code & 0x80) << 24);
}

// An element x is stored as fp8_code(scale * x) and read as fp8_value(code) * inverse. Both factors are powers of two,
// so scaling does not round, and the value that is read is exact in bf16 (up to 2^127).
struct Fp8Scale {
    float scale, inverse;
};

// The largest scale with which a tensor fits into the format, if its largest magnitude is amax; 1 if amax is zero. If
// amax is not finite, both factors are NaN, so every element becomes NaN; saturation would hide the error. The scale is
// at most 2^110, so that every value that is read is zero or normal in bf16: matrix units treat subnormal numbers as 0.
template <class Format>
HOST_DEVICE INLINE Fp8Scale fp8_scale(float amax) {
    constexpr int max_scale = 110;
    constexpr uint32_t nan = 0x7fc00000;
    const uint32_t bits = __builtin_bit_cast(uint32_t, amax);
    if (bits >= 0x7f800000) return {__builtin_bit_cast(float, nan), __builtin_bit_cast(float, nan)};
    if (bits == 0) return {1.0f, 1.0f};
    const int exponent = Format::max_exponent + 127 - int(bits >> 23) - ((bits & 0x7fffff) > 0x600000);
    const int n = exponent < max_scale ? exponent : max_scale;
    return {__builtin_bit_cast(float, uint32_t(127 + n) << 23), __builtin_bit_cast(float, uint32_t(127 - n) << 23)};
}
