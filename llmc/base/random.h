// random.h: counter-based random numbers, functions of (seed, stream, index), not of threads, ranks or order.
//
// The seven uses of the user's seed have separate streams. The first column is the upper 16 bits of the stream number;
// the value after the colon fills the lower bits:
//   0x0000  initial weights: tensor << 32 | layer (model/params.cpp)
//   0x3e3b  rows of tokens that --vocab-size adds: token (checkpoint/hf.cpp)
//   0x5ada  stochastic rounding of the weights: step (ROUNDING_STREAMS, ops/ops.h)
//   0x5adb  stochastic rounding of the optimizer's moments: step (MOMENT_STREAMS, ops/ops.h)
//   0x5adc  stochastic rounding of the gradients' sums: addition << 32 | step (sum_stream, ops/ops.h)
//   0x8000  sampling of generated tokens: number of the text (infer/generate.cpp)
//   0xda7a  order of the training data: epoch (data/dataloader.cpp)
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/dtype.h"

// The logarithm, sine and cosine below have errors of at most 2e-6. They use only +, -, x and /, so unlike library
// functions they give the same bits on every processor, and a compiler can vectorize them. -ffp-contract=off (Makefile)
// prevents fused multiply-add, which rounds once instead of twice.

// ln((x + 1/2) / 2^32).
inline float log_fraction(uint32_t x) {
    // (x + 1/2) / 2^32 = 2^exponent m, with m from sqrt(1/2) to sqrt(2), where ln m = 2 artanh((m - 1) / (m + 1)).
    const uint32_t bits = std::bit_cast<uint32_t>(float(x) + 0.5f), half = 0x3f3504f3;  // sqrt(1/2)
    const int exponent = int(bits - half) >> 23;
    const float m = std::bit_cast<float>(bits - (uint32_t(exponent) << 23));
    const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    const float series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
    return float(exponent - 32) * 0.693147181f + 2.0f * s * series;
}

// Sine and cosine of 2 pi x / 2^32: a series around the nearest multiple of pi / 2, at most pi / 4 away.
inline void sine_and_cosine(uint32_t x, float& sine, float& cosine) {
    const uint32_t quarter = (x + (1u << 29)) >> 30;
    const float a = float(int32_t(x - (quarter << 30))) * 1.46291808e-9f, z = a * a;
    const float s = a * (1.0f + z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880)))));
    const float c = 1.0f + z * (-1.0f / 2 + z * (1.0f / 24 + z * (-1.0f / 720 + z * (1.0f / 40320))));
    const float along = quarter & 1 ? c : s, across = quarter & 1 ? s : c;
    sine = quarter & 2 ? -along : along;
    cosine = (quarter + 1) & 2 ? -across : across;
}

// Two standard normal numbers from two random words.
inline std::array<float, 2> box_muller(uint32_t x, uint32_t y) {
    const float radius = std::sqrt(-2.0f * log_fraction(x));
    float sine, cosine;
    sine_and_cosine(y, sine, cosine);
    return {radius * cosine, radius * sine};
}

struct Philox {
    uint64_t seed;
    uint64_t stream;  // streams (of tensors, steps, ...) share no numbers

    // Four independent 32-bit words for each index.
    std::array<uint32_t, 4> operator()(uint64_t index) const {
        uint32_t x[4];
        words(x, index);
        return {x[0], x[1], x[2], x[3]};
    }

    HOST_DEVICE void words(uint32_t (&x)[4], uint64_t index) const {
        x[0] = uint32_t(index), x[1] = uint32_t(index >> 32), x[2] = uint32_t(stream), x[3] = uint32_t(stream >> 32);
        uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
        for (int round = 0; round < 10; round++) {
            const uint64_t p0 = uint64_t(0xD2511F53) * x[0], p1 = uint64_t(0xCD9E8D57) * x[2];
            const uint32_t y0 = uint32_t(p1 >> 32) ^ x[1] ^ key[0], y2 = uint32_t(p0 >> 32) ^ x[3] ^ key[1];
            x[0] = y0, x[1] = uint32_t(p1), x[2] = y2, x[3] = uint32_t(p0);
            key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
        }
    }

    // 16 random bits for each element; eight elements share the words of one index.
    HOST_DEVICE static uint32_t bits16(const uint32_t (&x)[4], int e) { return x[e / 2] >> e % 2 * 16 & 0xffff; }
    uint32_t bits16(uint64_t element) const {
        uint32_t x[4];
        words(x, element / 8);
        return bits16(x, int(element % 8));
    }

    // Two standard normal numbers: elements 2 pair and 2 pair + 1.
    std::array<float, 2> normals(uint64_t pair) const {
        uint32_t x[4];
        words(x, pair);
        return box_muller(x[0], x[1]);
    }

    float normal(uint64_t index) const { return normals(index / 2)[index % 2]; }
};

// Stochastic rounding to bf16 with 16 random bits. The probability of rounding up in magnitude is the distance from the
// lower neighbour, so the expected value is exactly x. A value that bf16 represents stays unchanged. From the largest
// finite bf16 on there is no upper neighbour: x is then rounded to nearest, as are infinities and NaN.
HOST_DEVICE inline bf16 round_randomly(float x, uint32_t random) {
    const uint32_t u = __builtin_bit_cast(uint32_t, x);
    bf16 rounded(x);
    if ((u & 0x7fffffff) < 0x7f7f0000) rounded.bits = uint16_t((u + random) >> 16);
    return rounded;
}
