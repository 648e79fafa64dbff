// variants.h: declares every variant of the CPU operations, one namespace each. cpu::reference is the reference: plain
// loops that run on every machine. The other variants compute the same results faster, and the tests compare them with
// cpu::reference. cpu::<op> calls the variant that isa() selects (dispatch.cpp). Without a matrix unit the matmul is that
// of cpu::fp32 (matmul.cpp). Variants read neither amax nor an FP8 weight, which are up to cpu::<op> (fp8.cpp). The
// small operations on gradients, on losses and of Muon (norm.cpp, cross_entropy.cpp, muon.cpp) exist in cpu only.
//
// A variant need not define every operation. avx2, avx512 and neon are compiled from vector_ops.h, which has no matmul.
// avx512bf16 and amx have the bf16 matmul (matrix_matmul.h) and bf16 attention (matrix_attention.h) only.
#pragma once
#include "cpu/isa.h"
#include "ops/ops.h"

namespace cpu::reference {
#include "ops/ops.inc"
}
namespace cpu::avx2 {
#include "ops/ops.inc"
}
namespace cpu::avx512 {
#include "ops/ops.inc"
}
namespace cpu::neon {
#include "ops/ops.inc"
}
namespace cpu::avx512bf16 {
#include "ops/ops.inc"
}
namespace cpu::amx {
#include "ops/ops.inc"
}

// The bf16 variant of op for the matrix unit that isa() selects. isa() is avx512bf16 or amx, and has_matrix_variant
// holds.
#define MATRIX_VARIANT_OF(op) (isa() == Isa::amx ? amx::op : avx512bf16::op)

namespace cpu {
// Whether the build has variants for matrix units that take this element type.
#if defined(__x86_64__)
template <class floatX>
constexpr bool has_matrix_variant = sizeof(floatX) == 2;  // bf16
#else
template <class floatX>
constexpr bool has_matrix_variant = false;
#endif

// The largest scratch memory in bytes that an operation of the selected vector variant (avx2, avx512 or neon) takes,
// for OpenMP's current number of threads; 0 with CPU_ISA=plain.
int64_t vector_scratch_bytes(int B, int T, int C, int NH, int Vp);
}  // namespace cpu
