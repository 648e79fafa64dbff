// hf_config.h: config.json and generation_config.json of a Hugging Face GPT-2 directory.
#pragma once
#include <string>

#include "model/params.h"

struct HFConfig {
    GPT2Config model;
    int end_of_text = 50256;  // bos_token_id and eos_token_id; V or more: unknown, null in config.json
    bool tied = true;         // tie_word_embeddings: the output head is wte
};

// Reads config.json with the defaults and aliases of transformers' GPT2Config; unknown keys are ignored. Refuses
// (EXIT_BAD_DATA) a model that this program does not implement, with the key, its value and the reason: an activation
// other than tanh GELU, n_inner other than 4 n_embd, cross attention, attention variants, another epsilon.
HFConfig parse_hf_config(const std::string& text, const std::string& path);
HFConfig read_hf_config(const std::string& dir);  // fails with EXIT_NO_INPUT if DIR/config.json is missing

// The contents of config.json and of generation_config.json. torch_dtype is the dtype of model.safetensors: "float32"
// or "bfloat16".
std::string hf_config_json(const HFConfig& config, const std::string& torch_dtype);
std::string hf_generation_config_json(const HFConfig& config);
