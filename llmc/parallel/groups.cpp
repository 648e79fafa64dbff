#include "parallel/groups.h"

#include <algorithm>
#include <utility>

#include "base/common.h"
#include "base/host.h"

std::string possible_tensor_parallel(int world_size, int heads) {
    std::vector<int> divisors;
    for (int d = 1; d <= world_size; d++)
        if (world_size % d == 0 && heads % d == 0) divisors.push_back(d);
    std::string text;
    for (size_t i = 0; i < divisors.size(); i++)
        text += format("%s%d", i == 0 ? "" : i + 1 == divisors.size() ? " or " : ", ", divisors[i]);
    return text;
}

// The largest number that divides the ranks and keeps every group on one host.
static int largest_on_one_host(const std::vector<std::string>& ids) {
    const int ranks = int(ids.size());
    int largest = 1;
    for (int n = 2; n <= ranks; n++) {
        bool fits = ranks % n == 0;
        for (int r = 0; r < ranks && fits; r++) fits = ids[r] == ids[r / n * n];
        if (fits) largest = n;
    }
    return largest;
}

void check_tensor_parallel_hosts(const std::vector<std::string>& hosts, int tensor_parallel) {
    std::vector<std::string> ids, names;
    for (const std::string& host : hosts) {
        const size_t space = host.find(' ');
        ids.push_back(host.substr(0, space));
        names.push_back(space == host.npos ? host : host.substr(space + 1));
    }
    for (int r = 0; r < int(hosts.size()); r++) {
        const int first = r / tensor_parallel * tensor_parallel;
        if (ids[r] == ids[first]) continue;
        fail(EXIT_USAGE,
             "--tensor-parallel %d puts rank %d on %s and rank %d on %s into one group, whose ranks exchange "
             "activations in every layer: give --tensor-parallel %d, or --tp-across-hosts if the network between the "
             "hosts is fast",
             tensor_parallel, first, names[first].c_str(), r, names[r].c_str(), largest_on_one_host(ids));
    }
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

// Ranks that divide the layers differently would wait for each other.
static void check_same_tensor_parallel(Comm& world, int tensor_parallel, bool across_hosts) {
    const std::string own = format("--tensor-parallel %d%s", tensor_parallel, across_hosts ? " --tp-across-hosts" : "");
    const std::vector<std::string> all = world.all_gather_text(own);
    for (size_t rank = 1; rank < all.size(); rank++)
        ENSURE(all[rank] == all[0], "rank %zu differs from rank 0: %s there, %s on rank 0", rank, all[rank].c_str(),
               all[0].c_str());
}

Groups make_groups(Comm& world, int tensor_parallel, bool across_hosts, int heads) {
    check_same_tensor_parallel(world, tensor_parallel, across_hosts);
    count_data_parallel(world.world_size, tensor_parallel, heads);
    if (tensor_parallel == 1) {
        auto alone = std::make_unique<Comm>();
        alone->parent = &world;
        alone->watchdog = world.watchdog;
        Comm& tp = *alone;
        return {world, nullptr, std::move(alone), world, tp};
    }
    if (!across_hosts)
        check_tensor_parallel_hosts(world.all_gather_text(host_id() + " " + host_name()), tensor_parallel);
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
