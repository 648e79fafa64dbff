// train_gpt2.cu: one optimizer step, the training loop, and main().
//
// main reads the options, joins the other ranks and chooses the command. train makes the model and the optimizer
// (train/trainer.h) of a run (train/run.h), and calls train_step in a loop. train_step runs forward and backward
// (model/gpt2.h) on each micro-batch, then the optimizer (train/optimizer.h) updates the weights.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "base/common.h"
#include "base/host.h"
#include "base/print.h"
#include "base/signals.h"
#include "commands/commands.h"
#include "model/gpt2.h"
#include "parallel/launch.h"
#include "parallel/watchdog.h"
#include "train/algorithms.h"
#include "train/plan.h"
#include "train/run.h"
#include "train/saver.h"
#include "train/start.h"
#include "train/trainer.h"

// One optimizer step on grad_accum_steps micro-batches. The host queues it, and on a GPU waits for nothing. Returns
// false if all ranks left the step between two micro-steps, because one was asked to stop; nothing has changed then.
template <class floatX>
static bool train_step(Trainer<floatX>& t, int64_t step) {
    const Run& run = t.run;
    GPT2<floatX>& model = t.model;
    GradReducer& gradients = t.optimizer.gradients;
    gradients.begin_step(narrow(step + 1));
    for (int n = 0; n < run.batch.grad_accum_steps; n++) {
        const Batch batch = t.loader.next();                    // (B, T) tokens and targets on the device
        t.stop |= run.groups.world.any_rank(stop_requested());  // always false on several GPUs, which finish the step
        if (t.stop) return false;
        const MicroStep m = t.micro_step(n);
        if (m.index == 0) model.zero_gradients();
        t.graphs[m.index > 0].call_or_replay(t.captures(m), model.stream, [&] {
            model.forward(batch.tokens, batch.B, batch.T);
            model.backward(
                batch.tokens, batch.targets, batch.B, batch.T, m.index, run.loss_scale(),
                [&](int bucket) {
                    if (m.last) gradients.reduce_bucket(bucket, m.virtual_rank);
                },
                [&](int bucket) { gradients.begin_bucket(bucket); });
        });
        if (m.last) gradients.virtual_rank_done(m.virtual_rank);
    }
    const RankStatus status = {stop_requested() ? 1.0f : 0.0f, t.own_ms};
    t.optimizer.clip(float(run.options.grad_clip), status, t.outliers.limits_of(step));
    t.optimizer.step(run.lr(step), narrow(step + 1));
    t.queue_results(step);
    return true;
}

// Trains up to step `end`. The host is one step ahead of a GPU: it reads the results of a step when the next is queued.
template <class floatX>
static void train_loop(Trainer<floatX>& t, Saver<floatX>& saver, int64_t end) {
    const Options& o = t.run.options;
    const int64_t first = t.state.step, lag = device_memory_is_host() ? 0 : 1;
    for (int64_t step = first;;) {
        const bool done = step >= end || t.stop;
        const auto due = [&](int64_t every) { return every > 0 && (step % every == 0 || step == o.steps); };
        const bool checks = step > first && due(o.check_replicas) && t.has_replicas() && t.failure.empty();
        const bool validates = t.val_loader && due(o.val_every) && !t.stop;
        const bool samples = t.run.start.tokenizer && step > 0 && due(o.sample_every) && !t.stop;
        const bool saves = step > first && (due(o.checkpoint_every) || done);
        if (checks || validates || samples || saves) t.finish_steps();  // t.state is now that of `step`
        if (checks) t.check_replicas(step);                             // weights that differ are not saved
        const bool best = validates && t.validate(step);
        if (samples) t.sample(step);
        if (saves || best) saver.save(t.state.step, done);
        if (checks || validates || samples || saves) t.start_clock(step);
        if (done) return;
        if (!train_step(t, step)) continue;  // saves and ends
        t.finish_step(step - lag);
        saver.poll();
        step++;
    }
}

// Prints the error and returns its exit code. One of several ranks ends here, and ends the others, which would wait for
// it forever. comm: null before the ranks have joined.
static int end_with_error(const std::exception_ptr& exception, Command command, const Launch& launch, Comm* comm) {
    std::string error;
    int exit_code = EXIT_INTERNAL;
    try {
        std::rethrow_exception(exception);
    } catch (const OutOfMemory& e) {
        error = e.what() + ("; " + memory_advice(command, e.purpose));
    } catch (const Error& e) {
        error = e.what();
        exit_code = e.exit_code;
    } catch (const std::bad_alloc&) {
        error = "no memory for the program's own data (check ulimit -v)";
    } catch (const std::system_error& e) {
        const bool no_thread = e.code() == std::errc::resource_unavailable_try_again;
        error = no_thread ? "no thread can be started (check ulimit -u and ulimit -v)" : e.what();
    } catch (const std::exception& e) {
        error = e.what();
    }
    error = message_text(error);
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

// Data that cannot be read leave the state of the last step whole. One process saves it; ranks end each other.
template <class floatX>
static int train_to(int64_t end, Trainer<floatX>& trainer, Saver<floatX>& saver) {
    try {
        train_loop(trainer, saver, end);
        return trainer.finish(saver.saved_step);
    } catch (...) {
        const bool bad_val = trainer.val_loader && trainer.val_loader->error;
        if (trainer.run.groups.world.world_size == 1 && (trainer.loader.error || bad_val)) {
            trainer.finish_steps();
            if (trainer.state.step > 0) saver.save(trainer.state.step, true);
        }
        throw;
    }
}

template <class floatX>
static int train(const Run& run, Log& log, const Launch& launch) {
    const Options& o = run.options;
    Trainer<floatX> trainer(run, log);  // data, model, optimizer
    try {
        trainer.start();  // the state of --resume, --init or --seed
        Saver<floatX> saver(trainer);
        if (saves_checkpoints(o)) stop_on_signals(run.is_rank0());
        if (saves_checkpoints(o) && launch.launcher == "mpirun" && o.ranks == 0 && !getenv("TRAIN_GPT2_SAVES"))
            log.note(
                "to end this run with a save send SIGUSR1 to mpirun, or start it with scripts/mpirun.sh: at Ctrl-C and "
                "SIGTERM mpirun itself kills the ranks, within 2 s (Open MPI 4) or 0.5 s (Open MPI 5)");
        if (device_memory_is_host()) bind_threads();  // after the start of the threads that read data, send messages
        const int64_t end = o.stop_after > 0 ? std::min(o.steps, trainer.state.step + o.stop_after) : o.steps;
        return train_to(end, trainer, saver);
    } catch (...) {
        // Collectives in flight use the trainer's memory, which must not be freed before the process ends.
        if (launch.world_size > 1) end_with_error(std::current_exception(), o.command, launch, &run.groups.world);
        throw;
    }
}

// Returns whether this process starts the ranks of --ranks, and is not a rank itself.
static bool starts_ranks(const Options& o, const Launch& launch) {
    if (o.ranks == 0 || o.command == Command::plan) return false;
    if (launch.launcher == "single") return o.ranks != 1;
    ENSURE(o.ranks == -1 || o.ranks == launch.world_size,
           "--ranks %d starts the ranks itself, but %s has started %d; leave out --ranks or %s", o.ranks,
           launch.launcher.c_str(), launch.world_size, launch.launcher.c_str());
    return false;
}

// Chooses the device and the number of threads.
static void start_device(const Options& o, const Launch& launch) {
    choose_attention(o.attention, o.deterministic);
    const int threads = choose_threads(launch.local_world_size).threads;
    check_threads(threads);
    device_init(launch.local_rank, threads);
}

static int run_command(const Options& o, const Launch& launch, std::unique_ptr<Comm>& comm) {
    if (const auto convert = file_command(o.command)) return convert(o, launch);
    const bool plans = o.command == Command::plan;
    if (plans && launch.rank > 0) return 0;  // rank 0 plans for all
    for (const std::string& line : o.taken)
        if (launch.rank == 0 && !o.quiet) printf("%s\n", message_text(line).c_str());
    start_device(o, launch);
    const auto watchdog = std::make_shared<Watchdog>(plans ? 0.0 : o.timeout, launch.rank, launch.world_size);
    comm = make_comm(plans ? Launch() : launch, watchdog);
    check_same_command(*comm, o.command);
    const Dtype dtype = compute_dtype(o);
    if (plans) return run_plan(o, dtype, launch);
    if (o.command == Command::generate) return run_generate(o, dtype, *comm);
    if (o.command == Command::eval) return run_eval(o, dtype, *comm, launch);
    const Run run = prepare_run(o, launch, *comm, dtype);
    const std::unique_ptr<Log> log = open_log(run, launch);
    load_kept_algorithms(o, *comm);
    return with_dtype(dtype, [&]<class floatX>(floatX) { return train<floatX>(run, *log, launch); });
}

int main(int argc, char** argv) {
    Launch launch;
    Options options;
    std::unique_ptr<Comm> comm;
    try {
        prepare_standard_streams();
        prepare_signals();
        options = parse_options(argc, argv);
        if (options.command == Command::help) {
            print_stdout(options.answer);
            return 0;
        }
        launch = find_launch(getenv);
        if (starts_ranks(options, launch)) return spawn_ranks(options.ranks, argv, options.reads_stdin);
        return run_command(options, launch, comm);
    } catch (...) {
        return end_with_error(std::current_exception(), options.command, launch, comm.get());
    }
}
