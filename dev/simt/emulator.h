// emulator.h: runs CUDA kernels on a CPU and reports their bugs. It declares nvcc's built-in names and the parts of the
// CUDA runtime that llmc/cuda uses. README.md says how to start, what is found and what is not; kernels.h has the
// instructions that are PTX on a GPU.
//
// Every CUDA thread is a fiber on the host's only thread, so a kernel runs the same way each time. The emulator prints
// a bug that it detects itself, with the place in the source, and ends the program. A launch that does not fit the GPU,
// and a call that a stream capture does not allow, it prints in one line, and the call returns CUDA's error.
//
// Environment variables; simt::config has the same settings, except SIMT_NCCL:
//   SIMT_ORDER=forward|reverse|random[:SEED]   order in which threads of a block, and blocks, run [forward]
//   SIMT_ASYNC=late|early|random[:SEED]        asynchronous copies and products run when a thread waits for them, at
//                                              once, or at random (those of Hopper) [late]
//   SIMT_STREAMS=now|deferred[:SEED]           queued work runs at once, or when the host waits, with the streams
//                                              interleaved at random [now]
//   SIMT_MATH=exact|gpu                        results of ex2, rcp, rsqrt and tanh are rounded, or as inexact as on a
//                                              GPU [exact]
//   SIMT_NCCL=deaf                             NCCL does not notice that another rank has ended [it notices]
//   SIMT_FAIL=N|capture                        operation N (from 1), or the first one of a capture, fails like an
//                                              illegal access: this call and all later ones return the error [never]
//   SIMT_DEVICES=COUNT                         number of GPUs [1]
//   SIMT_ARCH=80|86|87|89|90|100|120           the GPUs' architecture, which decides the launches that fit (it needs
//                                              dev/cuda_budget.txt) and the blocks of a multiprocessor [90]
#pragma once
#define SIMT_EMULATOR 1

#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#define SIMT_CHECKS_MEMORY 1
extern "C" void __msan_check_mem_is_initialized(const volatile void* p, size_t bytes);
#endif
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// An error, because only SHARED lets the emulator allocate and poison the variable. If __shared__ were defined as
// nothing, each thread would silently have its own variable.
#define __shared__ static_assert(false, "write SHARED(name, type)");

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

struct CUstream_st;
struct CUevent_st;
enum cudaError_t : int;

namespace simt {

enum class Order { forward, reverse, random };
enum class Async { late, early, random };

struct Config {
    Order order = Order::forward;
    uint64_t order_seed = 1;
    Async async = Async::late;
    uint64_t async_seed = 1;
    bool deferred_streams = false;
    uint64_t stream_seed = 1;
    int64_t fail_at = 0;           // the number of the operation that fails; 0: none
    bool fail_in_capture = false;  // the first operation of a capture fails
    // The emulated machine. driver_version is a CUDA version; 0: no driver.
    int gpus = 1, driver_version = 13000, compute_capability = 90;
    int start_error = 0;          // cudaError_t of cudaGetDeviceCount
    int device_error = 0;         // cudaError_t of cudaSetDevice
    bool kernel_images = true;    // whether the program has code for the GPU
    bool fused_epilogues = true;  // whether cuBLASLt has algorithms for GELU and its derivative
    size_t queue_limit = 0;       // a launch blocks while its stream has this many operations queued; 0: never
    int failing_algorithm = -1;   // cuBLASLt's algorithm of this number cannot be launched
    bool gpu_math = false;
};
extern Config config;

// With a GPU's arithmetic: returns y with an error of up to `ulp` units in the last place, which depends on y's bits.
inline float inexact(float y, int ulp) {
    if (!config.gpu_math || !std::isnormal(y)) return y;
    const uint32_t bits = std::bit_cast<uint32_t>(y), hash = bits * 2654435761u >> 8;
    return std::bit_cast<float>(bits + hash % uint32_t(2 * ulp + 1) - uint32_t(ulp));
}

// The source line of a call. SIMT_SITE is a default argument, which the compiler evaluates at the caller. The emulator
// compares the sites of lanes that meet in an operation.
struct Site {
    const char* file;
    int line;
};
#define SIMT_SITE ::simt::Site site = {__builtin_FILE(), __builtin_LINE()}

// Prints the bug, its source line and where threads wait, and ends the program.
[[noreturn]] void report(const char* what, Site site);

// Defined in warp.cpp and shared_memory.cpp, which are never instrumented. Arguments are passed by value where
// possible, because sanitizers would not see these files read the kernel's memory.
void block_barrier(Site site);
void warp_barrier(unsigned mask, Site site);
uint64_t shuffle(unsigned mask, uint64_t bits, int source_lane, Site site);
unsigned ballot(unsigned mask, bool vote, Site site);
unsigned match(unsigned mask, uint64_t bits, Site site);
void mma(float* acc, const uint32_t* a, const uint32_t* b, Site site);
void ldmatrix(uint32_t* registers, bool transpose, uint64_t low, uint64_t high, Site site);
int lane();

void* shared_variable(const void* key, const char* name, size_t bytes, size_t align);
void* dynamic_shared_memory(size_t align);
bool is_shared(const void* p, size_t bytes);

struct Copy {  // an asynchronous copy of 16 bytes
    void* to;
    const void* from;
};
void cp_async_begin(Copy copy, Site site);
void cp_async_commit();
bool cp_async_next(int groups_kept, Copy* copy);  // gives the next copy to complete; false if there is none

// A kernel with its arguments, owned by the stream until the host has waited for it.
struct Call {
    const void* kernel = nullptr;
    int cluster = 1;    // blocks of a cluster
    int registers = 0;  // for each thread, at the start
    virtual ~Call() = default;
    virtual void run() = 0;  // as one CUDA thread
};
cudaError_t enqueue(Call* call, dim3 grid, dim3 block, int64_t shared_bytes, struct CUstream_st* stream, Site site);

// A stream argument with the place of the launch in the source.
struct StreamAt {
    struct CUstream_st* stream;
    Site site;
    StreamAt(struct CUstream_st* stream, SIMT_SITE) : stream(stream), site(site) {}
};

template <class... P>
struct BoundCall : Call {
    void (*function)(P...);
    std::tuple<P...> args;
    BoundCall(void (*function)(P...), P... args) : function(function), args(args...) {
        kernel = reinterpret_cast<const void*>(function);
    }
    void run() override { std::apply(function, args); }
};

// kernel<<<grid, block, shared_bytes, at>>>(args...)
template <class... P>
void start(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes, StreamAt at,
           std::type_identity_t<P>... args) {
    enqueue(new BoundCall<P...>(kernel, args...), grid, block, shared_bytes, at.stream, at.site);
}

template <class T, int ALIGN = 16>
T* dynamic_shared() {
    return static_cast<T*>(dynamic_shared_memory(ALIGN));
}

// Checks that the bytes which a thread passes to a warp operation are initialised; MemorySanitizer does not follow them
// into the emulator.
inline void expect_written([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if SIMT_CHECKS_MEMORY
    __msan_check_mem_is_initialized(p, bytes);
#endif
}

template <class T>
T shuffle_as(unsigned mask, T value, int source_lane, Site site) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    expect_written(&value, sizeof(T));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = shuffle(mask, bits, source_lane, site);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline void check_aligned(const void* p, size_t bytes, const char* what, Site site) {
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) report(what, site);
}

}  // namespace simt

// The lambda's static variable gives one key per declaration and template instance.
#define SHARED(name, ...)                                                                  \
    auto& name = *static_cast<std::type_identity_t<__VA_ARGS__>*>(::simt::shared_variable( \
        [] {                                                                               \
            static const char key = 0;                                                     \
            return &key;                                                                   \
        }(),                                                                               \
        #name, sizeof(std::type_identity_t<__VA_ARGS__>), alignof(std::type_identity_t<__VA_ARGS__>)))

// Barriers, shuffles and votes.

inline void __syncthreads(SIMT_SITE) { simt::block_barrier(site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) { simt::warp_barrier(mask, site); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, SIMT_SITE) {
    const int segment = simt::lane() & ~(width - 1);
    return simt::shuffle_as(mask, value, segment + (source & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, SIMT_SITE) {
    const int lane = simt::lane(), source = lane ^ lane_mask, end = (lane & ~(width - 1)) + width;
    return simt::shuffle_as(mask, value, source < end ? source : lane, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, SIMT_SITE) {
    const int lane = simt::lane(), source = lane - int(delta), begin = lane & ~(width - 1);
    return simt::shuffle_as(mask, value, source >= begin ? source : lane, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) { return simt::ballot(mask, predicate, site); }
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) { return simt::ballot(mask, predicate, site) != 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_SITE) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return simt::match(mask, bits, site);
}

// Atomics, which are relaxed.

namespace simt {
template <class T, class F>
T atomic_update(T* p, F updated) {
    std::atomic_ref<T> word(*p);
    T old = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(old, updated(old), std::memory_order_relaxed)) {
    }
    return old;
}
}  // namespace simt

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
    return simt::atomic_update(p, [=](T old) { return T(old + value); });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> value) {
    return simt::atomic_update(p, [=](T old) { return old < value ? value : old; });
}

// Device functions that a host compiler does not have.

template <class T>
T __ldcs(const T* p) {
    return *p;
}
template <class T>
void __stcs(T* p, const std::type_identity_t<T>& value) {
    *p = value;
}
inline float rsqrtf(float x) { return simt::inexact(1.0f / std::sqrt(x), 2); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
// Byte i of the result is byte number (selector >> 4i) % 8 of the eight bytes of x, then y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = x | uint64_t(y) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

// The part of the CUDA runtime that llmc/cuda uses. The null stream is like any other stream: it does not synchronize
// with the others.

enum cudaError_t : int {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorInsufficientDriver = 35,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorSystemNotReady = 802,
    cudaErrorSystemDriverMismatch = 803,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorInvalidClusterSize = 912,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int major, minor, multiProcessorCount;
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
struct cudaFuncAttributes {
    size_t sharedSizeBytes;
};
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P...)) {
    return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
cudaError_t cudaFuncGetName(const char** name, const void* kernel);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          size_t shared_bytes);
template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(P...), int threads,
                                                          size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel), threads,
                                                         shared_bytes);
}
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,       // kHz
    cudaDevAttrGlobalMemoryBusWidth = 37,  // bits
};
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);

cudaError_t cudaMalloc(void** p, size_t bytes, SIMT_SITE);
template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes, SIMT_SITE) {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes, site);
    *p = static_cast<T*>(memory);
    return error;
}
cudaError_t cudaFree(void* p, SIMT_SITE);
cudaError_t cudaMallocHost(void** p, size_t bytes);
template <class T>
cudaError_t cudaMallocHost(T** p, size_t bytes) {
    void* memory = nullptr;
    const cudaError_t error = cudaMallocHost(&memory, bytes);
    *p = static_cast<T*>(memory);
    return error;
}
cudaError_t cudaFreeHost(void* p);
enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };
struct cudaPointerAttributes {
    cudaMemoryType type;
};
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, SIMT_SITE);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr, SIMT_SITE);
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr, SIMT_SITE);
cudaError_t cudaMemset(void* p, int value, size_t bytes, SIMT_SITE);
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream = nullptr, SIMT_SITE);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2,
};
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2,
};
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end);

#include "async.h"
