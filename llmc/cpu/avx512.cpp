// avx512.cpp: 16 floats in a register.
// x86_64: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
#if defined(__x86_64__)
#define VARIANT avx512
#include "cpu/vector_ops.h"
#endif
