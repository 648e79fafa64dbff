#include "checkpoint/hf.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include "base/files.h"
#include "base/json.h"
#include "base/moments.h"
#include "base/random.h"

constexpr int64_t MAX_INTEGER = std::numeric_limits<int>::max();
constexpr uint64_t NEW_TOKENS_STREAM = uint64_t(0x3e3b) << 48;  // with the token's id (base/random.h)

// ---- config.json

namespace {
// A JSON object read with defaults: a key that is absent or null takes its default.
struct ConfigReader {
    const Json& object;
    const std::string& path;

    const Json* find(const char* key) const {
        const Json* found = object.find(key);
        return !found || found->type == Json::null ? nullptr : found;
    }
    [[noreturn]] void wrong(const char* key, const char* wanted) const {
        fail(EXIT_BAD_DATA, "%s: \"%s\" is %s, but must be %s", path.c_str(), key,
             printable(json_text(object.at(key))).c_str(), wanted);
    }
    // Looks up the key, or the alias that transformers accepts for it.
    int integer(const char* key, const char* alias, int fallback) const {
        const Json *own = find(key), *other = alias ? find(alias) : nullptr;
        if (own && other && *own != *other)
            fail(EXIT_BAD_DATA, "%s: \"%s\" and \"%s\" have the same meaning, but differ", path.c_str(), key, alias);
        if (!own && !other) return fallback;
        const Json& value = own ? *own : *other;
        if (!value.is_index(MAX_INTEGER + 1)) wrong(own ? key : alias, "an integer from 0 to 2147483647");
        return value.get<int>();
    }
    bool boolean(const char* key, bool fallback) const {
        const Json* value = find(key);
        if (value && value->type != Json::boolean) wrong(key, "true or false");
        return value ? value->get<bool>() : fallback;
    }
    // Refuses any value other than the one this program implements.
    void require(const char* key, bool needed, const char* why) const {
        if (boolean(key, needed) != needed) wrong(key, why);
    }
};
}  // namespace

// Refuses models that differ from this program's GPT-2 in more than their sizes.
static void check_supported(const ConfigReader& config, int C) {
    const Json* type = config.find("model_type");
    if (type && *type != "gpt2") config.wrong("model_type", "\"gpt2\": no other architecture is supported");
    const Json* activation = config.find("activation_function");
    // Three names of the same function, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    if (activation && *activation != "gelu_new" && *activation != "gelu_pytorch_tanh" && *activation != "gelu_fast")
        config.wrong("activation_function", "\"gelu_new\", the tanh form of GELU");
    const Json* epsilon = config.find("layer_norm_epsilon");
    if (epsilon && !(epsilon->type == Json::number && std::fabs(epsilon->get<double>() - 1e-5) < 1e-9))
        config.wrong("layer_norm_epsilon", "1e-05, which is built into the kernels");
    if (const int inner = config.integer("n_inner", nullptr, 0); config.find("n_inner") && inner != int64_t(4) * C)
        config.wrong("n_inner", format("null or 4 x %d channels", C).c_str());
    config.require("scale_attn_weights", true, "true: attention is scaled by 1/sqrt(head size)");
    config.require("scale_attn_by_inverse_layer_idx", false, "false: scaling by layer is not supported");
    config.require("reorder_and_upcast_attn", false, "false: this variant of attention is not supported");
    config.require("add_cross_attention", false, "false: cross attention is not supported");
}

// Returns the ids of a key, a number or a list. null and the negative ids of some programs mean none.
static std::vector<int> read_ids(const ConfigReader& reader, const char* key) {
    const Json* value = reader.find(key);
    std::vector<int> ids;
    for (const Json& id : !value                       ? std::vector<Json>()
                          : value->type == Json::array ? value->items
                                                       : std::vector{*value}) {
        if (!id.integer()) reader.wrong(key, "an integer or a list of integers");
        if (id.is_index(MAX_INTEGER + 1)) ids.push_back(id.get<int>());
    }
    return ids;
}

static void check_config_of(const std::string& path, const GPT2Config& config) try {
    check_config(config);
} catch (const Error& error) {
    fail(EXIT_BAD_DATA, "%s: %s", path.c_str(), error.what());
}

HFConfig parse_hf_config(const std::string& text, const std::string& path) {
    const Json object = parse_python_object(text, path);
    const ConfigReader reader{object, path};
    HFConfig config;
    GPT2Config& model = config.model;
    model.V = reader.integer("vocab_size", nullptr, 50257);
    model.max_T = reader.integer("n_positions", "max_position_embeddings", 1024);
    model.C = reader.integer("n_embd", "hidden_size", 768);
    model.L = reader.integer("n_layer", "num_hidden_layers", 12);
    model.NH = reader.integer("n_head", "num_attention_heads", 12);
    config.eos = object.contains("eos_token_id") ? read_ids(reader, "eos_token_id") : std::vector<int>{50256};
    for (const int id : read_ids(reader, "bos_token_id")) config.bos = id;
    for (const int id : read_ids(reader, "pad_token_id")) config.pad = id;
    config.tied = reader.boolean("tie_word_embeddings", true);
    config.text = text;
    check_supported(reader, model.C);
    if (model.NH > 0 && model.C % model.NH != 0)
        fail(EXIT_BAD_DATA, "%s: \"n_head\" %d does not divide \"n_embd\" %d; set both as the model was trained",
             path.c_str(), model.NH, model.C);
    check_config_of(path, model);
    return config;
}

void set_tokens(HFConfig& config, int eos, int bos, int pad) {
    const auto id = [](int token) { return token < 0 ? Json() : Json(token); };
    config.eos.assign(eos < 0 ? 0 : 1, eos);
    config.bos = bos < 0 ? eos : bos, config.pad = pad;
    for (std::string* text : {&config.text, &config.generation}) {
        if (text->empty()) continue;
        *text = with_members(*text, {{"eos_token_id", id(eos)}, {"bos_token_id", id(config.bos)}});
        *text = pad < 0 ? with_members(*text, {}, {"pad_token_id"}) : with_members(*text, {{"pad_token_id", pad}});
    }
}

// Dropouts are 0, as in this program's training, so that training elsewhere continues the same model.
HFConfig new_hf_config(const GPT2Config& model) {
    const char* text = R"({"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_inner": null, "reorder_and_upcast_attn": false,
        "resid_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "use_cache": true})";
    HFConfig config = {model, {}, -1, -1, true, text, "{}"};
    set_tokens(config, model.V > 50256 ? 50256 : -1, -1, -1);
    return config;
}

std::string hf_config_json(const HFConfig& config, const std::string& torch_dtype) {
    const GPT2Config& model = config.model;
    return with_members(config.text,
                        {{"architectures", std::vector<Json>{"GPT2LMHeadModel"}},
                         {"model_type", "gpt2"},
                         {"vocab_size", model.V},
                         {"n_positions", model.max_T},
                         {"n_ctx", model.max_T},
                         {"n_embd", model.C},
                         {"n_layer", model.L},
                         {"n_head", model.NH},
                         {"tie_word_embeddings", true},
                         {"torch_dtype", torch_dtype}},
                        // Keys that are true only of the files that it was read from; "dtype" is the newer name of
                        // "torch_dtype".
                        {"dtype", "transformers_version", "quantization_config", "auto_map"});
}

// ---- tensors

std::string hf_name(Param p, int l) {
    const ParamSpec& spec = param_table[p];
    return spec.scope == Scope::layer ? format("h.%d.%s", l, spec.hf_name) : spec.hf_name;
}

static std::vector<int64_t> hf_shape(const ParamLayout& layout, Param p) {
    const int64_t rows = dim_size(layout.config, param_table[p].rows), cols = layout.cols(p);
    if (param_table[p].rows == Dim::one) return {cols};
    if (param_table[p].transposed_in_hf()) return {cols, rows};
    return {rows, cols};
}

constexpr const char* EXPONENTS = ".block_exponents";
static int64_t count_blocks(int64_t elements) { return ceil_div(elements, FLAT_ALIGN); }

// The shape in memory, without padded rows.
static std::vector<int64_t> memory_shape(const ParamLayout& layout, Param p) {
    return {dim_size(layout.config, param_table[p].rows), layout.cols(p)};
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

TensorView view_flat(const ParamLayout& layout, const std::vector<const float*>& slots) {
    return [layout, slots](Slot slot, Param p, int l) { return slots[slot] + layout.offset(p, l); };
}

static std::vector<TensorInfo> list_tensors(const ParamLayout& layout, const TensorGroups& groups) {
    std::vector<TensorInfo> out;
    for (const TensorGroup& group : groups)
        for_each_tensor(layout, group, [&](Param p, int l) {
            const bool in_codes = group.dtype == "U8";
            const std::string name = group.prefix + hf_name(p, l);
            out.push_back({name, group.dtype, in_codes ? memory_shape(layout, p) : hf_shape(layout, p)});
            if (in_codes) out.push_back({name + EXPONENTS, "U8", {count_blocks(out.back().elements())}});
        });
    return out;
}

int64_t tensors_bytes(const ParamLayout& layout, const TensorGroups& groups, const Metadata& metadata) {
    std::vector<TensorInfo> tensors = list_tensors(layout, groups);
    return int64_t(safetensors_header(tensors, metadata).size()) + tensors.back().end;
}

static void write_codes(OutputFile& file, Slot slot, const float* values, int64_t count) {
    std::vector<uint8_t> codes(static_cast<size_t>(count)), exponents;
    with_format(slot == FIRST_MOMENT, [&]<class Format>(Format) {
        for (int64_t at = 0; at < count; at += FLAT_ALIGN)
            exponents.push_back(
                encode_block<Format>(&codes[at], values + at, std::min(FLAT_ALIGN, count - at), nullptr));
    });
    file.write(codes.data(), count);
    file.write(exponents.data(), int64_t(exponents.size()));
}

static void read_codes(const Safetensors& file, const TensorInfo& tensor, Slot slot, float* values) {
    const int64_t count = tensor.elements();
    std::vector<uint8_t> codes(static_cast<size_t>(count)), exponents(static_cast<size_t>(count_blocks(count)));
    file.read_bytes(codes.data(), tensor);
    file.read_bytes(exponents.data(), *file.find(tensor.name + EXPONENTS));
    with_format(slot == FIRST_MOMENT, [&]<class Format>(Format) {
        for (int64_t at = 0; at < count; at += FLAT_ALIGN)
            decode_block<Format>(values + at, &codes[at], std::min(FLAT_ALIGN, count - at), exponents[at / FLAT_ALIGN]);
    });
}

FileSum write_tensors(const std::string& path, const ParamLayout& layout, const TensorGroups& groups,
                      const TensorView& view, const Metadata& metadata) {
    std::vector<TensorInfo> tensors = list_tensors(layout, groups);
    const std::string header = safetensors_header(tensors, metadata);
    OutputFile file(path);
    file.write(header.data(), int64_t(header.size()));
    std::vector<float> strip;
    for (const TensorGroup& group : groups)
        for_each_tensor(layout, group, [&](Param p, int l) {
            const float* data = view(group.slot, p, l);
            const int rows = layout.rows(p), cols = layout.cols(p);
            const int64_t count = int64_t(dim_size(layout.config, param_table[p].rows)) * cols;  // without padded rows
            if (group.dtype == "U8") return write_codes(file, group.slot, data, count);
            if (!param_table[p].transposed_in_hf()) return write_elements(file, group.dtype, data, count);
            strip.resize(size_t(STRIP) * rows);
            for (int c = 0; c < cols; c += STRIP) {
                const int width = std::min(STRIP, cols - c);
                transpose_columns(strip.data(), data + c, rows, cols, width);
                write_elements(file, group.dtype, strip.data(), int64_t(width) * rows);
            }
        });
    return file.finish();
}

// The fields of config.json on which shapes depend, so without n_head.
static std::string describe_fields(const GPT2Config& config) {
    return format("config.json (n_layer %d, n_embd %d, n_positions %d, vocab_size %d; GPT-2's value if absent)",
                  config.L, config.C, config.max_T, config.V);
}

// Returns a tensor of the group. Refuses a shape that is not that of parameter p; the error names both shapes.
static const TensorInfo& find_tensor(const Safetensors& file, const TensorGroup& group, const ParamLayout& layout,
                                     Param p, int l) {
    const std::string name = group.prefix + hf_name(p, l);
    const TensorInfo* tensor = file.find(name);
    if (!tensor)
        fail(EXIT_BAD_DATA, "%s: the tensor %s, which belongs to %s, is missing", file.path.c_str(), name.c_str(),
             describe_fields(layout.config).c_str());
    const bool in_codes = tensor->dtype == "U8";
    const std::vector<int64_t> needed = in_codes || group.as_in_memory ? memory_shape(layout, p) : hf_shape(layout, p);
    const TensorInfo* exponents = in_codes ? file.find(name + EXPONENTS) : nullptr;
    if (in_codes &&
        !(exponents && exponents->dtype == "U8" && exponents->elements() == count_blocks(tensor->elements())))
        fail(EXIT_BAD_DATA, "%s: %s is %s, which needs %s%s, U8 [%lld]", file.path.c_str(), name.c_str(),
             to_string(*tensor).c_str(), name.c_str(), EXPONENTS,
             static_cast<long long>(count_blocks(tensor->elements())));
    if (tensor->shape != needed)
        fail(EXIT_BAD_DATA, "%s: %s is %s, but %s needs %s; are both files of one model?", file.path.c_str(),
             name.c_str(), to_string(*tensor).c_str(), describe_fields(layout.config).c_str(),
             shape_string(needed).c_str());
    return *tensor;
}

// Refuses NaN and infinity: they spread to every result, and a later checkpoint would not show the damage. A value
// above bf16's largest becomes infinite in a bf16 model.
static void check_finite(const std::string& path, const std::string& tensor, const float* values, int64_t count) {
    constexpr float largest = 0x1.fep127f;  // the largest finite bf16: 3.39e38
    int64_t bad = 0;                        // counted: a loop without an exit is vectorized
    for (int64_t i = 0; i < count; i++) bad += !(std::fabs(values[i]) <= largest);
    if (bad == 0) return;
    int64_t first = 0;
    while (std::fabs(values[first]) <= largest) first++;
    fail(EXIT_BAD_DATA, "%s: element %lld of %s is %g, so the model cannot be computed; use an earlier checkpoint",
         path.c_str(), static_cast<long long>(first), printable(tensor).c_str(), double(values[first]));
}

// Reads the tensors into memory layout; padded rows are zero.
void read_tensors(const Safetensors& file, const TensorGroup& group, const ParamLayout& layout,
                  const TensorWriter& write) {
    std::vector<float> memory, transposed;
    // All shapes are checked before the first call of write.
    for_each_tensor(layout, group, [&](Param p, int l) { find_tensor(file, group, layout, p, l); });
    for_each_tensor(layout, group, [&](Param p, int l) {
        const TensorInfo& tensor = find_tensor(file, group, layout, p, l);
        const bool in_codes = tensor.dtype == "U8";
        const bool transposes = param_table[p].transposed_in_hf() && !in_codes && !group.as_in_memory;
        memory.resize(std::max(memory.size(), size_t(layout.size(p))));
        if (transposes) transposed.resize(std::max(transposed.size(), size_t(layout.size(p))));
        float* from = transposes ? transposed.data() : memory.data();
        in_codes ? read_codes(file, tensor, group.slot, from) : file.read(from, tensor);
        check_finite(file.path, tensor.name, from, tensor.elements());
        if (transposes)
            transpose_columns(memory.data(), from, layout.cols(p), layout.rows(p), layout.rows(p));
        else
            std::fill(memory.begin() + tensor.elements(), memory.begin() + layout.size(p), 0.0f);
        write(memory.data(), group.slot, p, l);
    });
}

// ---- llm.c's model files: gpt2_124M.bin (version 3, fp32) and gpt2_124M_bf16.bin (version 5)
//
// 256 int32: magic 20240326, version, positions, vocabulary, layers, heads, channels, padded vocabulary. Then the 16
// tensors in memory layout, each of all layers. The file's size is compared with the header before any memory is taken.

constexpr int64_t HEADER_BYTES = 256 * sizeof(int32_t);
constexpr Param file_order[] = {wte,  wpe,  ln1w, ln1b, qkvw,    qkvb,    attprojw, attprojb,
                                ln2w, ln2b, fcw,  fcb,  fcprojw, fcprojb, lnfw,     lnfb};
static_assert(std::size(file_order) == NUM_PARAMS);

bool is_llmc_model(const std::string& path) {
    if (is_directory(path)) return false;
    const InputFile file(path);
    int32_t magic = 0;
    if (file.size >= HEADER_BYTES) file.read_at(&magic, 0, sizeof magic);
    return magic == 20240326;
}

// Returns the file under the tensors' names, and sets the configuration.
static Safetensors open_llmc(const std::string& path, GPT2Config& config) {
    Safetensors out = {path, {}, {0}, {}, {}};
    const InputFile& file = out.files.emplace_back(path);
    int32_t header[8];
    file.read_at(header, 0, sizeof header);
    const auto [magic, version, max_T, V, L, NH, C, Vp] = header;
    if (version != 3 && version != 5)
        fail(EXIT_BAD_DATA, "%s: has version %d; versions 3 (fp32) and 5 (bf16) of llm.c's models can be read",
             path.c_str(), version);
    config = {max_T, V, L, NH, C};
    check_config_of(path, config);
    if (Vp < V) fail(EXIT_BAD_DATA, "%s: its header has %d tokens padded to %d", path.c_str(), V, Vp);
    const ParamLayout layout(config);
    int64_t at = HEADER_BYTES;
    for (const Param p : file_order)
        for (int l = 0; l < layout.layers(p); l++) {
            const TensorInfo tensor = {hf_name(p, l), version == 3 ? "F32" : "BF16", memory_shape(layout, p), at};
            at += (p == wte ? int64_t(Vp) * C : tensor.elements()) * (version == 3 ? 4 : 2);
            out.tensors[tensor.name] = tensor;
        }
    if (at != file.size)
        fail(EXIT_BAD_DATA, "%s: has %s bytes, but a model of its header has %s; the file is damaged or incomplete",
             path.c_str(), with_commas(file.size).c_str(), with_commas(at).c_str());
    return out;
}

// ---- a directory

HFConfig read_hf_config(const std::string& dir) {
    constexpr int64_t max_bytes = 1 << 20;
    if (is_llmc_model(dir)) {
        GPT2Config config;
        open_llmc(dir, config);
        return new_hf_config(config);
    }
    const std::string path = dir + "/config.json", generation = dir + "/generation_config.json";
    if (path_exists(dir + "/adapter_config.json"))
        fail(EXIT_BAD_DATA,
             "%s: is a LoRA adapter (adapter_config.json), which is not applied; if the weights beside it are whole, "
             "remove that file; else merge both in Python: "
             "peft.AutoPeftModelForCausalLM.from_pretrained(\"%s\").merge_and_unload().save_pretrained(\"merged\")",
             dir.c_str(), dir.c_str());
    HFConfig config = parse_hf_config(read_file(path, max_bytes), path);
    if (!path_exists(generation)) return config;
    config.generation = read_file(generation, max_bytes);
    const Json object = parse_python_object(config.generation, generation);
    if (const std::vector<int> eos = read_ids({object, generation}, "eos_token_id"); !eos.empty()) config.eos = eos;
    return config;
}

std::string name_other_weights(const std::vector<std::string>& names) {
    static constexpr std::pair<const char*, const char*> known[] = {
        {".pt", "PyTorch"},     {".pth", "PyTorch"},     {".ckpt", "PyTorch or TensorFlow"},
        {".distcp", "PyTorch"}, {".h5", "Keras"},        {".index", "TensorFlow"},
        {".msgpack", "Flax"},   {"onnx", "ONNX"},        {".gguf", "llama.cpp"},
        {".pt2", "PyTorch"},    {".xml", "OpenVINO"},    {".tflite", "TensorFlow Lite"},
        {".ot", "rust-bert"},   {".engine", "TensorRT"}, {".mlpackage", "Core ML"},
    };
    for (const std::string& name : names)
        for (const auto& [suffix, program] : known)
            if (name.ends_with(suffix))
                return format(
                    "; %s is of %s, and only safetensors are read: give the model that it was made from, or load it "
                    "there, and if it is a GPT-2, save it with save_pretrained() of transformers",
                    printable(name).c_str(), program);
    return "";
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
    const std::vector<std::string> names = list_directory(dir);
    for (const std::string& name : names)
        if (name.ends_with(".safetensors") && name != "optimizer.safetensors")
            fail(EXIT_NO_INPUT,
                 "%s: has no model.safetensors, and no model.safetensors.index.json, which would name %s as a part; "
                 "fetch the index, or let the program that wrote the parts consolidate them",
                 dir.c_str(), printable(name).c_str());
    fail(EXIT_NO_INPUT, "%s: has no model.safetensors%s", dir.c_str(), name_other_weights(names).c_str());
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

// The name without what torch.compile and DataParallel put into it, anywhere if a layer is compiled alone, and what
// other modules, such as Lightning's, put before "transformer." and "lm_head.".
static std::string bare_name(const std::string& name) {
    std::string bare, part;
    for (std::istringstream parts(name); std::getline(parts, part, '.');) {
        if (part == "transformer" || part == "lm_head") bare.clear();
        if (part != "transformer" && part != "_orig_mod" && part != "module") bare += (bare.empty() ? "" : ".") + part;
    }
    return bare;
}

// Says what to do about a tensor of another kind of model than GPT2LMHeadModel; "": it belongs to another shape.
static const char* advise_on_other(const std::string& name) {
    if (name.find("lora_") != name.npos || name.find(".base_layer.") != name.npos)
        return "it is of a LoRA adapter, to be merged by peft's merge_and_unload()";
    for (const char* head : {"score.", "classifier.", "multiple_choice_head.", "qa_outputs.", "v_head."})
        if (name.starts_with(head))
            return "it is of another head, which is not trained here; to go on without it, load the model by "
                   "AutoModelForCausalLM of transformers and save it by save_pretrained()";
    // MLX, bitsandbytes, GPTQ, AWQ, quanto and compressed-tensors write tensors with these names. Tensors are checked
    // in the order of the alphabet, so the first one of each format is enough.
    for (const char* part :
         {".scales", ".SCB", ".absmax", ".qweight", ".g_idx", ".weight_scale", ".weight_packed", ".input_scale"})
        if (name.find(part) != name.npos)
            return "it belongs to quantized weights; give the model as it was before that";
    return "";
}

static const TensorGroup bare_names = {WEIGHTS, "", ""};

// Opens the file under the bare names of its tensors, and checks their names and shapes.
static Safetensors open_weights(const std::string& dir, const ParamLayout& layout) {
    Safetensors file = open_model(dir);
    std::map<std::string, TensorInfo> bare;
    for (const auto& [name, tensor] : file.tensors)
        if (const auto [same, is_new] = bare.emplace(bare_name(name), tensor); !is_new)
            fail(EXIT_BAD_DATA, "%s: %s and %s are the same tensor", file.path.c_str(),
                 printable(same->second.name).c_str(), printable(name).c_str());
    file.tensors = std::move(bare);

    std::set<std::string> expected = {"lm_head.weight"};
    for_each_tensor(layout, [&](Param p, int l) { expected.insert(hf_name(p, l)); });
    for (const auto& [name, tensor] : file.tensors)
        if (!expected.count(name) && !is_mask(name)) {
            const std::string advice = advise_on_other(name);
            fail(EXIT_BAD_DATA, "%s: the tensor %s (%s) does not belong to %s; %s", file.path.c_str(),
                 printable(name).c_str(), to_string(tensor).c_str(), describe_fields(layout.config).c_str(),
                 advice.empty() ? "are both files of one model?" : advice.c_str());
        }
    // save_model() of safetensors keeps one name of a tensor that has two.
    if (!file.find("wte.weight") && file.find("lm_head.weight") && read_hf_config(dir).tied) {
        auto head = file.tensors.extract("lm_head.weight");
        head.key() = "wte.weight";
        file.tensors.insert(std::move(head));
    }
    for_each_tensor(layout, [&](Param p, int l) { find_tensor(file, bare_names, layout, p, l); });
    if (!file.find("lm_head.weight") && !read_hf_config(dir).tied)
        fail(EXIT_BAD_DATA, "%s/config.json: \"tie_word_embeddings\" is false, but there is no lm_head.weight",
             dir.c_str());
    return file;
}

void check_weights(const std::string& dir, const GPT2Config& config) {
    if (!is_llmc_model(dir)) open_weights(dir, ParamLayout(config));  // else read_hf_config has checked the file
}

void load_weights(const std::string& dir, const ParamLayout& layout, const TensorWriter& write) {
    if (is_llmc_model(dir)) {
        GPT2Config config;
        return read_tensors(open_llmc(dir, config), {WEIGHTS, "", "", true}, layout, write);
    }
    const Safetensors file = open_weights(dir, layout);
    if (const TensorInfo* head = file.find("lm_head.weight")) check_tied(file, *head, *file.find("wte.weight"));
    read_tensors(file, bare_names, layout, write);
}

// ---- new tokens

// transformers draws the rows from V on from the normal distribution with the mean of the old rows and 1e-9 times their
// covariance. So is mean + sqrt(1e-9 / V) sum_i z_i (row_i - mean) distributed, with independent standard normal z_i:
// no matrix of the covariance is needed, which may be singular.
static void draw_rows(float* rows, int V, const GPT2Config& config, uint64_t seed) {
    constexpr int BLOCK = 16;  // rows that are drawn together, from one pass over the old ones
    const size_t C = size_t(config.C);
    std::vector<double> mean(C, 0.0);
    for (size_t i = 0; i < V * C; i += C)
        for (size_t c = 0; c < C; c++) mean[c] += rows[i + c] / double(V);
    const float scale = std::sqrt(1e-9f / float(V));
#pragma omp parallel for schedule(dynamic)
    for (int first = V; first < config.V; first += BLOCK) {
        const int count = std::min(BLOCK, config.V - first);
        std::vector<float> noise(count * C, 0.0f), centered(C, 0.0f);
        for (int i = 0; i < V; i++) {
            for (size_t c = 0; c < C; c++) centered[c] = rows[i * C + c] - float(mean[c]);
            for (int n = 0; n < count; n++) {
                const float z = Philox{seed, NEW_TOKENS_STREAM | uint64_t(first + n)}.normal(uint64_t(i));
                for (size_t c = 0; c < C; c++) noise[n * C + c] += z * centered[c];
            }
        }
        for (size_t i = 0; i < count * C; i++) rows[first * C + i] = float(mean[i % C]) + scale * noise[i];
    }
}

TensorWriter enlarge_vocabulary(int V, const ParamLayout& layout, uint64_t seed, const TensorWriter& write) {
    if (V == layout.config.V) return write;
    return [=, &layout](const float* host, Slot slot, Param p, int l) {
        if (p != wte) return write(host, slot, p, l);
        std::vector<float> rows(size_t(layout.size(wte)));
        std::copy_n(host, int64_t(V) * layout.config.C, rows.begin());
        draw_rows(rows.data(), V, layout.config, seed);
        write(rows.data(), slot, p, l);
    };
}
