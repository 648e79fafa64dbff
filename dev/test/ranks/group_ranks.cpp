// group_ranks.cpp: a program that test_groups.py starts as several ranks.
//
//   group_ranks check [ROWS...]           all checks of cases_groups.h, with ROWS elements per rank
//   group_ranks wait                      all ranks but the last wait in a collective of a group, for ever
//   group_ranks yields                    prints whether a rank that waits yields its core, or sleeps
//   group_ranks tensor-parallel N         makes the groups
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#include "base/common.h"
#include "base/host.h"
#include "parallel/groups.h"
#include "support/cases_groups.h"

static std::atomic<int> yields;

// Replaces the C library's function: a thread that waits promptly calls it.
extern "C" int sched_yield() noexcept {
    yields++;
    return int(syscall(SYS_sched_yield));
}

namespace {

// Whether rank 0 yields in a call for which the other ranks are late. A thread that loses its core for milliseconds may
// sleep in a prompt wait too, so there are several calls.
template <class Call>
bool yields_in(Comm& world, const Call& call) {
    const int before = yields;
    for (int i = 0; i < 20; i++) {
        world.all_gather_text("");
        if (world.rank != 0) usleep(20000);
        world.wait(call(), nullptr);
    }
    return yields > before;
}

void print_yields(Comm& world) {
    DeviceBuffer<float> x(64 * world.world_size, "activations");
    const bool weights = yields_in(world, [&] { return world.all_gather(x.data, x.bytes(), nullptr); });
    const bool activations = yields_in(world, [&] { return world.gather_activations(x.data, x.bytes(), nullptr); });
    const bool sums = yields_in(world, [&] { return world.all_reduce(x.data, x.size, nullptr); });
    if (world.rank == 0) printf("weights %d, activations %d, sums %d\n", weights, activations, sums);
}

// Both halves of the world, of which the second lacks its last rank.
void wait_for_ever(Comm& world) {
    const std::unique_ptr<Comm> pair = world.split(world.rank / 2);
    DeviceBuffer<bf16> x(1 << 20, "activations");
    pair->wait(pair->all_reduce(x.data, x.size, nullptr), nullptr);
    wait_for_device();
    world.all_gather_text("");
    printf("rank %d pid %d\n", world.rank, int(getpid()));
    fflush(stdout);
    if (world.rank == world.world_size - 1) sleep(600);
    pair->wait(pair->all_reduce(x.data, x.size, nullptr), nullptr);
    wait_for_device();
    world.wait(world.all_reduce(x.data, x.size, nullptr), nullptr);
    wait_for_device();
}

void run(Comm& world, int argc, char** argv) {
    const std::string command = argc > 1 ? argv[1] : "";
    if (command == "wait") return wait_for_ever(world);
    if (command == "yields") return print_yields(world);
    if (command == "tensor-parallel") {
        const Groups groups = make_groups(world, atoi(argv[2]));
        printf("rank %d: dp %d of %d, tp %d of %d\n", world.rank, groups.dp.rank, groups.dp.world_size, groups.tp.rank,
               groups.tp.world_size);
        return;
    }
    std::vector<int64_t> rows;
    for (int i = 2; i < argc; i++) rows.push_back(atoll(argv[i]));
    groups_cases::check_all_groups(world, rows, world.describe().find("MPI") != std::string::npos);
    if (world.rank == 0) printf("%s: correct\n", world.describe().c_str());
}

}  // namespace

int main(int argc, char** argv) {
    std::unique_ptr<Comm> world;
    try {
        const Launch launch = find_launch(getenv);
        device_init(launch.local_rank, 1);
        world = make_comm(launch);
        run(*world, argc, argv);
    } catch (const Error& error) {
        fprintf(stderr, "error: rank %d on %s: %s\n", world ? world->rank : -1, host_name().c_str(), error.what());
        world ? world->abort(error.exit_code) : exit(error.exit_code);
    }
}
