// avx512.cpp: the vector forms, 16 floats in a register.
#if defined(__x86_64__)
#define VECTOR_FORMS avx512
#include "cpu/vector_ops.h"
#endif
