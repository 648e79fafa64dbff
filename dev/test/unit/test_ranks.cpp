// test_ranks.cpp: tests the parts of parallel training that need only one process: sums over virtual ranks, and the
// comparison of rank_infos. test_ranks.sh starts real ranks.
#include "support/test.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "parallel/comm.h"
#include "train/gradients.h"
#include "support/refusal.h"
#include "train/run.h"

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

// The sum over all virtual ranks, which are all on this rank.
static Summed sum_virtual_ranks(int virtual_ranks) {
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
        CHECK(!(std::abs(double(sum.squares) - squares) > 1e-6 * squares));
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

TEST_CASE("a number of virtual ranks that is not a multiple of the ranks is an internal error") {
    Comm world;
    world.world_size = 2;
    const Groups of_two = make_groups(world, 1);
    const ParamLayout layout(small, 3);
    const BucketBuffer<float> grads(layout, small.L, "gradients");
    float loss = 0.0f;
    Stream stream = nullptr;
    CHECK(refusal([&] { GradReducer(of_two, layout, {.virtual_ranks = 3}, grads, &loss, &stream); }) ==
          "1 internal error: 3 virtual ranks are not a multiple of 2 ranks; please report it");
}

TEST_CASE("NaN in one virtual rank reaches the sum of squares") {
    Comm comm;
    const Groups alone = make_groups(comm, 1);
    const ParamLayout layout(small, 2);
    const BucketBuffer<float> grads(layout, small.L, "gradients");
    float* values = grads.memory.data;
    std::fill_n(values, layout.total, 1.0f);
    float loss = 1.0f;
    Stream stream = nullptr;
    GradReducer sum(alone, layout, {.virtual_ranks = 2}, grads, &loss, &stream);
    sum.begin_step();
    for (int v = 0; v < 2; v++) {
        if (v == 0) values[layout.bucket(2).begin + 5] = NAN;
        for (int b = layout.num_buckets() - 1; b >= 0; b--) sum.reduce_bucket(b, v);
        sum.virtual_rank_done(v);
        if (v == 0) std::fill_n(values, layout.total, 1.0f);
    }
    sum.finish({});
    CHECK(std::isnan(*sum.grad_norm_squared()));
}

TEST_CASE("each bucket divides into equal shards for any number of ranks") {
    for (int virtual_ranks : {1, 2, 3, 7, 8, 24}) {
        const ParamLayout layout(small, virtual_ranks), plain(small);
        CHECK(layout.total >= plain.total);
        for (int b = 0; b < layout.num_buckets(); b++) {
            const Bucket bucket = layout.bucket(b);
            CHECK((bucket.end - bucket.begin) % (virtual_ranks * FLAT_ALIGN) == 0);
            CHECK(bucket.begin == (b == 0 ? 0 : layout.bucket(b - 1).end));
            CHECK(bucket.end - bucket.begin < plain.bucket(b).end - plain.bucket(b).begin + virtual_ranks * FLAT_ALIGN);
        }
        CHECK(layout.bucket(layout.num_buckets() - 1).end == layout.total);
    }
}

TEST_CASE("a rank whose options differ from rank 0's is refused, and the message has its number and the option") {
    const std::string first = R"({"host":"h0","--lr":0.0006,"training data":"ab"})";
    check_same({first});
    check_same({first, first});
    check_same({first, R"({"host":"h1","--lr":0.0006,"training data":"ab"})"});
    CHECK_THROWS_WITH_AS(check_same({first, first, R"({"host":"h0","--lr":0.0003,"training data":"ab"})"}),
                         R"(rank 2 differs from rank 0: --lr 0.0003 there, 0.0006 on rank 0)", Error);
    CHECK_THROWS_WITH_AS(check_same({first, R"({"host":"h0","--lr":0.0006})"}),
                         R"(rank 1 differs from rank 0: training data nothing there, "ab" on rank 0)", Error);
}
