// test_simt.cu: tests the emulator with correct kernels. They compute the right results in every order of threads, and
// the emulator reports nothing. test_simt_bugs.cu has kernels with bugs.
#include "cuda/simt.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "orders.h"

__global__ void indices_kernel(int* out) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * threads + thread;
}

TEST_CASE("a launch runs every thread of every block exactly once") {
    in_every_order([] {
        Array<int> out(2 * 3 * 4 * 64);
        simt::launch(indices_kernel, dim3(2, 3, 4), dim3(8, 4, 2), 0, nullptr, out.data);
        const std::vector<int> got = out.host();
        for (int i = 0; i < int(got.size()); i++) REQUIRE(got[i] == i);
    });
}

// Neighbouring bytes of several warps, without a barrier.
__global__ void own_bytes_kernel(int* out) {
    SHARED(bytes, uint8_t[128]);
    uint8_t& own = bytes[threadIdx.x % 32 * 4 + threadIdx.x / 32];
    own = uint8_t(threadIdx.x);
    __syncwarp();
    out[threadIdx.x] = own;
}

TEST_CASE("a warp may read what it has stored beside another warp's bytes") {
    in_every_order([] {
        Array<int> out(128);
        simt::launch(own_bytes_kernel, 1, 128, 0, nullptr, out.data);
        for (int i = 0; i < 128; i++) REQUIRE(out.host()[size_t(i)] == i);
    });
}

__global__ void sums_kernel(float* out, const float* in) {
    const float x = in[threadIdx.x];
    float* o = out + threadIdx.x * 2;
    o[0] = warp_sum(x);
    o[1] = block_sum(x);
    o[1] += block_sum(1.0f) - blockDim.x;  // a second call reuses the shared memory
}

TEST_CASE("warp_sum and block_sum give every thread the result") {
    in_every_order([] {
        for (const int threads : {32, 64, 256, 1024}) {
            CAPTURE(threads);
            const Array<float> in(floats(threads, [](int i) { return i % 7 - 100; }));
            const Array<float> out(2 * threads);
            simt::launch(sums_kernel, 1, threads, 0, nullptr, out.data, in.data);
            const std::vector<float> got = out.host(), x = in.host();
            float all = 0.0f;
            for (const float v : x) all += v;  // integers: exact in every order
            for (int t = 0; t < threads; t++) {
                float sum = 0.0f;
                for (int k = t / 32 * 32; k < t / 32 * 32 + 32; k++) sum += x[k];
                REQUIRE(got[t * 2] == sum);
                REQUIRE(got[t * 2 + 1] == all);
            }
        }
    });
}

__global__ void exchange_kernel(int* out) {
    const int t = threadIdx.x;
    int* o = out + t * 8;
    o[0] = __shfl_sync(FULL_MASK, t, 5);
    o[1] = __shfl_sync(FULL_MASK, t, 3, 8);
    o[2] = __shfl_xor_sync(FULL_MASK, t, 6);
    o[3] = __shfl_up_sync(FULL_MASK, t, 3);
    o[4] = __ballot_sync(FULL_MASK, t % 3 == 0);
    o[5] = __any_sync(FULL_MASK, t == 9) + 2 * __any_sync(FULL_MASK, t == 99);
    o[6] = __match_any_sync(FULL_MASK, t % 4);
    const unsigned odd = __ballot_sync(FULL_MASK, t % 2);
    o[7] = t % 2 ? __shfl_sync(odd, t, 7) : -1;  // part of a warp
}

TEST_CASE("shuffles, votes and matches return what CUDA defines") {
    in_every_order([] {
        const Array<int> out(64 * 8);
        simt::launch(exchange_kernel, 1, 64, 0, nullptr, out.data);
        const std::vector<int> got = out.host();
        for (int t = 0; t < 64; t++) {
            CAPTURE(t);
            const int lane = t % 32, base = t - lane;
            unsigned thirds = 0;
            for (int k = 0; k < 32; k++) thirds |= unsigned((base + k) % 3 == 0) << k;
            const int want[8] = {base + 5,
                                 base + lane / 8 * 8 + 3,
                                 t ^ 6,
                                 lane < 3 ? t : t - 3,
                                 int(thirds),
                                 base == 0 ? 1 : 0,
                                 int(0x11111111u << (t % 4)),
                                 t % 2 ? base + 7 : -1};
            for (int i = 0; i < 8; i++) {
                CAPTURE(i);
                REQUIRE(got[t * 8 + i] == want[i]);
            }
        }
    });
}

// C (16, 16) = A (16, 16) * B (16, 16), row-major.
__global__ void matmul_kernel(float* C, const bf16* A, const bf16* B) {
    constexpr int stride = 24;       // 48 bytes: rows are aligned and in different banks
    SHARED(tile, Vec<bf16>[16][3]);  // an array of bf16 would be aligned to only 2 bytes
    bf16* a = tile[0][0].values;
    bf16* b = simt::dynamic_shared<bf16>();
    const int lane = threadIdx.x;
    for (int i = lane; i < 32; i += WARP_SIZE) {
        store128(a + i / 2 * stride + i % 2 * 8, load128(A + i * 8));
        store128(b + i / 2 * stride + i % 2 * 8, load128cs(B + i * 8));
    }
    __syncwarp();

    uint32_t fa[4], fb[4];
    const int g = lane / 4, t = lane % 4 * 2;
    ldmatrix_x4(fa, a + lane % 16 * stride + lane / 16 * 8);
    ldmatrix_x4_trans(fb, b + lane % 16 * stride + lane / 16 * 8);
    for (int half = 0; half < 2; half++) {
        float acc[4] = {100.0f, 100.0f, 100.0f, 100.0f};
        mma_m16n8k16(acc, fa, {fb[2 * half], fb[2 * half + 1]});
        for (int i = 0; i < 4; i++) C[(g + i / 2 * 8) * 16 + half * 8 + t + i % 2] = acc[i] - 100.0f;
    }
}

TEST_CASE("mma and ldmatrix compute the same matmul as plain loops") {
    std::vector<bf16> A, B;
    for (int i = 0; i < 256; i++) {
        A.push_back(bf16(float(i * 7 % 19 - 9)));
        B.push_back(bf16(float(i * 5 % 23 - 11)));
    }
    in_every_order([&] {
        const Array<bf16> a(A), b(B);
        const Array<float> out(256);
        simt::launch(matmul_kernel, 1, 32, 16 * 24 * 2, nullptr, out.data, a.data, b.data);
        const std::vector<float> got = out.host();
        for (int i = 0; i < 256; i++) {
            float want = 0.0f;
            for (int k = 0; k < 16; k++) want += float(A[i / 16 * 16 + k]) * float(B[k * 16 + i % 16]);
            REQUIRE(got[i] == want);
        }
    });
}

__global__ void atomics_kernel(float* sum, int* largest) {
    atomicAdd(sum, 1.0f);
    atomicMax(largest, int(blockIdx.x * blockDim.x + threadIdx.x));
}

TEST_CASE("atomics of several blocks update every value") {
    in_every_order([] {
        const Array<float> sum(floats(1, [](int) { return 0; }));
        const Array<int> largest(std::vector<int>{0});
        simt::launch(atomics_kernel, 8, 64, 0, nullptr, sum.data, largest.data);
        CHECK(sum.host()[0] == 512.0f);
        CHECK(largest.host()[0] == 511);
    });
}

TEST_CASE("a stream runs its work in order, and an event orders two streams") {
    in_every_order([] { two_streams(true); });
    const simt::Config before = simt::config;
    for (uint64_t seed = 0; seed < 8; seed++) {
        simt::config = {.deferred_streams = true, .stream_seed = seed};
        two_streams(true);
    }
    simt::config = before;
}
