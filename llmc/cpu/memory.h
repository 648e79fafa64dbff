// memory.h: allocates host memory: device memory of the CPU backend, and scratch memory of its operations. A CUDA build
// has both too, because its tests compare gpu:: with cpu::.
#pragma once
#include <cstdint>

#include "base/common.h"

namespace cpu {

// Allocates zeroed memory, aligned to at least 64 bytes. The error message of a failure names the purpose and the size.
// counted: whether bytes_allocated includes the block.
void* allocate(int64_t bytes, const char* purpose, bool counted);
void release(void* pointer);
int64_t bytes_allocated();

// Scratch memory of the CPU backend; the contract is in device.h.
void reserve_scratch(int64_t bytes);
void* scratch(int64_t bytes);

}  // namespace cpu
