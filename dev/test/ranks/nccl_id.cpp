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

TEST_CASE("the NCCL library has the version of its header") {
    int version = 0;
    REQUIRE(ncclGetVersion(&version) == ncclSuccess);
    CHECK(version == NCCL_VERSION_CODE);
}

TEST_CASE("every rank gets rank 0's NCCL id, and each rendezvous has another id") {
    std::string of_rendezvous[2];
    for (std::string& first : of_rendezvous) {
        constexpr int world_size = 4;
        static int port = 21000 + getpid() % 10000;
        std::vector<std::string> ids(world_size);
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < world_size; rank++)
            ranks.emplace_back([&, rank] {
                Launch launch;
                launch.launcher = "test", launch.rank = rank, launch.world_size = world_size;
                launch.master_addr = "127.0.0.1", launch.master_port = port;
                ids[rank] = share_nccl_id(launch, new_id, 20);
            });
        for (std::thread& rank : ranks) rank.join();
        port++;
        first = ids[0];
        CHECK(first.size() == sizeof(ncclUniqueId));
        for (const std::string& id : ids) CHECK((id == first));  // not printed on failure: an id lets any process join
    }
    CHECK((of_rendezvous[0] != of_rendezvous[1]));
}
