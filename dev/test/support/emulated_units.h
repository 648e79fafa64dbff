// emulated_units.h: the bf16 instructions of llmc/cpu/matrix_microkernel.h in plain C++, as Intel's manual defines them
// (Software Developer's Manual volume 2: VCVTNE2PS2BF16, VDPBF16PS, LDTILECFG, TDPBF16PS). With them the AMX and
// AVX512-BF16 sources run on any machine with AVX-512, also under AddressSanitizer. Compile with -DEMULATED_UNITS, and
// include this file first.
#pragma once
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace emulated {
namespace {

typedef float float16 __attribute__((vector_size(64)));
typedef uint32_t uint16 __attribute__((vector_size(64)));

// Replaces denormal numbers by a zero of the same sign.
inline float16 flush(float16 x) {
    const uint16 bits = (uint16)x;
    return (float16)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// a * b + c, rounded once to nearest even; denormal operands and results are zero. The real units do so whatever MXCSR
// says. This instruction obeys MXCSR, so MXCSR is set to these rules while it runs. fmaf() followed by flush() differs
// just below 2^-126: fmaf() rounds up to a normal number, which flush() keeps, and the units give zero.
inline float16 fma_flushed(float16 a, float16 b, float16 c) {
    const unsigned mxcsr = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    asm volatile("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));  // which NaN wins depends on the order
    _mm_setcsr(mxcsr);
    return c;
}

// The even and the odd bf16 numbers of 16 pairs as floats.
inline float16 even(__m512i pairs) { return (float16)((uint16)pairs << 16); }
inline float16 odd(__m512i pairs) { return (float16)((uint16)pairs & 0xffff0000); }

inline uint16 rounded(float16 x) {
    const uint16 bits = (uint16)flush(x), high = bits >> 16;
    return x == x ? (bits + 0x7fff + (high & 1)) >> 16 : high | 0x40;  // a NaN stays a quiet NaN
}

inline __m512i round_pair_to_bf16(__m512 first, __m512 second) {
    const uint16 low = rounded((float16)first), high = rounded((float16)second);
    uint16_t bits[32];
    for (int i = 0; i < 16; i++) bits[i] = uint16_t(low[i]), bits[16 + i] = uint16_t(high[i]);
    __m512i x;
    memcpy(&x, bits, sizeof x);
    return x;
}

inline __m512 add_pair_products(__m512 sums, __m512i a, __m512i b) {
    const float16 after_odd = fma_flushed(odd(a), odd(b), (float16)sums);
    return (__m512)fma_flushed(even(a), even(b), after_odd);
}

// ---- Tiles. Where the processor would raise a fault, the program prints a message and aborts.

struct Tiles {
    int rows[8] = {}, row_bytes[8] = {};
    alignas(64) uint8_t data[8][16][64] = {};
};

inline Tiles& tiles() {
    static thread_local Tiles registers;
    return registers;
}

[[noreturn]] inline void fault(const char* what) {
    fprintf(stderr, "emulated AMX: %s\n", what);
    abort();
}

// config: 64 bytes as LDTILECFG reads them.
inline void tile_config(const void* config) {
    const auto* bytes = static_cast<const uint8_t*>(config);
    if (bytes[0] != 1) fault("LDTILECFG: the palette is not 1");
    Tiles& t = tiles();
    t = Tiles{};
    for (int i = 0; i < 8; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
        t.rows[i] = bytes[48 + i], t.row_bytes[i] = row_bytes;
        if (t.rows[i] > 16 || row_bytes > 64 || (t.rows[i] == 0) != (row_bytes == 0))
            fault("LDTILECFG: rows or bytes per row");
    }
}

inline void check_tile(int tile) {
    if (tile < 0 || tile > 7 || tiles().rows[tile] == 0) fault("a tile is not configured");
}

inline void tile_release() { tiles() = Tiles{}; }

inline void tile_zero(int tile) {
    check_tile(tile);
    memset(tiles().data[tile], 0, sizeof tiles().data[tile]);
}

inline void tile_load(int tile, const void* rows, int64_t stride) {
    tile_zero(tile);
    Tiles& t = tiles();
    for (int r = 0; r < t.rows[tile]; r++)
        memcpy(t.data[tile][r], static_cast<const char*>(rows) + r * stride, size_t(t.row_bytes[tile]));
}

inline void tile_store(int tile, void* rows, int64_t stride) {
    check_tile(tile);
    const Tiles& t = tiles();
    for (int r = 0; r < t.rows[tile]; r++)
        memcpy(static_cast<char*>(rows) + r * stride, t.data[tile][r], size_t(t.row_bytes[tile]));
}

// Sums the products of even elements and of odd elements separately. Adds the two sums, then adds the old sum.
inline void tile_multiply(int sums, int a, int b) {
    for (const int tile : {sums, a, b}) check_tile(tile);
    Tiles& t = tiles();
    if (sums == a || sums == b || a == b) fault("TDPBF16PS: two operands are the same tile");
    if (t.row_bytes[a] / 4 != t.rows[b] || t.rows[sums] != t.rows[a] || t.row_bytes[sums] != t.row_bytes[b])
        fault("TDPBF16PS: the shapes of the tiles do not fit together");
    for (int m = 0; m < t.rows[sums]; m++) {
        float16 even_sum = {}, odd_sum = {}, row;
        for (int k = 0; k < t.row_bytes[a] / 4; k++) {
            uint32_t pair;
            memcpy(&pair, t.data[a][m] + 4 * k, sizeof pair);
            const __m512i left = (__m512i)(uint16{} + pair), right = _mm512_load_si512(t.data[b][k]);
            even_sum = fma_flushed(even(left), even(right), even_sum);
            odd_sum = fma_flushed(odd(left), odd(right), odd_sum);
        }
        memcpy(&row, t.data[sums][m], sizeof row);
        row = flush(flush(row) + flush(even_sum + odd_sum));
        memcpy(t.data[sums][m], &row, size_t(t.row_bytes[sums]));
    }
}

}  // namespace
}  // namespace emulated

#if defined(EMULATED_UNITS)
namespace cpu {
using emulated::add_pair_products, emulated::round_pair_to_bf16;
}
#define TILE_CONFIG(config) emulated::tile_config(&config)
#define TILE_RELEASE() emulated::tile_release()
#define TILE_ZERO(tile) emulated::tile_zero(tile)
#define TILE_LOAD(tile, rows, stride) emulated::tile_load(tile, rows, stride)
#define TILE_STORE(tile, rows, stride) emulated::tile_store(tile, rows, stride)
#define TILE_MULTIPLY(sums, a, b) emulated::tile_multiply(sums, a, b)
#endif
