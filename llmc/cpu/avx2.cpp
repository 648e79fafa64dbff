// avx2.cpp: the vector forms, 8 floats in a register.
#if defined(__x86_64__)
#define VECTOR_FORMS avx2
#include "cpu/vector_ops.h"
#endif
