// group_ranks.cpp: a program that test_groups.py starts as several ranks. `group_ranks ROWS...` makes all checks of
// cases_groups.h, with ROWS elements per rank.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/common.h"
#include "base/host.h"
#include "parallel/comm.h"
#include "support/cases_groups.h"

int main(int argc, char** argv) {
    std::unique_ptr<Comm> world;
    try {
        const Launch launch = find_launch(getenv);
        device_init(launch.local_rank, 1);
        world = make_comm(launch);
        std::vector<int64_t> rows;
        for (int i = 1; i < argc; i++) rows.push_back(atoll(argv[i]));
        groups_cases::check_all_groups(*world, rows, world->describe().find("MPI") != std::string::npos);
        if (world->rank == 0) printf("%s: correct\n", world->describe().c_str());
    } catch (const Error& error) {
        fprintf(stderr, "error: rank %d on %s: %s\n", world ? world->rank : -1, host_name().c_str(), error.what());
        world ? world->abort(error.exit_code) : exit(error.exit_code);
    }
}
