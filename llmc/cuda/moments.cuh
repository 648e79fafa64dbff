// moments.cuh: the optimizer's moments (ops.inc; base/moments.h has the codes) as a thread's consecutive elements.
#pragma once
#include "base/moments.h"
#include "base/random.h"
#include "cuda/simt.h"
#include "ops/ops.h"

template <WhichMoment WHICH>
using MomentFormat = std::conditional_t<WHICH == WhichMoment::first, SignedMoment, RootMoment>;

// x = elements at .. at + P of the moment, P = 4 or 8, at a multiple of P.
template <MomentDtype DTYPE, WhichMoment WHICH, int P>
__device__ inline void load_moment(float (&x)[P], const Moment& moment, int64_t at) {
    if constexpr (DTYPE == MomentDtype::fp32) {
        UNROLL
        for (int j = 0; j < P; j += 4) {
            const Vec<float> v = load128cs(static_cast<const float*>(moment.data) + at + j);
            UNROLL
            for (int k = 0; k < 4; k++) x[j + k] = v[k];
        }
    } else if constexpr (DTYPE == MomentDtype::bf16) {
        const auto v = *reinterpret_cast<const Vec<bf16, P>*>(static_cast<const bf16*>(moment.data) + at);
        UNROLL
        for (int k = 0; k < P; k++) x[k] = float(v[k]);
    } else {
        const auto v = *reinterpret_cast<const Vec<uint8_t, P>*>(static_cast<const uint8_t*>(moment.data) + at);
        const uint8_t exponent = moment.exponents[at / FLAT_ALIGN];
        UNROLL
        for (int k = 0; k < P; k++) {
            x[k] = moment_value<MomentFormat<WHICH>>(v[k], exponent);
            if constexpr (WHICH == WhichMoment::second) x[k] *= x[k];
        }
    }
}

// The random bits (moment_bits) of P elements from element `index` of the flat buffer on.
template <int P>
struct MomentBits {
    uint32_t word, i;

    __device__ MomentBits(const Philox& random, int64_t index) : i(uint32_t(index % FLAT_ALIGN)) {
        uint32_t words[4];
        random.words(words, uint64_t(index / FLAT_ALIGN));
        word = i < 32 ? (i < 16 ? words[0] : words[1]) : i < 48 ? words[2] : words[3];
    }
    __device__ uint32_t operator[](int k) const { return moment_bits(word, i + uint32_t(k)); }
};

// Stores a thread's elements, rounded by the bits, or to nearest without them. All threads of a warp call it, because
// those of a block share its largest value; it stores where `inside`.
template <MomentDtype DTYPE, WhichMoment WHICH, int P>
__device__ inline void save_moment(const Moment& moment, int64_t at, const float (&x)[P], const MomentBits<P>* bits,
                                   bool inside) {
    using Format = MomentFormat<WHICH>;
    if constexpr (DTYPE == MomentDtype::fp32) {
        UNROLL
        for (int j = 0; j < P; j += 4)
            if (inside)
                store128cs(static_cast<float*>(moment.data) + at + j, Vec<float>{x[j], x[j + 1], x[j + 2], x[j + 3]});
    } else if constexpr (DTYPE == MomentDtype::bf16) {
        Vec<bf16, P> v;
        UNROLL
        for (int k = 0; k < P; k++) v[k] = bits ? round_randomly(x[k], Format::below_bf16((*bits)[k])) : bf16(x[k]);
        if (inside) *reinterpret_cast<Vec<bf16, P>*>(static_cast<bf16*>(moment.data) + at) = v;
    } else {
        float roots[P], largest = 0.0f;
        UNROLL
        for (int k = 0; k < P; k++) {
            roots[k] = WHICH == WhichMoment::first ? x[k] : sqrtf(x[k]);
            largest = fmaxf(largest, fabsf(roots[k]));
        }
        UNROLL
        for (int distance = int(FLAT_ALIGN) / P / 2; distance > 0; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, distance));
        const uint8_t exponent = block_exponent<Format>(largest);
        Vec<uint8_t, P> v;
        UNROLL
        for (int k = 0; k < P; k++)
            v[k] = moment_code<Format>(roots[k], exponent, bits ? Format::below_code((*bits)[k]) : TO_NEAREST<Format>);
        if (!inside) return;
        *reinterpret_cast<Vec<uint8_t, P>*>(static_cast<uint8_t*>(moment.data) + at) = v;
        if (at % FLAT_ALIGN == 0) moment.exponents[at / FLAT_ALIGN] = exponent;
    }
}

// ---- conversion to fp32 and back

// Grid of the kernels here: blocks of 256 threads, a thread for 4 elements.
constexpr int MOMENT_THREADS = 256, PER_MOMENT_THREAD = 4;

__device__ inline int64_t first_of_moment_thread() {
    return (int64_t(blockIdx.x) * MOMENT_THREADS + threadIdx.x) * PER_MOMENT_THREAD;
}

template <MomentDtype DTYPE, WhichMoment WHICH>
__global__ void __launch_bounds__(MOMENT_THREADS) widen_moment_kernel(float* out, Moment moment, int64_t count) {
    const int64_t at = first_of_moment_thread();
    if (at >= count) return;
    float x[PER_MOMENT_THREAD];
    load_moment<DTYPE, WHICH>(x, moment, at);
    store128cs(out + at, Vec<float>{x[0], x[1], x[2], x[3]});
}

template <MomentDtype DTYPE, WhichMoment WHICH>
__global__ void __launch_bounds__(MOMENT_THREADS)
    store_moment_kernel(Moment moment, const float* values, int64_t count) {
    const int64_t own = first_of_moment_thread(), at = own < count ? own : 0;
    const Vec<float> v = load128cs(values + at);
    const float x[] = {v[0], v[1], v[2], v[3]};
    save_moment<DTYPE, WHICH, PER_MOMENT_THREAD>(moment, at, x, nullptr, own < count);
}

// Calls run(dtype, which) with constants.
template <class Run>
void with_moment(const Moment& moment, WhichMoment which, const Run& run) {
    with_moments(moment.dtype, [&](auto dtype) {
        if (which == WhichMoment::first)
            run(dtype, std::integral_constant<WhichMoment, WhichMoment::first>());
        else
            run(dtype, std::integral_constant<WhichMoment, WhichMoment::second>());
    });
}

inline dim3 moment_blocks(int64_t count) { return blocks_for(count, MOMENT_THREADS * PER_MOMENT_THREAD); }

inline void gpu::widen_moment(float* out, Moment moment, WhichMoment which, int64_t count, Stream stream) {
    with_moment(moment, which, [&](auto dtype, auto which) {
        if (count > 0)
            simt::launch(widen_moment_kernel<dtype, which>, moment_blocks(count), MOMENT_THREADS, 0, stream, out,
                         moment, count);
    });
}

inline void gpu::store_moment(Moment moment, const float* values, WhichMoment which, int64_t count, Stream stream) {
    with_moment(moment, which, [&](auto dtype, auto which) {
        if (count > 0)
            simt::launch(store_moment_kernel<dtype, which>, moment_blocks(count), MOMENT_THREADS, 0, stream, moment,
                         values, count);
    });
}
