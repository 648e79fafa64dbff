// matmul.cpp: the matrix products, by cuBLASLt: 77 % of a training step, bound by the tensor cores.
//
// cuBLASLt counts columns first: what is a row-major (R, C) matrix here is a (C, R) one to it, with leading dimension
// C. So each product computes the transpose of what ops.inc says, D (m, n) = A (m, k) B (k, n):
//   forward          out^T    (OC, N)  = weight^T^T (OC, IC)   inp^T  (IC, N)     A transposed
//   input_gradient   dinp^T   (IC, N)  = weight^T   (IC, OC)   dout^T (OC, N)
//   weight_gradient  dweight^T (IC, OC) = inp^T     (IC, N)    dout^T^T (N, OC)   B transposed
// bf16 operands are summed in float, and gradients of weights stay float; fp32 means fp32 throughout, no tf32.
//
// A plan (descriptors, algorithm) is made when a shape first comes, and kept. Its algorithm is the heuristic's first
// answer or, after device_autotune, the fastest of many. Split sums are added in float in a fixed order (INPLACE takes
// turns, COMPUTE_TYPE adds from the working memory), so that a plan gives the same bits each time.
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

// What NVIDIA recommends for Hopper; other GPUs are content with 4 MiB.
constexpr int64_t WORKSPACE_BYTES = 32 << 20;

enum class Kind { forward, input_gradient, weight_gradient };
constexpr const char* kind_names[] = {"forward", "input-gradient", "weight-gradient"};

// What follows the product, in one step for those who ask for it.
enum class Epilogue { nothing, bias, gelu, bias_gelu, gelu_derivative };
constexpr const char* finish_names[] = {"", "+bias", "+gelu", "+bias+gelu", "*gelu'"};

struct Shape {
    Kind kind;
    Epilogue finish;
    bool is_bf16;
    int m, n, k;
    auto operator<=>(const Shape&) const = default;
};

// What a plan leaves to kernels of ours, behind the product.
enum class PostKernel { nothing, gelu, gelu_derivative };

struct Route {
    cublasLtEpilogue_t epilogue;
    PostKernel then;
};

// Whether GELU is faster in the library's product than behind it, by a kernel of ours, where nothing is timed.
struct GeluFusion {
    int major;  // of the compute capability
    bool fused;
};
constexpr GeluFusion gelu_habits[] = {
    {8, false},   // A100, RTX 30 and 40: the epilogue is a kernel of the library's own, and writes everything twice
    {9, true},    // H100: part of the product since CUDA 12.5, 0.7 % of a whole step
    {10, true},   // B200: nobody has said; its products are made as those of H100
    {12, false},  // RTX 50: 296 us in one, 236 us apart
};

bool fused_gelu_is_faster() {
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    for (const GeluFusion& habit : gelu_habits)
        if (habit.major == properties.major) return habit.fused;
    return true;
}

// The ways to a finish, the preferred one first; the heuristic may know no algorithm for it. In fp32 GELU is always
// ours: how exact the library's is depends on the algorithm.
std::vector<Route> routes(const Shape& shape) {
    const auto either = [&](Route fused, Route apart) -> std::vector<Route> {
        if (!shape.is_bf16) return {apart};
        if (fused_gelu_is_faster()) return {fused, apart};
        return {apart, fused};
    };
    switch (shape.finish) {
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

// One product to run. Pointers are what ops.inc calls them; out is whichever result the kind has.
template <class floatX>
struct Call {
    Shape shape;
    const void *a, *b;
    void* out;
    const floatX* bias;
    floatX* pre_gelu;  // written by +gelu, read by *gelu'
    bool accumulate;
};

struct Plan {
    PostKernel then;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    int64_t workspace_bytes;
    bool final;  // false: to be timed when it can be
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

// The descriptors; the algorithm is chosen afterwards.
template <class floatX>
Plan describe(const Call<floatX>& call, const Route& route) {
    const auto& [kind, finish, is_bf16, m, n, k] = call.shape;
    const bool transa = kind == Kind::forward, transb = kind == Kind::weight_gradient;
    const cudaDataType_t type = is_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    Plan plan{};
    plan.then = route.then;
    CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set<int32_t>(plan, CUBLASLT_MATMUL_DESC_TRANSA, transa ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<int32_t>(plan, CUBLASLT_MATMUL_DESC_TRANSB, transb ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<uint32_t>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, route.epilogue);
    if (finish >= Epilogue::gelu) set<int64_t>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, m);
    set_pointers(plan, call);
    const int a_rows = transa ? k : m, a_cols = transa ? m : k, b_rows = transb ? n : k, b_cols = transb ? k : n;
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&plan.a, type, uint64_t(a_rows), uint64_t(a_cols), a_rows));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&plan.b, type, uint64_t(b_rows), uint64_t(b_cols), b_rows));
    const cudaDataType_t out_type = kind == Kind::weight_gradient ? CUDA_R_32F : type;
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&plan.d, out_type, uint64_t(m), uint64_t(n), m));
    return plan;
}

// Up to `most` plans with the heuristic's algorithms, best first; none where it has no algorithm for the epilogue.
std::vector<Plan> heuristic_plans(const Plan& described, const Shape& shape, int most) {
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(WORKSPACE_BYTES));
    // Parts of a split sum are added as floats: in place only where the result is float.
    const bool float_out = shape.kind == Kind::weight_gradient || !shape.is_bf16;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | (float_out ? CUBLASLT_REDUCTION_SCHEME_INPLACE : 0)));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(attribute, uint32_t(16));  // the least that ops.inc promises

    Plan plan = described;
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle(), &plan.desc, &plan.a, &plan.b, &plan.d,
                                                                 &plan.d, &preference, most, results.data(), &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
    check_cublas_call(status, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
    std::vector<Plan> plans;
    for (const auto& result : results) {
        if (int(&result - results.data()) >= found || result.state != CUBLAS_STATUS_SUCCESS) continue;
        plan.algo = result.algo, plan.workspace_bytes = int64_t(result.workspaceSize);
        plans.push_back(plan);
    }
    return plans;
}

template <class floatX>
cublasStatus_t queue_product(Plan& plan, const Call<floatX>& call, Stream stream) {
    const float alpha = 1.0f, beta = call.accumulate ? 1.0f : 0.0f;
    void* out = plan.then == PostKernel::gelu ? call.pre_gelu : call.out;
    void* workspace = plan.workspace_bytes ? device_scratch(plan.workspace_bytes) : nullptr;
    set_pointers(plan, call);
    return cublasLtMatmul(handle(), &plan.desc, &alpha, call.a, &plan.a, call.b, &plan.b, &beta, out, &plan.d, out,
                          &plan.d, &plan.algo, workspace, size_t(plan.workspace_bytes), stream);
}

template <class floatX>
void run(Plan& plan, const Call<floatX>& call, Stream stream) {
    CUBLAS_CHECK(queue_product(plan, call, stream));
    if (device_debug_sync) CUDA_CHECK(cudaStreamSynchronize(stream));
    const int64_t count = int64_t(call.shape.m) * call.shape.n;
    floatX* result = static_cast<floatX*>(call.out);
    if (plan.then == PostKernel::gelu) gpu::gelu_forward<floatX>(result, call.pre_gelu, count, stream);
    if (plan.then == PostKernel::gelu_derivative)
        gpu::gelu_backward<floatX>(result, call.pre_gelu, result, count, stream);
}

// ---- The choice by time

// The file of device_autotune, in memory: what was chosen for which shape, on which GPU, by which versions.
struct Choices {
    std::string path;  // empty: nothing is timed
    std::map<std::string, std::string> of_shape;
};

Choices& choices() {
    static Choices choices;
    return choices;
}

std::string choice_key(const Shape& s) {
    return format("%s; %s; %s %s m %d n %d k %d%s", device_info().name.c_str(), device_libraries().c_str(),
                  kind_names[int(s.kind)], s.is_bf16 ? "bf16" : "fp32", s.m, s.n, s.k, finish_names[int(s.finish)]);
}

void save_choices() {
    std::string text = "# timed by --autotune: device; libraries; shape: what was chosen, ms, ms at first\n";
    for (const auto& [shape, choice] : choices().of_shape) text += shape + ": " + choice + "\n";
    replace_file(choices().path, text);
}

std::string choice_text(int route, const cublasLtMatmulAlgo_t& algo, float ms, float first_ms) {
    std::string text = format("%d ", route);
    for (const uint64_t word : algo.data) text += format("%" PRIx64 " ", word);
    return text + format("%.4f %.4f", double(ms), double(first_ms));
}

// The plan that the file names, if it has one that this library still accepts.
template <class floatX>
std::optional<Plan> chosen_before(const Call<floatX>& call) {
    const auto found = choices().of_shape.find(choice_key(call.shape));
    if (found == choices().of_shape.end()) return {};
    const std::vector<Route> ways = routes(call.shape);
    size_t route = 0;
    cublasLtMatmulAlgo_t algo;
    int at = 0;
    if (sscanf(found->second.c_str(), "%zu%n", &route, &at) != 1 || route >= ways.size()) return {};
    const char* text = found->second.c_str() + at;
    for (uint64_t& word : algo.data) {
        if (sscanf(text, "%" SCNx64 "%n", &word, &at) != 1) return {};
        text += at;
    }
    Plan plan = describe(call, ways[route]);
    cublasLtMatmulHeuristicResult_t checked;
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle(), &plan.desc, &plan.a, &plan.b, &plan.d, &plan.d, &algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS || int64_t(checked.workspaceSize) > WORKSPACE_BYTES) return {};
    plan.algo = algo, plan.workspace_bytes = int64_t(checked.workspaceSize);
    return plan;
}

// The gradient of a weight has few tiles and a long sum (18 tiles of 128x256 for 132 SMs at C = 768): the sum in parts,
// which the heuristic may not think of.
std::vector<Plan> split_plans(const std::vector<Plan>& plans) {
    constexpr int32_t parts[] = {2, 3, 4, 6, 8, 11, 16, 22, 32};
    constexpr size_t algorithms = 4;  // the best of them, each in all ways
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

// Infinite for an algorithm that passes its check and then refuses.
template <class floatX>
float time_of(Plan& plan, const Call<floatX>& call, Stream stream) {
    if (queue_product(plan, call, stream) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    return gpu::least_ms(stream, [&] { run(plan, call, stream); });
}

// Runs every candidate on the call's own operands: its result is written and not added to, so it comes out right
// whichever is the last.
template <class floatX>
Plan fastest_plan(const Call<floatX>& call, Stream stream) {
    constexpr int algorithms = 16;
    constexpr float clearly = 0.98f;  // else the first stays
    const std::vector<Route> ways = routes(call.shape);
    std::optional<Plan> best;
    float best_ms = 0.0f, first_ms = 0.0f;
    int best_route = 0;
    for (const Route& route : ways) {
        std::vector<Plan> plans = heuristic_plans(describe(call, route), call.shape, algorithms);
        if (call.shape.kind == Kind::weight_gradient)
            for (const Plan& plan : split_plans(plans)) plans.push_back(plan);
        for (Plan& plan : plans) {
            const float ms = time_of(plan, call, stream);
            if (std::isinf(ms)) continue;
            if (!best) first_ms = ms;
            if (best && ms >= clearly * best_ms) continue;
            best = plan, best_ms = ms, best_route = int(&route - ways.data());
        }
    }
    if (!best) fail(EXIT_INTERNAL, "cuBLASLt has no algorithm for %s", choice_key(call.shape).c_str());
    choices().of_shape[choice_key(call.shape)] = choice_text(best_route, best->algo, best_ms, first_ms);
    save_choices();
    return *best;
}

// ---- Plans

template <class floatX>
Plan first_plan(const Call<floatX>& call) {
    for (const Route& route : routes(call.shape)) {
        const std::vector<Plan> plans = heuristic_plans(describe(call, route), call.shape, 1);
        if (!plans.empty()) return plans[0];
    }
    fail(EXIT_INTERNAL, "cuBLASLt has no algorithm for %s", choice_key(call.shape).c_str());
}

template <class floatX>
Plan make_plan(const Call<floatX>& call, Stream stream) {
    Plan plan;
    std::optional<Plan> before;
    if (!choices().path.empty()) before = chosen_before(call);
    if (before)
        plan = *before;
    else if (choices().path.empty() || call.accumulate)
        plan = first_plan(call);
    else
        plan = fastest_plan(call, stream);
    // What is added to cannot be computed twice: timing waits for a call that writes, of the next first micro-step.
    plan.final = before || choices().path.empty() || !call.accumulate;
    return plan;
}

std::map<Shape, Plan>& plans() {
    static std::map<Shape, Plan> plans;
    return plans;
}

// One host thread queues the work of a GPU, so plans need no lock.
template <class floatX>
void multiply(const Call<floatX>& call, Stream stream) {
    auto found = plans().find(call.shape);
    if (found == plans().end() || (!found->second.final && !call.accumulate))
        found = plans().insert_or_assign(call.shape, make_plan(call, stream)).first;
    run(found->second, call, stream);
}

template <class floatX>
void check_sizes(int N, int IC, int OC) {
    constexpr int multiple = 16 / sizeof(floatX);
    ENSURE(N >= 1 && IC >= 1 && OC >= 1, "a product of (%d, %d) and (%d, %d): every size must be at least 1", N, IC, IC,
           OC);
    ENSURE(IC % multiple == 0 && OC % multiple == 0,
           "a product of (%d, %d) and (%d, %d) in %s: the widths must be multiples of %d, so that rows begin at 16 "
           "bytes",
           N, IC, IC, OC, dtype_name(dtype_of<floatX>), multiple);
}

}  // namespace

bool gpu::autotuning() { return !choices().path.empty(); }

std::string gpu::choice_for(const std::string& what) {
    const auto found = choices().of_shape.find(what);
    return found == choices().of_shape.end() ? "" : found->second;
}

void gpu::keep_choice(const std::string& what, const std::string& choice) {
    choices().of_shape[what] = choice;
    save_choices();
}

void device_autotune(const std::string& cache_file) {
    choices() = {cache_file, {}};
    plans().clear();
    if (!path_exists(cache_file)) return;
    constexpr int64_t most = 16 << 20;
    const std::string text = read_file(cache_file, most);
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        const size_t colon = line.rfind(": ");
        if (line[0] != '#' && colon != std::string::npos)
            choices().of_shape[line.substr(0, colon)] = line.substr(colon + 2);
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
    const Epilogue finish = pre_gelu ? (bias ? Epilogue::bias_gelu : Epilogue::gelu)
                            : bias   ? Epilogue::bias
                                     : Epilogue::nothing;
    const Shape shape = {Kind::forward, finish, sizeof(floatX) == 2, OC, N, IC};
    multiply<floatX>({shape, weight.rows, inp, out, bias, pre_gelu, false}, stream);
}

template <class floatX>
void gpu::matmul_backward(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                          Weight<floatX> weight, const floatX* pre_gelu, int N, int IC, int OC, bool accumulate,
                          Stream stream) {
    check_sizes<floatX>(N, IC, OC);
    constexpr bool is_bf16 = sizeof(floatX) == 2;
    const Epilogue finish = pre_gelu ? Epilogue::gelu_derivative : Epilogue::nothing;
    floatX* aux = const_cast<floatX*>(pre_gelu);  // only read: the library has one attribute for both ways
    multiply<floatX>({{Kind::input_gradient, finish, is_bf16, IC, N, OC}, weight.rows, dout, dinp, nullptr, aux, false},
                     stream);
    const Shape shape = {Kind::weight_gradient, Epilogue::nothing, is_bf16, IC, OC, N};
    multiply<floatX>({shape, inp, dout, dweight, nullptr, nullptr, accumulate}, stream);
    if (dbias)
        bias_backward<floatX>(dbias, dout, N, OC, accumulate, device_scratch(bias_scratch_bytes<floatX>(N, OC)),
                              stream);
}

INSTANTIATE(gpu::matmul_scratch_bytes);
INSTANTIATE(gpu::packed_bytes);
INSTANTIATE(gpu::pack_weight);
INSTANTIATE(gpu::matmul_forward);
INSTANTIATE(gpu::matmul_backward);
