#include "train/run.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <set>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/host.h"
#include "base/json.h"
#include "base/trace.h"
#include "checkpoint/checkpoint.h"
#include "infer/generate.h"
#include "model/mfu.h"

using Json = nlohmann::ordered_json;

static std::string hex(uint64_t hash) { return format("%016llx", static_cast<unsigned long long>(hash)); }

MemoryOptions Run::memory_options() const {
    return memory_options_of(options, groups.dp.world_size, groups.tp.shard_index);
}

std::string Run::describe_data() const {
    Json text = {{"train", hex(data.train.fingerprint)}};
    if (!data.val.shards.empty()) text["val"] = hex(data.val.fingerprint);
    return text.dump();
}

// ---- options that depend on the model, the data and the ranks

void check_tokens_at_once(int B, int T) {
    ENSURE(int64_t(B) * T <= std::numeric_limits<int>::max(),
           "--micro-batch %d x --seq-len %d is %s tokens in a micro-batch; at most 2,147,483,647 are supported", B, T,
           with_commas(int64_t(B) * T).c_str());
}

void check_tensor_parallel(const Options& o, const GPT2Config& config, int T, int world_size) {
    const int N = o.tensor_parallel;
    ENSURE(config.NH % N == 0, "--tensor-parallel %d does not divide the model's %d heads; give %s", N, config.NH,
           possible_tensor_parallel(world_size, config.NH).c_str());
    ENSURE(!o.sequence_parallel || T % N == 0,
           "--sequence-parallel divides the tokens of a sequence: --seq-len %d is not a multiple of --tensor-parallel "
           "%d; give --seq-len %d",
           T, N, std::max(N, T / N * N));
}

void check_virtual_ranks(const Options& o, const BatchPlan& batch) {
    const int n = o.virtual_ranks;
    if (n == 0) return;
    const auto power_of_two = [](int x) { return (x & (x - 1)) == 0; };
    ENSURE(power_of_two(n) && power_of_two(batch.world_size) && n >= batch.world_size,
           "--deterministic-ranks %d on %d ranks: both must be powers of two, and the first not less than the second; "
           "try 8",
           n, batch.world_size);
    const long long least = int64_t(batch.B) * batch.T * n;  // tokens of a micro-batch on each virtual rank
    ENSURE(batch.tokens_per_step % least == 0,
           "--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x "
           "--deterministic-ranks %d; try %lld",
           static_cast<long long>(batch.tokens_per_step), least, batch.B, batch.T, n,
           static_cast<long long>(round_up<int64_t>(batch.tokens_per_step, least)));
}

void resolve_micro_batch(Options& o, Dtype dtype, const GPT2Config& config, int T, const Groups& groups,
                         int data_parallel, int local_ranks) {
    if (o.micro_batch != 0) return;
    groups.connect();
    load_libraries(dtype, config);
    o.micro_batch = largest_micro_batch(dtype, config, T, o.global_batch_tokens, data_parallel,
                                        memory_options_of(o, data_parallel), device_bytes_free(local_ranks));
    for (const std::string& other : groups.world.all_gather_text(std::to_string(o.micro_batch)))
        o.micro_batch = std::min(o.micro_batch, std::stoi(other));
}

static void resolve_batch(Run& run, int local_ranks) {
    Options& o = run.options;
    const RunStart& start = run.start;
    const int T = o.seq_len ? o.seq_len : start.config.max_T, dp = run.groups.dp.world_size;
    check_tensor_parallel(o, start.config, T, run.groups.world.world_size);
    resolve_micro_batch(o, run.dtype, start.config, T, run.groups, dp, local_ranks);
    check_tokens_at_once(o.micro_batch, T);
    run.batch = plan_batch(o.micro_batch, T, o.global_batch_tokens, dp, o.default_global_batch);
    o.global_batch_tokens = run.batch.tokens_per_step;  // a resume keeps the global batch on any number of ranks
    check_virtual_ranks(o, run.batch);
    if (o.sample_every > 0 && start.tokenizer && !o.sample_prompt.empty())
        check_prompt(encode(*start.tokenizer, o.sample_prompt), T, "--sample-prompt");
    run.data.train = open_corpus(o.train_data, "--train-data", T);
    if (!o.val_data.empty() && o.val_every > 0) run.data.val = open_corpus(o.val_data, "--val-data", T);
    resolve_steps(o, run.data.train.num_windows / (run.batch.tokens_per_step / T));
    run.schedule = make_schedule(o.schedule, o.lr, o.final_lr_fraction, o.warmup, o.steps);
}

// ---- comparison of ranks

// Equal for two builds of the same sources, by other compilers for example.
static std::string describe_program() {
    return version() + (device_memory_is_host() ? " for the CPU" : " for GPUs") + ", sources " + SOURCES_CHECKSUM;
}

// The fields that may differ between ranks, apart from options.
static const std::vector<std::string> fields_of_one_rank = {"host", "machine", "device", "gpu", "CPU_ISA", "build"};

void check_same(const std::vector<std::string>& rank_infos, const std::vector<std::string>& may_differ) {
    const Json first = Json::parse(rank_infos[0]);
    for (size_t rank = 1; rank < rank_infos.size(); rank++) {
        const Json other = Json::parse(rank_infos[rank]);
        for (const auto& [name, value] : first.items()) {
            if (std::find(may_differ.begin(), may_differ.end(), name) != may_differ.end()) continue;
            const std::string there = other.contains(name) ? other[name].dump() : "nothing";
            ENSURE(there == value.dump(), "rank %zu differs from rank 0: %s %s there, %s on rank 0", rank, name.c_str(),
                   there.c_str(), value.dump().c_str());
        }
    }
}

// Called by all ranks. Refuses ranks that differ in a field or in an option. Returns the objects of all ranks.
static std::vector<Json> compare(Comm& comm, const Options& o, Json own) {
    std::vector<std::string> may_differ = fields_of_one_rank;
    for (const Setting& setting : settings(o)) own["--" + setting.name] = setting.value;
    for (const char* name : {"quiet", "trace", "config"}) may_differ.push_back(std::string("--") + name);
    const std::vector<std::string> texts =
        comm.all_gather_text(own.dump(-1, ' ', false, Json::error_handler_t::replace));
    check_same(texts, may_differ);
    std::vector<Json> ranks;
    for (const std::string& text : texts) ranks.push_back(Json::parse(text));
    return ranks;
}

void compare_ranks(Comm& comm, const Options& o, const RunStart& source, const Corpus* data) {
    compare(comm, o,
            {{"program", describe_program()},
             {"weights", source.weights},
             {"validation data", data ? hex(data->fingerprint) : ""}});
}

static std::vector<Json> compare_ranks(const Run& run, const Launch& launch, const DeviceInfo& device) {
    const char* self = "/proc/self/exe";
    return compare(run.groups.world, run.options,
                   {{"host", host_name()},
                    {"machine", host_id()},
                    {"device", device.name},
                    {"gpu", device_memory_is_host() ? "" : std::to_string(launch.local_rank)},
                    {"CPU_ISA", device.cpu_isa},
                    {"build", path_exists(self) ? hex(checksum_file(self).xxh3) : ""},  // "": not Linux
                    {"program", describe_program()},
                    {"precision", dtype_name(run.dtype)},
                    {"checkpoint", run.start.resume},
                    {"weights", run.start.weights},
                    {"training data", hex(run.data.train.fingerprint)},
                    {"validation data", hex(run.data.val.fingerprint)}});
}

// Names the first rank whose CPU_ISA or build is not that of rank 0, so that it may round differently; "" if none is.
static std::string differing_rounding(const std::vector<Json>& ranks) {
    for (size_t rank = 1; rank < ranks.size(); rank++) {
        const std::string isa = ranks[rank]["CPU_ISA"], first = ranks[0]["CPU_ISA"];
        if (isa != first) return format("rank %zu has CPU_ISA=%s, rank 0 has %s", rank, isa.c_str(), first.c_str());
        if (ranks[rank]["build"] != ranks[0]["build"])
            return format("rank %zu runs another build of the sources than rank 0", rank);
    }
    return "";
}

static std::string describe_ranks(const Comm& comm, const std::vector<Json>& ranks) {
    std::set<std::string> machines;
    for (const Json& rank : ranks) machines.insert(rank["machine"]);
    return comm.describe() + (machines.size() > 1 ? format(" on %zu machines", machines.size()) : "");
}

// ---- the start

// Locks --output, and refuses a new run in a directory that holds the checkpoints of another one.
static void lock_output(Run& run) {
    const Options& o = run.options;
    if (run.is_rank0() && !o.output.empty()) {
        make_directories(o.output);
        run.lock = std::make_unique<FileLock>(o.output + "/run.lock");
        const std::vector<std::string> checkpoints = list_checkpoints(o.output);
        ENSURE(o.resume || checkpoints.empty(),
               "%s holds the checkpoints of an earlier run (%s): continue it with --resume, or choose another --output",
               o.output.c_str(), checkpoints[0].c_str());
        run.start.notes = remove_leftovers(o.output);
        if (!run.lock->held)
            run.start.notes.push_back(o.output + ": its file system has no locks; start no second run there");
    }
    run.groups.world.all_gather_text("");  // the other ranks wait until rank 0 has made the directory
}

// The first line of log.jsonl.
static Json run_info(const Run& run, const DeviceInfo& device, const std::string& command_line) {
    const Options& o = run.options;
    const GPT2Config& config = run.start.config;
    const Corpus& data = run.data.train;
    Json info = {{"version", version()},
                 {"command_line", command_line},
                 {"directory", current_directory()},
                 {"device", device.name},
                 {"peak_flops", peak_flops(device, run.dtype)},
                 {"peak_source", device.peak_source},
                 {"libraries", device_libraries()},
                 {"precision", o.precision == "fp8" ? o.precision : dtype_name(run.dtype)},
                 {"world_size", run.groups.world.world_size},
                 {"threads", openmp_threads()},
                 {"model",
                  {{"layers", config.L},
                   {"heads", config.NH},
                   {"channels", config.C},
                   {"vocab_size", config.V},
                   {"positions", config.max_T},
                   {"parameters", count_parameters(config)},
                   {"flops_per_token", flops_per_token(config, run.batch.T)}}},
                 {"data", {{"train", o.train_data}, {"tokens", data.tokens}, {"fingerprint", hex(data.fingerprint)}}},
                 {"tokens_per_step", run.batch.tokens_per_step},
                 {"steps", o.steps},
                 {"seed", o.seed},
                 {"options", Json::parse(options_json(o))}};
    if (!device.cpu_isa.empty()) info["cpu_isa"] = device.cpu_isa;
    return info;
}

// Warns if the data are not those of the checkpoint that the run resumes.
static void compare_data(const Run& run, const TrainerState& state, Log& log) {
    const nlohmann::json before = parse_json(state.data, "the data in trainer.json"),
                         now = nlohmann::json::parse(run.describe_data());
    for (const auto& [name, fingerprint] : now.items())
        if (before.is_object() && before.value(name, fingerprint) != fingerprint)
            log.warn("the " + name +
                     " data differ from those of the checkpoint; training continues at the same position");
}

static void open_log(Run& run, const Launch& launch, const DeviceInfo& device, const std::vector<Json>& ranks,
                     const std::string& command_line, std::unique_ptr<Log>& log) {
    Options& o = run.options;
    const bool resumes = !run.start.resume.empty();
    const TrainerState state = resumes ? read_trainer_state(run.start.resume) : TrainerState();
    LogOptions options = {.output = run.is_rank0() ? o.output : "", .quiet = o.quiet, .silent = !run.is_rank0()};
    options.log_every = o.log_every;
    options.total_steps = o.steps;
    options.resume_step = resumes ? state.step : -1;
    options.flops_per_token = flops_per_token(run.start.config, run.batch.T);
    options.peak_flops = peak_flops(device, run.dtype) * run.groups.world.world_size;
    log = std::make_unique<Log>(options);
    // The weights of an older checkpoint than the newest are a reason for a warning.
    for (const std::string& line : run.start.notes) run.start.weights.empty() ? log->note(line) : log->warn(line);
    if (const std::string changed = changed_options(o); resumes && !changed.empty())
        log->warn("changed since the checkpoint: " + changed);
    if (resumes) compare_data(run, state, *log);
    for (const Shard& shard : run.data.val.shards)
        for (const Shard& other : run.data.train.shards)
            if (std::filesystem::equivalent(shard.path, other.path))
                log->warn(shard.path + " is in both --train-data and --val-data: its loss says nothing about new text");
    std::vector<Row> rows = plan_table(run.dtype, o, run.start, run.batch, device,
                                       device_bytes_free(std::max(1, launch.local_world_size)), &run.data.train);
    rows.push_back({"launcher", describe_launch(launch)});
    rows.push_back({"ranks", describe_ranks(run.groups.world, ranks)});
    rows.push_back({"output", o.output.empty() ? "none" : o.output});
    log->table(rows);
    if (!launch.note.empty()) log->note(launch.note);
    if (state.step >= o.steps)
        return log->note(
            format("nothing to do: the run is at step %lld, and --steps is %lld; a larger --steps continues",
                   static_cast<long long>(state.step), static_cast<long long>(o.steps)));
    log->begin_run(run_info(run, device, command_line));
    if (run.lock) replace_file(o.output + "/run.toml", run_toml(o));
}

Run prepare_run(const Options& options, const Launch& launch, Comm& world, Dtype dtype, const std::string& command_line,
                std::unique_ptr<Log>& log) {
    Run run = {.options = options,
               .dtype = dtype,
               .groups = make_groups(world, options.tensor_parallel, heads_of(options)),
               .start = {},
               .batch = {},
               .schedule = {},
               .data = {},
               .lock = {}};
    if (!options.trace.empty()) open_trace(options.trace, world.rank, world.world_size);
    lock_output(run);  // before the search for a checkpoint, because it may rename one back
    std::vector<std::string> notes = std::move(run.start.notes);
    run.start = find_training_start(options, world);
    run.start.notes.insert(run.start.notes.begin(), notes.begin(), notes.end());
    resolve_batch(run, std::max(1, launch.local_world_size));
    run.groups.dp.check_grad_dtype(grad_dtype(run.options));
    const DeviceInfo device = device_info();
    const std::vector<Json> ranks = compare_ranks(run, launch, device);
    const std::string differing = differing_rounding(ranks);
    ENSURE(differing.empty() || options.virtual_ranks == 0,
           "%s: they may round differently, and --deterministic-ranks needs the same bits on all ranks; give all ranks "
           "the same program and CPU_ISA",
           differing.c_str());
    open_log(run, launch, device, ranks, command_line, log);
    if (!differing.empty() && options.zero == 0) {  // with ZeRO each weight is computed by one rank
        log->warn(differing +
                  ": they may round differently, so each rank's weights differ from the others' by "
                  "rounding errors; --zero 1 keeps them equal; --check-replicas is off");
        run.options.check_replicas = 0;
    }
    return run;
}
