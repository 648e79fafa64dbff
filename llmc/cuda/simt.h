// simt.h: the building blocks of kernels: launches, shared memory, 16-byte vectors, reductions over warps and blocks,
// tensor-core and asynchronous copy instructions. All PTX of the program is in this file and in hopper.h.
//
// A plain C++ compiler builds the same kernels for the emulator, which runs them on a CPU and reports their bugs. That
// build includes dev/simt/kernels.h before every file, in place of what is for nvcc alone here.
//
// dev/simt/README.md has the rules that every kernel obeys, so that both give the same result.
#pragma once
#include "base/common.h"
#include "base/device.h"
#include "cuda/types.h"

#include <type_traits>
#include <cuda_runtime.h>

constexpr int WARP_SIZE = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

namespace simt {
// Allows launches of the kernel to have `bytes` of dynamic shared memory. Without this call they may have 48 KiB, less
// the static variables of the kernel.
template <class... P>
cudaError_t allow_dynamic_shared(void (*kernel)(P...), int64_t bytes) {
    if (bytes == 0) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}
// How many blocks of the kernel the device runs at the same time.
template <class... P>
int resident_blocks(void (*kernel)(P...), int threads, int64_t shared_bytes) {
    int device = 0, multiprocessors = 0, blocks = 0;
    if (allow_dynamic_shared(kernel, shared_bytes) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, size_t(shared_bytes)) != cudaSuccess ||
        blocks == 0)
        fail(EXIT_INTERNAL, "no multiprocessor of the GPU runs a block of %d threads with %lld bytes of shared memory",
             threads, static_cast<long long>(shared_bytes));
    return multiprocessors * blocks;
}

}  // namespace simt

#if defined(__CUDACC__)  // else dev/simt/kernels.h

// Unrolls the loop on the next line completely. Needed where the loop indexes an array that must stay in registers.
#define UNROLL _Pragma("unroll")
// Unrolls the loop on the next line n times. Used where unrolling it further would take too many registers.
#define UNROLL_BY(n) _Pragma(SIMT_STRING(unroll(n)))
#define SIMT_STRING(...) #__VA_ARGS__

// SHARED(tile, float[32][33]) declares a __shared__ variable.
#define SHARED(name, ...) __shared__ std::type_identity_t<__VA_ARGS__> name

namespace simt {

// The block's dynamic shared memory, aligned to 16 bytes, or to 1024 as tiles with a swizzle need it (hopper.h).
template <class T, int ALIGN = 16>
__device__ __forceinline__ T* dynamic_shared() {
    static_assert(ALIGN == 16 || ALIGN == 1024);
    if constexpr (ALIGN == 16) {
        extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
        return reinterpret_cast<T*>(dynamic_shared_memory);
    } else {
        extern __shared__ __align__(1024) unsigned char dynamic_shared_tiles[];
        return reinterpret_cast<T*>(dynamic_shared_tiles);
    }
}

using StreamAt = Stream;
template <class... P>
void start(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes, StreamAt stream,
           std::type_identity_t<P>... args) {
    kernel<<<grid, block, size_t(shared_bytes), stream>>>(args...);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

}  // namespace simt

template <class T>
__device__ __forceinline__ Vec<T> load128(const T* p) {
    return __builtin_bit_cast(Vec<T>, *reinterpret_cast<const int4*>(p));
}
// Streaming accesses ("cs"): the cache evicts these lines first. For data that are not used again soon.
template <class T>
__device__ __forceinline__ Vec<T> load128cs(const T* p) {
    return __builtin_bit_cast(Vec<T>, __ldcs(reinterpret_cast<const int4*>(p)));
}
template <class T>
__device__ __forceinline__ void store128(T* p, Vec<T> v) {
    *reinterpret_cast<int4*>(p) = __builtin_bit_cast(int4, v);
}
// store128 to global memory as certainly one instruction, for places where nvcc would split store128 into four stores
// (dev/opcodes.py reports them).
template <class T>
__device__ __forceinline__ void store128_whole(T* p, Vec<T> v) {
    __stwb(reinterpret_cast<int4*>(p), __builtin_bit_cast(int4, v));
}
template <class T>
__device__ __forceinline__ void store128cs(T* p, Vec<T> v) {
    __stcs(reinterpret_cast<int4*>(p), __builtin_bit_cast(int4, v));
}
// Stores 8 bytes.
template <class T>
__device__ __forceinline__ void store64(T* p, Vec<T, int(8 / sizeof(T))> v) {
    *reinterpret_cast<int2*>(p) = __builtin_bit_cast(int2, v);
}

// Two floats, rounded to bf16, in one register; `low` comes first in memory.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 2^x in one instruction, with an error of at most 2 ulp. Results below 2^-126 become 0. (__expf keeps them, which
// takes four more instructions.)
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x in one instruction, with an error of at most 1 ulp, also for x = 1. Results below 2^-126 become 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x * y, rounded to nearest. The compiler never fuses it with an addition into an FMA.
__device__ __forceinline__ float mul_rn(float x, float y) { return __fmul_rn(x, y); }

// acc (16, 8) += A (16, 16) * B (16, 8), by a whole warp; A and B are bf16, acc is float. With g = lane / 4 and
// t = lane % 4 * 2, a lane holds the elements below. A register has two neighbouring columns (A) or rows (B), the even
// one in its low half:
//   a[0] = A[g][t..]   a[1] = A[g + 8][t..]   a[2] = A[g][t + 8..]   a[3] = A[g + 8][t + 8..]
//   b[0] = B[t..][g]   b[1] = B[t + 8..][g]   acc[0..1] = acc[g][t..]   acc[2..3] = acc[g + 8][t..]
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8x8 matrices of 16-bit elements from shared memory. Lane 8*j + i passes the address of row i of matrix j
// (16 bytes, aligned). Lane l receives in r[j] two elements of matrix j, or of its transpose: those in row l / 4 and
// columns 2 * (l % 4) and 2 * (l % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(simt::shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(simt::shared_address(row))
                 : "memory");
}

// cp_async_16 starts an asynchronous copy of 16 bytes to shared memory. cp_async_commit ends a group of copies.
// cp_async_wait<N> waits until at most N of this thread's groups are pending. Other threads see the data after a
// barrier that follows the wait.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(simt::shared_address(shared)), "l"(global)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif

// Four floats, rounded to codes of Format (E4M3 or E5M2) as by fp8_code, in one register; x0 comes first in memory.
// GPUs before 8.9 have no such instruction.
template <class Format>
__device__ __forceinline__ uint32_t pack_fp8(float x0, float x1, float x2, float x3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t low, high;
    if constexpr (std::is_same_v<Format, E4M3>) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x1), "f"(x0));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x3), "f"(x2));
    }
    return low | uint32_t(high) << 16;
#else
    return fp8_code<Format>(x0) | uint32_t(fp8_code<Format>(x1)) << 8 | uint32_t(fp8_code<Format>(x2)) << 16 |
           uint32_t(fp8_code<Format>(x3)) << 24;
#endif
}

namespace simt {

template <class... P>
void check_launch(cudaError_t error, void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes) {
    if (error == cudaSuccess) return;
    const char* name = nullptr;
    if (cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel)) != cudaSuccess) name = "a kernel";
    fail(EXIT_INTERNAL, "%s, (%u, %u, %u) blocks of (%u, %u, %u) threads, %lld bytes of shared memory: %s", name,
         grid.x, grid.y, grid.z, block.x, block.y, block.z, static_cast<long long>(shared_bytes),
         cudaGetErrorString(error));
}

// Queues kernel(args...) on the stream.
template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes, StreamAt stream,
            std::type_identity_t<P>... args) {
    cudaError_t error = allow_dynamic_shared(kernel, shared_bytes);
    if (error == cudaSuccess) {
        start(kernel, grid, block, shared_bytes, stream, args...);
        error = cudaGetLastError();
    }
    check_launch(error, kernel, grid, block, shared_bytes);
}

}  // namespace simt

constexpr float LOG2_E = 1.44269504f;

// e^x, with a relative error of at most 2^-21 + |x| * 2^-23. Results below 2^-126 become 0.
__device__ inline float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

// The elements of a Vec<floatX> in float.
template <class floatX>
struct Floats {
    static constexpr int size = Vec<floatX>::size;
    float values[size];
    __device__ float& operator[](int i) { return values[i]; }
    __device__ const float& operator[](int i) const { return values[i]; }
};

// Conversions of whole vectors: one instruction for each element of bf16, or for each two in `rounded`. Element by
// element it would take more, because bf16 does not fill a register.
template <class floatX>
__device__ Floats<floatX> widened(const Vec<floatX>& x) {
    if constexpr (sizeof(floatX) == sizeof(float)) {
        return __builtin_bit_cast(Floats<floatX>, x);
    } else {
        const auto pairs = __builtin_bit_cast(Vec<uint32_t>, x);
        Floats<floatX> y;
        UNROLL
        for (int i = 0; i < pairs.size; i++) {
            y[2 * i] = __builtin_bit_cast(float, pairs[i] << 16);
            y[2 * i + 1] = __builtin_bit_cast(float, pairs[i] & 0xffff0000u);
        }
        return y;
    }
}
template <class floatX>
__device__ Vec<floatX> rounded(const Floats<floatX>& x) {
    if constexpr (sizeof(floatX) == sizeof(float)) {
        return __builtin_bit_cast(Vec<floatX>, x);
    } else {
        Vec<uint32_t> pairs;
        UNROLL
        for (int i = 0; i < pairs.size; i++) pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
        return __builtin_bit_cast(Vec<floatX>, pairs);
    }
}

// Sums in a fixed order. Every lane (warp_) or thread (block_) gets the result.

__device__ inline float warp_sum(float x) {
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_MASK, x, distance);
    return x;
}

// All threads of a one-dimensional block must call block_sum.
__device__ inline float block_sum(float x) {
    SHARED(partial, float[WARP_SIZE]);
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    x = warp_sum(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? partial[lane] : 0.0f);
    __syncthreads();  // the next call overwrites partial
    return x;
}

// Number of blocks for count elements, with per_block elements each.
inline dim3 blocks_for(int64_t count, int64_t per_block) { return dim3(unsigned(ceil_div(count, per_block))); }

// Calls run(c) with c as a compile-time constant, for a kernel's template argument. 1 <= c <= MAX.
template <int MAX, class Run>
void with_constant(int c, const Run& run) {
    if constexpr (MAX > 1)
        if (c < MAX) return with_constant<MAX - 1>(c, run);
    run(std::integral_constant<int, MAX>{});
}
