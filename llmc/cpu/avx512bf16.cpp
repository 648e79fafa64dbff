// avx512bf16.cpp: the avx512bf16 variants: bf16 matmul and attention by vdpbf16ps.
#if defined(__x86_64__)
#define MATRIX_VARIANT avx512bf16
#include "cpu/matrix_attention.h"
#include "cpu/matrix_matmul.h"
#endif
