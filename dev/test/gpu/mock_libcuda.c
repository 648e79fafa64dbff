// mock_libcuda.c: a replacement for the driver library, libcuda.so.1. With it cuDNN makes plans on a machine without a
// GPU (test_libraries.py). Calls that need a device, or would run work on it, return CUDA_ERROR_STUB_LIBRARY, as the
// toolkit's stub does, so cuDNN stays in its mode without a device. Calls that load code succeed, unlike in the stub,
// because cuDNN loads code when it has made a plan. MOCK_VERBOSE=1 prints the calls, in case a new cuDNN makes others.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, STUB_LIBRARY = 34, NOT_FOUND = 500 };

static int dummy[64];  // every handle points to it

static int answer(int result, const char* call) {
    if (getenv("MOCK_VERBOSE")) fprintf(stderr, "mock: %s: %d\n", call, result);
    return result;
}

// These functions do not declare the parameters that they do not read. The C calling convention allows that: the caller
// passes and cleans up its arguments.
#define REFUSED(call) \
    int call(void) { return answer(STUB_LIBRARY, #call); }
#define ACCEPTED(call) \
    int call(void) { return answer(SUCCESS, #call); }
// Calls that write a handle, or a number, to the address in their first parameter.
#define GIVES_HANDLE(call)             \
    int call(void** handle) {          \
        *handle = dummy;               \
        return answer(SUCCESS, #call); \
    }
#define GIVES_NUMBER(call, number, result) \
    int call(int* value) {                 \
        *value = number;                   \
        return answer(result, #call);      \
    }

// ---- Devices, contexts, launches

REFUSED(cuInit)
REFUSED(cuDevicePrimaryCtxRelease)
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuCtxPushCurrent)
REFUSED(cuCtxPopCurrent)
REFUSED(cuCtxSetCurrent)
REFUSED(cuCtxGetCurrent)
REFUSED(cuCtxGetLimit)
REFUSED(cuStreamGetCtx)
REFUSED(cuLaunchKernel)
REFUSED(cuLaunchKernelEx)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuTensorMapEncodeTiled)
REFUSED(cuTensorMapEncodeIm2col)
REFUSED(cuMemsetD8Async)
REFUSED(cuMemsetD32Async)
REFUSED(cuMemcpyHtoDAsync_v2)
REFUSED(cuLinkCreate)
REFUSED(cuLinkCreate_v2)
REFUSED(cuLinkAddData)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkDestroy)
REFUSED(cuLibraryLoadFromFile)
REFUSED(cuOccupancyMaxPotentialClusterSize)
GIVES_NUMBER(cuDriverGetVersion, 13000, STUB_LIBRARY)
GIVES_NUMBER(cuDeviceGetCount, 0, STUB_LIBRARY)
GIVES_NUMBER(cuDeviceGet, 0, STUB_LIBRARY)
GIVES_NUMBER(cuDeviceGetAttribute, 0, STUB_LIBRARY)
GIVES_NUMBER(cuCtxGetDevice, 0, STUB_LIBRARY)

// ---- Code

GIVES_HANDLE(cuLibraryLoadData)
GIVES_HANDLE(cuLibraryGetKernel)
GIVES_HANDLE(cuLibraryGetModule)
GIVES_HANDLE(cuKernelGetFunction)
GIVES_HANDLE(cuModuleLoadData)
GIVES_HANDLE(cuModuleLoadDataEx)
GIVES_HANDLE(cuModuleGetFunction)
GIVES_NUMBER(cuFuncGetAttribute, 0, SUCCESS)
GIVES_NUMBER(cuKernelGetAttribute, 0, SUCCESS)
ACCEPTED(cuLibraryUnload)
ACCEPTED(cuModuleUnload)
ACCEPTED(cuFuncSetAttribute)
ACCEPTED(cuKernelSetAttribute)
ACCEPTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ACCEPTED(cuOccupancyMaxActiveClusters)

// ---- Errors, and calls by name

int cuGetErrorString(int error, const char** text) {
    (void)error;
    *text = "no driver: mock_libcuda.c";
    return SUCCESS;
}
int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }

int cuGetProcAddress_v2(const char* name, void** function) {
    *function = dlsym(RTLD_DEFAULT, name);
    return answer(*function ? SUCCESS : NOT_FOUND, name);
}
int cuGetProcAddress(const char* name, void** function) { return cuGetProcAddress_v2(name, function); }
