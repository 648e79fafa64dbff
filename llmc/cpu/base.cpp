// base.cpp: the variant of every CPU: 4 floats in a register, SSE2 on x86-64 and NEON on arm64.
#define VARIANT base
#include "cpu/vector_ops.h"
