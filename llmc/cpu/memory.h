// memory.h: allocates host memory: device memory of the CPU backend, and scratch memory of its operations. A CUDA build
// has both too, because its tests compare gpu:: with cpu::.
#pragma once
#include <cstdint>

#include "base/common.h"
#include "base/dtype.h"

namespace cpu {

// Allocates zeroed memory, aligned to at least 64 bytes. The error message of a failure names the purpose and the size.
// counted: whether bytes_allocated includes the block.
void* allocate(int64_t bytes, const char* purpose, bool counted);
void release(void* pointer);
int64_t bytes_allocated();

// Scratch memory of the CPU backend; the contract is in device.h.
void reserve_scratch(int64_t bytes);
void* scratch(int64_t bytes);

// Hands out arrays from memory at base, each at a multiple of `alignment`. With base null it only counts their bytes.
struct Arena {
    void* base;
    int64_t alignment = 64, bytes = 0;

    template <class T>
    INLINE T* take(int64_t count) {
        T* array = base ? reinterpret_cast<T*>(static_cast<char*>(base) + bytes) : nullptr;
        bytes += round_up<int64_t>(count * int64_t(sizeof(T)), alignment);
        return array;
    }
};

}  // namespace cpu
