// test_launch.cpp: tests how a process finds its rank and the number of ranks in the environment of each launcher,
// which was recorded; refused environments, Slurm's lists of hosts, and torchrun's error file.
#include "parallel/launch.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/host.h"
#include "support/refusal.h"
#include "support/temporary.h"

using Variables = std::map<std::string, std::string>;

static Launch find(const Variables& variables) {
    return find_launch([&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    });
}

// `variables` with some of them replaced. An empty variable counts as unset.
static Variables with(Variables variables, const Variables& others) {
    for (const auto& [name, value] : others) variables[name] = value;
    return variables;
}

// The variables that each launcher sets.
static const Variables mpirun = {{"OMPI_COMM_WORLD_SIZE", "8"},
                                 {"OMPI_COMM_WORLD_RANK", "3"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                 {"PMIX_RANK", "3"}};
static const Variables torchrun = {{"RANK", "5"},
                                   {"WORLD_SIZE", "8"},
                                   {"LOCAL_RANK", "1"},
                                   {"LOCAL_WORLD_SIZE", "4"},
                                   {"MASTER_ADDR", "h0"},
                                   {"MASTER_PORT", "29500"},
                                   {"TORCHELASTIC_RUN_ID", "none"},
                                   {"TORCHELASTIC_RESTART_COUNT", "2"},
                                   {"OMP_NUM_THREADS", "1"}};
static const Variables batch = {{"SLURM_JOB_ID", "1234"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"},
                                {"SLURM_LOCALID", "0"},   {"SLURM_NODEID", "0"}, {"SLURM_NODELIST", "h[0-1]"}};
static const Variables srun = with(batch, {{"SLURM_STEP_ID", "0"},
                                           {"SLURM_STEP_NUM_TASKS", "4"},
                                           {"SLURM_STEP_NODELIST", "h[3-4]"},
                                           {"SLURM_PROCID", "2"},
                                           {"SLURM_LOCALID", "0"},
                                           {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.99"}});

TEST_CASE("ranks that meet by TCP have the secret of the environment, which must be long") {
    const Variables secret = {{"TRAIN_GPT2_SECRET", "0123456789abcdef"}};
    CHECK(find(with(torchrun, secret)).secret == "0123456789abcdef");
    CHECK(find(with(srun, secret)).secret == "0123456789abcdef");
    CHECK(find(torchrun).secret == "");
    CHECK(find(with(mpirun, secret)).secret == "");
    for (const char* weak : {"", "0123456789abcde"})
        CHECK(refusal([&] {
                  find(with(torchrun, {{"TRAIN_GPT2_SECRET", weak}}));
              }).starts_with("2 TRAIN_GPT2_SECRET has " + std::to_string(std::string(weak).size()) + " characters"));
}

TEST_CASE("each launcher is recognized, also among variables that other launchers left") {
    const std::string rank3 = "mpirun, rank 3 of 8, local rank 1 of 2", task2 = "srun, rank 2 of 4, local rank 0",
                      task2_of_2 = task2 + " of 2", rank5 = "torchrun, rank 5 of 8, local rank 1 of 4@, restart 2",
                      single = "single process",
                      unstarted = "single process@ (SLURM_NTASKS=4, but srun did not start this process)";
    struct Row {
        std::string expected;  // @: the name of the host, which is at the end of others
        bool mpi;
        Variables variables;
    };
    for (const Row& row : std::vector<Row>{
             {single, false, {}},
             {rank3, true, mpirun},
             {rank5, false, torchrun},
             {"torchrun, rank 0 of 1, local rank 0 of 1", false, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}},
             {task2, false, srun},
             {task2_of_2, false, with(srun, {{"SLURM_GTIDS", "2,3"}})},
             // sbatch without srun starts one process, for any SLURM_NTASKS
             {unstarted, false, batch},
             {single, false, with(srun, {{"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}})},
             // mpirun in a Slurm job: SLURM_PROCID is 0 in every rank, and the step is mpirun's own
             {rank3, true, with(batch, mpirun)},
             {rank3, true, with(with(srun, {{"SLURM_STEP_NUM_TASKS", "16"}}), mpirun)},
             {task2, true, with(srun, {{"PMIX_RANK", "2"}})},  // srun --mpi=pmix
             // srun starts one torchrun per host: the rank is torchrun's, not that of the task
             {rank5, false, with(with(srun, {{"SLURM_STEP_NUM_TASKS", "2"}, {"PMIX_RANK", "0"}}), torchrun)},
             // mpirun around a script that sets torchrun's variables from mpirun's
             {rank3, true, with(with(torchrun, {{"RANK", "3"}}), mpirun)},
             // salloc's shell
             {unstarted, false, with(batch, {{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}})},
             {task2, false, with(srun, {{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h0"}})},
         }) {
        std::string expected = row.expected;
        expected.replace(std::min(expected.find('@'), expected.size()), 1, " on " + host_name());
        const Launch launch = find(row.variables);
        CHECK(describe_launch(launch) == expected);
        CHECK(launch.mpi == row.mpi);
    }
}

TEST_CASE("the launcher's variables give the address of rank 0, the run and the attempt") {
    for (const auto& [variables, expected] : std::vector<std::pair<Variables, std::string>>{
             {torchrun, "h0:29500 none 2"},
             {with(torchrun, {{"MASTER_ADDR", "[::1]"}}), "::1:29500 none 2"},
             // The first host of the step; port 20000 + 10 * (job % 1000) + step.
             {with(srun, {{"SLURM_RESTART_COUNT", "1"}}), "h3:22340 1234.0 1"},
             {with(srun, {{"SLURM_STEP_ID", "7"}, {"SLURM_JOB_ID", "4000"}}), "h3:20007 4000.7 0"},
             {with(srun, {{"MASTER_PORT", "4711"}, {"MASTER_ADDR", "x"}}), "h3:4711 1234.0 0"},
             {with(srun, {{"SLURM_STEP_NODELIST", ""}}), ":22340 1234.0 0"}}) {  // refused only if ranks need it
        const Launch launch = find(variables);
        CHECK(launch.master_addr + ":" + std::to_string(launch.master_port) + " " + launch.run_id + " " +
                  std::to_string(launch.attempt) ==
              expected);
    }
    CHECK(find(with(batch, {{"SLURM_RESTART_COUNT", "3"}})).attempt == 3);
}

TEST_CASE("of variables of which only some are set the missing ones are named") {
    for (const auto& [variables, expected] : std::vector<std::pair<Variables, std::string>>{
             {{}, ""},
             {batch, ""},
             {torchrun, ""},
             {srun, ""},
             {with(mpirun, {{"MASTER_ADDR", "h0"}}), ""},
             {with(srun, {{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h0"}}), ""},
             {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, ""},
             {{{"RANK", "0"}}, "RANK: set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: each"},
             {{{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h0"}, {"MASTER_PORT", "29500"}},
              "WORLD_SIZE, MASTER_ADDR, MASTER_PORT: set, but not RANK, LOCAL_RANK: each"},
             {with(torchrun, {{"RANK", ""}}), "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: set, but not RANK: "},
             {with(torchrun, {{"MASTER_ADDR", ""}}),
              "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT: set, but not MASTER_AD"},
             {with(srun, {{"SLURM_STEP_NUM_TASKS", ""}}),
              "SLURM_STEP_ID, SLURM_PROCID: set, but not SLURM_STEP_NUM_TA"},
         }) {
        const std::string incomplete = find(variables).incomplete, want = expected;
        CHECK_MESSAGE(incomplete.starts_with(want), incomplete << " instead of " << want);
        CHECK(incomplete.empty() == want.empty());
    }
}

TEST_CASE("impossible numbers, launchers that contradict each other, and copies of one run are refused") {
    const Variables leftover = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
    for (const auto& [variables, expected] : std::vector<std::pair<Variables, std::string>>{
             {with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "0"}}), "OMPI_COMM_WORLD_SIZE is '0', not a number from 1 to"},
             {with(mpirun, {{"OMPI_COMM_WORLD_RANK", "8"}}), "OMPI_COMM_WORLD_RANK is '8', not a number from 0 to 7"},
             {with(mpirun, {{"OMPI_COMM_WORLD_RANK", ""}}), "OMPI_COMM_WORLD_RANK is not set; the launcher sets it"},
             {with(mpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}), "OMPI_COMM_WORLD_LOCAL_RANK is '2', not a number"},
             {with(torchrun, {{"RANK", "5 "}}), "RANK is '5 ', not a number"},
             {with(torchrun, {{"MASTER_PORT", "70000"}}), "MASTER_PORT is '70000', not a number from 1 to 65535"},
             {with(srun, {{"SLURM_PROCID", "99999999999999999999"}}), "SLURM_PROCID is '99999999999999999999', not a"},
             {with(srun, {{"SLURM_STEP_NODELIST", "h[0-"}}), "'h[0-' is not a list of hosts"},
             {with(torchrun, mpirun), "mpirun says rank 3 of 8, but RANK=5 and WORLD_SIZE=8: they contradict each"},
             {with(srun, leftover),
              "this is one of 4 processes (SLURM_STEP_NUM_TASKS=4), but one of 1 ranks (torchrun): "
              "they would be copies of the same run"},
             {with(srun, {{"PMIX_RANK", "1"}}), "SLURM_PROCID=2, but PMIX_RANK=1: they come from two launchers"},
             // launchers that this program cannot join
             {{{"PMIX_RANK", "3"}}, "PMIX_RANK=3, but nothing says how many ranks there are; start with Open MPI's"},
             {{{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}}, "this is one of 4 processes (PMI_SIZE=4), but one of 1 ranks"},
         }) {
        const std::string message = refusal([&, v = variables] { find(v); });
        const std::string want = "2 " + expected;
        CHECK_MESSAGE(message.starts_with(want), message << " instead of " << want);
    }
}

TEST_CASE("the first host of a list as Slurm writes it") {
    for (const auto& [list, host] : std::map<std::string, std::string>{{"h0", "h0"},
                                                                       {"h[0-2,7],x12", "h0"},
                                                                       {"gpu-a,gpu-b", "gpu-a"},
                                                                       {"n[008-011]", "n008"},
                                                                       {"r[1-2]n[0,3]-ib", "r1n0-ib"}})
        CHECK(first_host(list) == host);
    for (const char* list : {"h[", "h[0]]", "h[0-2"})
        CHECK(refusal([&] { first_host(list); }).find("is not a list of hosts as in h[0-2,7],x12") < 20);
}

// torchrun prints message.extraInfo.py_callstack if the file has it, else message.message. It requires the time.
TEST_CASE("the error file has the fields that torchrun reads") {
    const TemporaryDirectory dir;
    setenv("TORCHELASTIC_ERROR_FILE", (dir / "error.json").c_str(), 1);
    write_error_file("longer than the one that counts: \"\xff\"\n");
    write_error_file("rank 3: out of \"memory\"");
    const auto json = nlohmann::json::parse(read_bytes(dir / "error.json"));
    CHECK(json["message"]["message"] == "rank 3: out of \"memory\"");
    CHECK(json["message"]["extraInfo"]["timestamp"].get<std::string>().size() >= 10);
    unsetenv("TORCHELASTIC_ERROR_FILE");
}
