// amax.cuh: the largest magnitude of a bf16 tensor, found by the kernels that write the tensor. FP8 scales need it.
//
// Magnitudes are compared as integers, in which NaN is the largest. The maximum is the same in any order, so the atomic
// operation of each block does not make the result depend on timing.
#pragma once
#include "cuda/simt.h"

// The largest magnitude of the numbers that one thread has seen.
struct Amax {
    uint32_t bits = 0;  // the magnitude as the bits of a float

    __device__ void add_bits(uint32_t of_float) {
        const uint32_t magnitude = of_float & 0x7fff0000;
        if (magnitude > bits) bits = magnitude;
    }
    __device__ void add(bf16 x) { add_bits(uint32_t(x.bits) << 16); }
    __device__ void add(const Vec<bf16>& x) {
        const auto pairs = __builtin_bit_cast(Vec<uint32_t>, x);
        UNROLL
        for (int k = 0; k < pairs.size; k++) {
            add_bits(pairs[k]);
            add_bits(pairs[k] << 16);
        }
    }
    __device__ void add(float) {}  // fp32 tensors have no FP8 copies; kernels are templates for both types
    __device__ void add(const Vec<float>&) {}

    __device__ void add_lanes() {
        for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
            add_bits(__shfl_xor_sync(FULL_MASK, bits, distance));
    }
    // *amax = the larger of itself and the magnitudes of the warp's threads, which all call this.
    __device__ void raise_by_warp(float* amax) {
        add_lanes();
        if (threadIdx.x % WARP_SIZE == 0) atomicMax(reinterpret_cast<unsigned*>(amax), bits);
    }
    // Does the same for a whole one-dimensional block, with one atomic operation instead of one per warp.
    __device__ void raise_by_block(float* amax) {
        SHARED(of_warps, uint32_t[WARP_SIZE]);
        const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
        add_lanes();
        if (lane == 0) of_warps[warp] = bits;
        __syncthreads();
        if (warp > 0) return;
        bits = lane < warps ? of_warps[lane] : 0;
        raise_by_warp(amax);
    }
};
