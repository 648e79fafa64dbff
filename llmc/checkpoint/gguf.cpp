#include "checkpoint/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "base/files.h"
#include "checkpoint/hf.h"

constexpr int64_t ALIGNMENT = 32;   // bytes to which a tensor's data are padded
constexpr int64_t CHUNK = 1 << 16;  // elements that are converted at once: whole blocks
constexpr int QUANTS = 32;          // elements of a q8_0 block, which share a scale

namespace {
struct GGUFType {
    const char* name;
    uint32_t id, file_type;  // ggml_type, llama_ftype
    int64_t block, bytes;    // elements and bytes of a block
    float limit;             // the smallest value that would become infinite
};

constexpr GGUFType f32 = {"f32", 0, 0, 1, 4, INFINITY}, f16 = {"f16", 1, 1, 1, 2, 65520},
                   bfloat = {"bf16", 30, 32, 1, 2, INFINITY}, q8_0 = {"q8_0", 8, 7, QUANTS, 2 + QUANTS, 65520.0f * 127};

// ---- tensors

// The part after "blk.N." for a layer's tensors.
constexpr const char* gguf_names[] = {
    "token_embd.weight", "position_embd.weight", "output_norm.weight", "output_norm.bias",
    "attn_qkv.weight",   "attn_output.weight",   "ffn_up.weight",      "ffn_down.weight",
    "attn_norm.weight",  "attn_norm.bias",       "attn_qkv.bias",      "attn_output.bias",
    "ffn_norm.weight",   "ffn_norm.bias",        "ffn_up.bias",        "ffn_down.bias"};
static_assert(std::size(gguf_names) == NUM_PARAMS);

struct GGUFTensor {
    std::string name;
    GGUFType type;
    int64_t rows, cols;  // shape without the padded rows of wte

    int64_t bytes() const { return rows * cols / type.block * type.bytes; }
    int64_t padding() const { return round_up(bytes(), ALIGNMENT) - bytes(); }
};

GGUFTensor gguf_tensor(const ParamLayout& layout, Param p, int l, const GGUFType& wanted) {
    const ParamSpec& spec = param_table[p];
    const int rows = dim_size(layout.config, spec.rows), cols = layout.cols(p);
    const bool stays = p == wpe || spec.rows == Dim::one;
    return {spec.scope == Scope::layer ? format("blk.%d.%s", l, gguf_names[p]) : gguf_names[p],
            stays                      ? f32
            : cols % wanted.block == 0 ? wanted
                                       : f16,
            rows, cols};
}

// Rounds to nearest, ties to even, without branches, so that loops are vectorized. |x| is below f16.limit.
inline uint16_t half_bits(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffff;
    // Below 2^-14 half has steps of 2^-24, as float has from 0.5 to 1: the addition rounds to them.
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t usual = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    return uint16_t((u >> 16 & 0x8000) | (magnitude < 113u << 23 ? small : usual));
}

// Rounds as llama.cpp's gguf.quants does: the scale is max/127; quotients are rounded half away from zero.
void quantize_block(uint8_t* out, const float* x) {
    float largest = 0;
    for (int i = 0; i < QUANTS; i++) largest = std::max(largest, std::fabs(x[i]));
    const float scale = largest / 127;
    const float inverse = std::isfinite(1 / scale) ? 1 / scale : 0;  // 0: the scale is 0 in f16
    const uint16_t half = half_bits(scale);
    std::memcpy(out, &half, 2);
    for (int i = 0; i < QUANTS; i++) {
        const float quotient = x[i] * inverse, size = std::fabs(quotient);
        const int rounded = int(size) + (size - float(int(size)) >= 0.5f);
        out[2 + i] = uint8_t(quotient < 0 ? -rounded : rounded);
    }
}

// Converts whole blocks.
void convert(uint16_t* out, const GGUFType& type, const float* x, int64_t count) {
    uint8_t* blocks = reinterpret_cast<uint8_t*>(out);
    if (type.id == f32.id) std::memcpy(out, x, size_t(count) * 4);
    if (type.id == f16.id)
        for (int64_t i = 0; i < count; i++) out[i] = half_bits(x[i]);
    if (type.id == bfloat.id)
        for (int64_t i = 0; i < count; i++) out[i] = bf16(x[i]).bits;
    if (type.id == q8_0.id)
        for (int64_t i = 0; i < count / QUANTS; i++) quantize_block(blocks + i * q8_0.bytes, x + i * QUANTS);
}

void write_tensor(OutputFile& file, const GGUFTensor& tensor, const std::string& weights, const float* x) {
    std::vector<uint16_t> out(CHUNK * 2);  // an array would be all of the stack under `ulimit -s 256`
    float largest = 0;
    for (int64_t at = 0; at < tensor.rows * tensor.cols; at += CHUNK) {
        const int64_t count = std::min(CHUNK, tensor.rows * tensor.cols - at);
        for (int64_t i = at; i < at + count; i++) largest = std::max(largest, std::fabs(x[i]));
        if (largest >= tensor.type.limit)
            fail(EXIT_BAD_DATA, "%s: %s has a value of size %g, which is too large for %s; give --type bf16 or f32",
                 weights.c_str(), tensor.name.c_str(), double(largest), tensor.type.name);
        convert(out.data(), tensor.type, x + at, count);
        file.write(out.data(), count / tensor.type.block * tensor.type.bytes);
    }
    file.write(std::string(ALIGNMENT, '\0').data(), tensor.padding());
}

// ---- the header

// Bytes of the header. A string has its length before it.
struct Bytes {
    std::string bytes;
    uint64_t keys = 0;

    template <class T>
    void put(const T& value) {
        if constexpr (std::is_same_v<T, std::string>)
            put(uint64_t(value.size())), bytes += value;
        else
            bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    template <class T>
    static constexpr uint32_t type = std::is_same_v<T, uint32_t>  ? 4
                                     : std::is_same_v<T, int32_t> ? 5
                                     : std::is_same_v<T, float>   ? 6
                                     : std::is_same_v<T, bool>    ? 7
                                                                  : 8;
    template <class T>
    void add(const std::string& key, const T& value) {
        put(key), put(type<T>), put(value), keys++;
    }
    template <class T>
    void add(const std::string& key, const std::vector<T>& list) {
        put(key), put(9u), put(type<T>), put(uint64_t(list.size())), keys++;
        for (const T& value : list) put(value);
    }
};

void add_metadata(Bytes& out, const std::string& name, const GPT2Config& config, const GGUFVocabulary& vocabulary,
                  const GGUFType& type) {
    out.add("general.architecture", std::string("gpt2"));
    out.add("general.type", std::string("model"));
    out.add("general.name", name);
    out.add("general.file_type", type.file_type);
    out.add("general.quantization_version", 2u);
    out.add("gpt2.context_length", uint32_t(config.max_T));
    out.add("gpt2.embedding_length", uint32_t(config.C));
    out.add("gpt2.feed_forward_length", uint32_t(4 * config.C));
    out.add("gpt2.block_count", uint32_t(config.L));
    out.add("gpt2.attention.head_count", uint32_t(config.NH));
    out.add("gpt2.attention.layer_norm_epsilon", 1e-5f);
    out.add("tokenizer.ggml.model", std::string("gpt2"));
    out.add("tokenizer.ggml.pre", std::string("gpt-2"));
    out.add("tokenizer.ggml.tokens", vocabulary.tokens);
    out.add("tokenizer.ggml.token_type", vocabulary.types);
    out.add("tokenizer.ggml.merges", vocabulary.merges);
    out.add("tokenizer.ggml.bos_token_id", uint32_t(vocabulary.bos));
    out.add("tokenizer.ggml.eos_token_id", uint32_t(vocabulary.eos));
    if (vocabulary.pad >= 0) out.add("tokenizer.ggml.padding_token_id", uint32_t(vocabulary.pad));
    if (vocabulary.add_bos) out.add("tokenizer.ggml.add_bos_token", true);
    if (!vocabulary.chat_template.empty()) out.add("tokenizer.chat_template", vocabulary.chat_template);
}

// Magic, version, counts, keys and values, then the tensors' names, shapes, types and offsets.
std::string make_header(const Bytes& metadata, const std::vector<GGUFTensor>& tensors) {
    Bytes out = {"GGUF"};
    out.put(3u), out.put(uint64_t(tensors.size())), out.put(metadata.keys);
    out.bytes += metadata.bytes;
    int64_t offset = 0;
    for (const GGUFTensor& tensor : tensors) {
        const bool is_matrix = tensor.name.ends_with(".weight") && tensor.name.find("_norm.") == std::string::npos;
        out.put(tensor.name), out.put(is_matrix ? 2u : 1u), out.put(tensor.cols);  // the fastest dimension comes first
        if (is_matrix) out.put(tensor.rows);
        out.put(tensor.type.id), out.put(offset);
        offset += tensor.bytes() + tensor.padding();
    }
    out.bytes.resize(round_up<size_t>(out.bytes.size(), ALIGNMENT));
    return out.bytes;
}

}  // namespace

std::string write_gguf(const std::string& path, const std::string& weights, const GPT2Config& config,
                       const GGUFVocabulary& vocabulary, GGUFMatrices matrices) {
    const ParamLayout layout(config);
    const std::string file_name = path.substr(path.rfind('/') + 1);
    const GGUFType wanted = std::array{f32, f16, bfloat, q8_0}[size_t(matrices)];
    std::vector<GGUFTensor> tensors;
    for_each_tensor(layout, [&](Param p, int l) { tensors.push_back(gguf_tensor(layout, p, l, wanted)); });
    Bytes metadata;
    add_metadata(metadata, file_name.substr(0, file_name.rfind('.')), config, vocabulary, wanted);
    const std::string header = make_header(metadata, tensors);
    replace_file(path, [&](OutputFile& file) {
        file.write(header.data(), int64_t(header.size()));
        size_t next = 0;
        load_weights(weights, layout,
                     [&](const float* host, Slot, Param, int) { write_tensor(file, tensors[next++], weights, host); });
    });
    const auto rest = wanted.id != q8_0.id ? 0 : std::ranges::count(tensors, f16.id, [](auto& t) { return t.type.id; });
    return format("%zu tensors", tensors.size()) +
           (rest == 0
                ? ""
                : format(", %lld of them f16 because 32 does not divide their rows", static_cast<long long>(rest)));
}
