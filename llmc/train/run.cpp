#include "train/run.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/host.h"
#include "base/json.h"
#include "base/terminal.h"
#include "base/trace.h"
#include "model/mfu.h"
#include "train/run_checks.h"
#include "train/saver.h"

int device_of(const Options& o, const Launch& launch) {
    return o.share_gpu ? launch.local_rank % device_count() : launch.local_rank;
}

MemoryOptions Run::memory_options() const {
    return memory_options_of(options, groups.dp.world_size, groups.tp.shard_index);
}

static void open_data(Run& run) {
    const Options& o = run.options;
    const int world_size = run.groups.dp.world_size, T = run.batch.T, V = run.source.config.V;
    DataLoaderConfig data = {o.train_data, "--train-data", run.batch.B, T, V, o.seed, run.batch.tokens_per_step / T};
    data.rank = run.groups.dp.rank;
    data.world_size = world_size;
    data.stream = run.stream.stream;
    if (o.zero >= 2) data.parts = std::max(o.virtual_ranks, world_size) / world_size;
    run.loader = std::make_unique<DataLoader>(data);
    if (o.val_data.empty() || o.val_every == 0) return;
    DataLoaderConfig val = {o.val_data, "--val-data", run.batch.B, T, V};
    val.rank = run.groups.dp.rank;
    val.world_size = world_size;
    val.stream = run.stream.stream;
    val.in_order = true;
    val.max_batches = o.val_batches;
    run.val_loader = std::make_unique<DataLoader>(val);
}

static const Corpus* val_corpus(const Run& run) { return run.val_loader ? &run.val_loader->corpus : nullptr; }

static void open_log(Run& run, double flops_per_token, double peak_flops, std::vector<std::string> notes) {
    const Options& o = run.options;
    const bool resumes = !run.source.resume.empty();
    LogOptions log = {o.output, o.quiet, !run.first_rank(), o.log_every, o.steps};
    if (!run.first_rank()) log.output.clear();
    if (resumes) log.resume_step = run.state.step;
    log.flops_per_token = flops_per_token;
    log.peak_flops = peak_flops * run.comm.world_size;
    if (run.lock && resumes) make_room_to_resume(o, run.source, run.state.step, notes);
    run.log = std::make_unique<Log>(log);
    for (const std::string& line : notes) run.log->note(line);
    // If there are weights, these notes say why the weights are not from the newest checkpoint, so the notes become
    // warnings.
    for (const std::string& line : run.source.notes)
        run.source.weights.empty() ? run.log->note(line) : run.log->warn(line);
    if (const std::string changed = changed_options(o); !changed.empty())
        run.log->warn("changed since the checkpoint: " + changed);
    warn_of_data(*run.log, o, run.source, run.loader->corpus, val_corpus(run));
}

static void print_table(Run& run, const Launch& launch, const DeviceInfo& device,
                        const std::vector<std::string>& rank_infos) {
    const Options& o = run.options;
    const int64_t available = device_bytes_free(std::max(1, launch.local_world_size));
    std::vector<Row> rows = plan_table(run.dtype, o, run.source, run.batch, device, available, &run.loader->corpus);
    rows.push_back({"launcher", describe_launch(launch)});
    rows.push_back({"ranks", describe_ranks(run.comm, rank_infos)});
    rows.push_back({"output", o.output.empty() ? "none" : o.output});
    run.log->table(rows);
}

// Warns if the data `name` of a resumed run are not those of its checkpoint.
static void compare_data(Run& run, const nlohmann::json& before, const nlohmann::json& now, const char* name,
                         const std::string& title, const std::string& consequence) {
    if (now.contains(name) && before.value(name, "") != now.value(name, ""))
        run.log->warn("the " + title + " data differ from those of the checkpoint; " + consequence);
}

// Compares the data with those of the checkpoint that the run resumes. A checkpoint of an older version describes no
// validation data.
static void compare_with_checkpoint(Run& run, nlohmann::json& now) {
    const nlohmann::json before = parse_json(run.state.data, "the data in trainer.json");
    try {
        compare_data(run, before, now, "train", "training", "training continues at the same position in the new data");
        if (!before.contains("val")) return;
        compare_data(run, before, now, "val", "validation", "losses before and after this start cannot be compared");
        if (now.contains("val")) return;
        now["val"] = before["val"];  // this start does not validate; a later one may
    } catch (const nlohmann::json::exception&) {
        fail(EXIT_BAD_DATA, "%s/trainer.json: its description of the data cannot be read; the checkpoint is damaged",
             run.source.resume.c_str());
    }
}

// Describes the data for the next checkpoint.
static void describe_data_of(Run& run) {
    nlohmann::json now;
    const auto add = [&](const char* name, const Corpus& corpus) {
        now[name] = format("%016llx", static_cast<unsigned long long>(corpus.fingerprint));
    };
    add("train", run.loader->corpus);
    if (run.val_loader) add("val", run.val_loader->corpus);
    if (!run.source.resume.empty()) compare_with_checkpoint(run, now);
    run.data_fingerprint = now.dump();
}

// Returns notes on leftovers of an earlier run that were removed.
static std::vector<std::string> prepare_output(Run& run) {
    const Options& o = run.options;
    std::vector<std::string> notes;
    if (run.first_rank()) run.lock = lock_output(o);
    if (run.lock) notes = remove_leftovers(o.output);
    run.comm.all_gather_text("");  // other ranks wait until rank 0 has made the directory
    return notes;
}

static void resolve_batch(Run& run, const Launch& launch) {
    Options& o = run.options;
    const int T = o.seq_len ? o.seq_len : run.source.config.max_T;
    check_tensor_parallel(o, run.source.config, T, run.comm.world_size);
    resolve_micro_batch(run.dtype, o, run.source, T, run.groups, run.groups.dp.world_size, launch.local_world_size);
    check_tokens_at_once(o.micro_batch, T);
    run.batch = plan_batch(o.micro_batch, T, o.global_batch_tokens, run.groups.dp.world_size, o.default_global_batch);
    o.global_batch_tokens = run.batch.tokens_per_step;  // a resume keeps the global batch on any number of ranks
    check_virtual_ranks(o, run.batch);
    check_sample_prompt(o, run.source, T);
}

// Refuses ranks that differ in options, data or weights. Returns each rank's rank_info.
static std::vector<std::string> compare_ranks(Run& run, const Launch& launch, const DeviceInfo& device) {
    const Options& o = run.options;
    const int gpu = device_memory_is_host() ? -1 : device_of(o, launch);
    const std::vector<std::string> rank_infos = run.comm.all_gather_text(
        rank_info(o, run.source, run.loader->corpus, val_corpus(run), dtype_name(run.dtype), device, gpu));
    check_same(rank_infos, fields_of_one_rank());
    const std::string differing = differing_rounding(rank_infos);
    run.same_rounding = differing.empty();
    ENSURE(run.same_rounding || o.virtual_ranks == 0,
           "%s: they may round differently, and --deterministic-ranks needs the same bits on all ranks; give all ranks "
           "the same program and CPU_ISA",
           differing.c_str());
    return rank_infos;
}

// With ZeRO each weight is computed by one rank, and the others receive its bits.
static void warn_of_rounding(Run& run, const std::vector<std::string>& rank_infos) {
    if (run.same_rounding || run.options.zero > 0) return;
    run.log->warn(differing_rounding(rank_infos) +
                  ": they may round differently, so each rank's weights differ from the others' by rounding errors; "
                  "--zero 1 keeps them equal" +
                  (run.options.check_replicas > 0 ? "; --check-replicas is off" : ""));
}

std::unique_ptr<Run> start_run(const Options& options, const Launch& launch, Comm& comm, Dtype dtype,
                               const std::string& command_line) {
    auto started = std::make_unique<Run>(options, comm, dtype);
    Run& run = *started;
    Options& o = run.options;
    // Called before the search for a checkpoint, because remove_leftovers may rename a checkpoint back.
    const std::vector<std::string> notes = prepare_output(run);
    if (!o.trace.empty()) open_trace(o.trace, comm.rank, comm.world_size);
    run.source = find_training_start(o, comm.watchdog.get());
    resolve_batch(run, launch);
    run.groups.dp.check_grad_dtype(grad_dtype(o));
    open_data(run);
    resolve_steps(o, run.loader->corpus.num_windows / (run.batch.tokens_per_step / run.batch.T));
    const DeviceInfo device = device_info();
    const std::vector<std::string> rank_infos = compare_ranks(run, launch, device);

    const nlohmann::ordered_json info =
        run_info(o, run.source, run.batch, run.loader->corpus, device, dtype, comm.world_size, command_line);
    const double flops = flops_per_token(run.source.config, run.batch.T);
    if (!run.source.resume.empty()) run.state = read_trainer_state(run.source.resume);
    run.first_step = run.state.step;
    open_log(run, flops, peak_flops(device, dtype), notes);
    print_table(run, launch, device, rank_infos);
    if (run.state.step < o.steps) run.log->begin_run(info);  // else the run does nothing
    if (run.state.step < o.steps && run.first_rank() && !o.output.empty())
        replace_file(o.output + "/run.toml", run_toml(o));
    run.schedule = make_schedule(o.schedule, o.lr, o.final_lr_fraction, o.warmup, o.steps);
    run.info_options = options_json(o);
    warn_of_warmup(*run.log, o);
    note_keep_rules(*run.log, o);
    warn_of_rounding(run, rank_infos);
    describe_data_of(run);
    if (!launch.note.empty()) run.log->note(launch.note);
    return started;
}
