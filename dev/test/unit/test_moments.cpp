// test_moments.cpp: the shared cases of moments in bf16 and in 8 bits (cases_moments.h) on every CPU variant, and the
// codes themselves.
#include "base/moments.h"
#include "support/cases_moments.h"
#include "support/cpu_backend.h"

using namespace moment_cases;
using adamw_cases::Master;

static const CpuBackend cpu_backend;

TEST_CASE("a step with moments in bf16 or in codes agrees with the definition, however the range is cut") {
    for (const int64_t count : {64, 192, 1088, 70000 / 64 * 64}) {
        one_step<float>(cpu_backend, count, Master::weight_itself, 64);
        one_step<bf16>(cpu_backend, count, Master::apart, 320);
        one_step<bf16>(cpu_backend, count, Master::weight_itself, 128);
    }
}

TEST_CASE("moments are rounded by seed, step and element, by a stream of their own") { random_bits(cpu_backend); }

TEST_CASE("1,000 steps: moments stay near the exact ones, zeros stay zero, and no block makes an update explode") {
    thousand_steps<float>(cpu_backend, 1000);
}

TEST_CASE("moments that were widened are stored as they were, at every magnitude") {
    stored_again(cpu_backend, first, 100 * FLAT_ALIGN);
    stored_again(cpu_backend, second, 100 * FLAT_ALIGN);
}

// The codes by ops.inc: q = 0 .. 127 and 0 .. 255.
template <class Format>
static void check_codes(int E, int mantissa, bool is_root) {
    for (int q = 0; q < 256; q++) {
        CAPTURE(q);
        const auto exponent = uint8_t(E + 127);
        const int magnitude = is_root ? q : q % 128;
        const double sum = std::ldexp(1 + double(magnitude % mantissa) / mantissa, magnitude / mantissa);
        const double x = std::ldexp(sum - 1, E - 7);
        const float value = moment_value<Format>(uint8_t(q), exponent);
        CHECK(double(value) == (q > magnitude ? -x : x));
        for (const uint32_t random : {0u, TO_NEAREST<Format>, 2 * TO_NEAREST<Format> - 1})
            CHECK(moment_code<Format>(value, exponent, random) == q);
        if (magnitude >= 7 * mantissa) CHECK(block_exponent<Format>(std::fabs(value)) == exponent);
    }
}

TEST_CASE("every code is its formula, and is found again with all random bits") {
    for (const int E : {-115, -51, -40, 0, 100, 127}) check_codes<SignedMoment>(E, 16, false);
    for (const int E : {-51, -40, 0, 63}) check_codes<RootMoment>(E, 32, true);
}

TEST_CASE("the chance of the upper neighbour is the distance from the lower one, at every magnitude") {
    for (const float x : {1.03f, 0.11f, 1.0f / 128, 0.0003f}) {  // codes of their own, and less than the first one
        const uint8_t exponent = block_exponent<SignedMoment>(1.5f);
        double sum = 0.0;
        for (uint32_t random = 0; random < 2 * TO_NEAREST<SignedMoment>; random++)
            sum += double(moment_value<SignedMoment>(moment_code<SignedMoment>(-x, exponent, random), exponent));
        CHECK(sum / (2 * TO_NEAREST<SignedMoment>) == doctest::Approx(double(-x)).epsilon(1e-5));
    }
}

TEST_CASE("a second moment that is not zero gets a code, and a first one may become zero") {
    const uint8_t exponent = block_exponent<RootMoment>(1e4f);
    for (const float tiny : {1e-38f, 1e-20f, 1e-3f}) {
        CHECK(moment_code<RootMoment>(tiny, exponent, 0) == 1);
        CHECK(moment_code<SignedMoment>(tiny, exponent, 0) == 0);
    }
    CHECK(moment_code<RootMoment>(0.0f, exponent, 0x3ffff) == 0);
    CHECK(moment_code<RootMoment>(1.98f, block_exponent<RootMoment>(1.98f), 0x3ffff) == 255);  // not 256
}
