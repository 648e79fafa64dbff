// amx.cpp: the bf16 products and attention on AMX tiles.
#if defined(__x86_64__)
#define MATRIX_FORM amx
#define MATRIX_TILES
#include "cpu/matrix_attention.h"
#include "cpu/matrix_matmul.h"
#endif
