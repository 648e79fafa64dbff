// test_groups.cpp: tests the parts of groups of ranks that need only one process: one rank, the numbers of the groups,
// and what is refused. test_groups.py starts real ranks.
#include "parallel/comm.h"

#include "support/refusal.h"
#include "support/test.h"

// A world that answers as if the other ranks had called. It records the colors that this rank gives.
struct FakeWorld : Comm {
    std::vector<int> colors;
    std::string last;  // text of the last rank; empty: that of this rank

    FakeWorld(int rank_of_this, int ranks) {
        rank = rank_of_this;
        world_size = ranks;
    }
    std::vector<std::string> all_gather_text(const std::string& text) override {
        std::vector<std::string> all(size_t(world_size), text);
        if (!last.empty()) all.back() = last;
        return all;
    }
    std::unique_ptr<Comm> split(int color) override {
        colors.push_back(color);
        return Comm::split(color);
    }
};

TEST_CASE("tensor-parallel ranks are neighbours: rank = dp_index * tp + tp_index; without them dp is the world") {
    for (int rank = 0; rank < 6; rank++) {
        FakeWorld world(rank, 6);
        const Groups groups = make_groups(world, 3);
        CHECK(world.colors == std::vector<int>{rank / 3, rank % 3});
        CHECK((&groups.tp == groups.own_tp.get() && &groups.dp == groups.own_dp.get()));
    }
    FakeWorld world(1, 6);
    const Groups groups = make_groups(world, 1);
    CHECK((&groups.world == &world && &groups.dp == &world && groups.tp.world_size == 1));
    CHECK(world.colors.empty());
}

TEST_CASE("ranks that divide the layers differently are refused, also by a rank that does not divide them") {
    FakeWorld world(1, 6);
    world.last = "3";
    for (const int own : {1, 2})
        CHECK(refusal([&] { make_groups(world, own); }) ==
              format("2 rank 5 differs from rank 0: --tensor-parallel 3 there, %d on rank 0", own));
    CHECK(world.colors.empty());
}

TEST_CASE("a number that does not divide the ranks is refused, with those that do") {
    FakeWorld six(0, 6);
    CHECK(refusal([&] { make_groups(six, 4); }) ==
          "2 --tensor-parallel 4 does not divide 6 ranks; give 1, 2, 3 or 6, or start 8 ranks");
    CHECK(refusal([&] { make_groups(six, 0); }) == "2 --tensor-parallel 0: must be at least 1");
    CHECK(refusal([&] { count_data_parallel(6, 4, 9); }) ==
          "2 --tensor-parallel 4 does not divide 6 ranks and 9 heads; give 1 or 3");
    Comm alone;
    CHECK(refusal([&] { make_groups(alone, 2); }) ==
          "2 --tensor-parallel 2 does not divide 1 rank; give 1, or start 2 ranks");
}

TEST_CASE("a tensor-parallel group on several hosts is a warning, with its hosts") {
    CHECK(warn_of_hosts({"h0", "h0", "h1", "h1"}, 4) ==
          "warning: --tensor-parallel 4: ranks on h0 and h1 exchange activations in every layer");
    CHECK(warn_of_hosts({"h0", "h0", "h1", "h1"}, 2).empty());
    CHECK(warn_of_hosts({"h0", "h0", "h0", "h1"}, 2).find("ranks on h0 and h1") != std::string::npos);
}
