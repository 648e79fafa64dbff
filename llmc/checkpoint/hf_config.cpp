#include "checkpoint/hf_config.h"

#include <nlohmann/json.hpp>

#include <cmath>

#include "base/files.h"
#include "base/json.h"

using nlohmann::json;

namespace {

// A JSON object read with defaults: a key that is absent or null takes its default.
struct ConfigReader {
    const json& object;
    const std::string& path;

    const json* find(const char* key) const {
        const auto found = object.find(key);
        return found == object.end() || found->is_null() ? nullptr : &*found;
    }
    [[noreturn]] void wrong(const char* key, const char* wanted) const {
        fail(EXIT_BAD_DATA, "%s: \"%s\" is %s, but must be %s", path.c_str(), key,
             printable(object.at(key).dump(-1, ' ', true)).c_str(), wanted);
    }
    // Looks up the key, or the alias that transformers accepts for it.
    int integer(const char* key, const char* alias, int fallback) const {
        const json *own = find(key), *other = alias ? find(alias) : nullptr;
        if (own && other && *own != *other)
            fail(EXIT_BAD_DATA, "%s: \"%s\" and \"%s\" have the same meaning, but differ", path.c_str(), key, alias);
        if (!own && !other) return fallback;
        const json& value = own ? *own : *other;
        if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<int>::max())
            wrong(own ? key : alias, "an integer from 0 to 2147483647");
        return value.get<int>();
    }
    bool boolean(const char* key, bool fallback) const {
        const json* value = find(key);
        if (value && !value->is_boolean()) wrong(key, "true or false");
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
    const json* type = config.find("model_type");
    if (type && *type != "gpt2") config.wrong("model_type", "\"gpt2\": no other architecture is supported");
    const json* activation = config.find("activation_function");
    // Three names of the same function, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    if (activation && *activation != "gelu_new" && *activation != "gelu_pytorch_tanh" && *activation != "gelu_fast")
        config.wrong("activation_function", "\"gelu_new\", the tanh form of GELU");
    const json* epsilon = config.find("layer_norm_epsilon");
    if (epsilon && !(epsilon->is_number() && std::fabs(epsilon->get<double>() - 1e-5) < 1e-9))
        config.wrong("layer_norm_epsilon", "1e-05, which is built into the kernels");
    if (const int inner = config.integer("n_inner", nullptr, 0); config.find("n_inner") && inner != int64_t(4) * C)
        config.wrong("n_inner", format("null or 4 x %d channels", C).c_str());
    config.require("scale_attn_weights", true, "true: attention is scaled by 1/sqrt(head size)");
    config.require("scale_attn_by_inverse_layer_idx", false, "false: scaling by layer is not supported");
    config.require("reorder_and_upcast_attn", false, "false: this variant of attention is not supported");
    config.require("add_cross_attention", false, "false: cross attention is not supported");
    if (config.find("quantization_config"))
        config.wrong("quantization_config", "absent: quantized weights cannot be read");
    const json* pruned = config.find("pruned_heads");
    if (pruned && !pruned->empty()) config.wrong("pruned_heads", "empty: pruned heads are not supported");
}

HFConfig parse_hf_config(const std::string& text, const std::string& path) {
    const json object = parse_json(text, path);
    if (!object.is_object()) fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}", path.c_str());
    const ConfigReader reader{object, path};
    HFConfig config;
    GPT2Config& model = config.model;
    model.V = reader.integer("vocab_size", nullptr, 50257);
    model.max_T = reader.integer("n_positions", "max_position_embeddings", 1024);
    model.C = reader.integer("n_embd", "hidden_size", 768);
    model.L = reader.integer("n_layer", "num_hidden_layers", 12);
    model.NH = reader.integer("n_head", "num_attention_heads", 12);
    const bool has_end = !object.contains("eos_token_id") || reader.find("eos_token_id");
    config.end_of_text = has_end ? reader.integer("eos_token_id", nullptr, 50256) : model.V;
    config.tied = reader.boolean("tie_word_embeddings", true);
    check_supported(reader, model.C);
    try {
        check_config(model);
    } catch (const Error& error) {
        fail(EXIT_BAD_DATA, "%s: %s", path.c_str(), error.what());
    }
    return config;
}

HFConfig read_hf_config(const std::string& dir) {
    const std::string path = dir + "/config.json";
    return parse_hf_config(read_file(path, 1 << 20), path);
}

// The id of <|endoftext|>; null if it is outside of the vocabulary, because its id is then unknown.
static nlohmann::ordered_json end_of_text_json(const HFConfig& config) {
    if (config.end_of_text >= config.model.V) return nullptr;
    return config.end_of_text;
}

std::string hf_config_json(const HFConfig& config, const std::string& torch_dtype) {
    const GPT2Config& model = config.model;
    // Dropouts are 0, as in this program's training, so that fine-tuning elsewhere continues the same model.
    const nlohmann::ordered_json object = {
        {"architectures", {"GPT2LMHeadModel"}},
        {"model_type", "gpt2"},
        {"vocab_size", model.V},
        {"n_positions", model.max_T},
        {"n_ctx", model.max_T},
        {"n_embd", model.C},
        {"n_layer", model.L},
        {"n_head", model.NH},
        {"n_inner", nullptr},
        {"activation_function", "gelu_new"},
        {"layer_norm_epsilon", 1e-5},
        {"initializer_range", 0.02},
        {"resid_pdrop", 0.0},
        {"embd_pdrop", 0.0},
        {"attn_pdrop", 0.0},
        {"scale_attn_weights", true},
        {"scale_attn_by_inverse_layer_idx", false},
        {"reorder_and_upcast_attn", false},
        {"bos_token_id", end_of_text_json(config)},
        {"eos_token_id", end_of_text_json(config)},
        {"use_cache", true},
        {"tie_word_embeddings", true},
        {"torch_dtype", torch_dtype},
    };
    return object.dump(2) + "\n";
}

std::string hf_generation_config_json(const HFConfig& config) {
    const nlohmann::ordered_json object = {{"bos_token_id", end_of_text_json(config)},
                                           {"eos_token_id", end_of_text_json(config)}};
    return object.dump(2) + "\n";
}
