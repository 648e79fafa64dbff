// neon.cpp: the vector forms for arm64, 4 floats in a register.
#if defined(__aarch64__)
#define VECTOR_FORMS neon
#include "cpu/vector_ops.h"
#endif
