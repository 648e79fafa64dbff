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
            const uint16_t random[] = {0, 1, 0x8000, 0xffff};
            static_assert(VL == 4);
            bf16 got[VL];
            store_stochastic(got, broadcast(x), random);
            for (int i = 0; i < VL; i++) REQUIRE(got[i].bits == round_randomly(x, random[i]).bits);
        }
}

TEST_CASE("random bits agree with Philox, in the order of the elements") {
    for (const uint64_t first : {uint64_t(0), uint64_t(3), uint64_t(0xfffffffe), uint64_t(5) << 32, ~uint64_t(3)}) {
        const Philox random{0x123456789abcdef0, 0xfedcba9876543210};
        uint16_t bits[8 * VL];
        random_bits16(bits, random.seed, random.stream, first);
        for (int i = 0; i < 8 * VL; i++) {
            const auto words = random(first + uint64_t(i / 8));
            REQUIRE(bits[i] == uint16_t(words[i % 8 / 2] >> i % 2 * 16));
        }
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

TEST_CASE("a loop over vectors covers each element once, whole vectors first") {
    for (int count = 0; count < 3 * VL; count++) {
        std::vector<int> visits(count);
        for_vectors(count, [&](int64_t i, auto width) {
            for (int j = 0; j < width.lanes; j++) visits.at(i + j)++;
        });
        for (int n : visits) CHECK(n == 1);
    }
}

TEST_CASE("sums, maxima, square roots, transposition") {
    floatv x;
    for (int i = 0; i < VL; i++) x[i] = float((i + 1) * (i + 1));
    CHECK(reduce_sum(x) == float(VL * (VL + 1) * (2 * VL + 1) / 6));
    CHECK(reduce_max(x) == float(VL * VL));
    CHECK(reduce_max(-x) == -1.0f);
    floatv rows[VL];
    for (int i = 0; i < VL; i++) {
        CHECK(square_root(x)[i] == float(i + 1));
        for (int j = 0; j < VL; j++) rows[i][j] = float(10 * i + j);
    }
    transpose(rows);
    for (int i = 0; i < VL; i++)
        for (int j = 0; j < VL; j++) CHECK(float(rows[i][j]) == float(10 * j + i));
}

TEST_CASE("GELU and its derivative agree with the formulas in double") {
    for (float x = -10.0f; x <= 10.0f; x += 0.01f) {
        const double slope = 2 * std::sqrt(2 / std::acos(-1)), two_u = slope * (x + 0.044715 * x * x * x);
        const double s = 1 / (1 + std::exp(-two_u)), bend = x * s * (1 - s) * slope * (1 + 3 * 0.044715 * x * x);
        const double roundings = 8 * double(epsilon<float>()) * (1 + std::fabs(two_u));
        CAPTURE(x);
        CHECK(std::fabs(double(lane(gelu(broadcast(x)))) - x * s) <= roundings * std::fabs(x * s) + 1e-37);
        CHECK(std::fabs(double(lane(gelu_derivative(broadcast(x)))) - (s + bend)) <=
              roundings * (s + std::fabs(bend)) + 1e-36);
    }
    for (const float x : {1e4f, 1e30f}) {
        CHECK(lane(gelu(broadcast(x))) == x);
        CHECK(lane(gelu(broadcast(-x))) == 0.0f);
        CHECK(lane(gelu_derivative(broadcast(x))) == 1.0f);
        CHECK(lane(gelu_derivative(broadcast(-x))) == 0.0f);
    }
}
