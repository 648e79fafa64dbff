// groups.h: the data-parallel and tensor-parallel groups of ranks. world_size = dp x tp, and tensor-parallel ranks are
// neighbours: rank = dp_index * tp + tp_index.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm.h"

struct Groups {
    Comm& world;
    std::unique_ptr<Comm> own_dp, own_tp;  // own_dp is null if dp is the world
    Comm& dp;  // the ranks with the same tp_index: they have the same part of the model and other data
    Comm& tp;  // the ranks with the same dp_index: they have the same data and other parts of the model

    int64_t bytes_sent() const;  // by this rank, in all communicators
    struct Waits {
        int64_t world, dp, tp;
    };
    Waits waits() const { return {world.waits, dp.waits, tp.waits}; }
    double exposed(const Waits& first_waits) const;  // Comm::exposed of all communicators
};

// "1, 2 or 4": the numbers that divide the ranks and the heads, so that --tensor-parallel can have them. heads 0:
// unknown.
std::string possible_tensor_parallel(int world_size, int heads);
// Returns the number of data-parallel ranks. Refuses (EXIT_USAGE) a tensor_parallel that does not divide world_size,
// and says which numbers a model with this many heads can have.
int count_data_parallel(int world_size, int tensor_parallel, int heads = 0);

// All ranks of `world` call it. With tensor_parallel = 1, dp is the world, and no group is made. Refuses (EXIT_USAGE) a
// number that does not divide the ranks, and one that differs between ranks. Warns of a tensor-parallel group on
// several hosts, whose ranks exchange activations in every layer. Connects the ranks of all groups (Comm::connect),
// before memory is measured and filled. Groups must not outlive the world.
Groups make_groups(Comm& world, int tensor_parallel);
// Returns the warning; empty: each group is on one host. hosts: the host of each rank.
std::string warn_of_hosts(const std::vector<std::string>& hosts, int tensor_parallel);
