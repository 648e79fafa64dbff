#include "train/save.h"

#include <algorithm>
#include <utility>

#include "base/common.h"
#include "base/host.h"
#include "base/host_memory.h"
#include "base/terminal.h"
#include "train/keep.h"

CheckpointFormat checkpoint_format(const Options& o, const std::vector<std::string>& state) {
    return {o.export_dtype == "bf16", state};
}

// Memory for any tensor.
static std::vector<float> one_tensor(const ParamLayout& layout) {
    return std::vector<float>(size_t(layout.size(wte) + layout.size(fcw) + layout.size(wpe)));
}

bool saves_checkpoints(const Options& o) { return o.checkpoint_every > 0 && !o.output.empty(); }

static SaveOptions save_options(const Run& run, const std::vector<std::string>& state, SaveResult& result) {
    SaveOptions save_options;
    save_options.output = run.options.output;
    save_options.keep = keep_rules(run.options);
    save_options.format = checkpoint_format(run.options, state);
    save_options.end_of_text = run.source.end_of_text;
    if (run.source.tokenizer) {
        save_options.end_of_text = run.source.tokenizer->end_of_text;
        save_options.write_tokenizer = [&run](const std::string& dir) {
            save_tokenizer(*run.source.tokenizer, dir, run.source.config.max_T);
        };
    }
    save_options.note = [&result](const std::string& line) { result.lines.push_back({false, line}); };
    save_options.warn = [&result](const std::string& line) { result.lines.push_back({true, line}); };
    return save_options;
}

// If OUTPUT was moved, another run may have made a new directory of that name, and a save would delete or rename that
// run's checkpoints. The save fails, and training continues, because the user may move OUTPUT back.
static void check_lock(const OutputLock& lock, const std::string& output) {
    if (!lock.still_held())
        fail(EXIT_IO,
             "%s or its run.lock was moved or removed, or another run uses it now; nothing is saved there until it is "
             "moved back",
             output.c_str());
}

// Writes a checkpoint. May run in a thread: it changes nothing of the run. `collect` is called before the first tensor
// is read by `view`; it brings the parts of the other ranks into the memory that `view` reads.
static SaveResult write_checkpoint(const Run& run, const ParamLayout& layout, const std::vector<std::string>& state,
                                   const TensorView& view, const TrainerState& trainer,
                                   const std::function<void()>& collect = {}) {
    SaveResult result;
    result.step = trainer.step;
    const double begin = seconds_now();
    try {
        check_lock(*run.lock, run.options.output);
        if (collect) collect();
        result.dir = save_checkpoint(save_options(run, state, result), layout, view, trainer).dir;
    } catch (const Error& error) {
        result.error = error;
    } catch (const std::exception& error) {  // no memory for a buffer
        result.error = Error(EXIT_INTERNAL, error.what());
    }
    result.ms = 1e3 * (seconds_now() - begin);
    return result;
}

static void print_lines(Run& run, const SaveResult& result) {
    for (const SaveResult::Line& line : result.lines)
        line.warning ? run.log->warn(line.text) : run.log->note(line.text);
}

// After a successful save, on the first rank.
static void record_saved(Run& run, const SaveResult& result) {
    run.saved_step = result.step;
    run.log->checkpoint(result.step, result.dir, result.ms, result.stall_ms);
}

static std::string last_checkpoint(const Run& run) {
    if (run.saved_step < 0) return "there is no checkpoint";
    if (run.lock && !run.lock->still_held())
        return format("the last good checkpoint is of step %lld", static_cast<long long>(run.saved_step));
    return "the last good checkpoint is " + checkpoint_directory(run.options.output, run.saved_step);
}

static std::string describe_failed_save(int64_t step, const Error& error) {
    return format("the checkpoint of step %lld was not saved: %s", static_cast<long long>(step), error.what());
}

static void count_failed_save(Run& run, int64_t step, const Error& error) {
    if (++run.failed_saves == 3)
        throw Error(error.exit_code,
                    format("three saves in a row failed, so the run ends, because further steps would be lost; %s; %s",
                           last_checkpoint(run).c_str(), error.what()));
    run.log->warn(describe_failed_save(step, error) + "; training continues");
}

// ---- saves that training waits for

// Makes the reads that a failed save has not made. Every rank takes part in each read, so the other ranks would
// otherwise wait for these reads.
static void finish_reads(const StateReader& reader, const CheckpointFormat& format, int64_t done) {
    std::vector<float> unused = one_tensor(reader.layout);
    int64_t number = 0;
    for_each_read(reader.layout, format, [&](Slot slot, Param p, int l) {
        if (number++ >= done) reader.read(unused.data(), slot, p, l);
    });
}

// Waits for the save in flight. If it fails, a warning says so: the save that follows is newer.
static void finish_background_save(Run& run) {
    BackgroundSave* background = run.background_save.get();
    if (!background || !background->in_flight()) return;
    std::optional<SaveResult> result = background->finish(false);
    if (!result) {
        run.log->note(format("the save of step %lld is still being written; the run waits for it",
                             static_cast<long long>(background->step)));
        result = background->finish(true);
    }
    print_lines(run, *result);
    if (!result->error) return record_saved(run, *result);
    run.log->warn(describe_failed_save(result->step, *result->error) + "; the last step is saved next");
}

static void save(Run& run, const StateReader& reader) {
    if (!saves_checkpoints(run.options) || (!run.first_rank() && !reader.sharded)) return;
    finish_background_save(run);
    // Only the first rank knows whether a save in the background has succeeded.
    if (reader.sharded) run.saved_step = std::stoll(run.comm.all_gather_text(std::to_string(run.saved_step))[0]);
    if (run.saved_step == run.state.step) return;
    int64_t reads = 0;
    const TensorReader read = [&](float* host, Slot slot, Param p, int l) {
        reader.read(host, slot, p, l);
        reads++;
    };
    SaveResult result;
    if (run.first_rank())
        result = write_checkpoint(run, reader.layout, reader.state, view_copies(reader.layout, read), run.state);
    result.stall_ms = result.ms;
    print_lines(run, result);
    if (reader.sharded) {
        finish_reads(reader, checkpoint_format(run.options, reader.state), reads);
        const std::string error = run.comm.all_gather_text(result.error ? result.error->what() : "")[0];
        if (!error.empty() && !result.error) result.error = Error(EXIT_IO, error);
    }
    if (result.error) throw *result.error;
    run.saved_step = run.state.step;
    if (run.first_rank()) record_saved(run, result);
}

void save_last(Run& run, const StateReader& reader) {
    try {
        save(run, reader);
    } catch (const Error& error) {
        throw Error(error.exit_code, describe_failed_save(run.state.step, error) + "; " + last_checkpoint(run));
    }
}

void save_or_warn(Run& run, const StateReader& reader) {
    try {
        save(run, reader);
        run.failed_saves = 0;
    } catch (const Error& error) {
        count_failed_save(run, run.state.step, error);
    }
}

// ---- saves in the background

// The first multiple of --checkpoint-every after this step; the run also saves its last step, but waits for that save.
static bool will_save_between_steps(const Options& o, int64_t step) {
    return saves_checkpoints(o) && (step / o.checkpoint_every + 1) * o.checkpoint_every < o.steps;
}

// Called by all ranks. Returns why a host has no memory for the copies of its ranks; empty: all have. With `auto`, as
// many bytes as the copies take must stay free: files are written through the file cache.
static std::string lack_of_memory(Run& run, int64_t own_bytes) {
    const std::string host = host_id();
    int64_t needed = 0;
    for (const std::string& text : run.comm.all_gather_text(host + " " + std::to_string(own_bytes)))
        if (text.starts_with(host + " ")) needed += std::stoll(text.substr(host.size() + 1));
    const int64_t free = host_bytes_free(), limit = run.options.checkpoint_async == "on" ? free : free / 2;
    std::string lack;
    if (needed > limit)
        lack = format("a copy of the state takes %s%s, and %s are free", human_bytes(needed).c_str(),
                      run.comm.world_size > 1 ? (" on " + host_name()).c_str() : "", human_bytes(free).c_str());
    const std::vector<std::string> all = run.comm.all_gather_text(lack);
    const auto first = std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
    return first == all.end() ? "" : *first;
}

// Called by all ranks. Allocates this rank's copy. Returns why the run makes no saves in the background, the same text
// on all ranks; empty: it makes them.
static std::string make_copies(Run& run, const StateReader& reader, int num_slots) {
    int64_t bytes = run.first_rank() ? snapshot_bytes(reader.layout, num_slots) : 0;
    if (reader.sharded) bytes += part_bytes(reader.part, num_slots);
    const std::string lack = lack_of_memory(run, bytes);
    if (!lack.empty()) return lack;
    if (run.first_rank()) run.background_save = std::make_unique<BackgroundSave>(reader.layout, num_slots);
    if (!reader.sharded) return "";
    constexpr double SILENCE = 60;  // seconds; the watchdog must not end the run before
    const double timeout = run.options.timeout > 0 ? run.options.timeout : 2 * SILENCE;
    run.collector = std::make_unique<StateCollector>(run.comm, reader.layout, reader.part, num_slots,
                                                     std::min(SILENCE, 0.5 * timeout));
    return run.collector->why_not;
}

void prepare_background_saves(Run& run, const StateReader& reader) {
    const Options& o = run.options;
    if (o.checkpoint_async == "off" || !will_save_between_steps(o, run.state.step)) return;
    const std::string why_not = make_copies(run, reader, 1 + int(reader.state.size()));
    run.saves_in_background = why_not.empty();
    if (run.saves_in_background) return;
    run.background_save.reset();
    run.collector.reset();
    if (o.checkpoint_async == "on") fail(EXIT_INTERNAL, "--checkpoint-async on: %s; give auto or off", why_not.c_str());
    run.log->note("training waits for each checkpoint: " + why_not + " (--checkpoint-async)");
}

std::string describe_background_saves(const Options& o, const ParamLayout& layout, int num_slots, int parts) {
    if (o.checkpoint_async == "off" || !saves_checkpoints(o)) return "";
    const int64_t bytes = snapshot_bytes(layout, num_slots);
    const std::string of_ranks =
        parts > 1 ? ", and copies of each rank's part (" + human_bytes(bytes / parts) + ")" : "";
    return format("written while training goes on, from a copy of %s in the memory of rank 0's host%s%s",
                  human_bytes(bytes).c_str(), of_ranks.c_str(), o.checkpoint_async == "auto" ? ", if it is free" : "");
}

static void warn_of_wait(Run& run, int64_t earlier, double seconds) {
    constexpr double LEAST_SECONDS = 1.0;
    if (seconds < LEAST_SECONDS || std::exchange(run.background_save->warned_of_wait, true)) return;
    run.log->warn(
        format("the save of step %lld had to wait %.1f s for that of step %lld: writing a checkpoint takes "
               "longer than --checkpoint-every %lld steps",
               static_cast<long long>(run.state.step), seconds, static_cast<long long>(earlier),
               static_cast<long long>(run.options.checkpoint_every)));
}

static void report(Run& run, const SaveResult& result) {
    print_lines(run, result);
    if (result.error) return count_failed_save(run, result.step, *result.error);
    run.failed_saves = 0;
    record_saved(run, result);
}

void report_background_save(Run& run, bool wait) {
    if (!run.background_save) return;
    if (const std::optional<SaveResult> result = run.background_save->finish(wait)) report(run, *result);
}

// Copies this rank's part of the state, which a thread then sends to rank 0.
static void send_part(Run& run, const StateReader& reader) {
    if (const std::optional<Error> error = run.collector->finish())
        print_message(format("warning: rank %d on %s could not send its part of the checkpoint before: %s",
                             run.comm.rank, host_name().c_str(), error->what()));
    run.collector->copy(reader.read_part);
}

static void copy_state(Run& run, const StateReader& reader) {
    run.collector ? run.collector->copy(reader.read_part)
                  : run.background_save->snapshot.take(reader.read);
}

void save_in_background(Run& run, const StateReader& reader) {
    if (!run.saves_in_background) return save_or_warn(run, reader);
    if (!run.first_rank()) return run.collector ? send_part(run, reader) : void();
    BackgroundSave& background = *run.background_save;
    const double begin = seconds_now();
    if (const std::optional<SaveResult> before = background.finish(true)) {
        report(run, *before);
        warn_of_wait(run, before->step, seconds_now() - begin);
    }
    const double begin_copy = seconds_now();  // the wait for the save before is no part of this save
    copy_state(run, reader);
    const double copy_ms = 1e3 * (seconds_now() - begin_copy), stall_ms = 1e3 * (seconds_now() - begin);
    background.start(run.state.step, [&run, &background, copy_ms, stall_ms, state = reader.state, trainer = run.state] {
        const Snapshot& snapshot = background.snapshot;
        const auto collect = [&] {
            if (run.collector) run.collector->collect(snapshot.slots);
        };
        SaveResult result = write_checkpoint(run, snapshot.layout, state, snapshot.view(), trainer, collect);
        result.ms += copy_ms;
        result.stall_ms = stall_ms;
        return result;
    });
}
