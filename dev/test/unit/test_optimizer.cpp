// test_optimizer.cpp: tests that a step with a gradient that is not finite never changes the weights, the steps after
// such a step, loaded moments, which do not depend on the gradients, and steps whose gradients are summed in bf16.
#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/random.h"
#include "support/test.h"

struct SmallOptimizer {
    GPT2<float> model{{16, 64, 1, 1, 16}, Purpose::train, 1, 16};
    Optimizer<float> optimizer;

    explicit SmallOptimizer(bool skip_nan, MomentDtype moments = MomentDtype::fp32)
        : optimizer(model, OptimizerConfig{{}, skip_nan}, {.moments = moments}) {
        init_weights(optimizer, 42);
        optimizer.weights_loaded();
    }
    std::vector<float> weights() const {
        return {model.weights.memory.data, model.weights.memory.data + model.layout.total};
    }
    // A step whose gradients are all this value. Returns whether it has changed the weights.
    bool step(float gradient, int number) {
        const std::vector<float> before = weights();
        optimizer.gradients.begin_step(number);
        std::fill_n(model.grads.memory.data, model.layout.total, gradient);
        *model.acts.loss = 1.0f;
        optimizer.gradients.virtual_rank_done(0);
        optimizer.clip(1.0f);
        optimizer.step(1e-2f, number);
        return weights() != before;
    }
};

TEST_CASE("after a step that is not finite only --on-nan skip goes on") {
    for (const bool skip_nan : {false, true}) {
        CAPTURE(skip_nan);
        SmallOptimizer small(skip_nan);
        CHECK(small.step(0.5f, 1));
        CHECK_FALSE(small.step(NAN, 2));
        CHECK(std::isnan(*small.optimizer.factor()));
        CHECK(small.step(0.5f, 3) == skip_nan);
        CHECK_FALSE(small.step(INFINITY, 4));
    }
}

TEST_CASE("a moment that is loaded is in a block with zeros, whatever the gradients' memory has beyond its tensor") {
    SmallOptimizer small(false, MomentDtype::block8);
    const std::vector<float> values(16, 127.0f / 256);  // a code of its block
    std::vector<float> read(16);
    std::fill_n(small.model.grads.memory.data, small.model.layout.total, 1e30f);
    small.optimizer.set_state(FIRST_MOMENT, ln1b, 0, values.data());
    small.optimizer.get_state(read.data(), FIRST_MOMENT, ln1b, 0);
    CHECK(read == values);
}

// Gradients of several micro-steps, as backward hands them over: bucket by bucket, in memory that layers share.
template <class Optimizer>
static std::vector<float> add_micro_step(Optimizer& optimizer, uint64_t number) {
    GradReducer& gradients = optimizer.gradients;
    std::vector<float> all(size_t(gradients.layout.total));
    for (size_t i = 0; i < all.size(); i++) all[i] = Philox{number, 0}.normal(i);
    for (int b = gradients.layout.num_buckets() - 1; b >= 0; b--) {
        const Bucket bucket = gradients.layout.bucket(b);
        gradients.begin_bucket(b);
        std::copy(all.begin() + bucket.begin, all.begin() + bucket.end, gradients.grads.bucket(b));
        gradients.reduce_bucket(b, 0);
    }
    return all;
}

TEST_CASE("sums in bf16 are those of accumulate_rounded, and norm and update are those of the sums in fp32") {
    for (const bool muon : {false, true}) {
        CAPTURE(muon);
        const MemoryOptions in_fp32 = {.muon = muon}, in_bf16 = {.grad_accum = Dtype::bf16, .muon = muon};
        GPT2<float> wide({16, 64, 3, 1, 16}, Purpose::train, 1, 16, in_fp32);
        GPT2<float> model({16, 64, 3, 1, 16}, Purpose::train, 1, 16, in_bf16);
        Optimizer<float> reference(wide, {{.seed = 5}}, in_fp32), optimizer(model, {{.seed = 5}}, in_bf16);
        for (auto* each : {&reference, &optimizer}) init_weights(*each, 42);
        const int64_t count = model.layout.total;
        for (int step = 1; step <= 2; step++) {
            std::vector<bf16> sums(size_t(count), bf16(0.0f));
            for (auto* each : {&reference, &optimizer}) each->gradients.begin_step(step);
            for (int n = 0; n < 4; n++) {
                const std::vector<float> added = add_micro_step(optimizer, uint64_t(10 * step + n));
                cpu::accumulate_rounded(sums.data(), added.data(), 0, count, 5, step, n, nullptr);
            }
            double squares = 0.0;
            for (const bf16 x : sums) squares += double(float(x)) * double(float(x));
            for (int64_t i = 0; i < count; i++) wide.grads.memory.data[i] = float(sums[size_t(i)]);
            for (auto* each : {&reference, &optimizer}) {
                *each->model.acts.loss = 1.0f;
                each->gradients.virtual_rank_done(0);
                each->clip(0.0f);
                each->step(1e-2f, step);
            }
            CHECK(std::memcmp(optimizer.gradients.rounded_shard.data, sums.data(), sums.size() * sizeof(bf16)) == 0);
            CHECK(*optimizer.norm() == doctest::Approx(std::sqrt(squares)).epsilon(1e-6));
            CHECK(std::memcmp(model.weights.memory.data, wide.weights.memory.data, size_t(count) * 4) == 0);
        }
    }
}
