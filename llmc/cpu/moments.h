// moments.h: blocks of the optimizer's moments (ops.inc), read and written in plain loops.
#pragma once
#include <algorithm>
#include <cmath>

#include "base/moments.h"
#include "base/random.h"
#include "ops/ops.h"

namespace cpu {

// The random bits (moment_bits) of a block from element `index` on, a multiple of FLAT_ALIGN.
struct MomentBits {
    uint32_t bits[FLAT_ALIGN];

    MomentBits(const Philox& random, int64_t index) {
        uint32_t words[4];
        random.words(words, uint64_t(index / FLAT_ALIGN));
        for (uint32_t i = 0; i < FLAT_ALIGN; i++) bits[i] = moment_bits(words[i / 16], i);
    }
};

// The block from element `at` on.
template <WhichMoment WHICH>
void read_block(float (&out)[FLAT_ALIGN], const Moment& moment, int64_t at) {
    using Format = std::conditional_t<WHICH == WhichMoment::first, SignedMoment, RootMoment>;
    const Moment from = moment.from(at);
    if (moment.dtype == MomentDtype::fp32) {
        std::copy_n(static_cast<const float*>(from.data), FLAT_ALIGN, out);
    } else if (moment.dtype == MomentDtype::bf16) {
        for (int64_t i = 0; i < FLAT_ALIGN; i++) out[i] = float(static_cast<const bf16*>(from.data)[i]);
    } else {
        for (int64_t i = 0; i < FLAT_ALIGN; i++) {
            const float x = moment_value<Format>(static_cast<const uint8_t*>(from.data)[i], *from.exponents);
            out[i] = WHICH == WhichMoment::first ? x : x * x;
        }
    }
}

// Rounds by the bits, or to nearest without them.
template <WhichMoment WHICH>
void write_block(const Moment& moment, int64_t at, const float (&values)[FLAT_ALIGN], const MomentBits* bits) {
    using Format = std::conditional_t<WHICH == WhichMoment::first, SignedMoment, RootMoment>;
    const Moment to = moment.from(at);
    if (moment.dtype == MomentDtype::fp32) {
        std::copy_n(values, FLAT_ALIGN, static_cast<float*>(to.data));
    } else if (moment.dtype == MomentDtype::bf16) {
        auto* const out = static_cast<bf16*>(to.data);
        for (int64_t i = 0; i < FLAT_ALIGN; i++)
            out[i] = bits ? round_randomly(values[i], Format::below_bf16(bits->bits[i])) : bf16(values[i]);
    } else {
        float x[FLAT_ALIGN], largest = 0.0f;
        for (int64_t i = 0; i < FLAT_ALIGN; i++) {
            x[i] = WHICH == WhichMoment::first ? values[i] : std::sqrt(values[i]);
            largest = std::max(largest, std::fabs(x[i]));
        }
        *to.exponents = block_exponent<Format>(largest);
        auto* const out = static_cast<uint8_t*>(to.data);
        for (int64_t i = 0; i < FLAT_ALIGN; i++)
            out[i] =
                moment_code<Format>(x[i], *to.exponents, bits ? Format::below_code(bits->bits[i]) : TO_NEAREST<Format>);
    }
}

}  // namespace cpu
