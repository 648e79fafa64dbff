#include "parallel/groups.h"

#include <algorithm>
#include <utility>

#include "base/common.h"
#include "base/host.h"
#include "base/print.h"

std::string possible_tensor_parallel(int world_size, int heads) {
    std::vector<int> divisors;
    for (int d = 1; d <= world_size; d++)
        if (world_size % d == 0 && heads % d == 0) divisors.push_back(d);
    std::string text;
    for (size_t i = 0; i < divisors.size(); i++)
        text += format("%s%d", i == 0 ? "" : i + 1 == divisors.size() ? " or " : ", ", divisors[i]);
    return text;
}

int count_data_parallel(int world_size, int tensor_parallel, int heads) {
    ENSURE(tensor_parallel >= 1, "--tensor-parallel %d: must be at least 1", tensor_parallel);
    if (world_size % tensor_parallel == 0) return world_size / tensor_parallel;
    const bool divides_heads = heads % tensor_parallel == 0;
    const std::string more = divides_heads ? format(", or start %d ranks", round_up(world_size, tensor_parallel)) : "";
    fail(EXIT_USAGE, "--tensor-parallel %d does not divide %d rank%s%s; give %s%s", tensor_parallel, world_size,
         world_size == 1 ? "" : "s", divides_heads ? "" : format(" and %d heads", heads).c_str(),
         possible_tensor_parallel(world_size, heads).c_str(), more.c_str());
}

// Refuses ranks that divide the layers differently, because they would wait for each other. Returns the ranks' hosts.
static std::vector<std::string> compare_ranks(Comm& world, int tensor_parallel) {
    const std::string own = std::to_string(tensor_parallel);
    const std::vector<std::string> all = world.all_gather_text(own + " " + host_name());
    std::vector<std::string> hosts;
    for (size_t rank = 0; rank < all.size(); rank++) {
        const size_t space = all[rank].find(' ');
        const std::string there = all[rank].substr(0, space), first = all[0].substr(0, all[0].find(' '));
        ENSURE(there == first, "rank %zu differs from rank 0: --tensor-parallel %s there, %s on rank 0", rank,
               there.c_str(), first.c_str());
        hosts.push_back(all[rank].substr(space + 1));
    }
    return hosts;
}

std::string warn_of_hosts(const std::vector<std::string>& hosts, int tensor_parallel) {
    for (int rank = 0; rank < int(hosts.size()); rank++) {
        const int first = rank / tensor_parallel * tensor_parallel;
        const std::string &here = hosts[size_t(first)], &there = hosts[size_t(rank)];
        if (here != there)
            return format("warning: --tensor-parallel %d puts rank %d on %s and rank %d on %s into one group, whose "
                          "ranks exchange activations in every layer",
                          tensor_parallel, first, here.c_str(), rank, there.c_str());
    }
    return "";
}

Groups make_groups(Comm& world, int tensor_parallel, int heads) {
    const std::vector<std::string> hosts = compare_ranks(world, tensor_parallel);
    count_data_parallel(world.world_size, tensor_parallel, heads);
    const std::string warning = world.rank == 0 ? warn_of_hosts(hosts, tensor_parallel) : "";
    if (!warning.empty()) print_message(warning);
    if (tensor_parallel == 1) {
        std::unique_ptr<Comm> alone = world.Comm::split(0);
        Comm& tp = *alone;
        return {world, nullptr, std::move(alone), world, tp};
    }
    std::unique_ptr<Comm> own_tp = world.split(world.rank / tensor_parallel);
    std::unique_ptr<Comm> own_dp = world.split(world.rank % tensor_parallel);
    Comm &dp = *own_dp, &tp = *own_tp;
    return {world, std::move(own_dp), std::move(own_tp), dp, tp};
}

void Groups::connect() const {
    world.connect();
    tp.connect();
    if (own_dp) dp.connect();
}

int64_t Groups::bytes_sent() const { return world.bytes_sent + tp.bytes_sent + (own_dp ? dp.bytes_sent : 0); }

double Groups::exposed(const Waits& first_waits) const {
    return world.exposed(first_waits.world) + tp.exposed(first_waits.tp) + (own_dp ? dp.exposed(first_waits.dp) : 0.0);
}
