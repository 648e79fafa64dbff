// test_plan.cpp: tests the arithmetic of batches, the table at the start, and the time of a step. Compares the memory
// of a plan with the memory that training allocates, and the bytes sent with the collectives, counted one by one.
#include "train/plan.h"

#include "data/dataloader.h"
#include "model/mfu.h"
#include "train/options.h"
#include "support/test.h"
#include "train/optimizer.h"
#include "train/run.h"

TEST_CASE("a global batch is micro-batches x ranks x micro-steps") {
    const BatchPlan plan = plan_batch(16, 1024, 524288, 4);
    CHECK(plan.grad_accum_steps == 8);
    CHECK(plan.tokens_per_step == 524288);
    CHECK(plan_batch(4, 256, 0, 2).tokens_per_step == 2048);
    CHECK(plan_batch(4, 256, 0, 2).grad_accum_steps == 1);
}

TEST_CASE("a global batch that does not divide is refused with the arithmetic and the nearest valid one") {
    CHECK_THROWS_WITH_AS(
        plan_batch(16, 1024, 500000, 1),
        "--global-batch 500000 is not a multiple of 16384 tokens = --micro-batch 16 x --seq-len 1024 x "
        "1 rank; try --global-batch 507904",
        Error);
    CHECK_THROWS_WITH_AS(plan_batch(4, 256, 1, 2), doctest::Contains("x 2 ranks; try --global-batch 2048"), Error);
    CHECK_THROWS_WITH_AS(plan_batch(4, 256, 1025, 1), doctest::Contains("try --global-batch 1024"), Error);
}

TEST_CASE("a default global batch is not blamed on the user") {
    CHECK_THROWS_WITH_AS(
        plan_batch(3, 1024, 524288, 1, true),
        "the default --global-batch 524288 is not a multiple of 3072 tokens = --micro-batch 3 x --seq-len "
        "1024 x 1 rank; try --micro-batch 2, or --global-batch 525312",
        Error);
    CHECK(plan_batch(4, 1024, 524288, 1, true).grad_accum_steps == 128);
}

TEST_CASE("the first advice is a smaller micro-batch, if it keeps the global batch") {
    CHECK_THROWS_WITH_AS(plan_batch(2, 16, 32, 2),
                         "--global-batch 32 is not a multiple of 64 tokens = --micro-batch 2 x --seq-len 16 x 2 ranks; "
                         "try --micro-batch 1, or --global-batch 64",
                         Error);
    CHECK_THROWS_WITH_AS(plan_batch(8, 16, 16 * 12, 1), doctest::Contains("try --micro-batch 6, or"), Error);
}

TEST_CASE("a global batch of more than 2^31 - 1 micro-steps is refused") {
    CHECK_THROWS_WITH_AS(plan_batch(1, 16, int64_t(1) << 40, 1),
                         "--global-batch 1099511627776 takes 68,719,476,736 micro-steps of 16 tokens; at most "
                         "2,147,483,647 are supported",
                         Error);
    CHECK(plan_batch(1, 512, int64_t(1) << 39, 1).grad_accum_steps == 1 << 30);
}

TEST_CASE_TEMPLATE("a step is measured with fewer sequences if the micro-batch would take too long", floatX, float,
                   bf16) {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const double flops = flops_per_token(config, 32) * 32;
    const auto measured = measure_step(dtype_of<floatX>, config, 4, 32, {}, 1e12);
    REQUIRE(measured);
    CHECK(measured->B == 4);
    CHECK(measured->micro_step > 0.0);
    CHECK(measured->update > 0.0);
    // Two sequences take 1.6 s.
    const auto slow = measure_step(dtype_of<floatX>, config, 4, 32, {}, flops * 2.5 / (2.0 * ASSUMED_MFU));
    REQUIRE(slow);
    CHECK(slow->B == 2);
    CHECK_FALSE(measure_step(dtype_of<floatX>, config, 4, 32, {}, flops / (7.0 * ASSUMED_MFU)));    // one takes 7 s
    CHECK_FALSE(measure_step(dtype_of<floatX>, {1024, 50257, 48, 100, 25600}, 1, 1024, {}, 1e18));  // no memory
}

static int64_t planned_bytes(const std::vector<MemoryItem>& items) {
    int64_t planned = 0;
    for (const MemoryItem& item : items)
        if (std::string(item.purpose) != "scratch" && std::string(item.purpose) != "loading") planned += item.bytes;
    return planned;
}

TEST_CASE_TEMPLATE("training allocates the memory of the plan", floatX, float, bf16) {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const BatchPlan batch = plan_batch(2, 32, 0, 1);
    device_reserve_scratch(1 << 25);  // all models of the process share it, and the plan counts it separately
    for (const Recompute recompute : {Recompute::none, Recompute::gelu, Recompute::layer}) {
        const MemoryOptions options = {recompute, 4,
                                       recompute != Recompute::gelu};  // one of the three cases has no master weights
        const int64_t before = device_bytes_allocated();
        GPT2<floatX> model(config, Purpose::train, batch.B, batch.T, options);
        Optimizer<floatX> optimizer(model, OptimizerConfig{}, options);
        const int64_t planned = planned_bytes(training_memory(dtype_of<floatX>, config, batch, options));
        const int64_t taken = device_bytes_allocated() - before;
        CHECK(model.logit_rows == 16);
        CHECK(taken >= planned);
        CHECK(double(taken) <= 1.01 * double(planned) + 4096);  // rounding of each block
    }
}

TEST_CASE("FP8 takes the memory of the plan, and refuses channels that are not a multiple of 16") {
    const BatchPlan batch = plan_batch(2, 32, 0, 1);
    const MemoryOptions fp8 = {.fp8 = true};
    const GPT2Config config = {32, 300, 3, 2, 64}, odd = {32, 300, 3, 2, 72};
    device_reserve_scratch(1 << 25);
    const int64_t before = device_bytes_allocated();
    const GPT2<bf16> model(config, Purpose::train, batch.B, batch.T, fp8);
    const int64_t taken = device_bytes_allocated() - before;
    const int64_t planned = planned_bytes(model_memory<bf16>(config, Purpose::train, batch.B, batch.T, fp8));
    CHECK(taken >= planned);
    CHECK(double(taken) <= 1.01 * double(planned) + 4096);
    CHECK(planned > planned_bytes(model_memory<bf16>(config, Purpose::train, batch.B, batch.T)));
    CHECK_THROWS_WITH_AS(training_memory(Dtype::bf16, odd, batch, fp8),
                         doctest::Contains("--precision fp8 needs a multiple of 16 channels, and the model has 72"),
                         Error);
}

TEST_CASE("--recompute drops GELU's output, or all activations within a layer, in all layers but one") {
    const GPT2Config config = {64, 300, 5, 2, 64};
    const BatchPlan batch = plan_batch(8, 64, 0, 1);
    const auto bytes = [&](Recompute recompute) {
        return planned_bytes(training_memory(Dtype::bf16, config, batch, {recompute}));
    };
    const int64_t row = int64_t(8) * 64 * 64 * int64_t(sizeof(bf16));  // (N, C)
    CHECK(bytes(Recompute::none) - bytes(Recompute::gelu) == 4 * 4 * row);
    // ln1, qkv, att, residual2, ln2, fc, gelu; the means, the deviations and lse are small.
    const int64_t saved = bytes(Recompute::none) - bytes(Recompute::layer);
    CHECK(saved >= 4 * 15 * row);
    CHECK(saved <= 4 * 16 * row);
}

TEST_CASE("without master weights bf16 takes 4 bytes per parameter less, and fp32 the same") {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const BatchPlan batch = plan_batch(2, 32, 0, 1);
    const MemoryOptions without = {Recompute::none, 0, false};
    CHECK(device_bytes(training_memory(Dtype::bf16, config, batch, {})) -
              device_bytes(training_memory(Dtype::bf16, config, batch, without)) ==
          4 * ParamLayout(config).total);
    CHECK(device_bytes(training_memory(Dtype::fp32, config, batch, {})) ==
          device_bytes(training_memory(Dtype::fp32, config, batch, without)));
}

TEST_CASE("the largest micro-batch is the largest divisor that fits") {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const auto largest = [&](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::bf16, config, 32, global_batch, 1, {}, available, true);
    };
    const auto bytes = [&](int B) {
        return device_bytes(training_memory(Dtype::bf16, config, plan_batch(B, 32, 0, 1), {}), true);
    };
    CHECK(largest(32 * 24, bytes(13)) == 12);
    CHECK(largest(32 * 24, bytes(12)) == 12);
    CHECK(largest(32 * 24, bytes(12) - 1) == 8);
    CHECK(largest(32 * 24, int64_t(1) << 40) == 24);
    CHECK(largest(0, bytes(13)) == 13);
    CHECK(largest(0, int64_t(1) << 60) == (1 << 20) / 32);
    CHECK_THROWS_WITH_AS(largest(32 * 24, bytes(1) - 1), doctest::Contains("one sequence of 32 tokens needs"), Error);
}

TEST_CASE("--micro-batch auto on the CPU takes up to 4096 tokens, and leaves a tenth of the memory free") {
    const GPT2Config config = {32, 300, 3, 2, 64}, wide = {8192, 300, 3, 2, 64};
    const auto largest = [&](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::fp32, config, 32, global_batch, 1, {}, available, false);
    };
    const auto bytes = [&](int B) {
        return device_bytes(training_memory(Dtype::fp32, config, plan_batch(B, 32, 0, 1), {}));
    };
    const int64_t plenty = int64_t(1) << 40;
    CHECK(largest(0, plenty) == 4096 / 32);
    CHECK(largest(32 * 200, plenty) == 100);
    CHECK(largest_micro_batch(Dtype::fp32, wide, 8192, 0, 1, {}, plenty, false) == 1);
    CHECK(largest(0, bytes(13) * 10 / 9 + 1) == 13);
    CHECK(largest(0, bytes(13)) < 13);
    CHECK(largest(0, bytes(1)) == 1);
    CHECK_THROWS_WITH_AS(largest(0, bytes(1) - 1), doctest::Contains("one sequence of 32 tokens needs"), Error);
}

TEST_CASE("a plan that does not fit names the options that would make it fit") {
    const GPT2Config config = {32, 300, 6, 2, 64};
    const BatchPlan batch = plan_batch(4, 32, 0, 1);
    const auto bytes = [&](int B, MemoryOptions options) {
        return device_bytes(training_memory(Dtype::bf16, config, plan_batch(B, 32, 0, 1), options));
    };
    const MemoryOptions none = {}, layer = {Recompute::layer}, bare = {Recompute::layer, 0, false};
    const auto advice = [&](int64_t available) { return advise_memory(Dtype::bf16, config, batch, none, available); };
    CHECK(bytes(1, layer) < bytes(1, none));
    CHECK(advice(bytes(4, none)) == "");
    CHECK(advice(bytes(4, none) - 1) == "try --micro-batch auto");
    CHECK(advice(bytes(1, none)) == "try --micro-batch auto");
    CHECK(advice(bytes(1, none) - 1) == "try --micro-batch auto --recompute layer");
    CHECK(advice(bytes(1, layer) - 1) == "try --micro-batch auto --recompute layer --master-weights off");
    CHECK(advice(bytes(1, bare)) == advice(bytes(1, layer) - 1));
    CHECK(advice(bytes(1, bare) - 1).starts_with("try a smaller model"));
    CHECK(advise_memory(Dtype::fp32, config, batch, none, 1000).starts_with("try a smaller model"));
}

TEST_CASE("the advice names no option that is given already, or at its maximum") {
    const GPT2Config config = {32, 300, 6, 2, 64};
    const auto advice = [&](int B, int world_size, MemoryOptions options, int64_t available) {
        return advise_memory(Dtype::bf16, config, plan_batch(B, 32, 0, world_size), options, available);
    };
    const auto bytes = [&](int world_size, const MemoryOptions& options) {
        return device_bytes(training_memory(Dtype::bf16, config, plan_batch(1, 32, 0, world_size), options));
    };
    const MemoryOptions none = {}, layer = {Recompute::layer}, bare = {Recompute::layer, 0, false};
    CHECK(advice(1, 1, none, bytes(1, layer)) == "try --recompute layer");
    CHECK(advice(1, 1, layer, bytes(1, bare)) == "try --master-weights off");
    CHECK(advice(4, 1, layer, bytes(1, bare)) == "try --micro-batch auto --master-weights off");
    MemoryOptions zero3 = layer;
    zero3.shards = 2, zero3.shard_gradients = zero3.shard_weights = true;
    CHECK(advice(1, 2, layer, bytes(2, zero3)) == "try --zero 3");
    CHECK(advice(4, 2, zero3, bytes(2, zero3)) == "try --micro-batch auto");
    // More ranks on a machine share its memory.
    CHECK(advice(1, 2, none, 1000) == "try a smaller model, or --zero 3 on more machines");
    CHECK(advice(1, 2, zero3, 1000) == "try a smaller model, or more machines");
    CHECK_THROWS_WITH_AS(largest_micro_batch(Dtype::bf16, config, 32, 0, 1, layer, bytes(1, bare)),
                         doctest::Contains("are free; try --master-weights off"), Error);
}

TEST_CASE("memory for loading counts only if the device uses the host's memory") {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const std::vector<MemoryItem> items = training_memory(Dtype::bf16, config, plan_batch(2, 32, 0, 1), {});
    int64_t loading = 0;
    for (const MemoryItem& item : items) loading += std::string(item.purpose) == "loading" ? item.bytes : 0;
    CHECK(loading > 0);
    CHECK(device_bytes(items, true) == device_bytes(items, false) - loading);
    CHECK(device_bytes(items, false) == device_bytes(items, false));
    CHECK(device_bytes(items) == device_bytes(items, !device_memory_is_host()));
}

TEST_CASE("the plan counts a host buffer of the largest tensor") {
    const GPT2Config embedding = {32, 300, 1, 1, 64}, matrix = {32, 10, 1, 1, 64};  // wte, and fcw of 256 x 64
    const BatchPlan batch = plan_batch(1, 32, 0, 1);
    CHECK(training_memory(Dtype::fp32, embedding, batch, {}).back().bytes == int64_t(embedding.Vp()) * 64 * 4);
    CHECK(training_memory(Dtype::bf16, embedding, batch, {}).back().bytes == int64_t(embedding.Vp()) * 64 * 4);
    CHECK(training_memory(Dtype::fp32, matrix, batch, {}).back().bytes == 256 * 64 * 4);
}

// ---- the table at the start

static const DeviceInfo fake_device = {.name = "a device",
                                       .memory_bytes = int64_t(1) << 30,
                                       .peak_flops_bf16 = 4e12,
                                       .peak_flops_fp32 = 1e12,
                                       .peak_source = "a test"};

static const char* const arguments[] = {"train_gpt2", "--train-data", "x",  "--layers",     "1",  "--heads",
                                        "1",          "--channels",   "16", "--vocab-size", "50", "--seq-len",
                                        "8"};

static Options training_options() { return parse_options(int(std::size(arguments)), arguments); }

// Returns the value of a row of the table; "" without the row.
static std::string row(Dtype dtype, const Options& options, const std::string& label, int64_t available = 0,
                       const Corpus* data = nullptr) {
    RunStart source = {};
    source.config = model_config(options);
    for (const Row& r : plan_table(dtype, options, source, plan_batch(2, 8, 0, 1), fake_device, available, data))
        if (r.first == label) return r.second;
    return "";
}

TEST_CASE("the peak belongs to the run's precision") {
    const Options o = training_options();
    CHECK(peak_flops(fake_device, Dtype::bf16) == 4e12);
    CHECK(row(Dtype::bf16, o, "device") == "a device; peak 4 TFLOP/s in bf16, a test");
    CHECK(row(Dtype::fp32, o, "device") == "a device; peak 1 TFLOP/s in fp32, a test");
}

TEST_CASE("a plan names the available memory, and advice if the run does not fit") {
    const Options o = training_options();
    const std::string alone = row(Dtype::fp32, o, "memory"), needed = alone.substr(0, alone.find(':'));
    const std::string plenty = row(Dtype::fp32, o, "memory", int64_t(1) << 29);
    CHECK(plenty.starts_with(needed + " of 512 MiB available: weights "));
    CHECK(plenty.find("does not fit") == std::string::npos);
    CHECK(plenty.find(", moments ") != std::string::npos);
    CHECK(row(Dtype::fp32, o, "memory", int64_t(1) << 60).starts_with(needed + " of 1.00 GiB available: "));
    CHECK(row(Dtype::fp32, o, "memory", 1000)
              .starts_with(needed + " of 1000 B available, does not fit: try a smaller model"));
}

TEST_CASE("the schedule is described without a final rate if the rate never falls") {
    const auto described = [](const char* schedule, int64_t warmup, int64_t steps) {
        Options options = training_options();
        options.schedule = schedule, options.warmup_steps = warmup, options.steps = steps;
        const std::string text = row(Dtype::fp32, options, "schedule");
        CHECK(text.ends_with("; AdamW 0.9/0.95, decay 0.1, clip 1"));
        return text.substr(0, text.find(';'));
    };
    CHECK(described("cosine", 2, 30) == "cosine, lr 0.0006, 2 steps warmup, to 0.1 of it at step 30");
    CHECK(described("linear", 1, 2) == "linear, lr 0.0006, 1 step warmup, to 0.1 of it at step 2");
    CHECK(described("wsd", 0, 1) == "wsd, lr 0.0006, 0 steps warmup");
    CHECK(described("cosine", 3, 3) == "cosine, lr 0.0006, 3 steps warmup");
    CHECK(described("constant", 1, 30) == "constant, lr 0.0006, 1 step warmup");
}

TEST_CASE("counts of one are in the singular, and a row that is unknown is left out") {
    Options o = training_options();
    const Corpus corpus = {.shards = {{}}, .first_window = {}, .T = 8, .tokens = 9, .num_windows = 1, .fingerprint = 0};
    CHECK(row(Dtype::fp32, o, "data", 0, &corpus) == "1 shard, 9 tokens, 1 window of 8: an epoch is 0.5 steps");
    CHECK(row(Dtype::fp32, o, "batch") == "16 tokens per step = 2 sequences x 8 tokens x 1 rank x 1 micro-step");
    CHECK(row(Dtype::fp32, o, "model").starts_with("1 layer, 1 head, 16 channels, 8 positions, vocabulary 50 "));
    CHECK(row(Dtype::fp32, o, "data") == "");
    CHECK(row(Dtype::fp32, o, "network") == "");
    o.heads = o.tensor_parallel = 2;
    CHECK(row(Dtype::fp32, o, "batch").ends_with(" x 1 group of 2 tensor-parallel ranks x 1 micro-step"));
}

TEST_CASE("--sequence-parallel divides the tokens of a sequence") {
    const GPT2Config config = {10, 300, 1, 4, 16};
    Options options = training_options();
    options.tensor_parallel = 4, options.sequence_parallel = true;
    CHECK_THROWS_WITH_AS(check_tensor_parallel(options, config, 9, 4), doctest::Contains("; give --seq-len 8"), Error);
    check_tensor_parallel(options, config, 8, 4);
}

static const GPT2Config small = {32, 300, 4, 4, 64};

static int64_t sent_by(Dtype dtype, const Options& options, int ranks, int micro_steps, int B = 1, int T = 32) {
    return sent_bytes(dtype, small, options, {B, T, ranks, micro_steps, 0});
}

TEST_CASE("each stage of ZeRO sends gradients and weights as often as it needs them") {
    constexpr int n = 4, steps = 3;
    const ParamLayout layout(small, n);
    const int64_t share = layout.total / n * (n - 1), layers = 2 * layout.layer_stride / n * (n - 1);
    const int64_t stats = 2 * step_stats_bytes(layout, n, n) / n * (n - 1);
    for (const Dtype dtype : {Dtype::fp32, Dtype::bf16})
        for (const char* grad_dtype : {"fp32", "bf16"}) {
            const int64_t weight = dtype == Dtype::fp32 ? 4 : 2, gradient = grad_dtype == std::string("fp32") ? 4 : 2;
            const auto sent = [&](int zero) {
                Options options = training_options();
                options.zero = zero, options.grad_dtype = grad_dtype;
                return sent_by(dtype, options, n, steps);
            };
            CHECK(sent(0) == 2 * share * gradient + stats);
            CHECK(sent(1) == share * (gradient + weight) + stats);
            CHECK(sent(2) == share * (steps * gradient + weight) + stats);
            // Forward gathers two of the four layers and backward two; the others are in memory.
            CHECK(sent(3) == share * (steps * gradient + weight) + (2 * steps - 1) * layers * weight + stats);
        }
}

TEST_CASE("one rank sends nothing, and virtual ranks send their sum") {
    Options options = training_options();
    for (options.zero = 0; options.zero <= 3; options.zero++) CHECK(sent_by(Dtype::fp32, options, 1, 3) == 0);
    options.zero = 2, options.deterministic_ranks = 8;
    const ParamLayout layout(small, 8);  // padded for the virtual ranks
    const int64_t share = layout.total / 2 * 4;
    CHECK(sent_by(Dtype::fp32, options, 2, 8) == 2 * share + share + step_stats_bytes(layout, 8, 2));
}

TEST_CASE("tensor parallelism sends activations, and divides the gradients") {
    constexpr int64_t N = 96;
    for (const int tp : {2, 4})
        for (const Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
            const int64_t whole = N * small.C * (dtype == Dtype::fp32 ? 4 : 2), pass = whole / tp * (tp - 1);
            const int64_t partials = N * 8 * (tp - 1);
            Options options = training_options();
            options.tensor_parallel = tp;
            const auto sent = [&] { return sent_by(dtype, options, 2, 2, 3, int(N) / 3); };
            int64_t per_micro_step = partials + 2 * pass + 2 * pass;  // embedding's output, gradient of lnf
            for (int l = 0; l < small.L; l++) per_micro_step += 2 * (pass + pass) + 2 * (pass + pass);
            const ParamLayout layout(small, 2, {0, tp});
            const int64_t gradients = 2 * layout.total / 2 * 4;  // an all-reduce of two ranks
            const int64_t stats = 2 * (step_stats_bytes(layout, 2, 2 * tp) / (2 * tp) * (2 * tp - 1));
            CHECK(sent() == 2 * per_micro_step + gradients + stats);
            options.recompute = "layer";  // attproj's output of three layers
            CHECK(sent() == 2 * (per_micro_step + 3 * 2 * pass) + gradients + stats);

            options.recompute = "none", options.sequence_parallel = true;
            per_micro_step = partials + 4 * pass;  // scatter embedding, gather lnf, scatter its gradient, gather dx
            for (int l = 0; l < small.L; l++) per_micro_step += 4 * pass + 6 * pass;
            // In each bucket as many as in a layer's: LayerNorm's four, and two biases.
            const int64_t over_rows = (1 + small.L) * 6 * int64_t(small.C);
            CHECK(sent() == 2 * per_micro_step + gradients + stats + 2 * over_rows * 4 / tp * (tp - 1));
        }
}
