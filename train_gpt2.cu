// train_gpt2.cu: main(), the training loop, and one optimizer step.
//
// main chooses the command. run_train opens the run (train/run.h), creates its model and optimizer (train/trainer.h),
// and calls train_step in a loop. train_step runs forward and backward (model/gpt2.h) on each micro-batch, then the
// optimizer (train/optimizer.h) updates the weights.
#include <csignal>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <omp.h>

#include "base/common.h"
#include "base/fault.h"
#include "base/host.h"
#include "base/terminal.h"
#include "base/threads.h"
#include "base/trace.h"
#include "commands/commands.h"
#include "train/run.h"
#include "train/save.h"
#include "train/stop.h"
#include "train/trainer.h"

// Forward and backward of a micro-batch. The weights of the previous step may still be arriving from other ranks: the
// model waits for each bucket before it reads it (parallel/weight_gather.h). In the last micro-step of this rank's v-th
// virtual rank, each bucket is reduced over the ranks as soon as its gradients are complete.
template <class floatX>
static void micro_step(Trainer<floatX>& t, const Batch& batch, int number, int index, int v, bool last, Trace* trace) {
    GPT2<floatX>& model = t.model;
    const float scale = 1.0f / float(t.run.batch.grad_accum_steps * t.run.batch.world_size);
    {
        const Span span(trace, Track::training, model.stream, {.name = "forward"});
        t.run.watchdog.reached("forward of micro-step", number);
        model.forward(batch.tokens, batch.B, batch.T);
    }
    const Span span(trace, Track::training, model.stream, {.name = "backward"});
    t.run.watchdog.reached("backward of micro-step", number);
    GradientSum& gradients = t.optimizer.gradients;
    const auto complete = [&](int b) {
        const Bucket bucket = model.layout.bucket(b);
        const int64_t bytes = (bucket.end - bucket.begin) * int64_t(sizeof(float));
        fault_point(
            {.point = FaultPoint::gradients, .data = model.grads.bucket(b), .bytes = bytes, .stream = model.stream});
        t.recompute_check.bucket_complete(b, model.grads.bucket(b), bytes, model.stream);
        if (last) gradients.reduce_bucket(b, v);
    };
    model.backward(batch.tokens, batch.targets, batch.B, batch.T, index, scale, complete,
                   [&](int bucket) { gradients.begin_bucket(bucket); });
}

// Computes the gradients of the step's first micro-batch, which are computed again next and compared
// (--recompute-check).
template <class floatX>
static void compute_in_advance(Trainer<floatX>& t, const Batch& batch, int64_t step, Trace* trace) {
    t.recompute_check.begin_first(step);
    micro_step(t, batch, 0, 0, 0, false, trace);
    t.model.zero_gradients();
    t.recompute_check.begin_second();
}

// Votes with all ranks between two micro-steps. Returns whether all ranks leave the step here. With several ranks the
// result may be that of the previous vote. With NCCL it is always false (Comm::any_rank): no rank leaves a step.
static bool vote_to_leave(Run& run) { return run.stop |= run.comm.any_rank(stop_requested() || run.failure); }

// Returns the next micro-batch. If this rank cannot read its data, it sets run.failure and continues with zeros until
// all ranks have learned of the failure: the others wait for it in their collectives. If the run was asked to stop
// while the loader waited for a missing file, the run ends as a stopped one.
static Batch next_batch(Run& run) {
    try {
        if (!run.failure) return run.loader->next();
    } catch (const Error& error) {
        run.failure = stop_requested() ? Error(EXIT_PREEMPTED, error.what()) : error;
    }
    return run.loader->zeros();
}

// Forward and backward of all micro-batches of this rank. Returns false if all ranks left the step between two
// micro-steps.
template <class floatX>
static bool accumulate_gradients(Trainer<floatX>& t, int64_t step) {
    Run& run = t.run;
    GPT2<floatX>& model = t.model;
    GradientSum& gradients = t.optimizer.gradients;
    Trace* trace = run.comm.trace.get();
    // A graph would repeat a fault in each step.
    const bool graphs = device_has_graphs() && run.options.cuda_graph == "on" && !fault_hook;
    const int virtual_ranks = gradients.own_virtual_ranks(), micro_steps = run.batch.grad_accum_steps / virtual_ranks;
    // ZeRO-2 sums over all virtual ranks in every micro-step, so this rank's virtual ranks take turns.
    const bool in_turns = model.shard_gradients;
    gradients.begin_step();
    for (int number = 0; number < run.batch.grad_accum_steps; number++) {
        const int v = in_turns ? number % virtual_ranks : number / micro_steps, i = in_turns ? 0 : number % micro_steps;
        const bool last = in_turns || i + 1 == micro_steps;
        const Span span(trace, Track::training, model.stream, {"micro-step", number, step});
        if (i == 0) model.zero_gradients();
        run.watchdog.reached("data of micro-step", number);
        const Batch batch = next_batch(run);
        // The batch comes first, so that the vote includes a failure to read it. Several ranks hold no vote before the
        // first micro-step: with one micro-step, RankStatus alone tells the others of a request or a failure.
        if ((number > 0 || run.comm.world_size == 1) && vote_to_leave(run)) return false;
        report_background_save(run);
        const bool twice = number == 0 && run.options.recompute_check > 0 && step % run.options.recompute_check == 0;
        if (twice) compute_in_advance(t, batch, step, trace);
        run.log->working("micro-step", number, run.batch.grad_accum_steps);
        // A graph replays the same calls on the same memory. Communication is never part of a graph, nor are ZeRO-2,
        // ZeRO-3 and tensor parallelism, which communicate in every micro-step.
        const bool as_graph = graphs && !twice && !in_turns && !model.tensor_ranks && !t.optimizer.weights.pending() &&
                              !(last && gradients.needs_reduction());
        t.graphs[i > 0].call_or_replay(as_graph, model.stream,
                                       [&] { micro_step(t, batch, number, i, v, last, as_graph ? nullptr : trace); });
        t.recompute_check.end();
        if (last) gradients.virtual_rank_done(v);
    }
    return true;
}

// Queues the copies of a step's results to the host. finish_step waits for them.
template <class floatX>
static void queue_results(Trainer<floatX>& t, int64_t step, int64_t bytes_sent) {
    Run& run = t.run;
    PendingStep& p = t.pending[step % 2];
    const PendingStep& before = t.pending[(step + 1) % 2];
    p.record.step = step;
    p.record.step_tokens = run.batch.tokens_per_step;
    // run.state.tokens lacks the tokens of the previous step as long as that step is not finished.
    p.record.tokens = run.state.tokens + (before.waiting ? 2 : 1) * run.batch.tokens_per_step;
    p.record.lr = float(learning_rate(run.schedule, step));
    p.record.comm_bytes = run.comm.world_size > 1 ? bytes_sent : -1;
    p.comm_waits = run.groups.waits();
    const Stream stream = t.model.stream;
    copy_to_host(&p.results.loss, t.optimizer.gradients.step_loss(), sizeof(float), stream);
    copy_to_host(&p.results.grad_norm, t.optimizer.norm(), sizeof(float), stream);
    copy_to_host(&p.results.factor, t.optimizer.factor(), sizeof(float), stream);
    copy_to_host(p.results.statuses, t.optimizer.gradients.rank_statuses(),
                 run.comm.world_size * int64_t(sizeof(RankStatus)), stream);
    record_event(p.done, stream);
    p.waiting = true;
}

// One optimizer step on grad_accum_steps micro-batches. The host queues the work and waits for nothing. Returns false
// if all ranks left the step between two micro-steps; the step has then changed nothing.
template <class floatX>
static bool train_step(Trainer<floatX>& t, int64_t step) {
    Run& run = t.run;
    Trace* trace = run.comm.trace.get();
    if (trace) trace->begin_step(step);
    run.watchdog.begin(Phase::step, step);
    fault_point({.point = FaultPoint::step, .rank = run.comm.rank, .step = step});
    const Span whole(trace, Track::training, t.model.stream, {"step", step, step, run.batch.tokens_per_step});
    const int64_t sent_before = run.groups.bytes_sent();
    if (!accumulate_gradients(t, step)) return false;

    const Span span(trace, Track::training, t.model.stream, {.name = "update", .step = step});
    run.watchdog.reached("update");
    RankStatus status = {stop_requested() || run.failure ? 1.0f : 0.0f, float(t.last_own_ms)};
    status.gpu = run.gpu.reading();
    status.longest_save = float(run.longest_save);
    if (run.failure) status.lost = std::numeric_limits<float>::quiet_NaN();
    if (run.options.on_nan != "halt") t.optimizer.forget_failure();
    t.optimizer.clip(float(run.options.grad_clip), status, run.health.limits_of(step));
    t.optimizer.step(float(learning_rate(run.schedule, step)), narrow(step + 1));
    const DeviceBuffer<floatX>& weights = t.model.weights.memory;
    fault_point(
        {.point = FaultPoint::update, .data = weights.data, .bytes = weights.bytes(), .stream = t.model.stream});
    queue_results(t, step, run.groups.bytes_sent() - sent_before);
    return true;
}

// The host is one step ahead of the device: it finishes a step when the next one is queued.
template <class floatX>
static void train_loop(Trainer<floatX>& t) {
    Run& run = t.run;
    const Options& o = run.options;
    const int64_t rest = o.steps - run.first_step;
    int64_t first = run.state.step;
    const int64_t stop_at = o.stop_after > 0 && o.stop_after < rest ? run.first_step + o.stop_after : o.steps;
    start_clock(run);
    for (int64_t step = first;;) {
        if (std::exchange(t.rolled_back, false)) first = step = run.state.step;
        if (run.comm.world_size == 1) run.stop |= stop_requested();
        const bool stop = step >= stop_at || run.stop;
        t.between_steps(step, first, stop);
        if (t.rolled_back) continue;
        if (stop) break;
        const bool saves = saves_now(run);
        if (run.stop || !train_step(t, step)) continue;  // the next iteration saves and ends
        t.finish_step(t.pending[(step + 1) % 2]);
        PendingStep& p = t.pending[step % 2];
        // All ranks must finish a step at the same point, but each asks its own device whether the step is done. On the
        // CPU the answer is always yes.
        const bool same_answer = run.comm.world_size == 1 || device_memory_is_host();
        if (same_answer && event_done(p.done)) t.finish_step(p);
        // The thread that writes a checkpoint is no other program: it has a lower priority. The waits for it count in
        // no window.
        saves ? t.contention.restart() : t.contention.adapt();
        step++;
    }
    t.finish_steps(run.state.step);
    run.watchdog.begin(Phase::end, run.state.step);
    // Other ranks may still read this rank's memory, which is freed next.
    t.optimizer.finish_collectives();
    wait_for_device();
}

static int run_train(const Options& options, const Launch& launch, Comm& comm, Dtype dtype,
                     const std::string& command_line) {
    const std::unique_ptr<Run> run = start_run(options, launch, comm, dtype, command_line);
    with_dtype(dtype, [&]<class floatX>(floatX) {
        Trainer<floatX> trainer(*run);
        const Options& o = run->options;
        if (saves_checkpoints(o)) stop_on_signals(run->first_rank());
        if (run->state.step >= o.steps)
            run->log->note(
                format("nothing to do: the run is at step %lld, and --steps is %lld; a larger --steps continues",
                       static_cast<long long>(run->state.step), static_cast<long long>(o.steps)));
        train_loop(trainer);
    });
    return end_run(*run);
}

static int run_command(const Options& options, char** argv, const Launch& launch, std::unique_ptr<Comm>& comm) {
    if (options.command == Command::help) {
        print_stdout(options.text);
        return 0;
    }
    check_stacks();
    for (const std::string& note : options.renamed) print_message("note: " + note);
    ENSURE(omp_get_max_threads() <= MAX_THREADS,
           "OMP_NUM_THREADS=%d is more than %d threads; set it to the number of cores", omp_get_max_threads(),
           MAX_THREADS);
    check_processes(options, launch);
    if (options.command == Command::tokenize) return run_tokenize(options);  // no model, no device
    if (options.print_launch) {
        const bool several = launch.launcher == "--gpus" || starts_ranks(options);
        return several ? print_launches(options) : print_launch(launch);
    }
    const bool plans = options.command == Command::plan;
    if (plans && launch.rank > 0) return 0;  // rank 0 plans for all
    if (launch.rank == 0 && !options.quiet && !options.taken.empty())
        printf("options from %s/run.toml:%s\n", message_text(options.output).c_str(),
               message_text(options.taken).c_str());
    start_device(options, launch);
    comm = make_comm(plans ? Launch() : launch, options.share_gpu);
    const Dtype dtype = training_dtype(options);
    std::string command_line;
    for (int i = 0; argv[i]; i++) command_line.append(i ? " " : "").append(shell_word(argv[i]));
    switch (options.command) {
        case Command::train:
            return run_train(options, launch, *comm, dtype, command_line);
        case Command::plan:
            return run_plan(options, dtype, launch);
        case Command::generate:
            return run_generate(options, dtype, *comm, launch);
        case Command::eval:
            return run_eval(options, dtype, *comm, launch);
        default:
            return EXIT_INTERNAL;
    }
}

int main(int argc, char** argv) {
    limit_spinning(argv);
    return report_errors({}, [&](Launch& launch, std::unique_ptr<Comm>& comm) {
        prepare_standard_streams();
        signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f`, write() then fails with EFBIG: a failed save, not a killed run
        const Options options = parse_options(argc, argv);
        if (!options.print_launch && starts_ranks(options)) return start_ranks(options, argv, run_command);
        if (options.command != Command::help) launch = launch_of(options);
        return run_command(options, argv, launch, comm);
    });
}
