// matrix_microkernel.h: the parts that bf16 matmul and bf16 attention share: packing of operands into micro-panels, the
// microkernel, and a few functions of 16 floats. Compiled for AMX (amx.cpp) and for AVX512-BF16 (avx512bf16.cpp), into
// the namespace VARIANT of the including file. Both read the same packed operands.
//
// A tile is 16 rows of 64 bytes. A tile of A holds 16 rows of 32 bf16 numbers. A tile of B holds 16 columns: its row k
// is the pairs (b[2k][n], b[2k+1][n]) for 16 columns n. Their product is a tile of 16 x 16 float sums. AMX multiplies
// two tiles in 16 cycles (tdpbf16ps). AVX512-BF16 broadcasts one pair of A and multiplies it by a row of B (vdpbf16ps).
//
// The outer dimension of an operand is that of the result: rows of A, columns of B. The inner dimension is summed over.
// A packed operand is cut into micro-panels of 32 rows of A or 32 columns of B. A micro-panel is a sequence of tile
// pairs (outer 0..15, outer 16..31), one pair for each 32 steps of the inner dimension. Edges are padded with zeros.
// Four ways to pack a row-major 32 x 32 block cover every matmul of the model without a transposed copy of an operand:
//                             outer      inner
//   A  pack_rows_as_a         rows       columns      activations, forward; output gradients for input gradients
//   B  pack_rows_as_b         rows       columns      weights, forward
//   A  pack_columns_as_a      columns    rows         output gradients for weight gradients
//   B  pack_columns_as_b      columns    rows         weights for input gradients; activations for weight gradients
//
// Everywhere here denormal numbers count as zero, and bf16 is rounded to nearest even: the bf16 instructions ignore the
// control register MXCSR.
#pragma once
// gcc 12 warns of the undefined operands inside its own intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cstdint>

#include "base/common.h"
#include "base/dtype.h"

namespace cpu::VARIANT {

// ---- One function or macro for each bf16 instruction. A test build replaces them by plain C++
// (dev/test/support/emulated_units.h).
#if !defined(EMULATED_UNITS)

// VCVTNE2PS2BF16: rounds 32 floats to bf16; those of `first` are in the lower half.
INLINE __m512i round_pair_to_bf16(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// VDPBF16PS: sums[i] + a[2i + 1] * b[2i + 1] + a[2i] * b[2i] for 16 lanes i, as two fused multiply-adds, the odd one
// first.
INLINE __m512 add_pair_products(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

// Tiles are numbered 0 to 7. These are macros because gcc 12 needs the number as a literal, to name the register.
// TILE_CONFIG does not use _tile_loadconfig: gcc 12 assumes that it reads 8 bytes only, and removes the rest of config.
#define TILE_CONFIG(config) asm volatile("ldtilecfg %0" ::"m"(config))
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, rows, stride) _tile_loadd(tile, rows, stride)  // stride: bytes from one row to the next
#define TILE_STORE(tile, rows, stride) _tile_stored(tile, rows, stride)
#define TILE_MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)  // sums (16, 16) += a (16, 32) b, pairs interleaved

#endif

constexpr int PANEL = 32;             // rows or columns of a micro-panel
constexpr int TILE = 512;             // bf16 numbers in a tile
constexpr int TILE_PAIR = 2 * TILE;   // bf16 numbers in a 32 x 32 block of a micro-panel
constexpr int BLOCK = PANEL * PANEL;  // floats in a 32 x 32 block of the result

// The number of micro-panels in `size` rows or columns.
INLINE int panels_of(int size) { return ceil_div(size, PANEL); }

// Prefetches the operands of a later microkernel call into the second-level cache, a few cache lines per step.
struct Prefetcher {
    const char *a = nullptr, *b = nullptr;
    int a_lines = 0, b_lines = 0;  // lines of 64 bytes, per step

    INLINE void step() {
        for (int i = 0; i < a_lines; i++, a += 64) _mm_prefetch(a, _MM_HINT_T1);
        for (int i = 0; i < b_lines; i++, b += 64) _mm_prefetch(b, _MM_HINT_T1);
    }
};

// microkernel: sums (32, 32) = a b, or += if accumulate, for micro-panels a and b of `depth` tile pairs. step(k) is
// called once for each tile pair: it prefetches, or stores an earlier block, while the out-of-order core multiplies.
#if defined(MATRIX_TILES)

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the eight tile registers of the calling thread as 16 rows of 64 bytes each, until the end of the scope.
struct TileRegisters {
    TileRegisters() {
        const TileConfig config;
        TILE_CONFIG(config);
    }
    ~TileRegisters() { TILE_RELEASE(); }
    TileRegisters(const TileRegisters&) = delete;
};

// The sums are four tiles. Each step loads four tiles and multiplies four times, in 64 cycles that hide step(k).
template <class Step>
INLINE void microkernel(float* sums, const bf16* a, const bf16* b, int depth, bool accumulate, const Step& step) {
    constexpr int stride = PANEL * sizeof(float);
    if (accumulate) {
        TILE_LOAD(0, sums, stride);
        TILE_LOAD(1, sums + 16, stride);
        TILE_LOAD(2, sums + BLOCK / 2, stride);
        TILE_LOAD(3, sums + BLOCK / 2 + 16, stride);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int k = 0; k < depth; k++, a += TILE_PAIR, b += TILE_PAIR) {
        TILE_LOAD(4, a, 64);
        TILE_LOAD(6, b, 64);
        TILE_MULTIPLY(0, 4, 6);
        TILE_LOAD(7, b + TILE, 64);
        TILE_MULTIPLY(1, 4, 7);
        step(k);
        TILE_LOAD(5, a + TILE, 64);
        TILE_MULTIPLY(2, 5, 6);
        TILE_MULTIPLY(3, 5, 7);
    }
    TILE_STORE(0, sums, stride);
    TILE_STORE(1, sums + 16, stride);
    TILE_STORE(2, sums + BLOCK / 2, stride);
    TILE_STORE(3, sums + BLOCK / 2 + 16, stride);
}

#else

struct TileRegisters {
    TileRegisters() {}  // user-provided, so that an object which is not used gives no warning
};

// Rows whose sums stay in registers, as 16 vectors: two units with a latency of four cycles then never wait for a sum.
constexpr int ROWS = 8;

// ROWS rows of sums (32, 32). Each pair of a row of A is broadcast and multiplied by both vectors of a row of B.
__attribute__((noinline)) inline void microkernel_rows(float* sums, const bf16* a, const bf16* b, int depth,
                                                       bool accumulate) {
    __m512 x[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            x[r][half] = accumulate ? _mm512_load_ps(sums + r * PANEL + 16 * half) : _mm512_setzero_ps();
    for (int k = 0; k < depth; k++, a += TILE_PAIR, b += TILE_PAIR)
        for (int pair = 0; pair < 16; pair++) {
            const __m512i b0 = _mm512_load_si512(b + 32 * pair), b1 = _mm512_load_si512(b + TILE + 32 * pair);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                // not _mm512_set1_epi32, at which clang 17 crashes
                const __m512i a_pair = _mm512_broadcastd_epi32(_mm_loadu_si32(a + 32 * r + 2 * pair));
                x[r][0] = add_pair_products(x[r][0], a_pair, b0);
                x[r][1] = add_pair_products(x[r][1], a_pair, b1);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) _mm512_store_ps(sums + r * PANEL + 16 * half, x[r][half]);
}

template <class Step>
INLINE void microkernel(float* sums, const bf16* a, const bf16* b, int depth, bool accumulate, const Step& step) {
    constexpr int groups = PANEL / ROWS;
    for (int group = 0; group < groups; group++) {
        for (int k = depth * group / groups; k < depth * (group + 1) / groups; k++) step(k);
        microkernel_rows(sums + group * ROWS * PANEL, a + group * ROWS * 32, b, depth,
                         accumulate);  // rows of both tiles follow
    }
}

#endif

INLINE void microkernel(float* sums, const bf16* a, const bf16* b, int depth, bool accumulate) {
    microkernel(sums, a, b, depth, accumulate, [](int) {});
}

// A mask of the first `count` of 32 lanes, or of 16 lanes.
INLINE __mmask32 lane_mask32(int count) { return count >= 32 ? ~0u : (1u << std::max(count, 0)) - 1; }
INLINE __mmask16 lane_mask16(int count) { return __mmask16(lane_mask32(std::min(count, 16))); }

// ---- Packing: load_block, then one of the four pack functions, which write one tile pair.

// x[r] = row r of block (rows, columns), padded with zeros to 32 x 32. ld: numbers from one row to the next.
INLINE void load_block(__m512i (&x)[32], const bf16* block, int64_t ld, int rows, int columns) {
    if (rows >= 32 && columns >= 32) {
#pragma GCC unroll 32
        for (int r = 0; r < 32; r++) x[r] = _mm512_loadu_si512(block + r * ld);
    } else {
        const __mmask32 mask = lane_mask32(columns);
        for (int r = 0; r < 32; r++)
            x[r] = r < rows ? _mm512_maskz_loadu_epi16(mask, block + r * ld) : _mm512_setzero_si512();
    }
}

// x[i][j] = x[j][i] for 16 x 16 numbers of 32 bits.
INLINE void transpose(__m512i* x) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {  // pairs of rows, in each 128-bit lane
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // x[i + c]: column c of each lane, from rows i..i+3
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {  // then the 4 x 4 lanes
        const __m512i even0 = _mm512_shuffle_i32x4(x[c], x[c + 4], 0x88),
                      odd0 = _mm512_shuffle_i32x4(x[c], x[c + 4], 0xdd);
        const __m512i even1 = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0x88);
        const __m512i odd1 = _mm512_shuffle_i32x4(x[c + 8], x[c + 12], 0xdd);
        y[c] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        y[c + 4] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        y[c + 8] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        y[c + 12] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = y[i];
}

INLINE void store_tile(bf16* tile, const __m512i* x) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(tile + 32 * i, x[i]);
}

INLINE void pack_rows_as_a(bf16* pair, const __m512i (&x)[32]) {
    store_tile(pair, x);
    store_tile(pair + TILE, x + 16);
}

INLINE void pack_rows_as_b(bf16* pair, const __m512i (&x)[32]) {
    for (int half = 0; half < 2; half++) {
        __m512i y[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) y[i] = x[16 * half + i];
        transpose(y);
        store_tile(pair + half * TILE, y);
    }
}

// Columns 16 half to 16 half + 15 of two rows, interleaved.
INLINE __m512i interleave(__m512i row0, __m512i row1, int half) {
    alignas(64) static constexpr uint16_t order[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    return _mm512_permutex2var_epi16(row0, _mm512_load_si512(order[half]), row1);
}

INLINE void pack_columns_as_b(bf16* pair, const __m512i (&x)[32]) {
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(pair + half * TILE + 32 * i, interleave(x[2 * i], x[2 * i + 1], half));
}

INLINE void pack_columns_as_a(bf16* pair, const __m512i (&x)[32]) {
    for (int half = 0; half < 2; half++) {
        __m512i y[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) y[i] = interleave(x[2 * i], x[2 * i + 1], half);
        transpose(y);
        store_tile(pair + half * TILE, y);
    }
}

// Tile pair k of a micro-panel of a packed operand, `depth` pairs to a micro-panel.
INLINE bf16* pair_at(bf16* packed, int panel, int k, int depth) {
    return packed + (int64_t(panel) * depth + k) * TILE_PAIR;
}

// The tile pair that PACK, one of the four functions, makes of block (r, c) of a matrix with that many blocks.
template <auto PACK>
INLINE bf16* pair_of(bf16* packed, int r, int c, int row_panels, int column_panels) {
    constexpr bool outer_rows = PACK == pack_rows_as_a || PACK == pack_rows_as_b;
    return outer_rows ? pair_at(packed, r, c, column_panels) : pair_at(packed, c, r, row_panels);
}

// ---- Rows of the result, and 16 floats

INLINE __m512 broadcast(float x) { return _mm512_set1_ps(x); }

// 16 bf16 numbers as floats.
INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m512 load16(const bf16* x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

// 32 floats.
struct Row {
    __m512 first, second;
};
INLINE Row operator+(Row a, Row b) { return {_mm512_add_ps(a.first, b.first), _mm512_add_ps(a.second, b.second)}; }
INLINE Row operator*(Row a, Row b) { return {_mm512_mul_ps(a.first, b.first), _mm512_mul_ps(a.second, b.second)}; }
INLINE Row broadcast_row(float x) { return {broadcast(x), broadcast(x)}; }
INLINE Row widen_row(__m512i x) { return {widen(_mm512_castsi512_si256(x)), widen(_mm512_extracti64x4_epi64(x, 1))}; }
INLINE Row load_row(const float* sums) { return {_mm512_load_ps(sums), _mm512_load_ps(sums + 16)}; }
INLINE Row load_row(const bf16* x, __mmask32 mask) { return widen_row(_mm512_maskz_loadu_epi16(mask, x)); }
INLINE void save_row(float* sums, Row x) {
    _mm512_store_ps(sums, x.first);
    _mm512_store_ps(sums + 16, x.second);
}
// x in the lanes of the mask, 0 in the others.
INLINE Row mask_row(__mmask32 mask, Row x) {
    return {_mm512_maskz_mov_ps(__mmask16(mask), x.first), _mm512_maskz_mov_ps(__mmask16(mask >> 16), x.second)};
}
INLINE __m512i round_row(Row x) { return round_pair_to_bf16(x.first, x.second); }

// Whether the masked ones of 32 numbers are a whole aligned cache line. A non-temporal store then writes them: a store
// through the caches would first read the line, at a latency of the third-level cache each (half of a matmul's time).
INLINE bool can_stream(const void* to, __mmask32 mask) { return mask == ~0u && uintptr_t(to) % 64 == 0; }

// Stores the masked ones of 32 floats as bf16.
INLINE void store_row(bf16* to, Row x, __mmask32 mask) {
    if (can_stream(to, mask))
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), round_row(x));
    else
        _mm512_mask_storeu_epi16(to, mask, round_row(x));
}

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 127: a polynomial on [-1/2, 1/2], then the exponent is changed. Relative error 2e-7. NaN stays NaN.
INLINE __m512 exp2_16(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(broadcast(0.00133908634f), f, broadcast(0.00967603192f));
    p = _mm512_fmadd_ps(p, f, broadcast(0.0555035711f));
    p = _mm512_fmadd_ps(p, f, broadcast(0.240221075f));
    p = _mm512_fmadd_ps(p, f, broadcast(0.693147188f));
    p = _mm512_fmadd_ps(p, f, broadcast(1.0f));
    return _mm512_scalef_ps(p, n);
}

// e^x for x <= 88: relative error 2e-7 near 0 and 1e-5 at -87; about 0 below -87. NaN stays NaN.
INLINE __m512 exp16(__m512 x) { return exp2_16(_mm512_mul_ps(x, broadcast(LOG2_E))); }

// 1 / x, by an estimate and one step of Newton's method: a division takes as long as ten multiplications.
INLINE __m512 reciprocal(__m512 x) {
    const __m512 r = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(r, _mm512_fnmadd_ps(x, r, broadcast(2.0f)));
}

// The tanh-GELU is x times a logistic function: 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), with
// u = sqrt(2 / pi) (x + 0.044715 x^3). Beyond x = +-9 the logistic function is 1 or 0 to more digits than a float has,
// so x is clamped there and nothing overflows.
constexpr float GELU_SLOPE = 1.5957691216f, GELU_CUBIC = 0.044715f, GELU_CLAMP = 9.0f;  // 2 sqrt(2 / pi)

INLINE __m512 gelu_logistic(__m512 x, __m512 x_squared) {
    constexpr float slope = -GELU_SLOPE * LOG2_E;
    const __m512 u = _mm512_mul_ps(x, _mm512_fmadd_ps(broadcast(slope * GELU_CUBIC), x_squared, broadcast(slope)));
    return reciprocal(_mm512_add_ps(broadcast(1.0f), exp2_16(u)));
}

// The operands' order keeps NaN: min and max return their second operand where one is NaN.
INLINE __m512 gelu16(__m512 x) {
    x = _mm512_max_ps(broadcast(-GELU_CLAMP), x);
    const __m512 clamped = _mm512_min_ps(broadcast(GELU_CLAMP), x);
    return _mm512_mul_ps(x, gelu_logistic(clamped, _mm512_mul_ps(clamped, clamped)));
}

INLINE __m512 gelu_derivative16(__m512 x) {
    x = _mm512_min_ps(broadcast(GELU_CLAMP), _mm512_max_ps(broadcast(-GELU_CLAMP), x));
    const __m512 x_squared = _mm512_mul_ps(x, x), s = gelu_logistic(x, x_squared);
    const __m512 slope = _mm512_fmadd_ps(broadcast(GELU_SLOPE * 3 * GELU_CUBIC), x_squared, broadcast(GELU_SLOPE));
    const __m512 ds = _mm512_fnmadd_ps(s, s, s);
    return _mm512_fmadd_ps(_mm512_mul_ps(x, slope), ds, s);
}

}  // namespace cpu::VARIANT
