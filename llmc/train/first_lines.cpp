#include <cmath>
#include <set>

#include "base/common.h"
#include "base/files.h"
#include "base/host.h"
#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "model/mfu.h"
#include "train/run.h"

static std::string first_shard(const Corpus& data) {
    const std::string path = data.shards.empty() ? "" : data.shards[0].path;
    return path.substr(path.rfind('/') + 1);
}

// Returns the first line of log.jsonl.
static Json run_info(const Run& run, const DeviceInfo& device) {
    const Options& o = run.options;
    const GPT2Config& config = run.start.config;
    const Corpus &data = run.data.train, &val = run.data.val;
    return {{"version", version()},
            {"command_line", o.command_line},
            {"directory", current_directory()},
            {"device", device.name},
            {"peak_flops", device.peak_flops(run.dtype)},
            {"peak_source", device.peak_source},
            {"libraries", device_libraries()},
            {"precision", o.precision == Precision::fp8 ? "fp8" : dtype_name(run.dtype)},
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
            {"seq_len", run.batch.T},
            {"data",
             {{"train", o.train_data},
              {"first_shard", first_shard(data)},
              {"tokens", data.tokens},
              {"fingerprint", hex(data.fingerprint)}}},
            {"val_data", {{"first_shard", first_shard(val)}, {"fingerprint", hex(val.fingerprint)}}},
            {"tokens_per_step", run.batch.tokens_per_step},
            {"options", options_json(o)},
            {"cpu_isa", device.cpu_isa}};  // empty on a GPU
}

// Warns if the data are not those of the checkpoint that the run resumes.
static void compare_data(const Run& run, const TrainerState& state, Log& log) {
    const Json now = run.describe_data();
    for (const auto& [name, fingerprint] : now.members)
        if (state.data.contains(name) && state.data[name] != fingerprint)
            log.warn("the " + name +
                     " data differ from those of the checkpoint; training continues at the same position");
}

// Says how the changed options of a resumed run change the learning rate; "" if they do not, or if no step is left.
static std::string describe_rate(const Run& run, const TrainerState& state) {
    if (state.step >= run.options.steps) return "";
    Options before = run.options;
    const Json& saved = state.options;
    before.steps = saved.value("steps", before.steps);
    before.lr = saved.value("lr", before.lr);
    const std::string word = saved.value("schedule", option_text(before, "schedule"));
    for (const Decay decay : {Decay::cosine, Decay::linear, Decay::constant, Decay::wsd}) {
        before.schedule = decay;
        if (option_text(before, "schedule") == word) break;
    }
    before.warmup = saved.value("warmup", before.warmup);
    before.final_lr_fraction = saved.value("final-lr-fraction", before.final_lr_fraction);
    before.cooldown = saved.value("cooldown", Options().cooldown);
    resolve_steps(before, 0);
    const Schedule old = schedule_of(before);
    const double was = learning_rate(old, state.step), now = learning_rate(schedule_of(run.options), state.step);
    if (std::fabs(now - was) <= 0.01 * was) return "";
    const std::string text =
        format("; the learning rate goes on with %.2e, and would have gone on with %.2e", now, was);
    const int64_t begin = steps_to_peak_end(old);
    if (old.decay != Decay::wsd || state.step <= begin || now < was) return text;
    return text +
           format("; the cooldown began at step %lld: for the result of a longer run resume a checkpoint up to it",
                  static_cast<long long>(begin));
}

// A hint if the rate of a new model is more than 3 times from the rule in dev/learn/RESULTS.md; "" if it is not.
static std::string describe_rule(const Run& run) {
    const double lr = run.options.lr, factor = run.options.optimizer == UpdateRule::muon ? 1.5 : 0.6,
                 C = run.start.config.C;
    if (!run.start.weights.empty() || (lr * C <= 3 * factor && lr * C >= factor / 3)) return "";
    return format("hint: --lr %g is %s %.1e = %g / %g channels, near which new models learn fastest with %s", lr,
                  lr * C > factor ? "more than 3 times" : "less than a third of", factor / C, factor, C,
                  option_text(run.options, "optimizer").c_str());
}

static LogOptions log_options(const Run& run, int64_t resume_step, const DeviceInfo& device, const Json& info) {
    const Options& o = run.options;
    LogOptions options = {.output = run.is_rank0() ? o.output : "", .quiet = o.quiet, .silent = !run.is_rank0()};
    options.log_every = o.log_every;
    options.total_steps = o.steps;
    options.resume_step = resume_step;
    options.flops_per_token = flops_per_token(run.start.config, run.batch.T);
    options.peak_flops = device.peak_flops(run.dtype) * run.groups.world.world_size;
    options.tensorboard = o.tensorboard;
    if (run.is_rank0() && !run.data.val.shards.empty())
        options.reference = find_reference(o.reference, json_text(info));
    return options;
}

// Warns of what differs from the run of the checkpoint, and changes the weights of the next steps.
static void compare_with(const TrainerState& state, const Run& run, Log& log) {
    const Options now = run.used_options();
    if (const std::string changed = changed_options(now, state.options); !changed.empty())
        log.warn("changed since the checkpoint: " + changed + describe_rate(run, state));
    const int ranks = state.options.value("ranks", 0);  // version 0.3.0 has 0 for those of mpirun
    const bool same_bits = now.deterministic_ranks > 0 && now.grad_dtype == Dtype::fp32;
    if (ranks > 0 && ranks != now.ranks && !same_bits)
        log.warn(format("the checkpoint is of %s, and %d %s on: the weights will differ by rounding errors",
                        counted(ranks, "rank").c_str(), now.ranks, now.ranks == 1 ? "goes" : "go"));
    compare_data(run, state, log);
}

// state: null for a new run.
static void log_notes(const Run& run, const TrainerState* state, Log& log) {
    const Options& o = run.options;
    if (o.resume && !state) log.note(o.output + " has no checkpoint yet: a new run starts");
    // The weights of an older checkpoint than the newest are a reason for a warning.
    for (const std::string& line : run.start.notes) run.start.weights.empty() ? log.note(line) : log.warn(line);
    if (state) compare_with(*state, run, log);
    const int V = run.start.hf_config.model.V;
    if (run.start.config.V > V)
        log.note(format("--vocab-size adds %s to the %d of %s, with embeddings drawn around the mean of the others",
                        counted(run.start.config.V - V, "token").c_str(), V, run.start.weights.c_str()));
    if (const std::string hint = describe_rule(run); !state && !hint.empty()) log.note(hint);
    for (const Shard& shard : run.data.val.shards)
        for (const Shard& other : run.data.train.shards)
            if (is_same_file(shard.path, other.path))
                log.warn(shard.path + " is in both --train-data and --val-data: its loss says nothing about new text");
    if (!run.differing.empty())
        log.warn(run.differing +
                 ": they may round differently, so each rank's weights differ from the others' by rounding errors; "
                 "--zero 1 keeps them equal; --check-replicas is off");
}

static std::vector<Row> first_table(const Run& run, const Launch& launch, const DeviceInfo& device,
                                    const Reference& reference) {
    const Options& o = run.options;
    std::vector<Row> rows = plan_table(run.dtype, o, run.start, run.batch, device,
                                       find_room(o, std::max(1, launch.local_world_size)), &run.data.train);
    if (device_memory_is_host()) rows.push_back({"threads", describe_threads(launch.local_world_size)});
    rows.push_back({"launcher", describe_launch(launch)});
    const std::vector<std::string> names = run.groups.world.all_gather_text(host_name());
    const std::set<std::string> hosts(names.begin(), names.end());
    const std::string on_hosts = hosts.size() > 1 ? format(" on %zu machines", hosts.size()) : "";
    rows.push_back({"ranks", run.groups.world.describe() + on_hosts});
    rows.push_back({"output", o.output.empty() ? "none" : o.output});
    const std::string source = reference.source.empty() ? "" : ", " + reference.source;
    if (!reference.name.empty()) rows.push_back({"reference", reference.name + source});
    return rows;
}

std::unique_ptr<Log> open_log(const Run& run, const Launch& launch) {
    const Options& o = run.options;
    const DeviceInfo device = device_info();
    const bool resumes = !run.start.resume.empty();
    const TrainerState state = resumes ? read_trainer_state(run.start.resume) : TrainerState();
    Json info = run_info(run, device);
    auto log = std::make_unique<Log>(log_options(run, resumes ? state.step : -1, device, info));
    log_notes(run, resumes ? &state : nullptr, *log);
    const Reference& r = log->options.reference;
    std::vector<Json> losses;
    for (const auto& [step, loss] : r.losses) losses.push_back(std::vector<Json>{step, loss});
    if (!r.name.empty()) info["reference"] = {{"name", r.name}, {"source", r.source}, {"losses", losses}};
    log->table(first_table(run, launch, device, r));
    if (state.step >= o.steps) {
        log->note(format("nothing to do: the run is at step %lld, and --steps is %lld; a larger --steps continues",
                         static_cast<long long>(state.step), static_cast<long long>(o.steps)));
        return log;
    }
    log->begin_run(json_text(info));
    return log;
}
