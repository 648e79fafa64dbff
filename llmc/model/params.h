// params.h: the model's sizes, the table of its 16 parameter tensors, and the offset of each tensor in a flat buffer.
//
// Allocation, initialization, weight decay, buckets and checkpoints all iterate over param_table.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "base/common.h"
#include "ops/ops.h"

struct GPT2Config {
    int max_T = 1024;  // positions: the maximum sequence length
    int V = 50257;     // vocabulary
    int L = 12;        // layers
    int NH = 12;       // heads
    int C = 768;       // channels

    int Vp() const { return round_up(V, 128); }  // rows of wte in memory: whole tiles for the matmuls
    int HS() const { return C / NH; }
    bool operator==(const GPT2Config&) const = default;
};

// Accepts the names of GPT-2's four sizes (d12 or gpt2, ...) and of GPT-3's up to 13 billion parameters (gpt3-125m,
// ...). The error for another name lists them.
GPT2Config config_by_name(const std::string& name);
std::string describe_model(const GPT2Config& config);  // "12 layers, ..."
// Refuses sizes below 1 or above the supported limits, and C that is not a multiple of NH.
void check_config(const GPT2Config& config);

// The parameters in the order of a flat buffer: in each scope, the decayed (2-D) tensors come first. The value of a
// parameter selects the random numbers of its initial weights, so a parameter inserted in the middle changes the
// initial weights of all later parameters.
// clang-format off
enum Param {
    wte, wpe, lnfw, lnfb,                  // tensors of the model
    qkvw, attprojw, fcw, fcprojw,          // tensors of each layer
    ln1w, ln1b, qkvb, attprojb, ln2w, ln2b, fcb, fcprojb,
    NUM_PARAMS
};
// clang-format on
enum class Scope { model, layer };
enum class Dim { one, V, T, C, C3, C4 };            // "one": the tensor has one dimension
enum class Init { normal, residual, ones, zeros };  // normal: N(0, 0.02); residual: N(0, 0.02 / sqrt(2 L))
// How tensor parallelism divides a tensor (Shoeybi et al. 2019): by output channels (rows of a matrix, elements of a
// bias), by input channels (columns of a matrix), or by heads: by output channels in each of the thirds Q, K and V.
// none: each rank has the whole tensor.
enum class Split { none, output, input, heads };

struct ParamSpec {
    Param id;
    const char* name;     // llm.c's name, in gradient reports and tests
    const char* hf_name;  // Hugging Face's name behind "transformer." and, in a layer, "h.N."
    Scope scope;
    Dim rows, cols;
    Init init;
    bool decay;
    Split split;

    // Hugging Face's Conv1D stores a layer's matrices as (in, out), this program stores (out, in).
    constexpr bool transposed_in_hf() const { return scope == Scope::layer && rows != Dim::one; }
};

// wte is also the LM head.
constexpr ParamSpec param_table[NUM_PARAMS] = {
    // clang-format off
    {wte,      "wte",      "wte.weight",         Scope::model, Dim::V,   Dim::C,  Init::normal,   true,  Split::output},
    {wpe,      "wpe",      "wpe.weight",         Scope::model, Dim::T,   Dim::C,  Init::normal,   true,  Split::none},
    {lnfw,     "lnfw",     "ln_f.weight",        Scope::model, Dim::one, Dim::C,  Init::ones,     false, Split::none},
    {lnfb,     "lnfb",     "ln_f.bias",          Scope::model, Dim::one, Dim::C,  Init::zeros,    false, Split::none},
    {qkvw,     "qkvw",     "attn.c_attn.weight", Scope::layer, Dim::C3,  Dim::C,  Init::normal,   true,  Split::heads},
    {attprojw, "attprojw", "attn.c_proj.weight", Scope::layer, Dim::C,   Dim::C,  Init::residual, true,  Split::input},
    {fcw,      "fcw",      "mlp.c_fc.weight",    Scope::layer, Dim::C4,  Dim::C,  Init::normal,   true,  Split::output},
    {fcprojw,  "fcprojw",  "mlp.c_proj.weight",  Scope::layer, Dim::C,   Dim::C4, Init::residual, true,  Split::input},
    {ln1w,     "ln1w",     "ln_1.weight",        Scope::layer, Dim::one, Dim::C,  Init::ones,     false, Split::none},
    {ln1b,     "ln1b",     "ln_1.bias",          Scope::layer, Dim::one, Dim::C,  Init::zeros,    false, Split::none},
    {qkvb,     "qkvb",     "attn.c_attn.bias",   Scope::layer, Dim::one, Dim::C3, Init::zeros,    false, Split::heads},
    {attprojb, "attprojb", "attn.c_proj.bias",   Scope::layer, Dim::one, Dim::C,  Init::zeros,    false, Split::none},
    {ln2w,     "ln2w",     "ln_2.weight",        Scope::layer, Dim::one, Dim::C,  Init::ones,     false, Split::none},
    {ln2b,     "ln2b",     "ln_2.bias",          Scope::layer, Dim::one, Dim::C,  Init::zeros,    false, Split::none},
    {fcb,      "fcb",      "mlp.c_fc.bias",      Scope::layer, Dim::one, Dim::C4, Init::zeros,    false, Split::output},
    {fcprojb,  "fcprojb",  "mlp.c_proj.bias",    Scope::layer, Dim::one, Dim::C,  Init::zeros,    false, Split::none},
    // clang-format on
};
// Muon's tensors.
constexpr bool is_layer_matrix(Param p) { return param_table[p].transposed_in_hf(); }
constexpr bool param_table_is_ordered() {
    for (int p = 0; p < NUM_PARAMS; p++)
        if (param_table[p].id != p) return false;
    return true;
}
static_assert(param_table_is_ordered(), "param_table must list the parameters in the order of enum Param");

constexpr int dim_size(const GPT2Config& config, Dim dim) {
    // clang-format off
    switch (dim) {
        case Dim::V: return config.V;
        case Dim::T: return config.max_T;
        case Dim::C: return config.C;
        case Dim::C3: return 3 * config.C;
        case Dim::C4: return 4 * config.C;
        default: return 1;
    }
    // clang-format on
}

// Number of parameters, without the padded rows of wte: 124,439,808 for d12.
constexpr int64_t count_parameters(const GPT2Config& config) {
    int64_t count = 0;
    for (const ParamSpec& p : param_table) {
        const int copies = p.scope == Scope::layer ? config.L : 1;
        count += int64_t(dim_size(config, p.rows)) * dim_size(config, p.cols) * copies;
    }
    return count;
}

// The range of elements that one collective reduces or gathers. Bucket 0 holds the tensors of Scope::model, bucket
// 1 + l those of layer l. In each bucket the decayed elements come first. Bucket 0 is large and backward's last, but in
// parts it would hide only 0.2 ms of a step of 105 ms (124M on 8 GPUs, computed).
struct Bucket {
    int64_t begin, decayed_end, end;
    int64_t size() const { return end - begin; }
};

// This rank's shard of the tensors that tensor parallelism divides into `count` shards.
struct TensorShard {
    int index = 0, count = 1;
};

// Offsets, in elements, of the tensors in a flat buffer. Each tensor starts at a multiple of FLAT_ALIGN. The gaps and
// wte's padded rows hold zeros in every buffer, and AdamW keeps zeros unchanged.
struct ParamLayout {
    GPT2Config config;
    TensorShard shard;
    int64_t offsets[NUM_PARAMS];  // offset of the tensor, in layer 0
    int64_t layer_stride;
    int64_t total;

    // Buckets are padded so that each divides into virtual_ranks equal shares, each a multiple of FLAT_ALIGN. With a
    // shard, the sizes below are those of the shard. Refuses heads that do not divide into shards.
    explicit ParamLayout(const GPT2Config& config, int virtual_ranks = 1, TensorShard shard = {});
    int rows(Param p) const;  // rows in memory, padding included
    int cols(Param p) const;
    int64_t size(Param p) const { return int64_t(rows(p)) * cols(p); }
    int layers(Param p) const { return param_table[p].scope == Scope::layer ? config.L : 1; }
    int64_t offset(Param p, int l = 0) const {
        return offsets[p] + (param_table[p].scope == Scope::layer ? l * layer_stride : 0);
    }
    int num_buckets() const { return 1 + config.L; }
    int bucket_of(Param p, int l) const { return param_table[p].scope == Scope::model ? 0 : 1 + l; }
    Bucket bucket(int b) const;
    DecayPattern decay_pattern() const;
    VocabShard vocab() const;  // the rows of wte in this shard
};

// Calls f(own, whole, count) for each run of elements of tensor p's shard that are adjacent in the whole tensor too:
// elements own .. of the shard are elements whole .. of the whole tensor, in the memory layout without shards. Padded
// rows of wte are left out.
template <class F>
void for_each_run(const ParamLayout& layout, Param p, F f) {
    const Split split = param_table[p].split;
    const bool is_bias = param_table[p].rows == Dim::one;
    const int64_t index = layout.shard.index, count = layout.shard.count;
    const int64_t cols = is_bias ? 1 : layout.cols(p), channels = layout.size(p) / cols;  // output channels
    if (split == Split::input && count > 1) {
        for (int64_t o = 0; o < channels; o++) f(o * cols, (o * count + index) * cols, cols);
    } else if (split == Split::heads && count > 1) {
        const int64_t third = channels / 3 * cols;
        for (int64_t i = 0; i < 3; i++) f(i * third, (i * count + index) * third, third);
    } else {
        const int64_t begin = split == Split::none ? 0 : index * channels;
        const int64_t end = p == wte ? std::clamp<int64_t>(layout.config.V, begin, begin + channels) : begin + channels;
        if (end > begin) f(0, begin * cols, (end - begin) * cols);
    }
}
// Copies a tensor's shard from the whole tensor, with zeros in padded rows; and into the whole tensor.
void take_shard(float* own, const float* whole, const ParamLayout& layout, Param p);
void put_shard(float* whole, const float* own, const ParamLayout& layout, Param p);

// GPT-2's initialization of elements begin .. end of one whole tensor in memory layout; padded rows are zero. Element i
// depends only on seed, the tensor and i, not on threads, ranks or order.
void init_param(float* out, const GPT2Config& config, Param p, int l, uint64_t seed, int64_t begin, int64_t end);
