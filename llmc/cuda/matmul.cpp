// matmul.cpp: matrix multiplications by cuBLASLt. They take 77 % of a training step and are bound by the tensor cores.
//
// cuBLASLt's matrices are column-major: a row-major (R, C) matrix is to it a (C, R) matrix with leading dimension C.
// Each call therefore computes the transpose of the result in ops.inc, D (m, n) = A (m, k) B (k, n):
//   forward          out^T    (OC, N)  = weight^T^T (OC, IC)   inp^T  (IC, N)     A transposed
//   input_gradient   dinp^T   (IC, N)  = weight^T   (IC, OC)   dout^T (OC, N)
//   weight_gradient  dweight^T (IC, OC) = inp^T     (IC, N)    dout^T^T (N, OC)   B transposed
// bf16 operands are accumulated in float, and gradients of weights stay float. fp32 matmuls are fp32 throughout, never
// tf32.
//
// The first call of each shape makes a plan (descriptors and algorithm), which later calls reuse. Its algorithm is the
// heuristic's first proposal or, with device_autotune, the fastest of many. Split-K partial sums are added in float in
// a fixed order (INPLACE: the splits take turns; COMPUTE_TYPE: they are added from the workspace), so a plan always
// gives the same bits.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <compare>
#include <cstdio>
#include <map>
#include <optional>
#include <vector>

#include "base/device.h"
#include "base/files.h"
#include "cuda/autotune.h"
#include "cuda/cuda_check.h"
#include "cuda/matmul.h"

namespace {

// The size that NVIDIA recommends for Hopper; for other GPUs 4 MiB would be enough.
constexpr int64_t WORKSPACE_BYTES = 32 << 20;

enum class Kind { forward, input_gradient, weight_gradient };
constexpr const char* kind_names[] = {"forward", "input-gradient", "weight-gradient"};

// The operation on the result of a matmul, as the caller sees it.
enum class Epilogue { nothing, bias, gelu, bias_gelu, gelu_derivative };
constexpr const char* epilogue_names[] = {"", "+bias", "+gelu", "+bias+gelu", "*gelu'"};

struct Shape {
    Kind kind;
    Epilogue epilogue;
    bool is_bf16;
    int m, n, k;
    auto operator<=>(const Shape&) const = default;
};

// The part of an epilogue that one of our kernels computes after the matmul.
enum class PostKernel { nothing, gelu, gelu_derivative };

// A way to compute an epilogue: cuBLASLt's epilogue, then our kernel.
struct Route {
    cublasLtEpilogue_t epilogue;
    PostKernel post_kernel;
};

// Whether GELU in cuBLASLt's epilogue is faster than in a separate kernel of ours, by GPU generation. Used where
// nothing is timed.
struct GeluFusion {
    int major;  // of the compute capability
    bool fused;
};
constexpr GeluFusion gelu_fusion_by_gpu[] = {
    {8, false},   // A100, RTX 30 and 40: the library runs the epilogue as a second kernel, and writes everything twice
    {9, true},    // H100: fused into the matmul since CUDA 12.5; gains 0.7 % of a whole step
    {10, true},   // B200: no figure known; its matmuls are built like those of H100
    {12, false},  // RTX 50: 296 us fused, 236 us separate
};

bool fused_gelu_is_faster() {
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    for (const GeluFusion& fusion : gelu_fusion_by_gpu)
        if (fusion.major == properties.major) return fusion.fused;
    return true;
}

// The routes for a shape's epilogue, the preferred one first; the heuristic may have no algorithm for it. In fp32 our
// kernel always computes GELU, because the accuracy of the library's GELU depends on the algorithm.
std::vector<Route> routes(const Shape& shape) {
    const auto either = [&](Route fused, Route separate) -> std::vector<Route> {
        if (!shape.is_bf16) return {separate};
        if (fused_gelu_is_faster()) return {fused, separate};
        return {separate, fused};
    };
    switch (shape.epilogue) {
        case Epilogue::nothing:
            return {{CUBLASLT_EPILOGUE_DEFAULT, PostKernel::nothing}};
        case Epilogue::bias:
            return {{CUBLASLT_EPILOGUE_BIAS, PostKernel::nothing}};
        case Epilogue::gelu:
            return either({CUBLASLT_EPILOGUE_GELU_AUX, PostKernel::nothing},
                          {CUBLASLT_EPILOGUE_DEFAULT, PostKernel::gelu});
        case Epilogue::bias_gelu:
            return either({CUBLASLT_EPILOGUE_GELU_AUX_BIAS, PostKernel::nothing},
                          {CUBLASLT_EPILOGUE_BIAS, PostKernel::gelu});
        case Epilogue::gelu_derivative:
            return either({CUBLASLT_EPILOGUE_DGELU, PostKernel::nothing},
                          {CUBLASLT_EPILOGUE_DEFAULT, PostKernel::gelu_derivative});
    }
    return {};
}

// A matmul to run. Pointers have the names of ops.inc; out is the result: out, dinp or dweight.
template <class floatX>
struct Call {
    Shape shape;
    const void *a, *b;
    void* out;
    const floatX* bias;
    floatX* pre_gelu;  // written by Epilogue::gelu and bias_gelu, read by gelu_derivative
    bool accumulate;
};

struct Plan {
    PostKernel post_kernel;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    int64_t workspace_bytes;
    bool is_final;  // false: the algorithms are timed at the next call that allows it
};

cublasLtHandle_t handle() {
    static const cublasLtHandle_t handle = [] {
        cublasLtHandle_t h;
        CUBLAS_CHECK(cublasLtCreate(&h));
        return h;
    }();
    return handle;
}

template <class T>
void set(Plan& plan, cublasLtMatmulDescAttributes_t attribute, T value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&plan.desc, attribute, &value, sizeof(value)));
}

template <class floatX>
void set_pointers(Plan& plan, const Call<floatX>& call) {
    set<const void*>(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias);
    set<void*>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, call.pre_gelu);
}

// A plan with its descriptors, but without an algorithm.
template <class floatX>
Plan describe(const Call<floatX>& call, const Route& route) {
    const auto& [kind, epilogue, is_bf16, m, n, k] = call.shape;
    const bool transa = kind == Kind::forward, transb = kind == Kind::weight_gradient;
    const cudaDataType_t type = is_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    Plan plan{};
    plan.post_kernel = route.post_kernel;
    CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set<int32_t>(plan, CUBLASLT_MATMUL_DESC_TRANSA, transa ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<int32_t>(plan, CUBLASLT_MATMUL_DESC_TRANSB, transb ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<uint32_t>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, route.epilogue);
    if (epilogue >= Epilogue::gelu) set<int64_t>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, m);
    set_pointers(plan, call);
    const int a_rows = transa ? k : m, a_cols = transa ? m : k, b_rows = transb ? n : k, b_cols = transb ? k : n;
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&plan.a, type, uint64_t(a_rows), uint64_t(a_cols), a_rows));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&plan.b, type, uint64_t(b_rows), uint64_t(b_cols), b_rows));
    const cudaDataType_t out_type = kind == Kind::weight_gradient ? CUDA_R_32F : type;
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&plan.d, out_type, uint64_t(m), uint64_t(n), m));
    return plan;
}

// Up to max_plans plans with the heuristic's algorithms, best first; none if it has no algorithm for the epilogue.
std::vector<Plan> heuristic_plans(const Plan& described, const Shape& shape, int max_plans) {
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(WORKSPACE_BYTES));
    // Split-K partial sums are added in float, so INPLACE is allowed only where the result is float.
    const bool float_out = shape.kind == Kind::weight_gradient || !shape.is_bf16;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | (float_out ? CUBLASLT_REDUCTION_SCHEME_INPLACE : 0)));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(attribute, uint32_t(16));  // the alignment that ops.inc guarantees

    Plan plan = described;
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(max_plans));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle(), &plan.desc, &plan.a, &plan.b, &plan.d, &plan.d, &preference, max_plans, results.data(), &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
    check_cublas_call(status, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
    std::vector<Plan> plans;
    for (const auto& result : results) {
        if (int(&result - results.data()) >= found || result.state != CUBLAS_STATUS_SUCCESS) continue;
        plan.algo = result.algo;
        plan.workspace_bytes = int64_t(result.workspaceSize);
        plans.push_back(plan);
    }
    return plans;
}

template <class floatX>
cublasStatus_t queue_matmul(Plan& plan, const Call<floatX>& call, Stream stream) {
    const float alpha = 1.0f, beta = call.accumulate ? 1.0f : 0.0f;
    void* out = plan.post_kernel == PostKernel::gelu ? call.pre_gelu : call.out;
    void* workspace = plan.workspace_bytes ? device_scratch(plan.workspace_bytes) : nullptr;
    set_pointers(plan, call);
    return cublasLtMatmul(handle(), &plan.desc, &alpha, call.a, &plan.a, call.b, &plan.b, &beta, out, &plan.d, out,
                          &plan.d, &plan.algo, workspace, size_t(plan.workspace_bytes), stream);
}

template <class floatX>
void run(Plan& plan, const Call<floatX>& call, Stream stream) {
    CUBLAS_CHECK(queue_matmul(plan, call, stream));
    if (device_debug_sync) CUDA_CHECK(cudaStreamSynchronize(stream));
    const int64_t count = int64_t(call.shape.m) * call.shape.n;
    floatX* result = static_cast<floatX*>(call.out);
    if (plan.post_kernel == PostKernel::gelu) gpu::gelu_forward<floatX>(result, call.pre_gelu, count, stream);
    if (plan.post_kernel == PostKernel::gelu_derivative)
        gpu::gelu_backward<floatX>(result, call.pre_gelu, result, count, stream);
}

// ---- Autotuning

// The contents of device_autotune's cache file. Keys name the GPU, the library versions and the shape.
struct AutotuneCache {
    std::string path;  // empty: nothing is timed
    std::map<std::string, std::string> entries;
};

AutotuneCache& autotune_cache() {
    static AutotuneCache autotune_cache;
    return autotune_cache;
}

std::string cache_key(const Shape& s) {
    return format("%s; %s; %s %s m %d n %d k %d%s", device_info().name.c_str(), device_libraries().c_str(),
                  kind_names[int(s.kind)], s.is_bf16 ? "bf16" : "fp32", s.m, s.n, s.k, epilogue_names[int(s.epilogue)]);
}

void save_cache() {
    std::string text = "# timed by --autotune: device; libraries; shape: what was chosen, ms, ms at first\n";
    for (const auto& [shape, choice] : autotune_cache().entries) text += shape + ": " + choice + "\n";
    replace_file(autotune_cache().path, text);
}

std::string cache_entry(int route, const cublasLtMatmulAlgo_t& algo, float ms, float first_ms) {
    std::string text = format("%d ", route);
    for (const uint64_t word : algo.data) text += format("%" PRIx64 " ", word);
    return text + format("%.4f %.4f", double(ms), double(first_ms));
}

// The plan in the cache file, if there is one and this library still accepts it.
template <class floatX>
std::optional<Plan> cached_plan(const Call<floatX>& call) {
    const auto found = autotune_cache().entries.find(cache_key(call.shape));
    if (found == autotune_cache().entries.end()) return {};
    const std::vector<Route> all_routes = routes(call.shape);
    size_t route = 0;
    cublasLtMatmulAlgo_t algo;
    int at = 0;
    if (sscanf(found->second.c_str(), "%zu%n", &route, &at) != 1 || route >= all_routes.size()) return {};
    const char* text = found->second.c_str() + at;
    for (uint64_t& word : algo.data) {
        if (sscanf(text, "%" SCNx64 "%n", &word, &at) != 1) return {};
        text += at;
    }
    Plan plan = describe(call, all_routes[route]);
    cublasLtMatmulHeuristicResult_t checked;
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle(), &plan.desc, &plan.a, &plan.b, &plan.d, &plan.d, &algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS || int64_t(checked.workspaceSize) > WORKSPACE_BYTES) return {};
    plan.algo = algo;
    plan.workspace_bytes = int64_t(checked.workspaceSize);
    return plan;
}

// Split-K variants of plans. The gradient of a weight has few tiles and a long sum (18 tiles of 128x256 for 132 SMs at
// C = 768), and the heuristic may not propose to split it.
std::vector<Plan> split_plans(const std::vector<Plan>& plans) {
    constexpr int32_t parts[] = {2, 3, 4, 6, 8, 11, 16, 22, 32};
    constexpr size_t algorithms = 4;  // the best ones; each is tried with every split and scheme
    std::vector<Plan> out;
    for (size_t i = 0; i < std::min(plans.size(), algorithms); i++) {
        Plan plan = plans[i];
        int32_t splits = 0;
        size_t written = 0;
        CUBLAS_CHECK(cublasLtMatmulAlgoCapGetAttribute(&plan.algo, CUBLASLT_ALGO_CAP_SPLITK_SUPPORT, &splits,
                                                       sizeof(splits), &written));
        if (!splits) continue;
        for (const uint32_t scheme : {CUBLASLT_REDUCTION_SCHEME_INPLACE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE})
            for (const int32_t part : parts) {
                cublasLtMatmulHeuristicResult_t checked;
                CUBLAS_CHECK(cublasLtMatmulAlgoConfigSetAttribute(&plan.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &part,
                                                                  sizeof(part)));
                CUBLAS_CHECK(cublasLtMatmulAlgoConfigSetAttribute(&plan.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                                  &scheme, sizeof(scheme)));
                const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle(), &plan.desc, &plan.a, &plan.b, &plan.d,
                                                                      &plan.d, &plan.algo, &checked);
                plan.workspace_bytes = int64_t(checked.workspaceSize);
                if (status == CUBLAS_STATUS_SUCCESS && plan.workspace_bytes <= WORKSPACE_BYTES) out.push_back(plan);
            }
    }
    return out;
}

// Infinite for an algorithm that passes its check and then fails.
template <class floatX>
float measure_call(Plan& plan, const Call<floatX>& call, Stream stream) {
    if (queue_matmul(plan, call, stream) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    return gpu::measure_ms(stream, [&] { run(plan, call, stream); });
}

// Times every candidate on the operands of the call. That is safe because the result is overwritten and not accumulated
// into; whichever candidate runs last leaves the right result.
template <class floatX>
Plan fastest_plan(const Call<floatX>& call, Stream stream) {
    constexpr int algorithms = 16;
    constexpr float max_ratio = 0.98f;  // a later candidate must take less than this share of the best time
    const std::vector<Route> all_routes = routes(call.shape);
    std::optional<Plan> best;
    float best_ms = 0.0f, first_ms = 0.0f;
    int best_route = 0;
    for (const Route& route : all_routes) {
        std::vector<Plan> plans = heuristic_plans(describe(call, route), call.shape, algorithms);
        if (call.shape.kind == Kind::weight_gradient)
            for (const Plan& plan : split_plans(plans)) plans.push_back(plan);
        for (Plan& plan : plans) {
            const float ms = measure_call(plan, call, stream);
            if (std::isinf(ms)) continue;
            if (!best) first_ms = ms;
            if (best && ms >= max_ratio * best_ms) continue;
            best = plan;
            best_ms = ms;
            best_route = int(&route - all_routes.data());
        }
    }
    if (!best) fail(EXIT_INTERNAL, "cuBLASLt has no algorithm for %s", cache_key(call.shape).c_str());
    autotune_cache().entries[cache_key(call.shape)] = cache_entry(best_route, best->algo, best_ms, first_ms);
    save_cache();
    return *best;
}

// ---- Plans

template <class floatX>
Plan first_plan(const Call<floatX>& call) {
    for (const Route& route : routes(call.shape)) {
        const std::vector<Plan> plans = heuristic_plans(describe(call, route), call.shape, 1);
        if (!plans.empty()) return plans[0];
    }
    fail(EXIT_INTERNAL, "cuBLASLt has no algorithm for %s", cache_key(call.shape).c_str());
}

template <class floatX>
Plan make_plan(const Call<floatX>& call, Stream stream) {
    Plan plan;
    std::optional<Plan> cached;
    if (!autotune_cache().path.empty()) cached = cached_plan(call);
    if (cached)
        plan = *cached;
    else if (autotune_cache().path.empty() || call.accumulate)
        plan = first_plan(call);
    else
        plan = fastest_plan(call, stream);
    // A call that accumulates cannot be repeated for timing. The next call that overwrites is timed instead: that of
    // the next step's first micro-step.
    plan.is_final = cached || autotune_cache().path.empty() || !call.accumulate;
    return plan;
}

std::map<Shape, Plan>& plans() {
    static std::map<Shape, Plan> plans;
    return plans;
}

// One host thread queues all work of a GPU, so plans need no lock.
template <class floatX>
void matmul(const Call<floatX>& call, Stream stream) {
    auto found = plans().find(call.shape);
    if (found == plans().end() || (!found->second.is_final && !call.accumulate))
        found = plans().insert_or_assign(call.shape, make_plan(call, stream)).first;
    run(found->second, call, stream);
}

template <class floatX>
void check_sizes(int N, int IC, int OC) {
    constexpr int multiple = 16 / sizeof(floatX);
    ENSURE(N >= 1 && IC >= 1 && OC >= 1, "a matmul of (%d, %d) and (%d, %d): every size must be at least 1", N, IC, IC,
           OC);
    ENSURE(IC % multiple == 0 && OC % multiple == 0,
           "a matmul of (%d, %d) and (%d, %d) in %s: the widths must be multiples of %d, so that rows begin at 16 "
           "bytes",
           N, IC, IC, OC, dtype_name(dtype_of<floatX>), multiple);
}

}  // namespace

bool gpu::autotuning() { return !autotune_cache().path.empty(); }

std::string gpu::choice_for(const std::string& key) {
    const auto found = autotune_cache().entries.find(key);
    return found == autotune_cache().entries.end() ? "" : found->second;
}

void gpu::keep_choice(const std::string& key, const std::string& choice) {
    autotune_cache().entries[key] = choice;
    save_cache();
}

void device_autotune(const std::string& cache_file) {
    autotune_cache() = {cache_file, {}};
    plans().clear();
    if (!path_exists(cache_file)) return;
    constexpr int64_t max_bytes = 16 << 20;
    const std::string text = read_file(cache_file, max_bytes);
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        const size_t colon = line.rfind(": ");
        if (line[0] != '#' && colon != std::string::npos)
            autotune_cache().entries[line.substr(0, colon)] = line.substr(colon + 2);
    }
}

template <class floatX>
int64_t gpu::matmul_scratch_bytes(int N, int C) {
    int64_t bytes = WORKSPACE_BYTES;
    for (const int OC : {C, 3 * C, 4 * C}) bytes = std::max(bytes, bias_scratch_bytes<floatX>(N, OC));
    return bytes;
}

template <class floatX>
int64_t gpu::packed_bytes(int, int) {
    return 0;
}

template <class floatX>
void gpu::pack_weight(void*, const floatX*, int, int, Stream) {}

template <class floatX>
void gpu::matmul_forward(floatX* out, floatX* pre_gelu, const floatX* inp, Weight<floatX> weight, const floatX* bias,
                         int N, int IC, int OC, Stream stream) {
    check_sizes<floatX>(N, IC, OC);
    const Epilogue epilogue = pre_gelu ? (bias ? Epilogue::bias_gelu : Epilogue::gelu)
                              : bias   ? Epilogue::bias
                                       : Epilogue::nothing;
    const Shape shape = {Kind::forward, epilogue, sizeof(floatX) == 2, OC, N, IC};
    matmul<floatX>({shape, weight.rows, inp, out, bias, pre_gelu, false}, stream);
}

template <class floatX>
void gpu::matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                          Weight<floatX> weight, const floatX* pre_gelu, int N, int IC, int OC, bool accumulate,
                          Stream stream) {
    check_sizes<floatX>(N, IC, OC);
    constexpr bool is_bf16 = sizeof(floatX) == 2;
    const Epilogue epilogue = pre_gelu ? Epilogue::gelu_derivative : Epilogue::nothing;
    floatX* aux = const_cast<floatX*>(pre_gelu);  // only read, but the library has one attribute for input and output
    matmul<floatX>({{Kind::input_gradient, epilogue, is_bf16, IC, N, OC}, weight.rows, dout, dinp, nullptr, aux, false},
                   stream);
    const Shape shape = {Kind::weight_gradient, Epilogue::nothing, is_bf16, IC, OC, N};
    matmul<floatX>({shape, inp, dout, dweight, nullptr, nullptr, accumulate}, stream);
    if (dbias)
        bias_backward<floatX>(dbias, dout, N, OC, accumulate, device_scratch(bias_scratch_bytes<floatX>(N, OC)),
                              stream);
}

INSTANTIATE(gpu::matmul_scratch_bytes);
INSTANTIATE(gpu::packed_bytes);
INSTANTIATE(gpu::pack_weight);
INSTANTIATE(gpu::matmul_forward);
INSTANTIATE(gpu::matmul_backward);
