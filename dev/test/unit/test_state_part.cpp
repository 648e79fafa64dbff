// test_state_part.cpp: tests the division of the weights and of the optimizer's state among ranks, by ZeRO and tensor
// parallelism: the parts of all ranks together are the whole state.
#include <doctest/doctest.h>

#include "support/small_state.h"
#include "train/state_part.h"

// The rank's part of `whole`: its shard of each tensor (take_shard), in the rank's layout; of these buckets its shard.
static std::vector<float> part_of(const FlatState& whole, const StatePart& part) {
    std::vector<float> model(size_t(part.layout.total), 0.0f), own;
    for_each_tensor(part.layout, [&](Param p, int l) {
        take_shard(model.data() + part.layout.offset(p, l), whole.weights.data() + whole.layout.offset(p, l),
                   part.layout, p);
    });
    for (int b = 0; b < part.layout.num_buckets(); b++) {
        const Bucket bucket = part.layout.bucket(b);
        const int64_t count = (bucket.end - bucket.begin) / part.shards,
                      begin = bucket.begin + part.shard_index * count;
        own.insert(own.end(), model.begin() + begin, model.begin() + begin + count);
    }
    return own;
}

// Calls f for each real element of the flat buffer: no padded row, no gap between tensors.
template <class F>
static void for_each_element(const ParamLayout& layout, F f) {
    for_each_tensor(layout, [&](Param p, int l) {
        const int64_t count = int64_t(dim_size(layout.config, param_table[p].rows)) * layout.cols(p);
        for (int64_t i = 0; i < count; i++) f(layout.offset(p, l) + i);
    });
}

TEST_CASE("the parts of all ranks are the whole state, and each element is in one of them") {
    const FlatState whole(small_model, 3);
    for (const int shards : {1, 2, 4})
        for (const int tensor_parallel : {1, 2}) {
            CAPTURE(shards);
            CAPTURE(tensor_parallel);
            std::vector<float> together(size_t(whole.layout.total), NAN);
            std::vector<int> written(together.size(), 0);
            for (int shard = 0; shard < shards; shard++)
                for (int tp = 0; tp < tensor_parallel; tp++) {
                    const StatePart part = {ParamLayout(small_model, shards, {tp, tensor_parallel}), shards, shard};
                    const std::vector<float> own = part_of(whole, part);
                    REQUIRE(int64_t(own.size()) == part.floats());
                    const std::vector<PartRun> runs = runs_of(part, whole.layout);
                    put_part(together.data(), runs, own.data(), 0, part.floats());
                    for (const PartRun& run : runs)
                        for (int64_t i = 0; i < run.count; i++) written[size_t(run.whole + i)]++;
                }
            // Each tensor-parallel rank has the undivided tensors, so those are written once by each of them.
            int64_t wrong = 0, missing = 0;
            for_each_element(whole.layout, [&](int64_t i) {
                wrong += together[size_t(i)] != whole.weights[size_t(i)];
                missing += written[size_t(i)] == 0;
                if (tensor_parallel == 1) wrong += written[size_t(i)] != 1;
            });
            CHECK(wrong == 0);
            CHECK(missing == 0);
        }
}

TEST_CASE("a part that is put in pieces gives the same state") {
    const FlatState whole(small_model, 3);
    const StatePart part = {ParamLayout(small_model, 2, {1, 2}), 2, 1};
    const std::vector<float> own = part_of(whole, part);
    const std::vector<PartRun> runs = runs_of(part, whole.layout);
    std::vector<float> at_once(size_t(whole.layout.total), 0.0f);
    put_part(at_once.data(), runs, own.data(), 0, part.floats());
    for (const int64_t piece : {1, 7, 64, 1000}) {
        std::vector<float> in_pieces(at_once.size(), 0.0f);
        for (int64_t at = 0; at < part.floats(); at += piece) {
            const int64_t count = std::min(piece, part.floats() - at);
            std::vector<float> alone(size_t(count) + 2000, NAN);  // between values that must not be copied
            std::copy_n(own.begin() + at, count, alone.begin() + 1000);
            put_part(in_pieces.data(), runs, alone.data() + 1000, at, count);
        }
        CHECK(in_pieces == at_once);
    }
}

TEST_CASE("a rank whose part another rank also has sends nothing") {
    const StatePart part = {ParamLayout(small_model, 1, {1, 2}), 1, 0, true};
    CHECK(part.floats() == 0);
    CHECK(runs_of(part, ParamLayout(small_model)).empty());
}
