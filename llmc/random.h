// random.h: random numbers as a function of (seed, stream, index), so that they do not depend on threads, ranks or
// order.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>

#include "dtype.h"

struct Philox {
    uint64_t seed;
    uint64_t stream;  // a tensor, a step: what must not share numbers

    // Four independent 32-bit words for each index.
    HOST_DEVICE std::array<uint32_t, 4> operator()(uint64_t index) const {
        uint32_t x[4] = {uint32_t(index), uint32_t(index >> 32), uint32_t(stream), uint32_t(stream >> 32)};
        uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
        for (int round = 0; round < 10; round++) {
            const uint64_t p0 = uint64_t(0xD2511F53) * x[0], p1 = uint64_t(0xCD9E8D57) * x[2];
            const uint32_t y0 = uint32_t(p1 >> 32) ^ x[1] ^ key[0], y2 = uint32_t(p0 >> 32) ^ x[3] ^ key[1];
            x[0] = y0, x[1] = uint32_t(p1), x[2] = y2, x[3] = uint32_t(p0);
            key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
        }
        return {x[0], x[1], x[2], x[3]};
    }

    // In [0, 1), a multiple of 2^-24.
    float uniform(uint64_t index) const { return float((*this)(index)[0] >> 8) * 0x1p-24f; }

    // Two standard normal numbers, elements 2 pair and 2 pair + 1, by Box and Muller.
    std::array<float, 2> normals(uint64_t pair) const {
        const auto x = (*this)(pair);
        const double radius = std::sqrt(-2.0 * std::log((x[0] + 0.5) * 0x1p-32));
        const double angle = 6.283185307179586 * x[1] * 0x1p-32;
        return {float(radius * std::cos(angle)), float(radius * std::sin(angle))};
    }

    float normal(uint64_t index) const { return normals(index / 2)[index % 2]; }
};
