// cublaslt.cpp: plans and runs matmuls by cuBLASLt. They take 77 % of a training step and are bound by the tensor
// cores.
//
// The first call of each shape makes a plan (descriptors and algorithm), which later calls reuse. Its algorithm is the
// fastest of many (autotune.h), or else the first of the heuristic's candidates that can be launched. Split-K partial
// sums are added in float from the workspace in a fixed order (the schemes COMPUTE_TYPE and OUTPUT_TYPE), so a plan
// always gives the same bits. The scheme INPLACE is not used: no documentation promises in which order its blocks add
// to the result, and on an H200 it was not faster.
//
// The gradient of a weight has few tiles and a long sum: at C = 768 its result is 18 to 72 tiles of 128x256 for the 132
// SMs of an H100, so without a split most SMs would have nothing to do.
#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "cuda/autotune.h"
#include "cuda/cuda_check.h"
#include "cuda/matmul.h"

using namespace gpu;

namespace {

constexpr const char* kind_names[] = {"forward", "input-gradient", "weight-gradient"};
constexpr const char* epilogue_names[] = {"", "+bias", "+gelu", "+bias+gelu", "*gelu'", "+exponentials"};
constexpr const char* operand_names[] = {"fp32", "bf16", "fp8"};

template <class floatX>
using Call = MatmulCall<floatX>;
using Shape = MatmulShape;

// Bytes of workspace that they may use in one matmul. C is not known here, but a weight's shorter side is at most C.
int64_t workspace_limit(const Shape& shape) {
    return cublaslt_scratch_bytes(shape.kind == Kind::weight_gradient ? std::min(shape.m, shape.n) : 0);
}

// The part of an epilogue that one of our kernels computes after the matmul.
enum class PostKernel { nothing, gelu, gelu_derivative, exponentials };

// A route to an epilogue: cuBLASLt's epilogue, then our kernel.
struct Route {
    cublasLtEpilogue_t epilogue;
    PostKernel post_kernel;
};

// Whether GELU in cuBLASLt's epilogue is faster than in a separate kernel of ours. Used where nothing is timed. On
// A100, RTX 30 and 40 the library runs the epilogue as a second kernel, and an RTX 50 takes 296 us for 236. On an H100
// it gains 0.7 % of a step. No figure is known for B200, whose matmuls are built like those of H100.
bool fused_gelu_is_faster() {
    const int major = gpu::current_device().major;
    return major == 9 || major == 10;
}

// The routes for a shape's epilogue, the preferred one first; the heuristic may have no algorithm for it. In fp32 our
// kernel always computes GELU, because the accuracy of the library's GELU depends on the algorithm.
std::vector<Route> routes(const Shape& shape) {
    const auto either = [&](Route fused, Route separate) -> std::vector<Route> {
        if (shape.operands == Operands::fp32) return {separate};
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
        case Epilogue::exponentials:
            return {{CUBLASLT_EPILOGUE_DEFAULT, PostKernel::exponentials}};
    }
    return {};
}

struct Plan {
    PostKernel post_kernel;
    bool uses_aux;  // the library's epilogue writes or reads pre_gelu
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    int64_t workspace_bytes;
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
    if (plan.uses_aux) set<void*>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, call.pre_gelu);
    if (call.shape.operands != Operands::fp8) return;
    set<const void*>(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.a_scale);
    set<const void*>(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.b_scale);
}

int sm_count() {
    static const int all = gpu::current_device().multiProcessorCount;
    return all;
}

struct Types {
    cudaDataType_t a, b, out;
};

Types types_of(const Shape& shape) {
    const cudaDataType_t type = shape.operands == Operands::fp32 ? CUDA_R_32F : CUDA_R_16BF;
    const cudaDataType_t out = shape.kind == Kind::weight_gradient || shape.to_float ? CUDA_R_32F : type;
    if (shape.operands != Operands::fp8) return {type, type, out};
    return {CUDA_R_8F_E4M3, shape.kind == Kind::forward ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2, out};
}

// distance: elements from the begin of a matrix to that of the next.
void set_batch(cublasLtMatrixLayoutOpaque_t& layout, int32_t count, int64_t distance) {
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &distance,
                                                  sizeof(distance)));
}

// A plan with its descriptors, but without an algorithm.
template <class floatX>
Plan describe(const Call<floatX>& call, const Route& route) {
    const auto& [kind, epilogue, operands, m, n, k, adds_residual, alignment, batch, to_float] = call.shape;
    const bool fp8 = operands == Operands::fp8;
    const bool transa = fp8 || kind == Kind::forward, transb = !fp8 && kind == Kind::weight_gradient;
    const Types types = types_of(call.shape);
    Plan plan{};
    plan.post_kernel = route.post_kernel;
    plan.uses_aux = call.pre_gelu && route.post_kernel == PostKernel::nothing;
    CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set<int32_t>(plan, CUBLASLT_MATMUL_DESC_TRANSA, transa ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<int32_t>(plan, CUBLASLT_MATMUL_DESC_TRANSB, transb ? CUBLAS_OP_T : CUBLAS_OP_N);
    set<uint32_t>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, route.epilogue);
    if (plan.uses_aux) set<int64_t>(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, m);
    if (fp8 && call.bias) set<int32_t>(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
    set_pointers(plan, call);
    const int a_rows = transa ? k : m, a_cols = transa ? m : k, b_rows = transb ? n : k, b_cols = transb ? k : n;
    const auto init = [&](cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, int rows, int cols) {
        CUBLAS_CHECK(cublasLtMatrixLayoutInit(&layout, type, uint64_t(rows), uint64_t(cols), rows));
        if (call.shape.batch > 0) set_batch(layout, call.shape.batch, int64_t(rows) * cols);
    };
    init(plan.a, types.a, a_rows, a_cols);
    init(plan.b, types.b, b_rows, b_cols);
    init(plan.d, types.out, m, n);
    return plan;
}

// A sum may be computed in parts only if its length is a multiple of a tile's: 64 products in bf16, 128 in FP8. With
// other lengths cuBLASLt 13.1 gave wrong results on an H200, for some numbers of parts from 2 to 32: with 257, 1032,
// 4097, 4100 and 5000 products, and with 4097 also for parts that its heuristic proposed. Sums of 1024, 4096 and 65,536
// products were right for all numbers of parts. A batch has tiles enough without parts.
bool may_split(const Shape& shape) { return shape.k % 128 == 0 && shape.batch == 0; }

// Schemes to add split-K partial sums. They are added in float, so two are allowed only where the result is float.
std::vector<uint32_t> reduction_schemes(const Shape& shape) {
    if (!may_split(shape)) return {};
    if (types_of(shape).out != CUDA_R_32F) return {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
    return {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE};
}

// Up to max_plans plans with the heuristic's algorithms, best first; none if it has no algorithm for the epilogue.
std::vector<Plan> heuristic_plans(const Plan& described, const Shape& shape, int max_plans) {
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace_limit(shape)));
    uint32_t schemes = 0;
    for (const uint32_t scheme : reduction_schemes(shape)) schemes |= scheme;
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        prefer(attribute, uint32_t(shape.alignment));

    Plan plan = described;
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(max_plans));
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle(), &plan.desc, &plan.a, &plan.b, &plan.d, &plan.d, &preference, max_plans, results.data(), &found);
    // The epilogues that a matmul may have depend on its types, on the library's version and on the GPU.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
    check_cublas_call(status, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
    results.resize(size_t(found));
    std::vector<Plan> plans;
    for (const auto& result : results) {
        if (result.state != CUBLAS_STATUS_SUCCESS) continue;
        plan.algo = result.algo;
        plan.workspace_bytes = int64_t(result.workspaceSize);
        plans.push_back(plan);
    }
    return plans;
}

// The plan with this algorithm, if the library accepts it for the shape.
std::optional<Plan> with_algorithm(Plan plan, const Shape& shape, const cublasLtMatmulAlgo_t& algo) {
    cublasLtMatmulHeuristicResult_t checked;
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle(), &plan.desc, &plan.a, &plan.b, &plan.d, &plan.d, &algo, &checked);
    if (status != CUBLAS_STATUS_SUCCESS || int64_t(checked.workspaceSize) > workspace_limit(shape)) return {};
    plan.algo = algo;
    plan.workspace_bytes = int64_t(checked.workspaceSize);
    return plan;
}

// The heuristic's plans for a call. Batches of any size have the algorithms that it proposes for one size, so that the
// bits of a matrix do not depend on how many are in its batch: ranks divide them.
template <class floatX>
std::vector<Plan> plans_of_route(Call<floatX> call, const Route& route, int max_plans) {
    constexpr int size = 16;
    const Plan described = describe(call, route);
    if (call.shape.batch == 0) return heuristic_plans(described, call.shape, max_plans);
    call.shape.batch = size;
    std::vector<Plan> plans;
    for (const Plan& plan : heuristic_plans(describe(call, route), call.shape, max_plans))
        if (const auto own = with_algorithm(described, call.shape, plan.algo)) plans.push_back(*own);
    return plans;
}

template <class floatX>
cublasStatus_t queue_matmul(Plan& plan, const Call<floatX>& call, Stream stream) {
    const float alpha = 1.0f, beta = call.accumulate || call.residual ? 1.0f : 0.0f;
    void* out = plan.post_kernel == PostKernel::gelu ? call.pre_gelu : call.out;
    const void* added = call.residual ? call.residual : out;
    set_pointers(plan, call);
    void* workspace = plan.workspace_bytes ? device_scratch(plan.workspace_bytes) : nullptr;
    return cublasLtMatmul(handle(), &plan.desc, &alpha, call.a, &plan.a, call.b, &plan.b, &beta, added, &plan.d, out,
                          &plan.d, &plan.algo, workspace, size_t(plan.workspace_bytes), stream);
}

template <class floatX>
void queue_post_kernel(const Plan& plan, const Call<floatX>& call, Stream stream) {
    const int64_t count = int64_t(call.shape.m) * call.shape.n;
    floatX* result = static_cast<floatX*>(call.out);
    if (plan.post_kernel == PostKernel::gelu)
        gpu::gelu_forward<floatX>({result, call.amax}, call.pre_gelu, count, stream);
    if (plan.post_kernel == PostKernel::gelu_derivative)
        gpu::gelu_backward<floatX>({result, call.amax}, call.pre_gelu, result, count, stream);
    if constexpr (std::is_same_v<floatX, bf16>)
        if (plan.post_kernel == PostKernel::nothing && call.amax) gpu::raise_amax(call.amax, result, count, stream);
    if (plan.post_kernel == PostKernel::exponentials && call.shape.to_float)
        gpu::head_exponentials(static_cast<float*>(call.out), call.head, call.shape.n, call.shape.m, stream);
    else if (plan.post_kernel == PostKernel::exponentials)
        gpu::head_exponentials(result, call.head, call.shape.n, call.shape.m, stream);
}

template <class floatX>
void run(Plan& plan, const Call<floatX>& call, Stream stream) {
    CUBLAS_CHECK(queue_matmul(plan, call, stream));
    queue_post_kernel(plan, call, stream);
}

// Does what run does, but returns false if cuBLASLt refuses to launch the plan.
template <class floatX>
bool try_run(Plan& plan, const Call<floatX>& call, Stream stream) {
    if (queue_matmul(plan, call, stream) != CUBLAS_STATUS_SUCCESS) {
        CUDA_CHECK(cudaStreamSynchronize(stream));  // reports an earlier error that is not the plan's
        return false;
    }
    queue_post_kernel(plan, call, stream);
    return true;
}

// ---- Splitting the sum of a weight's gradient

// The peak of bf16 matmuls divided by that of the memory, which transfers twice per clock. Of a GPU without a data
// sheet the H100's.
double flops_per_byte() {
    static const double ratio = [] {
        int device = 0, kilohertz = 0, bits = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device));
        CUDA_CHECK(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device));
        const double flops = device_info().peak_flops_bf16, bytes = 2e3 * kilohertz * (bits / 8.0);
        return flops > 0 && bytes > 0 ? flops / bytes : 300.0;
    }();
    return ratio;
}

// The estimated time of a matmul whose sums are computed in `parts` parts, in units of the time of one whole tile: the
// SMs work in rounds of one tile each, and every part's results are written and read once.
double split_cost(const Shape& shape, int parts) {
    constexpr int64_t tile = 128 * 256;
    const int64_t tiles = ceil_div(int64_t(shape.m) * shape.n, tile);
    const double rounds = double(ceil_div<int64_t>(tiles * parts, sm_count())) / parts;
    if (parts == 1) return rounds;
    return rounds + parts * (double(tiles) / sm_count()) * 4 * flops_per_byte() / shape.k;
}

// The `count` numbers of parts with the lowest split_cost whose partial sums fit into the workspace, the lowest first.
std::vector<int32_t> best_splits(const Shape& shape, size_t count) {
    constexpr int max_parts = 32;
    std::vector<std::pair<double, int32_t>> costs;
    const int64_t part_bytes = int64_t(sizeof(float)) * shape.m * shape.n;
    const int most = may_split(shape) ? max_parts : 1;
    for (int parts = 1; parts <= most && (parts == 1 || parts * part_bytes <= workspace_limit(shape)); parts++)
        costs.emplace_back(split_cost(shape, parts), parts);
    std::sort(costs.begin(), costs.end());
    std::vector<int32_t> best;
    for (size_t i = 0; i < std::min(count, costs.size()); i++) best.push_back(costs[i].second);
    return best;
}

// Changes the algorithm of a plan; false if this algorithm has no such attribute.
template <class T>
bool set_config(Plan& plan, cublasLtMatmulAlgoConfigAttributes_t attribute, T value) {
    return cublasLtMatmulAlgoConfigSetAttribute(&plan.algo, attribute, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
}

// Variants of the plan that compute its sums in `parts` parts: one variant for each way to add the partial sums that
// the algorithm supports.
std::vector<Plan> split_plans(Plan plan, const Shape& shape, int32_t parts) {
    std::vector<Plan> out;
    for (const uint32_t scheme : reduction_schemes(shape)) {
        if (!set_config(plan, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, parts) ||
            !set_config(plan, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme))
            continue;
        if (const auto split = with_algorithm(plan, shape, plan.algo)) out.push_back(*split);
    }
    return out;
}

bool supports_splits(const Plan& plan) {
    int32_t supported = 0;
    size_t written = 0;
    return cublasLtMatmulAlgoCapGetAttribute(&plan.algo, CUBLASLT_ALGO_CAP_SPLITK_SUPPORT, &supported,
                                             sizeof(supported), &written) == CUBLAS_STATUS_SUCCESS &&
           supported != 0;
}

bool is_split(const Plan& plan) {
    int32_t parts = 1;
    size_t written = 0;
    return cublasLtMatmulAlgoConfigGetAttribute(&plan.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts),
                                                &written) == CUBLAS_STATUS_SUCCESS &&
           parts > 1;
}

// ---- Choice by time

// The chosen plan, if there is a choice and this library still accepts it.
template <class floatX>
std::optional<Plan> chosen_plan(const Call<floatX>& call) {
    const std::optional<MatmulChoice> choice = parse_matmul_choice(gpu::choice_for(matmul_key(call.shape)));
    const std::vector<Route> all_routes = routes(call.shape);
    if (!choice || size_t(choice->route) >= all_routes.size()) return {};
    cublasLtMatmulAlgo_t algo;
    std::copy(choice->algorithm.begin(), choice->algorithm.end(), algo.data);
    const auto plan = with_algorithm(describe(call, all_routes[size_t(choice->route)]), call.shape, algo);
    if (plan && is_split(*plan) && !may_split(call.shape)) return {};  // an earlier version chose it
    return plan;
}

// The heuristic's plans for a route, and split variants of the best of them. On an H200 the fastest of 64 candidates
// was among the first 8 for each matmul of 124M.
template <class floatX>
std::vector<Plan> candidates(const Call<floatX>& call, const Route& route) {
    constexpr int algorithms = 8;
    constexpr size_t split_algorithms = 2, splits = 4;
    std::vector<Plan> plans = plans_of_route(call, route, algorithms);
    if (call.shape.kind != Kind::weight_gradient) return plans;
    const std::vector<Plan> best(plans.begin(), plans.begin() + int64_t(std::min(plans.size(), split_algorithms)));
    for (const Plan& plan : best)
        if (supports_splits(plan))
            for (const int32_t parts : best_splits(call.shape, splits)) {
                if (parts == 1) continue;
                for (const Plan& split : split_plans(plan, call.shape, parts)) plans.push_back(split);
            }
    return plans;
}

// Times the candidates of all routes on the operands of the call, and runs the fastest once more, so that the
// results of the call are its results.
template <class floatX>
Plan fastest_plan(const Call<floatX>& call, Stream stream) {
    std::vector<Plan> plans;
    std::vector<size_t> route_of;
    const std::vector<Route> all_routes = routes(call.shape);
    for (size_t i = 0; i < all_routes.size(); i++) {
        for (const Plan& plan : candidates(call, all_routes[i])) plans.push_back(plan);
        route_of.resize(plans.size(), i);
    }
    const std::optional<gpu::Fastest> best =
        gpu::fastest(stream, plans.size(), [&](size_t i) { return try_run(plans[i], call, stream); });
    if (!best) fail(EXIT_INTERNAL, "cuBLASLt has no algorithm for %s", matmul_key(call.shape).c_str());
    const Plan& plan = plans[best->index];
    MatmulChoice choice = {int(route_of[best->index]), {}};
    static_assert(sizeof(plan.algo.data) == sizeof(choice.algorithm));
    std::copy(std::begin(plan.algo.data), std::end(plan.algo.data), choice.algorithm.begin());
    gpu::keep_choice(matmul_key(call.shape), choice_text(choice), *best);
    return plan;
}

// ---- Plans

// The candidates without timing: the heuristic's plans for all routes, best first. Where the first of a route leaves
// SMs without work, the same with split sums comes before it.
template <class floatX>
std::vector<Plan> untimed_candidates(const Call<floatX>& call) {
    constexpr int algorithms = 4;
    std::vector<Plan> all;
    for (const Route& route : routes(call.shape)) {
        const std::vector<Plan> plans = plans_of_route(call, route, algorithms);
        if (plans.empty()) continue;
        const int32_t parts = best_splits(call.shape, 1)[0];
        const bool to_split = call.shape.kind == Kind::weight_gradient && parts > 1 && !is_split(plans[0]);
        if (to_split && supports_splits(plans[0])) {
            const std::vector<Plan> splits = split_plans(plans[0], call.shape, parts);
            all.insert(all.end(), splits.begin(), splits.end());
        }
        all.insert(all.end(), plans.begin(), plans.end());
    }
    return all;
}

// The plans to try for a new shape, best first.
template <class floatX>
std::vector<Plan> plans_to_try(const Call<floatX>& call, Stream stream) {
    if (const std::optional<Plan> chosen = chosen_plan(call)) return {*chosen};
    if (gpu::timing_algorithms() && !is_capturing(stream)) return {fastest_plan(call, stream)};
    return untimed_candidates(call);
}

// Plans of the current version of the choices.
std::map<Shape, Plan>& plans() {
    static std::map<Shape, Plan> plans;
    static int version = 0;
    if (std::exchange(version, gpu::algorithms_version()) != version) plans.clear();
    return plans;
}

// The largest power of two, at most 128, that divides all addresses. FLAT_ALIGN promises no more than 128 for weights
// in bf16, and shapes that differ in nothing but a larger alignment would be timed twice.
template <class floatX>
int common_alignment(const Call<floatX>& call) {
    const int64_t m = call.shape.m, n = call.shape.n, k = call.shape.k;
    uintptr_t bits = 128;
    for (const void* address : {call.a, call.b, static_cast<const void*>(call.out), static_cast<const void*>(call.bias),
                                static_cast<const void*>(call.residual), static_cast<const void*>(call.pre_gelu)})
        bits |= reinterpret_cast<uintptr_t>(address);
    if (call.shape.batch > 1)
        for (const int64_t elements : {m * k, k * n, m * n}) bits |= uintptr_t(elements) * sizeof(floatX);
    return int(bits & -bits);
}

}  // namespace

template <class floatX>
void gpu::cublaslt_matmul(MatmulCall<floatX> call, Stream stream) {
    call.shape.alignment = common_alignment(call);
    const auto found = plans().find(call.shape);
    if (found != plans().end()) return run(found->second, call, stream);
    for (Plan& plan : plans_to_try(call, stream))
        if (try_run(plan, call, stream)) {
            plans().emplace(call.shape, plan);
            return;
        }
    fail(EXIT_INTERNAL, "cuBLASLt has no algorithm for %s", matmul_key(call.shape).c_str());
}

std::string gpu::matmul_key(const Shape& s) {
    return format("%s; %s; %s %s m %d n %d k %d%s%s%s%s, aligned to %d", device_info().name.c_str(),
                  device_libraries().c_str(), kind_names[int(s.kind)], operand_names[int(s.operands)], s.m, s.n, s.k,
                  epilogue_names[int(s.epilogue)], s.adds_residual ? "+residual" : "", s.batch > 0 ? ", a batch" : "",
                  s.to_float ? " to float" : "", s.alignment);
}

// NVIDIA recommends a workspace of 32 MiB for Hopper and of 4 MiB for other GPUs. The partial sums of a weight's
// gradient need more: (4C, C) floats in 8 parts are 72 MiB where C is 768.
int64_t gpu::cublaslt_scratch_bytes(int C) {
    constexpr int64_t least = 32 << 20, most = 128 << 20, parts = 8;
    return std::clamp(parts * 4 * C * C * int64_t(sizeof(float)), least, most);
}

INSTANTIATE(gpu::cublaslt_matmul);
