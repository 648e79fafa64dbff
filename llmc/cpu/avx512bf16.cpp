// avx512bf16.cpp: the bf16 products and attention by vdpbf16ps.
#if defined(__x86_64__)
#define MATRIX_FORM avx512bf16
#include "cpu/matrix_attention.h"
#include "cpu/matrix_matmul.h"
#endif
