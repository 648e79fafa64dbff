// gguf.h: writes a model as a GGUF file (version 3, architecture gpt2), as llama.cpp and Ollama read it. Keys, names
// and types are those of llama.cpp's convert_hf_to_gguf.py. Matrices have rows of output channels, as in memory here;
// there is no output head, because it is token_embd. Norms, biases and positions are f32 in every file.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/params.h"

enum class GGUFMatrices { f32, f16, bf16, q8_0 };  // type of the matrices in the file

struct GGUFVocabulary {
    enum Type : int32_t { normal = 1, control = 3, user_defined = 4, unused = 5 };  // llama.cpp's values
    std::vector<std::string> tokens;  // text of each id, in GPT-2's alphabet of bytes; config.V tokens
    std::vector<int32_t> types;       // Type of each token
    std::vector<std::string> merges;  // "left right", by rank
    int bos = 0, eos = 0, pad = -1;   // -1: none
    bool add_bos = false;             // bos is put in front of every text
    std::string chat_template;        // "": none
};

// Writes the weights that load_weights reads to `path`, or throws and leaves no file; returns "28 tensors" and how
// many of them are not of the type. Memory holds one tensor at a time. Refuses values that the type cannot hold
// (EXIT_BAD_DATA).
std::string write_gguf(const std::string& path, const std::string& weights, const GPT2Config& config,
                       const GGUFVocabulary& vocabulary, GGUFMatrices matrices);
