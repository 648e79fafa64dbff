// test_random.cpp: compares Philox with the known answers of its authors' library (Random123, kat_vectors, philox4x32
// 10), stochastic rounding with its definition, and the functions under normal() with the C library.
#include "base/random.h"

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>

using Words = std::array<uint32_t, 4>;

TEST_CASE("philox4x32-10 gives the known answers of Random123") {
    // The counter is (index low, index high, stream low, stream high), the key (seed low, seed high).
    CHECK(Philox{0, 0}(0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    const uint64_t ones = ~uint64_t(0);
    CHECK(Philox{ones, ones}(ones) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    // counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0
    CHECK(Philox{0x299f31d0a4093822, 0x0370734413198a2e}(0x85a308d3243f6a88) ==
          Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("round_randomly rounds up with a probability proportional to the distance from the lower bf16") {
    for (const uint32_t high :
         {0x0000u, 0x0001u, 0x007fu, 0x0080u, 0x3f80u, 0x3fffu, 0x7f7eu, 0x8000u, 0xbf80u, 0xff7eu})
        for (const uint32_t low : {0x0000u, 0x0001u, 0x1234u, 0x7fffu, 0x8000u, 0xffffu}) {
            const float x = std::bit_cast<float>(high << 16 | low);
            uint32_t up = 0;
            for (uint32_t random = 0; random < 0x10000; random++) {
                const uint32_t bits = round_randomly(x, random).bits;
                if (bits != high && bits != high + 1) FAIL("not a neighbour: ", bits);
                up += bits == high + 1;
            }
            CHECK(up == low);
        }
}

TEST_CASE("round_randomly keeps NaN and infinities, and makes an infinity only if nearest rounding does") {
    for (const uint32_t sign : {0u, 0x80000000u})
        for (const uint32_t magnitude : {0x7f7f0000u, 0x7f7f0001u, 0x7f7f7fffu, 0x7f7f8000u, 0x7f7fffffu, 0x7f800000u,
                                         0x7f800001u, 0x7fc00000u, 0x7fffffffu})
            for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
                const float x = std::bit_cast<float>(sign | magnitude);
                CHECK(round_randomly(x, random).bits == bf16(x).bits);
            }
}

TEST_CASE("log_fraction and sine_and_cosine are accurate at every 997th argument and where their series change") {
    double log_error = 0.0, sine_error = 0.0, cosine_error = 0.0;
    const auto look = [&](uint32_t x) {
        float sine, cosine;
        sine_and_cosine(x, sine, cosine);
        const double angle = 6.283185307179586477 * double(x) * 0x1p-32;
        log_error = std::max(log_error, std::fabs(double(log_fraction(x)) - std::log((double(x) + 0.5) * 0x1p-32)));
        sine_error = std::max(sine_error, std::fabs(double(sine) - std::sin(angle)));
        cosine_error = std::max(cosine_error, std::fabs(double(cosine) - std::cos(angle)));
    };
    for (uint64_t x = 0; x >> 32 == 0; x += 997) look(uint32_t(x));
    for (uint32_t eighth = 0; eighth < 8; eighth++)
        for (uint32_t near = 0; near < 3; near++) look((eighth << 29) + near - 1);
    for (int e = 0; e < 32; e++)
        for (uint32_t near = 0; near < 3; near++) look((1u << e) + near - 1), look((0xb504f333u >> e) + near - 1);
    CHECK(log_error < 2e-6);  // two roundings of the largest value, about 22
    CHECK(sine_error < 1.2e-7);
    CHECK(cosine_error < 1.2e-7);
}
