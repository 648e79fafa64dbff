// arrays.h: device arrays for tests of kernels.
#pragma once
#include <vector>

#include "cuda/simt.h"

// A device array. Its copies are synchronous.
template <class T>
struct Array {
    T* data = nullptr;
    size_t size;
    explicit Array(size_t size) : size(size) { cudaMalloc(&data, size * sizeof(T)); }
    explicit Array(const std::vector<T>& values) : Array(values.size()) {
        cudaMemcpy(data, values.data(), size * sizeof(T), cudaMemcpyHostToDevice);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { cudaFree(data); }
    std::vector<T> host() const {
        std::vector<T> values(size);
        cudaDeviceSynchronize();
        cudaMemcpy(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
        return values;
    }
};

template <class F>
std::vector<float> floats(int n, F f) {
    std::vector<float> values;
    for (int i = 0; i < n; i++) values.push_back(float(f(i)));
    return values;
}
