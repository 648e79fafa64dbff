// nccl_id.cpp: tests that the TCP rendezvous gives NCCL's unique id to all ranks. Making an id needs no GPU.
// test_libraries.py runs this program.
#include <doctest/doctest.h>
#include <nccl.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "base/common.h"
#include "parallel/rendezvous.h"

static std::string new_id() {
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) fail(EXIT_INTERNAL, "ncclGetUniqueId: %s", ncclGetErrorString(result));
    return {id.internal, sizeof id.internal};
}

TEST_CASE("every rank gets rank 0's NCCL id") {
    constexpr int world_size = 4;
    std::vector<std::string> ids(world_size);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world_size; rank++)
        ranks.emplace_back([&, rank] {
            Launch launch;
            launch.launcher = "test", launch.rank = rank, launch.world_size = world_size;
            launch.master_addr = "127.0.0.1", launch.master_port = 21000 + getpid() % 10000;
            ids[rank] = share_nccl_id(launch, new_id, 20);
        });
    for (std::thread& rank : ranks) rank.join();
    CHECK(ids[0].size() == sizeof(ncclUniqueId));
    for (const std::string& id : ids) CHECK((id == ids[0]));  // not printed on failure: an id lets any process join
}
