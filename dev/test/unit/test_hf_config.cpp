// test_hf_config.cpp: tests that config.json is read with the defaults and aliases of transformers, and that models
// which the program cannot compute are refused.
#include "checkpoint/hf.h"

#include <doctest/doctest.h>

#include "support/refusal.h"
#include "support/temporary.h"

static GPT2Config parse(const std::string& text) { return parse_hf_config(text, "config.json").model; }

static std::string parse_error(const std::string& text) {
    try {
        parse_hf_config(text, "config.json");
    } catch (const Error& error) {
        return error.exit_code == EXIT_BAD_DATA ? error.what() : format("exit code %d", error.exit_code);
    }
    return "";
}

TEST_CASE("a config.json reads back as it was written") {
    const HFConfig config{{5, 7, 2, 3, 12}, 6, true};
    const std::string text = hf_config_json(config, "float32");
    const HFConfig got = parse_hf_config(text, "config.json");
    CHECK(got.model == config.model);
    CHECK(got.end_of_text == 6);
    CHECK(got.tied);
    for (const char* line :
         {"\"architectures\": [\n    \"GPT2LMHeadModel\"\n  ]", "\"model_type\": \"gpt2\"", "\"n_positions\": 5",
          "\"vocab_size\": 7", "\"n_layer\": 2", "\"n_head\": 3", "\"n_embd\": 12", "\"torch_dtype\": \"float32\"",
          "\"resid_pdrop\": 0.0", "\"bos_token_id\": 6", "\"layer_norm_epsilon\": 1e-05"}) {
        CAPTURE(line);
        CHECK(text.find(line) != std::string::npos);
    }
    CHECK(hf_generation_config_json(config).find("\"eos_token_id\": 6") != std::string::npos);
}

TEST_CASE("an end-of-text token outside of the vocabulary is written as null") {
    const HFConfig config{{5, 1000, 2, 3, 12}};
    const std::string text = hf_config_json(config, "float32");
    CHECK(text.find("\"bos_token_id\": null") != std::string::npos);
    CHECK(text.find("\"eos_token_id\": null") != std::string::npos);
    CHECK(hf_generation_config_json(config).find("\"eos_token_id\": null") != std::string::npos);
    CHECK(parse_hf_config(text, "config.json").model == config.model);
    CHECK(hf_config_json({{5, 1000, 2, 3, 12}, 0}, "float32").find("\"eos_token_id\": 0") != std::string::npos);
}

TEST_CASE("absent keys have transformers' defaults, null is absent, unknown keys are ignored") {
    CHECK(parse("{}") == GPT2Config{1024, 50257, 12, 12, 768});
    CHECK(parse(R"({"n_embd":null,"n_inner":null,"n_head":null})") == GPT2Config{1024, 50257, 12, 12, 768});
    CHECK(parse(R"({"_name_or_path":"x","task_specific_params":{"a":[1]},"summary_type":"cls_index"})") ==
          GPT2Config{1024, 50257, 12, 12, 768});
    CHECK(parse_hf_config("{}", "x").end_of_text == 50256);
    // Without an id, as this program writes it when it does not know the id, a larger vocabulary gets none either.
    CHECK(parse_hf_config(R"({"vocab_size": 60000, "eos_token_id": null})", "x").end_of_text == 60000);
    CHECK_FALSE(parse_hf_config(R"({"tie_word_embeddings":false})", "x").tied);
}

TEST_CASE("aliases of keys are read, and refused if two of them differ") {
    const char* text =
        R"({"hidden_size":1600,"max_position_embeddings":512,"num_attention_heads":25,"num_hidden_layers":48})";
    CHECK(parse(text) == GPT2Config{512, 50257, 48, 25, 1600});
    CHECK(parse(R"({"n_embd":1024,"hidden_size":1024,"n_head":16})").C == 1024);
    CHECK(parse_error(R"({"n_embd":1024,"hidden_size":768})").find("have the same meaning") != std::string::npos);
}

TEST_CASE("every name of the tanh GELU and the default inner size are accepted") {
    for (const char* name : {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"})
        CHECK(parse_error(format(R"({"activation_function":"%s"})", name)) == "");
    CHECK(parse_error(R"({"n_inner":3072})") == "");
    CHECK(parse_error(R"({"layer_norm_epsilon":1e-05})") == "");
    CHECK(parse_error(R"({"layer_norm_epsilon":0.00001})") == "");
}

TEST_CASE("deep nesting is refused") {
    const std::string deep = std::string(1000000, '[') + std::string(1000000, ']');
    for (const char* key : {"other", "n_layer"})
        CHECK(parse_error(format("{\"%s\":", key) + deep + "}").find("inside each other") != std::string::npos);
}

TEST_CASE("each unsupported or invalid value is refused, and the message has its key and the reason") {
    struct Case {
        const char *text, *reason;
    };
    const Case cases[] = {
        {R"({"activation_function":"gelu"})", "\"activation_function\" is \"gelu\", but must be \"gelu_new\""},
        {R"({"activation_function":5})", "activation_function"},
        {R"({"n_inner":1024})", "\"n_inner\" is 1024, but must be null or 4 x 768 channels"},
        {R"({"n_inner":0})", "n_inner"},
        {R"({"layer_norm_epsilon":1e-6})", "layer_norm_epsilon"},
        {R"({"layer_norm_epsilon":"1e-5"})", "layer_norm_epsilon"},
        {R"({"scale_attn_weights":false})", "scale_attn_weights"},
        {R"({"scale_attn_by_inverse_layer_idx":true})", "scale_attn_by_inverse_layer_idx"},
        {R"({"reorder_and_upcast_attn":true})", "reorder_and_upcast_attn"},
        {R"({"add_cross_attention":true})", "add_cross_attention"},
        {R"({"add_cross_attention":1})", "must be true or false"},
        {R"({"model_type":"llama"})", "\"model_type\" is \"llama\""},
        {R"({"n_head":7})", "768 channels are not a multiple of 7 heads"},
        {R"({"n_layer":0})", "layers"},
        {R"({"n_layer":1000000})", "layers"},
        {R"({"n_embd":16777216,"n_head":1})", "channels"},
        {R"({"vocab_size":2147483647})", "vocabulary"},
        {R"({"vocab_size":2147483648})", "an integer from 0 to 2147483647"},
        {R"({"vocab_size":-1})", "an integer from 0"},
        {R"({"vocab_size":50257.0})", "an integer from 0"},
        {R"({"vocab_size":"50257"})", "an integer from 0"},
        {R"({"vocab_size":18446744073709551615})", "an integer from 0"},
        {R"([1])", "not an object"},
        {R"({"n_layer":12)", "not valid JSON: it ends in the middle of a value, after 13 bytes"},
        {R"({"n_layer":12])", "not valid JSON at byte 14 of 14"},
        {"", "not valid JSON: it ends in the middle of a value, after 0 bytes"},
        {"{\"a\":\"\xff\"}", "not valid JSON"},
        {R"({"a":1e999})", "not valid JSON"},
    };
    for (const Case& c : cases) {
        CAPTURE(c.text);
        const std::string message = parse_error(c.text);
        CAPTURE(message);
        CHECK(message.starts_with("config.json: "));
        CHECK(message.find(c.reason) != std::string::npos);
    }
    std::string long_value = R"({"model_type":")" + std::string(5000, 'x') + "\"}";
    CHECK(parse_error(long_value).size() < 300);
}

TEST_CASE("a missing config.json is EXIT_NO_INPUT, one above 1 MiB is EXIT_BAD_DATA") {
    const TemporaryDirectory dir;
    const auto code = [&] { return exit_code_of([&] { read_hf_config(dir.path); }); };
    CHECK(code() == EXIT_NO_INPUT);
    write_bytes(dir / "config.json", "{}");
    CHECK(code() == 0);
    write_bytes(dir / "config.json", "{}" + std::string(1 << 20, ' '));
    CHECK(code() == EXIT_BAD_DATA);
}
