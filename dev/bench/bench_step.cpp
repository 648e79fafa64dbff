// bench_step.cpp: times whole training steps on random tokens, on the CPU or a GPU. Prints milliseconds of the fastest
// step and tokens/s, and milliseconds of the fastest forward, backward, gradient norm and update.
//
//   build/release/bench_step [--model d12] [--precision bf16] [-b 4] [-t 256] [--steps 6] ...
//   build/release/bench_step --layers 6 --heads 6 --channels 384 --vocab-size 4096         a small model
// It accepts the options of `train_gpt2 plan`, which --help lists. It uses those of the model's shape, --micro-batch
// (a number), --seq-len, --precision (auto is bf16), --logit-chunks, --optimizer, --steps and --seed, and ignores
// the others: it recomputes no activations, and has separate master weights in bf16.
#include <algorithm>
#include <cstdio>

#include "model/gpt2.h"
#include "train/options.h"
#include "support/random_tokens.h"
#include "train/optimizer.h"
#include "train/plan.h"

struct Timer {
    double start = seconds_now(), best = 1e30;
    void begin() { start = seconds_now(); }
    void end() {
        wait_for_device();
        best = std::min(best, seconds_now() - start);
    }
};

template <class floatX>
static void bench(const Options& options, const GPT2Config& config) {
    const int B = options.micro_batch, T = options.seq_len ? options.seq_len : config.max_T;
    const bool fp8 = options.precision == Precision::fp8;
    const MemoryOptions memory{
        .logit_chunks = options.logit_chunks, .muon = options.optimizer == UpdateRule::muon, .fp8 = fp8};
    GPT2<floatX> model(config, Purpose::train, B, T, memory);
    Optimizer<floatX> optimizer(model, OptimizerConfig{}, memory);
    init_weights(optimizer, options.seed);
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
    const std::vector<int> host = random_token_list(int64_t(B) * T + 1, config.V, 1);
    DeviceBuffer<int> tokens(host.size(), "tokens");
    copy_to_device(tokens.data, host.data(), tokens.bytes(), nullptr);

    Timer forward, backward, clip, update, step;
    const int steps = options.steps ? int(options.steps) : 6;
    float loss = 0.0f;
    for (int i = 0; i < steps; i++) {
        step.begin();
        model.zero_gradients();
        forward.begin();
        model.forward(tokens.data, B, T);
        forward.end();
        backward.begin();
        model.backward(tokens.data, tokens.data + 1, B, T, 0, 1.0f);
        backward.end();
        clip.begin();
        optimizer.clip(1.0f);
        clip.end();
        update.begin();
        optimizer.step(1e-4f, i + 1);
        update.end();
        step.end();
        loss = to_host(model.acts.loss, 1)[0];
    }
    printf(
        "%s B %d T %d %s | %.1f ms = %.0f tok/s | forward %.1f, head and backward %.1f, norm %.1f, update %.1f | loss "
        "%.4f\n",
        fp8 ? "fp8" : dtype_name(dtype_of<floatX>), B, T, device_info().name.c_str(), step.best * 1e3,
        B * T / step.best, forward.best * 1e3, backward.best * 1e3, clip.best * 1e3, update.best * 1e3, double(loss));
}

int main(int argc, char** argv) try {
    std::vector<const char*> arguments = {argv[0], "plan"};
    arguments.insert(arguments.end(), argv + 1, argv + argc);
    const Options options = parse_options(int(arguments.size()), arguments.data());
    if (options.command == Command::help) {
        printf("bench_step [options of plan]: milliseconds of a training step, and tokens/s\n\n%s",
               options.text.c_str());
        return 0;
    }
    device_init(0, 0);
    if (options.precision == Precision::fp8) device_check_fp8();
    const GPT2Config config = model_config(options);
    printf("%s\n", describe_model(config).c_str());
    options.precision == Precision::fp32 ? bench<float>(options, config) : bench<bf16>(options, config);
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
