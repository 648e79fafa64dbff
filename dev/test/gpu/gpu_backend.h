// gpu_backend.h: runs the shared cases of an operation (cases_<op>.h) on the GPU, or in the emulator.
#pragma once
#include <cmath>
#include <map>
#include <vector>

#include "gpu/on_gpu.h"
#include "support/cases.h"

// Blocks of device memory, each for tensors of one size. The blocks are used again: the emulator protects every block
// that was ever allocated around each call, so new blocks for each call would make the calls slow.
class DevicePool {
    std::multimap<int64_t, void*> unused;

  public:
    DevicePool() = default;
    DevicePool(const DevicePool&) = delete;
    ~DevicePool() {
        for (const auto& [bytes, block] : unused) cudaFree(block);
    }

    static DevicePool& of_all_tests() {
        static DevicePool pool;
        return pool;
    }

    void* take(int64_t bytes) {
        if (auto found = unused.find(bytes); found != unused.end()) return unused.extract(found).mapped();
        void* block = nullptr;
        check_cuda(cudaMalloc(&block, size_t(bytes)));
        return block;
    }
    void give_back(int64_t bytes, void* block) { unused.emplace(bytes, block); }
};

// The device's copies of the tensors that one call uses. A tensor that is passed twice has one copy, so that an
// operation may work in place.
class DeviceCopies {
    struct Copy {
        void* host;
        int64_t bytes;
        void* device;
        bool is_written;
    };
    std::vector<Copy> copies;

    void* copy(const void* host, int64_t bytes, bool is_written) {
        for (Copy& c : copies)
            if (c.host == host) {
                c.is_written |= is_written;
                return c.device;
            }
        void* device = DevicePool::of_all_tests().take(bytes);
        copies.push_back({const_cast<void*>(host), bytes, device, is_written});
        check_cuda(cudaMemcpy(device, host, size_t(bytes), cudaMemcpyHostToDevice));
        return device;
    }

  public:
    DeviceCopies() = default;
    DeviceCopies(const DeviceCopies&) = delete;
    ~DeviceCopies() {
        for (const Copy& c : copies) DevicePool::of_all_tests().give_back(c.bytes, c.device);
    }

    template <class T>
    T* argument(Tensor<T>& tensor) {
        return static_cast<T*>(copy(tensor.data(), tensor.bytes(), true));
    }
    template <class T>
    const T* argument(const Tensor<T>& tensor) {
        return static_cast<T*>(copy(tensor.data(), tensor.bytes(), false));
    }
    template <class X>
    auto argument(X* tensor) {
        return tensor ? argument(*tensor) : nullptr;
    }
    template <class T>
    T argument(T scalar) {
        return scalar;
    }

    void back() const {
        for (const Copy& c : copies)
            if (c.is_written) check_cuda(cudaMemcpy(c.host, c.device, size_t(c.bytes), cudaMemcpyDeviceToHost));
    }
};

struct GpuBackend {
    template <class Op, class... Args>
    void call(const Op& op, Args&&... args) const {
        DeviceCopies copies;
        op(copies.argument(args)..., nullptr);
        copies.back();
    }

    template <class Check>
    void on_each_variant(const Check& check) const {
        check();
    }

    template <class Run>
    void compare(const Outputs& definition, const Run& run) const {
        expect_close("", run(), definition);
    }
};

// Fills the scratch memory with NaN before each call. Otherwise results of the previous call could hide that this call
// does not write them.
struct WithPoisonedScratch : GpuBackend {
    int64_t bytes;
    template <class Op, class... Args>
    void call(const Op& op, Args&&... args) const {
        check_cuda(cudaMemset(device_scratch(bytes), 0xff, size_t(bytes)));
        GpuBackend::call(op, args...);
    }
};

// Returns the absolute error of a sum of K products that an epilogue of cuBLASLt for bf16 multiplies with GELU's
// derivative, (1 + t) / 2 + x (1 - t^2) u'(x) / 2 with t = tanh(u(x)). On compute capability 9.0 it computes t by
// tanh.approx, whose error is at most 2^-11 |t| (PTX ISA). That of the derivative is then at most
// 2^-11 |1/2 - x t u'(x)|, less than 20 * 2^-11 for |x| < 5.3, and the sum is below 5 sqrt(K).
inline float fused_gelu_error(int K) {
    const float error = 100 * 0x1p-11f * std::sqrt(float(K));
#ifdef SIMT_EMULATOR
    return simt::config.gpu_math ? error : 0.0f;
#else
    return error;
#endif
}
