// test_simt_hopper.cu: tests the emulator of Hopper's instructions with correct kernels, in every mode, its layouts
// with those of the PTX ISA, and tensor maps. test_simt_hopper_bugs.cu has kernels with bugs.
#include <doctest/doctest.h>

#include "gpu/hopper_modes.h"
#include "gpu/hopper_runs.h"

// The canonical layouts of the PTX ISA (wgmma, "Shared Memory Matrix Layout"), written down a second time, in elements
// of bf16, T = 8 of them. Swizzle<B,4,3> exchanges bits 4 to 4 + B - 1 of the byte address by their xor with bits 7 on.
static int64_t canonical(int swizzle, int outer, int k, bool transposed, int64_t leading, int64_t stride) {
    const int T = 8, width = T << swizzle;  // 16, 32, 64 or 128 bytes
    int64_t byte;
    if (!transposed)  // ((8,m),(T,2k)) : ((width,SBO),(1,T)), without a swizzle the last T is LBO
        byte = 2 * (outer % 8 * width + k % T) + outer / 8 * stride + k / T * (swizzle ? 2 * T : leading);
    else if (swizzle)  // ((T,width/T,m),(8,k)) : ((1,T,LBO),(width,SBO))
        byte = 2 * (outer % T + outer / T % (width / T) * T + k % 8 * width) + outer / width * leading + k / 8 * stride;
    else  // ((T,1,m),(8,k)) : ((1,T,SBO),(1T,LBO))
        byte = 2 * (outer % T + k % 8 * T) + outer / T * stride + k / 8 * leading;
    return byte ^ ((byte >> 7) % (1 << swizzle)) << 4;
}

TEST_CASE("operands of wgmma are where the PTX ISA puts them, and steps of k and swizzled() agree") {
    const uint64_t modes[] = {0, 3, 2, 1};  // modes of swizzles of 16 (none), 32, 64 and 128 bytes
    for (int swizzle = 0; swizzle < 4; swizzle++)
        for (const bool transposed : {false, true})
            for (int i = 0; i < 256 * 16; i++) {
                const int outer = i / 16, k = i % 16;
                const uint64_t d =
                    4096 >> 4 | uint64_t(8192 >> 4) << 16 | uint64_t(1024 >> 4) << 32 | modes[swizzle] << 62;
                REQUIRE(simt::operand_address(d, outer, k, transposed) ==
                        4096 + canonical(swizzle, outer, k, transposed, 8192, 1024));
            }
    for (int i = 0; i < 256 * 64; i++) {  // a tile of 256 x 64 and what TMA and swizzled() make of it
        const int outer = i / 64, k = i % 64, step = k / 16;
        const uint64_t d = 4096 >> 4 | uint64_t(TILE_BYTES >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
        REQUIRE(simt::operand_address(d + step * K_STEP, outer, k % 16, false) ==
                4096 + swizzled(outer, k / 8) + k % 8 * 2);
        REQUIRE(simt::operand_address(d + step * TRANSPOSED_K_STEP, outer, k % 16, true) ==
                4096 + outer / 64 * TILE_BYTES + swizzled(k, outer % 64 / 8) + outer % 8 * 2);
    }
}

TEST_CASE("tensor maps outside of the driver's limits are refused") {
    const auto encode = [](uintptr_t address, cuuint64_t pitch, cuuint32_t columns, cuuint32_t rows,
                           CUtensorMapSwizzle swizzle) {
        CUtensorMap map;
        const cuuint64_t sizes[] = {512, 512};
        const cuuint32_t box[] = {columns, rows}, ones[] = {1, 1};
        return cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, reinterpret_cast<void*>(address),
                                      sizes, &pitch, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CHECK(encode(16, 1024, 64, 256, CU_TENSOR_MAP_SWIZZLE_128B) == CUDA_SUCCESS);
    CHECK(encode(8, 1024, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(16, 1032, 64, 64, CU_TENSOR_MAP_SWIZZLE_128B) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(16, 1024, 64, 257, CU_TENSOR_MAP_SWIZZLE_128B) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(16, 1024, 72, 64, CU_TENSOR_MAP_SWIZZLE_128B) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(16, 1024, 64, 64, CU_TENSOR_MAP_SWIZZLE_64B) == CUDA_ERROR_INVALID_VALUE);
    CHECK(encode(16, 1024, 60, 64, CU_TENSOR_MAP_SWIZZLE_NONE) == CUDA_ERROR_INVALID_VALUE);
}

__global__ void copy_boxes(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to) {
    unsigned char* const tile = simt::dynamic_shared<unsigned char, 1024>();
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(tile + TILE_BYTES);
    if (threadIdx.x != 0) return;
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(barrier, TILE_BYTES / 2);
    tma_load(tile, &from, 32, int(blockIdx.x) * 16 - 8, 1, barrier);  // 16 rows of 2 matrices, the first 8 outside
    mbarrier_wait(barrier, 0);
    tma_store(&to, tile, 0, int(blockIdx.x) * 16, 0);
    store_commit();
    store_wait<0>();
}

TEST_CASE("boxes of three dimensions are copied, with zeros outside of the tensor") {
    in_every_mode([] {
        const Array<float> in(floats(3 * 24 * 64, [](int i) { return i + 1; })), out(size_t(2 * 16 * 32));
        simt::launch(copy_boxes, 1, 32, TILE_BYTES + 16, nullptr,
                     simt::tensor_map<float, 3>(in.data, {3, 24, 64}, {2, 16, 32}),
                     simt::tensor_map<float, 3>(out.data, {2, 16, 32}, {2, 16, 32}));
        const std::vector<float> got = out.host();
        for (int i = 0; i < 2 * 16 * 32; i++) {
            const int z = i / 512, y = i / 32 % 16 - 8, x = i % 32 + 32;
            REQUIRE(got[size_t(i)] == (y < 0 ? 0.0f : float((z + 1) * 24 * 64 + y * 64 + x + 1)));
        }
    });
}

__global__ void passed_rows(int* out) {
    SHARED(rows, int[32]);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        rows[lane] = lane;
        named_arrive(1, 64);
    } else {
        named_barrier(1, 64);
        out[lane] = rows[31 - lane];
    }
}

TEST_CASE("a named barrier waits for warps that only arrive") {
    in_every_mode([] {
        const Array<int> out(32);
        simt::launch(passed_rows, 1, 64, 0, nullptr, out.data);
        for (int i = 0; i < 32; i++) REQUIRE(out.host()[size_t(i)] == 31 - i);
    });
}

TEST_CASE("clusters that no GPU launches are an error of CUDA") {
    const auto launch = [](int blocks, int cluster) {
        return simt::start_clusters(passed_rows, unsigned(blocks), 64, cluster, 0, nullptr, nullptr);
    };
    CHECK(launch(4, 3) == cudaErrorInvalidClusterSize);
    CHECK(launch(16, 16) == cudaErrorInvalidClusterSize);
    const simt::Config before = simt::config;
    simt::config.compute_capability = 80;
    CHECK(launch(2, 2) == cudaErrorInvalidClusterSize);
    simt::config = before;
    cudaGetLastError();
}
