// hopper_runs.h: runs the kernels of hopper_kernels.cuh, with OneBug or NoBugs, and compares their results with plain
// sums.
#pragma once
#include <cmath>

#include "gpu/hopper_kernels.cuh"
#include "gpu/arrays.h"

inline std::vector<bf16> bf16s(int64_t count, int seed) {
    std::vector<bf16> values;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t hash = uint32_t(i * 7 + seed) * 2654435761u;
        values.push_back(bf16(float(int(hash >> 20) % 61 - 30) / 32.0f));
    }
    return values;
}

// The largest error relative to the values, which rounding to bf16 makes 2^-9; infinite if a value is not a number.
struct Worst {
    double error = 0.0;
    void compare(bf16 got, double want, double size) {
        const double e = std::fabs(double(float(got)) - want) / (std::fabs(want) + size);
        if (!(e <= error)) error = std::isnan(e) ? INFINITY : e;
    }
};

template <int BN, int CLUSTER, bool TRANSPOSED_B, bool RESIDUAL, class Bugs = NoBugs>
double gemm_error(int M, int N, int K, int blocks, Bugs bug = {}) {
    const std::vector<bf16> A = bf16s(int64_t(M) * K, 1), B = bf16s(int64_t(N) * K, 2), R = bf16s(int64_t(M) * N, 3);
    const Array<bf16> a(A), b(B), r(R), d(size_t(M) * size_t(N));
    const auto b_map = TRANSPOSED_B ? simt::tensor_map<bf16, 2>(b.data, {K, N}, {64 / CLUSTER, 64})
                                    : simt::tensor_map<bf16, 2>(b.data, {N, K}, {BN / CLUSTER, 64});
    simt::launch_clusters(hopper_gemm_kernel<BN, CLUSTER, TRANSPOSED_B, RESIDUAL, Bugs>, unsigned(blocks), 384, CLUSTER,
                          GemmTiles<BN, CLUSTER>::SHARED_BYTES, nullptr,
                          simt::tensor_map<bf16, 2>(a.data, {M, K}, {128, 64}), b_map,
                          simt::tensor_map<bf16, 2>(d.data, {M, N}, {64, 64}),
                          simt::tensor_map<bf16, 2>(r.data, {M, N}, {64, 64}), M, N, K, bug);
    const std::vector<bf16> got = d.host();
    Worst worst;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float sum = RESIDUAL ? float(R[size_t(m * N + n)]) : 0.0f;
            for (int k = 0; k < K; k++)
                sum += float(A[size_t(m * K + k)]) * float(B[size_t(TRANSPOSED_B ? k * N + n : n * K + k)]);
            worst.compare(got[size_t(m * N + n)], sum, 0.1);
        }
    return worst.error;
}

template <class Bugs = NoBugs>
double chain_error(int tiles, Bugs bug = {}) {
    const int rows = 128 * tiles;
    const std::vector<bf16> X = bf16s(rows * 64, 4), Y = bf16s(rows * 64, 5);
    const Array<bf16> x(X), y(Y), out(size_t(2 * 128 * 64));
    const Array<float> scales(floats(rows, [](int i) { return 1 + i % 5; }));
    std::vector<double> want(2 * 128 * 64);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 128; j++) {
            const int other = i / 128 * 128 + j;
            float p = 0.0f;
            for (int c = 0; c < 64; c++) p += float(X[size_t(i * 64 + c)]) * float(Y[size_t(other * 64 + c)]);
            p = float(bf16(p * float(1 + other % 5)));
            for (int c = 0; c < 64; c++) {
                want[size_t(j * 64 + c)] += p * float(X[size_t(i * 64 + c)]);
                want[size_t((128 + i % 128) * 64 + c)] += p * float(Y[size_t(other * 64 + c)]);
            }
        }
    simt::launch_clusters(hopper_chain_kernel<Bugs>, 1, 384, 1, ChainTiles::SHARED_BYTES, nullptr,
                          simt::tensor_map<bf16, 2>(x.data, {rows, 64}, {128, 64}),
                          simt::tensor_map<bf16, 2>(y.data, {rows, 64}, {128, 64}),
                          simt::tensor_map<bf16, 2>(out.data, {256, 64}, {64, 64}), scales.data, tiles, bug);
    const std::vector<bf16> got = out.host();
    Worst worst;
    for (size_t i = 0; i < got.size(); i++) worst.compare(got[i], want[i], 10.0);
    return worst.error;
}
