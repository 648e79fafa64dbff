// hopper.h: the asynchronous instructions of Hopper (sm_90a) for kernels: copies by TMA, matrix products by warpgroups
// (wgmma), the barriers in shared memory that both signal (mbarrier), clusters, named barriers and the registers of a
// warpgroup. It continues simt.h. The emulator checks each use (dev/simt/hopper.cpp has the rules).
//
// A tile in shared memory has rows of 128 bytes, 64 elements of bf16, and begins at a multiple of 1024 bytes. The
// 16-byte chunk c of row r is at chunk c ^ r % 8 (the swizzle of 128 bytes), so that columns of chunks touch all banks.
// TMA writes and reads this form, wgmma reads it, and swizzled() is a chunk's place for threads.
#pragma once
#include "cuda/simt.h"

#include <array>
#include <cuda.h>

// True where these instructions exist: in the emulator, and in code for sm_90a. In code for other GPUs a kernel whose
// body is in `if constexpr (HOPPER_CODE)` is empty, and the program does not launch it.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE true
#else
#define HOPPER_CODE false
#endif

#if defined(__CUDACC__)  // else dev/simt/kernels.h

namespace simt {

template <class... P>
cudaError_t start_clusters(void (*kernel)(P...), dim3 grid, dim3 block, int cluster, int64_t shared_bytes,
                           StreamAt stream, std::type_identity_t<P>... args) {
    cudaLaunchAttribute size{};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {unsigned(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = stream;
    config.attrs = &size;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace simt

// The block's number in its cluster. cluster_sync waits for all threads of the cluster.
__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected));
    return elected != 0;
}
// Sets the registers of a warpgroup's threads. take_registers waits until others have given enough back.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// A barrier of some of a block's warps; 1 <= id <= 15. `threads` counts those that wait and those that only arrive.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A phase of an mbarrier ends when `arrivals` threads have arrived and TMA has copied the bytes that they expect. Then
// the next begins. mbarrier_wait waits for the end of a phase by its parity, the first one's is 0. On a new barrier a
// wait for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(simt::shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
// After mbarrier_init and before the barrier of the threads: for TMA and for the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(simt::shared_address(barrier)) : "memory");
}
// Arrives at the barrier of another block. It does not wait for this thread's memory accesses: `.release.cluster`
// would, by a MEMBAR that took a fifth of a GEMM's time on an H200. Reads by wgmma and writes by TMA need no such
// order.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int block) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(simt::shared_address(barrier)),
        "r"(block)
        : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(simt::shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(simt::shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!done);
}

// TMA. x, y and z are the first element of a box of the tensor map, in the contiguous dimension first. Elements outside
// the tensor are loaded as 0 and not stored. A load adds its bytes to the barrier of each block that it writes.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            simt::shared_address(to)),
        "l"(map), "r"(simt::shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(simt::shared_address(to)),
        "l"(map), "r"(simt::shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// To the same place in each block of the cluster whose bit is set.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map, int x, int y, uint64_t* barrier,
                                                   uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(simt::shared_address(to)),
        "l"(map), "r"(simt::shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(simt::shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(simt::shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// store_commit ends a group of this thread's stores. At most N groups are pending after store_wait<N>; after
// store_wait_read<N> they may be pending, but have read their shared memory.
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Makes this thread's writes of shared memory visible to wgmma and TMA. Each writer calls it, before a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// wgmma_fence comes before the first wgmma and after each change of accumulators by the threads. wgmma_commit ends a
// group; at most N groups are pending after wgmma_wait<N>. Until then nobody may touch accumulators and operands.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// "%40,...,%49," and the operands of 32 floats, for asm statements with many registers.
#define HOPPER_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define HOPPER_TO_29 HOPPER_TEN() HOPPER_TEN(1) HOPPER_TEN(2)
#define HOPPER_TO_59 HOPPER_TO_29 HOPPER_TEN(3) HOPPER_TEN(4) HOPPER_TEN(5)
#define HOPPER_TO_89 HOPPER_TO_59 HOPPER_TEN(6) HOPPER_TEN(7) HOPPER_TEN(8)
#define HOPPER_32 HOPPER_TO_29 "%30,%31"
#define HOPPER_64 HOPPER_TO_59 "%60,%61,%62,%63"
#define HOPPER_96 HOPPER_TO_89 "%90,%91,%92,%93,%94,%95"
#define HOPPER_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOPPER_F16(i) HOPPER_F4(i), HOPPER_F4(i + 4), HOPPER_F4(i + 8), HOPPER_F4(i + 12)
#define HOPPER_F32(i) HOPPER_F16(i), HOPPER_F16(i + 16)
#define HOPPER_F64 HOPPER_F32(0), HOPPER_F32(32)
#define HOPPER_F96 HOPPER_F64, HOPPER_F32(64)
// p0 to p4: the numbers of the operands after the accumulators.
#define HOPPER_SS(n, list, floats, p0, p1, p2, p3, p4)                                                              \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " p2                                                                \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" list "}, " p0 ", " p1 ", p, 1, 1, " p3 \
                 ", " p4 ";}"                                                                                       \
                 : floats                                                                                           \
                 : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(TRANSPOSED_A)), "n"(int(TRANSPOSED_B)))
#define HOPPER_RS(n, list, floats, p0, p1, p2, p3, p4, p5, p6)                                                      \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " p5                                                                \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" list "}, {" p0 ", " p1 ", " p2 ", " p3 \
                 "}, " p4 ", p, 1, 1, " p6 ";}"                                                                     \
                 : floats                                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(TRANSPOSED_B)))

// d (64, N) = A (64, 16) B (16, N), plus d if `accumulate`, by a warpgroup: 4 warps, the first one's number a
// multiple of 4. N is twice the floats of a thread: 64, 128 or, with A in shared memory, 192. Thread t has in
// d[4 * j + 2 * h + i] row t / 32 * 16 + t % 32 / 4 + 8 * h and column 8 * j + t % 4 * 2 + i. Operands come from
// descriptors. A transposed one has rows of its outer dimension, not of k. A may be in registers, as for mma_m16n8k16
// with the warp's 16 rows.
template <bool TRANSPOSED_A, bool TRANSPOSED_B, int R>
__device__ __forceinline__ void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(R == 32 || R == 64 || R == 96);
    if constexpr (R == 32) {
        HOPPER_SS("64", HOPPER_32, HOPPER_F32(0), "%32", "%33", "%34", "%35", "%36");
    } else if constexpr (R == 64) {
        HOPPER_SS("128", HOPPER_64, HOPPER_F64, "%64", "%65", "%66", "%67", "%68");
    } else {
        HOPPER_SS("192", HOPPER_96, HOPPER_F96, "%96", "%97", "%98", "%99", "%100");
    }
}
template <bool TRANSPOSED_B, int R>
__device__ __forceinline__ void wgmma(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(R == 32 || R == 64);
    if constexpr (R == 32) {
        HOPPER_RS("64", HOPPER_32, HOPPER_F32(0), "%32", "%33", "%34", "%35", "%36", "%37", "%38");
    } else {
        HOPPER_RS("128", HOPPER_64, HOPPER_F64, "%64", "%65", "%66", "%67", "%68", "%69", "%70");
    }
}

// p[0..3] += v in the L2 cache, without waiting. Additions of one thread to an address, and its loads by
// load128_l2, are in the order of the program. Other loads may find old values in the L1 cache.
__device__ __forceinline__ void add128_l2(float* p, Vec<float> v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}
__device__ __forceinline__ Vec<float> load128_l2(const float* p) {
    return __builtin_bit_cast(Vec<float>, __ldcg(reinterpret_cast<const float4*>(p)));
}

// The reverse of ldmatrix_x4: lane 8 * j + i passes the address of row i of matrix j.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(simt::shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif

// Bytes from the start of a tile to chunk `chunk` of row `row`.
HOST_DEVICE inline int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Descriptors of wgmma's operands in tiles as above. Bits 0-13: address / 16; 16-29: leading offset / 16; 32-45: stride
// / 16; 62-63: swizzle (1: 128 bytes). Adding K_STEP or TRANSPOSED_K_STEP moves an operand to its next 16 k.
__device__ __forceinline__ uint64_t descriptor(const void* tile, int leading_bytes, int stride_bytes) {
    return uint64_t((simt::shared_address(tile) & 0x3ffff) >> 4) | uint64_t(leading_bytes >> 4) << 16 |
           uint64_t(stride_bytes >> 4) << 32 | uint64_t(1) << 62;
}
// Rows of 64 k: rows of A, or columns of B.
__device__ __forceinline__ uint64_t descriptor_of(const void* tile) { return descriptor(tile, 16, 1024); }
constexpr uint64_t K_STEP = 32 >> 4;
// A row for each k, of 64 rows of A or columns of B. The next 64 are in another tile, tile_bytes further.
__device__ __forceinline__ uint64_t transposed_descriptor_of(const void* tile, int tile_bytes) {
    return descriptor(tile, tile_bytes, 1024);
}
constexpr uint64_t TRANSPOSED_K_STEP = 2048 >> 4;

namespace simt {

// A map for TMA of a contiguous row-major array of 2 or 3 dimensions, with boxes that have rows of 128 bytes, swizzled.
template <class T, size_t RANK>
CUtensorMap tensor_map(const T* data, const std::array<int64_t, RANK>& shape, const std::array<int, RANK>& box) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4);
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        fail(EXIT_INTERNAL, "the CUDA driver has no cuTensorMapEncodeTiled: CUDA 12 is needed");
    cuuint64_t sizes[RANK], strides[RANK];
    cuuint32_t boxes[RANK], ones[RANK];
    for (size_t i = 0; i < RANK; i++) {  // the contiguous dimension comes first there
        sizes[i] = cuuint64_t(shape[RANK - 1 - i]);
        strides[i] = (i ? strides[i - 1] : sizeof(T)) * sizes[i];
        boxes[i] = cuuint32_t(box[RANK - 1 - i]);
        ones[i] = 1;
    }
    CUtensorMap map{};
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, RANK,
        const_cast<T*>(data), sizes, strides, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        fail(EXIT_INTERNAL, "cuTensorMapEncodeTiled refuses rows of %lld elements in boxes of %d: error %d",
             static_cast<long long>(shape[RANK - 1]), box[RANK - 1], int(result));
    return map;
}

// Queues kernel(args...) on the stream, in clusters of `cluster` blocks.
template <class... P>
void launch_clusters(void (*kernel)(P...), dim3 grid, dim3 block, int cluster, int64_t shared_bytes, StreamAt stream,
                     std::type_identity_t<P>... args) {
    cudaError_t error = allow_dynamic_shared(kernel, shared_bytes);
    if (error == cudaSuccess) error = start_clusters(kernel, grid, block, cluster, shared_bytes, stream, args...);
    check_launch(error, kernel, grid, block, shared_bytes);
}

}  // namespace simt
