// test_launch.cpp: tests how a process finds its rank and the number of ranks in the environment of each launcher. The
// environments were recorded, and some have variables that other launchers left. Other cases test refused environments,
// Slurm's lists of hosts, and torchrun's error file.
#include "parallel/launch.h"

#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <map>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/host.h"
#include "support/temporary.h"

using Variables = std::map<std::string, std::string>;

static Launch find(const Variables& variables, const LaunchOptions& options = {}) {
    return find_launch(options, [&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    });
}

// The message of the Error, which must have EXIT_USAGE; "" if there is none.
static std::string refusal(const Variables& variables, const LaunchOptions& options = {}) {
    try {
        find(variables, options);
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_USAGE);
        CHECK(strchr(error.what(), '\n') == nullptr);
        return error.what();
    }
    return "";
}

// `variables` with some of them replaced. An empty variable counts as unset.
static Variables with(Variables variables, const Variables& others) {
    for (const auto& [name, value] : others) variables[name] = value;
    return variables;
}

static LaunchOptions options(int rank, int world_size, const std::string& rendezvous = "", int local_rank = -1) {
    LaunchOptions options;
    options.rank = rank, options.world_size = world_size, options.local_rank = local_rank;
    options.rendezvous = rendezvous;
    return options;
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
                                   {"TORCHELASTIC_ERROR_FILE", "/tmp/error.json"},
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
              {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}},
              true},
             {"torchrun, rank 5 of 8, local rank 1 of 4@, restart 2", torchrun, false},
             {"torchrun, rank 0 of 1, local rank 0 of 1",
              {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "x"}},
              false},
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
             {"srun, rank 2 of 4", with(srun, {{"SLURM_LOCALID", ""}}), false},
             // srun starts one torchrun per host: the rank is torchrun's, not that of the task
             {"torchrun, rank 5 of 8, local rank 1 of 4@, restart 2",
              with(with(srun, {{"SLURM_STEP_NUM_TASKS", "2"}, {"PMIX_RANK", "0"}}), torchrun), false},
             // mpirun around a script that sets torchrun's variables from mpirun's
             {"mpirun, rank 3 of 8, local rank 1 of 2", with(with(torchrun, {{"RANK", "3"}}), mpirun), true},
             // not torchrun, because variables are missing: some batch systems set WORLD_SIZE for every process
             {"single process", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, false},
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

TEST_CASE("a run over several hosts says that Open MPI 5's mpirun may hide a failure") {
    CHECK(find(mpirun).note == "");
    CHECK(find(with(mpirun, {{"PRTE_LAUNCHED", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}})).note == "");
    CHECK(
        find(with(mpirun, {{"PRTE_LAUNCHED", "1"}})).note ==
        "Open MPI 5's mpirun may end with exit code 0 when it loses a host: the log's last step says whether a run is "
        "complete");
}

TEST_CASE("the launcher's variables give the rendezvous address, run id and attempt") {
    Launch launch = find(torchrun);
    CHECK(place(launch) == "h0:29500");
    CHECK(launch.run_id == "none");
    CHECK(launch.attempt == 2);
    CHECK(launch.error_file == "/tmp/error.json");
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
    CHECK(find(mpirun).first_step == -1);
    launch = find(with(mpirun, {{"TRAIN_GPT2_RESTARTS", "2"}, {"TRAIN_GPT2_FIRST_STEP", "0"}}));
    CHECK(launch.attempt == 2);
    CHECK(launch.first_step == 0);
    CHECK(find(with(batch, {{"SLURM_RESTART_COUNT", "3"}})).attempt == 3);
}

TEST_CASE("options give the rank, and override the variables of a launcher") {
    Launch launch = find({}, options(3, 8, "h0:29500", 1));
    CHECK(describe_launch(launch) == "options, rank 3 of 8, local rank 1 on " + host_name());
    CHECK(place(launch) == "h0:29500");
    CHECK_FALSE(launch.mpi);
    launch = find({}, options(3, 8, "[fe80::1]:29500"));
    CHECK(place(launch) == "fe80::1:29500");
    CHECK(launch.local_rank == -1);
    CHECK(launch.local_world_size == 0);
    launch = find({}, options(0, 1));
    CHECK(describe_launch(launch) == "options, rank 0 of 1, local rank 0 of 1 on " + host_name());
    LaunchOptions named = options(0, 2, "h0:1");
    named.run_id = "night-2";
    CHECK(find({}, named).run_id == "night-2");
    // Options override a launcher's variables that agree with them, or that count fewer processes than there are ranks.
    CHECK(find(mpirun, options(3, 8, "h0:1")).launcher == "options");
    CHECK(find(mpirun, options(3, 8, "h0:1")).mpi);
    CHECK(place(find(torchrun, options(5, 8, "h9:1"))) == "h9:1");
    CHECK(find(srun, options(7, 8, "h0:1")).rank == 7);
    CHECK(find(batch, options(0, 1)).launcher == "options");
}

TEST_CASE("incomplete and impossible options are refused") {
    struct Row {
        LaunchOptions options;
        const char* sentence;
    };
    LaunchOptions only_id;
    only_id.run_id = "a";
    LaunchOptions bad_id = options(0, 2, "h0:1");
    bad_id.run_id = "a b";
    LaunchOptions long_id = options(0, 2, "h0:1");
    long_id.run_id = std::string(257, 'x');
    const char* syntax = "--rendezvous '";
    for (const Row& row : std::vector<Row>{
             {options(3, -1), "--world-size is missing: give --rank, --world-size and --rendezvous together"},
             {options(-1, 8), "--rank is missing"},
             {options(-1, -1, "h0:1"), "--rank is missing"},
             {options(-1, -1, "", 0), "--rank is missing"},
             {only_id, "--rank is missing"},
             {options(0, 2),
              "--rendezvous HOST:PORT is missing: the address at which rank 0 of 2 waits for the others"},
             {options(8, 8, "h0:1"), "--rank 8, but --world-size 8: ranks are 0 to 7"},
             {options(0, 0), "--world-size 0 is not a number from 1 to 65536"},
             {options(0, 65537, "h0:1"), "--world-size 65537 is not a number from 1 to 65536"},
             {options(0, 2, "h0:1", 2), "--local-rank 2, but --world-size 2: local ranks are 0 to 1"},
             {options(0, 2, "h0"), syntax},
             {options(0, 2, "h0:"), syntax},
             {options(0, 2, ":29500"), syntax},
             {options(0, 2, "h0:0"), syntax},
             {options(0, 2, "h0:65536"), syntax},
             {options(0, 2, "h0:99999999999"), syntax},
             {options(0, 2, "h0:29500x"), syntax},
             {options(0, 2, "fe80::1:29500"),
              "--rendezvous 'fe80::1:29500' is not HOST:PORT, as in h0:29500 or [fe80::1]:29500"},
             {options(0, 2, "[fe80::1]"), syntax},
             {options(0, 2, "[]:1"), syntax},
             {bad_id, "the run id has the character 0x20; only printable ASCII without spaces is allowed"},
             {long_id, "the run id has 257 characters; at most 256 are allowed"},
         }) {
        const std::string said = refusal({}, row.options);
        CHECK_MESSAGE(said.starts_with(row.sentence), said << " instead of " << row.sentence);
    }
}

TEST_CASE("impossible numbers in variables are refused, and the message has name and value") {
    struct Row {
        Variables variables;
        const char* sentence;
    };
    for (const Row& row : std::vector<Row>{
             {with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "x"}}),
              "OMPI_COMM_WORLD_SIZE is 'x', not a number from 1 to 65536"},
             {with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "0"}}), "OMPI_COMM_WORLD_SIZE is '0', not a number from 1 to"},
             {with(mpirun, {{"OMPI_COMM_WORLD_RANK", "-1"}}), "OMPI_COMM_WORLD_RANK is '-1', not a number from 0 to"},
             {with(mpirun, {{"OMPI_COMM_WORLD_RANK", "8"}}),
              "OMPI_COMM_WORLD_RANK=8, but OMPI_COMM_WORLD_SIZE=8: ranks are 0 to 7"},
             {with(mpirun, {{"OMPI_COMM_WORLD_RANK", ""}}), "OMPI_COMM_WORLD_RANK is not set; the launcher sets it"},
             {with(mpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}),
              "OMPI_COMM_WORLD_LOCAL_RANK is '2', not a number from 0 to 1"},
             {with(mpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "9"}}),
              "OMPI_COMM_WORLD_LOCAL_SIZE is '9', not a number from 1 to 8"},
             {with(torchrun, {{"RANK", "5 "}}), "RANK is '5 ', not a number"},
             {with(torchrun, {{"RANK", "5x"}}), "RANK is '5x', not a number"},
             {with(torchrun, {{"RANK", "99999999999999999999"}}), "RANK is '99999999999999999999', not a number"},
             {with(torchrun, {{"RANK", "8"}}), "RANK=8, but WORLD_SIZE=8: ranks are 0 to 7"},
             {with(torchrun, {{"MASTER_PORT", ""}}), "MASTER_PORT is not set; the launcher sets it"},
             {with(torchrun, {{"MASTER_PORT", "70000"}}), "MASTER_PORT is '70000', not a number from 1 to 65535"},
             {with(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "-1"}}), "TORCHELASTIC_RESTART_COUNT is '-1'"},
             {with(torchrun, {{"TORCHELASTIC_RUN_ID", "a\nb"}}), "the run id has the character 0x0a"},
             {with(mpirun, {{"SLURM_RESTART_COUNT", "2147483647"}, {"TRAIN_GPT2_RESTARTS", "1"}}),
              "SLURM_RESTART_COUNT is '2147483647', not a number from 0 to 1000000"},
             {with(srun, {{"SLURM_PROCID", "4"}}), "SLURM_PROCID=4, but SLURM_STEP_NUM_TASKS=4: ranks are 0 to 3"},
             {with(srun, {{"SLURM_PROCID", ""}}), "SLURM_PROCID is not set"},
             {with(srun, {{"SLURM_STEP_NUM_TASKS", "many"}}), "SLURM_STEP_NUM_TASKS is 'many'"},
             {with(srun, {{"SLURM_STEP_NODELIST", "h[0-"}}), "'h[0-' is not a list of hosts"},
         }) {
        const std::string said = refusal(row.variables);
        CHECK_MESSAGE(said.starts_with(row.sentence), said << " instead of " << row.sentence);
    }
}

TEST_CASE("variables of launchers that contradict each other are refused, and so are copies of one run") {
    struct Row {
        Variables variables;
        LaunchOptions options;
        const char* sentence;
    };
    const Variables mpirun4 = with(mpirun, {{"OMPI_COMM_WORLD_SIZE", "4"}});
    const Variables leftover = {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "localhost"}};
    for (const Row& row : std::vector<Row>{
             {with(torchrun, mpirun4),
              {},
              "OMPI_COMM_WORLD_SIZE=4, but WORLD_SIZE=8: mpirun and torchrun contradict each other; start with one of "
              "them, or with env -u RANK -u WORLD_SIZE"},
             {with(leftover, mpirun), {}, "OMPI_COMM_WORLD_SIZE=8, but WORLD_SIZE=1"},
             {with(torchrun, mpirun), {}, "OMPI_COMM_WORLD_RANK=3 of OMPI_COMM_WORLD_SIZE=8, but RANK=5: mpirun and"},
             {mpirun, options(0, 1), "--world-size 1, but OMPI_COMM_WORLD_SIZE=8: options and mpirun contradict"},
             {mpirun, options(4, 8, "h0:1"), "--rank 4 of --world-size 8, but OMPI_COMM_WORLD_RANK=3: options and"},
             {torchrun, options(0, 1), "--world-size 1, but WORLD_SIZE=8: options and torchrun contradict each other"},
             {torchrun, options(4, 8, "h0:1"), "--rank 4 of --world-size 8, but RANK=5"},
             {srun, options(0, 1),
              "SLURM_STEP_NUM_TASKS=4, but --world-size 1: 4 processes would be copies of the same run; start as many "
              "ranks as tasks, or with env -u SLURM_STEP_NUM_TASKS"},
             {with(srun, leftover), {}, "SLURM_STEP_NUM_TASKS=4, but WORLD_SIZE=1: 4 processes would be copies"},
             {with(leftover, {{"PMI_SIZE", "4"}}), {}, "PMI_SIZE=4, but WORLD_SIZE=1: 4 processes would be copies"},
             {with(srun, {{"PMIX_RANK", "1"}}), {}, "SLURM_PROCID=2, but PMIX_RANK=1: they come from two launchers"},
             // launchers that this program cannot join
             {{{"PMIX_RANK", "3"}},
              {},
              "PMIX_RANK=3, but nothing says how many ranks there are; start with Open MPI's"},
             {with(batch, {{"PMIX_RANK", "0"}}), {}, "PMIX_RANK=0, but nothing says how many ranks there are"},
             {{{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}},
              {},
              "this is one of 4 processes (PMI_SIZE) of an mpirun that is not Open"},
             {{{"RANK", "2"}, {"WORLD_SIZE", "4"}},
              {},
              "RANK=2 and WORLD_SIZE=4, but MASTER_ADDR is not set; torchrun sets all three"},
         }) {
        const std::string said = refusal(row.variables, row.options);
        CHECK_MESSAGE(said.starts_with(row.sentence), said << " instead of " << row.sentence);
    }
}

TEST_CASE("--rendezvous-timeout applies under every launcher, and is 300 s by default") {
    LaunchOptions patient;
    patient.join_seconds = 7;
    for (const Variables& variables : {Variables{}, mpirun, torchrun, srun}) {
        CHECK(find(variables, patient).join_seconds == 7);
        CHECK(find(variables).join_seconds == 300);
    }
}

TEST_CASE("the first host of a list as Slurm writes it") {
    CHECK(first_host("h0") == "h0");
    CHECK(first_host("h[0-2,7],x12") == "h0");
    CHECK(first_host("h[3],x12") == "h3");
    CHECK(first_host("gpu-a,gpu-b") == "gpu-a");
    CHECK(first_host("n[008-011]") == "n008");
    CHECK(first_host("n[9-10]") == "n9");
    CHECK(first_host("r[1-2]n[0,3]-ib") == "r1n0-ib");
    for (const char* list : {"", ",", "h0,", "h[", "h]", "h[]", "h[0-]", "h[-1]", "h[2-1]", "h[0,,1]", "h[[0]]", "h[a]",
                             "h[0-2", "h0-2]", "h0,h[2-1]", "h[0--1]", "h[99999999999]", "h[1 ]"})
        CHECK_THROWS_WITH_AS(first_host(list), doctest::Contains("is not a list of hosts as in h[0-2,7],x12"), Error);
}

TEST_CASE("a name in a list of hosts is at most 253 characters long, and a refused list is not shown whole") {
    CHECK(first_host(std::string(253, 'h')) == std::string(253, 'h'));
    for (const std::string& list :
         {std::string(254, 'h'), std::string(500'000, 'h') + "[0-65535]", "h0," + std::string(253, 'h') + "[1]"}) {
        try {
            first_host(list);
            FAIL("not refused");
        } catch (const Error& error) {
            CHECK(error.exit_code == EXIT_USAGE);
            CHECK(strlen(error.what()) < 300);
        }
    }
}

TEST_CASE("the boot id is the same in every process of a host") {
    CHECK(host_id() == host_id());
    CHECK(host_id().size() > 36);  // a UUID and the network
    CHECK(host_id().find('/') == 36);
    CHECK_FALSE(host_name().empty());
}

// torchrun prints message.extraInfo.py_callstack if the file has it, else message.message. It requires the time.
TEST_CASE("the error file has the fields that torchrun reads") {
    const TemporaryDirectory dir;
    Launch launch;
    write_error_file(launch, "nothing to do");
    launch.error_file = dir / "none/error.json";
    write_error_file(launch, "no folder");
    launch.error_file = dir / "error.json";
    write_error_file(launch, "longer than the one that counts: \"\xff\"\n");
    write_error_file(launch, "rank 3: out of \"memory\"");
    const auto json = nlohmann::json::parse(read_bytes(launch.error_file));
    CHECK(json["message"]["message"] == "rank 3: out of \"memory\"");
    write_error_file(launch, "a\x1b[2J: no such file");  // torchrun prints the text as it is
    CHECK(nlohmann::json::parse(read_bytes(launch.error_file))["message"]["message"] == "a\\x1b[2J: no such file");
    CHECK_FALSE(json["message"]["extraInfo"].contains("py_callstack"));
    CHECK(std::stoll(json["message"]["extraInfo"]["timestamp"].get<std::string>()) > 1600000000);
}

// The GPUs that --gpus selects on a host with four, or the message of the refusal.
static std::string gpus_of(const std::string& list) {
    std::string out;
    try {
        for (int gpu : parse_gpus(list, [] { return 4; })) out += (out.empty() ? "" : " ") + std::to_string(gpu);
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_USAGE);
        return error.what();
    }
    return out;
}

TEST_CASE("--gpus: all, a number, or a list") {
    CHECK(gpus_of("all") == "0 1 2 3");
    CHECK(gpus_of("2") == "0 1");
    CHECK(gpus_of("4") == "0 1 2 3");
    CHECK(gpus_of("0,2,3") == "0 2 3");
    CHECK(gpus_of("3,1") == "3 1");
    for (const char* list : {"", "0", "0,,2", "-1", "all,1", "1,", ",1", "0,-1", "1 ", "+2", "1.5", "99999999999"})
        CHECK(gpus_of(list) ==
              format("--gpus '%s' is neither all, nor a number of GPUs from 1, nor a list such as 0,2,3", list));
    CHECK(gpus_of("5") == "--gpus 5, but there are 4 on this host");
    CHECK(gpus_of("1,4") == "--gpus 1,4, but there are 4 on this host: GPUs 0 to 3");
    CHECK(gpus_of("1,2,1") == "--gpus 1,2,1 names GPU 1 twice; each rank needs a GPU of its own");
}

static std::vector<Launch> launches(const Variables& variables, const GpuOptions& options,
                                    const LaunchOptions& others = {}) {
    return launch_gpus(options, {1, 3}, others, [&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    });
}

TEST_CASE("--gpus on one machine and on several") {
    const std::vector<Launch> one = launches({{"SLURM_RESTART_COUNT", "2"}}, {"1,3"});
    REQUIRE(one.size() == 2);
    CHECK(describe_launch(one[1]) == "--gpus, rank 1 of 2, local rank 1 of 2, GPU 3 on " + host_name() + ", restart 2");
    CHECK(place(one[0]) == "127.0.0.1:0");
    const std::vector<Launch> second = launches({}, {"1,3", 3, 1, "h0:29500"});
    CHECK(describe_launch(second[0]) == "--gpus, rank 2 of 6, local rank 0 of 2, GPU 1 on " + host_name());
    CHECK(place(second[1]) == "h0:29500");
    CHECK(second[1].rank == 3);
}

TEST_CASE("--gpus refuses other launchers and incomplete options") {
    const auto refuses = [](const std::string& text, const Variables& variables, const GpuOptions& gpus,
                            const LaunchOptions& others = {}) {
        try {
            launches(variables, gpus, others);
        } catch (const Error& error) {
            CHECK(error.exit_code == EXIT_USAGE);
            return std::string(error.what()).find(text) != std::string::npos;
        }
        return false;
    };
    CHECK(refuses("mpirun has started 8 processes", mpirun, {"2"}));
    CHECK(refuses("torchrun has started 8 processes", torchrun, {"2"}));
    CHECK(refuses("srun has started 4 processes", srun, {"2"}));
    CHECK(refuses("leave out --rank", {}, {"2"}, options(0, 2, "h0:1")));
    CHECK(refuses("--rendezvous is for several machines", {}, {"2", 1, -1, "h0:29500"}));
    CHECK(refuses("--node-rank is for several machines", {}, {"2", 1, 1}));
    CHECK(refuses("needs --node-rank, from 0 on the first machine to 1", {}, {"2", 2, 2, "h0:29500"}));
    CHECK(refuses("needs --rendezvous", {}, {"2", 2, 0}));
    CHECK(refuses("is not HOST:PORT", {}, {"2", 2, 0, "h0"}));
}
