// amx.cpp: bf16 matmul, attention and head on AMX tiles.
// x86_64: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512 -mavx512bf16
// x86_64: -mamx-tile -mamx-bf16
#if defined(__x86_64__)
#define VARIANT amx
#define MATRIX_TILES
#include "cpu/matrix_head.h"
#endif
