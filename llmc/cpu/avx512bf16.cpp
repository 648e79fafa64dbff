// avx512bf16.cpp: bf16 matmul, attention and head by vdpbf16ps.
// x86_64: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512 -mavx512bf16
#if defined(__x86_64__)
#define VARIANT avx512bf16
#include "cpu/matrix_head.h"
#endif
