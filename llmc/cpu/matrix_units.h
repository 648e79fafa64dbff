// matrix_units.h: one function or macro for each bf16 instruction: AMX tiles, dot products of pairs (VDPBF16PS) and
// rounding to bf16 (VCVTNE2PS2BF16). Only translation units compiled for these instructions include it. The rest of the
// program does not use them, so a test build can replace this file by plain C++ (dev/test/support/emulated_units.h).
//
// The instructions ignore the control register MXCSR: denormal numbers count as zero, and rounding is to nearest even.
#pragma once
// gcc 12 warns of the undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "base/dtype.h"

namespace cpu {
namespace {

// Rounds 32 floats to bf16; those of `first` are in the lower half.
INLINE __m512i round_pair_to_bf16(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// sums[i] + a[2i + 1] * b[2i + 1] + a[2i] * b[2i] for 16 lanes i, as two fused multiply-adds, the odd one first.
INLINE __m512 add_pair_products(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

}  // namespace
}  // namespace cpu

// Tiles are numbered 0 to 7. These are macros because gcc 12 needs the number as a literal, to name the register.
// TILE_CONFIG does not use _tile_loadconfig: gcc 12 assumes that it reads 8 bytes only, and removes the rest of config.
#define TILE_CONFIG(config) asm volatile("ldtilecfg %0" ::"m"(config))
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, rows, stride) _tile_loadd(tile, rows, stride)  // stride: bytes from one row to the next
#define TILE_STORE(tile, rows, stride) _tile_stored(tile, rows, stride)
#define TILE_MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)  // sums (16, 16) += a (16, 32) b, pairs interleaved
