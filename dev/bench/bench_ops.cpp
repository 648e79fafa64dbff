// bench_ops.cpp: times every operation of a training step at the shapes of a model, on the CPU or a GPU. Prints
// microseconds, GB/s and TFLOP/s of one call, and milliseconds per step: the time, its floor, and the gap between them.
// The last line is the whole step, with tokens/s and MFU.
//
// The floor is a lower bound from the machine's speed (a roofline). It is the larger of two times: the bytes that the
// operation must move, divided by the speed of a copy, and its FLOPs, divided by the speed of a large matmul. Both
// speeds are measured in the same run. An operation whose data are in a cache may be faster than its floor.
//
//   build/release/bench_ops                       GPT-2 124M, B 4, T 256 (on a GPU: B 64, T 1024), bf16 and fp32
//   build/release/bench_ops --model d48 -b 16 -t 1024 --precision bf16 --op layernorm_backward --json results.jsonl
//   build/release/bench_ops --op step             the whole step alone
//   build/release/bench_ops --attention wgmma --op attention_forward --op attention_backward     our kernels for Hopper
//   build/release/bench_ops --optimizer muon --op "muon, all matrices"            Newton-Schulz alone
//   build/release/bench_ops --list                the operations of a step, their calls, bytes and FLOPs; times nothing
//   build/release/cuda/bench_ops                  the same on a GPU (make gpu-bench)
#include <CLI/CLI.hpp>

#include <functional>

#include "bench.h"
#include "model/gpt2.h"
#include "model/mfu.h"
#include "ops/ops.h"
#include "train/options.h"
#include "support/random_tokens.h"
#include "train/optimizer.h"
#include "train/plan.h"

namespace {

struct Choice {
    std::string model = "d12", precision, json, attention = "auto", deterministic = "on", autotune = "on",
                optimizer = "adamw", moments = "fp32";
    int B = 0, T = 0, ds_part_mib = 0;
    double budget = 0.3;
    bool list = false;
    std::vector<std::string> ops;  // empty: all

    bool fp8() const { return precision == "fp8"; }
    bool muon() const { return optimizer == "muon"; }
    MomentDtype moment_dtype() const { return MomentDtype(std::ranges::find(MOMENT_WORDS, moments) - MOMENT_WORDS); }
    bool times(const std::string& op) const { return ops.empty() || std::ranges::count(ops, op) > 0; }

    // The options that differ from the program's defaults, for example "--attention mma --autotune off".
    std::string variant() const {
        std::string text = attention == "auto" ? "" : "--attention " + attention;
        for (const auto& [name, value] : {std::pair("--deterministic", deterministic), {"--autotune", autotune}})
            if (value != "on") text += (text.empty() ? "" : " ") + std::string(name) + " " + value;
        if (muon()) text += (text.empty() ? "" : " ") + std::string("--optimizer muon");
        if (moments != "fp32") text += (text.empty() ? "" : " ") + ("--moments " + moments);
        if (ds_part_mib) text += (text.empty() ? "" : " ") + format("--ds-part-mib %d", ds_part_mib);
        if (fp8()) text += (text.empty() ? "" : " ") + std::string("--precision fp8");
        return text;
    }
};

// The speeds from which floors are computed.
struct Rates {
    double copy;    // bytes per second, read and written
    double matmul;  // FLOP per second
};

struct Work {
    double bytes = 0.0, flop = 0.0;  // the least that one call needs
    double floor(const Rates& rates) const { return std::max(bytes / rates.copy, flop / rates.matmul); }
};

// An operation of a training step.
struct Operation {
    const char* name;
    int calls;  // per step with one micro-batch, without recomputation, with GELU fused into the matmul
    Work work;  // FLOPs and bytes of one call
};

// The update of all parameters by AdamW, or of the layers' matrices by Muon. Of Newton-Schulz each matmul, polynomial
// and norm reads its matrices and writes its result. Each matrix has a side of C.
std::vector<Operation> updates(const ParamLayout& layout, double element, bool muon, MomentDtype moments) {
    // AdamW reads the gradient, both moments, and the weight or its master. It writes the moments, the weight, and its
    // master if there is one.
    const double moment = double(MomentBuffer::bytes(FLAT_ALIGN, moments)) / FLAT_ALIGN;
    const double adamw = (element == 4 ? 12 : 12 + element) + 4 * moment, C = layout.config.C,
                 parameters = double(layout.total);
    if (!muon) return {{"adamw, all buckets", 1, {adamw * parameters}}};
    const int L = layout.config.L, matrices = 6, iterations = Muon<float>::ITERATIONS;
    const double elements = 12 * C * C,
                 squares = matrices * C * C;  // elements of a layer's matrices, and of their products
    const Work newton_schulz{L * ((8 + element) * elements + iterations * element * (3 * elements + 7 * squares)),
                             L * iterations * C * (4 * elements + 2 * squares)};
    // The momentum moves a moment and 8 bytes of an element, the update 12.
    const double others = adamw * (parameters - L * elements) + (2 * moment + 8 + 12) * L * elements;
    return {{"muon, all matrices", 0, newton_schulz},
            {"muon, all buckets", 1, {newton_schulz.bytes + others, newton_schulz.flop}}};
}

// Every operation that is timed, and its work for floatX of `element` bytes. dev/bench/ledger.py predicts the times of
// these operations on a GPU from the same list; dev/test/cli/test_bench.py compares the two.
std::vector<Operation> operations(const GPT2Config& config, int B, int T, int logit_rows, double element, bool muon,
                                  MomentDtype moments) {
    const ParamLayout layout(config);
    const int L = config.L, N = B * T, chunks = ceil_div(N, logit_rows), rows = ceil_div(N, chunks);
    const double C = config.C, NC = N * C, parameters = double(layout.total), wte_size = double(layout.size(wte));
    // Causal attention computes half of all pairs of tokens, with C numbers each.
    const double pairs = 0.5 * double(B) * C * double(T) * T;
    const double logits = double(rows) * config.Vp();
    double zeroed = double(layout.size(wpe)) + 1;
    for (int b = 0; b < layout.num_buckets(); b++)
        zeroed += double(layout.bucket(b).end - layout.bucket(b).decayed_end);
    const auto forward = [&](double IC, double OC, double more = 0) {
        return Work{element * (N * (IC + OC + more) + IC * OC), 2.0 * N * IC * OC};
    };
    const auto backward = [&](double IC, double OC, double more = 0) {  // dweight in float, overwritten
        return Work{element * (N * (2 * IC + 2 * OC + more) + IC * OC) + 4 * IC * OC, 4.0 * N * IC * OC};
    };
    std::vector<Operation> all = {
        {"zero_gradients", 1, {4 * zeroed}},
        {"embedding_forward", 1, {3 * element * NC}},
        {"embedding_backward", 1, {element * NC + 8 * C * (std::min(N, config.V) + T)}},
        {"add_residual", 0, {3 * element * NC}},
        {"layernorm_forward", 2 * L + 1, {2 * element * NC}},
        {"layernorm_backward", 2 * L + 1, {4 * element * NC}},
        {"gelu_forward", 0, {8 * element * NC}},
        {"gelu_backward", 0, {12 * element * NC}},
        {"attention_forward", L, {4 * element * NC, 4 * pairs}},
        {"attention_backward", L, {8 * element * NC, 10 * pairs}},
        {"attention_decode", 0, {2 * element * T * C}},
        {"qkv forward", L, forward(C, 3 * C)},
        {"attproj forward", L, forward(C, C, C)},
        {"fc forward", L, forward(C, 4 * C, 4 * C)},
        {"fcproj forward", L, forward(4 * C, C, C)},
        {"fcproj backward", L, backward(4 * C, C, 4 * C)},
        {"fc backward", L, backward(C, 4 * C)},
        {"attproj backward", L, backward(C, C)},
        {"qkv backward", L, backward(C, 3 * C)},
        {"head targets", chunks, {element * C * (rows + std::min(rows, config.V))}},
        {"head forward", chunks, {element * (rows * C + wte_size + logits), 2 * rows * wte_size}},
        {"head forward, losses only", 0, {element * (rows * C + wte_size), 2 * rows * wte_size}},
        {"sum_of_shards", 0, {12.0 * rows}},
        {"head losses", chunks, {12.0 * rows}},
        {"head backward",
         chunks,
         {element * (2 * rows * C + wte_size + 2 * logits) + (chunks > 1 ? 8 : 4) * wte_size, 4 * rows * wte_size}},
        {"accumulate_loss", 1, {4.0 * N}},
        {"norm and clip", 1, {4 * parameters}},
    };
    for (const Operation& update : updates(layout, element, muon, moments)) all.push_back(update);
    return all;
}

// A line for each operation of a step: name, calls, bytes and FLOPs of a call, separated by tabs.
void print_operations(const std::vector<Operation>& operations) {
    for (const Operation& op : operations)
        if (op.calls > 0) printf("%s\t%d\t%.0f\t%.0f\n", op.name, op.calls, op.work.bytes, op.work.flop);
}

void check_names(const std::vector<std::string>& ops, const std::vector<Operation>& operations) {
    std::string names = "'step'";
    for (const Operation& known : operations) names += format(", '%s'", known.name);
    for (const std::string& op : ops)
        ENSURE(names.find("'" + op + "'") != names.npos, "--op '%s': no operation has this name. The names: %s",
               op.c_str(), names.c_str());
}

double measure_copy(double budget) {
    const auto from = random_buffer<float>(64 << 20, 1);
    DeviceBuffer<float> to(from.size, "a copy");
    return 2.0 * double(from.bytes()) /
           best_seconds([&] { copy_on_device(to.data, from.data, from.bytes(), nullptr); }, budget);
}

// FLOP/s of a square matmul: 8192 x 8192 on a device with a peak above 50 TFLOP/s, else 2048 x 2048.
template <class floatX>
double measure_matmul(double budget) {
    const int n = device_info().peak_flops_bf16 > 5e13 ? 8192 : 2048;
    const auto x = random_buffer<floatX>(int64_t(n) * n, 1), w = random_buffer<floatX>(int64_t(n) * n, 2);
    DeviceBuffer<floatX> out(int64_t(n) * n, "the output of a matmul");
    const Weight<floatX> weight{w.data, nullptr};
    return 2.0 * n * n * n /
           best_seconds(
               [&] {
                   ops::matmul_forward<floatX>({.out = out.data, .inp = x.data, .weight = weight}, n, n, n, nullptr);
               },
               budget);
}

template <class floatX>
struct StepBench {
    const Choice& choice;
    GPT2Config config;
    int B, T;
    Rates rates;
    std::vector<Operation> all;
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    DeviceBuffer<int> tokens;  // the targets begin one token later
    double sum = 0.0, floors = 0.0;

    StepBench(const Choice& choice, const GPT2Config& config, int B, int T)
        : choice(choice),
          config(config),
          B(B),
          T(T),
          rates{measure_copy(choice.budget), measure_matmul<floatX>(choice.budget)},
          all(operations(config, B, T, std::min(B * T, ops::preferred_logit_rows()), element_bytes, choice.muon(),
                         choice.moment_dtype())),
          model(config, Purpose::train, B, T, {.muon = choice.muon(), .fp8 = choice.fp8()}),
          optimizer(model, OptimizerConfig{}, {.moments = choice.moment_dtype(), .muon = choice.muon()}),
          tokens(int64_t(B) * T + 1, "tokens") {
        init_weights(optimizer, 42);
        for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
        const std::vector<int> host = random_token_list(tokens.size, config.V, 1);
        copy_to_device(tokens.data, host.data(), tokens.bytes(), nullptr);
    }

    void step() {
        model.zero_gradients();
        model.forward(tokens.data, B, T);
        model.backward(tokens.data, tokens.data + 1, B, T, 0, 1.0f);
        optimizer.clip(1.0f);
        optimizer.step(1e-5f, 1);
    }

    void report(const char* op, int count, Work work, double seconds) {
        const double floor = work.floor(rates);
        printf("%-28s %-5s %4d | %10.1f %8.0f %8.2f | %9.3f %9.3f %9.3f %6.0f %%\n", op, dtype_name(dtype_of<floatX>),
               count, 1e6 * seconds, 1e-9 * work.bytes / seconds, 1e-12 * work.flop / seconds, 1e3 * count * seconds,
               1e3 * count * floor, 1e3 * count * (seconds - floor), 100.0 * floor / seconds);
        fflush(stdout);
        JsonLines{choice.json}.add(
            format("\"bench\":\"ops\",\"variant\":\"%s\",\"device\":\"%s\",\"model\":\"%s\",\"B\":%d,\"T\":%d,"
                   "\"dtype\":\"%s\",\"op\":\"%s\","
                   "\"count\":%d,\"us\":%.3f,\"floor_us\":%.3f,\"bytes\":%.0f,\"flop\":%.0f,\"copy_gbs\":%.1f,"
                   "\"product_tflops\":%.2f",
                   choice.variant().c_str(), device_info().name.c_str(), choice.model.c_str(), B, T,
                   dtype_name(dtype_of<floatX>), op, count, 1e6 * seconds, 1e6 * floor, work.bytes, work.flop,
                   1e-9 * rates.copy, 1e-12 * rates.matmul));
    }

    void time(const std::string& name, const std::function<void()>& run) {
        const auto op = std::find_if(all.begin(), all.end(), [&](const Operation& o) { return o.name == name; });
        INVARIANT(op != all.end(), "%s is not in the list of operations", name.c_str());
        if (!choice.times(name)) return;
        const double seconds = best_seconds(run, choice.budget);
        sum += op->calls * seconds, floors += op->calls * op->work.floor(rates);
        report(op->name, op->calls, op->work, seconds);
    }

    void run() {
        printf("\n%s\nB %d, T %d, %s; copy %.1f GB/s, matmul %.2f TFLOP/s\n", describe_model(config).c_str(), B, T,
               device_info().name.c_str(), 1e-9 * rates.copy, 1e-12 * rates.matmul);
        printf("%-28s %-5s %4s | %10s %8s %8s | %9s %9s %9s %8s\n", "operation", "", "runs", "us", "GB/s", "TFLOP/s",
               "ms a step", "floor", "gap", "reached");
        step();  // computes all activations
        if (const std::string routes = model.prepare_attention(); !routes.empty())
            printf("attention: %s\n", routes.c_str());
        rows();
        attention();
        matmuls();
        head();
        parameters();
        if (choice.ops.empty())
            printf("%-28s %-5s %4s | %37.3f %9.3f %9.3f %6.0f %%\n", "all of these", dtype_name(dtype_of<floatX>), "",
                   1e3 * sum, 1e3 * floors, 1e3 * (sum - floors), 100.0 * floors / sum);
        if (choice.times("step")) whole_step();
    }

    void whole_step() {
        const double seconds = best_seconds([&] { step(); }, 4 * choice.budget);
        const double flop = flops_per_token(config, T) * double(B) * T;
        const DeviceInfo device = device_info();
        const double peak = device.peak_flops(dtype_of<floatX>);
        const double mfu = peak > 0 ? flop / seconds / peak : 0.0;
        printf("%-28s %-5s %4s | %37.3f = %.0f tokens/s, MFU %.1f %%, %s\n", "the whole step",
               choice.fp8() ? "fp8" : dtype_name(dtype_of<floatX>), "", 1e3 * seconds, double(B) * T / seconds,
               100.0 * mfu, human_bytes(device_bytes_allocated()).c_str());
        JsonLines{choice.json}.add(format(
            "\"bench\":\"step\",\"variant\":\"%s\",\"device\":\"%s\",\"model\":\"%s\",\"B\":%d,\"T\":%d,\"dtype\":\"%"
            "s\","
            "\"ms\":%.4f,\"tokens_per_s\":%.1f,\"mfu\":%.4f,\"bytes\":%lld",
            choice.variant().c_str(), device.name.c_str(), choice.model.c_str(), B, T, dtype_name(dtype_of<floatX>),
            1e3 * seconds, double(B) * T / seconds, mfu, static_cast<long long>(device_bytes_allocated())));
    }

    // ---- the operations, on layer 0 and the tensors around it

    static constexpr double element_bytes = sizeof(floatX);
    const LayerActivations<floatX>& layer() const { return model.acts.layer[0]; }

    void rows() {
        const int N = B * T, C = config.C, V = config.V;
        const auto& a = layer();
        const auto& acts = model.acts;
        time("embedding_forward", [&] {
            ops::embedding_forward(acts.encoded, tokens.data, model.w(wte), model.w(wpe), B, T, C, {0, V}, nullptr);
        });
        time("embedding_backward", [&] {
            ops::embedding_backward(model.g(wte), model.g(wpe), acts.dx, tokens.data, B, T, C, {0, V}, nullptr);
        });
        time("add_residual",
             [&] { ops::add_residual(acts.dx, acts.encoded, a.residual2, model.w(attprojb), N, C, nullptr); });
        time("layernorm_forward", [&] {
            ops::layernorm_forward({a.ln1}, a.ln1_mean, a.ln1_rstd, acts.encoded, model.w(ln1w), model.w(ln1b), N, C,
                                   nullptr);
        });
        time("layernorm_backward", [&] {
            ops::layernorm_backward({acts.dx}, model.g(ln2w), model.g(ln2b), model.g(attprojb), acts.dtmp, a.residual2,
                                    model.w(ln2w), a.ln2_mean, a.ln2_rstd, acts.dx, N, C, nullptr);
        });
        time("gelu_forward", [&] { ops::gelu_forward({a.gelu}, a.fc, 4 * int64_t(N) * C, nullptr); });
        time("gelu_backward",
             [&] { ops::gelu_backward({acts.dlarge}, a.fc, acts.dlarge, 4 * int64_t(N) * C, nullptr); });
    }

    void attention() {
        const int NH = config.NH, HS = config.C / NH;
        const auto& a = layer();
        time("attention_forward", [&] { ops::attention_forward(a.att, a.lse, a.qkv, B, T, NH, HS, nullptr); });
        time("attention_backward", [&] {
            ops::attention_backward(model.acts.dlarge, model.acts.dtmp, a.att, a.lse, a.qkv, B, T, NH, HS, nullptr);
        });
        time("attention_decode", [&] { ops::attention_decode(a.att, a.qkv, T, NH, HS, nullptr); });
    }

    void matmuls() {
        const int N = B * T;
        const auto& a = layer();
        const auto& acts = model.acts;
        const auto forward = [&](const char* name, Param weight, Param bias, MatmulForward<floatX> m) {
            m.weight = model.matrix(weight), m.bias = model.w(bias);
            const int IC = model.layout.cols(weight), OC = model.layout.rows(weight);
            time(name, [&] { ops::matmul_forward(m, N, IC, OC, nullptr); });
        };
        forward("qkv forward", qkvw, qkvb, {.out = a.qkv, .inp = a.ln1});
        forward("attproj forward", attprojw, attprojb, {.out = a.residual2, .inp = a.att, .residual = acts.encoded});
        forward("fc forward", fcw, fcb, {.out = a.gelu, .pre_gelu = a.fc, .inp = a.ln2});
        forward("fcproj forward", fcprojw, fcprojb, {.out = a.residual3, .inp = a.gelu, .residual = a.residual2});
        const auto backward = [&](const char* name, Param weight, MatmulBackward<floatX> m) {
            m.weight = model.matrix(weight), m.dweight = model.g(weight);
            const int IC = model.layout.cols(weight), OC = model.layout.rows(weight);
            time(name, [&] { ops::matmul_backward(m, N, IC, OC, nullptr); });
        };
        backward("fcproj backward", fcprojw, {.dinp = acts.dlarge, .dout = acts.dx, .inp = a.gelu, .pre_gelu = a.fc});
        backward("fc backward", fcw, {.dinp = acts.dtmp, .dbias = model.g(fcb), .dout = acts.dlarge, .inp = a.ln2});
        backward("attproj backward", attprojw, {.dinp = acts.dtmp, .dout = acts.dx, .inp = a.att});
        backward("qkv backward", qkvw, {.dinp = acts.dtmp, .dbias = model.g(qkvb), .dout = acts.dlarge, .inp = a.ln1});
    }

    // The head processes its rows in equal chunks, of at most as many rows as the model has memory for.
    void head() {
        const int N = B * T, chunks = ceil_div(N, model.logit_rows), rows = ceil_div(N, chunks);
        const auto& acts = model.acts;
        const HeadInput<floatX> head = {acts.lnf, model.matrix(wte), tokens.data + 1, {0, config.V},
                                        rows,     config.C,          config.Vp()};
        const auto forward = [&](bool keep) {
            ops::head_forward(acts.sums, acts.exponentials, acts.target_logits, head, keep, nullptr);
        };
        time("head targets", [&] { ops::head_targets(acts.target_logits, head, nullptr); });
        time("head forward, losses only", [&] { forward(false); });
        DeviceBuffer<float> parts(2 * int64_t(rows), "sums of two shards");
        fill_zero(parts.data, parts.bytes(), nullptr);
        time("sum_of_shards", [&] { ops::sum_of_shards(acts.losses, parts.data, 2, rows, nullptr); });
        time("head forward", [&] { forward(true); });
        time("head losses", [&] { ops::head_losses(acts.losses, acts.sums, head.targets, rows, nullptr); });
        // With sums of 0 and a scale of 1 all factors are 1: a backend that multiplies e by them can run again.
        fill_zero(acts.sums, rows * int64_t(sizeof(float)), nullptr);
        time("head backward", [&] {
            ops::head_backward(acts.dtmp, model.g(wte), acts.exponentials, acts.sums, head, 1.0f, chunks > 1, nullptr);
        });
        time("accumulate_loss", [&] { ops::accumulate_loss(acts.loss, acts.losses, N, 1.0f / float(N), nullptr); });
    }

    void parameters() {
        time("zero_gradients", [&] { model.zero_gradients(); });
        time("norm and clip", [&] { optimizer.clip(1.0f); });
        time(choice.muon() ? "muon, all buckets" : "adamw, all buckets", [&] { optimizer.step(1e-6f, 2); });
        if (choice.muon())
            time("muon, all matrices", [&] {
                const int at_once = optimizer.muon->stacks.layers_at_once;
                for (int l = 0; l < config.L; l += at_once) {
                    std::vector<float*> buckets;
                    for (int b = l + 1; b <= std::min(l + at_once, config.L); b++)
                        buckets.push_back(model.grads.bucket(b));
                    optimizer.muon->orthogonalize(buckets, l, nullptr);
                }
            });
    }
};

GPT2Config config_of(const std::string& model) {
    const char* arguments[] = {"bench_ops", "plan", "--model", model.c_str()};
    return model_config(parse_options(4, arguments));
}

template <class floatX>
void bench(const Choice& choice, const GPT2Config& config, int B, int T) {
    const std::string dtype = choice.fp8() ? "bf16" : choice.precision;
    if (!dtype.empty() && dtype != dtype_name(dtype_of<floatX>)) return;
    const int logit_rows = std::min(B * T, ops::preferred_logit_rows());
    const std::vector<Operation> all =
        operations(config, B, T, logit_rows, sizeof(floatX), choice.muon(), choice.moment_dtype());
    check_names(choice.ops, all);
    if (choice.list) return print_operations(all);
    StepBench<floatX>(choice, config, B, T).run();
}

}  // namespace

int main(int argc, char** argv) try {
    CLI::App app{"Times every operation of a training step: microseconds, GB/s, TFLOP/s, and milliseconds per step."};
    Choice choice;
    int threads = 0;
    const CLI::IsMember on_or_off({"on", "off"});
    app.add_option("--model", choice.model, "d12, d24, d36, d48 [d12]");
    app.add_option("-b", choice.B, "sequences per micro-batch [4, on a GPU 64]");
    app.add_option("-t", choice.T, "tokens per sequence [256, on a GPU 1024]");
    app.add_option("--precision", choice.precision, "fp32, bf16, or fp8 for --op step [fp32 and bf16]")
        ->check(CLI::IsMember({"fp32", "bf16", "fp8"}));
    app.add_option("--op", choice.ops,
                   "time only this operation, by its name in the table; step = the whole step; "
                   "may be given several times")
        ->expected(1)
        ->take_all();
    app.add_flag("--list", choice.list, "print the operations of a step: name, calls, bytes and FLOPs of a call");
    const std::vector<std::string> words(std::begin(ATTENTION_WORDS), std::end(ATTENTION_WORDS));
    app.add_option("--attention", choice.attention, "auto, cudnn, wgmma or mma: what computes bf16 attention [auto]")
        ->check(CLI::IsMember(words));
    app.add_option("--deterministic", choice.deterministic, "on or off: cuDNN's deterministic backward [on]")
        ->check(on_or_off);
    app.add_option("--autotune", choice.autotune,
                   "on: the fastest algorithm, chosen by timing; off: the library's first proposal [on]")
        ->check(on_or_off);
    app.add_option("--ds-part-mib", choice.ds_part_mib,
                   "MiB of dS that cuDNN's deterministic backward stores at a time; 0 = timed [0]")
        ->check(CLI::Range(0, 1 << 24));
    app.add_option("--optimizer", choice.optimizer, "adamw or muon [adamw]")->check(CLI::IsMember({"adamw", "muon"}));
    app.add_option("--moments", choice.moments, "fp32, bf16 or 8bit [fp32]")
        ->check(CLI::IsMember(std::vector<std::string>(std::begin(MOMENT_WORDS), std::end(MOMENT_WORDS))));
    app.add_option("--json", choice.json, "append the results to this file, one JSON object per line");
    app.add_option("--threads", threads, "threads of the CPU; 0 = one per core");
    app.add_option("--seconds", choice.budget, "seconds to spend on each line [0.3]");
    CLI11_PARSE(app, argc, argv);
    ENSURE(!choice.fp8() || choice.ops == std::vector<std::string>{"step"},
           "--precision fp8 is timed with --op step only");
    const AttentionOptions attention = {
        .backend = AttentionBackend(std::ranges::find(words, choice.attention) - words.begin()),
        .deterministic = choice.deterministic != "off",
        .part_bytes = int64_t(choice.ds_part_mib) << 20};
    ops::set_attention(attention);
    device_init(0, threads);
    device_time_algorithms(choice.autotune != "off");
    const bool gpu = device_info().peak_flops_bf16 > 5e13;
    const int B = choice.B ? choice.B : gpu ? 64 : 4, T = choice.T ? choice.T : gpu ? 1024 : 256;
    const GPT2Config config = config_of(choice.model);
    bench<bf16>(choice, config, B, T);
    bench<float>(choice, config, B, T);
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
