// train_gpt2.cu: main(), the dispatch to a command, the training loop.
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string_view>

#include <omp.h>
#include <unistd.h>

#include "llmc/checkpoint.h"
#include "llmc/comm.h"
#include "llmc/commands.h"
#include "llmc/dataloader.h"
#include "llmc/eval.h"
#include "llmc/files.h"
#include "llmc/generate.h"
#include "llmc/gpt2.h"
#include "llmc/log.h"
#include "llmc/measure.h"
#include "llmc/mfu.h"
#include "llmc/optimizer.h"
#include "llmc/options.h"
#include "llmc/output_lock.h"
#include "llmc/plan.h"
#include "llmc/report.h"
#include "llmc/schedule.h"
#include "llmc/setup.h"
#include "llmc/straggler.h"
#include "llmc/threads.h"
#include "llmc/tokenize.h"
#include "llmc/trace.h"

// SIGINT, SIGTERM, SIGUSR1 and SIGHUP: leave the step between two micro-steps, save, leave with EXIT_PREEMPTED. The
// first rank says so. A second signal ends the process, which every rank says of itself. SIGUSR1 is a scheduler's
// notice that SIGTERM will follow: it does not count.
static volatile std::sig_atomic_t stop_requested = 0, stop_insisted = 0;
static bool says_stopping, behind_live_line;

static void say_in_handler(std::string_view text) {  // printf may not be called in one
    if (!behind_live_line) text.remove_prefix(1);
    [[maybe_unused]] const ssize_t written = write(2, text.data(), text.size());
}

static void on_signal(int number) {
    const int saved_errno = errno;
    if (stop_insisted && number != SIGUSR1) {
        say_in_handler("\nended by a second signal: the steps since the last checkpoint are lost\n");
        signal(number, SIG_DFL);
        raise(number);  // comes when this function returns
    } else if (!stop_requested && says_stopping) {
        say_in_handler(
            "\nstopping: the step is given up after this micro-step, then a checkpoint is saved; a second signal ends "
            "the run at once\n");
    }
    stop_requested = 1;
    stop_insisted = stop_insisted || number != SIGUSR1;
    errno = saved_errno;
}

static void stop_on_signals(bool says) {
    says_stopping = says, behind_live_line = isatty(2);
    struct sigaction action = {}, before = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) sigaction(number, &action, nullptr);
    sigaction(SIGHUP, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // nohup has it ignored
}

// The results of a step on their way to the host.
struct PendingStep {
    struct Results {
        float loss, grad_norm, factor;  // factor: NaN, and adamw has left the weights as they were
        Said said[MAX_RANKS];
    };
    StepRecord record;
    Results& host = *static_cast<Results*>(host_allocate(sizeof(Results)));
    Event done = create_event();
    int64_t comm_waits = 0;  // of the communicator, up to the end of this step
    bool waiting = false;

    PendingStep() = default;
    PendingStep(const PendingStep&) = delete;
    ~PendingStep() {
        if (waiting) wait_for_event(done);  // after an error: its results are still to be written
        host_free(&host), destroy_event(done);
    }
};

// A micro-step's calls are the same each time, but the first of a step overwrites gradients. The first time they run as
// they come, which makes the plans of the products; the second time they are recorded, if they are to be.
struct MicroStep {
    int runs = 0;
    Graph graph = nullptr;

    MicroStep() = default;
    MicroStep(const MicroStep&) = delete;
    ~MicroStep() { destroy_graph(graph); }

    template <class Calls>
    void run(bool as_graph, Stream stream, const Calls& calls) {
        if (!as_graph || runs++ == 0) return calls();
        if (!graph) {
            begin_graph(stream);
            calls();
            graph = end_graph(stream);
        }
        run_graph(graph, stream);
    }
};

template <class floatX>
struct Trainer {
    const Options& options;
    Comm& comm;
    Start start;
    BatchPlan batch;
    Log& log;
    Schedule schedule;
    GPT2<floatX> model;
    AdamW<floatX> optimizer;
    DataLoader& loader;
    DataLoader* val_loader;                          // null: no validation
    const OutputLock* lock;                          // null: no --output, or not the first rank
    TrainerState state;                              // as of the steps that are known to be good
    PendingStep pending[2];                          // of even and odd steps
    MicroStep micro_steps[2];                        // the first of a step, and the others
    double clock = 0.0;                              // when the step began whose time is measured
    double loader_waited = 0.0, comm_exposed = 0.0;  // seconds, in all, when it began
    Straggler straggler = {};
    bool stop = false;                  // some rank was asked to or has to, and all know it
    std::optional<Error> failure = {};  // why this rank has to
    int failed_saves = 0;
    int64_t saved_step = -1;
};

// Forward and backward of a micro-batch. In the first of a step weights may still come from other ranks, bucket by
// bucket, and in the `last` of this rank's v-th virtual rank complete gradients go to them.
template <class floatX>
static void micro_step(Trainer<floatX>& t, const Batch& batch, int micro_step, int v, bool last, Trace* trace) {
    GPT2<floatX>& model = t.model;
    GradientSum& gradients = t.optimizer.gradients;
    const float scale = 1.0f / float(t.batch.grad_accum_steps * t.batch.world_size);
    {
        const Span span(trace, Track::training, model.stream, {.name = "forward"});
        t.optimizer.need_weights(0);
        t.optimizer.need_weights(1);
        model.embeddings_forward(batch.tokens, batch.B, batch.T);
        for (int l = 0; l < model.config.L; l++) {
            if (l + 1 < model.config.L) t.optimizer.need_weights(2 + l);
            model.layer_forward(l, batch.B, batch.T);
        }
    }
    const Span span(trace, Track::training, model.stream, {.name = "backward"});
    model.head_backward(batch.targets, batch.B, batch.T, micro_step, scale);
    for (int l = model.config.L - 1; l >= 0; l--) {
        model.layer_backward(l, batch.B, batch.T, micro_step);
        if (last) gradients.bucket_done(1 + l, v);
    }
    model.embeddings_backward(batch.tokens, batch.B, batch.T);
    if (last) gradients.bucket_done(0, v);
}

// Between two micro-steps or batches, all ranks at the same place: whether to leave off here.
template <class floatX>
static bool leave_off(Trainer<floatX>& t) {
    return t.stop |= t.comm.any_rank(stop_requested || t.failure);
}

// What a rank without data does of a micro-step: its part of the sums, so that the others come to the end of the step.
template <class floatX>
static void empty_micro_step(Trainer<floatX>& t, int v, bool last) {
    for (int b = t.model.config.L; b >= 0 && last; b--) t.optimizer.gradients.bucket_done(b, v);
}

// One optimizer step on grad_accum_steps micro-batches. Nothing here waits for the device. False: it was left between
// two micro-steps, and has changed nothing.
template <class floatX>
static bool train_step(Trainer<floatX>& t, int64_t step) {
    GPT2<floatX>& model = t.model;
    GradientSum& gradients = t.optimizer.gradients;
    Trace* trace = t.comm.trace.get();
    if (trace) trace->begin_step(step);
    const Span whole(trace, Track::training, model.stream, {"step", step, step, t.batch.tokens_per_step});
    const bool graphs = device_has_graphs() && t.options.cuda_graph == "on";
    const int virtual_ranks = gradients.own_virtual_ranks(), micro_steps = t.batch.grad_accum_steps / virtual_ranks;
    const int64_t sent_before = t.comm.bytes_sent;
    for (int v = 0; v < virtual_ranks; v++) {
        model.zero_gradients();
        for (int i = 0; i < micro_steps; i++) {
            const Span span(trace, Track::training, model.stream, {"micro-step", v * micro_steps + i, step});
            const bool last = i + 1 == micro_steps;
            Batch batch = {};
            try {
                if (!t.failure) batch = t.loader.next();
            } catch (const Error& error) {
                t.failure = error;
            }
            if ((v > 0 || i > 0 || t.comm.world_size == 1) && leave_off(t)) return false;
            if (t.failure) {
                empty_micro_step(t, v, last);
                continue;
            }
            t.log.working(step, "micro-step", v * micro_steps + i, t.batch.grad_accum_steps);
            const bool as_graph = graphs && !t.optimizer.weights_pending() && !(last && gradients.adds_up());
            t.micro_steps[i > 0].run(as_graph, model.stream,
                                     [&] { micro_step(t, batch, i, v, last, as_graph ? nullptr : trace); });
        }
        gradients.virtual_rank_done(v);
    }
    const Span span(trace, Track::training, model.stream, {.name = "update", .step = step});
    PendingStep& p = t.pending[step % 2];
    const PendingStep& before = t.pending[(step + 1) % 2];
    const double own_ms = before.record.step_ms - before.record.comm_exposed_ms;
    Said said = {stop_requested || t.failure ? 1.0f : 0.0f, float(own_ms)};
    if (t.failure) said.lost = std::numeric_limits<float>::quiet_NaN();
    t.optimizer.clip(float(t.options.grad_clip), said);
    t.optimizer.step(float(learning_rate(t.schedule, step)), narrow(step + 1));

    p.record.step = step;
    p.record.step_tokens = t.batch.tokens_per_step;
    p.record.tokens = t.state.tokens + (before.waiting ? 2 : 1) * t.batch.tokens_per_step;
    p.record.lr = float(learning_rate(t.schedule, step));
    p.record.comm_bytes = t.comm.world_size > 1 ? t.comm.bytes_sent - sent_before : -1;
    p.comm_waits = t.comm.waits;
    copy_to_host(&p.host.loss, gradients.step_loss(), sizeof(float), model.stream);
    copy_to_host(&p.host.grad_norm, t.optimizer.norm(), sizeof(float), model.stream);
    copy_to_host(&p.host.factor, t.optimizer.factor(), sizeof(float), model.stream);
    copy_to_host(p.host.said, gradients.all_said(), t.comm.world_size * int64_t(sizeof(Said)), model.stream);
    record_event(p.done, model.stream);
    p.waiting = true;
    return true;
}

template <class floatX>
static SaveOptions save_options(const Trainer<floatX>& t) {
    SaveOptions save_options;
    save_options.output = t.options.output;
    save_options.keep = t.options.keep;
    save_options.bf16_weights = t.options.export_dtype == "bf16";
    save_options.end_of_text = t.start.end_of_text;
    if (t.start.tokenizer) {
        save_options.end_of_text = t.start.tokenizer->end_of_text;
        save_options.write_tokenizer = [&t](const std::string& dir) {
            save_tokenizer(*t.start.tokenizer, dir, t.model.config.max_T);
        };
    }
    save_options.note = [&t](const std::string& line) { t.log.note(line); };
    return save_options;
}

// If OUTPUT was moved, another run may have made a new directory of that name, and a save would delete or rename that
// run's checkpoints. The user may move OUTPUT back, so the save fails, and training goes on.
static void check_lock(const OutputLock& lock, const std::string& output) {
    if (!lock.still_held())
        fail(EXIT_IO,
             "%s or its run.lock was moved or removed, or another run has it now: nothing is saved there unless it is "
             "moved back",
             output.c_str());
}

// With --zero 1 every rank has a part of the state: all make the same reads, and the first one writes. It goes on with
// the reads when it cannot write, and all hear of that.
template <class floatX>
static void save(Trainer<floatX>& t) {
    if (t.options.output.empty() || t.options.checkpoint_every == 0 || t.saved_step == t.state.step) return;
    const bool together = t.optimizer.shards > 1;
    if (t.comm.rank > 0 && !together) return;
    const ParamLayout& layout = t.model.layout;
    int64_t reads = 0;
    const auto read = [&](float* host, StateKind kind, Param p, int l) {
        t.optimizer.get_state(host, kind, p, l);
        reads++;
    };
    std::string trouble;
    int exit_code = 0;
    const double begin = seconds_now();
    SavedCheckpoint saved;
    try {
        if (t.comm.rank == 0) {
            check_lock(*t.lock, t.options.output);
            saved = save_checkpoint(save_options(t), layout, read, t.state);
        }
    } catch (const Error& error) {
        trouble = error.what(), exit_code = error.exit_code;
    }
    if (together) {
        std::vector<float> unused(layout.size(wte) + layout.size(fcw) + layout.size(wpe));
        int64_t number = 0;
        for_each_read(layout, t.options.export_dtype == "bf16", [&](StateKind kind, Param p, int l) {
            if (number++ >= reads) t.optimizer.get_state(unused.data(), kind, p, l);
        });
        trouble = t.comm.exchange(trouble)[0];
    }
    if (!trouble.empty()) throw Error(exit_code ? exit_code : EXIT_IO, trouble);
    t.saved_step = t.state.step;
    if (t.comm.rank > 0) return;
    t.log.checkpoint(t.state.step, saved.dir, 1e3 * (seconds_now() - begin));
}

template <class floatX>
static std::string last_checkpoint(const Trainer<floatX>& t) {
    if (t.saved_step < 0) return "there is no checkpoint";
    if (t.lock && !t.lock->still_held())
        return format("the last good checkpoint is of step %lld", static_cast<long long>(t.saved_step));
    return "the last good checkpoint is " + checkpoint_directory(t.options.output, t.saved_step);
}

// A failed save is no reason to stop: the older checkpoints are intact. Three in a row are.
template <class floatX>
static void save_or_warn(Trainer<floatX>& t) {
    try {
        save(t);
        t.failed_saves = 0;
    } catch (const Error& error) {
        if (++t.failed_saves == 3)
            throw Error(error.exit_code,
                        format("three saves in a row failed, so the run ends: its further steps would be lost; %s; %s",
                               last_checkpoint(t).c_str(), error.what()));
        t.log.warn(format("the checkpoint of step %lld was not saved: %s; training goes on",
                          static_cast<long long>(t.state.step), error.what()));
    }
}

// The checkpoint of this step was saved before its validation.
template <class floatX>
static void save_val_loss(Trainer<floatX>& t) {
    if (t.comm.rank > 0 || t.options.output.empty() || t.saved_step != t.state.step) return;
    const std::string dir = checkpoint_directory(t.options.output, t.saved_step);
    try {
        check_lock(*t.lock, t.options.output);
        set_val_loss(dir, t.state.val_loss);
    } catch (const Error& error) {
        t.log.warn(format("%s keeps an older validation loss: %s; training goes on", dir.c_str(), error.what()));
    }
}

template <class floatX>
static void start_clock(Trainer<floatX>& t, double now) {
    t.clock = now;
    t.loader_waited = t.loader.wait_seconds, t.comm_exposed = t.comm.exposed(t.comm.waits);
}

// All ranks, at the same point. A trace that cannot be written is no reason to stop.
template <class floatX>
static void end_trace(Trainer<floatX>& t) {
    if (!t.comm.trace || !t.comm.trace->recording) return;
    try {
        const std::string what = write_trace(t.comm, t.options.trace);
        t.log.note(format("trace of %s: %s (open it in ui.perfetto.dev)", what.c_str(), t.options.trace.c_str()));
    } catch (const Error& error) {
        t.log.warn(format("the trace was not written: %s; training goes on", error.what()));
    }
}

// Logs a step, or stops the run where its gradients were not finite. All ranks settle the same steps at the same point,
// so that they come to the same decisions.
template <class floatX>
static void settle(Trainer<floatX>& t, PendingStep& p) {
    if (!p.waiting) return;
    const Span span(t.comm.trace.get(), Track::host, {"settle step", p.record.step});
    wait_for_event(p.done);
    p.waiting = false;
    p.record.loss = p.host.loss, p.record.grad_norm = p.host.grad_norm;
    bool lost = false;
    for (int rank = 0; rank < t.comm.world_size; rank++) {
        t.stop |= p.host.said[rank].stop != 0.0f;
        lost |= p.host.said[rank].lost != 0.0f;
    }
    if (lost) return;
    const double now = seconds_now();
    p.record.step_ms = 1e3 * (now - t.clock);
    p.record.loader_wait_ms = 1e3 * (t.loader.wait_seconds - t.loader_waited);
    const double exposed = t.comm.exposed(p.comm_waits);
    p.record.comm_exposed_ms = 1e3 * (exposed - t.comm_exposed);
    t.clock = now, t.loader_waited = t.loader.wait_seconds, t.comm_exposed = exposed;
    t.log.step(p.record);
    const std::string slow = t.straggler.add(p.host.said, t.comm.world_size, p.record.step_ms);
    if (!slow.empty()) t.log.warn(slow);
    if (p.host.factor == p.host.factor) {  // not NaN
        t.state.step = p.record.step + 1;
        t.state.position += t.loader.config.samples_per_step;
        t.state.tokens = p.record.tokens;
        return;
    }
    save_or_warn(t);
    end_trace(t);
    fail(EXIT_INTERNAL,
         "step %lld: loss %g, gradient norm %g; the weights were not touched by it%s. A lower --lr%s may help",
         static_cast<long long>(p.record.step), std::fabs(double(p.record.loss)), std::fabs(double(p.record.grad_norm)),
         t.saved_step == t.state.step
             ? format(" and are saved as of step %lld", static_cast<long long>(t.state.step)).c_str()
             : "",
         sizeof(floatX) == 4 ? " or a longer --warmup" : ", a longer --warmup or --precision fp32");
}

template <class floatX>
static void settle_all(Trainer<floatX>& t, int64_t step) {
    settle(t, t.pending[step % 2]);
    settle(t, t.pending[(step + 1) % 2]);
}

// A pass that some rank leaves early, because it was asked to stop or cannot read, has no result.
template <class floatX>
static void validate(Trainer<floatX>& t, int64_t step) {
    try {
        const auto go_on = [&](int64_t done, int64_t of, bool failed) {
            t.log.working(step, "validation batch", done, of);
            return !(t.stop |= t.comm.any_rank(stop_requested || failed));
        };
        const std::optional<double> loss = evaluate(t.model, *t.val_loader, t.comm, go_on);
        t.stop |= !loss;
        if (!loss) return;
        t.state.val_loss = *loss;
        t.log.val(step, *loss);
        save_val_loss(t);
    } catch (const Error& error) {
        t.failure = error, t.stop = true;
    }
}

template <class floatX>
static void sample(Trainer<floatX>& t, int64_t step) {
    const Tokenizer& tokenizer = *t.start.tokenizer;
    std::vector<int> prompt = {tokenizer.end_of_text};
    if (!t.options.sample_prompt.empty()) prompt = encode(tokenizer, t.options.sample_prompt);
    Sampler sampler;
    sampler.seed = t.options.seed;
    std::string text = t.options.sample_prompt;
    generate(t.model, prompt, t.options.sample_tokens, sampler, uint64_t(step), [&](int token) {
        if (token == tokenizer.end_of_text || token >= tokenizer.vocab_size() || stop_requested) return false;
        text += tokenizer.tokens[token];
        return true;
    });
    if (!stop_requested) t.log.sample(step, text);
}

// What is due before step `step` begins, after `step` updates. Saving comes first: a crash later costs nothing. A run
// that was asked to stop does nothing else; one that goes on from here does the rest then.
template <class floatX>
static void between_steps(Trainer<floatX>& t, int64_t step, int64_t first, bool stop) {
    const Options& o = t.options;
    const bool last = step == o.steps;
    const auto due = [&](int64_t every) { return every > 0 && (step % every == 0 || last); };
    const bool save_due = step > first && (due(o.checkpoint_every) || stop);
    const bool val_due = t.val_loader && due(o.val_every) && !t.stop,
               sample_due = t.start.tokenizer && step > 0 && due(o.sample_every) && !t.stop;
    const bool trace_due = t.comm.trace && t.comm.trace->recording && (stop || step - first == o.trace_steps);
    if (!save_due && !val_due && !sample_due && !trace_due) return;
    Trace* trace = t.comm.trace.get();
    settle_all(t, step);
    for (int b = 0; b < t.model.layout.num_buckets(); b++) t.optimizer.need_weights(b);
    if (save_due) {
        const Span span(trace, Track::host, {.name = "checkpoint", .step = step});
        stop && !t.failure ? save(t) : save_or_warn(t);
    }
    if (val_due) {
        const Span span(trace, Track::host, {.name = "validation", .step = step});
        validate(t, step);
    }
    if (sample_due && t.comm.rank == 0) {
        const Span span(trace, Track::host, {.name = "sample", .step = step});
        sample(t, step);
    }
    if (trace_due) end_trace(t);
    start_clock(t, seconds_now());
}

template <class floatX>
static void load_state(Trainer<floatX>& t) {
    const ParamLayout& layout = t.model.layout;
    const auto write = [&](const float* host, StateKind kind, Param p, int l) {
        t.optimizer.set_state(kind, p, l, host);
    };
    t.state.seed = t.options.seed;
    if (!t.start.resume.empty()) {
        t.state = load_checkpoint(t.start.resume, layout, write);
    } else if (!t.start.weights.empty()) {
        load_weights(t.start.weights, layout, write);
    } else {
        t.optimizer.draw_weights(t.options.seed);
    }
    for (int b = 0; b < layout.num_buckets(); b++) t.model.pack_bucket(b);
}

// --micro-batch auto: what fits the memory that is free now, on every rank.
template <class floatX>
static void resolve_micro_batch(Options& o, const Start& start, int T, Comm& comm, int world_size, int local_ranks) {
    if (o.micro_batch != 0) return;
    const int64_t available = device_bytes_free(std::max(1, local_ranks));
    const int own = largest_micro_batch<floatX>(start.config, T, o.global_batch_tokens, world_size,
                                                saving_of(o, world_size), available);
    o.micro_batch = own;
    for (const std::string& other : comm.exchange(std::to_string(own)))
        o.micro_batch = std::min(o.micro_batch, std::stoi(other));
}

static void check_tokens_at_once(int B, int T) {
    ENSURE(int64_t(B) * T <= std::numeric_limits<int>::max(),
           "--micro-batch %d x --seq-len %d are %s tokens at once; at most 2,147,483,647 can be computed", B, T,
           with_commas(int64_t(B) * T).c_str());
}

// The trace must not take the place of a file that the run itself writes.
static void check_trace(const Options& o) {
    const std::string name = o.trace.substr(o.trace.rfind('/') + 1);
    for (const char* own : {"log.jsonl", "run.json", "run.lock", "latest"})
        ENSURE(name != own || o.output.empty() || !std::filesystem::equivalent(parent_directory(o.trace), o.output),
               "--trace %s is a file of the run itself; name another", o.trace.c_str());
    check_trace_file(o.trace);
}

// Refuses numbers of virtual ranks that do not divide as a tree of sums must.
static void check_virtual_ranks(const Options& o, const BatchPlan& batch) {
    const int n = o.virtual_ranks;
    if (n == 0) return;
    const auto power_of_two = [](int x) { return (x & (x - 1)) == 0; };
    ENSURE(power_of_two(n) && power_of_two(batch.world_size) && n >= batch.world_size,
           "--deterministic-ranks %d on %d ranks: both must be powers of two, and the first not less than the second; "
           "try 8",
           n, batch.world_size);
    const int64_t once = batch.tokens_per_step / (int64_t(batch.grad_accum_steps) * batch.world_size) * n;
    ENSURE(batch.tokens_per_step % once == 0,
           "--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x "
           "--deterministic-ranks %d; try %lld",
           static_cast<long long>(batch.tokens_per_step), static_cast<long long>(once), batch.B, batch.T, n,
           static_cast<long long>(round_up(batch.tokens_per_step, once)));
}

// Before the run, not at its first sample.
static void check_sample_prompt(const Options& o, const Start& start, int T) {
    if (o.sample_every > 0 && start.tokenizer && !o.sample_prompt.empty())
        check_prompt(encode(*start.tokenizer, o.sample_prompt), T);
}

// What makes the losses mean less than they seem to.
static void warn_of_data(Log& log, const Options& o, const Start& start, const Corpus& train, const Corpus* val) {
    for (const std::string& pattern : {o.train_data, o.val_data})
        if (const std::string warning = warn_of_tokenizer(start.tokenizer_path, pattern); !warning.empty())
            log.warn(warning);
    if (!start.weights.empty() && start.tokenizer_path != start.weights &&
        differ_as_tokenizers(start.tokenizer_path, start.weights))
        log.warn(format("the tokenizer %s is not that of %s, whose weights know other tokens",
                        start.tokenizer_path.c_str(), start.weights.c_str()));
    if (!val) return;
    for (const Shard& shard : val->shards)
        for (const Shard& other : train.shards)
            if (std::filesystem::equivalent(shard.path, other.path))
                log.warn(format("%s is in --train-data and in --val-data: its loss says nothing about new text",
                                shard.path.c_str()));
}

// For as long as the run lives. A new run must not write among the checkpoints of another either.
static std::unique_ptr<OutputLock> lock_output(const Options& o) {
    if (o.output.empty()) return nullptr;
    auto lock = std::make_unique<OutputLock>(o.output);
    const std::string newest = o.resume ? "" : newest_directory(o.output);
    ENSURE(newest.empty(),
           "%s holds the checkpoints of an earlier run (%s): continue it with --resume, or choose another --output",
           o.output.c_str(), newest.c_str());
    return lock;
}

// Room for the next checkpoint, if --keep gives up others, and so for the log. Without it training may still go on.
static void make_room_to_resume(const Options& o, const Start& start, int64_t step, std::vector<std::string>& notes) {
    if (o.checkpoint_every == 0) return;
    const int64_t bytes = checkpoint_bytes(ParamLayout(start.config), o.export_dtype == "bf16");
    try {
        make_room(o.output, o.keep, step + 1, bytes, [&](const std::string& line) { notes.push_back(line); });
    } catch (const Error& error) {
        notes.push_back(error.what());
    }
}

static int device_of(const Options& o, const Launch& launch) {
    return o.share_gpu ? launch.local_rank % device_count() : launch.local_rank;
}

template <class floatX>
static void train_loop(Trainer<floatX>& t) {
    const Options& o = t.options;
    const int64_t first = t.state.step, rest = o.steps - first;
    const int64_t stop_at = o.stop_after > 0 && o.stop_after < rest ? first + o.stop_after : o.steps;
    start_clock(t, seconds_now());
    for (int64_t step = first;;) {
        if (t.comm.world_size == 1) t.stop |= stop_requested;
        const bool stop = step >= stop_at || t.stop;
        between_steps(t, step, first, stop);
        if (stop) break;
        if (t.stop || !train_step(t, step)) continue;  // left early: save
        settle(t, t.pending[(step + 1) % 2]);          // the step before, by now long done
        PendingStep& p = t.pending[step % 2];
        const bool all_alike = t.comm.world_size == 1 || device_memory_is_host();
        if (all_alike && event_done(p.done)) settle(t, p);  // on the CPU, where it always is
        step++;
    }
    settle_all(t, t.state.step);
    wait_for_device();  // for other ranks' parts of what is under way: memory is freed next, and that cannot fail
}

// The exit code of a run that left its loop early: of the first rank that could not go on, or EXIT_PREEMPTED.
template <class floatX>
static int end_of_stopped(Trainer<floatX>& t) {
    const std::vector<std::string> codes = t.comm.exchange(std::to_string(t.failure ? t.failure->exit_code : 0));
    const bool saved = t.comm.exchange(std::to_string(t.saved_step))[0] == std::to_string(t.state.step);
    const long long step = t.state.step;
    if (t.failure)
        fail(t.failure->exit_code, "%s; %s", t.failure->what(),
             saved ? format("step %lld is saved, --resume goes on", step).c_str()
                   : format("the run ends at step %lld", step).c_str());
    for (const std::string& code : codes)
        if (code != "0") return std::stoi(code);
    t.log.note(saved ? format("stopped on request; step %lld is saved, --resume goes on", step)
                     : "stopped on request, before the first step was complete: there is nothing to save");
    return EXIT_PREEMPTED;
}

template <class floatX>
static int train(Options o, const Launch& launch, Comm& comm, const std::string& command_line) {
    const bool first = comm.rank == 0;
    const std::unique_ptr<OutputLock> lock = first ? lock_output(o) : nullptr;
    std::vector<std::string> notes;
    if (lock) notes = remove_leftovers(o.output);  // before the search for a checkpoint: one may be renamed back
    if (first && !o.trace.empty()) check_trace(o);
    comm.exchange("");  // the directory is there
    Start start = find_training_start(o);
    const int T = o.seq_len ? o.seq_len : start.config.max_T, world_size = comm.world_size;
    resolve_micro_batch<floatX>(o, start, T, comm, world_size, launch.local_world_size);
    check_tokens_at_once(o.micro_batch, T);
    const BatchPlan batch = plan_batch(o.micro_batch, T, o.global_batch_tokens, world_size);
    o.global_batch_tokens = batch.tokens_per_step;  // which a resume keeps, also on other ranks
    check_virtual_ranks(o, batch);
    check_sample_prompt(o, start, T);
    const WireType wire = o.grad_dtype == "bf16" ? WireType::bf16 : WireType::fp32;
    comm.check_wire(wire);
    const int64_t samples_per_step = batch.tokens_per_step / T;
    const OwnedStream own;
    if (!o.trace.empty()) comm.trace = std::make_unique<Trace>();
    DataLoaderConfig data = {o.train_data, "--train-data", batch.B, T, start.config.V, o.seed, samples_per_step};
    data.rank = comm.rank, data.world_size = world_size, data.stream = own.stream, data.trace = comm.trace.get();
    DataLoader loader(data);
    std::unique_ptr<DataLoader> val_loader;
    if (!o.val_data.empty() && o.val_every > 0) {
        DataLoaderConfig val = {o.val_data, "--val-data", batch.B, T, start.config.V};
        val.rank = comm.rank, val.world_size = world_size;
        val.fixed_set = true, val.max_batches = o.val_batches, val.stream = own.stream;
        val_loader = std::make_unique<DataLoader>(val);
    }
    resolve_steps(o, loader.corpus.num_samples / samples_per_step);
    const DeviceInfo device = device_info();
    const int gpu = device_memory_is_host() ? -1 : device_of(o, launch);
    const std::vector<std::string> cards = comm.exchange(card(
        o, start, loader.corpus, val_loader ? &val_loader->corpus : nullptr, dtype_name<floatX>(), device.name, gpu));
    check_same(cards, own_fields);
    align_trace(comm);

    RunInfo info = run_info(o, start, batch, loader.corpus, device, dtype_name<floatX>(), command_line);
    info.world_size = world_size;
    const TrainerState saved = start.resume.empty() ? TrainerState{} : read_trainer_state(start.resume);
    LogOptions log_options = {o.output, o.progress, o.quiet, !first, o.log_every, o.steps};
    if (!first) log_options.output.clear(), log_options.progress = "plain";
    if (!start.resume.empty()) log_options.resume_step = saved.step;
    log_options.flops_per_token = info.flops_per_token, log_options.peak_flops = info.peak_flops * world_size;
    if (lock && !start.resume.empty()) make_room_to_resume(o, start, saved.step, notes);
    Log log(log_options);
    for (const std::string& line : notes) log.note(line);
    // Where there are weights, the notes say why they are not those of the newest checkpoint.
    for (const std::string& line : start.notes) start.weights.empty() ? log.note(line) : log.warn(line);
    if (const std::string changed = changed_options(saved.options, info.options); !changed.empty())
        log.warn("changed since the checkpoint: " + changed);
    warn_of_data(log, o, start, loader.corpus, val_loader ? &val_loader->corpus : nullptr);
    const int64_t available = device_bytes_free(std::max(1, launch.local_world_size));
    std::vector<Row> rows = plan_table<floatX>(o, start, batch, device, available);
    rows.push_back({"data", describe_data(loader.corpus, samples_per_step)});
    rows.push_back({"schedule", describe_schedule(o)});
    rows.push_back({"launcher", describe_launch(launch)});
    rows.push_back({"ranks", describe_ranks(comm, cards)});
    rows.push_back({"output", o.output.empty() ? "none" : o.output});
    log.table(rows);
    if (saved.step < o.steps) log.run(info);  // else nothing is done with these options

    AdamWConfig adamw = {float(o.beta1), float(o.beta2), float(o.eps), float(o.weight_decay), o.seed};
    const Saving saving = saving_of(o, world_size);
    Trainer<floatX> t = {o,
                         comm,
                         start,
                         batch,
                         log,
                         make_schedule(o.schedule, o.lr, o.final_lr_fraction, o.warmup, o.steps),
                         GPT2<floatX>(start.config, Purpose::train, batch.B, T, saving),
                         AdamW<floatX>(t.model, adamw, saving, comm, wire),
                         loader,
                         val_loader.get(),
                         lock.get(),
                         {},
                         {},
                         {}};
    t.model.stream = own.stream;
    if (!launch.note.empty()) log.note(launch.note);
    if (!t.model.attention.empty()) log.note("attention: " + t.model.attention);
    load_state(t);
    if (t.state.step > 0) loader.seek(t.state.position);
    t.saved_step = t.start.resume.empty() ? -1 : t.state.step;
    t.state.options = info.options;
    const std::string fingerprint = "{\"train\":\"" + info.data_fingerprint + "\"}";
    if (!t.start.resume.empty() && t.state.data != fingerprint)
        log.warn("the training data differ from those of the checkpoint; going on at the same place of the new ones");
    t.state.data = fingerprint;
    if (o.checkpoint_every > 0 && !o.output.empty()) stop_on_signals(first);

    if (t.state.step >= o.steps)
        log.note(format("nothing to do: step %lld is reached, --steps is %lld; a larger one goes on",
                        static_cast<long long>(t.state.step), static_cast<long long>(o.steps)));
    train_loop(t);
    says_stopping = false;  // mpirun sends SIGTERM when a rank fails; this one has saved already
    log.finish();
    return t.stop ? end_of_stopped(t) : 0;
}

// How long a step and the run will take, from a step that is measured here, or at a share of the peak (of one rank, in
// FLOP/s) that is not.
template <class floatX>
static std::string plan_time(const Options& o, const GPT2Config& config, const BatchPlan& batch, double peak) {
    const auto measured = measure_step<floatX>(config, batch.B, batch.T, saving_of(o, 1), peak);
    const double flops = flops_per_token(config, batch.T) * double(batch.tokens_per_step) / batch.world_size;
    double seconds = flops / (0.3 * peak);
    if (measured) seconds = measured->micro_step * batch.grad_accum_steps * batch.B / measured->B + measured->update;
    std::string text = (seconds < 600.0 ? format("%.3g s", seconds) : duration_text(seconds)) + " per step";
    if (o.steps > 0)
        text +=
            format(", %s for %s steps", duration_text(double(o.steps) * seconds).c_str(), with_commas(o.steps).c_str());
    if (!measured) return text + ", if it runs at 30 % of the peak: not measured, a step is too large to be tried here";
    text +=
        format(": measured here with %d x %d tokens, %s tokens/s, %.0f %% of the peak", measured->B, batch.T,
               with_commas(int64_t(double(batch.tokens_per_step) / seconds)).c_str(), 100.0 * flops / (seconds * peak));
    return batch.world_size == 1 ? text : text + ", on one rank, the network not counted";
}

template <class floatX>
static int plan(Options o) {
    const Start start = find_training_start(o);
    const int T = o.seq_len ? o.seq_len : start.config.max_T, world_size = std::max(1, o.world_size);
    Comm alone;
    resolve_micro_batch<floatX>(o, start, T, alone, world_size, 1);
    check_tokens_at_once(o.micro_batch, T);
    const BatchPlan batch = plan_batch(o.micro_batch, T, o.global_batch_tokens, world_size);
    check_virtual_ranks(o, batch);
    const DeviceInfo device = device_info();
    std::vector<Row> rows = plan_table<floatX>(o, start, batch, device, device_bytes_free());
    if (!o.train_data.empty()) {
        const Corpus corpus = open_corpus(o.train_data, "--train-data", T);
        rows.push_back({"data", describe_data(corpus, batch.tokens_per_step / T)});
        resolve_steps(o, corpus.num_samples * T / batch.tokens_per_step);
    }
    const double flops = flops_per_token(start.config, T), per_step = flops * double(batch.tokens_per_step);
    const double peak = world_size * (sizeof(floatX) == 4 ? device.peak_flops_fp32 : device.peak_flops_bf16);
    rows.push_back({"work", format("%.4g GFLOP per token, %.4g TFLOP per step", flops / 1e9, per_step / 1e12)});
    if (peak > 0) rows.push_back({"time", plan_time<floatX>(o, start.config, batch, peak / world_size)});
    if (world_size > 1) rows.push_back({"network", describe_traffic<floatX>(start.config, o, batch)});
    const int64_t checkpoint = checkpoint_bytes(ParamLayout(start.config), o.export_dtype == "bf16");
    rows.push_back({"disk", format("%s per checkpoint, %s", human_bytes(checkpoint).c_str(),
                                   o.keep ? format("%d kept", o.keep).c_str() : "all kept")});
    for (const std::string& line : table_lines(rows)) print_stdout(line + "\n");
    for (const std::string& line : start.notes) print_stdout(line + "\n");
    return 0;
}

template <class floatX>
static int run(const Options& options, const Launch& launch, Comm& comm, const std::string& command_line) {
    switch (options.command) {
        case Command::train:
            return train<floatX>(options, launch, comm, command_line);
        case Command::plan:
            return plan<floatX>(options);
        case Command::generate:
            return generate_text<floatX>(options);
        case Command::eval:
            return eval_loss<floatX>(options);
        default:
            return EXIT_INTERNAL;
    }
}

// Where --autotune keeps its choices: they hold for a machine, not for a run.
static std::string autotune_file() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    ENSURE((cache && *cache) || (home && *home), "--autotune keeps its choices in $HOME/.cache, and HOME is not set");
    const std::string dir = (cache && *cache ? std::string(cache) : std::string(home) + "/.cache") + "/train_gpt2";
    make_directories(dir);
    return dir + "/products.txt";
}

static int tokenize_text(const Options& o) {
    TokenizeOptions t;
    t.inputs = o.inputs, t.output = o.output, t.tokenizer = o.tokenizer, t.train_bpe = o.train_bpe;
    t.val_fraction = o.val_fraction, t.val_tokens = o.val_tokens, t.shard_tokens = o.shard_tokens, t.split = o.split,
    t.text_key = o.text_key;
    t.threads = o.threads, t.quiet = o.quiet, t.replace = o.replace;
    return tokenize(t);
}

// CPU ranks of a host share its cores, unless mpirun has given each its own, or someone says otherwise.
static int threads_of_rank(const Options& o, const Launch& launch) {
    if (o.threads > 0 || launch.local_world_size <= 1 || getenv("OMP_NUM_THREADS")) return o.threads;
    const int all = int(sysconf(_SC_NPROCESSORS_ONLN)), given = omp_get_num_procs();
    return given < all ? given : std::max(1, all / launch.local_world_size);
}

// One line, which the lines of other ranks do not mix with.
static int print_launch(const Launch& launch) {
    const std::string joining = describe_joining(launch);
    print_stdout(describe_launch(launch) + (joining.empty() ? "" : ": ") + joining + "\n");
    return 0;
}

static int run_command(const Options& options, int argc, char** argv, Launch& launch, std::unique_ptr<Comm>& comm) {
    if (options.command == Command::help) {
        print_stdout(options.text);
        return 0;
    }
    check_stacks();
    ENSURE(omp_get_max_threads() <= MAX_THREADS, "OMP_NUM_THREADS=%d is more than %d threads; set it to the cores",
           omp_get_max_threads(), MAX_THREADS);
    if (options.command == Command::tokenize) return tokenize_text(options);  // no model, no ranks
    if (options.command == Command::train)
        launch = find_launch({options.rank, options.world_size, options.local_rank, options.rendezvous, options.run_id,
                              options.rendezvous_timeout},
                             getenv);
    if (options.print_launch) return print_launch(launch);
    if (launch.rank == 0 && !options.quiet && !options.taken.empty())
        printf("options of %s/run.json: %s\n", options.output.c_str(), terminal_text(options.taken).c_str());
    device_debug_sync = options.debug_sync;
    choose_attention(options.cudnn != "off", options.deterministic != "off");
    ENSURE(launch.local_rank >= 0 || device_memory_is_host(),
           "%s does not say which GPU is this rank's: give --local-rank", launch.launcher.c_str());
    device_init(device_of(options, launch), threads_of_rank(options, launch));
    comm = make_comm(launch, options.share_gpu);
    if (options.autotune) device_autotune(autotune_file());
    std::string command_line;
    for (int i = 0; i < argc; i++) command_line.append(i ? " " : "").append(argv[i]);
    std::string precision = options.precision;
    if (precision == "auto") precision = device_bf16_is_faster() ? "bf16" : "fp32";
    ENSURE(precision == "bf16" || options.master_weights == "on",
           "--master-weights off, but --precision auto is fp32 on this device; give --precision bf16");
    return precision == "fp32" ? run<float>(options, launch, *comm, command_line)
                               : run<bf16>(options, launch, *comm, command_line);
}

// A rank that fails ends the others too, which would wait for it.
int main(int argc, char** argv) {
    limit_spinning(argv);
    Launch launch;
    std::unique_ptr<Comm> comm;
    std::string error;
    int exit_code = 0;
    try {
        prepare_standard_streams();
        signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f`, write() then fails with EFBIG: a failed save, not a killed run
        Options options = parse_options(argc, argv);
        const std::string saved = options.needs_saved ? saved_options(options) : "";
        if (!saved.empty()) options = parse_options(argc, argv, saved);
        return run_command(options, argc, argv, launch, comm);
    } catch (const Error& e) {
        error = e.what(), exit_code = e.exit_code;
    } catch (const std::bad_alloc&) {
        error = "out of memory", exit_code = EXIT_INTERNAL;
    } catch (const std::exception& e) {  // of the library: no thread can be started
        error = e.what(), exit_code = EXIT_INTERNAL;
    }
    if (launch.world_size == 1) {
        fprintf(stderr, "error: %s\n", error.c_str());
        return exit_code;
    }
    fprintf(stderr, "error: rank %d on %s: %s\n", launch.rank, host_name().c_str(), error.c_str());
    write_error_file(launch, error);
    if (comm) comm->abort(exit_code);
    Comm().abort(exit_code);  // not exit(): a thread may still be inside of MPI_Init
}
