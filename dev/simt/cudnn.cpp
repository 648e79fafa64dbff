// cudnn.cpp: the emulator's cuDNN. It executes the operations of a graph one by one, in float, as cuDNN's documentation
// defines them. This tests the graphs of cudnn_plan.cpp: masks, scales, strides, and the tensors that each operation
// names. It does not test whether cuDNN has an engine for the graph (dev/test/gpu/cudnn_plans.cpp does), nor an
// engine's arithmetic.
//
// The tables below have the configurations that the heuristics propose, and one that a caller has to know. Like
// cuDNN, it refuses other configurations, and descriptors that are not finalized.
#include "cudnn.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/types.h"
#include "internal.h"

using simt::Site;

namespace {

struct Config {
    int64_t engine, workspace;
    cudnnStatus_t planned, executed;  // statuses that making a plan and executing it return
    float ms;
};
constexpr int64_t too_much = int64_t(1) << 50;
constexpr int64_t stores_ds = -1;  // 4096 bytes, and for deterministic backward dS in bf16 if that is more
// In the order of the heuristics.
constexpr Config proposed[] = {
    {10, stores_ds, CUDNN_STATUS_SUCCESS, CUDNN_STATUS_SUCCESS, 5.0f},
    {11, too_much, CUDNN_STATUS_SUCCESS, CUDNN_STATUS_SUCCESS, 1.0f},
    {12, 0, CUDNN_STATUS_NOT_SUPPORTED, CUDNN_STATUS_SUCCESS, 1.0f},
    {13, 256, CUDNN_STATUS_SUCCESS, CUDNN_STATUS_EXECUTION_FAILED, 1.0f},
    {14, 256, CUDNN_STATUS_SUCCESS, CUDNN_STATUS_SUCCESS, 3.0f},
};

// On compute capability 10.0, for graphs that end with dQ's matmul.
constexpr Config known = {5, 0, CUDNN_STATUS_SUCCESS, CUDNN_STATUS_SUCCESS, 2.0f};
const std::map<cudnnBackendKnobType_t, int64_t> known_knobs = {
    {CUDNN_KNOB_TYPE_TILE_M, 3},   {CUDNN_KNOB_TYPE_TILE_N, 2},     {CUDNN_KNOB_TYPE_KERNEL_CFG, 2},
    {CUDNN_KNOB_TYPE_STREAM_K, 0}, {CUDNN_KNOB_TYPE_TILE_CGA_M, 0}, {CUDNN_KNOB_TYPE_STAGES, 2}};

struct Object {
    cudnnBackendDescriptorType_t type;
    bool is_final = false;
    const Config* config = nullptr;  // set in configurations, engines and plans
    Object* graph = nullptr;
    int64_t workspace = 0;  // bytes that a plan needs
    std::map<int, std::vector<char>> attributes;

    template <class T>
    std::vector<T> all(int name) const {
        const auto found = attributes.find(name);
        if (found == attributes.end()) return {};
        std::vector<T> values(found->second.size() / sizeof(T));
        std::memcpy(values.data(), found->second.data(), found->second.size());
        return values;
    }
    template <class T>
    T get(int name, T otherwise = {}) const {
        const auto values = all<T>(name);
        return values.empty() ? otherwise : values[0];
    }
    Object* object(int name) const { return get<Object*>(name); }
};

std::string& last_error() {
    static std::string text;
    return text;
}

cudnnStatus_t refuse(const char* why, cudnnStatus_t status = CUDNN_STATUS_BAD_PARAM) {
    last_error() = why;
    return status;
}

Object* as_object(cudnnBackendDescriptor_t d) { return static_cast<Object*>(d); }

size_t bytes_of(cudnnBackendAttributeType_t type) {
    switch (type) {
        case CUDNN_TYPE_CHAR:
        case CUDNN_TYPE_BOOLEAN:
            return 1;
        case CUDNN_TYPE_INT64:
        case CUDNN_TYPE_HANDLE:
        case CUDNN_TYPE_BACKEND_DESCRIPTOR:
        case CUDNN_TYPE_VOID_PTR:
            return 8;
        default:
            return sizeof(int);  // an enumeration
    }
}

// ---- Tensors

struct Tensor {
    std::vector<int64_t> dims, strides;
    cudnnDataType_t type;
    int64_t uid;
    bool is_virtual, by_value;

    explicit Tensor(const Object& d)
        : dims(d.all<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS)),
          strides(d.all<int64_t>(CUDNN_ATTR_TENSOR_STRIDES)),
          type(d.get<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)),
          uid(d.get<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)),
          is_virtual(d.get<char>(CUDNN_ATTR_TENSOR_IS_VIRTUAL) != 0),
          by_value(d.get<char>(CUDNN_ATTR_TENSOR_IS_BY_VALUE) != 0) {}

    int64_t element_bytes() const { return type == CUDNN_DATA_BFLOAT16 ? 2 : 4; }
    int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
        return b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3];
    }
    int64_t count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
    bool is_view() const { return extent_bytes() != count() * element_bytes(); }  // rows lie apart
    int64_t extent_bytes() const {
        return (offset(dims[0] - 1, dims[1] - 1, dims[2] - 1, dims[3] - 1) + 1) * element_bytes();
    }
};

// A tensor's values for one head, row-major. A dimension of 1 is broadcast.
struct Matrix {
    int64_t rows = 0, cols = 0;
    std::vector<float> values;

    Matrix() = default;
    Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(size_t(rows * cols)) {}
    float& at(int64_t i, int64_t j) { return values[size_t((rows == 1 ? 0 : i) * cols + (cols == 1 ? 0 : j))]; }
};

struct Run {
    std::vector<Object*> operations;
    std::map<int64_t, char*> memory;    // by uid
    std::map<int64_t, float> by_value;  // scalars in host memory, read when the run is queued
    char* workspace;
    int64_t workspace_bytes;
    std::map<const Object*, Matrix> computed;  // tensors computed so far for the current head (b, h)
    int64_t b = 0, h = 0;

    Matrix read(const Object* d) {
        const auto found = computed.find(d);
        if (found != computed.end()) return found->second;
        const Tensor t(*d);
        Matrix m(t.dims[2], t.dims[3]);
        if (t.by_value) {
            m.at(0, 0) = by_value.at(t.uid);
            return m;
        }
        const char* p = memory.at(t.uid);
        for (int64_t i = 0; i < m.rows; i++)
            for (int64_t j = 0; j < m.cols; j++) {
                const int64_t at = t.offset(b, h, i, j);
                m.at(i, j) = t.type == CUDNN_DATA_BFLOAT16 ? float(reinterpret_cast<const bf16*>(p)[at])
                                                           : reinterpret_cast<const float*>(p)[at];
            }
        return m;
    }

    void write(const Object* d, Matrix m) {
        const Tensor t(*d);
        if (t.type == CUDNN_DATA_BFLOAT16)
            for (float& x : m.values) x = float(bf16(x));
        if (!t.is_virtual)
            for (int64_t i = 0; i < m.rows; i++)
                for (int64_t j = 0; j < m.cols; j++) {
                    char* p = memory.at(t.uid) + t.offset(b, h, i, j) * t.element_bytes();
                    if (t.type == CUDNN_DATA_BFLOAT16)
                        *reinterpret_cast<bf16*>(p) = bf16(m.at(i, j));
                    else
                        *reinterpret_cast<float*>(p) = m.at(i, j);
                }
        computed[d] = std::move(m);
    }

    void pointwise(const Object& o) {
        const Object& mode = *o.object(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
        const Object *second = o.object(CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
                     *condition = o.object(CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
        Matrix x = read(o.object(CUDNN_ATTR_OPERATION_POINTWISE_XDESC)), b, t;
        if (second) b = read(second);
        if (condition) t = read(condition);
        const int64_t axis = mode.get<int64_t>(CUDNN_ATTR_POINTWISE_AXIS);
        const auto kind = mode.get<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
        const Tensor result(*o.object(CUDNN_ATTR_OPERATION_POINTWISE_YDESC));
        Matrix y(result.dims[2], result.dims[3]);
        for (int64_t i = 0; i < y.rows; i++)
            for (int64_t j = 0; j < y.cols; j++) {
                const auto second_value = [&] { return b.at(i, j); };
                const auto value = [&]() -> float {
                    switch (kind) {
                        case CUDNN_POINTWISE_ADD:
                            return x.at(i, j) + second_value();
                        case CUDNN_POINTWISE_SUB:
                            return x.at(i, j) - second_value();
                        case CUDNN_POINTWISE_MUL:
                            return x.at(i, j) * second_value();
                        case CUDNN_POINTWISE_DIV:
                            return x.at(i, j) / second_value();
                        case CUDNN_POINTWISE_EXP:
                            return std::exp(x.at(i, j));
                        case CUDNN_POINTWISE_LOG:
                            return std::log(x.at(i, j));
                        case CUDNN_POINTWISE_IDENTITY:
                            return x.at(i, j);
                        case CUDNN_POINTWISE_GEN_INDEX:
                            return float(axis == 2 ? i : j);
                        case CUDNN_POINTWISE_CMP_GE:
                            return x.at(i, j) >= second_value();
                        case CUDNN_POINTWISE_BINARY_SELECT:
                            return t.at(i, j) != 0 ? x.at(i, j) : second_value();
                    }
                    return NAN;
                };
                y.at(i, j) = value();
            }
        write(o.object(CUDNN_ATTR_OPERATION_POINTWISE_YDESC), std::move(y));
    }

    void reduce(const Object& o) {
        const Object& mode = *o.object(CUDNN_ATTR_OPERATION_REDUCTION_DESC);
        const bool is_max = mode.get<int>(CUDNN_ATTR_REDUCTION_OPERATOR) == CUDNN_REDUCE_TENSOR_MAX;
        Matrix x = read(o.object(CUDNN_ATTR_OPERATION_REDUCTION_XDESC)), y(x.rows, 1);
        for (int64_t i = 0; i < x.rows; i++) {
            float sum = x.at(i, 0);
            for (int64_t j = 1; j < x.cols; j++) sum = is_max ? std::max(sum, x.at(i, j)) : sum + x.at(i, j);
            y.at(i, 0) = sum;
        }
        write(o.object(CUDNN_ATTR_OPERATION_REDUCTION_YDESC), std::move(y));
    }

    void matmul(const Object& o) {
        Matrix a = read(o.object(CUDNN_ATTR_OPERATION_MATMUL_ADESC)),
               b = read(o.object(CUDNN_ATTR_OPERATION_MATMUL_BDESC)), c(a.rows, b.cols);
        if (a.cols != b.rows) std::abort();
        for (int64_t i = 0; i < a.rows; i++)
            for (int64_t k = 0; k < a.cols; k++) {
                const float factor = a.values[size_t(i * a.cols + k)], *row = &b.values[size_t(k * b.cols)];
                float* sums = &c.values[size_t(i * c.cols)];
                for (int64_t j = 0; j < c.cols; j++) sums[j] += factor * row[j];
            }
        write(o.object(CUDNN_ATTR_OPERATION_MATMUL_CDESC), std::move(c));
    }

    // A view of the same memory with other strides. Only the transpose is supported.
    void reshape(const Object& o) {
        const Tensor from(*o.object(CUDNN_ATTR_OPERATION_RESHAPE_XDESC)),
            to(*o.object(CUDNN_ATTR_OPERATION_RESHAPE_YDESC));
        if (from.dims[2] != to.dims[3] || from.dims[3] != to.dims[2] || from.strides[2] != to.strides[3] ||
            from.strides[3] != to.strides[2])
            std::abort();
        Matrix x = read(o.object(CUDNN_ATTR_OPERATION_RESHAPE_XDESC)), y(x.cols, x.rows);
        for (int64_t i = 0; i < y.rows; i++)
            for (int64_t j = 0; j < y.cols; j++) y.at(i, j) = x.at(j, i);
        write(o.object(CUDNN_ATTR_OPERATION_RESHAPE_YDESC), std::move(y));
    }

    void run_head() {
        computed.clear();
        for (const Object* o : operations) {
            if (o->type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) pointwise(*o);
            if (o->type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) reduce(*o);
            if (o->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) matmul(*o);
            if (o->type == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR) reshape(*o);
        }
    }
};

// The tensors of the operations that are in memory, by unique id. Virtual tensors are intermediate results.
std::map<int64_t, Tensor> real_tensors(const std::vector<Object*>& operations) {
    std::map<int64_t, Tensor> found;
    for (const Object* o : operations)
        for (const auto& [name, value] : o->attributes) {
            const Object* d = o->object(name);
            if (d->type != CUDNN_BACKEND_TENSOR_DESCRIPTOR) continue;
            const Tensor t(*d);
            if (!t.is_virtual) found.insert({t.uid, t});
        }
    return found;
}

// Reports tensors and workspace that overlap. Two views of rows may overlap: q, k and v share the rows of qkv.
void check_overlaps(const Run& run, const std::map<int64_t, Tensor>& tensors, Site site) {
    struct Range {
        const char* begin;
        int64_t bytes;
        bool is_view;
    };
    std::vector<Range> ranges = {{run.workspace, run.workspace_bytes, false}};
    for (const auto& [uid, begin] : run.memory)
        ranges.push_back({begin, tensors.at(uid).extent_bytes(), tensors.at(uid).is_view()});
    for (const Range& a : ranges)
        for (const Range& b : ranges)
            if (&a < &b && !(a.is_view && b.is_view) && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes)
                simt::report("cudnnBackendExecute: two tensors overlap", site);
}

bool has_engines() {
    const char* chosen = getenv("SIMT_CUDNN");
    return chosen && *chosen == '1';
}

bool sums_dq(const Object& graph) {
    const Object& last = *graph.all<Object*>(CUDNN_ATTR_OPERATIONGRAPH_OPS).back();
    return last.type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR &&
           last.object(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)->get<int>(CUDNN_ATTR_POINTWISE_MODE) ==
               CUDNN_POINTWISE_IDENTITY;
}

int64_t workspace_of(const Config& config, const Object& graph) {
    constexpr int64_t least = 4096;
    constexpr size_t tensors_of_forward = 7;
    if (config.workspace != stores_ds) return config.workspace;
    const auto tensors = real_tensors(graph.all<Object*>(CUDNN_ATTR_OPERATIONGRAPH_OPS));
    if (tensors.size() == tensors_of_forward || sums_dq(graph)) return least;
    const std::vector<int64_t>& q = tensors.begin()->second.dims;  // (B, NH, T, HS)
    return std::max(least, q[0] * q[1] * q[2] * q[2] * int64_t(sizeof(bf16)));
}

// A configuration that the caller put together.
cudnnStatus_t complete_config(Object& d) {
    const Object* engine = d.object(CUDNN_ATTR_ENGINECFG_ENGINE);
    Object* graph = engine->object(CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
    std::map<cudnnBackendKnobType_t, int64_t> knobs;
    for (const Object* knob : d.all<Object*>(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES))
        knobs[knob->get<cudnnBackendKnobType_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE)] =
            knob->get<int64_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE);
    if (known.engine != engine->get<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX) || knobs != known_knobs ||
        simt::config.compute_capability != 100 || sums_dq(*graph))
        return refuse("an engine that does not support these knobs", CUDNN_STATUS_NOT_SUPPORTED);
    d.config = &known;
    d.graph = graph;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t complete_plan(Object& d) {
    const Object* config = d.object(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    if (!d.get<void*>(CUDNN_ATTR_EXECUTION_PLAN_HANDLE)) return refuse("a plan without a handle");
    d.config = config->config;
    d.graph = config->graph;
    d.workspace = workspace_of(*d.config, *d.graph);
    simt_cudnn_plans++;
    return d.config->planned;
}

// Whether the emulator supports what the descriptor asks for.
cudnnStatus_t complete(Object& d) {
    switch (d.type) {
        case CUDNN_BACKEND_ENGINE_DESCRIPTOR:
            return has_engines() ? CUDNN_STATUS_SUCCESS : refuse("no such engine", CUDNN_STATUS_NOT_SUPPORTED);
        case CUDNN_BACKEND_ENGINECFG_DESCRIPTOR:
            return complete_config(d);
        case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
            return complete_plan(d);
        default:
            return CUDNN_STATUS_SUCCESS;
    }
}

cudaStream_t& current_stream() {
    static cudaStream_t stream;
    return stream;
}

}  // namespace

size_t cudnnGetVersion() { return 92500; }

const char* cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_SUCCESS         ? "CUDNN_STATUS_SUCCESS"
           : status == CUDNN_STATUS_BAD_PARAM     ? "CUDNN_STATUS_BAD_PARAM"
           : status == CUDNN_STATUS_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED"
                                                  : "CUDNN_STATUS_EXECUTION_FAILED";
}

void cudnnGetLastErrorString(char* text, size_t size) {
    std::strncpy(text, last_error().c_str(), size - 1);
    text[size - 1] = 0;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    static char context;
    *handle = reinterpret_cast<cudnnHandle_t>(&context);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t stream) {
    current_stream() = stream;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor) {
    *descriptor = new Object{type, false, nullptr, nullptr, 0, {}};
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    delete as_object(descriptor);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
    Object& d = *as_object(descriptor);
    if (d.is_final) return refuse("an attribute is set on a descriptor that is already finalized");
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        for (int64_t i = 0; i < count; i++)
            if (!static_cast<Object* const*>(values)[i]->is_final) return refuse("an attribute is not yet finalized");
    const char* bytes = static_cast<const char*>(values);
    d.attributes[name].assign(bytes, bytes + size_t(count) * bytes_of(type));
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, int64_t max_count, int64_t* count, void* values) {
    const Object& d = *as_object(descriptor);
    Object** objects = static_cast<Object**>(values);
    if (!d.is_final) return refuse("an attribute is read from a descriptor that is not yet finalized");
    *count = 1;
    switch (name) {
        case CUDNN_ATTR_ENGINEHEUR_RESULTS:
            *count = has_engines() ? std::min(max_count, int64_t(std::size(proposed))) : 0;
            for (int64_t i = 0; i < *count; i++) {
                objects[i]->graph = d.object(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
                objects[i]->config = &proposed[i];
                objects[i]->is_final = true;
            }
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_ENGINECFG_ENGINE:
            objects[0]->config = d.config;
            objects[0]->is_final = true;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
            *static_cast<int64_t*>(values) = d.config->engine;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
            *static_cast<int64_t*>(values) = d.workspace;
            return CUDNN_STATUS_SUCCESS;
        default:
            return refuse("the emulator does not support this attribute");
    }
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    Object& d = *as_object(descriptor);
    const cudnnStatus_t status = complete(d);
    d.is_final = status == CUDNN_STATUS_SUCCESS;
    return status;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack,
                                  Site site) {
    const Object &p = *as_object(plan), &bindings = *as_object(pack);
    if (!p.is_final) return refuse("the plan is not finalized");
    if (!bindings.is_final) return refuse("the variant pack is not finalized");
    if (p.config->executed != CUDNN_STATUS_SUCCESS)
        return refuse("a configuration whose execution fails", p.config->executed);
    const auto uids = bindings.all<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto addresses = bindings.all<char*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    std::map<int64_t, char*> bound;
    for (size_t i = 0; i < uids.size(); i++) bound[uids[i]] = addresses[i];

    auto run = std::make_shared<Run>();
    run->operations = p.graph->all<Object*>(CUDNN_ATTR_OPERATIONGRAPH_OPS);
    run->workspace = bindings.get<char*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    run->workspace_bytes = p.workspace;
    const std::map<int64_t, Tensor> tensors = real_tensors(run->operations);
    if (tensors.size() != bound.size()) return refuse("the variant pack and the graph have different tensors");
    int64_t B = 1, NH = 1;
    for (const auto& [uid, t] : tensors) {
        if (!bound.count(uid)) return refuse("a tensor of the graph is missing in the variant pack");
        B = std::max(B, t.dims[0]);
        NH = std::max(NH, t.dims[1]);
        if (t.by_value) {
            run->by_value[uid] = *reinterpret_cast<float*>(bound[uid]);
            continue;
        }
        run->memory[uid] = bound[uid];
        simt::check_device_range(bound[uid], size_t(t.extent_bytes()),
                                 "cudnnBackendExecute: a tensor that is not in device memory", site);
        if (reinterpret_cast<uintptr_t>(bound[uid]) % 16)
            simt::report("cudnnBackendExecute: a tensor that is not aligned to 16 bytes", site);
    }
    simt::check_device_range(run->workspace, size_t(run->workspace_bytes),
                             "cudnnBackendExecute: the workspace is not in device memory", site);

    check_overlaps(*run, tensors, site);

    const auto work = [run, B, NH] {
        for (run->b = 0; run->b < B; run->b++)
            for (run->h = 0; run->h < NH; run->h++) run->run_head();
        simt::fill(run->workspace, simt::uninitialized, size_t(run->workspace_bytes));
    };
    simt::enqueue_work(work, p.config->ms, current_stream());
    return CUDNN_STATUS_SUCCESS;
}
