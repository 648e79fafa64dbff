// vector_moments.h: the optimizer's moments (ops.inc) as vectors; base/moments.h has the codes' definition.
#pragma once
#include "base/moments.h"
#include "cpu/vec.h"
#include "ops/ops.h"

namespace cpu::VARIANT {

constexpr int BLOCK_VECTORS = FLAT_ALIGN / VL;

template <WhichMoment WHICH>
using MomentFormat = std::conditional_t<WHICH == WhichMoment::first, SignedMoment, RootMoment>;

// Elements i .. i + VL of a block that begins at the moment's first element. base: code_base of the block.
template <MomentDtype DTYPE, WhichMoment WHICH>
static INLINE floatv load_moment(const Moment& moment, int i, uint32_t base) {
    if constexpr (DTYPE == MomentDtype::fp32) {
        return load(static_cast<const float*>(moment.data) + i);
    } else if constexpr (DTYPE == MomentDtype::bf16) {
        return load(static_cast<const bf16*>(moment.data) + i);
    } else {
        using Format = MomentFormat<WHICH>;
        const uintv codes = load_bytes(static_cast<const uint8_t*>(moment.data) + i);
        const uintv magnitude = WHICH == WhichMoment::first ? codes & Format::largest : codes;
        const uintv bits = (magnitude << Format::shift) + base, value = magnitude != 0 ? bits : uintv{};
        if constexpr (WHICH == WhichMoment::first) return (floatv)(value | ((codes << 24) & 0x80000000));
        return (floatv)value * (floatv)value;
    }
}
template <MomentDtype DTYPE, WhichMoment WHICH>
static INLINE uint32_t base_of_block(const Moment& moment) {
    if constexpr (DTYPE != MomentDtype::block8) return 0;
    return code_base<MomentFormat<WHICH>>(*moment.exponents);
}

// The random bits of elements i .. i + VL of a block with these words of Philox (base/moments.h).
static INLINE uintv moment_bits(const uint32_t* words, int i) {
    uintv lanes;
    for (int j = 0; j < VL; j++) lanes[j] = uint32_t(j) * 0x9e3779b9u;
    const uintv x = lanes + (words[i / 16] + uint32_t(i) * 0x9e3779b9u);
    return (x ^ x >> 16) * 0x7feb352du;
}

// Stores them in fp32 or bf16, rounded by the block's words of Philox.
template <MomentDtype DTYPE, WhichMoment WHICH>
static INLINE void store_moment(const Moment& moment, int i, floatv x, const uint32_t* words) {
    if constexpr (DTYPE == MomentDtype::fp32) {
        store(static_cast<float*>(moment.data) + i, x);
    } else {
        const uintv random = moment_bits(words, i), bits = WHICH == WhichMoment::first ? random >> 16 : random & 0xffff;
        *reinterpret_cast<shortv_memory*>(static_cast<bf16*>(moment.data) + i) = round_randomly(x, bits);
    }
}

// Stores a whole block as codes: of the first moment, or of the second one's roots.
template <WhichMoment WHICH>
static INLINE void store_codes(const Moment& moment, const floatv (&x)[BLOCK_VECTORS], const uint32_t* words) {
    using Format = MomentFormat<WHICH>;
    constexpr bool is_first = WHICH == WhichMoment::first;
    intv magnitude[BLOCK_VECTORS], largest = {};
    for (int j = 0; j < BLOCK_VECTORS; j++) {
        magnitude[j] = (intv)x[j] & 0x7fffffff;
        largest = max(largest, magnitude[j]);  // floats that are not negative have the order of their bits
    }
    largest = max_of_lanes(largest, std::make_integer_sequence<int, VL>{});
    const uint8_t exponent = block_exponent<Format>(__builtin_bit_cast(float, largest[0]));
    const int base = int(code_base<Format>(exponent));
    *moment.exponents = exponent;
    for (int j = 0; j < BLOCK_VECTORS; j++) {
        const uintv random = moment_bits(words, j * VL);
        const intv below = is_first ? (intv)(random >> 12) : (intv)random & 0x7ffff;
        const intv code = (magnitude[j] - base + below) >> Format::shift;
        uint8_t* const to = static_cast<uint8_t*>(moment.data) + j * VL;
        if constexpr (is_first)
            store_bytes(to, min(max(code, intv{}), intv{} + int(Format::largest)) | ((intv)x[j] >> 24 & 0x80));
        else
            store_bytes(to, max(code, min(magnitude[j], intv{} + 1)));
    }
}

}  // namespace cpu::VARIANT
