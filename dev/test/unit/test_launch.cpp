// test_launch.cpp: tests how a process finds its rank and the number of ranks in the environment of each launcher. The
// environments were recorded, and some have variables that other launchers left. Other cases test refused environments,
// Slurm's lists of hosts, and torchrun's error file.
#include "parallel/launch.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <map>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/host.h"
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

static std::string place(const Launch& launch) { return launch.master_addr + ":" + std::to_string(launch.master_port); }

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

TEST_CASE("each launcher is recognized, also among variables that other launchers left") {
    struct Row {
        const char* expected;  // without the name of the host
        Variables variables;
        bool mpi;
    };
    const std::string host = " on " + host_name();
    for (const Row& row : std::vector<Row>{
             {"single process", {}, false},
             {"mpirun, rank 3 of 8, local rank 1 of 2", mpirun, true},
             {"mpirun, rank 0 of 1, local rank 0 of 1",
              {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}},
              true},
             {"torchrun, rank 5 of 8, local rank 1 of 4@, restart 2", torchrun, false},
             {"torchrun, rank 0 of 1, local rank 0 of 1", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, false},
             {"srun, rank 2 of 4, local rank 0", srun, false},
             // sbatch without srun starts one process, for any SLURM_NTASKS
             {"single process@ (SLURM_NTASKS=4, but srun did not start this process)", batch, false},
             {"single process@ (SLURM_NTASKS=4, but srun did not start this process)",
              with(batch, {{"SLURM_STEP_NUM_TASKS", "4"}}), false},
             {"single process", with(srun, {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "1"}}), false},
             {"single process", with(srun, {{"SLURM_STEP_NUM_TASKS", "1"}, {"PMIX_RANK", "0"}}), false},
             // mpirun in a Slurm job: SLURM_PROCID is 0 in every rank, and the step is mpirun's own
             {"mpirun, rank 3 of 8, local rank 1 of 2", with(batch, mpirun), true},
             {"mpirun, rank 3 of 8, local rank 1 of 2", with(with(srun, {{"SLURM_STEP_NUM_TASKS", "16"}}), mpirun),
              true},
             // srun --mpi=pmix, and pmi2
             {"srun, rank 2 of 4, local rank 0", with(srun, {{"PMIX_RANK", "2"}}), true},
             {"srun, rank 2 of 4, local rank 0", with(srun, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}), false},
             // srun starts one torchrun per host: the rank is torchrun's, not that of the task
             {"torchrun, rank 5 of 8, local rank 1 of 4@, restart 2",
              with(with(srun, {{"SLURM_STEP_NUM_TASKS", "2"}, {"PMIX_RANK", "0"}}), torchrun), false},
             // mpirun around a script that sets torchrun's variables from mpirun's
             {"mpirun, rank 3 of 8, local rank 1 of 2", with(with(torchrun, {{"RANK", "3"}}), mpirun), true},
             // some batch systems set WORLD_SIZE for every process
             {"single process", {{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h0"}, {"MASTER_PORT", "29500"}}, false},
             {"srun, rank 2 of 4, local rank 0", with(srun, {{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h0"}}), false},
             {"single process", with({}, {{"OMPI_COMM_WORLD_SIZE", ""}}), false},
         }) {
        std::string expected = row.expected;
        expected.insert(std::min(expected.find('@'), expected.size()), host);
        std::erase(expected, '@');
        const Launch launch = find(row.variables);
        CHECK(describe_launch(launch) == expected);
        CHECK(launch.mpi == row.mpi);
    }
}

TEST_CASE("the launcher's variables give the rendezvous address, run id and attempt") {
    Launch launch = find(torchrun);
    CHECK(place(launch) == "h0:29500");
    CHECK(launch.run_id == "none");
    CHECK(launch.attempt == 2);
    launch = find(with(srun, {{"SLURM_RESTART_COUNT", "1"}}));
    CHECK(place(launch) == "h3:22340");  // the first host of the step; 20000 + 234 * 10 + 0
    CHECK(launch.run_id == "1234.0");
    CHECK(launch.attempt == 1);
    CHECK(launch.local_world_size == 0);
    CHECK(place(find(with(srun, {{"SLURM_STEP_ID", "7"}, {"SLURM_JOB_ID", "4000"}}))) == "h3:20007");
    CHECK(place(find(with(srun, {{"MASTER_PORT", "4711"}, {"MASTER_ADDR", "x"}}))) == "h3:4711");
    CHECK(place(find(with(srun, {{"SLURM_STEP_NODELIST", ""}}))) ==
          ":22340");  // refused only if the ranks need the address
    CHECK(find(mpirun).master_addr == "");
    CHECK(find(with(batch, {{"SLURM_RESTART_COUNT", "3"}})).attempt == 3);
}

struct Refusal {
    Variables variables;
    const char* message;  // its beginning
};

static void expect_refusals(const std::vector<Refusal>& rows) {
    for (const Refusal& row : rows) {
        std::string message;
        try {
            find(row.variables);
        } catch (const Error& error) {
            CHECK(error.exit_code == EXIT_USAGE);
            message = error.what();
        }
        CHECK_MESSAGE(message.starts_with(row.message), message << " instead of " << row.message);
    }
}

TEST_CASE("impossible numbers in variables are refused, and the message has name and value") {
    expect_refusals({
        {with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "x"}}), "OMPI_COMM_WORLD_SIZE is 'x', not a number from 1 to 65536"},
        {with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "0"}}), "OMPI_COMM_WORLD_SIZE is '0', not a number from 1 to"},
        {with(mpirun, {{"OMPI_COMM_WORLD_RANK", "-1"}}), "OMPI_COMM_WORLD_RANK is '-1', not a number from 0 to"},
        {with(mpirun, {{"OMPI_COMM_WORLD_RANK", "8"}}), "OMPI_COMM_WORLD_RANK is '8', not a number from 0 to 7"},
        {with(mpirun, {{"OMPI_COMM_WORLD_RANK", ""}}), "OMPI_COMM_WORLD_RANK is not set; the launcher sets it"},
        {with(mpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}), "OMPI_COMM_WORLD_LOCAL_RANK is '2', not a number from 0"},
        {with(mpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "9"}}), "OMPI_COMM_WORLD_LOCAL_SIZE is '9', not a number from 1"},
        {with(torchrun, {{"RANK", "5 "}}), "RANK is '5 ', not a number"},
        {with(torchrun, {{"RANK", "99999999999999999999"}}), "RANK is '99999999999999999999', not a number"},
        {with(torchrun, {{"LOCAL_RANK", ""}}), "LOCAL_RANK is not set"},
        {with(torchrun, {{"MASTER_PORT", ""}}), "MASTER_PORT is not set; the launcher sets it"},
        {with(torchrun, {{"MASTER_PORT", "70000"}}), "MASTER_PORT is '70000', not a number from 1 to 65535"},
        {with(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "-1"}}), "TORCHELASTIC_RESTART_COUNT is '-1'"},
        {with(srun, {{"SLURM_PROCID", "4"}}), "SLURM_PROCID is '4', not a number from 0 to 3"},
        {with(srun, {{"SLURM_PROCID", ""}}), "SLURM_PROCID is not set"},
        {with(srun, {{"SLURM_STEP_NUM_TASKS", "many"}}), "SLURM_STEP_NUM_TASKS is 'many'"},
        {with(srun, {{"SLURM_STEP_NODELIST", "h[0-"}}), "'h[0-' is not a list of hosts"},
    });
}

TEST_CASE("launchers that contradict each other are refused, and so are copies of one run") {
    const Variables mpirun4 = with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "4"}});
    const Variables leftover = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
    expect_refusals({
        {with(torchrun, mpirun4), "mpirun says rank 3 of 4, but RANK=5 and WORLD_SIZE=8: they contradict each other"},
        {with(leftover, mpirun), "mpirun says rank 3 of 8, but RANK=0 and WORLD_SIZE=1"},
        {with(torchrun, mpirun), "mpirun says rank 3 of 8, but RANK=5 and WORLD_SIZE=8"},
        {with(srun, leftover),
         "this is one of 4 processes (SLURM_STEP_NUM_TASKS=4), but one of 1 ranks (torchrun): "
         "they would be copies of the same run"},
        {with(leftover, {{"PMI_SIZE", "4"}}), "this is one of 4 processes (PMI_SIZE=4), but one of 1 ranks (torchrun)"},
        {with(srun, {{"PMIX_RANK", "1"}}), "SLURM_PROCID=2, but PMIX_RANK=1: they come from two launchers"},
        // launchers that this program cannot join
        {{{"PMIX_RANK", "3"}}, "PMIX_RANK=3, but nothing says how many ranks there are; start with Open MPI's"},
        {with(batch, {{"PMIX_RANK", "0"}}), "PMIX_RANK=0, but nothing says how many ranks there are"},
        {{{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}},
         "this is one of 4 processes (PMI_SIZE=4), but one of 1 ranks (single)"},
    });
}

TEST_CASE("the first host of a list as Slurm writes it") {
    CHECK(first_host("h0") == "h0");
    CHECK(first_host("h[0-2,7],x12") == "h0");
    CHECK(first_host("h[3],x12") == "h3");
    CHECK(first_host("gpu-a,gpu-b") == "gpu-a");
    CHECK(first_host("n[008-011]") == "n008");
    CHECK(first_host("n[9-10]") == "n9");
    CHECK(first_host("r[1-2]n[0,3]-ib") == "r1n0-ib");
    for (const char* list : {"h[", "h]", "h[0]]", "h[0-2", "h]["})
        CHECK_THROWS_WITH_AS(first_host(list), doctest::Contains("is not a list of hosts as in h[0-2,7],x12"), Error);
}

// torchrun prints message.extraInfo.py_callstack if the file has it, else message.message. It requires the time.
TEST_CASE("the error file has the fields that torchrun reads") {
    const TemporaryDirectory dir;
    unsetenv("TORCHELASTIC_ERROR_FILE");
    write_error_file("nothing to do");
    setenv("TORCHELASTIC_ERROR_FILE", (dir / "none/error.json").c_str(), 1);
    write_error_file("no folder");
    const std::string path = dir / "error.json";
    setenv("TORCHELASTIC_ERROR_FILE", path.c_str(), 1);
    write_error_file("longer than the one that counts: \"\xff\"\n");
    write_error_file("rank 3: out of \"memory\"");
    const auto json = nlohmann::json::parse(read_bytes(path));
    CHECK(json["message"]["message"] == "rank 3: out of \"memory\"");
    CHECK(json["message"]["extraInfo"]["timestamp"].get<std::string>().size() >= 10);
    CHECK_FALSE(json["message"]["extraInfo"].contains("py_callstack"));
    unsetenv("TORCHELASTIC_ERROR_FILE");
}
