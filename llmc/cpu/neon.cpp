// neon.cpp: the neon variants of vector_ops.h, for arm64: 4 floats in a register.
#if defined(__aarch64__)
#define VECTOR_VARIANT neon
#include "cpu/vector_ops.h"
#endif
