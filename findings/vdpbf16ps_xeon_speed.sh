#!/usr/bin/env bash
# vdpbf16ps_xeon_speed.sh: on a Xeon with AMX, AVX512-BF16 has half the FLOP/s of float, and with 256 bits a quarter.
#
# Guess: VDPBF16PS multiplies two numbers where an FMA multiplies one and starts as often, so bfloat16 is twice as fast
# as float, as on AMD Zen 4. Where a virtual machine hides AMX, bfloat16 remains the faster type.
# Behaviour: one VDPBF16PS starts in two cycles, while two FMAs start in each: a quarter of the instructions, half the
# FLOP/s. The form of 256 bits takes as long as that of 512, for half of the work. Kernels that widen bfloat16 to float
# and use FMAs are faster. torch 2.15 with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, which is what it does without AMX, takes
# 24 ms for a matmul of 1024 x 1024 in bfloat16 and 14 ms in float32, with AMX 2.2 ms. VDPBF16PS is not slowed down by
# denormal numbers: an FMA that meets one takes 130 cycles, more than 200 times as long as others.
# Versions: Intel Xeon, family 6, model 207 (Emerald Rapids); g++ 12.2 of Debian. A CPU with AVX512-BF16 and
# AVX512-FP16 (Sapphire Rapids or later), else the script says so and ends with 0.
# Output seen: that of `want` below; the time of one instruction, to a factor of 1.5. Exit code 1 if it has changed.
set -euo pipefail

grep -q 'avx512_bf16.*avx512_fp16' /proc/cpuinfo && grep -q GenuineIntel /proc/cpuinfo || {
    echo "this machine is no Intel Xeon with AVX512-BF16 and AVX512-FP16"
    exit 0
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/speed.cpp" <<'CODE'
#include <cstdio>
#include <ctime>
#include <immintrin.h>

// The least time of 3,000 measurements of 12,000 instructions, 12 of them independent, in nanoseconds each.
template <class Vector, class Step>
static double time_of(Vector zero, const Step& step) {
    double least = 1e9;
    for (int i = 0; i < 3000; i++) {
        Vector sums[12];
        for (auto& sum : sums) sum = zero;
        timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int j = 0; j < 1000; j++) {
#pragma GCC unroll 12
            for (int k = 0; k < 12; k++) {
                sums[k] = step(sums[k]);
                asm volatile("" : "+v"(sums[k]));
            }
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double time = end.tv_sec - begin.tv_sec + 1e-9 * (end.tv_nsec - begin.tv_nsec);
        if (time < least) least = time;
    }
    return least / 12e-6;
}
static void compare(const char* name, double time, double other, double want) {
    const double ratio = time / other;
    printf("%s: ", name);
    if (ratio > want / 1.5 && ratio < want * 1.5) printf("%.0f times\n", want);
    else printf("%.2f times\n", ratio);
}

int main() {
    const __m512 one = _mm512_set1_ps(1), tiny = _mm512_set1_ps(0x1p-130f), zero = _mm512_setzero_ps();
    const __m512bh pair = (__m512bh)_mm512_set1_epi32(0x3f803f80), tiny_pair = (__m512bh)_mm512_set1_epi32(0x00080008);
    const __m256bh half = (__m256bh)_mm256_set1_epi32(0x3f803f80);
    const double fma = time_of(zero, [&](__m512 sum) { return _mm512_fmadd_ps(one, one, sum); });
    const double pairs = time_of(zero, [&](__m512 sum) { return _mm512_dpbf16_ps(sum, pair, pair); });
    compare("VDPBF16PS for FMA", pairs, fma, 4);
    compare("256 bits for 512", time_of(_mm256_setzero_ps(), [&](__m256 sum) {
        return _mm256_dpbf16_ps(sum, half, half);
    }), pairs, 1);
    compare("VDPBF16PS of denormal numbers", time_of(zero, [&](__m512 sum) {
        return _mm512_dpbf16_ps(sum, tiny_pair, pair);
    }), pairs, 1);
    const double slow = time_of(zero, [&](__m512 sum) { return _mm512_fmadd_ps(tiny, one, sum); });
    printf("FMA of denormal numbers: %s\n", slow > 100 * fma ? "more than 100 times" : "less than 100 times");
}
CODE
g++ -O3 -march=sapphirerapids "$folder/speed.cpp" -o "$folder/speed"
"$folder/speed" | tee "$folder/got"

want="VDPBF16PS for FMA: 4 times
256 bits for 512: 1 times
VDPBF16PS of denormal numbers: 1 times
FMA of denormal numbers: more than 100 times"
diff <(echo "$want") "$folder/got" && echo "as it was"
