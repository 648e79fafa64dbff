// process.cpp: sets up the options, device and threads of a command before it runs.
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <nlohmann/json.hpp>

#include "base/device.h"
#include "base/files.h"
#include "base/host.h"
#include "base/json.h"
#include "base/terminal.h"
#include "base/threads.h"
#include "commands/commands.h"
#include "model/gpt2.h"
#include "parallel/comm.h"
#include "train/run.h"
#include "train/stop.h"

// Whether a path or pattern is relative. Opening braces are skipped: "{/a,/b}/train_*.bin" is absolute.
static bool is_relative(const std::string& path) {
    const size_t start = path.find_first_not_of('{');
    return start != std::string::npos && path[start] != '/' && path[start] != '~';
}

// Escapes a path, so that as a shell pattern it matches only itself.
static std::string as_pattern(const std::string& path) {
    std::string out;
    for (const char c : path) out += std::string(strchr("*?[]{}\\", c) ? "\\" : "") + c;
    return out;
}

// Makes the relative paths in saved options absolute if the run was started in another directory. If that directory
// does not exist here, the run comes from another machine, or was moved together with its data: paths stay relative.
static void resolve_paths(const Options& o, nlohmann::json& saved, const std::string& directory) {
    if (!is_directory(directory) || directory == current_directory()) return;
    for (const Setting& setting : settings(o)) {
        const auto path = saved.find(setting.name);
        if (!setting.is_path || path == saved.end() || !path->is_string()) continue;
        const std::string text = path->get<std::string>();
        if (!is_relative(text)) continue;
        *path = (setting.is_pattern ? as_pattern(directory) : directory) + "/" + text;
    }
}

// Reads the options in OUTPUT/run.json, as options_json wrote them at the last start of the run. Returns "" if there is
// no such file and the options on the command line are sufficient.
static std::string saved_options(const Options& o) {
    const std::string path = o.output + "/run.json";
    if (!path_exists(path) && (o.command == Command::plan || o.print_launch || !o.train_data.empty())) return "";
    ENSURE(path_exists(path),
           "--train-data is missing, and %s, from which --resume takes options, does not exist: give the --output of a "
           "run, or all options",
           path.c_str());
    nlohmann::json run = read_json_object(path, 16 << 20);
    const auto options = run.find("options");
    if (options == run.end() || !options->is_object())
        fail(EXIT_BAD_DATA, "%s: has no options; give --train-data and the other options", path.c_str());
    if (const auto directory = run.find("directory"); directory != run.end() && directory->is_string())
        resolve_paths(o, *options, directory->get<std::string>());
    return options->dump();
}

int report_errors(Launch launch, const std::function<int(Launch& launch, std::unique_ptr<Comm>& comm)>& function) {
    std::unique_ptr<Comm> comm;
    std::string error;
    int exit_code = 0;
    try {
        return function(launch, comm);
    } catch (const Error& e) {
        error = e.what();
        exit_code = e.exit_code;
    } catch (const std::bad_alloc&) {
        error = "out of memory";
        exit_code = EXIT_INTERNAL;
    } catch (const std::exception& e) {  // an error of the C++ library: for example, no thread can be started
        error = e.what();
        exit_code = EXIT_INTERNAL;
    }
    stop_quietly();
    write_error_file(launch, error);
    if (launch.world_size == 1 || launch.launcher == "single") {  // "single": a plan for several ranks
        print_message("error: " + error);
        return exit_code;
    }
    print_message(format("error: rank %d on %s: %s", launch.rank, host_name().c_str(), error.c_str()));
    if (comm) comm->abort(exit_code);
    Comm().abort(exit_code);  // not exit(): a thread may still be in MPI_Init
}

Options read_options(int argc, char** argv) {
    const Options options = parse_options(argc, argv);
    const std::string saved = options.needs_saved ? saved_options(options) : "";
    return saved.empty() ? options : parse_options(argc, argv, saved);
}

// CPU ranks of a host share its cores, unless mpirun has bound each rank to cores of its own, or the user has chosen a
// number of threads.
static int threads_of_rank(const Options& o, const Launch& launch) {
    if (o.threads > 0 || launch.local_world_size <= 1 || getenv("OMP_NUM_THREADS")) return o.threads;
    const int all = int(sysconf(_SC_NPROCESSORS_ONLN)), given = omp_get_num_procs();
    return given < all ? given : std::max(1, all / launch.local_world_size);
}

void check_processes(const Options& o, const Launch& launch) {
    const int ranks = launch.world_size;
    const bool alone = o.command == Command::tokenize || o.command == Command::verify;
    ENSURE(!alone || ranks == 1,
           "%s runs in one process, but %s started %d, which would all do the same; start it without %s, or "
           "start one",
           command_name(o.command), launch.launcher.c_str(), ranks, launch.launcher.c_str());
    ENSURE(o.command != Command::generate || ranks == o.tensor_parallel,
           "generate needs as many ranks as --tensor-parallel %d says, and there %s %d; give %s %d", o.tensor_parallel,
           ranks == 1 ? "is" : "are", ranks, device_memory_is_host() ? "--ranks" : "--gpus", o.tensor_parallel);
}

void start_device(const Options& o, const Launch& launch) {
    device_debug_sync = o.debug_sync;
    device_comm_sms = launch.world_size > 1 ? o.comm_sms : 0;
    choose_attention(o.cudnn != "off", o.deterministic != "off");
    ENSURE(launch.local_rank >= 0 || device_memory_is_host(), "%s does not set this rank's GPU; give --local-rank",
           launch.launcher.c_str());
    device_init(device_of(o, launch), threads_of_rank(o, launch));
}

Dtype training_dtype(const Options& o) {
    std::string precision = o.precision;
    if (precision == "auto") precision = device_bf16_is_faster() ? "bf16" : "fp32";
    ENSURE(precision != "fp32" || o.master_weights == "on",
           "--master-weights off, but --precision auto is fp32 on this device; give --precision bf16");
    if (precision == "fp8") device_check_fp8();
    return precision == "fp32" ? Dtype::fp32 : Dtype::bf16;
}

// Prints a single line, so that the output of several ranks does not mix.
int print_launch(const Launch& launch) {
    const std::string joining = describe_joining(launch);
    print_stdout(describe_launch(launch) + (joining.empty() ? "" : ": ") + joining + "\n");
    return 0;
}
