// kernels.h: the instructions that llmc/cuda/simt.h and hopper.h describe and have as PTX, for the emulator. The
// compiler includes this file before every file of the CUDA backend (mk/emulator.mk). All are inlined, so that reports
// have the kernel's lines.
#pragma once
#include "cuda/types.h"
#include "emulator.h"

#define UNROLL
#define UNROLL_BY(n)

// Two accesses: SANITIZE=stores shows the emulator no memcpy of 16 bytes.
__forceinline__ void copy_16(void* to, const void* from) {
    using Half = uint64_t __attribute__((may_alias));
    const Half* const halves = static_cast<const Half*>(from);
    static_cast<Half*>(to)[0] = halves[0];
    static_cast<Half*>(to)[1] = halves[1];
}

template <class T>
__forceinline__ Vec<T> load128(const T* p, SIMT_SITE) {
    simt::check_aligned(p, 16, "misaligned 16-byte load", site);
    Vec<T> v;
    copy_16(&v, p);
    return v;
}
template <class T>
__forceinline__ Vec<T> load128cs(const T* p, SIMT_SITE) {
    return load128(p, site);
}
template <class T>
__forceinline__ void store128(T* p, Vec<T> v, SIMT_SITE) {
    simt::check_aligned(p, 16, "misaligned 16-byte store", site);
    copy_16(p, &v);
}
template <class T>
__forceinline__ void store128_whole(T* p, Vec<T> v, SIMT_SITE) {
    store128(p, v, site);
}
template <class T>
__forceinline__ void store128cs(T* p, Vec<T> v, SIMT_SITE) {
    store128(p, v, site);
}
template <class T>
__forceinline__ void store64(T* p, Vec<T, int(8 / sizeof(T))> v, SIMT_SITE) {
    simt::check_aligned(p, 8, "misaligned 8-byte store", site);
    std::memcpy(p, &v, 8);
}

__forceinline__ uint32_t pack_bf16(float low, float high, SIMT_SITE) {
    simt::expect_returned(low, high, site);
    return bf16(low).bits | uint32_t(bf16(high).bits) << 16;
}
__forceinline__ float exp2_fast(float x) {
    return x == 0.0f ? 1.0f : simt::inexact(std::exp2(x), 2);  // exact at 0 (PTX ISA)
}
__forceinline__ float reciprocal_fast(float x) {
    const float y = simt::inexact(1.0f / x, 1);
    return std::fabs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y;
}
__forceinline__ float mul_rn(float x, float y) {
    float product = x * y;
    asm("" : "+x"(product));  // no fused multiply-add
    return product;
}

__forceinline__ void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_SITE) {
    simt::expect_written(acc, sizeof(acc));
    simt::expect_written(a, sizeof(a));
    simt::expect_written(b, sizeof(b));
    simt::mma(acc, a, b, site);
}

template <bool TRANSPOSE>
__forceinline__ void ldmatrix_rows(uint32_t (&r)[4], const void* row, simt::Site site) {
    simt::check_aligned(row, 16, "ldmatrix: a row is not 16-byte aligned", site);
    if (!simt::is_shared(row, 16)) simt::report("ldmatrix: a row is not in shared memory", site);
    uint64_t bits[2];
    copy_16(bits, row);  // in this file, because sanitizers do not see the emulator's own accesses
    simt::expect_written(bits, 16);
    for (uint32_t& pair : r) pair = 0;
    simt::ldmatrix(r, TRANSPOSE, bits[0], bits[1], site);
}
__forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row, SIMT_SITE) { ldmatrix_rows<false>(r, row, site); }
__forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, SIMT_SITE) {
    ldmatrix_rows<true>(r, row, site);
}

__forceinline__ void cp_async_16(void* shared, const void* global, SIMT_SITE) {
    simt::check_aligned(shared, 16, "cp.async: the destination is not 16-byte aligned", site);
    simt::check_aligned(global, 16, "cp.async: the source is not 16-byte aligned", site);
    if (!simt::is_shared(shared, 16)) simt::report("cp.async: the destination is not in shared memory", site);
    if (simt::config.async == simt::Async::early) copy_16(shared, global);
    simt::cp_async_begin({shared, global}, site);
}
__forceinline__ void cp_async_commit() { simt::cp_async_commit(); }
template <int N>
__forceinline__ void cp_async_wait() {
    simt::Copy copy{};
    while (simt::cp_async_next(N, &copy))
        if (simt::config.async != simt::Async::early) copy_16(copy.to, copy.from);
}

// The instructions of hopper.h.

namespace simt {
template <class... P>
cudaError_t start_clusters(void (*kernel)(P...), dim3 grid, dim3 block, int cluster, int64_t shared_bytes, StreamAt at,
                           std::type_identity_t<P>... args) {
    cudaLaunchAttribute size{cudaLaunchAttributeClusterDimension, {{unsigned(cluster), 1, 1}}};
    const cudaLaunchConfig_t config{grid, block, size_t(shared_bytes), at.stream, &size, 1, at.site};
    return cudaLaunchKernelEx(&config, kernel, args...);
}
}  // namespace simt

using simt::cluster_rank;
__forceinline__ void cluster_sync(SIMT_SITE) { simt::cluster_barrier(site); }
__forceinline__ bool elect_one(SIMT_SITE) {
    simt::ballot(~0u, true, site);
    return simt::lane() == (simt::config.order == simt::Order::reverse ? 31 : 0);
}
template <int REGISTERS>
__forceinline__ void take_registers(SIMT_SITE) {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0);
    simt::set_registers(REGISTERS, true, site);
}
template <int REGISTERS>
__forceinline__ void give_registers(SIMT_SITE) {
    static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0);
    simt::set_registers(REGISTERS, false, site);
}
__forceinline__ void named_barrier(int id, int threads, SIMT_SITE) { simt::named_barrier(id, threads, true, site); }
__forceinline__ void named_arrive(int id, int threads, SIMT_SITE) { simt::named_barrier(id, threads, false, site); }

__forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals, SIMT_SITE) {
    simt::mbarrier_init(barrier, arrivals, site);
}
__forceinline__ void fence_mbarrier_init() { simt::fence_barrier_init(); }
__forceinline__ void mbarrier_arrive(uint64_t* barrier, SIMT_SITE) {
    simt::mbarrier_arrive(barrier, cluster_rank(), 0, site);
}
__forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int block, SIMT_SITE) {
    simt::mbarrier_arrive(barrier, block, 0, site);
}
__forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes, SIMT_SITE) {
    simt::mbarrier_arrive(barrier, cluster_rank(), bytes, site);
}
__forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity, SIMT_SITE) {
    simt::mbarrier_wait(barrier, parity, site);
}

__forceinline__ void tma_load(void* to, const CUtensorMap* map, int x, int y, uint64_t* barrier, SIMT_SITE) {
    simt::tensor_load(to, map, {x, y, 0}, barrier, 0, site);
}
__forceinline__ void tma_load(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier, SIMT_SITE) {
    simt::tensor_load(to, map, {x, y, z}, barrier, 0, site);
}
__forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map, int x, int y, uint64_t* barrier,
                                        uint16_t blocks, SIMT_SITE) {
    simt::tensor_load(to, map, {x, y, 0}, barrier, blocks, site);
}
__forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y, SIMT_SITE) {
    simt::tensor_store(map, from, {x, y, 0}, site);
}
__forceinline__ void tma_store(const CUtensorMap* map, const void* from, int x, int y, int z, SIMT_SITE) {
    simt::tensor_store(map, from, {x, y, z}, site);
}
__forceinline__ void store_commit() { simt::store_commit(); }
template <int N>
__forceinline__ void store_wait_read() {
    simt::store_wait(N, true);
}
template <int N>
__forceinline__ void store_wait() {
    simt::store_wait(N, false);
}
__forceinline__ void fence_proxy_async() { simt::fence_proxy(); }

__forceinline__ void wgmma_fence() { simt::wgmma_fence(); }
__forceinline__ void wgmma_commit() { simt::wgmma_commit(); }
template <int N>
__forceinline__ void wgmma_wait(SIMT_SITE) {
    simt::wgmma_wait(N, site);
}
template <bool TRANSPOSED_A, bool TRANSPOSED_B, int R>
__forceinline__ void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool accumulate, SIMT_SITE) {
    static_assert(R == 32 || R == 64 || R == 96);
    if (accumulate) simt::expect_written(d, sizeof(d));
    simt::wgmma(d, {2 * R, TRANSPOSED_A, TRANSPOSED_B, accumulate, a, b, nullptr}, site);
}
template <bool TRANSPOSED_B, int R>
__forceinline__ void wgmma(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate, SIMT_SITE) {
    static_assert(R == 32 || R == 64);
    if (accumulate) simt::expect_written(d, sizeof(d));
    simt::expect_written(a, sizeof(a));
    simt::wgmma(d, {2 * R, false, TRANSPOSED_B, accumulate, 0, b, a}, site);
}

__forceinline__ void add128_l2(float* p, Vec<float> v, SIMT_SITE) {
    Vec<float> sum = load128(p, site);
    for (int i = 0; i < 4; i++) sum[i] += v[i];
    store128(p, sum, site);
}
__forceinline__ Vec<float> load128_l2(const float* p, SIMT_SITE) { return load128(p, site); }

__forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4], SIMT_SITE) {
    simt::expect_written(r, sizeof(r));
    uint64_t bits[2] = {};
    simt::exchange_matrices(r, row, bits, site);
    copy_16(row, bits);
}
