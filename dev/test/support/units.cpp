// units.cpp: the functions of units.h, with the real instructions or, with -DEMULATED_UNITS, with emulated_units.h.
#if defined(__x86_64__)
#define MATRIX_TILES
#if defined(EMULATED_UNITS)
#define MATRIX_VARIANT emulated_variant
#define UNITS emulated_units
#else
#define MATRIX_VARIANT real_variant
#define UNITS real_units
#endif
#include "cpu/microkernel_bf16.h"
#include "support/units.h"

const Units UNITS = {
    [](uint16_t* out, const float* in) {
        _mm512_storeu_si512(out, cpu::round_pair_to_bf16(_mm512_loadu_ps(in), _mm512_loadu_ps(in + 16)));
    },
    [](float* sums, const uint16_t* a, const uint16_t* b) {
        _mm512_storeu_ps(sums,
                         cpu::add_pair_products(_mm512_loadu_ps(sums), _mm512_loadu_si512(a), _mm512_loadu_si512(b)));
    },
    [](float* sums, const uint16_t* a, const uint16_t* b) {
        const cpu::MATRIX_VARIANT::TileRegisters registers;
        TILE_LOAD(0, sums, 64);
        TILE_LOAD(1, a, 64);
        TILE_LOAD(2, b, 64);
        TILE_MULTIPLY(0, 1, 2);
        TILE_STORE(0, sums, 64);
    },
};
#endif
