// test_vec.cpp: compares the vector arithmetic of vec.h, compiled for the baseline (4 lanes, no FMA), with the C
// library in double and with the conversions of bf16. The tests of operations test the wider builds.
#include <bit>

#include "cpu/vec.h"

#include "support/test.h"

using namespace cpu;

static float lane(floatv x) { return x[0]; }

TEST_CASE("exp is within 1e-7 of e^x, and 0, infinity or NaN outside of its range") {
    for (float x = -87.3f; x < 88.3f; x += 0.00137f) {
        const double want = std::exp(double(x));
        CAPTURE(x);
        REQUIRE(std::fabs(double(lane(exp(broadcast(x)))) - want) <= 1.5e-7 * want);  // 1e-7 and half a rounding
    }
    CHECK(lane(exp(broadcast(0.0f))) == 1.0f);
    for (const float x : {-87.4f, -1e4f, -1e30f, -INFINITY}) CHECK(lane(exp(broadcast(x))) == 0.0f);
    for (const float x : {88.4f, 1e4f, 1e30f, INFINITY}) CHECK(std::isinf(lane(exp(broadcast(x)))));
    CHECK(std::isnan(lane(exp(broadcast(NAN)))));
}

TEST_CASE("every bf16 is loaded exactly, and floats near one are rounded as bf16's constructor does") {
    for (uint32_t high = 0; high < 0x10000; high++)
        for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const float x = std::bit_cast<float>(high << 16 | low);
            bf16 got[VL];
            store(got, broadcast(x));
            REQUIRE(got[0].bits == bf16(x).bits);
            if (low == 0 && x == x) REQUIRE(lane(load(got)) == x);
        }
}

TEST_CASE("stochastic rounding agrees with random.h, for every bf16 and for floats after it") {
    for (uint32_t high = 0; high < 0x10000; high++)
        for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0xffffu}) {
            const float x = std::bit_cast<float>(high << 16 | low);
            const uintv random = {0, 1, 0x8000, 0xffff};
            bf16 got[VL];
            store_stochastic(got, broadcast(x), random);
            for (int i = 0; i < VL; i++) REQUIRE(got[i].bits == round_randomly(x, random[i]).bits);
        }
}

TEST_CASE_TEMPLATE("partial loads and stores access only their lanes", floatX, float, bf16) {
    for (int lanes = 1; lanes < VL; lanes++) {
        floatX in[VL], out[VL];
        for (int i = 0; i < VL; i++) in[i] = floatX(float(i + 1)), out[i] = floatX(-1.0f);
        const floatv x = load(in, Partial{lanes});
        store(out, x, Partial{lanes});
        for (int i = 0; i < VL; i++) {
            CHECK(x[i] == (i < lanes ? float(i + 1) : 0.0f));
            CHECK(float(out[i]) == (i < lanes ? float(i + 1) : -1.0f));
            CHECK(float(mask_lanes(x, 9.0f, Partial{lanes})[i]) == (i < lanes ? float(i + 1) : 9.0f));
        }
    }
}
