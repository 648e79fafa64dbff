// test_hf.cpp: names, shapes and layout of the tensors in Hugging Face's GPT-2 directories, every variant that
// transformers writes, config.json with its defaults and aliases, and the refusal of models that do not fit or that the
// program cannot compute. dev/test/test_hf.py compares with transformers itself.
#include "checkpoint/hf.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "base/json.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/small_state.h"
#include "support/temporary.h"

constexpr int V = small_model.V, T = small_model.max_T, C = small_model.C;

// A tensor for a file of the test.
struct NamedTensor {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
};
using Tensors = std::vector<NamedTensor>;

static Tensors read_model(const std::string& path) {
    const Safetensors file = open_safetensors(path);
    Tensors out;
    for (const auto& [name, tensor] : file.tensors) {
        out.push_back({name, tensor.shape, std::vector<float>(size_t(tensor.elements()))});
        file.read(out.back().values.data(), tensor);
    }
    return out;
}

static Tensors hf_tensors(const FlatState& state, const std::string& prefix) {
    const TemporaryDirectory dir;
    write_tensors(dir / "x", state.layout, {{WEIGHTS, prefix, "F32"}}, state.view(), {});
    return read_model(dir / "x");
}

static void write_model(const std::string& path, const Tensors& tensors, const char* dtype) {
    std::vector<TensorInfo> list;
    for (const NamedTensor& t : tensors) list.push_back({t.name, dtype, t.shape});
    OutputFile file(path);
    const std::string header = safetensors_header(list, {});
    file.write(header.data(), int64_t(header.size()));
    for (const NamedTensor& t : tensors) write_elements(file, dtype, t.values.data(), int64_t(t.values.size()));
    file.finish();
}

// Loads a directory of these tensors. Returns what is said, as "65 message"; "" if it is accepted.
static std::string load(FlatState& got, const Tensors& tensors, const char* config = "{}") {
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", config);
    write_model(dir / "model.safetensors", tensors, "F32");
    return refusal([&] { load_weights(dir.path, got.layout, got.writer()); });
}

static NamedTensor& named(Tensors& tensors, const std::string& name) {
    for (NamedTensor& t : tensors)
        if (t.name == name) return t;
    FAIL("no tensor " << name);
    return tensors[0];
}

TEST_CASE("matrices are stored (in, out), embeddings row by row without padding; larger ones read back as written") {
    const FlatState state(small_model, 1), large({.max_T = 3, .V = 129, .L = 1, .NH = 1, .C = 67}, 2);
    Tensors tensors = hf_tensors(state, "");
    int wrong = 0;
    for (Param p : {qkvw, attprojw, fcw, fcprojw})
        for (int l = 0; l < 2; l++) {
            const std::vector<float>& values = named(tensors, format("h.%d.%s", l, param_table[p].hf_name)).values;
            const int out = state.layout.rows(p), in = state.layout.cols(p);
            for (int i = 0; i < in * out; i++) wrong += values[size_t(i)] != state.at(p, l, i % out, i / out);
        }
    for (int i = 0; i < V * C; i++)
        wrong += named(tensors, "wte.weight").values[size_t(i)] != state.at(wte, 0, i / C, i % C);
    CHECK(wrong == 0);
    FlatState got(large.layout.config, 0);  // larger than a block of the transpose, with odd sizes
    CHECK(load(got, hf_tensors(large, "transformer.")) == "");
    CHECK(same_tensors(got, large, false));
}

TEST_CASE("prefixes of wrappers, masks and a tied head change no weight, and padded rows are zero") {
    const FlatState state(small_model, 3);
    for (const std::string prefix :
         {"transformer.", "", "module.", "_orig_mod.transformer.", "_orig_mod.module.transformer.",
          "module._orig_mod.transformer.", "transformer._orig_mod.", "model.transformer."}) {
        Tensors tensors = hf_tensors(state, prefix);
        for (const std::string h : {"h.0.", "h.1."}) {
            tensors.push_back({prefix + h + "attn.bias", {1, 1, T, T}, std::vector<float>(T * T, 1.0f)});
            tensors.push_back({prefix + h + "attn.masked_bias", {}, {-10000.0f}});
        }
        const std::string outer = prefix.substr(0, prefix.find("transformer."));
        tensors.push_back({outer + "lm_head.weight", {V, C}, named(tensors, prefix + "wte.weight").values});
        named(tensors, prefix + "h.1.ln_1.bias").name = prefix + "h.1._orig_mod.ln_1.module.bias";  // of a layer alone
        FlatState got(small_model, 0);
        CHECK(load(got, tensors) == "");
        CHECK(same_tensors(got, state, false));  // padding of state is zero
    }
}

TEST_CASE("a file that has the head in place of the embeddings, as save_model() of safetensors writes it, is read") {
    const FlatState state(small_model, 3);
    Tensors tensors = hf_tensors(state, "transformer.");
    named(tensors, "transformer.wte.weight").name = "lm_head.weight";
    FlatState got(small_model, 0);
    CHECK(load(got, tensors) == "");
    CHECK(same_tensors(got, state, false));
}

TEST_CASE(
    "new rows of the embedding have the mean and 1e-9 of the covariance of the old ones, and depend on the seed") {
    constexpr int more = 2000;
    GPT2Config large = small_model;
    large.V += more;
    const FlatState state(small_model, 5);
    const ParamLayout layout(large);
    const auto rows = [&](uint64_t seed) {
        std::vector<float> wte_rows;
        const TensorWriter keep = [&](const float* host, Slot, Param p, int) {
            if (p == wte) wte_rows.assign(host, host + layout.size(p));
        };
        const TensorWriter write = enlarge_vocabulary(V, layout, seed, keep);
        const TensorView view = state.view();
        for_each_tensor(state.layout, [&](Param p, int l) { write(view(WEIGHTS, p, l), WEIGHTS, p, l); });
        return wte_rows;
    };
    const std::vector<float> got = rows(1);
    CHECK(got == rows(1));
    CHECK(got != rows(2));
    CHECK(std::equal(got.begin(), got.begin() + V * C, state.view()(WEIGHTS, wte, 0)));
    CHECK(std::all_of(got.begin() + large.V * C, got.end(), [](float x) { return x == 0.0f; }));
    double mean[C] = {}, covariance[C][C] = {}, drawn[C][C] = {};
    for (int i = 0; i < V * C; i++) mean[i % C] += got[size_t(i)] / double(V);
    for (int i = 0; i < large.V; i++)
        for (int a = 0; a < C; a++)
            for (int b = 0; b < C; b++)
                (i < V ? covariance : drawn)[a][b] +=
                    (got[size_t(i * C + a)] - mean[a]) * (got[size_t(i * C + b)] - mean[b]) / (i < V ? V : more);
    for (int a = 0; a < C; a++)
        for (int b = 0; b < C; b++) {  // the error of a sample's covariance, 5 times; floats round by up to 6e-8
            const double spread = std::sqrt(covariance[a][a] * covariance[b][b]);
            CHECK(std::fabs(drawn[a][b] - 1e-9 * covariance[a][b]) < 5 * 1e-9 * spread * std::sqrt(2.0 / more) + 1e-14);
        }
}

TEST_CASE("BF16 files that an index joins are read exactly") {
    FlatState state(small_model, 4), got(small_model, 0);
    for (float& x : state.weights) x = float(bf16(x));
    const TemporaryDirectory dir;
    std::string map;
    Tensors parts[2];
    int i = 0;
    for (const NamedTensor& t : hf_tensors(state, "transformer.")) {
        parts[i].push_back(t);
        map += format("%s\"%s\":\"model-%d.safetensors\"", map.empty() ? "" : ",", t.name.c_str(), i);
        i = 1 - i;
    }
    for (int part : {0, 1}) write_model(dir / format("model-%d.safetensors", part), parts[part], "BF16");
    write_bytes(dir / "config.json", "{}");
    write_bytes(dir / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    load_weights(dir.path, got.layout, got.writer());
    CHECK(same_tensors(got, state, false));
}

TEST_CASE("a tensor that is missing, unknown, of another shape or not finite is refused, and the message names it") {
    const Tensors good = hf_tensors(FlatState(small_model, 6), "transformer.");
    const std::string c_fc = "transformer.h.1.mlp.c_fc.weight";
    const auto add = [](Tensors& t, const char* name, std::vector<int64_t> shape) {
        t.push_back({name, shape, std::vector<float>(size_t(shape.size() == 1 ? C : shape[0] * C))});
    };
    const struct {
        const char* says;
        std::function<void(Tensors&)> change;
        const char* config = "{}";
    } cases[] = {
        {"h.1.mlp.c_fc.weight is F32 [24, 6], but config.json (n_layer 2, n_embd 6, n_positions 5, vocab_size 7; "
         "GPT-2's value if absent) needs [6, 24]; are both files of one model?",
         [&](Tensors& t) { std::swap(named(t, c_fc).shape[0], named(t, c_fc).shape[1]); }},  // as nn.Linear has it
        {"the tensor h.1.mlp.c_fc.weight, which belongs to config.json (n_layer 2, ",
         [&](Tensors& t) { std::erase_if(t, [&](auto& x) { return x.name == c_fc; }); }},
        {"h.1.ln_1.bias and transformer.h.1.ln_1.bias are the same tensor",
         [&](Tensors& t) { add(t, "h.1.ln_1.bias", {C}); }},
        {"h.2.ln_1.bias (F32 [6]) does not belong to",  // more layers than the model has
         [&](Tensors& t) { add(t, "h.2.ln_1.bias", {C}); }},
        {"; it belongs to quantized weights; give the model as it was before that",
         [&](Tensors& t) { add(t, "h.1.mlp.c_fc.scales", {C}); }},
        {"; it belongs to quantized weights",  // of GPTQ, whose .g_idx comes before the other names
         [&](Tensors& t) { add(t, "h.1.mlp.c_fc.g_idx", {C}); }},
        {"lm_head.weight differs from wte.weight",
         [&](Tensors& t) {
             add(t, "lm_head.weight", {V, C});
         }},
        {"there is no lm_head.weight", [](Tensors&) {}, R"({"tie_word_embeddings":false})"},
        {"the tensor wte.weight, which belongs to config.json",  // the head alone is no embedding of such a model
         [](Tensors& t) { named(t, "transformer.wte.weight").name = "lm_head.weight"; },
         R"({"tie_word_embeddings":false})"},
        {"; it is of another head, which is not trained here; to go on without it, load the model by AutoModelForCaus",
         [&](Tensors& t) {
             add(t, "score.weight", {2, C});
         }},
        {"; it is of a LoRA adapter",
         [&](Tensors& t) {
             add(t, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", {2, C});
         }},
        {"; it is of a LoRA adapter",  // not merged: the adapter's own names come later
         [&](Tensors& t) {
             add(t, "base_model.model.transformer.h.0.attn.c_attn.base_layer.bias", {2, C});
         }},
        {"model.safetensors: element 43 of transformer.h.1.attn.c_attn.weight is nan",
         [](Tensors& t) { named(t, "transformer.h.1.attn.c_attn.weight").values[43] = NAN; }},
        {"model.safetensors: element 1 of transformer.h.0.ln_1.bias is -3.4e+38",  // too large to compute with
         [](Tensors& t) { named(t, "transformer.h.0.ln_1.bias").values[1] = -3.4e38f; }},
    };
    for (const auto& c : cases) {
        Tensors tensors = good;
        c.change(tensors);
        FlatState got(small_model, 0);
        const std::string said = load(got, tensors, c.config);
        CAPTURE(said);
        CHECK(said.starts_with("65 "));
        CHECK(contains(said, c.says));
        if (!contains(said, "element")) CHECK(std::isnan(got.weights[0]));  // before any tensor is loaded
    }
}

TEST_CASE(
    "a config.json of another shape than the tensors is refused by their header alone, and its fields are named") {
    const TemporaryDirectory dir;
    write_model(dir / "model.safetensors", hf_tensors(FlatState(small_model, 6), "transformer."), "F32");
    const std::pair<const char*, const char*> cases[] = {
        {R"("n_layer": 2, "n_positions": 5)", ""},
        {R"("n_layer": 2, "n_positions": 1048576)",
         "wpe.weight is F32 [5, 6], but config.json (n_layer 2, n_embd 6, "
         "n_positions 1048576, "},
        {R"("n_layer": 2)", "n_positions 1024, vocab_size 7; GPT-2's value if absent) needs [1024, 6]"},
        {R"("n_layer": 1024, "n_positions": 5)",
         "the tensor h.2.attn.c_attn.weight, which belongs to config.json (n_layer 1024"},
        {R"("n_layer": 1, "n_positions": 5)", "does not belong to config.json (n_layer 1, "},
        {R"("n_layer": 2, "n_positions": 5, "tie_word_embeddings": false)", "there is no lm_head.weight"},
    };
    for (const auto& [fields, says] : cases) {
        write_bytes(dir / "config.json", format(R"({"n_head": 3, "n_embd": 6, "vocab_size": 7, %s})", fields));
        const std::string said = refusal([&] { check_weights(dir.path, read_hf_config(dir.path).model); });
        CAPTURE(said);
        CHECK(contains(said, says));
        CHECK(said.starts_with("65 ") == (strlen(says) > 0));
    }
}

TEST_CASE("a directory without safetensors is refused, and the message says how to convert it") {
    const TemporaryDirectory dir;
    FlatState got(small_model, 0);
    const auto said = [&] { return refusal([&] { load_weights(dir.path, got.layout, got.writer()); }); };
    CHECK(said().starts_with("66 "));
    CHECK(contains(said(), "has no model.safetensors"));
    write_bytes(dir / "pytorch_model.bin", "\x80\x02");
    CHECK(said().starts_with("65 "));
    CHECK(contains(said(), "convert to safetensors"));
}

// ---- config.json

static HFConfig read(const std::string& text) { return parse_hf_config(text, "config.json"); }

TEST_CASE("the configuration of a new model reads back as it was written, with <|endoftext|> if it has that token") {
    for (const int V : {7, 50257}) {
        const HFConfig config = new_hf_config({5, V, 2, 3, 12});
        const std::string text = hf_config_json(config, "float32");
        CHECK(read(text).model == config.model);
        CHECK(read(text).tied);
        CHECK(read(text).eos == std::vector<int>(V == 7 ? 0 : 1, 50256));
        CHECK(read(text).bos == (V == 7 ? -1 : 50256));
        CHECK(contains(text, "\"resid_pdrop\": 0.0"));
    }
}

TEST_CASE("keys that are not read stay as they are, and those that would be untrue do not") {
    const HFConfig source = read(R"({"vocab_size": 7, "n_positions": 5, "n_layer": 2, "n_embd": 12, "n_head": 3,
        "n_ctx": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "task_specific_params": {"a": {"b": [1, null]}},
        "bos_token_id": null, "pad_token_id": -1, "eos_token_id": [6, 5], "n_inner": null, "dtype": "float16",
        "torch_dtype": "float16", "transformers_version": "5.24.0", "architectures": ["GPT2Model"],
        "tie_word_embeddings": false, "a": 12345678901234567890123, "b": [1e400, -Infinity, "],}\""], "c": NaN})");
    CHECK(source.eos == std::vector<int>{6, 5});
    CHECK(source.pad == -1);
    CHECK_FALSE(source.tied);
    const std::string text = hf_config_json(source, "bfloat16");
    for (const char* kept :
         {R"("resid_pdrop": 0.1)", R"("summary_type": "cls_index")", R"("bos_token_id": null)", R"("pad_token_id": -1)",
          R"("n_ctx": 5)", R"("torch_dtype": "bfloat16")", R"("tie_word_embeddings": true)", R"("GPT2LMHeadModel")",
          R"("a": 12345678901234567890123,)", "\"b\": [\n    1e400,\n    -Infinity,\n    \"],}\\\"\"\n  ],",
          R"("c": NaN,)"})
        CHECK_MESSAGE(contains(text, kept), kept);
    for (const char* untrue : {"\"dtype\"", "transformers_version", "initializer_range"})
        CHECK_MESSAGE(!contains(text, untrue), untrue);
    CHECK(hf_config_json(read(text), "bfloat16") == text);
    const std::string odd = R"({ "a" : [ {"b":1} ,2], "\"é" :{}, "a":"x,\"}" , "c":[]} )";
    CHECK(with_members(odd, {{"a", "x,\"}"}}, {"none"}) == odd);
    CHECK(with_members(odd, {{"d", nullptr}}, {"a"}) == "{\n  \"\\\"é\": {},\n  \"c\": [],\n  \"d\": null\n}\n");
    HFConfig other = read(text);
    set_tokens(other, 4, -1, 3);
    CHECK(read(other.text).eos == std::vector<int>{4});
    CHECK(read(other.text).bos == 4);
    CHECK(read(other.text).pad == 3);
}

TEST_CASE("the tokens that end a text are those of generation_config.json, else of config.json") {
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", R"({"eos_token_id": null})");
    CHECK(read_hf_config(dir.path).eos.empty());
    write_bytes(dir / "config.json", R"({"eos_token_id": [3, 5]})");
    write_bytes(dir / "generation_config.json", "{}");
    CHECK(read_hf_config(dir.path).eos == std::vector<int>{3, 5});
    write_bytes(dir / "generation_config.json", R"({"eos_token_id": [3, 4], "temperature": 0.7})");
    CHECK(read_hf_config(dir.path).eos == std::vector<int>{3, 4});
    CHECK(read_hf_config(dir.path).generation == read_bytes(dir / "generation_config.json"));
    const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    write_bytes(dir / "config.json", pointer);
    write_bytes(dir / "model.safetensors", pointer);
    CHECK(contains(refusal([&] { read_hf_config(dir.path); }), "config.json: is a git-lfs pointer"));
    CHECK(contains(refusal([&] { open_safetensors(dir / "model.safetensors"); }), "run git lfs pull"));
}

TEST_CASE("absent keys have transformers' defaults, null is absent, unknown keys are ignored, aliases are read") {
    const std::pair<const char*, GPT2Config> cases[] = {
        {"{}", {1024, 50257, 12, 12, 768}},
        {R"({"n_embd":null,"n_inner":null,"_name_or_path":"x","activation_function":"gelu_pytorch_tanh"})",
         {1024, 50257, 12, 12, 768}},
        {R"({"hidden_size":1600,"max_position_embeddings":512,"num_attention_heads":25,"num_hidden_layers":48})",
         {512, 50257, 48, 25, 1600}},
        {R"({"n_embd":1024,"hidden_size":1024,"n_head":16,"n_inner":4096})", {1024, 50257, 12, 16, 1024}},
    };
    for (const auto& [config, want] : cases) {
        const std::string text = config;
        CAPTURE(text);
        CHECK(read(text).model == want);
    }
    CHECK(read("{}").eos == std::vector<int>{50256});
    CHECK_FALSE(read(R"({"tie_word_embeddings":false})").tied);
}

TEST_CASE("each unsupported or invalid value is refused, and the message has its key and the reason") {
    const std::pair<std::string, const char*> cases[] = {
        {R"({"n_embd":1024,"hidden_size":768})", "have the same meaning"},
        {R"({"activation_function":"gelu"})", "\"activation_function\" is \"gelu\", but must be \"gelu_new\""},
        {R"({"n_inner":1024})", "\"n_inner\" is 1024, but must be null or 4 x 768 channels"},
        {R"({"layer_norm_epsilon":1e-6})", "layer_norm_epsilon"},
        {R"({"scale_attn_weights":false})", "scale_attn_weights"},
        {R"({"scale_attn_by_inverse_layer_idx":true})", "scale_attn_by_inverse_layer_idx"},
        {R"({"reorder_and_upcast_attn":true})", "reorder_and_upcast_attn"},
        {R"({"add_cross_attention":true})", "add_cross_attention"},
        {R"({"model_type":"llama"})", "\"model_type\" is \"llama\""},
        {R"({"n_head":7})", "\"n_head\" 7 does not divide \"n_embd\" 768; set both as the model was trained"},
        {R"({"n_head":0})", "a model cannot have 0 heads"},
        {R"({"n_layer":0})", "layers"},
        {R"({"vocab_size":2147483648})", "an integer from 0 to 2147483647"},
        {R"({"vocab_size":50257.0})", "an integer from 0"},
        {R"({"eos_token_id":NaN})", "must be an integer or a list"},
        {R"({"eos_token_id":[1,"</s>"]})", "\"eos_token_id\" is [1,\"</s>\"], but must be an integer or a list"},
        {R"({"n_layer":12)", "not valid JSON: it ends in the middle of a value, after 13 bytes"},
        {"{\"n_layer\":" + std::string(1000000, '[') + "}", "inside each other"},
        {R"({"model_type":")" + std::string(5000, 'y') + "\"}", "\"model_type\" is \"yyy"},
    };
    for (const auto& [text, reason] : cases) {
        const std::string error = refusal([&text = text] { read(text); });
        CAPTURE(error);
        CHECK(error.starts_with("65 config.json: "));
        CHECK(contains(error, reason));
        CHECK(error.size() < 300);
    }
    const TemporaryDirectory dir;
    const auto code = [&] { return exit_code_of([&] { read_hf_config(dir.path); }); };
    CHECK(code() == EXIT_NO_INPUT);
    write_bytes(dir / "config.json", "{}" + std::string(1 << 20, ' '));
    CHECK(code() == EXIT_BAD_DATA);
}
