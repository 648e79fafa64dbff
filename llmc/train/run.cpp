#include "train/run.h"

#include <algorithm>

#include "base/common.h"
#include "base/trace.h"
#include "checkpoint/checkpoint.h"
#include "infer/generate.h"

MemoryOptions Run::memory_options() const {
    return memory_options_of(options, groups.dp.world_size, groups.tp.shard_index);
}

Options Run::used_options() const {
    Options used = options;
    if (used.precision == Precision::automatic)
        used.precision = dtype == Dtype::bf16 ? Precision::bf16 : Precision::fp32;
    used.ranks = groups.world.world_size;
    return used;
}

Json Run::describe_data() const {
    Json fingerprints = {{"train", hex(data.train.fingerprint)}};
    if (!data.val.shards.empty()) fingerprints["val"] = hex(data.val.fingerprint);
    return fingerprints;
}

// Locks --output, and refuses a new run in a directory that holds the checkpoints of another one. Returns notes.
static std::vector<std::string> lock_output(Run& run) {
    const Options& o = run.options;
    std::vector<std::string> notes;
    if (run.is_rank0() && !o.output.empty()) {
        make_directories(o.output);
        run.lock = std::make_unique<FileLock>(o.output + "/run.lock");
        const auto checkpoints = list_checkpoints(o.output);
        ENSURE(o.resume || checkpoints.empty(),
               "%s holds the checkpoints of an earlier run (%s): continue it with --resume, or choose another --output",
               o.output.c_str(), checkpoints.begin()->second.c_str());
        notes = remove_leftovers(o.output);
        if (!run.lock->held) notes.push_back(o.output + ": its file system has no locks; start no second run there");
    }
    run.groups.world.all_gather_text("");  // the other ranks wait until rank 0 has made the directory
    return notes;
}

static void open_data(Run& run) {
    Options& o = run.options;
    const int T = run.batch.T;
    if (o.sample_every > 0 && run.start.tokenizer && !o.sample_prompt.empty())
        check_prompt(encode_prompt(*run.start.tokenizer, o.sample_prompt), T, "--sample-prompt");
    run.data.train = open_corpus(o.train_data, "--train-data", T);
    check_vocabulary(run.data.train, "--train-data", run.start, o);
    if (!o.val_data.empty() && o.val_every > 0) run.data.val = open_corpus(o.val_data, "--val-data", T);
    check_vocabulary(run.data.val, "--val-data", run.start, o);
    if (!o.eval_task.empty()) {
        ENSURE(
            !run.data.val.shards.empty() && o.eval_every % o.val_every == 0,
            "--eval-task is evaluated after a validation: give --val-data, and an --eval-every that is a multiple of "
            "--val-every %lld",
            static_cast<long long>(o.val_every));
        ENSURE(run.start.tokenizer, "--eval-task needs a tokenizer; give one with --tokenizer");
        run.data.tasks = read_tasks(o.eval_task, *run.start.tokenizer, false, T);
    }
    resolve_steps(o, run.data.train.num_windows / (run.batch.tokens_per_step / T));
}

Run prepare_run(const Options& options, const Launch& launch, Comm& world, Dtype dtype) {
    Run run = {options, dtype, make_groups(world, options.tensor_parallel), {}, {}, {}, {}, {}};
    if (!options.trace.empty()) open_trace(options.trace, world.rank, world.world_size);
    const std::vector<std::string> notes = lock_output(run);  // before the search, because it may rename a checkpoint
    run.start = find_training_start(options, world);
    run.start.notes.insert(run.start.notes.begin(), notes.begin(), notes.end());
    const int local_ranks = std::max(1, launch.local_world_size);
    run.batch = resolve_batch(run.options, dtype, run.start.config, run.groups, world.world_size, local_ranks);
    open_data(run);
    compare_ranks(world, run.options,
                  {{"precision", dtype_name(dtype)},
                   {"checkpoint", run.start.resume},
                   {"weights", run.start.weights},
                   {"training data", hex(run.data.train.fingerprint)},
                   {"validation data", hex(run.data.val.fingerprint)}});
    run.differing = differing_rounding(world);
    ENSURE(run.differing.empty() || options.deterministic_ranks == 0,
           "%s: they may round differently, and --deterministic-ranks needs the same bits on all ranks; give all ranks "
           "the same program and CPU_ISA",
           run.differing.c_str());
    if (options.zero > 0) run.differing.clear();  // each weight is computed by one rank
    return run;
}
