// hf_weights.h: a model's tensors in the names and layout of Hugging Face's GPT-2, to and from safetensors files.
//
// There the matrices are transposed, (in, out) for Conv1D, and wte has no padded rows. Nothing here knows the device:
// tensors come and go through the two functions below, one at a time.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/hf_config.h"
#include "checkpoint/safetensors.h"
#include "model/params.h"

// Which tensor of a parameter: its weights in fp32, or a state tensor of the optimizer, counted from 1.
using Slot = int;
constexpr Slot WEIGHTS = 0;

// Copies one tensor to or from `host`: layout.size(p) floats as ParamLayout has them in memory, padded rows included.
// Called from one thread, in a fixed order: the tensors of the model, then layer by layer.
using TensorReader = std::function<void(float* host, Slot slot, Param p, int l)>;
using TensorWriter = std::function<void(const float* host, Slot slot, Param p, int l)>;

// Tensors in the order of files: those of the model, then layer by layer.
template <class F>
void for_each_tensor(const ParamLayout& layout, F f) {
    for (const ParamSpec& spec : param_table)
        if (spec.scope == Scope::model) f(spec.id, 0);
    for (int l = 0; l < layout.config.L; l++)
        for (const ParamSpec& spec : param_table)
            if (spec.scope == Scope::layer) f(spec.id, l);
}

// For flat host buffers of layout.total floats, one for each slot.
TensorReader read_from_flat(const ParamLayout& layout, const std::vector<const float*>& slots);
TensorWriter write_to_flat(const ParamLayout& layout, const std::vector<float*>& slots);

// Tensors that lie together in a file: their names start with prefix.
struct TensorGroup {
    Slot slot;
    std::string prefix;  // "transformer." for weights as Hugging Face has them
};
// The tensors of the groups, with a dtype of "F32" or "BF16": what write_tensors will write.
std::vector<TensorInfo> list_tensors(const ParamLayout& layout, const std::vector<TensorGroup>& groups,
                                     const char* dtype);
FileSum write_tensors(const std::string& path, const ParamLayout& layout, const std::vector<TensorGroup>& groups,
                      const char* dtype, const TensorReader& read, const Metadata& metadata);
// Refuses a missing tensor or another shape (EXIT_BAD_DATA) before the first one is handed over, and a value that is
// NaN or infinite before its tensor is.
void read_tensors(const Safetensors& file, const TensorGroup& group, const ParamLayout& layout,
                  const TensorWriter& write);

// Weights only (slot WEIGHTS), from a Hugging Face GPT-2 directory, ours or another's: model.safetensors or the
// files of its index; names with or without "transformer."; F32, BF16 or F16. Causal masks and an lm_head equal to wte
// are ignored; a tensor that is missing, unexpected, of another shape or not finite is named (EXIT_BAD_DATA).
void load_weights(const std::string& dir, const ParamLayout& layout, const TensorWriter& write);
