// forms.h: the forms in which the CPU has an operation. plain is the definition, as simple as possible, on every
// machine; the others compute the same faster and are compared with it by the tests. cpu::<op> calls the one that
// isa() allows (dispatch.cpp; matmul.cpp for the products).
//
// Not every form defines every operation: avx2 and avx512 come from vector_ops.h, amx has the products and, for bf16,
// attention.
#pragma once
#include "../ops.h"

namespace cpu::plain {
#include "../ops.inc"
}
namespace cpu::avx2 {
#include "../ops.inc"
}
namespace cpu::avx512 {
#include "../ops.inc"
}
namespace cpu::amx {
#include "../ops.inc"
}

namespace cpu {
// What the operations of avx2 and avx512 take of scratch at most; threads as OpenMP has them now.
int64_t vector_scratch_bytes(int B, int T, int C, int NH, int Vp);
}  // namespace cpu
