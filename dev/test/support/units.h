// units.h: the instructions of matrix_units.h on arrays, so that a test which every machine can run calls them. Defined
// by units.cpp, compiled twice: for the real instructions, and for those of emulated_units.h.
#pragma once
#include <cstdint>

struct Units {
    // 32 floats as bf16.
    void (*narrow)(uint16_t* out, const float* in);
    // 16 sums and 16 pairs of bf16 numbers each.
    void (*add_pair_products)(float* sums, const uint16_t* a, const uint16_t* b);
    // sums (16, 16) += a (16, 32) b (16 rows of 16 pairs), on tiles.
    void (*tile_multiply)(float* sums, const uint16_t* a, const uint16_t* b);
};

extern const Units real_units, emulated_units;
