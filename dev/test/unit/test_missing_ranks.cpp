// test_missing_ranks.cpp: tests the messages of find_missing_ranks about ranks that do not arrive, with a folder in
// place of /proc. test_missing.sh does the same with real processes.
#include "parallel/missing_ranks.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "base/common.h"
#include "base/host.h"
#include "support/temporary.h"

namespace fs = std::filesystem;

namespace {
struct Proc {
    TemporaryDirectory temporary;
    fs::path dir = temporary.path;

    Proc() {
        fs::create_directories(dir / "self/ns");
        fs::create_symlink("net:[1]", dir / "self/ns/net");
        fs::create_symlink("/opt/train_gpt2", dir / "self/exe");
        std::ofstream(dir / "uptime") << "1 1\n";
    }
    // Adds a process of this rank. By default it waits for the other ranks.
    fs::path add(int pid, const std::string& rank, const std::string& job = "42", bool waits = true,
                 const std::string& program = "/opt/train_gpt2", const std::string& network = "net:[1]") const {
        const fs::path process = dir / std::to_string(pid);
        fs::create_directories(process / "ns");
        fs::create_directories(process / "task" / std::to_string(pid + 1));
        std::ofstream(process / "environ", std::ios::binary)
            << "HOME=/root" << '\0' << "XPMIX_RANK=9" << '\0' << "PMIX_RANK=" << rank << '\0'
            << "PMIX_NAMESPACE=" << job << '\0';
        std::ofstream(process / "stat") << pid << " (a ) b) S 1 1\n";
        std::ofstream(process / "task" / std::to_string(pid + 1) / "comm")
            << (waits ? WAITING_THREAD : "other") << "\n";
        fs::create_symlink(program, process / "exe");
        fs::create_symlink(network, process / "ns/net");
        return process;
    }
    std::string call(int world_size, int local_world_size, bool found = true) const {
        Launch launch;
        launch.world_size = world_size, launch.local_world_size = local_world_size;
        const MissingRanks roll = find_missing_ranks(launch, "42", dir);
        CHECK(roll.found == found);
        return roll.text;
    }
    bool speaks(int rank) const {
        Launch launch;
        launch.rank = rank, launch.world_size = launch.local_world_size = 4;
        return find_missing_ranks(launch, "42", dir).reports;
    }
};
const std::string here = " on " + host_name();
}  // namespace

TEST_CASE("the message names a missing rank, its process and the program that it runs") {
    const Proc proc;
    proc.add(100, "0");
    proc.add(103, "3");
    const fs::path other = proc.add(101, "1", "42", false, "/usr/bin/sleep"), mine = proc.add(102, "2", "42", false);
    CHECK(proc.call(4, 4) == "rank 1 (process 101" + here + " runs /usr/bin/sleep), rank 2 (process 102" + here +
                                 " has not called MPI_Init yet)");
    std::ofstream(mine / "stat") << "102 (x ) y) D 1\n";
    CHECK(proc.call(4, 4).ends_with("process 102" + here + " waits for a disk or a file system)"));
    std::ofstream(mine / "stat") << "102 (x ) y) T 1\n";
    CHECK(proc.call(4, 4).ends_with("process 102" + here + " is stopped)"));
    std::ofstream(mine / "task/103/comm") << WAITING_THREAD << "\n";  // a rank that waited, and was then stopped
    CHECK(proc.call(4, 4).ends_with("process 102" + here + " is stopped)"));
    fs::remove(mine / "stat");
    fs::create_directory(mine / "stat");  // cannot be read, as the file of a process that ends meanwhile
    CHECK(proc.call(4, 4).find("process 102") == std::string::npos);
    fs::remove(other / "exe");  // as for a process whose link this user may not read
    CHECK(proc.call(4, 4).starts_with("rank 1 (process 101" + here + " has not called MPI_Init yet)"));
}

TEST_CASE("only the first waiting rank of a host reports") {
    const Proc proc;
    proc.add(100, "0", "42", false, "/usr/bin/sleep");
    CHECK(proc.speaks(2));  // rank 2 reports if it does not see its own process
    proc.add(101, "1");
    proc.add(102, "2");
    CHECK(proc.speaks(1));
    CHECK(!proc.speaks(2));
}

TEST_CASE("a rank without a process is reported as having none") {
    const Proc proc;
    proc.add(100, "0");
    proc.add(101, "1", "43");                                      // of another job
    proc.add(102, "1", "42", true, "/opt/train_gpt2", "net:[2]");  // on another host of a test
    proc.add(103, "7"), proc.add(104, "-1"), proc.add(105, "1x");  // not ranks of this run
    fs::create_directories(proc.dir / "106");                      // a process that has ended meanwhile
    CHECK(proc.call(2, 2) == "rank 1 (no process" + here + ")");
    CHECK(proc.call(4, 3) == "2 of the 3 ranks on " + host_name() + " (no process)");
}

TEST_CASE("a host on which all ranks wait says that other hosts are missing") {
    const Proc proc;
    proc.add(100, "0");
    proc.add(101, "1", "42", false, "/bin/bash");  // the shell that started the next process
    proc.add(102, "1");
    CHECK(proc.call(4, 2, false) == "ranks on other hosts (the 2 on " + host_name() + " have called MPI_Init)");
    CHECK(proc.call(4, 0, false) == "ranks on other hosts (the 2 on " + host_name() + " have called MPI_Init)");
    CHECK(proc.call(2, 2, false) == "MPI_Init, which all 2 ranks" + here + " have called");
}

TEST_CASE("of many missing ranks the first eight are named and the others counted") {
    const Proc proc;
    CHECK(proc.call(20, 20).ends_with("rank 7 (no process" + here + ") and 12 more"));
    const fs::path nothing = proc.dir / "nothing";
    Launch launch;
    launch.world_size = launch.local_world_size = 2;
    CHECK(find_missing_ranks(launch, "42", nothing).text.starts_with("rank 0 (no process"));
}
