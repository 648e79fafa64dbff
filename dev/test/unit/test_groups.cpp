// test_groups.cpp: tests the parts of groups of ranks that need only one process: one rank, the numbers of the groups,
// and what is refused. test_groups.sh starts real ranks.
#include "parallel/groups.h"

#include "support/refusal.h"
#include "support/test.h"

// A world that answers as if the other ranks had called. It records the colors that this rank gives.
struct FakeWorld : Comm {
    std::vector<std::string> hosts;
    std::vector<int> colors;
    std::string last_division;  // of the layers, by the last rank; empty: as on this rank

    FakeWorld(int rank_of_this, std::vector<std::string> hosts_of_ranks) : hosts(std::move(hosts_of_ranks)) {
        rank = rank_of_this;
        world_size = int(hosts.size());
    }
    std::vector<std::string> all_gather_text(const std::string& text) override {
        if (!text.starts_with("--tensor-parallel")) return hosts;
        std::vector<std::string> all(size_t(world_size), text);
        if (!last_division.empty()) all.back() = last_division;
        return all;
    }
    std::unique_ptr<Comm> split(int color) override {
        colors.push_back(color);
        return Comm::split(color);
    }
};

static const std::vector<std::string> one_host(6, "a h0"), two_hosts = {"a h0", "a h0", "b h1", "b h1"};

TEST_CASE("a Comm of one rank splits into a Comm of one rank, and its sums change nothing") {
    Comm world;
    const std::unique_ptr<Comm> group = world.split(7);
    CHECK(group->rank == 0);
    CHECK(group->world_size == 1);
    CHECK(group->shard_index == 0);
    float x[2] = {1.0f, 2.0f};
    bf16 y[2] = {bf16(1.0f), bf16(2.0f)};
    group->wait(group->all_reduce(x, 2, nullptr), nullptr);
    group->wait(group->reduce_scatter(x, 2, nullptr), nullptr);
    group->wait(group->all_reduce(y, 2, nullptr), nullptr);
    group->wait(group->reduce_scatter(y, 2, nullptr), nullptr);
    CHECK(x[1] == 2.0f);
    CHECK(float(y[1]) == 2.0f);
    CHECK(group->bytes_sent == 0);
}

TEST_CASE("without tensor parallelism dp is the world, and no group is made") {
    FakeWorld world(1, one_host);
    const Groups groups = make_groups(world, 1, false);
    CHECK(&groups.world == &world);
    CHECK(&groups.dp == &world);
    CHECK(groups.own_dp == nullptr);
    CHECK(groups.tp.world_size == 1);
    CHECK(world.colors.empty());
}

TEST_CASE("ranks that divide the layers differently are refused, also by a rank that does not divide them") {
    FakeWorld world(1, one_host);
    world.last_division = "--tensor-parallel 2 --tp-across-hosts";
    for (const int tensor_parallel : {1, 2})
        CHECK(
            refusal([&] { make_groups(world, tensor_parallel, false); }) ==
            format("2 rank 5 differs from rank 0: --tensor-parallel 2 --tp-across-hosts there, --tensor-parallel %d on "
                   "rank 0",
                   tensor_parallel));
    CHECK(world.colors.empty());
}

TEST_CASE("tensor-parallel ranks are neighbours: rank = dp_index * tp + tp_index") {
    for (int rank = 0; rank < 6; rank++) {
        FakeWorld world(rank, one_host);
        const Groups groups = make_groups(world, 3, false);
        CHECK(world.colors == std::vector<int>{rank / 3, rank % 3});
        CHECK(&groups.tp == groups.own_tp.get());
        CHECK(&groups.dp == groups.own_dp.get());
    }
}

TEST_CASE("a number that does not divide the ranks is refused, with those that do") {
    FakeWorld six(0, one_host);
    CHECK(refusal([&] { make_groups(six, 4, false); }) ==
          "2 --tensor-parallel 4 does not divide 6 ranks; give 1, 2, 3 or 6, or start 8 ranks");
    CHECK(refusal([&] { make_groups(six, 0, false); }) == "2 --tensor-parallel 0: must be at least 1");
    CHECK(refusal([&] { make_groups(six, 4, false, 9); }) ==
          "2 --tensor-parallel 4 does not divide 6 ranks and 9 heads; give 1 or 3");
    CHECK(refusal([&] { make_groups(six, 4, false, 12); }) ==
          "2 --tensor-parallel 4 does not divide 6 ranks; give 1, 2, 3 or 6, or start 8 ranks");
    Comm alone;
    CHECK(refusal([&] { make_groups(alone, 2, false); }) ==
          "2 --tensor-parallel 2 does not divide 1 rank; give 1, or start 2 ranks");
}

TEST_CASE("a tensor-parallel group across hosts is refused, with its ranks and hosts, unless it is asked for") {
    FakeWorld world(3, two_hosts);
    CHECK(
        refusal([&] { make_groups(world, 4, false); }) ==
        "2 --tensor-parallel 4 puts rank 0 on h0 and rank 2 on h1 into one group, whose ranks exchange activations in "
        "every layer: give --tensor-parallel 2, or --tp-across-hosts if the network between the hosts is fast");
    CHECK(world.colors.empty());
    make_groups(world, 2, false);
    make_groups(world, 4, true);
    CHECK(world.colors == std::vector<int>{1, 1, 0, 3});
    // Containers with the same host name, and ranks that are not placed host by host.
    CHECK(refusal([] {
              check_tensor_parallel_hosts({"a box", "b box"}, 2);
          }).find("rank 0 on box and rank 1 on box") != std::string::npos);
    CHECK(refusal([] {
              check_tensor_parallel_hosts({"a h0", "b h1", "a h0", "b h1"}, 2);
          }).find("--tensor-parallel 1,") != std::string::npos);
}
