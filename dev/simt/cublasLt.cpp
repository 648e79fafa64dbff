// cublasLt.cpp: the emulator's cuBLASLt. Compiled without sanitizers, like emulator.cpp; it reports to the sanitizers
// which memory a matmul reads and writes.
//
// It offers four algorithms, which differ in their time on the stream's clock, in workspace, in the alignment that they
// need, and in whether they support split-K. With split-K the order of the sums, and so the bits of the result, differ,
// as they do on a GPU.
#include "cublasLt.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/types.h"
#include "internal.h"

using simt::Site;

namespace {

// The fields of a cublasLtMatmulAlgo_t's data are {index of the algorithm, number of splits, reduction scheme}.
struct Algorithm {
    float ms;     // duration on the stream's clock
    bool splits;  // supports split-K
    size_t workspace_bytes, alignment;
};
constexpr Algorithm algorithms[] = {
    {5.0f, true, 0, 16}, {4.0f, false, 4096, 16}, {3.0f, true, 256, 128}, {6.0f, false, 0, 16}};
constexpr int num_algorithms = int(std::size(algorithms));

bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
size_t size_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }
// Bytes from the begin of one matrix of a batch to that of the next.
size_t batch_step(const cublasLtMatrixLayoutOpaque_t& l) { return size_t(l.batch_offset) * size_of(l.type); }
size_t extent(const cublasLtMatrixLayoutOpaque_t& l) {
    return size_t(l.batch - 1) * batch_step(l) + (size_t(l.ld) * (l.cols - 1) + l.rows) * size_of(l.type);
}

bool adds_bias(uint32_t epilogue) { return epilogue & 4; }
bool has_aux(uint32_t epilogue) { return epilogue & 128; }
bool applies_gelu(uint32_t epilogue) { return epilogue & 32; }
bool applies_derivative(uint32_t epilogue) { return epilogue & 64; }

struct Sizes {
    int64_t m, n, k;
};

Sizes sizes_of(const cublasLtMatmulDescOpaque_t& desc, const cublasLtMatrixLayoutOpaque_t& a,
               const cublasLtMatrixLayoutOpaque_t& d) {
    return {int64_t(d.rows), int64_t(d.cols), int64_t(desc.transa ? a.rows : a.cols)};
}

// Describes a bug in the description of an FP8 matmul, or returns null. These are the library's rules on Hopper.
const char* fp8_bug(const cublasLtMatmulDescOpaque_t& desc, const cublasLtMatrixLayoutOpaque_t& a,
                    const cublasLtMatrixLayoutOpaque_t& b, const cublasLtMatrixLayoutOpaque_t& d) {
    const Sizes s = sizes_of(desc, a, d);
    if (!is_fp8(b.type)) return "A is FP8, but B is not";
    if (!desc.transa || desc.transb) return "FP8 operands need A transposed and B not transposed";
    if (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2) return "A and B are both E5M2";
    if (is_fp8(d.type)) return "a result in FP8, which the emulator does not support";
    if (s.m % 16 || s.k % 16) return "FP8 operands whose rows or columns are not a multiple of 16";
    if (!desc.a_scale || !desc.b_scale) return "FP8 operands without their scales";
    if (adds_bias(desc.epilogue) && desc.bias_type != CUDA_R_16BF) return "the bias of FP8 operands must be bf16";
    return nullptr;
}

// Describes a bug in the layouts, or returns null. The library returns CUBLAS_STATUS_INVALID_VALUE or NOT_SUPPORTED for
// some of these and does not notice others.
const char* layout_bug(const cublasLtMatmulDescOpaque_t& desc, const cublasLtMatrixLayoutOpaque_t& a,
                       const cublasLtMatrixLayoutOpaque_t& b, const cublasLtMatrixLayoutOpaque_t& c,
                       const cublasLtMatrixLayoutOpaque_t& d) {
    const Sizes s = sizes_of(desc, a, d);
    if (desc.compute != CUBLAS_COMPUTE_32F || desc.scale != CUDA_R_32F)
        return "a matmul that does not accumulate in float";
    if (c.type != d.type) return "C and D must have the same type";
    if (is_fp8(a.type) || is_fp8(b.type)) {
        if (const char* wrong = fp8_bug(desc, a, b, d)) return wrong;
    } else {
        if (desc.a_scale || desc.b_scale) return "scales of operands that are not FP8";
        if (a.type != b.type) return "A and B must have the same type";
        if (d.type != a.type && d.type != CUDA_R_32F) return "D must have the type of A, or float";
    }
    if (s.m < 1 || s.n < 1 || s.k < 1) return "an empty matmul";
    if (int64_t(desc.transa ? a.cols : a.rows) != s.m) return "A and D have different numbers of rows";
    if (int64_t(desc.transb ? b.rows : b.cols) != s.n) return "B and D have different numbers of columns";
    if (int64_t(desc.transb ? b.cols : b.rows) != s.k) return "the rows of B are not as many as the columns of A";
    if (c.rows != d.rows || c.cols != d.cols || c.ld != d.ld) return "C and D have different layouts";
    if (a.batch < 1 || a.batch != b.batch || a.batch != c.batch || a.batch != d.batch)
        return "the layouts have different numbers of matrices";
    if (d.batch > 1 && desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT) return "a batch with an epilogue";
    if (d.batch > 1 && size_t(d.batch_offset) < size_t(d.ld) * d.cols) return "the results of a batch overlap";
    for (const auto* l : {&a, &b, &d}) {
        if (l->ld < int64_t(l->rows)) return "a leading dimension is less than a column";
        if (size_t(l->ld) * size_of(l->type) % 16 || (l->batch > 1 && batch_step(*l) % 16))
            return "columns are not aligned to 16 bytes, so the library would not use tensor cores";
    }
    if (!has_aux(desc.epilogue) && (desc.aux || desc.aux_ld)) return "a matrix for an epilogue that has none";
    if (has_aux(desc.epilogue) && (desc.aux_ld < s.m || desc.aux_ld % 8))
        return "the leading dimension of the epilogue's matrix is less than a column, or not a multiple of 8";
    if (desc.bias && !adds_bias(desc.epilogue)) return "a bias for an epilogue that has none";
    return nullptr;
}

size_t workspace_needed(const cublasLtMatmulAlgo_t& algo, const Sizes& s) {
    const Algorithm& algorithm = algorithms[algo.data[0]];
    if (algo.data[1] > 1 && algo.data[2] != CUBLASLT_REDUCTION_SCHEME_INPLACE)
        return size_t(algo.data[1]) * size_t(s.m * s.n) * sizeof(float);
    return algorithm.workspace_bytes;
}

struct Range {
    const char* begin;
    size_t bytes;
    bool overlaps(const Range& other) const { return begin < other.begin + other.bytes && other.begin < begin + bytes; }
};

// The operands of one call of cublasLtMatmul.
struct MatmulCall {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a_layout, b_layout, d_layout;
    const char *a, *b, *c;
    char* d;
    float alpha, beta;
    Sizes sizes;
    int64_t splits;
    char* workspace;
    size_t workspace_bytes;
    // (k, m), (n, k), (m), (m); allocated when the call is queued, because the queued work must not allocate.
    std::vector<float> wide_a, wide_b, sums, split_sums;  // "wide": converted to float
    std::vector<Range> read, written;
};

float element(const char* p, cudaDataType_t type, int64_t i) {
    if (type == CUDA_R_32F) return reinterpret_cast<const float*>(p)[i];
    if (type == CUDA_R_8F_E4M3) return fp8_value<E4M3>(uint8_t(p[i]));
    if (type == CUDA_R_8F_E5M2) return fp8_value<E5M2>(uint8_t(p[i]));
    return float(reinterpret_cast<const bf16*>(p)[i]);
}
void set_element(char* p, cudaDataType_t type, int64_t i, float value) {
    if (type == CUDA_R_32F)
        reinterpret_cast<float*>(p)[i] = value;
    else
        reinterpret_cast<bf16*>(p)[i] = bf16(value);
}

// out (rows, cols), row-major, = a stored matrix whose element (r, c) is at r * row_step + c * col_step.
void widen(std::vector<float>& out, const char* p, cudaDataType_t type, int64_t rows, int64_t cols, int64_t row_step,
           int64_t col_step) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) out[size_t(r * cols + c)] = element(p, type, r * row_step + c * col_step);
}

// On compute capability 9.0 the library's epilogues of bf16 use tanh.approx, whose relative error is at most 2^-11 (PTX
// ISA), so 2^12 units in the last place.
float tanh_of(float x, cudaDataType_t type) {
    const float t = std::tanh(0.7978845608f * (x + 0.044715f * x * x * x));
    return type == CUDA_R_32F ? t : simt::inexact(t, 1 << 12);
}

float gelu_derivative(float x, cudaDataType_t type) {
    const float t = tanh_of(x, type), bend = 1 - t * t;
    return 0.5f * (1 + t) + (bend == 0 ? 0 : 0.5f * x * bend * 0.7978845608f * (1 + 3 * 0.044715f * x * x));
}

void apply_epilogue(const MatmulCall& p, int64_t number, int64_t i, int64_t j, float value) {
    const cudaDataType_t type = p.d_layout.type;
    const int64_t at = number * p.d_layout.batch_offset + j * p.d_layout.ld + i, aux_at = j * p.desc.aux_ld + i;
    char* aux = static_cast<char*>(p.desc.aux);
    if (p.beta != 0) value += p.beta * element(p.c, type, at);
    if (adds_bias(p.desc.epilogue)) value += element(static_cast<const char*>(p.desc.bias), type, i);
    if (applies_derivative(p.desc.epilogue)) value *= gelu_derivative(element(aux, type, aux_at), type);
    if (applies_gelu(p.desc.epilogue)) {
        set_element(aux, type, aux_at, value);
        value = 0.5f * value * (1 + tanh_of(value, type));
    }
    set_element(p.d, type, at, value);
}

// number: of the matmul in its batch.
void compute_one(MatmulCall& p, int64_t number) {
    const auto [m, n, k] = p.sizes;
    const bool fp8 = is_fp8(p.a_layout.type);
    const float scale = fp8 ? *static_cast<float*>(p.desc.a_scale) * *static_cast<float*>(p.desc.b_scale) : 1.0f;
    const int64_t a_ld = p.a_layout.ld, b_ld = p.b_layout.ld, step = (k + p.splits - 1) / p.splits;
    widen(p.wide_a, p.a + size_t(number) * batch_step(p.a_layout), p.a_layout.type, k, m, p.desc.transa ? 1 : a_ld,
          p.desc.transa ? a_ld : 1);
    widen(p.wide_b, p.b + size_t(number) * batch_step(p.b_layout), p.b_layout.type, n, k, p.desc.transb ? 1 : b_ld,
          p.desc.transb ? b_ld : 1);
    for (int64_t j = 0; j < n; j++) {
        std::fill(p.sums.begin(), p.sums.end(), 0.0f);
        for (int64_t begin = 0; begin < k; begin += step) {
            std::fill(p.split_sums.begin(), p.split_sums.end(), 0.0f);
            // From the last product to the first: a test's bound must not depend on the order of the reference.
            for (int64_t l = std::min(k, begin + step) - 1; l >= begin; l--) {
                const float b = p.wide_b[size_t(j * k + l)], *a = &p.wide_a[size_t(l * m)];
                float* sums = p.split_sums.data();
                for (int64_t i = 0; i < m; i++) sums[i] += a[i] * b;
            }
            for (int64_t i = 0; i < m; i++) p.sums[size_t(i)] += p.split_sums[size_t(i)];
        }
        for (int64_t i = 0; i < m; i++) apply_epilogue(p, number, i, j, p.alpha * scale * p.sums[size_t(i)]);
    }
}

void compute(MatmulCall& p) {
    for (int32_t number = 0; number < p.d_layout.batch; number++) compute_one(p, number);
    // Code that relied on the contents of the workspace reads NaN.
    simt::fill(p.workspace, simt::uninitialized, p.workspace_bytes);
}

// Without C where it is D.
void find_ranges(MatmulCall& p) {
    const size_t element_bytes = size_of(p.d_layout.type);
    const Range aux = {static_cast<char*>(p.desc.aux),
                       size_t(p.desc.aux_ld * (p.sizes.n - 1) + p.sizes.m) * element_bytes};
    const auto bias = [&](int64_t count) {
        return Range{static_cast<const char*>(p.desc.bias), size_t(count) * element_bytes};
    };
    p.read = {{p.a, extent(p.a_layout)}, {p.b, extent(p.b_layout)}};
    p.written = {{p.d, extent(p.d_layout)}};
    if (is_fp8(p.a_layout.type))
        for (void* scale : {p.desc.a_scale, p.desc.b_scale})
            p.read.push_back({static_cast<char*>(scale), sizeof(float)});
    if (adds_bias(p.desc.epilogue)) p.read.push_back(bias(p.sizes.m));
    if (applies_derivative(p.desc.epilogue)) p.read.push_back(aux);
    if (applies_gelu(p.desc.epilogue)) p.written.push_back(aux);
    if (p.workspace_bytes) p.written.push_back({p.workspace, p.workspace_bytes});
    if (p.beta != 0 && p.c != p.d) p.read.push_back({p.c, extent(p.d_layout)});
}

// Reports the accesses to ThreadSanitizer, because this file is not instrumented.
void annotate_accesses(const MatmulCall& p) {
    if (!__tsan_read_range) return;
    for (const Range& r : p.read) __tsan_read_range(const_cast<char*>(r.begin), r.bytes);
    for (const Range& r : p.written) __tsan_write_range(const_cast<char*>(r.begin), r.bytes);
}

// Reports operands that are not in device memory, misaligned operands, and outputs that overlap another operand.
void check_ranges(const MatmulCall& p, Site site) {
    const auto check = [&](const Range& r) {
        simt::check_device_range(r.begin, r.bytes, "cublasLtMatmul: a pointer that is not in device memory", site);
        if (reinterpret_cast<uintptr_t>(r.begin) % 16)
            simt::report("cublasLtMatmul: a pointer that is not aligned to 16 bytes", site);
    };
    for (const Range& r : p.read) check(r);
    for (size_t i = 0; i < p.written.size(); i++) {
        check(p.written[i]);
        for (const Range& r : p.read)
            if (p.written[i].overlaps(r)) simt::report("cublasLtMatmul: an output overlaps an input", site);
        for (size_t j = 0; j < i; j++)
            if (p.written[i].overlaps(p.written[j])) simt::report("cublasLtMatmul: two outputs overlap", site);
    }
}

}  // namespace

size_t cublasLtGetVersion() { return 130100; }

const char* cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS         ? "CUBLAS_STATUS_SUCCESS"
           : status == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
                                                   : "CUBLAS_STATUS_EXECUTION_FAILED";
}

// SIMT_LIBRARY_MIB is the device memory that the library allocates for itself, as the real one does.
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (const char* mib = getenv("SIMT_LIBRARY_MIB")) simt::take_device_memory(size_t(atoi(mib)) << 20);
    static char context;
    *handle = reinterpret_cast<cublasLtHandle_t>(&context);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t desc, cublasComputeType_t compute, cudaDataType_t scale) {
    *desc = {compute, scale};
    return CUBLAS_STATUS_SUCCESS;
}

template <class T>
static cublasStatus_t set(T& field, const void* value, size_t bytes) {
    if (bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA:
            return set(desc->transa, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB:
            return set(desc->transb, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE:
            return set(desc->epilogue, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
            return set(desc->bias, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
            return set(desc->aux, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
            return set(desc->aux_ld, value, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
            return set(desc->a_scale, value, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
            return set(desc->b_scale, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
            return set(desc->bias_type, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows,
                                        uint64_t cols, int64_t ld) {
    *layout = {type, rows, cols, ld, 1, 0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return set(layout->batch, value, bytes);
    return set(layout->batch_offset, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    *preference = {0, ~0u, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
            return set(preference->workspace_bytes, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
            return set(preference->reduction_schemes, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
            return set(preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result) {
    const bool fused = desc->epilogue & (32 | 64);
    const Sizes s = sizes_of(*desc, *a, *d);
    *result = {*algo, 0, CUBLAS_STATUS_NOT_SUPPORTED, 1.0f, {}};
    const uint64_t splits = algo->data[1], scheme = algo->data[2];
    if (layout_bug(*desc, *a, *b, *c, *d)) return CUBLAS_STATUS_INVALID_VALUE;
    if (algo->data[0] >= num_algorithms || splits < 1 || int64_t(splits) > s.k) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (splits > 1 && (!algorithms[algo->data[0]].splits || scheme == 0)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(a->type) && simt::config.compute_capability < 89) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (fused && (!simt::config.fused_epilogues || splits > 1)) return CUBLAS_STATUS_NOT_SUPPORTED;
    result->workspaceSize = workspace_needed(*algo, s);
    return result->state = CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    *found = 0;
    for (uint64_t i = 0; i < num_algorithms && *found < requested; i++) {
        const cublasLtMatmulAlgo_t algo = {{i, 1, 0}};
        cublasLtMatmulHeuristicResult_t& result = results[*found];
        const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, desc, a, b, c, d, &algo, &result);
        if (status == CUBLAS_STATUS_INVALID_VALUE) return status;
        const bool aligned = std::all_of(std::begin(preference->alignment), std::end(preference->alignment),
                                         [&](uint32_t bytes) { return bytes >= algorithms[i].alignment; });
        if (status == CUBLAS_STATUS_SUCCESS && aligned && result.workspaceSize <= preference->workspace_bytes)
            (*found)++;
    }
    return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t* algo, cublasLtMatmulAlgoCapAttributes_t,
                                                 void* value, size_t bytes, size_t* written) {
    const int32_t splits = algorithms[algo->data[0]].splits;
    if (bytes != sizeof(splits)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(value, &splits, bytes);
    *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                    size_t bytes, size_t* written) {
    const uint32_t number = uint32_t(algo->data[attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? 1 : 2]);
    if (bytes != sizeof(number)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(value, &number, bytes);
    *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    uint32_t number;
    if (bytes != sizeof(number)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&number, value, bytes);
    algo->data[attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? 1 : 2] = number;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream, Site site) {
    if (const char* wrong = layout_bug(*desc, *a_layout, *b_layout, *c_layout, *d_layout))
        simt::report((std::string("cublasLtMatmul: ") + wrong).c_str(), site);
    if (!handle || !algo) simt::report("cublasLtMatmul without a handle or an algorithm", site);
    cublasLtMatmulHeuristicResult_t checked;
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle, desc, a_layout, b_layout, c_layout, d_layout, algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (int(algo->data[0]) == simt::config.failing_algorithm) return CUBLAS_STATUS_EXECUTION_FAILED;
    for (const void* p : {a, b, c, static_cast<const void*>(d)})
        if (reinterpret_cast<uintptr_t>(p) % algorithms[algo->data[0]].alignment) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (reinterpret_cast<uintptr_t>(workspace) % 256)
        simt::report("cublasLtMatmul: a workspace that is not aligned to 256 bytes", site);
    if (workspace_bytes < checked.workspaceSize)
        simt::report("cublasLtMatmul: less workspace than the algorithm needs", site);

    const Sizes s = sizes_of(*desc, *a_layout, *d_layout);
    if (algo->data[1] > 1 && s.k % 128 != 0)
        simt::report("cublasLtMatmul: a sum in parts that does not consist of whole tiles; cuBLASLt 13.1 adds it wrong",
                     site);
    auto p = std::make_shared<MatmulCall>();
    p->desc = *desc;
    p->a_layout = *a_layout;
    p->b_layout = *b_layout;
    p->d_layout = *d_layout;
    p->a = static_cast<const char*>(a);
    p->b = static_cast<const char*>(b);
    p->c = static_cast<const char*>(c);
    p->d = static_cast<char*>(d);
    p->alpha = *static_cast<const float*>(alpha);
    p->beta = *static_cast<const float*>(beta);
    p->sizes = s;
    p->splits = int64_t(algo->data[1]);
    p->workspace = static_cast<char*>(workspace);
    p->workspace_bytes = checked.workspaceSize;
    p->wide_a.resize(size_t(s.k * s.m));
    p->wide_b.resize(size_t(s.n * s.k));
    p->sums.resize(size_t(s.m));
    p->split_sums.resize(size_t(s.m));
    find_ranges(*p);
    check_ranges(*p, site);
    const auto run = [p] {
        annotate_accesses(*p);
        compute(*p);
    };
    simt::enqueue_work(run, algorithms[algo->data[0]].ms / float(p->splits), stream);
    return simt::device_has_failed() ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
