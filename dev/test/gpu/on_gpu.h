// on_gpu.h: copies of test tensors in the memory of the GPU or of the emulator.
#pragma once
#include "cuda/simt.h"
#include "support/test.h"

#ifdef SIMT_EMULATOR
#include "internal.h"
constexpr bool emulated = true;
inline void set_fused_epilogues(bool there) { simt::config.fused_epilogues = there; }
inline void take_time(float ms, Stream stream) {
    simt::enqueue_work([] {}, ms, stream);
}
#else
constexpr bool emulated = false;
inline void set_fused_epilogues(bool) {}  // the GPU's library decides
inline void take_time(float, Stream) {}   // kernels take their own
#endif

inline void check_cuda(cudaError_t error) {
    if (error != cudaSuccess) fail(EXIT_INTERNAL, "CUDA: %s", cudaGetErrorString(error));
}

template <class T>
void set_bytes(T* to, int value, size_t count, Stream stream) {
    check_cuda(cudaMemsetAsync(to, value, count * sizeof(T), stream));
}

// A device copy of a tensor, for the lifetime of this object. back() copies it to the tensor.
template <class T>
struct OnGpu {
    Tensor<T>& host;
    T* device = nullptr;
    explicit OnGpu(Tensor<T>& host) : host(host) {
        check_cuda(cudaMalloc(&device, size_t(host.size()) * sizeof(T)));
        check_cuda(cudaMemcpy(device, host.data(), size_t(host.size()) * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~OnGpu() { cudaFree(device); }
    OnGpu(const OnGpu&) = delete;
    operator T*() const { return device; }
    void back() {
        check_cuda(cudaMemcpy(host.data(), device, size_t(host.size()) * sizeof(T), cudaMemcpyDeviceToHost));
    }
};
