// dtype.h: bf16, a storage type, and what every operation is written with: Stream and INSTANTIATE.
#pragma once
#include <cstdint>

#if defined(__CUDACC__) || defined(SIMT_EMULATOR)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// __builtin_bit_cast: std::bit_cast would be a function, which the linker may share between units of other instruction
// sets, and which device code may not call.

// The upper half of a float. No arithmetic, and conversions are explicit: kernels widen, compute in float, round once.
struct bf16 {
    uint16_t bits;

    bf16() = default;
    // Rounds to nearest, ties to even; a NaN stays a (quiet) NaN: which one only a GPU forgets, all are 0x7fff there.
    HOST_DEVICE __attribute__((always_inline)) explicit bf16(float x) {
#if defined(__CUDA_ARCH__)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
        const uint32_t u = __builtin_bit_cast(uint32_t, x);
        bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
    }
    HOST_DEVICE __attribute__((always_inline)) explicit operator float() const {
        return __builtin_bit_cast(float, uint32_t(bits) << 16);
    }
};
static_assert(sizeof(bf16) == 2);

// Distance from 1 to the next larger value.
template <class floatX>
constexpr float epsilon();
template <>
constexpr float epsilon<float>() {
    return 0x1p-23f;
}
template <>
constexpr float epsilon<bf16>() {
    return 0x1p-7f;
}

// float or bf16 as a value, for code that touches no element.
enum class Dtype { fp32, bf16 };

template <class floatX>
constexpr Dtype dtype_of = sizeof(floatX) == sizeof(float) ? Dtype::fp32 : Dtype::bf16;

constexpr const char* dtype_name(Dtype dtype) { return dtype == Dtype::fp32 ? "fp32" : "bf16"; }

// f(float{}) or f(bf16{}), to call templates.
template <class F>
auto with_dtype(Dtype dtype, const F& f) {
    return dtype == Dtype::fp32 ? f(float{}) : f(bf16{});
}

// A queue of device work, in order: a CUDA stream, or nothing on the CPU, where a call returns when its work is done.
using Stream = struct CUstream_st*;

// Both instances of an operation that is declared in a header: INSTANTIATE(cpu::layernorm_forward);
#define INSTANTIATE(op)                     \
    template decltype(op<float>) op<float>; \
    template decltype(op<bf16>) op<bf16>
