// cuda_check.h: checks the status of CUDA and cuBLASLt calls. A failure ends the program with a message that has the
// call, its place in the source and the reason.
#pragma once
#include <cublasLt.h>
#include <cuda_runtime.h>

#include "base/common.h"
#include "base/device.h"

// Asynchronous errors are reported here too: the call that reports an error need not be the one that caused it.
#define CUDA_CHECK(call) check_cuda_call((call), #call, __FILE__, __LINE__)
#define CUBLAS_CHECK(call) check_cublas_call((call), #call, __FILE__, __LINE__)

inline void check_cuda_call(cudaError_t error, const char* call, const char* file, int line) {
    const bool from_kernel = error >= 700 && error < 800;  // an error in a kernel that was queued before this call
    if (error != cudaSuccess)
        fail(EXIT_INTERNAL, "%s at %s:%d: %s (%s)%s", call, file, line, cudaGetErrorString(error),
             cudaGetErrorName(error), from_kernel ? "; CUDA_LAUNCH_BLOCKING=1 names the kernel" : "");
}

inline void check_cublas_call(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail(EXIT_INTERNAL, "%s at %s:%d: %s", call, file, line, cublasLtGetStatusString(status));
}

namespace gpu {
cudaDeviceProp current_device();  // device.cu
}
