// units.h: the instructions of matrix_units.h as functions on arrays, for test_units.cpp, which must compile for every
// machine. units.cpp defines them. It is compiled twice: with the real instructions, and with emulated_units.h.
#pragma once
#include <cstdint>

struct Units {
    // out (32) = in (32), rounded to bf16.
    void (*round_pair_to_bf16)(uint16_t* out, const float* in);
    // sums (16) += the dot products of a (16 pairs of bf16 numbers) and b (16 pairs).
    void (*add_pair_products)(float* sums, const uint16_t* a, const uint16_t* b);
    // sums (16, 16) += a (16, 32) b (32, 16), on tiles. b is stored as 16 rows of 16 pairs.
    void (*tile_multiply)(float* sums, const uint16_t* a, const uint16_t* b);
};

extern const Units real_units, emulated_units;
