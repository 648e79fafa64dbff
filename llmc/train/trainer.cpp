#include "train/trainer.h"

#include <cmath>
#include <string>

#include "base/common.h"
#include "base/fault.h"
#include "base/trace.h"
#include "infer/eval.h"
#include "infer/generate.h"
#include "train/algorithms.h"
#include "train/init_weights.h"
#include "train/run_checks.h"
#include "train/stop.h"

static OptimizerConfig optimizer_config(const Options& o) {
    return {o.optimizer, {float(o.beta1), float(o.beta2), float(o.eps), float(o.weight_decay), o.seed}};
}

template <class floatX>
Trainer<floatX>::Trainer(Run& run)
    : run(run),
      model(run.source.config, Purpose::train, run.batch.B, run.batch.T, run.memory_options()),
      optimizer(model, optimizer_config(run.options), run.memory_options(), run.groups, grad_dtype(run.options)),
      reader{optimizer.whole,
             optimizer.rule.state,
             [this](float* host, Slot slot, Param p, int l) { optimizer.get_state(host, slot, p, l); },
             optimizer.reads_together(),
             optimizer.part(),
             [this](float* host, Slot slot) { optimizer.copy_part(host, slot); }} {
    if (run.groups.tp.world_size > 1) model.tensor_ranks = &run.groups.tp;
    model.stream = run.stream.stream;
    if (!model.attention.empty()) run.log->note("attention: " + model.attention);
    load_state();
    if (run.options.autotune == "on" && run.state.step < run.options.steps) {
        optimizer.weights.finish();  // rank 0 reads them in there, without before_read
        choose_algorithms(model, run);
    }
    if (run.state.step > 0) run.loader->seek(run.state.position);
    run.saved_step = run.source.resume.empty() ? -1 : run.state.step;
    describe_run();
    prepare_background_saves(run, reader);
}

// What later checkpoints say of the run, which a loaded checkpoint may say of an earlier start.
template <class floatX>
void Trainer<floatX>::describe_run() {
    run.state.seed = run.options.seed;
    run.state.options = run.info_options;
    run.state.data = run.data_fingerprint;
}

template <class floatX>
void Trainer<floatX>::load_state() {
    const TensorWriter write = [&](const float* host, Slot slot, Param p, int l) {
        run.watchdog.reached("loading of a tensor");
        optimizer.set_state(slot, p, l, host);
    };
    if (!run.source.resume.empty()) {
        run.state = load_checkpoint(run.source.resume, optimizer.whole, optimizer.rule.state, write);
        run.health.restore(run.state.health, run.source.resume + "/trainer.json");
    } else if (!run.source.weights.empty()) {
        load_from(
            run.source, run.options, run.comm,
            [&](const std::string& dir) { load_weights(dir, optimizer.whole, write); },
            [&](const std::string& line) { run.log->note(line); });
    } else {
        init_weights(optimizer, run.options.seed);
    }
    optimizer.weights_loaded();
}

// Returns whether every rank computed the step. Sets run.stop if a rank asks to stop.
static bool read_rank_statuses(Run& run, const PendingStep& step) {
    bool complete = true;
    for (int rank = 0; rank < run.comm.world_size; rank++) {
        run.stop |= step.results.statuses[rank].stop != 0.0f;
        complete &= step.results.statuses[rank].lost == 0.0f;
    }
    run.watchdog.set_longest_save(step.results.statuses[0].longest_save);
    return complete;
}

static void log_step(Run& run, PendingStep& step) {
    StepRecord& record = step.record;
    record.loss = step.results.loss;
    record.grad_norm = step.results.grad_norm;
    const double now = seconds_now(), exposed = run.groups.exposed(step.comm_waits);
    record.step_ms = 1e3 * (now - run.clock);
    record.loader_wait_ms = 1e3 * (run.loader->wait_seconds - run.loader_waited);
    record.comm_exposed_ms = 1e3 * (exposed - run.comm_exposed);
    run.watchdog.step_done(now - run.clock);
    run.clock = now;
    run.loader_waited = run.loader->wait_seconds;
    run.comm_exposed = exposed;
    run.log->step(record);
    const std::string slow = run.straggler.add(step.results.statuses, run.comm.world_size, record.step_ms);
    if (!slow.empty()) run.log->warn(slow);
    for (const std::string& line : run.slowdowns.add(step.results.statuses, run.hosts)) run.log->warn(line);
    report_gpu_error(run);
}

[[noreturn]] static void fail_after_step(const Run& run, const std::string& why) {
    const std::string saved = run.saved_step == run.state.step
                                  ? format(", which are saved as of step %lld", static_cast<long long>(run.state.step))
                                  : "";
    fail(EXIT_INTERNAL, "%s; the step did not change the weights%s. A lower --lr%s may help", why.c_str(),
         saved.c_str(), run.dtype == Dtype::fp32 ? " or a longer --warmup" : ", a longer --warmup or --precision fp32");
}

template <class floatX>
void Trainer<floatX>::halt(const std::string& why) {
    save_or_warn(run, reader);
    // No rank may end before rank 0 has saved: a rank that fails ends the others.
    run.saved_step = std::stoll(run.comm.all_gather_text(std::to_string(run.saved_step))[0]);
    end_trace(run);
    fail_after_step(run, why);
}

// Loads the newest checkpoint, as a resume does. The failed step will be computed again, but will not change the
// weights: training goes on with the data after it.
template <class floatX>
void Trainer<floatX>::roll_back(int64_t failed_step, const std::string& why) {
    for (PendingStep& step : pending) {
        if (step.waiting) wait_for_event(step.done);  // its results are of weights that are given up
        step.waiting = false;
    }
    optimizer.finish_collectives();
    wait_for_device();
    run.watchdog.begin(Phase::checkpoint,
                       failed_step);  // rank 0 may wait for its save in flight, the others for rank 0
    const std::string from = newest_saved(run);
    if (from.empty()) halt(why + ", and there is no checkpoint to go back to");
    run.source.resume = from;
    run.watchdog.begin(Phase::start, failed_step);
    load_state();
    describe_run();
    optimizer.forget_failure();
    run.health.roll_back(failed_step);
    run.loader->seek(run.state.position);
    run.saved_step = run.state.step;
    LogOptions again = run.log->options;
    again.resume_step = run.state.step;
    run.log.reset();
    run.log = std::make_unique<Log>(again);
    run.log->warn(format("%s; the run goes back to %s, and leaves out step %lld (rollback %d of %d)", why.c_str(),
                         from.c_str(), static_cast<long long>(failed_step), run.health.rollbacks,
                         Health::MOST_ROLLBACKS));
    rolled_back = true;
    start_clock(run);
}

template <class floatX>
void Trainer<floatX>::finish_step(PendingStep& step) {
    if (!step.waiting) return;
    const Span span(run.comm.trace.get(), Track::host, {"finish step", step.record.step});
    wait_for_event(step.done);
    step.waiting = false;
    if (!read_rank_statuses(run, step)) return;
    const PendingStep::Results& results = step.results;
    const Finding finding = run.health.examine({step.record.step, results.loss, results.grad_norm, results.factor});
    step.record.skipped = finding.skipped;
    log_step(run, step);
    last_own_ms = step.record.step_ms - step.record.comm_exposed_ms;
    if (finding.verdict == Verdict::halt) halt(finding.text);
    if (finding.verdict == Verdict::rollback) return roll_back(step.record.step, finding.text);
    if (finding.verdict == Verdict::skip) run.log->warn(finding.text + "; the step did not change the weights");
    if (finding.verdict == Verdict::warn) run.log->warn(finding.text);
    run.state.step = step.record.step + 1;
    run.state.position += run.loader->config.windows_per_step;
    run.state.tokens = step.record.tokens;
}

template <class floatX>
void Trainer<floatX>::finish_steps(int64_t step) {
    finish_step(pending[step % 2]);
    finish_step(pending[(step + 1) % 2]);
}

// Whether other ranks have the same weights. With ZeRO-3 each rank has a shard of its own. With ZeRO-1 and 2 each
// weight is computed by one rank, so the ranks have the same weights even if they round differently.
template <class floatX>
bool Trainer<floatX>::compares_weights() const {
    return run.groups.dp.world_size > 1 && (run.same_rounding || run.options.zero > 0) && !optimizer.weights.sharded();
}

template <class floatX>
void Trainer<floatX>::check_weights(int64_t step) {
    const Span span(run.comm.trace.get(), Track::host, {.name = "comparison of weights", .step = step});
    run.watchdog.reached("comparison of weights");
    optimizer.weights.finish();
    const DeviceBuffer<floatX>& weights = model.weights.memory;
    compare_weights(run.groups, weights.data, weights.bytes(), step, model.stream);
}

// The validation has no result if a rank leaves the pass early, because it was asked to stop or cannot read its data.
template <class floatX>
void Trainer<floatX>::validate(int64_t step) {
    const Span span(run.comm.trace.get(), Track::host, {.name = "validation", .step = step});
    run.watchdog.begin(Phase::validation, step);
    double begun = 0.0;  // a batch begins after the vote, in which other ranks may wait for a save of rank 0
    try {
        const auto go_on = [&](int64_t done, int64_t of, bool failed) {
            if (done > 0) run.watchdog.validation_batch_done(seconds_now() - begun);
            run.log->working("validation batch", done, of);
            run.watchdog.reached("validation batch", done);
            fault_point({.point = FaultPoint::validation, .rank = run.comm.rank, .step = step});
            run.stop |= run.comm.any_rank(stop_requested() || failed);
            begun = seconds_now();
            return !run.stop;
        };
        const std::optional<double> loss = evaluate(model, *run.val_loader, run.groups.dp, go_on);
        run.stop |= !loss;
        if (!loss) return;
        run.state.val_loss = *loss;
        run.state.val_step = step;
        run.log->val(step, *loss);
        save_val_loss(run);
    } catch (const Error& error) {
        run.failure = error;
        run.stop = true;
    }
}

// Rank 0 logs the text. With ZeRO-3 and with tensor parallelism no rank has all weights, so all ranks generate the
// text, and all of its tokens: they compute it together.
template <class floatX>
void Trainer<floatX>::sample(int64_t step) {
    const bool together = optimizer.weights.sharded() || model.tensor_ranks;
    const Options& o = run.options;
    run.watchdog.begin(Phase::sample, step);
    // The other ranks wait in the next step until rank 0 has the text. The watchdog permits the time of a step for each
    // token, which takes less.
    if (!together && !run.first_rank())
        return run.watchdog.permit(o.sample_tokens * std::max(1.0, run.watchdog.median_step()), Phase::sample);
    const Span span(run.comm.trace.get(), Track::host, {.name = "sample", .step = step});
    const Tokenizer& tokenizer = *run.source.tokenizer;
    std::vector<int> prompt = {tokenizer.end_of_text};
    if (!o.sample_prompt.empty()) prompt = encode(tokenizer, o.sample_prompt);
    Sampler sampler;
    sampler.seed = o.seed;
    std::string text = o.sample_prompt;
    bool text_ended = false;
    generate(model, prompt, o.sample_tokens, sampler, uint64_t(step), [&](int token) {
        run.watchdog.reached("token of the sample");
        text_ended |= token == tokenizer.end_of_text || token >= tokenizer.vocab_size();
        if (!text_ended) text += tokenizer.tokens[token];
        return together ? !run.comm.any_rank(stop_requested()) : !text_ended && !stop_requested();
    });
    if (run.first_rank() && !stop_requested()) run.log->sample(step, text);
}

template <class floatX>
void Trainer<floatX>::between_steps(int64_t step, int64_t first, bool stop) {
    if (!stop) report_background_save(run);  // else save_last does, and saves once more
    const Options& o = run.options;
    const auto due = [&](int64_t every) { return every > 0 && (step % every == 0 || step == o.steps); };
    const bool save_due = step > first && (due(o.checkpoint_every) || stop);
    const bool val_due = run.val_loader && due(o.val_every) && !run.stop;
    const bool sample_due = run.source.tokenizer && step > 0 && due(o.sample_every) && !run.stop;
    const bool check_due = step > first && compares_weights() && due(o.hash_check);
    Trace* trace = run.comm.trace.get();
    const bool trace_due = trace && trace->recording && (stop || step - first == o.trace_steps);
    if (!save_due && !val_due && !sample_due && !trace_due && !check_due) return;
    finish_steps(step);
    if (rolled_back) return;
    contention.restart();                // validation and sampling look for themselves
    if (check_due) check_weights(step);  // weights that differ are not saved
    if (save_due) {
        const Span span(trace, Track::host, {.name = "checkpoint", .step = step});
        run.watchdog.begin(Phase::checkpoint, step);
        if (!stop)
            save_in_background(run, reader);
        else
            run.failure ? save_or_warn(run, reader) : save_last(run, reader);
        // The other ranks wait in the next step until rank 0 has saved.
        if (!run.first_rank()) run.watchdog.permit_save();
    }
    if (val_due) validate(step);
    if (sample_due) sample(step);
    if (trace_due) end_trace(run);
    contention.restart();
    start_clock(run);
}

template struct Trainer<float>;
template struct Trainer<bf16>;
