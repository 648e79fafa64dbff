#include "train/save.h"

#include <algorithm>

#include "base/common.h"
#include "train/keep.h"

CheckpointFormat checkpoint_format(const Options& o, const std::vector<std::string>& state) {
    return {o.export_dtype == "bf16", state};
}

static SaveOptions save_options(const Run& run, const StateReader& reader) {
    SaveOptions save_options;
    save_options.output = run.options.output;
    save_options.keep = keep_rules(run.options);
    save_options.format = checkpoint_format(run.options, reader.state);
    save_options.end_of_text = run.source.end_of_text;
    if (run.source.tokenizer) {
        save_options.end_of_text = run.source.tokenizer->end_of_text;
        save_options.write_tokenizer = [&run](const std::string& dir) {
            save_tokenizer(*run.source.tokenizer, dir, run.source.config.max_T);
        };
    }
    save_options.note = [&run](const std::string& line) { run.log->note(line); };
    save_options.warn = [&run](const std::string& line) { run.log->warn(line); };
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

// Makes the reads that a failed save has not made. Every rank takes part in each read, so the other ranks would
// otherwise wait for these reads.
static void finish_reads(const StateReader& reader, const CheckpointFormat& format, int64_t done) {
    const ParamLayout& layout = reader.layout;
    std::vector<float> unused(layout.size(wte) + layout.size(fcw) + layout.size(wpe));  // as large as any tensor
    int64_t number = 0;
    for_each_read(layout, format, [&](Slot slot, Param p, int l) {
        if (number++ >= done) reader.read(unused.data(), slot, p, l);
    });
}

void save(Run& run, const StateReader& reader) {
    const Options& o = run.options;
    if (o.output.empty() || o.checkpoint_every == 0 || run.saved_step == run.state.step) return;
    if (!run.first_rank() && !reader.sharded) return;
    int64_t reads = 0;
    const TensorReader read = [&](float* host, Slot slot, Param p, int l) {
        reader.read(host, slot, p, l);
        reads++;
    };
    std::string error;
    int exit_code = EXIT_IO;
    const double begin = seconds_now();
    SavedCheckpoint saved;
    try {
        if (run.first_rank()) {
            check_lock(*run.lock, o.output);
            saved = save_checkpoint(save_options(run, reader), reader.layout, read, run.state);
        }
    } catch (const Error& e) {
        error = e.what();
        exit_code = e.exit_code;
    }
    if (reader.sharded) {
        finish_reads(reader, checkpoint_format(o, reader.state), reads);
        error = run.comm.all_gather_text(error)[0];
    }
    if (!error.empty()) throw Error(exit_code, error);
    run.saved_step = run.state.step;
    warn_of_changed_data(run);
    const double seconds = seconds_now() - begin;
    run.longest_save = std::max(run.longest_save, seconds);
    if (run.first_rank()) run.log->checkpoint(run.state.step, saved.dir, 1e3 * seconds);
}

static std::string last_checkpoint(const Run& run) {
    if (run.saved_step < 0) return "there is no checkpoint";
    if (run.lock && !run.lock->still_held())
        return format("the last good checkpoint is of step %lld", static_cast<long long>(run.saved_step));
    return "the last good checkpoint is " + checkpoint_directory(run.options.output, run.saved_step);
}

void save_or_warn(Run& run, const StateReader& reader) {
    try {
        save(run, reader);
        run.failed_saves = 0;
    } catch (const Error& error) {
        if (++run.failed_saves == 3)
            throw Error(
                error.exit_code,
                format("three saves in a row failed, so the run ends, because further steps would be lost; %s; %s",
                       last_checkpoint(run).c_str(), error.what()));
        run.log->warn(format("the checkpoint of step %lld was not saved: %s; training continues",
                             static_cast<long long>(run.state.step), error.what()));
    }
}

void save_val_loss(Run& run) {
    if (!run.first_rank() || run.options.output.empty() || run.saved_step != run.state.step) return;
    const std::string dir = checkpoint_directory(run.options.output, run.saved_step);
    try {
        check_lock(*run.lock, run.options.output);
        set_val_loss(dir, run.state.val_loss);
        apply_keep_rules(run.options.output, keep_rules(run.options), run.saved_step,
                         [&](const std::string& line) { run.log->warn(line); });
    } catch (const Error& error) {
        run.log->warn(format("%s has an older validation loss: %s; training continues", dir.c_str(), error.what()));
    }
}
