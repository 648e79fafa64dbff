// test_hf_config.cpp: tests that config.json is read with the defaults and aliases of transformers, and that models
// which the program cannot compute are refused. dev/test/test_hf.py has transformers read what the program writes.
#include "checkpoint/hf.h"

#include <doctest/doctest.h>

#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"

static HFConfig read(const std::string& text) { return parse_hf_config(text, "config.json"); }

static std::string error_of(const std::string& text) {
    return refusal([&] { read(text); });
}

TEST_CASE("a config.json reads back as it was written; an end-of-text token that is unknown is null") {
    for (int end_of_text : {0, 6, 50256}) {
        const HFConfig config{{5, 7, 2, 3, 12}, end_of_text, true}, got = read(hf_config_json(config, "float32"));
        CHECK(got.model == config.model);
        CHECK(got.tied);
        const std::string id = end_of_text < 7 ? format("%d", end_of_text) : "null";
        for (const char* key : {"bos", "eos"})
            CHECK(contains(hf_config_json(config, "float32"), format("\"%s_token_id\": %s", key, id.c_str())));
        CHECK(contains(hf_generation_config_json(config), "\"eos_token_id\": " + id));
        CHECK(got.end_of_text == (end_of_text < 7 ? end_of_text : 7));
        for (const char* line : {"\"architectures\": [\n    \"GPT2LMHeadModel\"\n  ]", "\"model_type\": \"gpt2\"",
                                 "\"torch_dtype\": \"float32\"", "\"resid_pdrop\": 0.0"})
            CHECK(contains(hf_config_json(config, "float32"), line));
    }
}

TEST_CASE("absent keys have transformers' defaults, null is absent, unknown keys are ignored, aliases are read") {
    const struct {
        const char* text;
        GPT2Config want;
    } cases[] = {
        {"{}", {1024, 50257, 12, 12, 768}},
        {R"({"n_embd":null,"n_inner":null,"n_head":null})", {1024, 50257, 12, 12, 768}},
        {R"({"_name_or_path":"x","task_specific_params":{"a":[1]}})", {1024, 50257, 12, 12, 768}},
        {R"({"hidden_size":1600,"max_position_embeddings":512,"num_attention_heads":25,"num_hidden_layers":48})",
         {512, 50257, 48, 25, 1600}},
        {R"({"n_embd":1024,"hidden_size":1024,"n_head":16})", {1024, 50257, 12, 16, 1024}},
    };
    for (const auto& c : cases) {
        CAPTURE(c.text);
        CHECK(read(c.text).model == c.want);
    }
    CHECK(read("{}").end_of_text == 50256);
    // Without an id, as this program writes it when it does not know the id, a larger vocabulary gets none either.
    CHECK(read(R"({"vocab_size": 60000, "eos_token_id": null})").end_of_text == 60000);
    CHECK_FALSE(read(R"({"tie_word_embeddings":false})").tied);
    for (const char* text :
         {R"({"activation_function":"gelu_new"})", R"({"activation_function":"gelu_pytorch_tanh"})",
          R"({"activation_function":"gelu_fast"})", R"({"n_inner":3072})", R"({"layer_norm_epsilon":0.00001})"})
        CHECK(error_of(text) == "");
}

TEST_CASE("each unsupported or invalid value is refused, and the message has its key and the reason") {
    const std::string deep = std::string(1000000, '[') + std::string(1000000, ']');
    const struct {
        std::string text;
        const char* reason;
    } cases[] = {
        {R"({"n_embd":1024,"hidden_size":768})", "have the same meaning"},
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
        {R"({"vocab_size":2147483647})", "vocabulary"},
        {R"({"vocab_size":2147483648})", "an integer from 0 to 2147483647"},
        {R"({"vocab_size":-1})", "an integer from 0"},
        {R"({"vocab_size":50257.0})", "an integer from 0"},
        {R"({"vocab_size":"50257"})", "an integer from 0"},
        {R"({"vocab_size":18446744073709551615})", "an integer from 0"},
        {"[1]", "not an object"},
        {R"({"n_layer":12)", "not valid JSON: it ends in the middle of a value, after 13 bytes"},
        {R"({"n_layer":12])", "not valid JSON at byte 14 of 14"},
        {"", "not valid JSON: it ends in the middle of a value, after 0 bytes"},
        {"{\"a\":\"\xff\"}", "not valid JSON"},
        {R"({"a":1e999})", "not valid JSON"},
        {"{\"other\":" + deep + "}", "inside each other"},
        {"{\"n_layer\":" + deep + "}", "inside each other"},
        {R"({"model_type":")" + std::string(5000, 'x') + "\"}", "\"model_type\" is \"xxx"},
    };
    for (const auto& c : cases) {
        const std::string error = error_of(c.text);
        CAPTURE(c.text.substr(0, 100));
        CAPTURE(error);
        CHECK(error.starts_with("65 config.json: "));
        CHECK(contains(error, c.reason));
        CHECK(error.size() < 300);
    }
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
