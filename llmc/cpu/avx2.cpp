// avx2.cpp: 8 floats in a register.
// x86_64: -mavx2 -mfma -mf16c
#if defined(__x86_64__)
#define VARIANT avx2
#include "cpu/vector_ops.h"
#endif
