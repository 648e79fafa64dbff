// test_fp8.cpp: the FP8 formats and scales of base/fp8.h against their definitions, for every code and for every bf16
// number.
#include "base/fp8.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/common.h"

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// The value of a code by the definition of the format: sign, exponent and mantissa, in double.
template <class Format>
double defined_value(int code) {
    const int exponent = (code & 0x7f) >> Format::mantissa, mantissa = code & ((1 << Format::mantissa) - 1);
    const double fraction = std::ldexp(mantissa, -Format::mantissa);
    double value =
        exponent == 0 ? std::ldexp(fraction, 1 - Format::bias) : std::ldexp(1 + fraction, exponent - Format::bias);
    if ((code & 0x7f) > int(Format::max_code)) value = Format::mantissa == 2 && mantissa == 0 ? double(infinity) : NAN;
    return code & 0x80 ? -value : value;
}

// The finite code with the sign of x whose value is nearest to x. Of two equally near codes, the even one.
template <class Format>
int nearest_code(double x) {
    int best = 0;
    if (std::fabs(x) >= double(Format::max)) return Format::max_code | (std::signbit(x) ? 0x80 : 0);
    for (int code = 0; code <= int(Format::max_code); code++) {
        const double distance = std::fabs(defined_value<Format>(code) - std::fabs(x));
        const double least = std::fabs(defined_value<Format>(best) - std::fabs(x));
        if (distance < least || (distance == least && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(x) ? 0x80 : 0);
}

template <class Format>
void check_code(float x) {
    const int code = fp8_code<Format>(x);
    if (std::isnan(x))
        CHECK(std::isnan(defined_value<Format>(code)));
    else if (const int want = nearest_code<Format>(double(x)); code != want)
        FAIL(format("%a: code %d, not %d", double(x), code, want));
}

}  // namespace

TEST_CASE_TEMPLATE("every FP8 code has the value of its definition", Format, E4M3, E5M2) {
    for (int code = 0; code < 256; code++) {
        CAPTURE(code);
        const double value = defined_value<Format>(code);
        const float read = fp8_value<Format>(uint8_t(code));
        CHECK(std::isnan(read) == std::isnan(value));
        if (!std::isnan(value)) CHECK((double(read) == value && std::signbit(read) == std::signbit(value)));
        if (std::isfinite(value)) CHECK(fp8_code<Format>(read) == code);
    }
    CHECK(defined_value<Format>(Format::max_code) == double(Format::max));
    CHECK(double(Format::max) == std::ldexp(1.75, Format::max_exponent));
}

TEST_CASE_TEMPLATE("every bf16 number, and floats next to a midpoint, are rounded to the nearest FP8 value", Format,
                   E4M3, E5M2) {
    for (uint32_t bits = 0; bits < 1 << 16; bits++) check_code<Format>(std::bit_cast<float>(bits << 16));
    for (int code = 0; code < int(Format::max_code); code++) {
        const float middle = float((defined_value<Format>(code) + defined_value<Format>(code + 1)) / 2);
        for (const float x : {std::nextafterf(middle, 0.0f), middle, std::nextafterf(middle, infinity)})
            for (const float sign : {1.0f, -1.0f}) check_code<Format>(sign * x);
    }
}

// 2^floor(log2(max / amax)) is the only power of two with max / 2 < scale * amax <= max.
TEST_CASE_TEMPLATE("the scale of every bf16 amax is the largest power of two that fits", Format, E4M3, E5M2) {
    for (uint32_t bits = 1; bits < 0x7f80; bits++) {
        const float amax = std::bit_cast<float>(bits << 16);
        const auto [scale, inverse] = fp8_scale<Format>(amax);
        const double scaled = double(scale) * double(amax);
        const bool fits = scaled <= double(Format::max) && (2 * scaled > double(Format::max) || scale == 0x1p110f);
        int exponent = 0;
        if (!fits || std::frexp(scale, &exponent) != 0.5f || scale * inverse != 1.0f)
            FAIL(format("amax %a: scale %a, inverse %a", double(amax), double(scale), double(inverse)));
    }
    CHECK(fp8_scale<Format>(0.0f).scale == 1.0f);
    for (const float bad : {infinity, std::numeric_limits<float>::quiet_NaN()}) {
        CHECK(std::isnan(fp8_scale<Format>(bad).scale));
        CHECK(std::isnan(fp8_scale<Format>(bad).inverse));
    }
}

TEST_CASE_TEMPLATE("a scaled FP8 value is exact in bf16, and zero or normal", Format, E4M3, E5M2) {
    for (const float amax : {0x1p-133f, 0x1p-100f, 1e-10f, 0.3f, 1.0f, 1.75f, 448.0f, 0x1p127f}) {
        const auto [scale, inverse] = fp8_scale<Format>(amax);
        for (int code = 0; code <= int(fp8_code<Format>(scale * amax)); code++) {
            const float read = fp8_value<Format>(uint8_t(code)) * inverse;
            CHECK(double(read) == defined_value<Format>(code) * double(inverse));
            CHECK(float(bf16(read)) == read);
            CHECK((read == 0.0f || read >= std::numeric_limits<float>::min()));
        }
    }
}
