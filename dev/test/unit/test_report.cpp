// test_report.cpp: tests the table that a run prints at its start: threads, instruction set, memory, schedule, and the
// peak FLOP/s of its MFU.
#include "train/report.h"

#include <doctest/doctest.h>

#include <omp.h>

#include "cpu/isa.h"
#include "model/mfu.h"

static const DeviceInfo fake_device = {.name = "a device",
                                       .memory_bytes = int64_t(1) << 30,
                                       .peak_flops_bf16 = 4e12,
                                       .peak_flops_fp32 = 1e12,
                                       .peak_source = "a test"};

static const char* const arguments[] = {"train_gpt2", "--train-data", "x",  "--layers",     "1",  "--heads",
                                        "1",          "--channels",   "16", "--vocab-size", "50", "--seq-len",
                                        "8"};

static RunInfo info_of(const DeviceInfo& device, const std::string& precision) {
    const Options options = parse_options(int(std::size(arguments)), arguments);
    RunSource source = {};
    source.config = model_config(options);
    return run_info(options, source, plan_batch(2, 8, 0, 1), Corpus{}, device, precision, "train_gpt2");
}

// The row of the table with this name.
template <class floatX>
static std::string row(const DeviceInfo& device, const std::string& label, int64_t available = 0) {
    const Options options = parse_options(int(std::size(arguments)), arguments);
    RunSource source = {};
    source.config = model_config(options);
    for (const Row& r : plan_table(dtype_of<floatX>, options, source, plan_batch(2, 8, 0, 1), device, available))
        if (r.first == label) return r.second;
    return "";
}

TEST_CASE("the peak belongs to the run's precision") {
    CHECK(info_of(fake_device, "bf16").peak_flops == 4e12);
    CHECK(info_of(fake_device, "fp32").peak_flops == 1e12);
    CHECK(info_of(fake_device, "bf16").peak_source == "a test");
    CHECK(row<bf16>(fake_device, "device") == "a device; peak 4 TFLOP/s in bf16, a test");
    CHECK(row<float>(fake_device, "device") == "a device; peak 1 TFLOP/s in fp32, a test");
}

TEST_CASE("the number of threads is from OpenMP") {
    const int before = omp_get_max_threads();
    for (const int threads : {1, 2, 3}) {
        omp_set_num_threads(threads);
        CHECK(info_of(fake_device, "fp32").threads == threads);
    }
    omp_set_num_threads(before);
}

TEST_CASE("the table warns of more threads than cores") {
    const int before = omp_get_max_threads(), cores = omp_get_num_procs();
    DeviceInfo cpu = fake_device;
    cpu.cpu_isa = "plain";
    omp_set_num_threads(cores);
    CHECK(row<float>(cpu, "threads") == "");
    omp_set_num_threads(3 * cores);
    CHECK(row<float>(cpu, "threads") ==
          format("%d threads on %d core%s are slower than %d; --threads 0 is one per core", 3 * cores, cores,
                 cores == 1 ? "" : "s", cores));
    CHECK(row<float>(fake_device, "threads") == "");  // a GPU
    omp_set_num_threads(before);
}

TEST_CASE("a plan names the available memory, and advice if the run does not fit") {
    const int64_t plenty = int64_t(1) << 29;
    const std::string needed = row<float>(fake_device, "memory").substr(0, row<float>(fake_device, "memory").find(':'));
    CHECK(row<float>(fake_device, "memory", plenty).starts_with(needed + " of 512 MiB available: weights "));
    CHECK(row<float>(fake_device, "memory", plenty).find("does not fit") == std::string::npos);
    CHECK(row<float>(fake_device, "memory", int64_t(1) << 60).starts_with(needed + " of 1.00 GiB available: "));
    CHECK(row<float>(fake_device, "memory", 1000)
              .starts_with(needed + " of 1000 B available, does not fit: try a smaller model"));
}

TEST_CASE("the instruction set is the one in use, and empty for a GPU") {
    CHECK(info_of(device_info(), "fp32").cpu_isa == isa_name(isa()));
    CHECK(info_of(fake_device, "fp32").cpu_isa == "");
}

TEST_CASE("the schedule is described without a final rate if the rate never falls") {
    const auto described = [](const char* schedule, int64_t warmup, int64_t steps) {
        Options options = parse_options(int(std::size(arguments)), arguments);
        options.schedule = schedule, options.warmup = warmup, options.steps = steps;
        const std::string text = describe_schedule(options);
        return text.substr(0, text.find(';'));
    };
    CHECK(described("cosine", 2, 30) == "cosine, lr 0.0006, 2 steps warmup, to 0.1 of it at step 30");
    CHECK(described("linear", 1, 2) == "linear, lr 0.0006, 1 step warmup, to 0.1 of it at step 2");
    CHECK(described("wsd", 0, 2) == "wsd, lr 0.0006, 0 steps warmup, to 0.1 of it at step 2");
    CHECK(described("wsd", 0, 1) == "wsd, lr 0.0006, 0 steps warmup");
    CHECK(described("cosine", 3, 3) == "cosine, lr 0.0006, 3 steps warmup");
    CHECK(described("constant", 1, 30) == "constant, lr 0.0006, 1 step warmup");
}

TEST_CASE("the table names the update rule and its state") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    CHECK(describe_schedule(options).ends_with("; AdamW 0.9/0.95, decay 0.1, clip 1"));
    CHECK(row<float>(fake_device, "precision") == "fp32");
    CHECK(row<bf16>(fake_device, "precision").starts_with("bf16, with fp32 master weights, gradients and moments"));
    CHECK(row<float>(fake_device, "memory").find(", moments ") != std::string::npos);
}

TEST_CASE("a resumed run names the options that changed, except those that may change") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    const std::string saved = options_json(options);
    CHECK(changed_options(saved, options) == "");
    options.quiet = true, options.trace_steps = 7, options.threads = 3, options.keep = 9;
    options.keep_every = 50, options.keep_best = true;
    options.resume_strict = true;
    options.max_time = 60;
    CHECK(changed_options(saved, options) == "");
    options.weight_decay = 0.2, options.given_warmup = 5, options.schedule = "wsd";
    CHECK(changed_options(saved, options) ==
          R"(--schedule "wsd" (was "cosine"), --warmup 5 (was not given), --weight-decay 0.2 (was 0.1))");
    CHECK(changed_options("{}", options) == "");
}

TEST_CASE("a resumed run names each parameter of the schedule and of the update rule that changed") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    const std::string saved = options_json(options);
    const std::pair<std::string, std::string> changed[] = {{"steps", "31"},
                                                           {"lr", "0.5"},
                                                           {"schedule", "linear"},
                                                           {"warmup", "3"},
                                                           {"final-lr-fraction", "0.5"},
                                                           {"weight-decay", "0.25"},
                                                           {"beta1", "0.5"},
                                                           {"beta2", "0.5"},
                                                           {"eps", "1e-06"},
                                                           {"grad-clip", "2"},
                                                           {"seed", "7"},
                                                           {"precision", "bf16"},
                                                           {"global-batch", "4096"}};
    for (const auto& [name, value] : changed) {
        std::vector<const char*> given(std::begin(arguments), std::end(arguments));
        const std::string option = "--" + name;
        given.insert(given.end(), {option.c_str(), value.c_str()});
        const std::string text = changed_options(saved, parse_options(int(given.size()), given.data()));
        CAPTURE(text);
        CHECK(text.starts_with(option + " "));
        CHECK(text.find(value) != std::string::npos);
    }
}

TEST_CASE("an older run's renamed option, or option that was a flag, is no change where its value is the same") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    options.autotune = "off", options.logit_chunks = 3;
    CHECK(changed_options(R"({"autotune":false,"head-chunks":3})", options) == "");
    CHECK(changed_options(R"({"autotune":true,"head-chunks":4})", options) ==
          R"(--autotune "off" (was "on"), --logit-chunks 3 (was 4))");
}

TEST_CASE("ranks may differ in their number, GPU, threads and machine") {
    const Options options = parse_options(int(std::size(arguments)), arguments);
    CHECK(fields_of_one_rank(options) == std::vector<std::string>{"host", "machine", "device", "gpu", "--gpus",
                                                                  "--node-rank", "--rank", "--local-rank",
                                                                  "--threads"});
}

TEST_CASE("counts of one are in the singular") {
    Corpus corpus = {.shards = {{}}, .first_window = {}, .T = 8, .tokens = 9, .num_windows = 1, .fingerprint = 0};
    CHECK(describe_data(corpus, 1) == "1 shard, 9 tokens, 1 window of 8: an epoch is 1.0 steps");
    corpus.num_windows = 2;
    CHECK(describe_data(corpus, 1).find("2 windows of 8") != std::string::npos);
}
