#include "train/saver.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include "base/common.h"
#include "base/device.h"
#include "base/files.h"
#include "base/host.h"
#include "base/print.h"

bool saves_checkpoints(const Options& o) { return o.checkpoint_every > 0 && !o.output.empty(); }

// ---- writing, on rank 0

// Returns README.md of a checkpoint, as the Hub shows it.
static std::string model_card(const Run& run, const TrainerState& state) {
    std::string facts;
    const auto fact = [&](const char* name, std::string value) {
        std::replace(value.begin(), value.end(), '\n', ' ');  // several patterns
        facts += format("* %s: %s\n", name, message_text(value).c_str());
    };
    fact("shape", describe_model(run.start.config));
    if (!run.options.init.empty()) fact("started from", run.options.init);
    fact("training data", run.options.train_data);
    fact("trained on", with_commas(state.tokens) + " tokens in " + counted(state.step, "step"));
    if (state.val_step >= 0) {
        fact("validation data", run.options.val_data);
        const double bits = state.val_loss / (state.val_bytes * std::log(2.0));
        const std::string per_byte = state.val_bytes > 0 ? format(", %.4f bits per byte", bits) : "";
        fact("validation loss",
             format("%.4f nats per token, perplexity %.2f%s, at step %s", state.val_loss, std::exp(state.val_loss),
                    per_byte.c_str(), with_commas(state.val_step).c_str()));
    }
    fact("program", version());
    const char* usage = R"(
In this directory:

```python
from transformers import pipeline
print(pipeline("text-generation", ".")("In the beginning")[0]["generated_text"])
```
)";
    return format(R"(---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
# license: mit    (remove the # and name the licence of these weights)
---
# GPT-2 with %s parameters

%s
The command; `trainer.json` has all options:

    %s
%s)",
                  with_commas(count_parameters(run.start.config)).c_str(), facts.c_str(),
                  message_text(run.options.command_line).c_str(), run.start.tokenizer ? usage : "");
}

static SaveOptions save_options(const Run& run, const TrainerState& state, SaveResult& result) {
    const Options& o = run.options;
    const auto write_tokenizer = [&run](const std::string& dir) {
        if (run.start.tokenizer) save_tokenizer(*run.start.tokenizer, dir);
    };
    return {.output = o.output,
            .keep = {o.keep, o.keep_every, keeps_best(o)},
            .format = checkpoint_format(o),
            .config = run.start.hf_config,
            .write_tokenizer = write_tokenizer,
            .model_card = model_card(run, state),
            .warn = [&result](const std::string& line) { result.warnings.push_back(line); }};
}

// May run in a thread: it reads only what is constant in `run`. begin: when the state was gathered.
static SaveResult write_checkpoint(const Run& run, const ParamLayout& layout, const TensorView& view,
                                   const TrainerState& state, double begin) {
    SaveResult result;
    result.step = state.step;
    try {
        result.dir = save_checkpoint(save_options(run, state, result), layout, view, state);
    } catch (const Error& error) {
        result.error = error;
    } catch (const std::exception& error) {  // no memory for a buffer
        result.error = Error(EXIT_INTERNAL, error.what());
    }
    result.ms = 1e3 * (seconds_now() - begin);
    return result;
}

// ---- the saver

template <class floatX>
Saver<floatX>::Saver(Trainer<floatX>& trainer) : trainer(trainer), run(trainer.run), optimizer(trainer.optimizer) {
    const Options& o = run.options;
    if (!run.start.resume.empty()) saved_step = trainer.state.step;
    const int64_t bytes = saved_copy_bytes(o, run.start.config, trainer.state.step);
    if (bytes == 0) return;
    const std::string why_not = run.groups.world.all_gather_text(run.is_rank0() ? allocate_copy(bytes) : "")[0];
    background = why_not.empty();
    if (!background) trainer.log.note("training waits for each checkpoint: " + why_not + " (--checkpoint-async)");
}

// Returns why there is no memory for the copy; empty: there is.
template <class floatX>
std::string Saver<floatX>::allocate_copy(int64_t bytes) {
    const int64_t free = host_bytes_free();
    if (!saved_copy_fits(bytes, free))
        return format("a copy of the state takes %s, and %s are free", human_bytes(bytes).c_str(),
                      human_bytes(free).c_str());
    try {
        for (Slot slot = 0; slot < NUM_SLOTS; slot++)
            copy.push_back(static_cast<float*>(host_allocate(in_copy(slot).total() * int64_t(sizeof(float)))));
        return "";
    } catch (const Error& error) {
        for (float* slot : copy) host_free(slot);
        copy.clear();
        return error.what();
    }
}

// Logs a save that has ended. last: no later save can replace it if it has failed.
template <class floatX>
void Saver<floatX>::report(const SaveResult& result, bool last) {
    for (const std::string& warning : result.warnings) trainer.log.warn(warning);
    if (!result.error) {
        failures = 0;
        saved_step = result.step;
        return trainer.log.checkpoint(result.step, result.dir, result.ms, result.stall_ms);
    }
    const std::string what = format("the checkpoint of step %lld was not saved: %s",
                                    static_cast<long long>(result.step), result.error->what());
    if (!last && ++failures < 3) return trainer.log.warn(what + "; training continues");
    optimizer.finish_collectives();  // they use memory that the error frees
    const std::string why = last ? "" : "three saves in a row failed, so the run ends: further steps would be lost; ";
    const std::string dir = checkpoint_directory(run.options.output, saved_step);
    const std::string good = saved_step < 0      ? "there is no checkpoint"
                             : is_directory(dir) ? "the last good checkpoint is " + dir
                                                 : dir + " is no longer there";
    throw Error(result.error->exit_code, why + what + "; " + good);
}

template <class floatX>
void Saver<floatX>::finish(bool before_last) {
    poll();
    if (!writing.valid()) return;
    if (before_last) trainer.log.note("the save before is still being written; the run waits for it");
    report(writing.get(), false);
}

template <class floatX>
void Saver<floatX>::save_in_background(double begin) {
    if (!run.is_rank0() && !optimizer.reads_together()) return;
    const double begin_copy = seconds_now();  // the wait for the save before is no part of this save
    for (Slot slot = 0; slot < NUM_SLOTS; slot++)
        for_each_tensor(optimizer.full_layout, [&](Param p, int l) {
            run.groups.world.reached("copy of a tensor");
            float* to = run.is_rank0() ? copy[size_t(slot)] + in_copy(slot).at(p, l) : nullptr;
            if (optimizer.has(slot, p)) optimizer.get_state(to, slot, p, l);
        });
    if (!run.is_rank0()) return;
    const auto write = [this, begin_copy, stall_ms = 1e3 * (seconds_now() - begin), state = trainer.state,
                        training = std::this_thread::get_id()] {
        if (std::this_thread::get_id() != training) yield_to_training();
        const TensorView view = [this](Slot slot, Param p, int l) {
            return copy[size_t(slot)] + in_copy(slot).at(p, l);
        };
        SaveResult result = write_checkpoint(run, optimizer.full_layout, view, state, begin_copy);
        result.stall_ms = stall_ms;
        return result;
    };
    // Deferred until poll() if this process may not have another thread (ulimit -u).
    writing = std::async(std::launch::async | std::launch::deferred, write);
}

// Saves while training waits. If rank 0 cannot write, it still reads, as the others take part in each read.
template <class floatX>
SaveResult Saver<floatX>::save_now() {
    const ParamLayout& layout = optimizer.full_layout;
    int64_t reads = 0, number = 0;
    const auto read = [&](float* host, Slot slot, Param p, int l) {
        run.groups.world.reached("saving of a tensor", reads++);
        optimizer.get_state(host, slot, p, l);
    };
    std::vector<float> tensor;
    const TensorView view = [&](Slot slot, Param p, int l) {
        tensor.resize(std::max(tensor.size(), size_t(layout.size(p))));
        read(tensor.data(), slot, p, l);
        return tensor.data();
    };
    SaveResult result;
    if (run.is_rank0()) result = write_checkpoint(run, layout, view, trainer.state, seconds_now());
    if (optimizer.reads_together())
        for_each_read(layout, checkpoint_format(run.options), [&](Slot slot, Param p, int l) {
            if (number++ >= reads) read(nullptr, slot, p, l);
        });
    return result;
}

template <class floatX>
void Saver<floatX>::save(int64_t step, bool wait) {
    if (!saves_checkpoints(run.options) || (!wait && step == begun_step)) return;
    begun_step = step;
    const ProfileRange range("checkpoint", step);
    const PauseTimer timer{trainer.log, Pause::save, run.options.checkpoint_every};
    const double begin = seconds_now();
    trainer.state.health = trainer.outliers.json();
    if (wait) failures = 0;  // the last save is tried in any case
    finish(wait);
    // A run may stop in the step after a save.
    if (wait && run.groups.world.all_gather_text(std::to_string(saved_step))[0] == std::to_string(step)) return;
    if (background && !wait) return save_in_background(begin);
    SaveResult result = save_now();
    result.stall_ms = 1e3 * (seconds_now() - begin);
    if (run.is_rank0()) report(result, wait);
    if (wait) run.groups.world.all_gather_text("");  // a rank that ends would end rank 0, which may still write
}

template struct Saver<float>;
template struct Saver<bf16>;
