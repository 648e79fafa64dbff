// types.h: the types of kernels' elements: bf16, the codes of FP8, and Vec. The only header of llmc that dev/simt
// includes.
#pragma once
#include "base/fp8.h"

// COUNT elements of T that a thread accesses at once. 16 bytes are the widest access.
template <class T, int COUNT = int(16 / sizeof(T))>
struct alignas(COUNT * sizeof(T)) Vec {
    static constexpr int size = COUNT;
    T values[size];
    HOST_DEVICE T& operator[](int i) { return values[i]; }
    HOST_DEVICE const T& operator[](int i) const { return values[i]; }
};
