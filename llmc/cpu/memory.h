// memory.h: host memory: the CPU backend's device memory, and the working memory of its operations, which a CUDA build
// has too (its tests compare gpu with cpu).
#pragma once
#include <cstdint>

namespace cpu {

// Zeroed, aligned to 64 bytes at least; fails with the purpose and what was asked for. counted: by bytes_allocated.
void* allocate(int64_t bytes, const char* purpose, bool counted);
void release(void* pointer);
int64_t bytes_allocated();
int64_t available_bytes();  // that allocate could still give

int64_t limit_of_control_groups();  // of this process and those above it; INT64_MAX where there is none

// device.h's reserve_scratch and scratch for operations on the CPU.
void reserve_scratch(int64_t bytes);
void* scratch(int64_t bytes);

}  // namespace cpu
