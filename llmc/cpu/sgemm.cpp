// sgemm.cpp: the fp32 product of one thread, by OpenBLAS, or by a kernel of our own where it is not built in (two
// thirds of its speed on AVX-512, where OpenBLAS reaches 90 % of the peak).
#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "isa.h"
#include "matmul.h"

#ifdef USE_OPENBLAS
#include <cblas.h>
#include <dlfcn.h>

#include <cstdlib>

namespace {

struct OpenBLAS {
    decltype(&cblas_sgemm) sgemm;
    std::string config;  // version, options, kernels
};

template <class Function>
Function* symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) fail(EXIT_INTERNAL, "libopenblas.so.0 has no %s: reinstall it, or build with OPENBLAS=0", name);
    return reinterpret_cast<Function*>(found);
}

// Loaded here and not by the linker, because it chooses its kernels while it is loaded, by model number: a processor
// newer than it, or a virtual machine's, gets those of SSE3, a tenth of the speed. OPENBLAS_CORETYPE names the ones
// that the feature bits allow; what the user has set stays.
OpenBLAS load_openblas() {
    if (best_isa() >= Isa::avx2) setenv("OPENBLAS_CORETYPE", best_isa() >= Isa::avx512 ? "SkylakeX" : "Haswell", 0);
    void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(EXIT_INTERNAL, "%s; apt-get install libopenblas0-openmp, or build with OPENBLAS=0", dlerror());
    // Our own OpenMP loops are the only parallelism: OpenBLAS splits by the number of threads, and so would the bits.
    const int threads = omp_get_max_threads();
    symbol<decltype(openblas_set_num_threads)>(library, "openblas_set_num_threads")(1);
    omp_set_num_threads(threads);  // some versions set it too
    return {symbol<decltype(cblas_sgemm)>(library, "cblas_sgemm"),
            symbol<decltype(openblas_get_config)>(library, "openblas_get_config")()};
}

const OpenBLAS& openblas() {
    static const OpenBLAS loaded = load_openblas();
    return loaded;
}

}  // namespace

std::string cpu::blas_name() { return openblas().config; }

void cpu::sgemm(float* c, int ldc, const float* a, bool a_transposed, int lda, const float* b, bool b_transposed,
                int ldb, int M, int N, int K, float beta) {
    openblas().sgemm(CblasRowMajor, a_transposed ? CblasTrans : CblasNoTrans, b_transposed ? CblasTrans : CblasNoTrans,
                     M, N, K, 1.0f, a, lda, b, ldb, beta, c, ldc);
}

#else

std::string cpu::blas_name() { return "none: this build has no OpenBLAS, and fp32 products are slower"; }

namespace {

constexpr int DEPTH = 256;    // of the inner dimension at a time
constexpr int COLUMNS = 384;  // of b packed at a time: 384 KiB, for the second-level cache

// A strip of `rows` rows (or columns) of an operand over `depth` steps of the inner dimension, element (k, i) at
// [k * width + i]; what is missing to the width is zero. outer, inner: elements from one row, or step, to the next.
void pack_strip(float* strip, const float* x, int64_t outer, int64_t inner, int rows, int width, int depth) {
    for (int k = 0; k < depth; k++)
        for (int i = 0; i < width; i++) strip[k * width + i] = i < rows ? x[i * outer + k * inner] : 0.0f;
}

// sums (ROWS, 2 * LANES) = a strip of a times a strip of b.
template <int LANES, int ROWS>
inline __attribute__((always_inline)) void multiply_strips(float* sums, const float* a, const float* b, int depth) {
    typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
    vec acc[ROWS][2] = {};
    for (int k = 0; k < depth; k++, a += ROWS, b += 2 * LANES) {
        const vec b0 = *reinterpret_cast<const vec*>(b), b1 = *reinterpret_cast<const vec*>(b + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const vec x = a[i] - vec{};  // not x + 0, which would be an addition: -0 + 0 is 0
            acc[i][0] += x * b0;
            acc[i][1] += x * b1;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
        *reinterpret_cast<vec*>(sums + i * 2 * LANES) = acc[i][0];
        *reinterpret_cast<vec*>(sums + i * 2 * LANES + LANES) = acc[i][1];
    }
}

// The kernel of an instruction set: the shape of its strips, and the product of two.
struct Kernel {
    int rows, columns;
    void (*multiply)(float* sums, const float* a, const float* b, int depth);
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void multiply_avx512(float* sums, const float* a, const float* b, int depth) {
    multiply_strips<16, 14>(sums, a, b, depth);
}
__attribute__((target("avx2,fma"))) void multiply_avx2(float* sums, const float* a, const float* b, int depth) {
    multiply_strips<8, 6>(sums, a, b, depth);
}
#endif

Kernel choose_kernel() {
#if defined(__x86_64__)
    if (isa() >= Isa::avx512) return {14, 32, multiply_avx512};
    if (isa() >= Isa::avx2) return {6, 16, multiply_avx2};
    return {6, 8, multiply_strips<4, 6>};
#else
    return {12, 8, multiply_strips<4, 12>};  // 32 registers
#endif
}

// c (rows, columns) (+)= sums.
void add_sums(float* c, int ldc, const float* sums, int sums_ld, int rows, int columns, bool add) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            c[int64_t(i) * ldc + j] = add ? c[int64_t(i) * ldc + j] + sums[i * sums_ld + j] : sums[i * sums_ld + j];
}

}  // namespace

void cpu::sgemm(float* c, int ldc, const float* a, bool a_transposed, int lda, const float* b, bool b_transposed,
                int ldb, int M, int N, int K, float beta) {
    const Kernel kernel = choose_kernel();
    const int64_t a_outer = a_transposed ? 1 : lda, a_inner = a_transposed ? lda : 1;
    const int64_t b_outer = b_transposed ? ldb : 1, b_inner = b_transposed ? 1 : ldb;
    static thread_local std::vector<float> memory(DEPTH * (COLUMNS + 16));
    float *packed_b = memory.data(), *packed_a = packed_b + DEPTH * COLUMNS;
    for (int j0 = 0; j0 < N; j0 += COLUMNS)
        for (int k = 0; k < K; k += DEPTH) {
            const int depth = std::min(DEPTH, K - k), columns = std::min(COLUMNS, N - j0);
            for (int j = 0; j < columns; j += kernel.columns)
                pack_strip(packed_b + j * depth, b + (j0 + j) * b_outer + k * b_inner, b_outer, b_inner,
                           std::min(kernel.columns, columns - j), kernel.columns, depth);
            for (int i = 0; i < M; i += kernel.rows) {
                const int rows = std::min(kernel.rows, M - i);
                pack_strip(packed_a, a + i * a_outer + k * a_inner, a_outer, a_inner, rows, kernel.rows, depth);
                for (int j = 0; j < columns; j += kernel.columns) {
                    alignas(64) float sums[14 * 32];
                    kernel.multiply(sums, packed_a, packed_b + j * depth, depth);
                    add_sums(c + int64_t(i) * ldc + j0 + j, ldc, sums, kernel.columns, rows,
                             std::min(kernel.columns, columns - j), k > 0 || beta != 0.0f);
                }
            }
        }
}

#endif

template <>
double cpu::measure_peak_flops<float>() {
    constexpr int rows = 128, depth = 256;  // 256 KiB of operands
    double flops = 0.0;
#pragma omp parallel reduction(+ : flops)
    {
        std::vector<float> a(rows * depth, 1.0f), b(rows * depth, 1.0f), c(rows * rows);
        flops = peak_of(
            [&] { sgemm(c.data(), rows, a.data(), false, depth, b.data(), false, rows, rows, rows, depth, 0.0f); },
            2.0 * rows * rows * depth);
    }
    return flops;
}
