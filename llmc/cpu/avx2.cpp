// avx2.cpp: the avx2 variants of vector_ops.h: 8 floats in a register.
#if defined(__x86_64__)
#define VECTOR_VARIANT avx2
#include "cpu/vector_ops.h"
#endif
