// cudnn_plan.cpp: builds the operation graphs of attention and makes plans for them (cudnn_plan.h).
//
// cuDNN's engines recognize attention by the pattern of the graph, so keep the operations and their order. Tensors of
// (T, T) elements are "virtual": they exist only inside the fused kernel. No tensor is transposed or copied in memory:
// q, k and v are strided (B, NH, T, HS) views of qkv, and K^T is k with its last two strides exchanged.
#include "cuda/cudnn_plan.h"

#include <algorithm>

namespace gpu {

void check_cudnn_call(cudnnStatus_t status, const char* call, const char* file, int line) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    char reason[1024] = "";
    cudnnGetLastErrorString(reason, sizeof(reason));
    for (char& c : reason)
        if (c == '\n') c = ' ';  // error messages have one line
    fail(EXIT_INTERNAL, "%s at %s:%d: %s %s", call, file, line, cudnnGetErrorString(status), reason);
}

void set_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                   cudnnBackendAttributeType_t type, int64_t count, const void* values) {
    CUDNN_CHECK(cudnnBackendSetAttribute(descriptor, name, type, count, values));
}

namespace {

using Handle = cudnnBackendDescriptor_t;  // descriptor that a Graph owns
using Attribute = cudnnBackendAttributeName_t;
using Dims = std::vector<int64_t>;

// ---- Attributes

void set(Handle d, Attribute name, int64_t v) { set_attribute(d, name, CUDNN_TYPE_INT64, 1, &v); }
void set(Handle d, Attribute name, bool v) { set_attribute(d, name, CUDNN_TYPE_BOOLEAN, 1, &v); }
void set(Handle d, Attribute name, const Dims& v) {
    set_attribute(d, name, CUDNN_TYPE_INT64, int64_t(v.size()), v.data());
}
void set(Handle d, Attribute name, Handle v) { set_attribute(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &v); }
void set(Handle d, Attribute name, cudnnHandle_t v) { set_attribute(d, name, CUDNN_TYPE_HANDLE, 1, &v); }
void set(Handle d, Attribute name, cudnnDataType_t v) { set_attribute(d, name, CUDNN_TYPE_DATA_TYPE, 1, &v); }
void set(Handle d, Attribute name, cudnnPointwiseMode_t v) { set_attribute(d, name, CUDNN_TYPE_POINTWISE_MODE, 1, &v); }
void set(Handle d, Attribute name, cudnnReduceTensorOp_t v) {
    set_attribute(d, name, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &v);
}
void set(Handle d, Attribute name, cudnnBackendKnobType_t v) { set_attribute(d, name, CUDNN_TYPE_KNOB_TYPE, 1, &v); }
void set(Handle d, Attribute name, cudnnBackendHeurMode_t v) { set_attribute(d, name, CUDNN_TYPE_HEUR_MODE, 1, &v); }

void finalize(Handle d) { CUDNN_CHECK(cudnnBackendFinalize(d)); }

int64_t get_int(Handle d, Attribute name) {
    int64_t value = 0, count = 0;
    CUDNN_CHECK(cudnnBackendGetAttribute(d, name, CUDNN_TYPE_INT64, 1, &count, &value));
    return value;
}

// ---- Graphs

struct Graph {
    AttentionSizes shape;
    std::deque<Descriptor> descriptors;
    std::vector<Handle> operations;
    int64_t next_virtual = uid_first_virtual;

    Handle create(cudnnBackendDescriptorType_t type) { return descriptors.emplace_back(type).handle; }

    // Tensors. Strides are in elements.

    Handle tensor(const Dims& dims, const Dims& strides, cudnnDataType_t type, int64_t uid) {
        Handle d = create(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
        set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
        set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, dims);
        set(d, CUDNN_ATTR_TENSOR_STRIDES, strides);
        set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, uid);
        set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, int64_t(16));
        set(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, uid >= uid_first_virtual);
        set(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, uid >= uid_scale && uid < uid_first_virtual);
        finalize(d);
        return d;
    }

    // (B, NH, T, HS) tensors whose tokens are `row` elements apart: 3C for q, k, v and their gradients (of_qkv), C for
    // out and dout (of_out). float_heads: contiguous.
    Handle heads(int64_t uid, int64_t row, cudnnDataType_t type = CUDNN_DATA_BFLOAT16) {
        const auto [B, T, NH, HS] = shape;
        return tensor({B, NH, T, HS}, {row * T, HS, row, 1}, type, uid);
    }
    Handle of_qkv(int64_t uid) { return heads(uid, int64_t(3) * shape.NH * shape.HS); }
    Handle of_out(int64_t uid) { return heads(uid, int64_t(shape.NH) * shape.HS); }
    Handle float_heads(int64_t uid) {
        const auto [B, T, NH, HS] = shape;
        return tensor({B, NH, T, HS}, {int64_t(NH) * T * HS, int64_t(T) * HS, HS, 1}, CUDNN_DATA_FLOAT, uid);
    }
    Handle of_qkv_transposed(int64_t uid) {
        const auto [B, T, NH, HS] = shape;
        const int64_t row = int64_t(3) * NH * HS;
        return tensor({B, NH, HS, T}, {row * T, HS, 1, row}, CUDNN_DATA_BFLOAT16, uid);
    }
    Handle rows(int64_t uid) {
        const auto [B, T, NH, HS] = shape;
        return tensor({B, NH, T, 1}, {int64_t(NH) * T, T, 1, 1}, CUDNN_DATA_FLOAT, uid);
    }
    Handle rows() { return rows(next_virtual++); }
    Handle scores(cudnnDataType_t type = CUDNN_DATA_FLOAT) {
        const auto [B, T, NH, HS] = shape;
        return tensor({B, NH, T, T}, {int64_t(NH) * T * T, int64_t(T) * T, T, 1}, type, next_virtual++);
    }
    Handle scores_transposed() {
        const auto [B, T, NH, HS] = shape;
        return tensor({B, NH, T, T}, {int64_t(NH) * T * T, int64_t(T) * T, 1, T}, CUDNN_DATA_BFLOAT16, next_virtual++);
    }
    Handle constant(Uid uid) { return tensor({1, 1, 1, 1}, {1, 1, 1, 1}, CUDNN_DATA_FLOAT, uid); }

    // Operations. Each returns the tensor `result`, which the caller has described.

    Handle add(Handle operation, Handle result) {
        finalize(operation);
        operations.push_back(operation);
        return result;
    }

    Handle pointwise_mode(cudnnPointwiseMode_t mode, cudnnDataType_t computed_in, int64_t axis) {
        Handle d = create(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
        set(d, CUDNN_ATTR_POINTWISE_MODE, mode);
        set(d, CUDNN_ATTR_POINTWISE_MATH_PREC, computed_in);
        if (axis >= 0) set(d, CUDNN_ATTR_POINTWISE_AXIS, axis);
        finalize(d);
        return d;
    }

    // result = mode(a, b); b and condition may be null.
    Handle pointwise(Handle mode, Handle a, Handle b, Handle result, Handle condition = nullptr) {
        Handle d = create(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
        set(d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, mode);
        set(d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a);
        if (b) set(d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
        if (condition) set(d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, condition);
        set(d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, result);
        return add(d, result);
    }
    Handle pointwise(cudnnPointwiseMode_t mode, Handle a, Handle b, Handle result) {
        return pointwise(pointwise_mode(mode, CUDNN_DATA_FLOAT, -1), a, b, result);
    }

    Handle reduce(cudnnReduceTensorOp_t reduction, Handle a, Handle result) {
        Handle mode = create(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
        set(mode, CUDNN_ATTR_REDUCTION_OPERATOR, reduction);
        set(mode, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
        finalize(mode);
        Handle d = create(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
        set(d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, mode);
        set(d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, a);
        set(d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, result);
        return add(d, result);
    }

    Handle matmul(Handle a, Handle b, Handle result) {
        Handle mode = create(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
        set(mode, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
        finalize(mode);
        Handle d = create(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
        set(d, CUDNN_ATTR_OPERATION_MATMUL_DESC, mode);
        set(d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
        set(d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
        set(d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, result);
        return add(d, result);
    }

    Handle reshape(Handle a, Handle result) {
        Handle d = create(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
        set(d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, a);
        set(d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, result);
        return add(d, result);
    }

    // a where query >= key, else the value of `masked`
    Handle causal(Handle a, Handle masked) {
        Handle query = pointwise(pointwise_mode(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, 2), a, nullptr,
                                 scores(CUDNN_DATA_INT32));
        Handle key = pointwise(pointwise_mode(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_FLOAT, 3), a, nullptr,
                               scores(CUDNN_DATA_INT32));
        Handle seen = pointwise(pointwise_mode(CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, -1), query, key,
                                scores(CUDNN_DATA_BOOLEAN));
        Handle select = pointwise_mode(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, -1);
        return pointwise(select, a, masked, scores(), seen);
    }
};

// S = causal(scale Q K^T), e = exp(S - max), lse = max + log(sum of e), out = (e / sum of e) V. The graph itself
// computes lse, as the natural logarithm of the sum of exp(scaled scores). It is therefore the lse of ops.inc,
// whatever the engine does internally.
void build_forward(Graph& g) {
    Handle q = g.of_qkv(uid_q), k_transposed = g.of_qkv_transposed(uid_k), v = g.of_qkv(uid_v);
    Handle scale = g.constant(uid_scale), masked = g.constant(uid_masked);

    Handle s = g.matmul(q, k_transposed, g.scores());
    s = g.pointwise(CUDNN_POINTWISE_MUL, s, scale, g.scores());
    s = g.causal(s, masked);

    Handle max = g.reduce(CUDNN_REDUCE_TENSOR_MAX, s, g.rows());
    Handle e = g.pointwise(CUDNN_POINTWISE_SUB, s, max, g.scores());
    e = g.pointwise(CUDNN_POINTWISE_EXP, e, nullptr, g.scores());
    Handle sum = g.reduce(CUDNN_REDUCE_TENSOR_ADD, e, g.rows());
    Handle log_sum = g.pointwise(CUDNN_POINTWISE_LOG, sum, nullptr, g.rows());
    g.pointwise(CUDNN_POINTWISE_ADD, max, log_sum, g.rows(uid_lse));

    Handle p = g.pointwise(CUDNN_POINTWISE_DIV, e, sum, g.scores(CUDNN_DATA_BFLOAT16));
    g.matmul(p, v, g.of_out(uid_out));
}

// row_sums = sum of dout * out, P = exp(causal(scale Q K^T - lse)), dV = P^T dout,
// dS = (dout V^T - row_sums) P scale, dK = dS^T Q, dQ = dS K.
//
// dQ is a sum over keys, which are spread over blocks. If sums_dq is true, the blocks add their parts to a float
// buffer, in the order in which they finish. If it is false, the engine computes dQ by a separate matmul. Most engines
// store dS in the workspace for it.
void build_backward(Graph& g, bool sums_dq) {
    Handle q = g.of_qkv(uid_q);
    Handle k_transposed = g.of_qkv_transposed(uid_k), v_transposed = g.of_qkv_transposed(uid_v);
    Handle out = g.of_out(uid_out), dout = g.of_out(uid_dout), lse = g.rows(uid_lse);
    Handle scale = g.constant(uid_scale), masked = g.constant(uid_masked), one = g.constant(uid_one);
    Handle dq = g.of_qkv(uid_dq), dk = g.of_qkv(uid_dk), dv = g.of_qkv(uid_dv);

    Handle dout_times_out = g.pointwise(CUDNN_POINTWISE_MUL, dout, out, g.float_heads(g.next_virtual++));
    Handle sums = g.reduce(CUDNN_REDUCE_TENSOR_ADD, dout_times_out, g.rows());
    Handle row_sums = g.pointwise(CUDNN_POINTWISE_MUL, sums, one, g.rows(uid_row_sums));

    Handle s = g.matmul(q, k_transposed, g.scores());
    s = g.pointwise(CUDNN_POINTWISE_MUL, s, scale, g.scores());
    s = g.pointwise(CUDNN_POINTWISE_SUB, s, lse, g.scores());
    s = g.causal(s, masked);
    Handle p = g.pointwise(CUDNN_POINTWISE_EXP, s, nullptr, g.scores());
    Handle p_transposed = g.reshape(p, g.scores_transposed());
    g.matmul(p_transposed, dout, dv);

    Handle ds = g.matmul(dout, v_transposed, g.scores());
    ds = g.pointwise(CUDNN_POINTWISE_SUB, ds, row_sums, g.scores());
    ds = g.pointwise(CUDNN_POINTWISE_MUL, ds, p, g.scores());
    ds = g.pointwise(CUDNN_POINTWISE_MUL, ds, scale, g.scores());
    Handle ds_transposed = g.reshape(ds, g.scores_transposed());
    g.matmul(ds_transposed, q, dk);

    Handle k = g.reshape(k_transposed, g.of_qkv(g.next_virtual++));
    if (sums_dq) {
        Handle dq_sums = g.matmul(ds, k, g.float_heads(uid_dq_sums));
        g.pointwise(CUDNN_POINTWISE_IDENTITY, dq_sums, nullptr, dq);
    } else {
        g.matmul(ds, k, dq);
    }
}

// ---- Plans

Handle describe_device(Graph& g, const std::string& json) {
    Handle d = g.create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    set_attribute(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, int64_t(json.size()), json.data());
    finalize(d);
    return d;
}

// The first reason in cuDNN's last message, which has a line for each function that gave up. "" if there is none.
std::string last_reason() {
    char text[1024] = "";
    cudnnGetLastErrorString(text, sizeof(text));
    const std::string all = text, marker = "Reason: ";
    const size_t found = all.find(marker);
    if (found == std::string::npos) return "";
    const size_t begin = found + marker.size();
    return all.substr(begin, all.find('\n', begin) - begin);
}

bool sums_dq(AttentionPass pass) { return pass == AttentionPass::backward; }

// device: null if target has a handle.
Handle operation_graph(Graph& g, AttentionPass pass, const CudnnTarget& target, Handle device) {
    if (pass == AttentionPass::forward)
        build_forward(g);
    else
        build_backward(g, sums_dq(pass));
    Handle graph = g.create(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set_attribute(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, int64_t(g.operations.size()),
                  g.operations.data());
    if (!device) set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, target.handle);
    finalize(graph);
    return graph;
}

// The engine configurations that cuDNN's heuristics propose, best first.
std::vector<Handle> proposed_configs(Graph& g, Handle graph, Handle device) {
    constexpr int64_t max_configs = 16;
    Handle heuristics = g.create(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A);
    if (device) set(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    finalize(heuristics);

    std::vector<Handle> configs;
    while (configs.size() < max_configs) configs.push_back(g.create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    int64_t found = 0;
    CUDNN_CHECK(cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                         max_configs, &found, configs.data()));
    configs.resize(size_t(found));
    return configs;
}

// A configuration for deterministic backward that the heuristics do not propose although NVIDIA's frontend takes it
// (override_heuristics_query in its scaled_dot_product_flash_attention.h): on compute capability 10.x an engine that
// sums dQ in a second kernel, without a workspace. cuDNN does not document the values of the knobs.
struct KnownConfig {
    size_t oldest, newest;  // versions of cuDNN that have it
    std::vector<std::pair<cudnnBackendKnobType_t, int64_t>> knobs;
};
constexpr int64_t known_engine = 5;
constexpr int known_max_HS = 128;  // the frontend chooses other knobs for larger heads

const std::vector<KnownConfig>& known_configs() {
    constexpr auto tile_m = CUDNN_KNOB_TYPE_TILE_M, tile_n = CUDNN_KNOB_TYPE_TILE_N,
                   kernel = CUDNN_KNOB_TYPE_KERNEL_CFG, stream_k = CUDNN_KNOB_TYPE_STREAM_K,
                   cga_m = CUDNN_KNOB_TYPE_TILE_CGA_M, stages = CUDNN_KNOB_TYPE_STAGES;
    static const std::vector<KnownConfig> configs = {
        // Not 9.18.0, whose deterministic backward NVIDIA's Transformer Engine excludes.
        {91801, 92299, {{kernel, 31}, {stages, 2}}},
        {92300, 99999, {{tile_m, 3}, {tile_n, 2}, {kernel, 2}, {stream_k, 0}, {cga_m, 0}, {stages, 2}}},
    };
    return configs;
}

// Null if cuDNN does not support the configuration for this graph and GPU.
Handle make_config(Graph& g, Handle graph, Handle device, const KnownConfig& known) {
    Handle engine = g.create(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    set(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
    set(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, known_engine);
    if (device) set(engine, CUDNN_ATTR_ENGINE_DEVICEPROP, device);
    if (cudnnBackendFinalize(engine) != CUDNN_STATUS_SUCCESS) return nullptr;

    std::vector<Handle> choices;
    for (const auto& [knob, value] : known.knobs) {
        choices.push_back(g.create(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR));
        set(choices.back(), CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, knob);
        set(choices.back(), CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, value);
        finalize(choices.back());
    }
    Handle config = g.create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    set(config, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    set_attribute(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, int64_t(choices.size()),
                  choices.data());
    return cudnnBackendFinalize(config) == CUDNN_STATUS_SUCCESS ? config : nullptr;
}

// The configurations to make plans of, in the order of NVIDIA's frontend: the known one before the heuristics'.
std::vector<Handle> candidate_configs(Graph& g, AttentionPass pass, const CudnnTarget& target, Handle device) {
    const bool has_known = pass == AttentionPass::deterministic_backward && g.shape.HS <= known_max_HS;
    const size_t version = cudnnGetVersion();
    Handle graph = operation_graph(g, pass, target, device);
    std::vector<Handle> candidates;
    for (const KnownConfig& known : known_configs()) {
        if (!has_known || version < known.oldest || version > known.newest) continue;
        if (Handle config = make_config(g, graph, device, known)) candidates.push_back(config);
    }
    for (Handle config : proposed_configs(g, graph, device)) candidates.push_back(config);
    return candidates;
}

int64_t dq_sums_bytes(const AttentionSizes& shape) {
    constexpr int64_t alignment = 256;
    return round_up(int64_t(shape.B) * shape.NH * shape.T * shape.HS * int64_t(sizeof(float)), alignment);
}

int engine_number(Graph& g, Handle config) {
    Handle engine = g.create(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    int64_t count = 0;
    CUDNN_CHECK(cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count,
                                         &engine));
    return int(get_int(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX));
}

}  // namespace

// The engines of cuDNN 9.19 use no workspace forward. Backward they store a copy of dq_sums, or, if deterministic, dS
// in bf16, with T rounded up to whole tiles. `other` allows for smaller buffers.
int64_t workspace_limit(AttentionPass pass, const AttentionSizes& shape) {
    constexpr int64_t tile = 128, other = 1 << 20;
    const int64_t T = round_up(int64_t(shape.T), tile), heads = int64_t(shape.B) * shape.NH;
    switch (pass) {
        case AttentionPass::forward:
            return other;
        case AttentionPass::backward:
            return dq_sums_bytes(shape) + heads * T * round_up(int64_t(shape.HS), tile / 2) * int64_t(sizeof(float)) +
                   other;
        case AttentionPass::deterministic_backward:
            return heads * T * T * int64_t(sizeof(uint16_t)) + other;
    }
    return 0;
}

CudnnPlan plan_attention(AttentionPass pass, const AttentionSizes& shape, const CudnnTarget& target, int first) {
    CudnnPlan result;
    // cuDNN makes plans for one token, but the release notes of 9.18.1 say that its backward does not support it.
    if (pass != AttentionPass::forward && shape.T == 1) {
        result.reason = "backward for one token";
        return result;
    }
    Graph g{shape, {}, {}};
    Handle device = target.handle ? nullptr : describe_device(g, target.device);
    const std::vector<Handle> candidates = candidate_configs(g, pass, target, device);
    for (size_t i = size_t(first); i < candidates.size(); i++) {
        Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set(plan.handle, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, candidates[i]);
        if (device)
            set(plan.handle, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
        else
            set(plan.handle, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, target.handle);
        if (cudnnBackendFinalize(plan.handle) != CUDNN_STATUS_SUCCESS) continue;
        const int64_t sums = sums_dq(pass) ? dq_sums_bytes(shape) : 0;
        const int64_t workspace = get_int(plan.handle, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
        if (sums + workspace > workspace_limit(pass, shape)) continue;
        const int engine = engine_number(g, candidates[i]);
        return {std::move(g.descriptors), std::move(plan), sums, workspace, int(i), engine, ""};
    }
    result.reason = last_reason();
    return result;
}

}  // namespace gpu
