// test_plan.cpp: tests the arithmetic of batches, and compares the memory of a plan with the memory that training
// allocates.
#include "model/mfu.h"
#include "support/test.h"
#include "train/measure.h"
#include "train/optimizer.h"
#include "train/plan.h"

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
    CHECK_THROWS_WITH_AS(plan_batch(3, 1024, 524288, 1, true),
                         "--micro-batch 3 x --seq-len 1024 x 1 rank = 3072 tokens do not divide the default "
                         "--global-batch of 524288; try --micro-batch 2, or --global-batch 525312",
                         Error);
    CHECK(plan_batch(4, 1024, 524288, 1, true).grad_accum_steps == 128);
}

TEST_CASE("the first advice is a smaller micro-batch or fewer ranks, if these keep the global batch") {
    CHECK_THROWS_WITH_AS(plan_batch(2, 16, 32, 2),
                         "--global-batch 32 is not a multiple of 64 tokens = --micro-batch 2 x --seq-len 16 x 2 ranks; "
                         "try --micro-batch 1, or --global-batch 64",
                         Error);
    CHECK_THROWS_WITH_AS(plan_batch(8, 16, 16 * 12, 1), doctest::Contains("try --micro-batch 6, or"), Error);
    CHECK_THROWS_WITH_AS(plan_batch(2, 16, 32, 4),
                         doctest::Contains("x 4 ranks; try --micro-batch 1 on 2 ranks, or --global-batch 128"), Error);
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
    const auto measured = measure_step(dtype_of<floatX>, config, 4, 32, {}, 1e12, "adamw");
    REQUIRE(measured);
    CHECK(measured->B == 4);
    CHECK(measured->micro_step > 0.0);
    CHECK(measured->update > 0.0);
    const auto slow = measure_step(dtype_of<floatX>, config, 4, 32, {}, flops * 2.5 / (2.0 * ASSUMED_MFU),
                                   "adamw");  // two sequences take 1.6 s
    REQUIRE(slow);
    CHECK(slow->B == 2);
    CHECK_FALSE(
        measure_step(dtype_of<floatX>, config, 4, 32, {}, flops / (7.0 * ASSUMED_MFU), "adamw"));  // one takes 7 s
    CHECK_FALSE(
        measure_step(dtype_of<floatX>, {1024, 50257, 48, 100, 25600}, 1, 1024, {}, 1e18, "adamw"));  // no memory
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
        Optimizer<floatX> optimizer(model, OptimizerConfig{"adamw"}, options);
        const int64_t planned = planned_bytes(training_memory(dtype_of<floatX>, config, batch, options, "adamw"));
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
    CHECK_THROWS_WITH_AS(training_memory(Dtype::bf16, odd, batch, fp8, "adamw"),
                         doctest::Contains("--precision fp8 needs a multiple of 16 channels, and the model has 72"),
                         Error);
}

TEST_CASE("memory, micro-batch, advice and time are computed for the chosen optimizer") {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const BatchPlan batch = plan_batch(2, 32, 0, 1);
    const int64_t plenty = int64_t(1) << 40;
    CHECK_THROWS_AS(training_memory(Dtype::fp32, config, batch, {}, "no such rule"), Error);
    CHECK_THROWS_AS(largest_micro_batch(Dtype::fp32, config, 32, 0, 1, {}, plenty, "no such rule", false), Error);
    CHECK_THROWS_AS(advise_memory(Dtype::fp32, config, batch, {}, plenty, "no such rule"), Error);
    CHECK_THROWS_AS(measure_step(Dtype::fp32, config, 2, 32, {}, 1e12, "no such rule"), Error);
}

TEST_CASE("--recompute drops GELU's output, or all activations within a layer, in all layers but one") {
    const GPT2Config config = {64, 300, 5, 2, 64};
    const BatchPlan batch = plan_batch(8, 64, 0, 1);
    const auto bytes = [&](Recompute recompute) {
        return planned_bytes(training_memory(Dtype::bf16, config, batch, {recompute}, "adamw"));
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
    CHECK(total_bytes(training_memory(Dtype::bf16, config, batch, {}, "adamw")) -
              total_bytes(training_memory(Dtype::bf16, config, batch, without, "adamw")) ==
          4 * ParamLayout(config).total);
    CHECK(total_bytes(training_memory(Dtype::fp32, config, batch, {}, "adamw")) ==
          total_bytes(training_memory(Dtype::fp32, config, batch, without, "adamw")));
}

template <class floatX>
static void through_optimizer(bool master_weights) {
    const GPT2Config config = {32, 300, 2, 2, 64};
    GPT2<floatX> model(config, Purpose::train, 1, 32);
    Optimizer<floatX> optimizer(model, OptimizerConfig{"adamw"}, {Recompute::none, 0, master_weights});
    for (const Param p : {wte, lnfb, fcw, fcprojb})
        for (int l = 0; l < model.layout.layers(p); l++) {
            std::vector<float> values(model.layout.size(p)), back(model.layout.size(p), NAN);
            init_param(values.data(), model.config, p, l, 5, 0, model.layout.size(p));
            for (float& x : values) x += 0.3f;
            optimizer.set_state(WEIGHTS, p, l, values.data());
            optimizer.get_state(back.data(), WEIGHTS, p, l);
            const bool kept = master_weights || sizeof(floatX) == sizeof(float);
            for (float& x : values) x = kept ? x : float(floatX(x));
            CHECK(back == values);
        }
}

TEST_CASE_TEMPLATE("get_state returns what set_state stored, in master weights or without them", floatX, float, bf16) {
    for (const bool master_weights : {true, false}) through_optimizer<floatX>(master_weights);
}

TEST_CASE("the largest micro-batch is the largest divisor that fits") {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const auto largest = [&](int64_t global_batch, int64_t available) {
        return largest_micro_batch(Dtype::bf16, config, 32, global_batch, 1, {}, available, "adamw", true);
    };
    const auto bytes = [&](int B) {
        return device_bytes(training_memory(Dtype::bf16, config, plan_batch(B, 32, 0, 1), {}, "adamw"), true);
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
        return largest_micro_batch(Dtype::fp32, config, 32, global_batch, 1, {}, available, "adamw", false);
    };
    const auto bytes = [&](int B) {
        return total_bytes(training_memory(Dtype::fp32, config, plan_batch(B, 32, 0, 1), {}, "adamw"));
    };
    const int64_t plenty = int64_t(1) << 40;
    CHECK(largest(0, plenty) == 4096 / 32);
    CHECK(largest(32 * 200, plenty) == 100);
    CHECK(largest_micro_batch(Dtype::fp32, wide, 8192, 0, 1, {}, plenty, "adamw", false) == 1);
    CHECK(largest(0, bytes(13) * 10 / 9 + 1) == 13);
    CHECK(largest(0, bytes(13)) < 13);
    CHECK(largest(0, bytes(1)) == 1);
    CHECK_THROWS_WITH_AS(largest(0, bytes(1) - 1), doctest::Contains("one sequence of 32 tokens needs"), Error);
}

TEST_CASE("a plan that does not fit names the options that would make it fit") {
    const GPT2Config config = {32, 300, 6, 2, 64};
    const BatchPlan batch = plan_batch(4, 32, 0, 1);
    const auto bytes = [&](int B, MemoryOptions options) {
        return device_bytes(training_memory(Dtype::bf16, config, plan_batch(B, 32, 0, 1), options, "adamw"));
    };
    const MemoryOptions none = {}, layer = {Recompute::layer}, bare = {Recompute::layer, 0, false};
    const auto advice = [&](int64_t available) {
        return advise_memory(Dtype::bf16, config, batch, none, available, "adamw");
    };
    CHECK(bytes(1, layer) < bytes(1, none));
    CHECK(advice(bytes(4, none)) == "");
    CHECK(advice(bytes(4, none) - 1) == "try --micro-batch auto");
    CHECK(advice(bytes(1, none)) == "try --micro-batch auto");
    CHECK(advice(bytes(1, none) - 1) == "try --micro-batch auto --recompute layer");
    CHECK(advice(bytes(1, layer) - 1) == "try --micro-batch auto --recompute layer --master-weights off");
    CHECK(advice(bytes(1, bare)) == advice(bytes(1, layer) - 1));
    CHECK(advice(bytes(1, bare) - 1).starts_with("try a smaller model"));
    CHECK(advise_memory(Dtype::fp32, config, batch, none, 1000, "adamw").starts_with("try a smaller model"));
}

TEST_CASE("the advice names no option that is given already, or at its maximum") {
    const GPT2Config config = {32, 300, 6, 2, 64};
    const auto advice = [&](int B, int world_size, MemoryOptions options, int64_t available) {
        return advise_memory(Dtype::bf16, config, plan_batch(B, 32, 0, world_size), options, available, "adamw");
    };
    const auto bytes = [&](int world_size, const MemoryOptions& options) {
        return device_bytes(training_memory(Dtype::bf16, config, plan_batch(1, 32, 0, world_size), options, "adamw"));
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
    CHECK_THROWS_WITH_AS(largest_micro_batch(Dtype::bf16, config, 32, 0, 1, layer, bytes(1, bare), "adamw"),
                         doctest::Contains("are free; try --master-weights off"), Error);
}

TEST_CASE("memory for loading counts only if the device uses the host's memory") {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const std::vector<MemoryItem> items = training_memory(Dtype::bf16, config, plan_batch(2, 32, 0, 1), {}, "adamw");
    int64_t loading = 0;
    for (const MemoryItem& item : items) loading += std::string(item.purpose) == "loading" ? item.bytes : 0;
    CHECK(loading > 0);
    CHECK(device_bytes(items, true) == total_bytes(items) - loading);
    CHECK(device_bytes(items, false) == total_bytes(items));
    CHECK(device_bytes(items) == device_bytes(items, !device_memory_is_host()));
}

TEST_CASE("the plan counts a host buffer of the largest tensor") {
    const GPT2Config embedding = {32, 300, 1, 1, 64}, matrix = {32, 10, 1, 1, 64};  // wte, and fcw of 256 x 64
    const BatchPlan batch = plan_batch(1, 32, 0, 1);
    CHECK(training_memory(Dtype::fp32, embedding, batch, {}, "adamw").back().bytes == int64_t(embedding.Vp()) * 64 * 4);
    CHECK(training_memory(Dtype::bf16, embedding, batch, {}, "adamw").back().bytes == int64_t(embedding.Vp()) * 64 * 4);
    CHECK(training_memory(Dtype::fp32, matrix, batch, {}, "adamw").back().bytes == 256 * 64 * 4);
}
