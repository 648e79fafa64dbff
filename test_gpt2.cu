// test_gpt2.cu: tests the whole model in three ways. (1) Against an independent GPT-2 in float64, whose results
// dev/test/support/reference.py wrote to dev/test/support/reference.safetensors: logits, loss, the gradients of all 16
// kinds of tensors, ten steps of AdamW. (2) bf16 against fp32, on a random model of another shape. (3) Against itself:
// micro-steps, chunks of logits, recomputation, token-by-token decoding, two runs, a resumed run.
//
//   ./test_gpt2 [dev/test/support/reference.safetensors]      one line per comparison; the exit code is 1 if any failed
//
// test_gpt2cu is the same on a GPU, and build/release/emulator/test_gpt2cu that on a CPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "checkpoint/hf.h"
#include "checkpoint/safetensors.h"
#include "model/gpt2.h"
#include "ops/ops.h"
#include "train/optimizer.h"

static int passed = 0, failed = 0;

static void report(bool ok, const std::string& line) {
    (ok ? passed : failed)++;
    printf("%s  %s\n", ok ? "  ok" : "FAIL", line.c_str());
}

// Compares the largest |got - want|, divided by the largest |want|, with the tolerance: an element is a sum of terms as
// large as the tensor's largest elements, so small elements have the same absolute error as large ones. NaN fails.
static void compare(const std::string& name, const std::vector<float>& got, const std::vector<float>& want, int columns,
                    double tolerance) {
    if (got.size() != want.size())
        return report(false, format("%s has %zu elements instead of %zu", name.c_str(), got.size(), want.size()));
    double scale = 0.0, worst = 0.0;
    size_t place = 0;
    for (float x : want) scale = std::max(scale, std::fabs(double(x)));  // fmax crashes gcc 12 for arm64 here
    for (size_t i = 0; i < want.size(); i++) {
        const double error = std::fabs(double(got[i]) - double(want[i])) / scale;
        if (error <= worst) continue;
        worst = error;  // NaN too: it compares false
        place = i;
        if (std::isnan(error)) break;
    }
    report(worst <= tolerance,
           format("%-20s error %.2e of %.3g, at most %.1e; worst at [%zu, %zu]: got %.9g, want %.9g", name.c_str(),
                  worst, scale, tolerance, place / columns, place % columns, double(got[place]), double(want[place])));
}

// Compares the root mean square of got - want, divided by that of want, with the tolerance. NaN fails.
static void compare_rms(const std::string& name, const std::vector<float>& got, const std::vector<float>& want, int,
                        double tolerance) {
    double errors = 0.0, squares = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        errors += (double(got[i]) - double(want[i])) * (double(got[i]) - double(want[i]));
        squares += double(want[i]) * double(want[i]);
    }
    const double error = std::sqrt(errors / squares);
    report(got.size() == want.size() && error <= tolerance,
           format("%-20s root mean square error %.2e, at most %.1e", name.c_str(), error, tolerance));
}

// A micro-batch, (B, T).
struct Tokens {
    int B, T;
    std::vector<int> tokens, targets;
};

struct Reference {
    Safetensors file;
    GPT2Config config;
    Tokens batch;

    std::vector<float> read(const std::string& name) const {
        const TensorInfo* tensor = file.find(name);
        if (!tensor) fail(EXIT_BAD_DATA, "%s has no tensor %s", file.path.c_str(), name.c_str());
        std::vector<float> values(tensor->elements());
        file.read(values.data(), *tensor);
        return values;
    }
};

static std::vector<int> read_ints(const Reference& reference, const std::string& name) {
    std::vector<int> values;
    for (float x : reference.read(name)) values.push_back(int(x));
    return values;
}

static Reference open_reference(const std::string& path) {
    Reference r{open_safetensors(path), {}, {}};
    r.config = parse_hf_config(r.file.metadata.at("config"), path).model;
    const TensorInfo* tokens = r.file.find("tokens");
    if (!tokens) fail(EXIT_BAD_DATA, "%s has no tokens", path.c_str());
    r.batch = {int(tokens->shape[0]), int(tokens->shape[1]), read_ints(r, "tokens"), read_ints(r, "targets")};
    return r;
}

// Converts a tensor from Hugging Face's layout to that of memory; padded rows are zero.
static std::vector<float> to_memory(const std::vector<float>& hf, const ParamLayout& layout, Param p) {
    std::vector<float> out(layout.size(p), 0.0f);
    const int cols = layout.cols(p), rows = int(hf.size()) / cols;
    const bool transposed = param_table[p].transposed_in_hf();
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++)
            out[int64_t(r) * cols + c] = hf[transposed ? int64_t(c) * rows + r : int64_t(r) * cols + c];
    return out;
}

template <class floatX>
struct Trained {
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    DeviceBuffer<int> tokens, targets;
    int B, T;

    Trained(const GPT2Config& config, const Tokens& batch, MemoryOptions options = {})
        : model(config, Purpose::train, batch.B, batch.T, options),
          optimizer(model, OptimizerConfig{}, options),
          tokens(int64_t(batch.tokens.size()), "tokens"),
          targets(int64_t(batch.targets.size()), "targets"),
          B(batch.B),
          T(batch.T) {
        copy_to_device(tokens.data, batch.tokens.data(), tokens.bytes(), nullptr);
        copy_to_device(targets.data, batch.targets.data(), targets.bytes(), nullptr);
        wait_for_device();
    }

    Trained(const Reference& r, MemoryOptions options = {}) : Trained(r.config, r.batch, options) {
        set_params([&](Param p, int l) { return to_memory(r.read("transformer." + hf_name(p, l)), model.layout, p); });
    }

    // values(p, l) returns a tensor's floats in memory layout.
    template <class Values>
    void set_params(const Values& values) {
        for (const ParamSpec& spec : param_table)
            for (int l = 0; l < model.layout.layers(spec.id); l++)
                optimizer.set_state(WEIGHTS, spec.id, l, values(spec.id, l).data());
        for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
    }

    std::vector<float> param(Param p, int l) {
        std::vector<float> values(model.layout.size(p));
        optimizer.get_state(values.data(), WEIGHTS, p, l);
        return values;
    }

    // A step of AdamW, counted from 1; returns the loss before it.
    float train_step(int step) {
        const float loss = gradients();
        optimizer.clip(1.0f);
        optimizer.step(1e-3f, step);
        return loss;
    }

    // The losses before steps first to last.
    std::vector<float> train(int first, int last) {
        std::vector<float> losses;
        for (int step = first; step <= last; step++) losses.push_back(train_step(step));
        return losses;
    }

    // Gradients of the mean loss over the batch, in micro-steps of B / micro_steps sequences each.
    float gradients(int micro_steps = 1) {
        const int b = B / micro_steps;
        model.zero_gradients();
        for (int i = 0; i < micro_steps; i++) {
            const int64_t at = int64_t(i) * b * T;
            model.forward(tokens.data + at, b, T);
            model.backward(tokens.data + at, targets.data + at, b, T, i, 1.0f / float(micro_steps));
        }
        return to_host(model.acts.loss, 1)[0];
    }

    std::vector<float> all_gradients() { return to_host(model.grads.memory.data, model.layout.total); }

    // The gradient of a kind of tensors, one layer after the other.
    std::vector<float> gradient(Param p) {
        std::vector<float> values;
        for (int l = 0; l < model.layout.layers(p); l++)
            for (float x : to_host(model.g(p, l), model.layout.size(p))) values.push_back(x);
        return values;
    }

    std::vector<float> logits(int row) { return to_host(model.row_logits(row), model.config.V); }
};

// Errors relative to a tensor's largest element. fp32: through two layers, forward and backward, a value is rounded
// some 30 times by up to 2^-24, which is 1.8e-6 if all errors have the same sign. Sums of up to 192 terms, whose errors
// add like their square root, double or triple that. bf16: every activation and its gradient is rounded by up to 2^-9.
// About 14 roundings per layer follow one another, forward and backward, and add like sqrt(2 * 2 * 14) = 7.5: 1.5e-2.
// The worst of some thousand elements has 4 times that. A missing bias, mask or scale changes a tensor by 0.1 or more.
template <class floatX>
constexpr double tensor_tolerance = sizeof(floatX) == 4 ? 5e-6 : 6e-2;
// The loss is a mean over 51 tokens, whose errors mostly cancel. AdamW's first steps change every element by about lr,
// even if rounding errors decide the sign of a small gradient. After ten steps losses therefore agree to one digit
// less.
template <class floatX>
constexpr double loss_tolerance = sizeof(floatX) == 4 ? 1e-6 : 2e-3;
// Gradients are sums in fp32 of the same products, in another order. A GPU's library may also choose another algorithm
// for another number of rows, and then activations in bf16 are rounded in another way.
template <class floatX>
static double order_tolerance() {
    const bool gpu = device_info().name.starts_with("NVIDIA");
    return sizeof(floatX) == 2 && gpu ? tensor_tolerance<floatX> : 5e-6;
}

// Compares the gradients of the model with those of the reference.
template <class floatX>
static void compare_gradients(const std::string& name, Trained<floatX>& t, const Reference& r, double tolerance,
                              decltype(compare)& compare = ::compare) {
    const ParamLayout& layout = t.model.layout;
    for (const ParamSpec& spec : param_table) {
        std::vector<float> want;
        for (int l = 0; l < layout.layers(spec.id); l++)
            for (float x : to_memory(r.read("grad." + hf_name(spec.id, l)), layout, spec.id)) want.push_back(x);
        compare(name + " d" + spec.name, t.gradient(spec.id), want, layout.cols(spec.id), tolerance);
    }
}

template <class floatX>
static void test_against_reference(const Reference& r) {
    const std::string dtype = dtype_name(dtype_of<floatX>);
    Trained<floatX> t(r);

    t.model.forward(t.tokens.data, t.B, t.T);
    std::vector<float> logits;
    for (int n = 0; n < t.B * t.T; n++)
        for (float x : t.logits(n)) logits.push_back(x);
    compare(dtype + " logits", logits, r.read("logits"), r.config.V, tensor_tolerance<floatX>);
    compare(dtype + " loss", {t.gradients()}, r.read("loss"), 1, loss_tolerance<floatX>);
    compare_gradients(dtype, t, r, tensor_tolerance<floatX>);

    std::vector<float> losses, norms;
    const size_t steps = r.read("losses").size();
    for (size_t step = 0; step < steps; step++) {
        losses.push_back(t.train_step(int(step) + 1));
        norms.push_back(to_host(t.optimizer.norm(), 1)[0]);
    }
    compare(dtype + " losses", losses, r.read("losses"), 1, 10 * loss_tolerance<floatX>);
    compare(dtype + " gradient norms", norms, r.read("grad_norms"), 1, 10 * loss_tolerance<floatX>);
}

template <class floatX>
static void test_against_itself(const Reference& r) {
    const std::string dtype = dtype_name(dtype_of<floatX>);
    Trained<floatX> a(r), b(r);
    const float loss = a.gradients();
    const std::vector<float> grads = a.all_gradients();
    const float loss_again = b.gradients();
    report(loss == loss_again && std::memcmp(grads.data(), b.all_gradients().data(), grads.size() * 4) == 0,
           dtype + " two runs        the same bits");

    b.gradients(r.batch.B);
    compare(dtype + " micro-steps", b.all_gradients(), grads, 1, order_tolerance<floatX>());
    Trained<floatX> c(r, {Recompute::none, 8});
    c.gradients();
    compare(dtype + " 8 pieces of logits", c.all_gradients(), grads, 1, order_tolerance<floatX>());
    Trained<floatX> d(r, {Recompute::gelu}), e(r, {Recompute::layer});
    d.gradients(), e.gradients();
    compare(dtype + " recompute gelu", d.all_gradients(), grads, 1, tensor_tolerance<floatX>);
    report(std::memcmp(grads.data(), e.all_gradients().data(), grads.size() * 4) == 0,
           dtype + " recompute layer  the same bits");

    // Decoding token by token, from half of a sequence on, makes the same sums over keys in another order.
    a.model.forward(a.tokens.data, 1, a.T);
    const std::vector<float> whole = a.logits(a.T - 1);
    a.model.forward(a.tokens.data, 1, a.T / 2);
    for (int t = a.T / 2; t < a.T; t++) a.model.decode(a.tokens.data + t, t);
    compare(dtype + " token by token", a.logits(0), whole, 1, tensor_tolerance<floatX>);
}

// Without master weights, each step rounds the weights up or down, by at most 2^-8: errors like those of the
// activations.
static void test_without_masters(const Reference& r) {
    Trained<bf16> t(r, {Recompute::none, 0, false});
    const std::vector<float> want = r.read("losses");
    compare("bf16 without masters", t.train(1, int(want.size())), want, 1, 10 * loss_tolerance<bf16>);
}

// FP8 rounds with a root mean square of 0.026 (E4M3) and 0.052 (E5M2) of an element: an error of 0.037 in the result of
// a matmul forward, and of 0.058 backward. Those of the 8 matmuls of two layers, forward and backward, add like the
// root of their squares: 0.037 sqrt(8) = 0.10 in the logits' gradient, and with 0.058 sqrt(8) = 0.16 backward 0.19 in
// all.
static void test_fp8(const Reference& r) {
    constexpr double tolerance = 0.19, of_loss = 1e-2;
    Trained<bf16> a(r, {.fp8 = true}), again(r, {.fp8 = true}), bf16_only(r);
    Trained<bf16> recomputed(r, {.recompute = Recompute::layer, .fp8 = true});
    compare("fp8 loss", {a.gradients()}, r.read("loss"), 1, of_loss);
    compare_gradients("fp8", a, r, tolerance, compare_rms);
    again.gradients(), recomputed.gradients(), bf16_only.gradients();
    const std::vector<float> grads = a.all_gradients();
    report(grads == again.all_gradients(), "fp8 two runs         the same bits");
    report(grads == recomputed.all_gradients(), "fp8 recompute layer  the same bits");
    report(grads != bf16_only.all_gradients(), "fp8                  other bits than bf16");
    const std::vector<float> want = r.read("losses");
    compare("fp8 losses", again.train(1, int(want.size())), want, 1, 3 * of_loss);
}

// A step with a gradient that is not finite must not change the weights, and neither must any later step.
template <class floatX>
static void test_nan_gradient(const Reference& r) {
    Trained<floatX> t(r);
    const std::vector<float> nan = {std::nanf("")};
    const auto weights = [&] {
        return to_host(reinterpret_cast<const char*>(t.model.weights.memory.data), t.model.weights.memory.bytes());
    };
    const std::vector<char> before = weights();
    t.gradients();
    copy_to_device(t.model.g(fcw, 1), nan.data(), sizeof(float), nullptr);
    t.optimizer.clip(1.0f);
    t.optimizer.step(1e-3f, 1);
    const bool first = weights() == before;
    t.train_step(2);
    report(first && weights() == before,
           std::string(dtype_name(dtype_of<floatX>)) + " NaN gradient    weights untouched");
    report(!std::isfinite(to_host(t.optimizer.factor(), 1)[0]),
           std::string(dtype_name(dtype_of<floatX>)) + " NaN gradient    seen a step late");
}

// A model that gets the weights, the moments and the step number of another continues with the same bits.
template <class floatX>
static void test_resume(const Reference& r) {
    constexpr int before = 2, steps = 4;
    Trained<floatX> whole(r), first(r), second(r);
    const std::vector<float> losses = whole.train(1, steps);
    std::vector<float> resumed = first.train(1, before);
    const ParamLayout& layout = first.model.layout;
    second.set_params([&](Param p, int l) { return first.param(p, l); });
    for (const auto& [to, from] :
         {std::pair(&second.optimizer.m, &first.optimizer.m), {&second.optimizer.v, &first.optimizer.v}})
        copy_on_device(to->elements.data, from->elements.data, to->elements.bytes(), nullptr);
    wait_for_device();
    for (float loss : second.train(before + 1, steps)) resumed.push_back(loss);
    bool same = losses == resumed;
    for (const ParamSpec& spec : param_table)
        for (int l = 0; l < layout.layers(spec.id); l++)
            same = same && whole.param(spec.id, l) == second.param(spec.id, l);
    report(same, std::string(dtype_name(dtype_of<floatX>)) + " resumed         as never stopped");
}

// ---- a random model

// Heads of 64 channels as in GPT-2, and odd sizes elsewhere. wide: GPT-2's width, for GPUs, on which it takes seconds.
static GPT2Config random_config(bool wide) {
    if (wide) return {.max_T = 300, .V = 50257, .L = 2, .NH = 12, .C = 768};
    return {.max_T = 80, .V = 300, .L = 2, .NH = 2, .C = 128};
}

// Values of a size that keeps activations near 1; biases are not zero, and LayerNorm's weights differ from 1.
static std::vector<float> random_param(const ParamLayout& layout, Param p, int l) {
    const Philox random{7, uint64_t(p) << 32 | uint64_t(l)};
    const bool matrix = layout.rows(p) > 1, scales = p == ln1w || p == ln2w || p == lnfw;
    const float scale = matrix ? 1.0f / std::sqrt(float(layout.cols(p))) : 0.2f;
    const int64_t used = p == wte ? int64_t(layout.config.V) * layout.cols(p) : layout.size(p);  // padded rows: zero
    std::vector<float> values(size_t(layout.size(p)), 0.0f);
    for (int64_t i = 0; i < used; i++)
        values[size_t(i)] = float(bf16(scale * random.normal(uint64_t(i)) + (scales ? 1.0f : 0.0f)));
    return values;
}

static Tokens random_batch(int B, int T, int V) {
    Tokens batch{B, T, {}, {}};
    const Philox random{8, 0};
    for (int i = 0; i < B * T; i++) {
        batch.tokens.push_back(int(random(uint64_t(i))[0] % uint32_t(V)));
        batch.targets.push_back(i % 9 == 4 ? -1 : int(random(uint64_t(i))[1] % uint32_t(V)));  // some are ignored
    }
    return batch;
}

// The fp32 model, which takes other kernels and one piece of logits, is the reference of the bf16 model with three.
static void test_random_model() {
    const bool wide = device_info().name.starts_with("NVIDIA");
    const GPT2Config config = random_config(wide);
    const Tokens batch = wide ? random_batch(4, 257, config.V) : random_batch(2, 71, config.V);
    Trained<float> want(config, batch);
    Trained<bf16> got(config, batch, {Recompute::none, 3});
    const ParamLayout& layout = want.model.layout;
    want.set_params([&](Param p, int l) { return random_param(layout, p, l); });
    got.set_params([&](Param p, int l) { return random_param(layout, p, l); });
    compare("random model loss", {got.gradients()}, {want.gradients()}, 1, 4 * loss_tolerance<bf16>);
    for (const ParamSpec& spec : param_table)
        compare(std::string("random model d") + spec.name, got.gradient(spec.id), want.gradient(spec.id),
                layout.cols(spec.id), tensor_tolerance<bf16>);
    got.model.forward(got.tokens.data, batch.B, batch.T);
    want.model.forward(want.tokens.data, batch.B, batch.T);
    const int last = batch.B * batch.T - 1;
    compare("random model logits", got.logits(last), want.logits(last), config.V, tensor_tolerance<bf16>);
}

template <class floatX>
static void test_all(const Reference& r) {
    test_against_reference<floatX>(r);
    test_against_itself<floatX>(r);
    test_nan_gradient<floatX>(r);
    test_resume<floatX>(r);
}

int main(int argc, char** argv) try {
    device_init(0, 0);
    const Reference reference = open_reference(argc > 1 ? argv[1] : "dev/test/support/reference.safetensors");
    printf("GPT-2 with %d layers, %d heads, %d channels, %d tokens; %d x %d tokens on %s\n", reference.config.L,
           reference.config.NH, reference.config.C, reference.config.V, reference.batch.B, reference.batch.T,
           device_info().name.c_str());
    test_all<float>(reference);
    test_all<bf16>(reference);
    test_random_model();
    test_without_masters(reference);
    test_fp8(reference);
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? EXIT_INTERNAL : 0;
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
