// test_units.cpp: tests that the emulated matrix instructions (emulated_units.h) give the bits of the real ones, if the
// machine has them, for random numbers of every size, denormal numbers, ties, infinity and NaN.
#include <cstring>

#include "cpu/isa.h"
#include "support/test.h"
#include "support/units.h"

#if defined(__x86_64__)
namespace {

struct Bits {
    Philox random;
    uint64_t at = 0;

    uint32_t next() { return random(at++)[0]; }

    // kind 0: any bits. 1: numbers near 1, whose sums are often rounded. Else: tiny numbers, some of them denormal.
    uint32_t number(int kind) {
        const uint32_t any = next(), sign_and_digits = any & 0x807fffff;
        if (kind == 0) return any;
        const uint32_t exponent = kind == 1 ? 120 + next() % 12 : next() % 40 + (next() % 2 ? 0 : 50);
        return sign_and_digits | exponent << 23;
    }
    float floating(int kind) {
        const uint32_t bits = number(kind);
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    uint16_t half(int kind) { return uint16_t(number(kind) >> 16); }
};

// Compares NaNs as equal, because the manual does not say which NaN results.
bool same(float a, float b) { return memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

bool skipped(Isa needed) {
    if (best_isa() >= needed) return false;
    skip_case(std::string("this machine has no ") + isa_name(needed));
    return true;
}

template <int SUMS, int OPERANDS>
void compare(void (*Units::*op)(float*, const uint16_t*, const uint16_t*), int runs) {
    Bits bits{{3, 0}};
    for (int run = 0; run < runs; run++) {
        const int kind = run % 3;
        alignas(64) float real[SUMS], emulated[SUMS];
        alignas(64) uint16_t a[OPERANDS], b[OPERANDS];
        for (float& x : real) x = bits.floating(kind);
        memcpy(emulated, real, sizeof real);
        for (uint16_t& x : a) x = bits.half(kind);
        for (uint16_t& x : b) x = bits.half(kind);
        (real_units.*op)(real, a, b);
        (emulated_units.*op)(emulated, a, b);
        for (int i = 0; i < SUMS; i++) {
            INFO("run ", run, ", sum ", i, ": ", real[i], " and ", emulated[i]);
            REQUIRE(same(real[i], emulated[i]));
        }
    }
}

}  // namespace

TEST_CASE("rounding to bf16 by vcvtne2ps2bf16") {
    if (skipped(Isa::avx512bf16)) return;
    Bits bits{{4, 0}};
    for (int run = 0; run < 20000; run++) {
        float in[32];
        uint16_t real[32], emulated[32];
        for (float& x : in) x = bits.floating(run % 3);
        if (run % 5 == 0)  // ties
            for (float& x : in) {
                uint32_t u;
                memcpy(&u, &x, sizeof u);
                u = (u & 0xffff0000) | 0x8000;
                memcpy(&x, &u, sizeof u);
            }
        real_units.round_pair_to_bf16(real, in);
        emulated_units.round_pair_to_bf16(emulated, in);
        for (int i = 0; i < 32; i++) {
            INFO("of ", in[i]);
            REQUIRE(real[i] == emulated[i]);
        }
    }
}

TEST_CASE("dot products of pairs by vdpbf16ps") {
    if (skipped(Isa::avx512bf16)) return;
    compare<16, 32>(&Units::add_pair_products, 60000);
}

TEST_CASE("matrix products of tiles by tdpbf16ps") {
    if (skipped(Isa::amx)) return;
    compare<256, 512>(&Units::tile_multiply, 3000);
}
#else
TEST_CASE("matrix instructions") { skip_case("they are instructions of x86-64"); }
#endif
