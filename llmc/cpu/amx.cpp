// amx.cpp: the amx variants: bf16 matmul and attention on AMX tiles.
#if defined(__x86_64__)
#define MATRIX_VARIANT amx
#define MATRIX_TILES
#include "cpu/matrix_attention.h"
#include "cpu/matrix_matmul.h"
#endif
