#include "checkpoint/hf_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>

static std::string hf_name(Param p, int l) {
    const ParamSpec& spec = param_table[p];
    return spec.scope == Scope::layer ? format("h.%d.%s", l, spec.hf_name) : spec.hf_name;
}

static std::vector<int64_t> hf_shape(const ParamLayout& layout, Param p) {
    const int64_t rows = dim_size(layout.config, param_table[p].rows), cols = layout.cols(p);
    if (param_table[p].rows == Dim::one) return {cols};
    if (param_table[p].hf_layout == HFLayout::transposed) return {cols, rows};
    return {rows, cols};
}

// Transposes columns of inp (rows, cols) into out (count, rows): the `count` columns that begin at inp[0].
static void transpose_columns(float* out, const float* inp, int rows, int cols, int count) {
    constexpr int LINE = 16;  // floats in a line of the cache
    for (int r = 0; r < rows; r += LINE)
        for (int c = 0; c < count; c++) {
            const float* from = inp + int64_t(r) * cols + c;
            float* to = out + int64_t(c) * rows + r;
            float line[LINE];
            const int n = std::min(LINE, rows - r);
            if (n == LINE)
                for (int i = 0; i < LINE; i++) line[i] = from[int64_t(i) * cols];
            else
                for (int i = 0; i < n; i++) line[i] = from[int64_t(i) * cols];
            std::memcpy(to, line, size_t(n) * sizeof(float));
        }
}

// So many columns at a time are transposed: with 1 MB of L2 cache, all sizes of GPT-2 fit.
constexpr int STRIP = 32;

TensorView view_copies(const ParamLayout& layout, const TensorReader& read) {
    int64_t largest = 0;
    for (const ParamSpec& spec : param_table) largest = std::max(largest, layout.size(spec.id));
    const auto buffer = std::make_shared<std::unique_ptr<float[]>>();
    return [=](Slot slot, Param p, int l) {
        if (!*buffer) buffer->reset(new float[size_t(largest)]);
        read(buffer->get(), slot, p, l);
        return buffer->get();
    };
}

TensorView view_flat(const ParamLayout& layout, const std::vector<const float*>& slots) {
    return [layout, slots](Slot slot, Param p, int l) { return slots[slot] + layout.offset(p, l); };
}

TensorReader read_from_flat(const ParamLayout& layout, const std::vector<const float*>& slots) {
    return [layout, slots](float* host, Slot slot, Param p, int l) {
        std::memcpy(host, slots[slot] + layout.offset(p, l), size_t(layout.size(p)) * sizeof(float));
    };
}

TensorWriter write_to_flat(const ParamLayout& layout, const std::vector<float*>& slots) {
    return [layout, slots](const float* host, Slot slot, Param p, int l) {
        std::memcpy(slots[slot] + layout.offset(p, l), host, size_t(layout.size(p)) * sizeof(float));
    };
}

std::vector<TensorInfo> list_tensors(const ParamLayout& layout, const std::vector<TensorGroup>& groups,
                                     const char* dtype) {
    std::vector<TensorInfo> out;
    for (const TensorGroup& group : groups)
        for_each_tensor(layout, [&](Param p, int l) {
            TensorInfo& tensor = out.emplace_back();
            tensor.name = group.prefix + hf_name(p, l);
            tensor.dtype = dtype;
            tensor.shape = hf_shape(layout, p);
        });
    return out;
}

FileSum write_tensors(const std::string& path, const ParamLayout& layout, const std::vector<TensorGroup>& groups,
                      const char* dtype, const TensorView& view, const Metadata& metadata) {
    SafetensorsWriter writer(path, list_tensors(layout, groups, dtype), metadata);
    std::vector<float> strip;
    for (const TensorGroup& group : groups)
        for_each_tensor(layout, [&](Param p, int l) {
            const float* data = view(group.slot, p, l);
            const int rows = layout.rows(p), cols = layout.cols(p);
            if (param_table[p].hf_layout != HFLayout::transposed)
                return writer.write(data, writer.tensors[writer.next].elements());  // leaves out padded rows
            strip.resize(size_t(STRIP) * rows);
            for (int c = 0; c < cols; c += STRIP) {
                const int count = std::min(STRIP, cols - c);
                transpose_columns(strip.data(), data + c, rows, cols, count);
                writer.write(strip.data(), int64_t(count) * rows);
            }
        });
    return writer.finish();
}

static std::string describe_model(const GPT2Config& config) {
    for (const char* name : {"d12", "d24", "d36", "d48"}) {
        const GPT2Config known = config_by_name(name);
        if (config.L == known.L && config.C == known.C) return name;
    }
    return format("a model of %d layers and %d channels", config.L, config.C);
}

// Returns the tensor called `name`. Refuses a tensor whose shape is not that of parameter p; the error names both
// shapes.
static const TensorInfo& find_tensor(const Safetensors& file, const std::string& name, const ParamLayout& layout,
                                     Param p) {
    const TensorInfo* tensor = file.find(name);
    if (!tensor) fail(EXIT_BAD_DATA, "%s: the tensor %s is missing", file.path.c_str(), name.c_str());
    const std::vector<int64_t> needed = hf_shape(layout, p);
    if (tensor->shape != needed)
        fail(EXIT_BAD_DATA, "%s: %s is %s, but %s needs %s; wrong --model?", file.path.c_str(), name.c_str(),
             to_string(*tensor).c_str(), describe_model(layout.config).c_str(), shape_string(needed).c_str());
    return *tensor;
}

// Refuses NaN and infinity: they spread to every result, and a later checkpoint would not show the damage. A value
// above bf16's largest becomes infinite in a bf16 model.
static void check_finite(const Safetensors& file, const TensorInfo& tensor, const float* values) {
    constexpr float largest = 0x1.fep127f;  // the largest finite bf16: 3.39e38
    constexpr int64_t block = 4096;         // the inner loop has no exit, so it is vectorized
    const int64_t n = tensor.elements();
    for (int64_t at = 0; at < n; at += block) {
        const int64_t end = std::min(at + block, n);
        int bad = 0;
        for (int64_t i = at; i < end; i++) bad += !(std::fabs(values[i]) <= largest);
        if (bad == 0) continue;
        while (std::fabs(values[at]) <= largest) at++;
        std::string index;  // [row, column]
        for (size_t d = tensor.shape.size(), stride = 1; d-- > 0; stride *= size_t(tensor.shape[d]))
            index = format("%lld", static_cast<long long>(at / int64_t(stride) % tensor.shape[d])) +
                    (index.empty() ? "" : ", ") + index;
        fail(EXIT_BAD_DATA, "%s: %s[%s] is %s, so the model cannot be computed; use an earlier checkpoint",
             file.path.c_str(), printable(tensor.name).c_str(), index.c_str(),
             std::isnan(values[at])   ? "NaN"
             : std::isinf(values[at]) ? "infinite"
                                      : format("%g, infinite in bf16", double(values[at])).c_str());
    }
}

// Buffers for one tensor in memory layout and one matrix in file layout.
struct TensorBuffers {
    std::unique_ptr<float[]> memory, file;

    explicit TensorBuffers(const ParamLayout& layout) {
        int64_t largest = 0, largest_transposed = 0;
        for (const ParamSpec& spec : param_table) {
            largest = std::max(largest, layout.size(spec.id));
            if (spec.hf_layout == HFLayout::transposed)
                largest_transposed = std::max(largest_transposed, layout.size(spec.id));
        }
        memory.reset(new float[size_t(largest)]);
        file.reset(new float[size_t(largest_transposed)]);
    }
};

// Reads one tensor into memory layout; padded rows are zero.
static void read_param(const Safetensors& file, const TensorInfo& tensor, const ParamLayout& layout, Param p,
                       TensorBuffers& buffers) {
    float* memory = buffers.memory.get();
    if (param_table[p].hf_layout == HFLayout::transposed) {
        file.read(buffers.file.get(), tensor);
        check_finite(file, tensor, buffers.file.get());
        transpose_columns(memory, buffers.file.get(), layout.cols(p), layout.rows(p), layout.rows(p));
    } else {
        file.read(memory, tensor);
        check_finite(file, tensor, memory);
        std::fill(memory + tensor.elements(), memory + layout.size(p), 0.0f);
    }
}

void read_tensors(const Safetensors& file, const TensorGroup& group, const ParamLayout& layout,
                  const TensorWriter& write) {
    TensorBuffers buffers(layout);
    for_each_tensor(layout, [&](Param p, int l) {  // check all shapes before the first call of write
        find_tensor(file, group.prefix + hf_name(p, l), layout, p);
    });
    for_each_tensor(layout, [&](Param p, int l) {
        read_param(file, find_tensor(file, group.prefix + hf_name(p, l), layout, p), layout, p, buffers);
        write(buffers.memory.get(), group.slot, p, l);
    });
}

static Safetensors open_model(const std::string& dir) {
    const std::string single = dir + "/model.safetensors", index = single + ".index.json";
    if (path_exists(single)) return open_safetensors(single);
    if (path_exists(index)) return open_safetensors_index(index);
    if (path_exists(dir + "/pytorch_model.bin") || path_exists(dir + "/pytorch_model.bin.index.json"))
        fail(EXIT_BAD_DATA,
             "%s: has only pytorch_model.bin, a pickle, which can run code and is not read; convert to safetensors "
             "(transformers: model.save_pretrained(DIR, safe_serialization=True))",
             dir.c_str());
    fail(EXIT_NO_INPUT, "%s: has no model.safetensors", dir.c_str());
}

// Accepts lm_head.weight only if it equals wte bit for bit.
static void check_tied(const Safetensors& file, const TensorInfo& head, const TensorInfo& wte) {
    constexpr int64_t chunk = 1 << 20;
    const auto refuse = [&] {
        fail(EXIT_BAD_DATA, "%s: lm_head.weight differs from wte.weight; only tied embeddings are supported",
             file.path.c_str());
    };
    if (head.shape != wte.shape) refuse();
    std::vector<float> a(chunk), b(chunk);
    for (int64_t at = 0; at < wte.elements(); at += chunk) {
        const int64_t n = std::min(chunk, wte.elements() - at);
        file.read(a.data(), head, at, n);
        file.read(b.data(), wte, at, n);
        if (memcmp(a.data(), b.data(), size_t(n) * sizeof(float)) != 0) refuse();
    }
}

// Whether the tensor is a causal mask; older files contain one in each layer.
static bool is_mask(const std::string& name) {
    return name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

static void read_weights(const std::string& dir, const ParamLayout& layout, const TensorWriter& write) {
    Safetensors file = open_model(dir);
    std::map<std::string, TensorInfo> bare;  // keys: names without "transformer."
    for (const auto& [name, tensor] : file.tensors) {
        const std::string short_name = name.starts_with("transformer.") ? name.substr(strlen("transformer.")) : name;
        if (!bare.emplace(short_name, tensor).second)
            fail(EXIT_BAD_DATA, "%s: %s occurs with and without \"transformer.\"", file.path.c_str(),
                 printable(short_name).c_str());
    }
    file.tensors = std::move(bare);

    std::set<std::string> expected = {"lm_head.weight"};
    for_each_tensor(layout, [&](Param p, int l) { expected.insert(hf_name(p, l)); });
    for (const auto& [name, tensor] : file.tensors)
        if (!expected.count(name) && !is_mask(name))
            fail(EXIT_BAD_DATA, "%s: the tensor %s (%s) does not belong to %s; wrong --model?", file.path.c_str(),
                 printable(name).c_str(), to_string(tensor).c_str(), describe_model(layout.config).c_str());
    const TensorInfo embedding = find_tensor(file, "wte.weight", layout, wte);
    const TensorInfo* head = file.find("lm_head.weight");
    if (head) check_tied(file, *head, embedding);
    if (!head && !read_hf_config(dir).tied)
        fail(EXIT_BAD_DATA, "%s/config.json: \"tie_word_embeddings\" is false, but there is no lm_head.weight",
             dir.c_str());
    read_tensors(file, {WEIGHTS, ""}, layout, write);
}

void load_weights(const std::string& dir, const ParamLayout& layout, const TensorWriter& write) {
    read_from(dir, [&] { read_weights(dir, layout, write); });
}
