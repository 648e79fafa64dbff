// test_ranks.cpp: tests the sums over virtual ranks, which need only one process. test_ranks.py starts real ranks.
#include "support/test.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include "parallel/comm.h"
#include "support/refusal.h"
#include "train/gradients.h"

static const GPT2Config small = {16, 100, 3, 2, 32};

// The gradients of one virtual rank.
static std::vector<float> leaf(const ParamLayout& layout, int v) {
    const auto random = random_tensor<float>(layout.total, 100 + v);
    return {random.data(), random.data() + random.size()};
}

struct Summed {
    std::vector<float> grads;
    float loss, squares;
};

using Change = std::function<void(const ParamLayout& layout, int v, float* grads)>;

// The sum over all virtual ranks, which are all on this rank, after a change of their gradients.
static Summed sum_virtual_ranks(int virtual_ranks, const Change& change = {}) {
    Comm comm;
    const Groups alone = make_groups(comm, 1);
    const ParamLayout layout(small, virtual_ranks);
    const BucketBuffer<float> grads(layout, small.L, "gradients");
    float loss = 0.0f;
    Stream stream = nullptr;
    GradReducer sum(alone, layout, {.virtual_ranks = virtual_ranks}, grads, &loss, &stream);
    CHECK(sum.local_virtual_ranks() == virtual_ranks);
    CHECK(sum.needs_reduction() == (virtual_ranks > 1));
    CHECK(sum.subtree_sums.size() == size_t(std::bit_width(unsigned(virtual_ranks)) - 1));
    sum.begin_step();
    for (int v = 0; v < virtual_ranks; v++) {
        const std::vector<float> own = leaf(layout, v);
        std::copy(own.begin(), own.end(), grads.memory.data);  // where GradReducer reads them
        if (change) change(layout, v, grads.memory.data);
        loss = 0.5f + float(v);
        for (int b = layout.num_buckets() - 1; b >= 0; b--) sum.reduce_bucket(b, v);
        sum.virtual_rank_done(v);
    }
    sum.finish({});
    return {{grads.memory.data, grads.memory.data + layout.total}, *sum.step_loss(), *sum.grad_norm_squared()};
}

// The same sum by its definition, a balanced tree in which neighbours are added first.
static std::vector<float> tree(const ParamLayout& layout, int first, int count) {
    if (count == 1) return leaf(layout, first);
    std::vector<float> left = tree(layout, first, count / 2);
    const std::vector<float> right = tree(layout, first + count / 2, count / 2);
    for (size_t i = 0; i < left.size(); i++) left[i] += right[i];
    return left;
}

TEST_CASE("gradients of virtual ranks are added as a balanced tree, bit for bit") {
    for (int virtual_ranks : {1, 2, 4, 8, 16}) {
        CAPTURE(virtual_ranks);
        const ParamLayout layout(small, virtual_ranks);
        const Summed sum = sum_virtual_ranks(virtual_ranks);
        CHECK(sum.grads == tree(layout, 0, virtual_ranks));
        CHECK(sum.loss == float(virtual_ranks * virtual_ranks) / 2);
        double squares = 0.0;
        for (float x : sum.grads) squares += double(x) * double(x);
        CHECK(double(sum.squares) == doctest::Approx(squares).epsilon(1e-6));
    }
}

TEST_CASE("a sum in sequential order has other bits, so the test of the tree can fail") {
    const ParamLayout layout(small, 8);
    std::vector<float> chain = leaf(layout, 0);
    for (int v = 1; v < 8; v++) {
        const std::vector<float> next = leaf(layout, v);
        for (size_t i = 0; i < chain.size(); i++) chain[i] += next[i];
    }
    CHECK(chain != tree(layout, 0, 8));
}

TEST_CASE("NaN in one virtual rank reaches the sum of squares") {
    const Summed sum = sum_virtual_ranks(2, [](const ParamLayout& layout, int v, float* grads) {
        if (v == 0) grads[layout.bucket(2).begin + 5] = NAN;
    });
    CHECK(std::isnan(sum.squares));
}

TEST_CASE("each bucket divides into equal shards for any number of ranks") {
    const ParamLayout plain(small);
    for (int ranks : {1, 2, 3, 7, 8, 24}) {
        const ParamLayout layout(small, ranks);
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b), least = plain.bucket(b);
            CHECK((bucket.end - bucket.begin) % (ranks * FLAT_ALIGN) == 0);
            CHECK(bucket.end - bucket.begin < least.end - least.begin + ranks * FLAT_ALIGN);
        }
    }
}
