// sources: llmc/parallel/launch.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/host.cpp llmc/base/content.cpp
// llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_launch.cpp: reads any bytes as a list of hosts, and as the variables of launchers: in each line the first byte
// chooses a variable, and the others are its value. They must be refused with EXIT_USAGE, or give a rank, a local rank
// and a world size that fit together.
#include <iterator>
#include <map>
#include <sstream>
#include <vector>

#include "fuzz.h"
#include "parallel/launch.h"

static const std::vector<std::string> names = [] {
    std::istringstream words(
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE RANK "
        "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_ERROR_FILE SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID "
        "SLURM_STEP_ID SLURM_JOB_ID SLURM_STEP_NODELIST SLURM_NTASKS SLURM_RESTART_COUNT PMIX_RANK PMI_SIZE "
        "PRTE_LAUNCHED");
    return std::vector<std::string>(std::istream_iterator<std::string>(words), {});
}();

static void check_launch(const Launch& launch) {
    require(launch.world_size >= 1 && launch.world_size <= MAX_RANKS);
    require(launch.rank >= 0 && launch.rank < launch.world_size);
    require(launch.local_world_size >= 0 && launch.local_world_size <= launch.world_size);
    require(launch.local_rank >= 0 && launch.local_rank < launch.world_size);
    require(launch.local_world_size == 0 || launch.local_rank < launch.local_world_size);
    require(launch.master_port >= 0 && launch.master_port <= 65535 && launch.attempt >= 0);
    require(!describe_launch(launch).empty());
}

void fuzz(std::string_view input) {
    std::map<std::string, std::string> variables;
    std::istringstream lines{std::string(input)};
    for (std::string line; std::getline(lines, line);)  // 'A' is the first name, so that people can write such a file
        if (!line.empty())
            variables[names[(uint8_t(line[0]) + names.size() * 3 - 'A') % names.size()]] = line.substr(1);
    const Environment environment = [&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    };
    for (const int code : {exit_code_of([&] { require(first_host(std::string(input)).size() <= input.size()); }),
                           exit_code_of([&] { check_launch(find_launch(environment)); })})
        require(code == 0 || code == EXIT_USAGE);
}
