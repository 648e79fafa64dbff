// avx512.cpp: the avx512 variants of vector_ops.h: 16 floats in a register.
#if defined(__x86_64__)
#define VECTOR_VARIANT avx512
#include "cpu/vector_ops.h"
#endif
