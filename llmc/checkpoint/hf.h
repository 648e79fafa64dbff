// hf.h: a model as Hugging Face stores it: config.json, and tensors in safetensors files with GPT-2's names and layout.
//
// In these files the matrices are transposed, (in, out) for Conv1D, and wte has no padded rows. This code does not
// depend on the device: the callbacks below copy tensors, one at a time.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "model/params.h"

struct HFConfig {
    GPT2Config model;
    std::vector<int> eos;    // the tokens that end a text: eos_token_id of generation_config.json, else config.json
    int bos = -1, pad = -1;  // bos_token_id and pad_token_id; -1: none
    bool tied = true;        // tie_word_embeddings: the output head is wte
    std::string text;        // config.json, with the keys that are not read
    std::string generation;  // generation_config.json; empty: there is none
};

// The configuration of a new model, whose texts end with <|endoftext|> of GPT-2 if that is in its vocabulary.
HFConfig new_hf_config(const GPT2Config& model);
// Reads config.json with the defaults and aliases of transformers' GPT2Config; unknown keys are ignored. Refuses
// (EXIT_BAD_DATA) a model that this program does not implement, with the key, its value and the reason: an activation
// other than tanh GELU, n_inner other than 4 n_embd, cross attention, attention variants, another epsilon.
HFConfig parse_hf_config(const std::string& text, const std::string& path);
// Also reads generation_config.json, which may be missing. Fails with EXIT_NO_INPUT if DIR/config.json is missing.
// dir, here and below, may also be llm.c's .bin.
HFConfig read_hf_config(const std::string& dir);
// Sets the tokens in both texts; -1: none, and bos is then the same token as eos.
void set_tokens(HFConfig& config, int eos, int bos, int pad);

// The text of config.json. It has the shape of config.model and all other keys of config.text, but not those that would
// be untrue. torch_dtype, of model.safetensors: "float32" or "bfloat16".
std::string hf_config_json(const HFConfig& config, const std::string& torch_dtype);

// The kind of a parameter's tensor: its weights in fp32, or a moment of the optimizer.
using Slot = int;
constexpr Slot WEIGHTS = 0, FIRST_MOMENT = 1, SECOND_MOMENT = 2, NUM_SLOTS = 3;

// Returns one tensor: layout.size(p) floats in ParamLayout's memory layout, padded rows included, which stay valid
// until the next call. The callbacks are called from one thread, in the order of for_each_tensor.
using TensorView = std::function<const float*(Slot slot, Param p, int l)>;
using TensorWriter = std::function<void(const float* host, Slot slot, Param p, int l)>;

// Calls f for each tensor in the order of the files: the tensors of the model, then layer by layer.
template <class F>
void for_each_tensor(const ParamLayout& layout, F f) {
    for (const ParamSpec& spec : param_table)
        if (spec.scope == Scope::model) f(spec.id, 0);
    for (int l = 0; l < layout.config.L; l++)
        for (const ParamSpec& spec : param_table)
            if (spec.scope == Scope::layer) f(spec.id, l);
}

// A view of flat host buffers of layout.total floats, one buffer per slot.
TensorView view_flat(const ParamLayout& layout, const std::vector<const float*>& slots);

std::string hf_name(Param p, int l);  // "h.0.ln_1.bias"

// A group of tensors in a file: all parameters of one slot, with a common name prefix. A moment in 8 bits is two
// tensors: "m.transformer.h.0.ln_1.bias", a code for each element in ParamLayout's order, without padded rows, and
// "m.transformer.h.0.ln_1.bias.block_exponents", a byte for each FLAT_ALIGN of them (base/moments.h).
struct TensorGroup {
    Slot slot;
    std::string prefix;         // "transformer." for weights, as in Hugging Face's files
    std::string dtype;          // to be written: "F32", "BF16" or "U8": codes
    bool as_in_memory = false;  // to be read: matrices are (out, in)
    bool without_matrices = false;
};
using TensorGroups = std::vector<TensorGroup>;
// Calls f for each tensor of the group.
template <class F>
void for_each_tensor(const ParamLayout& layout, const TensorGroup& group, F f) {
    for_each_tensor(layout, [&](Param p, int l) {
        if (!group.without_matrices || !is_layer_matrix(p)) f(p, l);
    });
}
FileSum write_tensors(const std::string& path, const ParamLayout& layout, const TensorGroups& groups,
                      const TensorView& view, const Metadata& metadata);
// The size of the file that write_tensors makes.
int64_t tensors_bytes(const ParamLayout& layout, const TensorGroups& groups, const Metadata& metadata);
// Refuses (EXIT_BAD_DATA) missing tensors and wrong shapes before any `write`, and NaN or infinity before its own.
void read_tensors(const Safetensors& file, const TensorGroup& group, const ParamLayout& layout,
                  const TensorWriter& write);

// Loads weights only (slot WEIGHTS) from any Hugging Face GPT-2 directory: model.safetensors or the files of its index;
// F32, BF16 or F16. Names of tensors may lack "transformer.", and may have the parts that torch.compile, DataParallel
// and other modules add ("_orig_mod.", "module.", "model."). Ignores causal masks, and an
// lm_head that equals wte. Refuses (EXIT_BAD_DATA) tensors that are missing, unexpected, misshapen or not finite.
void load_weights(const std::string& dir, const ParamLayout& layout, const TensorWriter& write);
// Refuses the same missing, unexpected and wrong tensors before any memory is taken: only the header is read.
void check_weights(const std::string& dir, const GPT2Config& config);

// A writer of a model with more tokens than the V that it is given: new rows of wte are drawn from the old ones' normal
// distribution, as by resize_token_embeddings of transformers. The layout must outlive it.
TensorWriter enlarge_vocabulary(int V, const ParamLayout& layout, uint64_t seed, const TensorWriter& write);

// "; model.pt is a file of PyTorch, ..." with what to do, of the first of these names that is known as other programs'
// weights; "" without one.
std::string name_other_weights(const std::vector<std::string>& names);

// Whether the path is a file with the magic number of llm.c's models. The functions above refuse (EXIT_BAD_DATA)
// another version, unsupported sizes, and a file that is not as long as its header says.
bool is_llmc_model(const std::string& path);
