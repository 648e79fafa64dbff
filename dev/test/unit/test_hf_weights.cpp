// test_hf_weights.cpp: names, shapes and layout of the tensors in Hugging Face's GPT-2 directories, every variant that
// transformers writes, and the refusal of models that do not fit. dev/test/test_hf.py compares with transformers
// itself.
#include "checkpoint/hf.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

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
    write_tensors(dir / "x", state.layout, {{WEIGHTS, prefix}}, "F32", state.view(), {});
    return read_model(dir / "x");
}

static void write_model(const std::string& path, const Tensors& tensors, const char* dtype = "F32") {
    std::vector<TensorInfo> list;
    for (const NamedTensor& t : tensors) {
        TensorInfo& info = list.emplace_back();
        info.name = t.name, info.dtype = dtype, info.shape = t.shape;
    }
    SafetensorsWriter writer(path, list, {});
    for (const NamedTensor& t : tensors) writer.write(t.values.data(), int64_t(t.values.size()));
    writer.finish();
}

// Loads a directory of these tensors. Returns what is said, as "65 message"; "" if it is accepted.
static std::string load(FlatState& got, const Tensors& tensors, const char* dtype = "F32", const char* config = "{}") {
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", config);
    write_model(dir / "model.safetensors", tensors, dtype);
    return refusal([&] { load_weights(dir.path, got.layout, got.writer()); });
}

static NamedTensor& named(Tensors& tensors, const std::string& name) {
    for (NamedTensor& t : tensors)
        if (t.name == name) return t;
    FAIL("no tensor " << name);
    return tensors[0];
}

TEST_CASE("names and shapes of the tensors are those of GPT2LMHeadModel") {
    std::map<std::string, std::vector<int64_t>> want = {{"transformer.wte.weight", {V, C}},
                                                        {"transformer.wpe.weight", {T, C}},
                                                        {"transformer.ln_f.weight", {C}},
                                                        {"transformer.ln_f.bias", {C}}};
    for (const std::string h : {"transformer.h.0.", "transformer.h.1."}) {
        for (const char* name :
             {"ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_proj.bias"})
            want[h + name] = {C};
        want[h + "attn.c_attn.weight"] = {C, 3 * C}, want[h + "attn.c_attn.bias"] = {3 * C};
        want[h + "attn.c_proj.weight"] = {C, C};
        want[h + "mlp.c_fc.weight"] = {C, 4 * C}, want[h + "mlp.c_fc.bias"] = {4 * C};
        want[h + "mlp.c_proj.weight"] = {4 * C, C};
    }
    std::map<std::string, std::vector<int64_t>> got;
    for (const NamedTensor& t : hf_tensors(FlatState(small_model, 1), "transformer.")) got[t.name] = t.shape;
    CHECK(got == want);
}

TEST_CASE("matrices are stored (in, out), embeddings row by row without padding") {
    const FlatState state(small_model, 1);
    Tensors tensors = hf_tensors(state, "");
    int wrong = 0;
    for (Param p : {qkvw, attprojw, fcw, fcprojw})
        for (int l = 0; l < 2; l++) {
            const NamedTensor& t = named(tensors, format("h.%d.%s", l, param_table[p].hf_name));
            const int out = state.layout.rows(p), in = state.layout.cols(p);
            for (int i = 0; i < in; i++)
                for (int o = 0; o < out; o++) wrong += t.values[size_t(i * out + o)] != state.at(p, l, o, i);
        }
    for (int i = 0; i < V * C; i++)
        wrong += named(tensors, "wte.weight").values[size_t(i)] != state.at(wte, 0, i / C, i % C);
    CHECK(wrong == 0);
}

TEST_CASE("matrices larger than a block of the transpose, with odd sizes, read back as written") {
    const FlatState state({.max_T = 3, .V = 129, .L = 1, .NH = 1, .C = 67}, 2);
    FlatState got(state.layout.config, 0);
    CHECK(load(got, hf_tensors(state, "transformer.")) == "");
    CHECK(same_tensors(got, state, false));
}

TEST_CASE("the prefix \"transformer.\", masks and a tied head change no weight, and padded rows are zero") {
    const FlatState state(small_model, 3);
    for (const std::string prefix : {"transformer.", ""}) {
        Tensors tensors = hf_tensors(state, prefix);
        for (const std::string h : {"h.0.", "h.1."}) {
            tensors.push_back({prefix + h + "attn.bias", {1, 1, T, T}, std::vector<float>(T * T, 1.0f)});
            tensors.push_back({prefix + h + "attn.masked_bias", {}, {-10000.0f}});
        }
        tensors.push_back({"lm_head.weight", {V, C}, named(tensors, prefix + "wte.weight").values});
        FlatState got(small_model, 0);
        CHECK(load(got, tensors) == "");
        CHECK(same_tensors(got, state, false));  // padding of state is zero
    }
}

TEST_CASE("BF16 and F16 files, and files that an index joins, are read exactly") {
    const Tensors tensors = hf_tensors(FlatState(small_model, 4), "transformer.");
    for (const std::string dtype : {"\"BF16\"", "\"F16\" "}) {
        const TemporaryDirectory dir;
        std::string map;
        Tensors parts[2], values;
        for (size_t i = 0; i < tensors.size(); i++) {
            parts[i % 2].push_back(tensors[i]);
            map += format("%s\"%s\":\"model-%d.safetensors\"", i ? "," : "", tensors[i].name.c_str(), int(i % 2));
        }
        write_bytes(dir / "config.json", "{}");
        write_bytes(dir / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
        for (int i : {0, 1}) {
            const std::string path = dir / format("model-%d.safetensors", i);
            write_model(path, parts[i], "BF16");
            std::string bytes = read_bytes(path);  // as F16 the same bits have other values, which are finite too
            for (size_t at = 0; (at = bytes.find("\"BF16\"", at)) != std::string::npos; at++)
                bytes.replace(at, 6, dtype);
            write_bytes(path, bytes);
            for (const NamedTensor& t : read_model(path)) values.push_back(t);
        }
        FlatState want(small_model, 0), got(small_model, 0);
        CHECK(load(want, values) == "");
        load_weights(dir.path, got.layout, got.writer());
        CHECK(same_tensors(got, want, false));
    }
}

TEST_CASE("a tensor that is missing, unknown, of another shape or not finite is refused, and the message names it") {
    const Tensors good = hf_tensors(FlatState(small_model, 6), "transformer.");
    const std::string c_fc = "transformer.h.1.mlp.c_fc.weight";
    const auto add = [](Tensors& t, const char* name, std::vector<float> values) {
        t.push_back({name, {int64_t(values.size())}, values});
    };
    const struct {
        std::function<void(Tensors&)> change;
        const char* says;
        const char *dtype = "F32", *config = "{}";
    } cases[] = {
        {[&](Tensors& t) {
             named(t, c_fc).shape = {4 * C, C};
         },  // the layout of nn.Linear
         "h.1.mlp.c_fc.weight is F32 [24, 6], but a model of 2 layers and 6 channels needs [6, 24]; wrong --model?"},
        {[&](Tensors& t) { named(t, c_fc).name = "transformer.h.1.mlp.c_gate.weight"; },
         "the tensor h.1.mlp.c_gate.weight (F32 [6, 24]) does not belong to"},
        {[&](Tensors& t) { std::erase_if(t, [&](auto& x) { return x.name == c_fc; }); },
         "the tensor h.1.mlp.c_fc.weight is missing"},
        {[&](Tensors& t) { add(t, "h.1.ln_1.bias", std::vector<float>(C)); },
         "h.1.ln_1.bias occurs with and without \"transformer.\""},
        {[&](Tensors& t) { add(t, "h.2.ln_1.bias", std::vector<float>(C)); },  // more layers than the model has
         "h.2.ln_1.bias (F32 [6]) does not belong to"},
        {[&](Tensors& t) {
             NamedTensor head = named(t, "transformer.wte.weight");
             head.name = "lm_head.weight", head.values.back() += 1.0f;
             t.push_back(head);
         },
         "lm_head.weight differs from wte.weight"},
        {[&](Tensors& t) { add(t, "lm_head.weight", std::vector<float>(C)); },
         "lm_head.weight differs from wte.weight"},
        {[](Tensors&) {}, "there is no lm_head.weight", "F32", R"({"tie_word_embeddings":false})"},
        {[](Tensors& t) { named(t, "transformer.h.1.attn.c_attn.weight").values[43] = NAN; },
         "model.safetensors: element 43 of transformer.h.1.attn.c_attn.weight is nan"},
        {[](Tensors& t) { named(t, "transformer.wte.weight").values[V * C - 1] = INFINITY; },
         "model.safetensors: element 41 of transformer.wte.weight is inf", "BF16"},
        {[](Tensors& t) { named(t, "transformer.h.0.ln_1.bias").values[1] = -3.4e38f; },  // too large to compute with
         "model.safetensors: element 1 of transformer.h.0.ln_1.bias is -3.4e+38"},
        {[](Tensors& t) { named(t, "transformer.ln_f.bias").values[0] = -INFINITY; },
         "model.safetensors: element 0 of transformer.ln_f.bias is -inf"},
    };
    for (const auto& c : cases) {
        Tensors tensors = good;
        c.change(tensors);
        FlatState got(small_model, 0);
        const std::string said = load(got, tensors, c.dtype, c.config);
        CAPTURE(said);
        CHECK(said.starts_with("65 "));
        CHECK(contains(said, c.says));
        if (!contains(said, "element")) CHECK(std::isnan(got.weights[0]));  // before any tensor is loaded
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
