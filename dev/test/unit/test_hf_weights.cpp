// test_hf_weights.cpp: names, shapes and layout of the tensors in Hugging Face's GPT-2 directories, every variant that
// transformers writes, and the refusal of models that do not fit.
#include "checkpoint/hf.h"

#include <doctest/doctest.h>

#include <sys/wait.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>

#include "checkpoint/checkpoint.h"
#include "support/refusal.h"
#include "support/skip.h"
#include "support/small_state.h"
#include "support/temporary.h"

constexpr int V = small_model.V, T = small_model.max_T, C = small_model.C;

// A tensor for a file of the test.
struct NamedTensor {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
};

static std::vector<NamedTensor> hf_tensors(const FlatState& state, const std::string& prefix) {
    const TemporaryDirectory dir;
    write_tensors(dir / "x", state.layout, {{WEIGHTS, prefix}}, "F32", state.view(), {});
    const Safetensors file = open_safetensors(dir / "x");
    std::vector<NamedTensor> out;
    for (const auto& [name, tensor] : file.tensors) {
        out.push_back({name, tensor.shape, std::vector<float>(size_t(tensor.elements()))});
        file.read(out.back().values.data(), tensor);
    }
    return out;
}

static void write_model(const std::string& path, const std::vector<NamedTensor>& tensors, const char* dtype = "F32") {
    std::vector<TensorInfo> list;
    for (const NamedTensor& t : tensors) {
        TensorInfo& info = list.emplace_back();
        info.name = t.name, info.dtype = dtype, info.shape = t.shape;
    }
    SafetensorsWriter writer(path, list, {});
    for (const NamedTensor& t : tensors) writer.write(t.values.data(), int64_t(t.values.size()));
    writer.finish();
}

// Loads a directory of these tensors and the given config.json. Returns the message of the Error, "" if there is none.
static std::string load(FlatState& got, const std::vector<NamedTensor>& tensors, const char* dtype = "F32",
                        const char* config = nullptr) {
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", config ? config : hf_config_json({small_model}, "float32"));
    write_model(dir / "model.safetensors", tensors, dtype);
    try {
        load_weights(dir.path, got.layout, got.writer());
    } catch (const Error& error) {
        return error.exit_code == EXIT_BAD_DATA ? error.what() : format("exit code %d", error.exit_code);
    }
    return "";
}
static std::string load(const std::vector<NamedTensor>& tensors, const char* config = nullptr) {
    FlatState got(small_model, 0);
    return load(got, tensors, "F32", config);
}

static NamedTensor& named(std::vector<NamedTensor>& tensors, const std::string& name) {
    for (NamedTensor& t : tensors)
        if (t.name == name) return t;
    FAIL("no tensor " << name);
    return tensors[0];
}

TEST_CASE("names and shapes of the tensors are those of GPT2LMHeadModel") {
    const FlatState state(small_model, 1);
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
    for (const NamedTensor& t : hf_tensors(state, "transformer.")) got[t.name] = t.shape;
    CHECK(got == want);
    CHECK(list_tensors(ParamLayout({1024, 50257, 12, 12, 768}), {{WEIGHTS, ""}}, "F32").size() == 148);
}

TEST_CASE("matrices are stored (in, out), embeddings row by row without padding") {
    const FlatState state(small_model, 1);
    std::vector<NamedTensor> tensors = hf_tensors(state, "");
    const struct {
        Param p;
        const char* name;
    } matrices[] = {{qkvw, "attn.c_attn.weight"},
                    {attprojw, "attn.c_proj.weight"},
                    {fcw, "mlp.c_fc.weight"},
                    {fcprojw, "mlp.c_proj.weight"}};
    int wrong = 0;
    for (const auto& [p, name] : matrices)
        for (int l = 0; l < 2; l++) {
            const NamedTensor t = named(tensors, format("h.%d.%s", l, name));
            const int out = state.layout.rows(p), in = state.layout.cols(p);
            for (int i = 0; i < in; i++)
                for (int o = 0; o < out; o++) wrong += t.values[size_t(i * out + o)] != state.at(p, l, o, i);
        }
    for (int i = 0; i < V * C; i++)
        wrong += named(tensors, "wte.weight").values[size_t(i)] != state.at(wte, 0, i / C, i % C);
    CHECK(wrong == 0);
}

TEST_CASE("matrices larger than a block of the transpose, with odd sizes, read back as written") {
    const GPT2Config config = {.max_T = 3, .V = 129, .L = 1, .NH = 1, .C = 67};
    const FlatState state(config, 2);
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", hf_config_json({config}, "float32"));
    write_tensors(dir / "model.safetensors", state.layout, {{WEIGHTS, "transformer."}}, "F32", state.view(), {});
    FlatState got(config, 0);
    load_weights(dir.path, got.layout, got.writer());
    CHECK(same_tensors(got, state, false));
}

TEST_CASE("the prefix \"transformer.\", masks and a tied head change no weight, and padded rows are zero") {
    const FlatState state(small_model, 3);
    for (const std::string prefix : {"transformer.", ""}) {
        std::vector<NamedTensor> tensors = hf_tensors(state, prefix);
        for (const std::string h : {"h.0.", "h.1."}) {
            tensors.push_back({prefix + h + "attn.bias", {1, 1, T, T}, std::vector<float>(T * T, 1.0f)});
            tensors.push_back({prefix + h + "attn.masked_bias", {}, {-10000.0f}});
        }
        NamedTensor head = named(tensors, prefix + "wte.weight");
        head.name = "lm_head.weight";
        tensors.push_back(head);
        FlatState got(small_model, 0);
        CHECK(load(got, tensors) == "");
        CHECK(same_tensors(got, state, false));  // padding of state is zero
    }
}

TEST_CASE("BF16 files are read exactly") {
    FlatState state(small_model, 4);
    for (float& x : state.weights) x = float(bf16(x));
    FlatState got(small_model, 0);
    CHECK(load(got, hf_tensors(state, "transformer."), "BF16") == "");
    CHECK(same_tensors(got, state, false));
}

TEST_CASE("F16 files are read exactly") {
    FlatState state(small_model, 4);
    for (float& x : state.weights) x = std::nearbyint(x * 64) / 64;  // exact in F16
    std::vector<NamedTensor> tensors = hf_tensors(state, "");
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", hf_config_json({small_model}, "float16"));
    write_model(dir / "model.safetensors", tensors, "BF16");
    // The same file with F16 values, and F16 as the dtype in its header.
    std::string bytes = read_bytes(dir / "model.safetensors");
    const Safetensors file = open_safetensors(dir / "model.safetensors");
    for (const NamedTensor& t : tensors)
        for (size_t i = 0; i < t.values.size(); i++) {
            const float x = t.values[i];
            const uint32_t u = std::bit_cast<uint32_t>(x);
            const uint16_t half = x == 0 ? 0 : uint16_t((u >> 16 & 0x8000) | (((u >> 13) & 0x3ffff) - (112 << 10)));
            std::memcpy(&bytes[size_t(file.data_begin[0] + file.find(t.name)->begin) + 2 * i], &half, 2);
        }
    for (size_t at; (at = bytes.find("\"BF16\"")) != std::string::npos;) bytes.replace(at, 6, "\"F16\" ");
    write_bytes(dir / "model.safetensors", bytes);
    FlatState got(small_model, 0);
    load_weights(dir.path, got.layout, got.writer());
    CHECK(same_tensors(got, state, false));
}

TEST_CASE("a model in several files is read by its index") {
    const FlatState state(small_model, 5);
    const std::vector<NamedTensor> tensors = hf_tensors(state, "transformer.");
    const TemporaryDirectory dir;
    write_bytes(dir / "config.json", hf_config_json({small_model}, "float32"));
    std::string map;
    std::vector<NamedTensor> parts[2];
    for (size_t i = 0; i < tensors.size(); i++) {
        parts[i % 2].push_back(tensors[i]);
        map += format("%s\"%s\":\"model-%d.safetensors\"", i ? "," : "", tensors[i].name.c_str(), int(i % 2));
    }
    write_model(dir / "model-0.safetensors", parts[0]);
    write_model(dir / "model-1.safetensors", parts[1]);
    write_bytes(dir / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    FlatState got(small_model, 0);
    load_weights(dir.path, got.layout, got.writer());
    CHECK(same_tensors(got, state, false));
}

TEST_CASE("a tensor that is missing, unknown or of another shape is refused, and the message names it") {
    const FlatState state(small_model, 6);
    const std::vector<NamedTensor> good = hf_tensors(state, "transformer.");
    const std::string c_fc = "transformer.h.1.mlp.c_fc.weight";
    const auto changed = [&](const std::function<void(std::vector<NamedTensor>&)>& change) {
        std::vector<NamedTensor> tensors = good;
        change(tensors);
        return load(tensors);
    };
    CHECK(load(good) == "");
    CHECK(changed([&](auto& t) {
              named(t, c_fc).shape = {4 * C, C};  // the layout of nn.Linear
          })
              .find("h.1.mlp.c_fc.weight is F32 [24, 6], but a model of 2 layers and 6 channels needs [6, 24]; wrong "
                    "--model?") != std::string::npos);
    CHECK(changed([&](auto& t) {
              named(t, c_fc).name = "transformer.h.1.mlp.c_gate.weight";
          }).find("the tensor h.1.mlp.c_gate.weight (F32 [6, 24]) does not belong to") != std::string::npos);
    CHECK(changed([&](auto& t) {
              std::erase_if(t, [&](auto& x) { return x.name == c_fc; });
          }).find("the tensor h.1.mlp.c_fc.weight is missing") != std::string::npos);
    CHECK(changed([&](auto& t) {
              t.push_back({"h.1.ln_1.bias", {C}, std::vector<float>(C)});
          }).find("h.1.ln_1.bias occurs with and without \"transformer.\"") != std::string::npos);
    CHECK(changed([&](auto& t) {
              t.push_back({"h.2.ln_1.bias", {C}, std::vector<float>(C)});
          }).find("h.2.ln_1.bias (F32 [6]) does not belong to") !=
          std::string::npos);  // more layers than the model has
    CHECK(changed([&](auto& t) {
              NamedTensor head = named(t, "transformer.wte.weight");
              head.name = "lm_head.weight", head.values.back() += 1.0f;
              t.push_back(head);
          }).find("lm_head.weight differs from wte.weight") != std::string::npos);
    CHECK(changed([&](auto& t) {
              t.push_back({"lm_head.weight", {C}, std::vector<float>(C)});
          }).find("lm_head.weight differs from wte.weight") != std::string::npos);
    CHECK(load(good, R"({"tie_word_embeddings":false})").find("there is no lm_head.weight") != std::string::npos);
}

TEST_CASE("a NaN or an infinity is refused, and the message names its tensor") {
    const std::vector<NamedTensor> good = hf_tensors(FlatState(small_model, 6), "transformer.");
    const struct {
        const char* name;
        size_t at;
        float value;
        std::string says;
    } cases[] = {{"transformer.h.1.attn.c_attn.weight", 2 * 3 * C + 7, NAN,
                  format("element %d of transformer.h.1.attn.c_attn.weight is nan", 2 * 3 * C + 7)},
                 {"transformer.wte.weight", V * C - 1, INFINITY,
                  format("element %d of transformer.wte.weight is inf", V * C - 1)},
                 {"transformer.h.0.ln_1.bias", 1, -3.4e38f, "element 1 of transformer.h.0.ln_1.bias is -3.4e+38"},
                 {"transformer.ln_f.bias", 0, -INFINITY, "element 0 of transformer.ln_f.bias is -inf"}};
    for (const auto& c : cases)
        for (const char* dtype : {"F32", "BF16"}) {
            CAPTURE(c.name);
            if (std::isfinite(c.value) && dtype != std::string("F32")) continue;
            std::vector<NamedTensor> tensors = good;
            named(tensors, c.name).values[c.at] = c.value;
            FlatState got(small_model, 0);
            CHECK(load(got, tensors, dtype).find("model.safetensors: " + c.says) != std::string::npos);
        }
}

TEST_CASE("the message about a wrong shape names the size of the model") {
    const FlatState state({64, 7, 1, 2, 64}, 1);
    const TemporaryDirectory dir;
    write_tensors(dir / "model.safetensors", state.layout, {{WEIGHTS, ""}}, "BF16", state.view(), {});
    const ParamLayout d12(config_by_name("d12"));
    const TensorWriter nowhere = [](const float*, Slot, Param, int) { FAIL("no tensor may be loaded"); };
    CHECK_THROWS_WITH_AS(load_weights(dir.path, d12, nowhere),
                         doctest::Contains("wte.weight is BF16 [7, 64], but a model of 12 layers and 768 channels "
                                           "needs [50257, 768]; wrong --model?"),
                         Error);
}

TEST_CASE("a directory without safetensors is refused, and the message says how to convert it") {
    const TemporaryDirectory dir;
    FlatState got(small_model, 0);
    const auto load_error = [&] { return refusal([&] { load_weights(dir.path, got.layout, got.writer()); }); };
    CHECK(load_error().starts_with("66 "));
    CHECK(load_error().find("has no model.safetensors") != std::string::npos);
    write_bytes(dir / "pytorch_model.bin", "\x80\x02");
    CHECK(load_error().starts_with("65 "));
    CHECK(load_error().find("convert to safetensors") != std::string::npos);
}

// Saves the weights of dev/test/support/reference.safetensors as a checkpoint. transformers must compute the
// reference's logits from it, and must write files in four variants that give the same weights here.
TEST_CASE("transformers computes the same logits from our files, and its files are read here") {
    const std::string fixture = "dev/test/support/reference.safetensors";
    if (!path_exists(fixture)) {
        skip_case(fixture + " is not there; run in the root of the repository");
        return;
    }
    const Safetensors reference = open_safetensors(fixture);
    const HFConfig config = parse_hf_config(reference.metadata.at("config"), fixture);
    FlatState state(config.model, 1);
    read_tensors(reference, {WEIGHTS, "transformer."}, state.layout, state.writer());
    const TemporaryDirectory dir;
    SaveOptions options;
    options.output = dir / "out", options.end_of_text = config.end_of_text;
    const std::string saved = save_checkpoint(options, state.layout, state.view(), {});

    const char* python = getenv("PYTHON");
    const std::string command = std::string(python ? python : "python3") + " dev/test/support/hf_check.py " + saved +
                                " --logits " + fixture + " --export " + (dir / "hf") + " > " + (dir / "log") + " 2>&1";
    const int status = std::system(command.c_str());
    const std::string log = read_bytes(dir / "log");
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (code == 77 || code == 127) {  // no transformers; no Python
        skip_case(code == 127 ? "no Python" : "no PyTorch, or no transformers for it");
        return;
    }
    CHECK_MESSAGE(status == 0, log);
    if (status != 0) return;
    MESSAGE(log);
    for (const char* way : {"one", "sharded", "bare", "half"}) {
        CAPTURE(way);
        const std::string written = (dir / "hf/") + way;
        CHECK(read_hf_config(written).model == config.model);
        CHECK(path_exists(written + "/model.safetensors.index.json") == (std::string(way) == "sharded"));
        FlatState want = state, got(config.model, 0);
        load_weights(written, got.layout, got.writer());
        if (std::string(way) == "half")  // the fixture's values are bf16: small ones lose bits in F16's narrow range
            for (size_t i = 0; i < got.weights.size(); i++)
                if (std::fabs(got.weights[i] - want.weights[i]) <= 0x1p-25f) want.weights[i] = got.weights[i];
        CHECK(same_tensors(got, want, false));
    }
}
