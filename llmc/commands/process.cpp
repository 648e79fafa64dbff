// process.cpp: sets up the options, device and threads of a command before it runs.
#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>

#include "base/device.h"
#include "base/host.h"
#include "base/host_memory.h"
#include "base/terminal.h"
#include "base/threads.h"
#include "commands/commands.h"
#include "model/gpt2.h"
#include "parallel/comm.h"
#include "parallel/local_ranks.h"
#include "train/run.h"
#include "train/stop.h"

static std::string address_space_text() {
    const AddressSpace now = address_space();
    if (now.limit == INT64_MAX) return "";
    return format("; %s of the limit of %s are left (ulimit -v): raise it",
                  human_bytes(std::max<int64_t>(0, now.left)).c_str(), human_bytes(now.limit).c_str());
}

// An error of the C++ library in the words of the other errors: it has no values.
static std::string library_error(const std::exception& error) {
    if (dynamic_cast<const std::bad_alloc*>(&error)) {
        const std::string limit = address_space_text();
        return "no memory for the program's own data" +
               (limit.empty() ? "; try fewer processes or a smaller --micro-batch" : limit);
    }
    const auto* of_system = dynamic_cast<const std::system_error*>(&error);
    if (!of_system || of_system->code() != std::errc::resource_unavailable_try_again) return error.what();
    pthread_attr_t attributes;
    size_t stack = 0;
    if (pthread_attr_init(&attributes) == 0 && pthread_attr_getstacksize(&attributes, &stack) == 0)
        pthread_attr_destroy(&attributes);
    const std::string limit = address_space_text();
    return format(
        "no thread can be started, which needs %s for its stack%s", human_bytes(int64_t(stack)).c_str(),
        limit.empty() ? "; check the limit of processes (ulimit -u), also that of a container" : limit.c_str());
}

static void print_error(const std::string& text) {
    fprintf(stderr, "error: %s\n", text.c_str());
}

int report_errors(Launch launch, const std::function<int(Launch& launch, std::unique_ptr<Comm>& comm)>& function) {
    std::unique_ptr<Comm> comm;
    std::string error;  // in the form of error_text
    int exit_code = 0;
    try {
        return function(launch, comm);
    } catch (const Error& e) {
        error = error_text(e);
        exit_code = e.exit_code;
    } catch (const std::exception& e) {
        error = message_text(library_error(e));
        exit_code = EXIT_INTERNAL;
    }
    write_error_text(launch, error);
    send_errors_to_supervisor();
    if (launch.world_size == 1 || launch.launcher == "single") {  // "single": a plan for several ranks
        print_error(error);
        return exit_code;
    }
    print_error(message_text(format("rank %d on %s: ", launch.rank, host_name().c_str())) + error);
    // Rank 0 often fails for the same reason. It gets the time to remove what it has made in --output, before the abort
    // of this rank ends it.
    if (launch.rank > 0) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (comm) comm->abort(exit_code);
    Comm().abort(exit_code);  // not exit(): a thread may still be in MPI_Init
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
    const bool alone = o.command == Command::tokenize;
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
    if (o.command == Command::eval) batch_memory_advice = "lower --micro-batch or --seq-len";
    if (o.command == Command::generate)
        batch_memory_advice = device_memory_is_host() ? "free memory, or try a machine with more"
                                                      : "free memory, or try --tensor-parallel on more ranks";
    device_comm_sms = launch.world_size > 1 ? o.comm_sms : 0;
    choose_attention(o.cudnn != "off", o.deterministic != "off");
    ENSURE(launch.local_rank >= 0 || device_memory_is_host(), "%s does not set this rank's GPU; give --local-rank",
           launch.launcher.c_str());
    device_init(device_of(o, launch), threads_of_rank(o, launch));
    const std::string note = device_memory_is_host() && launch.rank == 0 && !o.quiet ? note_on_threads(o.threads) : "";
    if (!note.empty()) print_message("note: " + note);
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
    print_stdout(message_text(describe_launch(launch) + (joining.empty() ? "" : ": ") + joining) + "\n");
    return 0;
}
