// test_plan.cpp: tests the arithmetic of batches, the table at the start, and the time of a step. Compares the memory
// of a plan with the memory that training allocates, and FLOPs per token with the formula computed by hand.
#include "train/plan.h"

#include <string>
#include <vector>

#include "model/mfu.h"
#include "support/parse.h"
#include "support/test.h"
#include "train/optimizer.h"
#include "train/run.h"

TEST_CASE("a global batch is micro-batches x ranks x micro-steps, and others are refused with what divides") {
    const BatchPlan plan = plan_batch(16, 1024, 524288, 4);
    CHECK(plan.grad_accum_steps == 8);
    CHECK(plan.tokens_per_step == 524288);
    CHECK(plan_batch(4, 256, 0, 2).tokens_per_step == 2048);
    struct {
        int micro_batch, seq_len;
        int64_t global_batch;
        int ranks;
        bool is_default;
        const char* message;
    } const rows[] = {
        {4, 256, 1, 2, false, "x 2 ranks; try --global-batch 2048"},
        {8, 16, 16 * 12, 1, false, "try --micro-batch 6, or"},
        {3, 1024, 524288, 1, true, "the default --global-batch 524288 is not a multiple of 3072 tokens"},
        {1, 16, int64_t(1) << 40, 1, false, "takes 68,719,476,736 micro-steps of 16 tokens; at most 2,147,483,647"},
    };
    for (const auto& row : rows)
        CHECK_THROWS_WITH_AS(plan_batch(row.micro_batch, row.seq_len, row.global_batch, row.ranks, row.is_default),
                             doctest::Contains(row.message), Error);
}

static const GPT2Config config = {32, 300, 8, 2, 64};

TEST_CASE("a step is measured with fewer sequences, with one and two layers, or not at all, if it would take long") {
    // A sequence takes so many seconds, if the peak is true.
    const auto measured = [](double seconds) {
        const double flops = flops_per_token(config, 32) * 32;
        return measure_step(Dtype::bf16, config, 4, 32, {}, flops / (seconds * ASSUMED_MFU));
    };
    struct {
        double seconds;
        int B;
        bool of_two_layers;
    } const rows[] = {{0.1, 4, false}, {0.8, 2, false}, {14.0, 1, false}, {16.0, 1, true}};
    for (const auto& row : rows) {
        const auto step = measured(row.seconds);
        REQUIRE(step);
        CHECK((step->B == row.B && step->of_two_layers == row.of_two_layers));
        CHECK((step->micro_step > 0.0 && step->update > 0.0));
    }
    CHECK_FALSE(measured(80.0));
    const auto of_unknown_peak = measure_step(Dtype::bf16, config, 4, 32, {}, 0.0);
    REQUIRE(of_unknown_peak);
    CHECK((of_unknown_peak->B == 4 && !of_unknown_peak->of_two_layers));
    CHECK_FALSE(measure_step(Dtype::bf16, {1024, 50257, 48, 100, 25600}, 1, 1024, {}, 1e18));  // no memory
}

// ---- memory

static const int64_t plenty = int64_t(1) << 40;

static std::vector<MemoryItem> memory(Dtype dtype, int B, const MemoryOptions& options, int world_size = 1) {
    return training_memory(dtype, config, plan_batch(B, 32, 0, world_size), options);
}

TEST_CASE_TEMPLATE("training allocates the memory of the plan", floatX, float, bf16) {
    device_reserve_scratch(1 << 25);  // all models of the process share it, and the plan counts it separately
    for (const MemoryOptions& options : {MemoryOptions{Recompute::none, 4}, MemoryOptions{Recompute::gelu, 4, false},
                                         MemoryOptions{Recompute::layer, 4}, MemoryOptions{.fp8 = true},
                                         MemoryOptions{.muon = true}, MemoryOptions{.grad_accum = Dtype::bf16}}) {
        if (options.fp8 && dtype_of<floatX> == Dtype::fp32) continue;
        const int64_t before = device_bytes_allocated();
        GPT2<floatX> model(config, Purpose::train, 2, 32, options);
        Optimizer<floatX> optimizer(model, OptimizerConfig{}, options);
        int64_t planned = 0;
        for (const MemoryItem& item : memory(dtype_of<floatX>, 2, options))
            if (std::string(item.purpose) != "scratch" && std::string(item.purpose) != "loading") planned += item.bytes;
        const int64_t taken = device_bytes_allocated() - before;
        CHECK(taken >= planned);
        CHECK(double(taken) <= 1.01 * double(planned) + 4096);  // rounding of each block
    }
}

TEST_CASE("the largest micro-batch is the largest divisor that fits, on the CPU of 4096 tokens and in 9/10 of memory") {
    const auto on_gpu = [](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::bf16, config, 32, global_batch, 1, {}, available, true);
    };
    const auto gpu_bytes = [](int B) { return device_bytes(memory(Dtype::bf16, B, {}), true); };
    CHECK(on_gpu(32 * 24, gpu_bytes(13)) == 12);
    CHECK(on_gpu(32 * 24, gpu_bytes(12) - 1) == 8);
    CHECK(on_gpu(32 * 24, plenty) == 24);
    CHECK(on_gpu(0, gpu_bytes(13)) == 13);
    CHECK(on_gpu(0, plenty) == (1 << 20) / 32);
    const auto on_cpu = [](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::fp32, config, 32, global_batch, 1, {}, available, false);
    };
    const auto cpu_bytes = [](int B) { return device_bytes(memory(Dtype::fp32, B, {})); };
    CHECK(on_cpu(32 * 200, plenty) == 100);
    CHECK(on_cpu(0, plenty) == 4096 / 32);
    CHECK(on_cpu(0, cpu_bytes(13) * 10 / 9 + 1) == 13);
    CHECK(on_cpu(0, cpu_bytes(13)) < 13);
    CHECK(on_cpu(0, cpu_bytes(1)) == 1);
    CHECK_THROWS_WITH_AS(training_memory(Dtype::bf16, {32, 300, 3, 2, 72}, plan_batch(2, 32, 0, 1), {.fp8 = true}),
                         doctest::Contains("--precision fp8 needs a multiple of 16 channels"), Error);
}

TEST_CASE("a plan that does not fit names the options that would make it fit, and none that is given already") {
    // All rows have --logit-chunks 8. Only CPUs without a matrix unit save memory by it, and only their advice has it.
    const auto parsed = [](std::vector<const char*> options) {
        options.push_back("--logit-chunks=8");
        return train(options);
    };
    const auto bytes = [&](int B, const std::vector<const char*>& options, int ranks = 1) {
        return device_bytes(memory(Dtype::bf16, B, memory_options_of(parsed(options), ranks), ranks));
    };
    const char *layer = "--recompute=layer", *masters = "--master-weights=off", *codes = "--moments=8bit",
               *sums = "--grad-accum=bf16";
    struct {
        int B, ranks;
        std::vector<const char*> options;
        int64_t available;
        const char* advice;
    } const rows[] = {
        {4, 1, {}, bytes(4, {}), ""},
        {4, 1, {}, bytes(4, {}) - 1, "try PROGRAM --micro-batch auto"},
        {4,
         1,
         {},
         bytes(1, {layer, masters, codes}),
         "try PROGRAM --micro-batch auto --recompute layer --moments 8bit --master-weights off"},
        {1, 1, {}, bytes(1, {layer}), "try PROGRAM --recompute layer"},
        {1, 2, {}, bytes(1, {"--zero=1"}, 2), "try PROGRAM --zero 1"},
        {1, 2, {layer}, bytes(1, {layer, "--zero=2"}, 2), "try PROGRAM --zero 2"},
        {1, 2, {layer, "--zero=1"}, bytes(1, {layer, "--zero=3"}, 2), "try PROGRAM --zero 3"},
        {4,
         1,
         {layer},
         bytes(1, {layer, masters, codes, sums}) - 1,
         " are needed with --micro-batch auto --moments 8bit --master-weights off --grad-accum bf16; a smaller model "
         "fits: try PROGRAM --micro-batch auto --layers 4 --heads 1 --channels 32"},
        {1, 2, {layer, masters, codes, sums}, 1000, " are needed with --zero 3; try a smaller model, or more machines"},
        {1, 2, {layer, masters, codes, sums, "--zero=3"}, 1000, " are needed; try a smaller model, or more machines"},
    };
    for (const auto& row : rows) {
        Options options = parsed(row.options);
        options.command_line = "PROGRAM";
        const std::string advice = advise_memory(Dtype::bf16, options, config, plan_batch(row.B, 32, 0, row.ranks),
                                                 {row.available, row.ranks});
        CAPTURE(advice);
        CHECK(contains(advice, row.advice));
        CHECK(advice.empty() == !*row.advice);
    }
}

TEST_CASE("the cheapest set that fits has no option that it does not need") {
    const MemoryOptions chunks = {.logit_chunks = 8};
    const auto bytes = [](const MemoryOptions& options) { return device_bytes(memory(Dtype::bf16, 1, options)); };
    const auto text = [&](int64_t available) {
        const auto missing = [&](const MemoryOptions& o) { return std::max<int64_t>(0, bytes(o) - available); };
        return cheapest_savings(chunks, 1, missing).text;
    };
    CHECK(text(plenty) == "");
    CHECK(text(bytes({.recompute = Recompute::gelu, .logit_chunks = 8})) == " --recompute gelu");
    CHECK(text(bytes({.logit_chunks = 8, .moments = MomentDtype::block8})) == " --moments 8bit");
    CHECK(text(0) == " --recompute layer --moments 8bit --master-weights off --grad-accum bf16");
}

TEST_CASE("a model that never fits has a smaller one in its place: d36 to d12, or fewer heads and layers") {
    const auto smaller = [](std::vector<const char*> options, int64_t most_parameters) {
        const Options o = train(options);
        return smaller_model(o, model_config(o, 300), [&](const GPT2Config& c) {
            return SavingSet{" --recompute gelu", {}, int64_t(count_parameters(c)) > most_parameters};
        });
    };
    CHECK(smaller({"--model=d48"}, 1 << 30) == " --model d36 --recompute gelu");
    CHECK(smaller({"--model=d36"}, 1 << 30) == " --model d24 --recompute gelu");
    CHECK(smaller({"--model=d48", "--tensor-parallel=5"}, 1 << 29) ==
          " --layers 28 --heads 15 --channels 960 --recompute gelu in place of --model d48");
    CHECK(smaller({"--layers=3", "--heads=2", "--channels=72"}, 100000) ==
          " --layers 1 --heads 1 --channels 36 --recompute gelu");
    CHECK(smaller({"--layers=3", "--heads=2", "--channels=72"}, 1) == "");
    CHECK(smaller({"--model=d48", "--resume"}, 1 << 30) == "");
}

TEST_CASE("--memory is a number and a unit") {
    CHECK(parse_memory("1.25GiB") == 1342177280);
    CHECK(parse_memory("512 MB") == 512000000);
    CHECK(parse_memory("2T") == int64_t(2) << 40);
    for (const char* text : {"", "16", "GiB", "-1GiB", "16GB ", "1e30T", "16 gib", "nanG"})
        CHECK_THROWS_WITH_AS(parse_memory(text), doctest::Contains("is no size; give one such as 16GiB"), Error);
}

TEST_CASE("without memory for an allocation, the advice is that of the command") {
    for (const char* purpose : {"weights", "packed weights", "fp32 master weights (--master-weights, --zero)",
                                "AdamW's first moments (--zero)", "gradients"}) {
        CHECK(memory_advice(Command::train, purpose) == "try the options that plan --fits names");
        CHECK(contains(memory_advice(Command::eval, purpose), "try a machine with more"));
    }
    for (const char* purpose : {"activations and logits", "working memory of the operations", "the batch"}) {
        CHECK(contains(memory_advice(Command::train, purpose),
                       "lower --micro-batch, or try the options that plan --fits"));
        CHECK(memory_advice(Command::eval, purpose) == "lower --micro-batch or --seq-len");
        CHECK(contains(memory_advice(Command::generate, purpose), "try a machine with more"));
    }
}

// ---- the table at the start

static const DeviceInfo fake_device = {.name = "a device",
                                       .memory_bytes = int64_t(1) << 30,
                                       .peak_flops_bf16 = 4e12,
                                       .peak_flops_fp32 = 1e12,
                                       .peak_source = "a test"};

static Options training_options() {
    return train({"--layers=1", "--heads=1", "--channels=16", "--vocab-size=50", "--seq-len=8"});
}

// Returns the value of a row of the table; "" without the row.
static std::string row(Dtype dtype, const Options& options, const std::string& label, int64_t available = 0) {
    RunStart source = {};
    source.config = model_config(options);
    for (const Row& r : plan_table(dtype, options, source, plan_batch(2, 8, 0, 1), fake_device, {available}, nullptr))
        if (r.first == label) return r.second;
    return "";
}

TEST_CASE("the table has the peak of the run's precision, the memory, the batch, and no row that is unknown") {
    Options o = training_options();
    CHECK(row(Dtype::bf16, o, "device") == "a device; peak 4 TFLOP/s in bf16, a test");
    CHECK(row(Dtype::fp32, o, "device") == "a device; peak 1 TFLOP/s in fp32, a test");
    CHECK(contains(row(Dtype::fp32, o, "memory", plenty), " of 1.00 GiB available: weights "));  // the device's at most
    CHECK(row(Dtype::fp32, o, "data") == "");
    o.heads = o.tensor_parallel = 2;
    CHECK(row(Dtype::fp32, o, "batch") ==
          "16 tokens per step = 2 sequences x 8 tokens x 1 group of 2 tensor-parallel "
          "ranks x 1 micro-step");
    // The schedule has no final rate if the rate never falls.
    o.steps = 30, o.warmup_steps = 2;
    CHECK(row(Dtype::fp32, o, "schedule").starts_with("cosine, lr 0.0006, 2 steps warmup, to 0.1 of it at step 30; "));
    o.schedule = Decay::constant, o.warmup_steps = 1;
    CHECK(row(Dtype::fp32, o, "schedule") == "constant, lr 0.0006, 1 step warmup; AdamW 0.9/0.95, decay 0.1, clip 1");
    o.schedule = Decay::wsd, o.cooldown = 0.3;
    CHECK(contains(row(Dtype::fp32, o, "schedule"), "warmup, constant to step 21, to 0.1 of it at step 30; AdamW"));
}

// ---- mfu.h

TEST_CASE("d12 at 1024 tokens needs 803,261,952 FLOP per token, and MFU is a fraction of the peak") {
    // 6 * 124,439,808 + 6 * 12 * 768 * 1024
    const double flops = flops_per_token(config_by_name("d12"), 1024);
    CHECK(flops == 803261952.0);
    CHECK(flops_per_token(config_by_name("d48"), 256) == 6.0 * 1557611200.0 + 6.0 * 48 * 1600 * 256);
    // llm.c on 8 H100: 3,745,000 tokens/s, 38.0 % of 989 TFLOP/s each.
    CHECK(mfu(3745e3 / 8, flops, 989e12) == doctest::Approx(0.3802).epsilon(1e-3));
    CHECK(mfu(1000.0, flops, 0.0) == 0.0);
}

TEST_CASE("a device is found in the table by the whole words of its name, but no laptop GPU and no MIG slice") {
    for (const auto& [name, peak] :
         {std::pair("NVIDIA H100 80GB HBM3", 989.0), std::pair("NVIDIA H100 PCIe", 756.0),
          std::pair("NVIDIA GH200 480GB", 989.0), std::pair("NVIDIA A100-SXM4-80GB", 312.0),
          std::pair("NVIDIA L4", 121.0), std::pair("NVIDIA L40", 181.0), std::pair("NVIDIA GeForce RTX 4090 D", 147.0),
          std::pair("NVIDIA A10G", 0.0), std::pair("NVIDIA GeForce RTX 4090 Laptop GPU", 0.0),
          std::pair("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 0.0), std::pair("Tesla V100-SXM2-16GB", 0.0),
          std::pair("", 0.0)})
        CHECK(gpu_peak(name).bf16 == peak);
    for (const GpuPeak& row : gpu_peaks)  // none is hidden by a row above it
        CHECK(gpu_peak(std::string("NVIDIA ") + row.name).name == std::string(row.name));
}
