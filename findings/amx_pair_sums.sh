#!/usr/bin/env bash
# amx_pair_sums.sh: AMX and VDPBF16PS round the same bf16 products to other sums, and a chain in one tile is not slow.
#
# Guess: TDPBF16PS of K pairs is a chain of K VDPBF16PS, which add the odd product to the sum, then the even one, and a
# matmul has the same bits on both units. Its latency is 52 cycles, so a loop needs four tiles of sums to start one in
# each 16 cycles. Both units treat denormal numbers as an FMA does, as the bits FTZ and DAZ of MXCSR say.
# Behaviour: TDPBF16PS adds the even and the odd products of its 16 pairs in two sums that start at zero, adds both, and
# only then the old sum: two thirds of the results of one tile differ from the chain. For the same reason 1,000 products
# into one tile take as long as 1,000 into four. Neither unit reads or writes MXCSR: rounding upwards changes no bit, no
# flag is raised, and denormal operands and results are zero. Code that emulates this by fmaf() and then makes denormal
# results zero is wrong just below 2^-126: fmaf() rounds to 2^-126 there, and the units give zero.
# Versions: Intel Xeon, family 6, model 207 (Emerald Rapids); g++ 12.2 of Debian. A CPU with AMX-BF16, else the script
# says so and ends with 0.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

grep -qw amx_bf16 /proc/cpuinfo || {
    echo "this machine has no AMX-BF16"
    exit 0
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/sums.cpp" <<'CODE'
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <immintrin.h>
#include <random>
#include <sys/syscall.h>
#include <unistd.h>

struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};
alignas(64) static uint32_t a[16][16], b[16][16];  // a[m][k] and b[k][n]: pair k of two bf16 numbers
alignas(64) static float c[16][16], tile[16][16], other[16][16];

static void multiply() {
    _tile_loadd(0, c, 64);
    _tile_loadd(4, a, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_stored(0, tile, 64);
}
static __m512 half(__m512i pairs, bool odd) {
    return (__m512)(odd ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(pairs, 16));
}
static void chain() {
    for (int m = 0; m < 16; m++) {
        __m512 sum = _mm512_load_ps(c[m]);
        for (int k = 0; k < 16; k++)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(a[m][k]), (__m512bh)_mm512_load_si512(b[k]));
        _mm512_store_ps(other[m], sum);
    }
}
static void formula() {
    for (int m = 0; m < 16; m++) {
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < 16; k++)
            for (int odd = 0; odd < 2; odd++)
                sums[odd] = _mm512_fmadd_ps(half(_mm512_set1_epi32(a[m][k]), odd), half(_mm512_load_si512(b[k]), odd),
                                            sums[odd]);
        _mm512_store_ps(other[m], _mm512_add_ps(_mm512_load_ps(c[m]), _mm512_add_ps(sums[0], sums[1])));
    }
}
static int different() {
    int count = 0;
    for (int i = 0; i < 256; i++) count += memcmp(&tile[i / 16][i % 16], &other[i / 16][i % 16], 4) != 0;
    return count;
}
#define TIME_OF(first, second, third, fourth)                                                    \
    [] {                                                                                         \
        double least = 1e9;                                                                      \
        for (int i = 0; i < 2000; i++) {                                                         \
            timespec begin, end;                                                                 \
            clock_gettime(CLOCK_MONOTONIC, &begin);                                              \
            for (int j = 0; j < 250; j++) {                                                      \
                _tile_dpbf16ps(first, 4, 5);                                                     \
                _tile_dpbf16ps(second, 4, 5);                                                    \
                _tile_dpbf16ps(third, 4, 5);                                                     \
                _tile_dpbf16ps(fourth, 4, 5);                                                    \
            }                                                                                    \
            clock_gettime(CLOCK_MONOTONIC, &end);                                                \
            const double time = end.tv_sec - begin.tv_sec + 1e-9 * (end.tv_nsec - begin.tv_nsec); \
            if (time < least) least = time;                                                      \
        }                                                                                        \
        return least;                                                                            \
    }()
static void tiny(const char* name, float even_0, float even_1, float by) {
    memset(a, 0, sizeof a), memset(b, 0, sizeof b), memset(c, 0, sizeof c);
    const float values[] = {even_0, even_1, by};
    uint32_t bits[3];
    memcpy(bits, values, sizeof bits);
    a[0][0] = bits[0] >> 16, a[0][1] = bits[1] >> 16, b[0][0] = b[1][0] = bits[2] >> 16;
    multiply(), chain();
    printf("%s: AMX %a, VDPBF16PS %a\n", name, tile[0][0], other[0][0]);
}

int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 2;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const Config config;
    asm volatile("ldtilecfg %0" ::"m"(config));
    std::mt19937 random(1);
    int of_chain = 0, of_formula = 0, rounded_up = 0;
    for (int i = 0; i < 1000; i++) {
        const auto number = [&] { return (random() & 0x807f) | (121 + random() % 12) << 7; };
        for (int j = 0; j < 256; j++) {
            a[j / 16][j % 16] = number() | number() << 16, b[j / 16][j % 16] = number() | number() << 16;
            c[j / 16][j % 16] = float(int(random())) * 0x1p-27f;
        }
        multiply(), chain();
        of_chain += different();
        formula();
        of_formula += different();
        memcpy(other, tile, sizeof tile);
        _mm_setcsr(0x5f80);  // upwards, no flags
        multiply();
        if (_mm_getcsr() != 0x5f80) puts("a flag is raised");
        _mm_setcsr(0x1f80);
        rounded_up += different();
    }
    printf("differ from the chain %.0f %%, from the formula %d, rounding upwards %d\n", of_chain / 2560.0, of_formula,
           rounded_up);
    tiny("2^-126 - 1.5 x 2^-151", 0x1p-63f, -0x1.8p-88f, 0x1p-63f);
    tiny("2^-126 - 1.5 x 2^-152", 0x1p-63f, -0x1.8p-89f, 0x1p-63f);
    tiny("2^-130 x 2^100", 0x1p-130f, 0, 0x1p100f);
    multiply();
    const double four = TIME_OF(0, 1, 2, 3), one = TIME_OF(0, 0, 0, 0);
    printf("one tile of sums: %s\n", one < 1.5 * four ? "as fast as four" : "slower than four");
    _tile_release();
}
CODE
g++ -O2 -ffp-contract=off -march=sapphirerapids "$folder/sums.cpp" -o "$folder/sums"
"$folder/sums" | tee "$folder/got"

want="differ from the chain 67 %, from the formula 0, rounding upwards 0
2^-126 - 1.5 x 2^-151: AMX 0x0p+0, VDPBF16PS 0x0p+0
2^-126 - 1.5 x 2^-152: AMX 0x1p-126, VDPBF16PS 0x1p-126
2^-130 x 2^100: AMX 0x0p+0, VDPBF16PS 0x0p+0
one tile of sums: as fast as four"
diff <(echo "$want") "$folder/got" && echo "as it was"
