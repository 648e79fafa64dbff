#include "train/trainer.h"

#include <cmath>
#include <string>

#include "base/common.h"
#include "base/trace.h"
#include "infer/eval.h"
#include "infer/generate.h"
#include "train/algorithms.h"
#include "train/init_weights.h"
#include "train/run_checks.h"
#include "train/stop.h"

static OptimizerConfig optimizer_config(const Options& o) {
    return {o.optimizer, {float(o.beta1), float(o.beta2), float(o.eps), float(o.weight_decay), o.seed}, o.on_nan == "skip"};
}

template <class floatX>
Trainer<floatX>::Trainer(Run& run)
    : run(run),
      model(run.source.config, Purpose::train, run.batch.B, run.batch.T, run.memory_options()),
      optimizer(model, optimizer_config(run.options), run.memory_options(), run.groups, grad_dtype(run.options)) {
    if (run.groups.tp.world_size > 1) model.tensor_ranks = &run.groups.tp;
    model.stream = run.stream.stream;
    if (!model.attention.empty()) run.log->note("attention: " + model.attention);
    outliers.skip_nan = run.options.on_nan == "skip";
    outliers.z = run.options.spike_z;
    load_state();
    if (run.options.autotune == "on" && run.state.step < run.options.steps) {
        optimizer.weights.finish();  // rank 0 reads them in there, without before_read
        choose_algorithms(model, run);
    }
    if (run.state.step > 0) run.loader->seek(run.state.position);
    run.state.seed = run.options.seed;
    run.state.options = run.info_options;
    run.state.data = run.data_fingerprint;
    saver.emplace(run, optimizer);
    start_clock(run.state.step);
}

template <class floatX>
void Trainer<floatX>::load_state() {
    const TensorWriter write = [&](const float* host, Slot slot, Param p, int l) {
        run.comm.reached("loading of a tensor");
        optimizer.set_state(slot, p, l, host);
    };
    if (!run.source.resume.empty()) {
        run.state = load_checkpoint(run.source.resume, optimizer.whole, optimizer.rule.state, write);
        outliers.restore(run.state.health, run.source.resume + "/trainer.json");
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

template <class floatX>
void Trainer<floatX>::start_clock(int64_t step) {
    run.comm.watchdog->step = step;
    clock = seconds_now();
    loader_waited = run.loader->wait_seconds;
    comm_exposed = run.groups.exposed(run.groups.waits());
    bytes_sent = run.groups.bytes_sent();
}

// With ZeRO-2 the virtual ranks take turns, because every micro-step is summed over them.
template <class floatX>
MicroStep Trainer<floatX>::micro_step(int n) {
    run.comm.reached("micro-step", n);
    run.log->working("micro-step", n, run.batch.grad_accum_steps);
    const int virtual_ranks = optimizer.gradients.own_virtual_ranks(), each = run.batch.grad_accum_steps / virtual_ranks;
    if (model.shard_gradients) return {n % virtual_ranks, 0, true};
    return {n / each, n % each, n % each + 1 == each};
}

// A graph replays the same calls on the same memory. Collectives are never part of one, so neither are ZeRO-2, ZeRO-3
// and tensor parallelism, which have some in every micro-step.
template <class floatX>
bool Trainer<floatX>::captures(const MicroStep& m) const {
    return device_has_graphs() && run.options.cuda_graph == "on" && !model.shard_gradients && !model.tensor_ranks &&
           !optimizer.weights.pending() && !(m.last && optimizer.gradients.needs_reduction());
}

template <class floatX>
void Trainer<floatX>::queue_results(int64_t step) {
    StepResults& r = results[step % 2];
    r.step = step;
    r.comm_bytes = run.groups.bytes_sent() - bytes_sent;
    r.comm_waits = run.groups.waits();
    bytes_sent = run.groups.bytes_sent();
    copy_to_host(&r.values.loss, optimizer.gradients.step_loss(), sizeof(float), model.stream);
    copy_to_host(&r.values.grad_norm, optimizer.norm(), sizeof(float), model.stream);
    copy_to_host(&r.values.factor, optimizer.factor(), sizeof(float), model.stream);
    copy_to_host(r.values.statuses, optimizer.gradients.rank_statuses(),
                 run.comm.world_size * int64_t(sizeof(RankStatus)), model.stream);
    record_event(r.done, model.stream);
    run.comm.watchdog->step = step + 1;
}

template <class floatX>
void Trainer<floatX>::log_step(int64_t step, const StepResults& r, const std::string& skipped) {
    const double now = seconds_now(), exposed = run.groups.exposed(r.comm_waits);
    StepRecord record;
    record.step = step;
    record.tokens = run.state.tokens + run.batch.tokens_per_step;
    record.step_tokens = run.batch.tokens_per_step;
    record.loss = r.values.loss;
    record.grad_norm = r.values.grad_norm;
    record.lr = float(learning_rate(run.schedule, step));
    record.step_ms = 1e3 * (now - clock);
    record.loader_wait_ms = 1e3 * (run.loader->wait_seconds - loader_waited);
    record.comm_exposed_ms = 1e3 * (exposed - comm_exposed);
    record.comm_bytes = run.comm.world_size > 1 ? r.comm_bytes : -1;
    record.skipped = skipped;
    run.log->step(record);
    trace_step(step, clock, now);
    clock = now;
    loader_waited = run.loader->wait_seconds;
    comm_exposed = exposed;
    own_ms = float(record.step_ms - record.comm_exposed_ms);
    const std::string slow = stragglers.add(r.values.statuses, run.comm.world_size, record.step_ms);
    if (!slow.empty()) run.log->warn(slow);
}

// A step that ends the run because it is not finite is not counted, and neither is the step that is queued after it:
// the device leaves the weights unchanged (ops::clip_factor).
template <class floatX>
void Trainer<floatX>::finish_step(int64_t step) {
    StepResults& r = results[step % 2];
    if (r.step != step || step < 0) return;
    wait_for_event(r.done);
    run.comm.reached("results of a step");
    r.step = -1;
    for (int rank = 0; rank < run.comm.world_size; rank++) run.stop |= r.values.statuses[rank].stop != 0.0f;
    const bool counts = outliers.skip_nan || !std::isnan(r.values.factor);
    if (!counts && !failure.empty()) return;
    const Outliers::Finding finding = outliers.add(step, r.values.loss, r.values.grad_norm, r.values.factor);
    log_step(step, r, finding.skipped);
    if (finding.ends_run) {
        failure = finding.text;
        run.stop = true;
    } else if (!finding.text.empty()) {
        run.log->warn(finding.text + "; the step did not change the weights");
    }
    if (!counts) return;
    run.state.step = step + 1;
    run.state.position += run.loader->config.windows_per_step;
    run.state.tokens += run.batch.tokens_per_step;
}

template <class floatX>
void Trainer<floatX>::finish_steps() {
    const int64_t next = run.state.step;
    finish_step(next);
    finish_step(next + 1);
}

// Whether other ranks have the same weights. With ZeRO-3 each rank has a shard of its own. With ZeRO-1 and 2 each
// weight is computed by one rank, so the ranks have the same weights even if they round differently.
template <class floatX>
bool Trainer<floatX>::has_replicas() const {
    return run.groups.dp.world_size > 1 && (run.same_rounding || run.options.zero > 0) && !optimizer.weights.sharded();
}

template <class floatX>
void Trainer<floatX>::check_replicas(int64_t step) {
    run.comm.reached("comparison of weights");
    optimizer.weights.finish();
    const DeviceBuffer<floatX>& weights = model.weights.memory;
    ::check_replicas(run.groups, weights.data, weights.bytes(), step, model.stream);
    start_clock(step);
}

// The validation has no result if a rank leaves the pass early, because it was asked to stop.
template <class floatX>
void Trainer<floatX>::validate(int64_t step) {
    const ProfileRange range("validation", step);
    const std::optional<double> loss =
        evaluate(model, *run.val_loader, run.groups.dp, [&](int64_t done, int64_t of) {
            run.log->working("validation batch", done, of);
            run.comm.reached("validation batch", done);
            run.stop |= run.comm.any_rank(stop_requested());
            return !run.stop;
        });
    run.stop |= !loss;
    if (loss) {
        run.state.val_loss = *loss;
        run.state.val_step = step;
        run.log->val(step, *loss);
    }
    start_clock(step);
}

// Rank 0 logs the text. With ZeRO-3 and with tensor parallelism no rank has all weights, so all ranks generate the
// text, and all of its tokens: they compute it together.
template <class floatX>
void Trainer<floatX>::sample(int64_t step) {
    const bool together = optimizer.weights.sharded() || model.tensor_ranks;
    const Options& o = run.options;
    // The other ranks wait in the next step until rank 0 has the text.
    if (!together && !run.first_rank()) return start_clock(step);
    const ProfileRange range("sample", step);
    const Tokenizer& tokenizer = *run.source.tokenizer;
    std::vector<int> prompt = {tokenizer.end_of_text};
    if (!o.sample_prompt.empty()) prompt = encode(tokenizer, o.sample_prompt);
    Sampler sampler;
    sampler.seed = o.seed;
    std::string text = o.sample_prompt;
    bool text_ended = false;
    generate(model, prompt, o.sample_tokens, sampler, uint64_t(step), [&](int token) {
        run.comm.reached("token of a sample");
        text_ended |= token == tokenizer.end_of_text || token >= tokenizer.vocab_size();
        if (!text_ended) text += tokenizer.tokens[token];
        return together ? !run.comm.any_rank(stop_requested()) : !text_ended && !stop_requested();
    });
    if (run.first_rank() && !stop_requested()) run.log->sample(step, text);
    start_clock(step);
}

template <class floatX>
void Trainer<floatX>::save(bool wait) {
    const ProfileRange range("checkpoint", run.state.step);
    run.comm.reached("checkpoint");
    run.state.health = outliers.json();
    saver->save(run.state.step, wait);
    start_clock(run.state.step);
}

template <class floatX>
int Trainer<floatX>::end() {
    run.comm.reached("the end");
    optimizer.finish_collectives();  // other ranks may still read this rank's memory
    wait_for_device();
    const bool log_is_complete = run.log->finish();
    // No rank may end before rank 0 has saved: a rank that fails ends the others.
    const bool saved = run.comm.all_gather_text(std::to_string(run.saved_step))[0] == std::to_string(run.state.step);
    const long long step = run.state.step;
    if (!failure.empty())
        fail(EXIT_INTERNAL, "%s; the step did not change the weights%s. A lower --lr%s may help", failure.c_str(),
             saved ? format(", which are saved as of step %lld", step).c_str() : "",
             run.dtype == Dtype::fp32 ? " or a longer --warmup" : ", a longer --warmup or --precision fp32");
    if (!run.stop) return log_is_complete ? 0 : EXIT_IO;
    run.log->note(std::string("stopped on request") +
                  (saved ? format("; step %lld is saved, --resume continues", step)
                         : ", before the first step was complete: there is nothing to save"));
    return EXIT_PREEMPTED;
}

template struct Trainer<float>;
template struct Trainer<bf16>;
