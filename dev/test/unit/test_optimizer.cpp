// test_optimizer.cpp: tests that a step with a gradient that is not finite never changes the weights, what the steps
// after it do, and that loaded moments do not depend on the gradients.
#include "train/optimizer.h"

#include <algorithm>
#include <cmath>

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
        optimizer.gradients.begin_step();
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
