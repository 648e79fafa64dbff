// cases_groups.h: checks of groups of ranks and of sums of activations, which every rank of a run makes together:
// groups of all sizes, in use at the same time as the world. They throw an Error at the first wrong result.
// test_groups.py runs them on MPI's ranks, test_gpu_comm.cu on NCCL's.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "parallel/comm.h"

namespace groups_cases {

inline void expect(bool right, const std::string& what) {
    if (!right) fail(EXIT_INTERNAL, "wrong: %s", what.c_str());
}

// The initial value of element i on a rank of the world: from -1 to 1, with all of the type's digits.
template <class floatX>
floatX value_of(int rank, int64_t i, int round) {
    uint64_t bits = (uint64_t(i) * 64 + uint64_t(rank) + uint64_t(round) * 0x10001) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 29)) * 0xBF58476D1CE4E5B9u;
    return floatX(float(int32_t(bits >> 32)) * 0x1p-31f);
}

// A group, and the ranks of the world that are in it.
struct Group {
    Comm& comm;
    std::vector<int> members;
};

template <class floatX>
struct Activations {
    const Group& group;
    const int round;
    const int64_t count;
    DeviceBuffer<floatX> x;
    std::vector<floatX> before;

    Activations(const Group& group, int64_t count, int round)
        : group(group), round(round), count(count), x(count, "activations"), before(size_t(count)) {
        for (int64_t i = 0; i < count; i++)
            before[size_t(i)] = value_of<floatX>(group.members[size_t(group.comm.rank)], i, round);
        fill();
    }
    void fill() {
        copy_to_device(x.data, before.data(), x.bytes(), nullptr);
        wait_for_device();
    }
    std::vector<floatX> now() const { return to_host(x.data, count); }
    int64_t shard() const { return count / group.comm.world_size; }

    // The sum as MPI's ranks compute it: a tree, or for a number of ranks that is no power of two a sum in rank order,
    // which bf16 rounds once.
    floatX sum_by_mpi(int64_t i) const {
        const int n = int(group.members.size());
        floatX sums[64];
        for (int r = 0; r < n; r++) sums[r] = value_of<floatX>(group.members[size_t(r)], i, round);
        if ((n & (n - 1)) != 0) {
            float sum = 0.0f;
            for (int r = 0; r < n; r++) sum += float(sums[r]);
            return floatX(sum);
        }
        for (int distance = 1; distance < n; distance *= 2)
            for (int r = 0; r < n; r += 2 * distance) sums[r] = floatX(float(sums[r]) + float(sums[r + distance]));
        return sums[0];
    }

    // Each of the n - 1 additions, or fewer, rounds a sum that is at most the sum of the magnitudes.
    void check_sum(float got, int64_t i, bool by_mpi, const char* what) const {
        double sum = 0.0, magnitude = 0.0;
        for (const int r : group.members) {
            const double x = double(float(value_of<floatX>(r, i, round)));
            sum += x;
            magnitude += std::fabs(x);
        }
        const double bound = double(group.members.size()) * 0.5 * double(epsilon<floatX>()) * magnitude;
        const bool order_known = sizeof(floatX) == 2 || (group.members.size() & (group.members.size() - 1)) == 0;
        const bool close = std::fabs(double(got) - sum) <= bound;
        if (close && (!by_mpi || !order_known || got == float(sum_by_mpi(i)))) return;
        fail(EXIT_INTERNAL, "wrong: %s of %zu ranks: element %lld is %.9g, the sum is %.9g%s", what,
             group.members.size(), static_cast<long long>(i), double(got), sum, close ? " (other bits)" : "");
    }
    void check_all(bool by_mpi) const {
        const std::vector<floatX> got = now();
        for (int64_t i = 0; i < count; i++) check_sum(float(got[size_t(i)]), i, by_mpi, "all_reduce");
    }
    void check_shard(bool by_mpi) const {
        const std::vector<floatX> got = now();
        const int64_t first = group.comm.shard_index * shard();
        for (int64_t i = first; i < first + shard(); i++) check_sum(float(got[size_t(i)]), i, by_mpi, "reduce_scatter");
    }
};

// Collectives of several groups and of the world, all in flight at the same time.
template <class floatX>
void check_in_flight(const std::vector<Group>& groups, int64_t rows, int round, bool by_mpi) {
    const OwnedStream stream;
    std::vector<Activations<floatX>> all, shards;
    for (const Group& group : groups) {
        const int64_t count = rows * group.comm.world_size;
        all.emplace_back(group, count, round);
        shards.emplace_back(group, count, round + 1);
    }
    Comm& world = groups[0].comm;
    Activations<float> gradients(groups[0], rows * world.world_size, round + 2);
    wait_for_device();
    std::vector<int64_t> sent;
    for (const Group& group : groups) sent.push_back(group.comm.bytes_sent);

    const Comm::Ticket of_gradients = world.all_reduce(gradients.x.data, gradients.count, Dtype::fp32, stream.stream);
    std::vector<Comm::Ticket> tickets;
    for (size_t g = 0; g < groups.size(); g++) {
        tickets.push_back(groups[g].comm.all_reduce(all[g].x.data, all[g].count, stream.stream));
        tickets.push_back(groups[g].comm.reduce_scatter(shards[g].x.data, shards[g].count, stream.stream));
    }
    for (size_t g = groups.size(); g-- > 0;) {  // the last group first
        groups[g].comm.wait(tickets[2 * g + 1], stream.stream);
        groups[g].comm.wait(tickets[2 * g], stream.stream);
    }
    world.wait(of_gradients, stream.stream);
    wait_for_stream(stream.stream);
    gradients.check_all(by_mpi);
    for (size_t g = 0; g < groups.size(); g++) {
        Comm& comm = groups[g].comm;
        all[g].check_all(by_mpi);
        shards[g].check_shard(by_mpi);
        const int64_t n = comm.world_size, gradient_bytes = g == 0 ? 2 * (n - 1) * rows * 4 : 0;
        expect(comm.bytes_sent - sent[g] == gradient_bytes + 3 * (n - 1) * rows * int64_t(sizeof(floatX)),
               "bytes_sent of a group");
        // reduce_scatter and all_gather are an all_reduce of the group.
        comm.wait(comm.all_gather(shards[g].x.data, shards[g].x.bytes(), stream.stream), stream.stream);
        wait_for_stream(stream.stream);
        shards[g].check_all(by_mpi);
    }
}

inline std::vector<int> members_of(Comm& group, int rank) {
    std::vector<int> members;
    for (const std::string& text : group.all_gather_text(std::to_string(rank))) members.push_back(std::stoi(text));
    return members;
}

// The groups of `size` neighbours, and the groups of one rank of each of these.
inline void check_groups(Comm& world, int size, const std::vector<int64_t>& rows, bool by_mpi) {
    const int n = world.world_size, r = world.rank;
    const std::unique_ptr<Comm> near = world.split(r / size), far = world.split(r % size);
    expect(near->world_size == size && near->rank == r % size, "neighbours");
    expect(far->world_size == n / size && far->rank == r / size, "ranks of different groups");
    expect(near->bytes_sent == 0, "the counter of a new group");
    std::vector<int> all;
    for (int q = 0; q < n; q++) all.push_back(q);
    std::vector<Group> groups = {{world, all}};
    for (Comm* comm : {near.get(), far.get()})  // a Comm of one rank does not know the rank's number
        groups.push_back({*comm, comm->world_size == 1 ? std::vector<int>{r} : members_of(*comm, r)});
    for (int q = 0; q < size; q++) expect(groups[1].members[size_t(q)] == r / size * size + q, "order of neighbours");
    for (int q = 0; q < n / size; q++) expect(groups[2].members[size_t(q)] == q * size + r % size, "order of ranks");
    int round = 0;
    for (const int64_t count : rows) {
        check_in_flight<bf16>(groups, count, round += 3, by_mpi);
        check_in_flight<float>(groups, count, round += 3, by_mpi);
    }
    const OwnedStream stream;  // broadcast counts ranks as shard_index does
    const DeviceBuffer<int> x(1, "a number");
    for (Group& group : groups)
        for (int from = 0; from < group.comm.world_size; from++) {
            const int own = 100 + group.comm.shard_index;
            copy_to_device(x.data, &own, sizeof own, stream.stream);
            group.comm.wait(group.comm.broadcast(x.data, sizeof own, from, stream.stream), stream.stream);
            wait_for_stream(stream.stream);
            expect(to_host(x.data, 1)[0] == 100 + from, "broadcast in a group");
        }
}

// A group of a group, and groups that are made and freed again.
inline void check_nested(Comm& world) {
    if (world.world_size % 2 != 0) return;
    const std::unique_ptr<Comm> half = world.split(world.rank % 2), part = half->split(half->rank % 2);
    expect(part->world_size == (half->world_size + (half->rank + 1) % 2) / 2, "ranks of a group of a group");
    for (int i = 0; i < 10; i++) {
        const std::unique_ptr<Comm> again = world.split(world.rank / 2);
        expect(again->all_gather_text("").size() == 2, "a group made again");
    }
}

inline void check_all_groups(Comm& world, const std::vector<int64_t>& rows, bool by_mpi) {
    for (int size = 1; size <= world.world_size; size++)
        if (world.world_size % size == 0) check_groups(world, size, rows, by_mpi);
    check_nested(world);
}

}  // namespace groups_cases
