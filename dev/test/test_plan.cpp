// test_plan.cpp: batch arithmetic, and that the memory a model takes is the memory the plan names.
#include "../../llmc/optimizer.h"
#include "../../llmc/plan.h"
#include "test.h"

TEST_CASE("a global batch is micro-batches x ranks x micro-steps") {
    const BatchPlan plan = plan_batch(16, 1024, 524288, 4);
    CHECK(plan.grad_accum_steps == 8);
    CHECK(plan.tokens_per_step == 524288);
    CHECK(plan_batch(4, 256, 0, 2).tokens_per_step == 2048);
    CHECK(plan_batch(4, 256, 0, 2).grad_accum_steps == 1);
}

TEST_CASE("a global batch that does not divide is refused with the arithmetic and the nearest that does") {
    CHECK_THROWS_WITH_AS(plan_batch(16, 1024, 500000, 1),
                         "--global-batch 500000 is not a multiple of 16384 tokens = --micro-batch 16 x --seq-len 1024 x "
                         "1 rank; try 507904",
                         Error);
    CHECK_THROWS_WITH_AS(plan_batch(4, 256, 1, 2), doctest::Contains("x 2 ranks; try 2048"), Error);
    CHECK_THROWS_WITH_AS(plan_batch(4, 256, 1025, 1), doctest::Contains("try 1024"), Error);
}

TEST_CASE_TEMPLATE("training allocates what the plan names", floatX, float, bf16) {
    const GPT2Config config = {32, 300, 3, 2, 64};
    const BatchPlan batch = plan_batch(2, 32, 0, 1);
    device_reserve_scratch(1 << 25);  // shared by all models of the process, and counted apart
    const int64_t before = device_bytes_allocated();
    GPT2<floatX> model(config, Purpose::train, batch.B, batch.T, 16);
    AdamW<floatX> optimizer(model, AdamWConfig{});
    int64_t planned = 0;
    for (const MemoryItem& item : training_memory<floatX>(config, batch, 16))
        if (std::string(item.purpose) != "scratch" && std::string(item.purpose) != "loading") planned += item.bytes;
    const int64_t taken = device_bytes_allocated() - before;
    CHECK(taken >= planned);
    CHECK(double(taken) <= 1.01 * double(planned) + 4096);  // rounding of each block
}

TEST_CASE("the plan counts the largest tensor on its way to the device") {
    const GPT2Config embedding = {32, 300, 1, 1, 64}, matrix = {32, 10, 1, 1, 64};  // wte, and fcw of 256 x 64
    const BatchPlan batch = plan_batch(1, 32, 0, 1);
    CHECK(training_memory<float>(embedding, batch, 0).back().bytes == int64_t(embedding.Vp()) * 64 * 4);
    CHECK(training_memory<bf16>(embedding, batch, 0).back().bytes == int64_t(embedding.Vp()) * 64 * 4);
    CHECK(training_memory<float>(matrix, batch, 0).back().bytes == 256 * 64 * 4);
}
