// process.cpp: sets up the options, device and threads of a command before it runs.
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>
#include <thread>

#include "base/device.h"
#include "base/host.h"
#include "base/print.h"
#include "commands/commands.h"
#include "model/gpt2.h"
#include "parallel/comm.h"
#include "train/run.h"
#include "train/stop.h"

// An error of the C++ library in the words of the other errors.
static std::string library_error(const std::exception& error) {
    if (dynamic_cast<const std::bad_alloc*>(&error)) return "no memory for the program's own data (check ulimit -v)";
    const auto* of_system = dynamic_cast<const std::system_error*>(&error);
    if (of_system && of_system->code() == std::errc::resource_unavailable_try_again)
        return "no thread can be started (check ulimit -u and ulimit -v)";
    return error.what();
}

int end_with_error(const std::exception_ptr& exception, const Launch& launch, Comm* comm) {
    std::string error;
    int exit_code = EXIT_INTERNAL;
    try {
        std::rethrow_exception(exception);
    } catch (const Error& e) {
        error = message_text(e.what());
        exit_code = e.exit_code;
    } catch (const std::exception& e) {
        error = message_text(library_error(e));
    }
    write_error_file(error);
    if (launch.world_size == 1) {
        fprintf(stderr, "error: %s\n", error.c_str());
        return exit_code;
    }
    // Rank 0 often fails for the same reason. Its end makes the launcher send SIGTERM to this rank, which then leaves
    // the error to rank 0.
    const bool stopping = stop_requested();
    for (int i = 0; i < 100 && launch.rank > 0 && stop_requested() == stopping; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (launch.rank == 0 || stop_requested() == stopping)
        fprintf(stderr, "error: rank %d on %s: %s\n", launch.rank, message_text(host_name()).c_str(), error.c_str());
    if (comm) comm->abort(exit_code);
    Comm().abort(exit_code);  // not exit(): a thread may still be in MPI_Init
}

int report_errors(const std::function<int(Launch& launch, std::unique_ptr<Comm>& comm)>& function) {
    Launch launch;
    std::unique_ptr<Comm> comm;
    try {
        return function(launch, comm);
    } catch (...) {
        return end_with_error(std::current_exception(), launch, comm.get());
    }
}

// CPU ranks of a host share its cores, unless mpirun has bound each rank to cores of its own, or the user has chosen a
// number of threads.
static int threads_of_rank(const Launch& launch) {
    if (launch.local_world_size <= 1 || getenv("OMP_NUM_THREADS")) return 0;  // as OpenMP has
    const int all = int(sysconf(_SC_NPROCESSORS_ONLN)), given = omp_get_num_procs();
    return given < all ? given : std::max(1, all / launch.local_world_size);
}

bool starts_ranks(const Options& o, const Launch& launch) {
    if (o.ranks == 0 || o.command == Command::plan) return false;
    if (launch.launcher == "single") return o.ranks != 1;
    ENSURE(o.ranks == -1 || o.ranks == launch.world_size,
           "--ranks %d starts the ranks itself, but %s has started %d; leave out --ranks or %s", o.ranks,
           launch.launcher.c_str(), launch.world_size, launch.launcher.c_str());
    return false;
}

void check_processes(const Options& o, const Launch& launch) {
    const int ranks = launch.world_size;
    ENSURE(o.command != Command::tokenize || ranks == 1,
           "%s runs in one process, but %s started %d, which would all do the same; start it without %s, or "
           "start one",
           command_name(o.command), launch.launcher.c_str(), ranks, launch.launcher.c_str());
    ENSURE(o.command != Command::generate || ranks == o.tensor_parallel,
           "generate needs as many ranks as --tensor-parallel %d says, and there %s %d; give --ranks %d",
           o.tensor_parallel, ranks == 1 ? "is" : "are", ranks, o.tensor_parallel);
}

void start_device(const Options& o, const Launch& launch) {
    if (o.command == Command::eval) batch_memory_advice = "lower --micro-batch or --seq-len";
    if (o.command == Command::generate)
        batch_memory_advice = device_memory_is_host() ? "free memory, or try a machine with more"
                                                      : "free memory, or try --tensor-parallel on more ranks";
    choose_attention(o.cudnn != "off", o.deterministic != "off");
    device_init(launch.local_rank, threads_of_rank(launch));
}

Dtype training_dtype(const Options& o) {
    std::string precision = o.precision;
    if (precision == "auto") precision = device_bf16_is_faster() ? "bf16" : "fp32";
    ENSURE(precision != "fp32" || o.master_weights == "on",
           "--master-weights off, but --precision auto is fp32 on this device; give --precision bf16");
    if (precision == "fp8") device_check_fp8();
    return precision == "fp32" ? Dtype::fp32 : Dtype::bf16;
}
