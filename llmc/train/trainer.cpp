#include "train/trainer.h"

#include <algorithm>
#include <cmath>

#include "base/common.h"
#include "base/signals.h"
#include "base/trace.h"
#include "infer/eval.h"
#include "infer/generate.h"
#include "infer/tasks.h"
#include "parallel/watchdog.h"
#include "train/algorithms.h"

// ---- the start

static DataLoaderConfig loader_config(const Run& run, Stream stream, bool validation) {
    const Options& o = run.options;
    DataLoaderConfig config = {validation ? o.val_data : o.train_data, validation ? "--val-data" : "--train-data",
                               run.batch.B, run.batch.T, run.start.config.V};
    config.rank = run.groups.dp.rank;
    config.world_size = run.groups.dp.world_size;
    config.stream = stream;
    config.in_order = validation;
    config.max_windows = validation ? windows_of(o.val_tokens, run.batch.T) : 0;
    config.seed = o.seed;
    config.windows_per_step = run.batch.tokens_per_step / run.batch.T;
    if (run.memory_options().sums_apart() && !validation)
        config.parts = std::max(1, o.deterministic_ranks / config.world_size);
    return config;
}

static OptimizerConfig optimizer_config(const Options& o) {
    return {{float(o.beta1), float(o.beta2), float(o.eps), float(o.weight_decay), o.seed}, o.on_nan == OnNan::skip};
}

// Mean bytes of the tokens that validation predicts. What begins a document has none. Each rank reads a part of the
// windows.
static double bytes_per_token(const Run& run, int64_t windows) {
    const std::vector<std::string>& texts = run.start.tokenizer->tokens;
    const std::vector<int> start = document_start(*run.start.tokenizer);
    const int T = run.batch.T;
    std::vector<int> tokens(size_t(T) + 1);
    int64_t bytes = 0;
    for (int64_t w = run.groups.world.rank; w < windows; w += run.groups.world.world_size) {
        read_window(run.data.val, w, run.start.config.V, tokens.data());
        for (int t = 1; t <= T; t++)
            if (std::ranges::count(start, tokens[t]) == 0 && tokens[t] < int(texts.size()))
                bytes += int64_t(texts[tokens[t]].size());
    }
    double sum = 0.0;
    for (const std::string& count : run.groups.world.all_gather_text(std::to_string(bytes))) sum += std::stod(count);
    return sum / (double(windows) * T);
}

template <class floatX>
Trainer<floatX>::Trainer(const Run& run, Log& log)
    : run(run),
      log(log),
      loader(loader_config(run, stream, false), run.data.train),
      model(run.start.config, Purpose::train, run.batch.B, run.batch.T, run.memory_options()),
      optimizer(model, optimizer_config(run.options), run.memory_options(), run.groups) {
    if (!run.data.val.shards.empty())
        val_loader = std::make_unique<DataLoader>(loader_config(run, stream, true), run.data.val);
    if (run.groups.tp.world_size > 1) model.tensor_ranks = &run.groups.tp;
    model.stream = stream;
    outliers.skip_nan = run.options.on_nan == OnNan::skip;
    outliers.z = run.options.spike_z;
}

template <class floatX>
void Trainer<floatX>::start() {
    const Options& o = run.options;
    load_state();
    if (val_loader && run.start.tokenizer) state.val_bytes = bytes_per_token(run, val_loader->num_windows);
    if (state.step < o.steps) time_algorithms(model, optimizer, o, run.groups.world, log);
    if (const std::string backend = model.prepare_attention(); !backend.empty()) log.note("attention: " + backend);
    if (state.step > 0) loader.seek(state.position);
    const TrainerState before = state;
    state.seed = o.seed;
    state.options = options_json(run.used_options());
    state.data = run.describe_data();
    if (before.val_step >= 0 && keeps_best(o) && !same_validation(before, state)) {
        state.best_step = -1;
        log.warn(
            "--val-data or --val-tokens are not those of the checkpoint: the losses cannot be compared, so the best "
            "loss and its checkpoint are sought anew");
    }
    // Not before: a start that fails changes neither the options nor the log of the run.
    log.open();
    if (run.lock && state.step < o.steps) replace_file(o.output + "/run.toml", run_toml(o));
    start_clock(state.step);
}

template <class floatX>
void Trainer<floatX>::load_state() {
    const RunStart& start = run.start;
    const TensorWriter write = [&](const float* host, Slot slot, Param p, int l) {
        run.groups.world.reached("loading of a tensor");
        optimizer.set_state(slot, p, l, host);
    };
    if (!start.resume.empty()) {
        state = load_checkpoint(start.resume, optimizer.full_layout, write);
        if (const MomentDtype stored = state.moments; stored != run.options.moments)
            log.warn(format("the checkpoint's moments are %s; they are %s %s (--moments)", MOMENT_WORDS[int(stored)],
                            run.options.moments == MomentDtype::fp32 ? "widened to" : "rounded to",
                            MOMENT_WORDS[int(run.options.moments)]));
        if (state.by_muon && run.options.optimizer == UpdateRule::adamw)
            log.warn(
                "--optimizer adamw: the checkpoint has no second moments of matrices, as muon keeps none; they are "
                "estimated from the first ones");
        outliers.restore(state.health, start.resume + "/trainer.json");
    } else if (!start.weights.empty()) {
        const GPT2Config& source = start.hf_config.model;
        load_weights(start.weights, ParamLayout(source),
                     enlarge_vocabulary(source.V, optimizer.full_layout, run.options.seed, write));
    } else {
        init_weights(optimizer, run.options.seed);
    }
    optimizer.weights_loaded();
}

// ---- a step

// The device measures a step's time, from the end of the one before: the host, busy with launches, sees an end late.
template <class floatX>
void Trainer<floatX>::start_clock(int64_t step) {
    if (run.groups.world.watchdog) run.groups.world.watchdog->step = step;
    record_event(end_of(step - 1), model.stream);
    clock = {seconds_now(), loader.wait_seconds, run.groups.exposed(run.groups.waits()), run.groups.bytes_sent()};
}

// With sums_apart the virtual ranks take turns, because every micro-step is summed over them.
template <class floatX>
MicroStep Trainer<floatX>::micro_step(int n) {
    run.groups.world.reached("micro-step", n);
    const int virtual_ranks = optimizer.gradients.local_virtual_ranks();
    if (model.sums_apart) return {n % virtual_ranks, 0, true};
    const int each = run.batch.grad_accum_steps / virtual_ranks;
    return {n / each, n % each, n % each + 1 == each};
}

// A graph replays the same calls on the same memory. Collectives are never part of one, so neither are ZeRO-2, ZeRO-3
// and tensor parallelism, which have some in every micro-step. --grad-accum bf16 counts the micro-steps.
template <class floatX>
bool Trainer<floatX>::captures(const MicroStep& m) const {
    return device_has_graphs() && run.options.cuda_graph && !model.sums_apart && !model.tensor_ranks &&
           !optimizer.weights.pending() && !(m.last && optimizer.gradients.needs_reduction());
}

template <class floatX>
void Trainer<floatX>::queue_results(int64_t step) {
    StepResults& r = results[step % 3];
    r.step = step;
    r.comm_bytes = run.groups.bytes_sent() - clock.bytes_sent;
    r.comm_waits = run.groups.waits();
    clock.bytes_sent = run.groups.bytes_sent();
    copy_to_host(&r.values.loss, optimizer.gradients.step_loss(), sizeof(float), model.stream);
    copy_to_host(&r.values.grad_norm, optimizer.norm(), sizeof(float), model.stream);
    copy_to_host(&r.values.factor, optimizer.factor(), sizeof(float), model.stream);
    copy_to_host(r.values.statuses, optimizer.gradients.rank_statuses(),
                 run.groups.world.world_size * int64_t(sizeof(RankStatus)), model.stream);
    record_event(r.done, model.stream);
    if (run.groups.world.watchdog) run.groups.world.watchdog->step = step + 1;
}

template <class floatX>
void Trainer<floatX>::log_step(int64_t step, const StepResults& r, const std::string& skipped) {
    const double now = seconds_now(), exposed = run.groups.exposed(r.comm_waits);
    StepRecord record;
    record.step = step;
    record.tokens = state.tokens + run.batch.tokens_per_step;
    record.step_tokens = run.batch.tokens_per_step;
    record.loss = r.values.loss;
    record.grad_norm = r.values.grad_norm;
    record.lr = run.lr(step);
    record.step_ms = 1e3 * seconds_between(end_of(step - 1), r.done);
    record.loader_wait_ms = 1e3 * (loader.wait_seconds - clock.loader_waited);
    record.comm_exposed_ms = 1e3 * (exposed - clock.comm_exposed);
    record.comm_bytes = run.groups.world.world_size > 1 ? r.comm_bytes : -1;
    record.skipped = skipped;
    if (device_memory_is_host())  // no step is faster than the peak
        log.raise_peak(1e3 * log.options.flops_per_token * double(record.step_tokens) / record.step_ms);
    log.step(record);
    trace_step(step, clock.begin, now);
    clock.begin = now;
    clock.loader_waited = loader.wait_seconds;
    clock.comm_exposed = exposed;
    own_ms = float(record.step_ms - record.comm_exposed_ms);
    const std::string slow = stragglers.add(r.values.statuses, run.groups.world.world_size, record.step_ms);
    if (!slow.empty()) log.warn(slow);
    if (!device_memory_is_host() || !run.is_rank0() || now < peak_due) return;
    log.raise_peak(run.groups.world.world_size * device_measure_peak(run.dtype));
    peak_due = now + (peak_wait *= 2.0);
    start_clock(step + 1);  // the measurement is no part of a step
}

// A step that ends the run because it is not finite is not counted, and neither is the step that is queued after it:
// the device leaves the weights unchanged (ops::clip_factor).
template <class floatX>
void Trainer<floatX>::finish_step(int64_t step) {
    if (step < 0 || results[step % 3].step != step) return;
    StepResults& r = results[step % 3];
    wait_for_event(r.done);
    run.groups.world.reached("results of a step");
    r.step = -1;
    for (int rank = 0; rank < run.groups.world.world_size; rank++) stop |= r.values.statuses[rank].stop != 0.0f;
    const bool counts = outliers.skip_nan || !std::isnan(r.values.factor);
    if (!counts && !failure.empty()) return;
    const Outliers::Finding finding = outliers.add(step, r.values.loss, r.values.grad_norm, r.values.factor);
    log_step(step, r, finding.skipped);
    if (finding.ends_run) {
        failure = finding.text;
        stop = true;
    } else if (!finding.text.empty()) {
        log.warn(finding.text + "; the step did not change the weights");
    }
    if (!counts) return;
    state.step = step + 1;
    state.position += loader.config.windows_per_step;
    state.tokens += run.batch.tokens_per_step;
}

// --patience: ends the run after too many validations that are not better than all before. Returns whether this one is.
// A resumed run repeats the validation of its first step, which changes nothing. Step 0, which has no checkpoint, is
// not compared.
template <class floatX>
bool Trainer<floatX>::compare_with_best(int64_t step) {
    const Options& o = run.options;
    if (o.patience == 0) state.best_step = -1;  // its checkpoint may be deleted from now on
    if (o.patience == 0 || step == 0) return false;
    const bool better = state.best_step < 0 || state.val_loss < state.best_loss;
    const bool best = run.groups.world.all_gather_text(better ? "better" : "")[0] == "better";  // all do as rank 0 says
    if (best) {
        state.best_loss = std::fmin(state.val_loss, INFINITY);  // infinity for NaN: any loss is better
        state.best_step = step;
    }
    out_of_patience = (step - state.best_step) / o.val_every >= o.patience;
    stop |= out_of_patience;
    return best;
}

// The validation and a task have no result if a rank leaves the pass early, because it was asked to stop.
template <class floatX>
bool Trainer<floatX>::validate(int64_t step) {
    const ProfileRange range("validation", step);
    const auto go_on = [&](int64_t done, int64_t) {
        run.groups.world.reached("validation batch", done);
        stop |= run.groups.world.any_rank(stop_requested());
        return !stop;
    };
    const std::optional<double> loss = [&] {
        const PauseTimer timer{log, Pause::validation, run.options.val_every};
        return evaluate(model, *val_loader, run.groups.dp, go_on);
    }();
    stop |= !loss;
    if (loss) {
        state.val_loss = *loss;
        state.val_step = step;
        log.val(step, *loss, state.val_bytes);
    }
    const Options& o = run.options;
    if (step % std::max<int64_t>(1, o.eval_every) == 0 || step == o.steps) {
        const PauseTimer timer{log, Pause::tasks, std::max(o.val_every, o.eval_every)};
        for (const Task& task : run.data.tasks) {
            if (stop) break;
            const auto scores = score(model, task.sequences(), !task.has_choices(), run.groups.dp, go_on);
            stop |= !scores;
            if (scores) log.eval(step, summarize(task, *scores));
        }
    }
    return loss && compare_with_best(step);
}

// Rank 0 logs the text. With ZeRO-3 and with tensor parallelism no rank has all weights, so all ranks generate the
// text, and all of its tokens: they compute it together.
template <class floatX>
void Trainer<floatX>::sample(int64_t step) {
    const bool together = optimizer.weights.sharded() || model.tensor_ranks;
    const Options& o = run.options;
    if (!together && !run.is_rank0()) return;
    const ProfileRange range("sample", step);
    const PauseTimer timer{log, Pause::sample, o.sample_every};
    const Tokenizer& tokenizer = *run.start.tokenizer;
    const std::vector<int> prompt = encode_prompt(tokenizer, o.sample_prompt);
    Sampler sampler;
    sampler.seed = o.seed;
    sampler.vocab_size = tokenizer.vocab_size();
    std::string text = o.sample_prompt;
    bool text_ended = false;
    generate(model, prompt, o.sample_tokens, sampler, uint64_t(step), [&](int token) {
        run.groups.world.reached("token of the sample");
        text_ended |= token == tokenizer.end_of_text;
        if (!text_ended) text += tokenizer.tokens[token];
        return together ? !run.groups.world.any_rank(stop_requested()) : !text_ended && !stop_requested();
    });
    if (run.is_rank0() && !stop_requested()) log.sample(step, text);
}

template <class floatX>
int Trainer<floatX>::finish(int64_t saved_step) {
    run.groups.world.reached("the end");
    optimizer.finish_collectives();  // other ranks may still read this rank's memory
    wait_for_device();
    const bool log_is_complete = log.finish();
    // No rank may end before rank 0 has saved: a rank that fails ends the others.
    const bool saved = run.groups.world.all_gather_text(std::to_string(saved_step))[0] == std::to_string(state.step);
    const long long step = state.step;
    if (!failure.empty())
        fail(EXIT_INTERNAL, "%s; the step did not change the weights%s. A lower --lr%s may help", failure.c_str(),
             saved ? format(", which are saved as of step %lld", step).c_str() : "",
             run.dtype == Dtype::fp32 ? " or a longer --warmup" : ", a longer --warmup or --precision fp32");
    if (out_of_patience)
        log.note(
            format("the run ends: no validation since step %lld has a loss below %.4f (--patience); %s/best names it",
                   static_cast<long long>(state.best_step), state.best_loss, run.options.output.c_str()));
    if (!stop || out_of_patience) return log_is_complete ? 0 : EXIT_IO;
    log.note(std::string("stopped on request") +
             (saved ? format("; step %lld is saved, --resume continues", step)
                    : ", before the first step was complete: there is nothing to save"));
    return EXIT_PREEMPTED;
}

template struct Trainer<float>;
template struct Trainer<bf16>;
