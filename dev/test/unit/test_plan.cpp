// test_plan.cpp: tests the arithmetic of batches, the table at the start, and the time of a step. Compares the memory
// of a plan with the memory that training allocates. test_late_ranks.cpp compares the bytes sent.
#include "train/plan.h"

#include <string>
#include <vector>

#include "data/dataloader.h"
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
    CHECK(plan_batch(1, 512, int64_t(1) << 39, 1).grad_accum_steps == 1 << 30);
    struct {
        int micro_batch, seq_len;
        int64_t global_batch;
        int ranks;
        bool is_default;
        const char* message;
    } const rows[] = {
        {4, 256, 1, 2, false, "x 2 ranks; try --global-batch 2048"},
        {4, 256, 1025, 1, false, "try --global-batch 1024"},
        {8, 16, 16 * 12, 1, false, "try --micro-batch 6, or"},
        {3, 1024, 524288, 1, true,
         "the default --global-batch 524288 is not a multiple of 3072 tokens = --micro-batch 3 x --seq-len 1024 x "
         "1 rank; try --micro-batch 2, or --global-batch 525312"},
        {1, 16, int64_t(1) << 40, 1, false,
         "--global-batch 1099511627776 takes 68,719,476,736 micro-steps of 16 tokens; at most 2,147,483,647 are "
         "supported"},
    };
    for (const auto& row : rows)
        CHECK_THROWS_WITH_AS(plan_batch(row.micro_batch, row.seq_len, row.global_batch, row.ranks, row.is_default),
                             doctest::Contains(row.message), Error);
}

// ---- the time of a step

static const GPT2Config config = {32, 300, 3, 2, 64};

TEST_CASE("a step is measured with fewer sequences, or not at all, if it would take too long") {
    const double flops = flops_per_token(config, 32) * 32;
    const auto measured = measure_step(Dtype::bf16, config, 4, 32, {}, 1e12);
    REQUIRE(measured);
    CHECK((measured->B == 4 && measured->micro_step > 0.0 && measured->update > 0.0));
    // Two sequences take 1.6 s.
    const auto slow = measure_step(Dtype::bf16, config, 4, 32, {}, flops * 2.5 / (2.0 * ASSUMED_MFU));
    REQUIRE(slow);
    CHECK(slow->B == 2);
    CHECK_FALSE(measure_step(Dtype::bf16, config, 4, 32, {}, flops / (7.0 * ASSUMED_MFU)));    // one takes 7 s
    CHECK_FALSE(measure_step(Dtype::bf16, {1024, 50257, 48, 100, 25600}, 1, 1024, {}, 1e18));  // no memory
}

// ---- memory

static const MemoryOptions none = {}, layer = {Recompute::layer}, bare = {Recompute::layer, 0, false};
static const int64_t plenty = int64_t(1) << 40;

static std::vector<MemoryItem> memory(Dtype dtype, int B, const MemoryOptions& options, int world_size = 1) {
    return training_memory(dtype, config, plan_batch(B, 32, 0, world_size), options);
}

TEST_CASE_TEMPLATE("training allocates the memory of the plan", floatX, float, bf16) {
    device_reserve_scratch(1 << 25);  // all models of the process share it, and the plan counts it separately
    for (const MemoryOptions& options : {MemoryOptions{Recompute::none, 4}, MemoryOptions{Recompute::gelu, 4, false},
                                         MemoryOptions{Recompute::layer, 4}, MemoryOptions{.fp8 = true}}) {
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

TEST_CASE("--recompute drops GELU's output, or all activations within a layer, in all layers but one") {
    const auto bytes = [](Recompute recompute) {
        return device_bytes(training_memory(Dtype::bf16, {64, 300, 5, 2, 64}, plan_batch(8, 64, 0, 1), {recompute}));
    };
    const int64_t row = int64_t(8) * 64 * 64 * int64_t(sizeof(bf16));  // (N, C)
    CHECK(bytes(Recompute::none) - bytes(Recompute::gelu) == 4 * 4 * row);
    // ln1, qkv, att, residual2, ln2, fc, gelu; the means, the deviations and lse are small.
    const int64_t saved = bytes(Recompute::none) - bytes(Recompute::layer);
    CHECK(saved >= 4 * 15 * row);
    CHECK(saved <= 4 * 16 * row);
}

TEST_CASE("without master weights bf16 takes 4 bytes per parameter less, and fp32 the same") {
    for (const Dtype dtype : {Dtype::bf16, Dtype::fp32})
        CHECK(device_bytes(memory(dtype, 2, layer)) - device_bytes(memory(dtype, 2, bare)) ==
              (dtype == Dtype::bf16 ? 4 * ParamLayout(config).total : 0));
}

TEST_CASE("FP8 refuses channels that are not a multiple of 16") {
    CHECK_THROWS_WITH_AS(training_memory(Dtype::bf16, {32, 300, 3, 2, 72}, plan_batch(2, 32, 0, 1), {.fp8 = true}),
                         doctest::Contains("--precision fp8 needs a multiple of 16 channels, and the model has 72"),
                         Error);
}

TEST_CASE("the largest micro-batch is the largest divisor that fits") {
    const auto largest = [](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::bf16, config, 32, global_batch, 1, {}, available, true);
    };
    const auto bytes = [](int B) { return device_bytes(memory(Dtype::bf16, B, {}), true); };
    CHECK(largest(32 * 24, bytes(13)) == 12);
    CHECK(largest(32 * 24, bytes(12) - 1) == 8);
    CHECK(largest(32 * 24, plenty) == 24);
    CHECK(largest(0, bytes(13)) == 13);
    CHECK(largest(0, plenty) == (1 << 20) / 32);
}

TEST_CASE("--micro-batch auto on the CPU takes up to 4096 tokens, and leaves a tenth of the memory free") {
    const auto largest = [](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::fp32, config, 32, global_batch, 1, {}, available, false);
    };
    const auto bytes = [](int B) { return device_bytes(memory(Dtype::fp32, B, {})); };
    CHECK(largest(0, plenty) == 4096 / 32);
    CHECK(largest(32 * 200, plenty) == 100);
    CHECK(largest(0, bytes(13) * 10 / 9 + 1) == 13);
    CHECK(largest(0, bytes(13)) < 13);
    CHECK(largest(0, bytes(1)) == 1);
    CHECK_THROWS_WITH_AS(largest(0, bytes(1) - 1), doctest::Contains("one sequence of 32 tokens needs"), Error);
    CHECK_THROWS_WITH_AS(largest_micro_batch(Dtype::bf16, config, 32, 0, 1, layer, 200000),
                         doctest::Contains("are free; try"), Error);
}

TEST_CASE("a plan that does not fit names the options that would make it fit, and none that is given already") {
    const auto bytes = [](int B, const MemoryOptions& options, int ranks = 1) {
        return device_bytes(memory(Dtype::bf16, B, options, ranks));
    };
    MemoryOptions zero3 = layer;
    zero3.shards = 2, zero3.shard_gradients = zero3.shard_weights = true;
    struct {
        int B, ranks;
        MemoryOptions options;
        int64_t available;
        const char* advice;
    } const rows[] = {
        {4, 1, none, bytes(4, none), ""},
        {4, 1, none, bytes(4, none) - 1, "try --micro-batch auto"},
        {4, 1, none, bytes(1, none) - 1, "try --micro-batch auto --recompute layer"},
        {4, 1, none, bytes(1, bare), "try --micro-batch auto --recompute layer --master-weights off"},
        {4, 1, none, bytes(1, bare) - 1, "try a smaller model, or --zero 3 on more machines"},
        {1, 1, none, bytes(1, layer), "try --recompute layer"},
        {4, 1, layer, bytes(1, bare), "try --micro-batch auto --master-weights off"},
        {1, 2, layer, bytes(1, zero3, 2), "try --zero 3"},
        {4, 2, zero3, bytes(1, zero3, 2), "try --micro-batch auto"},
        {1, 2, none, 1000, "try a smaller model, or --zero 3 on more machines"},  // ranks share a machine's memory
        {1, 2, zero3, 1000, "try a smaller model, or more machines"},
    };
    for (const auto& row : rows)
        CHECK(advise_memory(Dtype::bf16, config, plan_batch(row.B, 32, 0, row.ranks), row.options, row.available) ==
              row.advice);
}

TEST_CASE("a host buffer for loading the largest tensor counts only if the device uses the host's memory") {
    for (const auto& [shape, largest] : {std::pair(GPT2Config{32, 300, 1, 1, 64}, 384 * 64),    // wte
                                         std::pair(GPT2Config{32, 10, 1, 1, 64}, 256 * 64)}) {  // fcw
        const std::vector<MemoryItem> items = training_memory(Dtype::bf16, shape, plan_batch(1, 32, 0, 1), {});
        CHECK(device_bytes(items, false) - device_bytes(items, true) == largest * 4);
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
static std::string row(Dtype dtype, const Options& options, const std::string& label, int64_t available = 0,
                       const Corpus* data = nullptr) {
    RunStart source = {};
    source.config = model_config(options);
    for (const Row& r : plan_table(dtype, options, source, plan_batch(2, 8, 0, 1), fake_device, available, data))
        if (r.first == label) return r.second;
    return "";
}

TEST_CASE("the peak belongs to the run's precision, and the available memory is the device's at most") {
    const Options o = training_options();
    CHECK(row(Dtype::bf16, o, "device") == "a device; peak 4 TFLOP/s in bf16, a test");
    CHECK(row(Dtype::fp32, o, "device") == "a device; peak 1 TFLOP/s in fp32, a test");
    CHECK(row(Dtype::fp32, o, "memory", int64_t(1) << 29).find(" of 512 MiB available: weights ") != std::string::npos);
    CHECK(row(Dtype::fp32, o, "memory", plenty).find(" of 1.00 GiB available: weights ") != std::string::npos);
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
    CHECK(described("wsd", 0, 1) == "wsd, lr 0.0006, 0 steps warmup");
    CHECK(described("cosine", 3, 3) == "cosine, lr 0.0006, 3 steps warmup");
    CHECK(described("constant", 1, 30) == "constant, lr 0.0006, 1 step warmup");
}

TEST_CASE("counts of one are in the singular, and a row that is unknown is left out") {
    Options o = training_options();
    const Corpus corpus = {.shards = {{}}, .first_window = {}, .T = 8, .tokens = 9, .num_windows = 1, .fingerprint = 0};
    CHECK(row(Dtype::fp32, o, "data", 0, &corpus) == "1 shard, 9 tokens, 1 window of 8: an epoch is 0.5 steps");
    CHECK(row(Dtype::fp32, o, "batch") == "16 tokens per step = 2 sequences x 8 tokens x 1 rank x 1 micro-step");
    CHECK(row(Dtype::fp32, o, "data") == "");
    CHECK(row(Dtype::fp32, o, "network") == "");
    o.heads = o.tensor_parallel = 2;
    CHECK(row(Dtype::fp32, o, "batch").ends_with(" x 1 group of 2 tensor-parallel ranks x 1 micro-step"));
}

TEST_CASE("--sequence-parallel divides the tokens of a sequence") {
    const GPT2Config shape = {10, 300, 1, 4, 16};
    Options options = training_options();
    options.tensor_parallel = 4, options.sequence_parallel = true;
    CHECK_THROWS_WITH_AS(check_tensor_parallel(options, shape, 9, 4), doctest::Contains("; give --seq-len 8"), Error);
    check_tensor_parallel(options, shape, 8, 4);
}
