// cuda_check.h: what CUDA and cuBLASLt answer, checked: the call, its place and the reason.
#pragma once
#ifndef SIMT_EMULATOR  // which has put its own in front
#include <cuda_runtime.h>
#endif
#include <cublasLt.h>

#include "base/common.h"
#include "base/device.h"

// Asynchronous errors surface here too: the call that reports one need not be the one that made it.
#define CUDA_CHECK(call) check_cuda_call((call), #call, __FILE__, __LINE__)
#define CUBLAS_CHECK(call) check_cublas_call((call), #call, __FILE__, __LINE__)

inline void check_cuda_call(cudaError_t error, const char* call, const char* file, int line) {
    const bool of_a_kernel = error >= 700 && error < 800;  // some kernel's, queued before this call
    if (error != cudaSuccess)
        fail(EXIT_INTERNAL, "%s at %s:%d: %s (%s)%s", call, file, line, cudaGetErrorString(error),
             cudaGetErrorName(error), of_a_kernel && !device_debug_sync ? "; --debug-sync names the kernel" : "");
}

inline void check_cublas_call(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail(EXIT_INTERNAL, "%s at %s:%d: %s", call, file, line, cublasLtGetStatusString(status));
}
