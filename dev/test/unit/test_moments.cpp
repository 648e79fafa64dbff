// test_moments.cpp: the shared cases of moments in bf16 and in 8 bits (cases_moments.h) on every CPU variant, and the
// codes themselves.
#include "base/moments.h"
#include "support/cases_moments.h"
#include "support/cpu_backend.h"

using namespace moment_cases;
using adamw_cases::Master;

static const CpuBackend cpu_backend;

TEST_CASE("a step with moments in fp32, bf16 or in codes agrees with the definition, however the range is cut") {
    for (const int64_t count : {64, 192, 1088, 70000 / 64 * 64}) {
        one_step<float>(cpu_backend, count, Master::weight_itself, 64);
        one_step<bf16>(cpu_backend, count, Master::apart, 320);
        one_step<bf16>(cpu_backend, count, Master::weight_itself, 128);
    }
}

TEST_CASE("1,000 steps: moments stay near the exact ones, zeros stay zero, and no block makes an update explode") {
    thousand_steps<float>(cpu_backend, 1000);
}

TEST_CASE("moments that were widened are stored as they were, at every magnitude") {
    stored_again(cpu_backend, first, 100 * FLAT_ALIGN);
    stored_again(cpu_backend, second, 100 * FLAT_ALIGN);
}

// The codes by ops.inc: q = 1 .. 127 and 1 .. 255.
TEST_CASE("every code is its formula, and is found again with all random bits") {
    for (const int E : {-100, -40, 0, 100})
        for (int q = 0; q < 256; q++) {
            CAPTURE(q);
            const auto exponent = uint8_t(E + 127);
            const double sign = q & 128 ? -1.0 : 1.0, m = std::ldexp(1 + q % 8 / 8.0, E - 15 + q % 128 / 8);
            CHECK(double(moment_value<SignedMoment>(uint8_t(q), exponent)) == (q % 128 ? sign * m : 0.0));
            for (const uint32_t random : {0u, TO_NEAREST<SignedMoment>, 0xfffffu})
                CHECK(moment_code<SignedMoment>(moment_value<SignedMoment>(uint8_t(q), exponent), exponent, random) ==
                      q);
            if (E < -47) continue;
            const double root = std::ldexp(1 + q % 16 / 16.0, E - 15 + q / 16);
            CHECK(double(moment_value<RootMoment>(uint8_t(q), exponent)) == (q ? root : 0.0));
            for (const uint32_t random : {0u, TO_NEAREST<RootMoment>, 0x7ffffu})
                CHECK(moment_code<RootMoment>(moment_value<RootMoment>(uint8_t(q), exponent), exponent, random) == q);
        }
}

TEST_CASE("a second moment that is not zero gets a code, and a first one rounds down to zero") {
    const uint8_t exponent = block_exponent<RootMoment>(1e4f);
    for (const float tiny : {1e-38f, 1e-20f, 1e-3f}) {
        CHECK(moment_code<RootMoment>(tiny, exponent, 0) == 1);
        CHECK(moment_code<SignedMoment>(tiny, exponent, 0xfffff) == 0);
    }
    CHECK(moment_code<RootMoment>(0.0f, exponent, 0x7ffff) == 0);
    CHECK(moment_code<RootMoment>(1.999f, block_exponent<RootMoment>(1.999f), 0x7ffff) == 255);  // not 256
}
