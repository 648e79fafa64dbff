// dtype.h: the storage type bf16, the type Stream, and INSTANTIATE for templates on the element type.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
#define INLINE inline __attribute__((always_inline))

// This file uses __builtin_bit_cast. std::bit_cast is a function: the linker may share one copy of it between units
// that are compiled for different instruction sets, and device code may not call it.

// The upper half of a float. It has no arithmetic, only explicit conversions: kernels compute in float and round once.
struct bf16 {
    uint16_t bits;

    bf16() = default;
    // Rounds to nearest, ties to even. A NaN stays a quiet NaN. On a GPU every NaN becomes 0x7fff.
    HOST_DEVICE INLINE explicit bf16(float x) {
#if defined(__CUDA_ARCH__)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
        const uint32_t u = __builtin_bit_cast(uint32_t, x);
        bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
    }
    HOST_DEVICE INLINE explicit operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

// out = x, rounded to out's type. g++ 12 to 14 do not vectorize a loop with `omp simd` that assigns a bf16 made there.
template <class floatX>
HOST_DEVICE INLINE void round_to(floatX& out, float x) {
    out = floatX(x);
}

// Machine epsilon: the distance from 1 to the next larger value.
template <class floatX>
constexpr float epsilon() {
    return sizeof(floatX) == sizeof(float) ? 0x1p-23f : 0x1p-7f;
}

// The element type as a run-time value, for code that does not touch elements.
enum class Dtype { fp32, bf16 };

template <class floatX>
constexpr Dtype dtype_of = sizeof(floatX) == sizeof(float) ? Dtype::fp32 : Dtype::bf16;

constexpr const char* dtype_name(Dtype dtype) { return dtype == Dtype::fp32 ? "fp32" : "bf16"; }

// Calls f(float{}) or f(bf16{}), to dispatch to a template.
template <class F>
auto with_dtype(Dtype dtype, const F& f) {
    return dtype == Dtype::fp32 ? f(float{}) : f(bf16{});
}

// An in-order queue of device work: a CUDA stream. Unused on the CPU, where every call is synchronous.
using Stream = struct CUstream_st*;

// Instantiates an operation, declared in a header, for float and bf16: INSTANTIATE(cpu::layernorm_forward);
#define INSTANTIATE(op)                     \
    template decltype(op<float>) op<float>; \
    template decltype(op<bf16>) op<bf16>
// Declares that another source instantiates the operation: sources that include its definition do not compile it.
#define INSTANTIATED_ELSEWHERE(op)                 \
    extern template decltype(op<float>) op<float>; \
    extern template decltype(op<bf16>) op<bf16>
