// forms.h: declares the implementations (forms) of each CPU operation. plain is the definition, as simple as possible,
// and runs on every machine. The others compute the same faster, and tests compare them with plain. cpu::<op> calls the
// one that isa() allows (dispatch.cpp; matmul.cpp for the products).
//
// Not every form defines every operation: avx2, avx512 and neon come from vector_ops.h; avx512bf16 and amx have the
// products and attention of bf16 (matrix_matmul.h, matrix_attention.h).
#pragma once
#include "cpu/isa.h"
#include "ops/ops.h"

namespace cpu::plain {
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

// The form of op for the matrix unit that isa() has, avx512bf16 at least; of bf16 operations only (has_matrix_form).
#define MATRIX_FORM_OF(op) (isa() == Isa::amx ? amx::op : avx512bf16::op)

namespace cpu {
#if defined(__x86_64__)
template <class floatX>
constexpr bool has_matrix_form = sizeof(floatX) == 2;  // bf16
#else
template <class floatX>
constexpr bool has_matrix_form = false;
#endif

// Largest scratch memory that an operation of avx2, avx512 or neon uses, with OpenMP's current number of threads.
int64_t vector_scratch_bytes(int B, int T, int C, int NH, int Vp);
}  // namespace cpu
