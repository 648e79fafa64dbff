#include "train/run_checks.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/host.h"
#include "base/threads.h"
#include "checkpoint/checkpoint.h"
#include "infer/generate.h"
#include "model/mfu.h"
#include "train/saver.h"
#include "train/update_rule.h"

void resolve_micro_batch(Dtype dtype, Options& o, const RunSource& source, int T, const Groups& groups,
                         int data_parallel, int local_ranks) {
    if (o.micro_batch != 0) return;
    groups.connect();
    load_libraries(dtype, source.config);
    const int64_t available = device_bytes_free(std::max(1, local_ranks));
    const int own = largest_micro_batch(dtype, source.config, T, o.global_batch_tokens, data_parallel,
                                        memory_options_of(o, data_parallel), available);
    o.micro_batch = own;
    for (const std::string& other : groups.world.all_gather_text(std::to_string(own)))
        o.micro_batch = std::min(o.micro_batch, std::stoi(other));
}

void check_tokens_at_once(int B, int T) {
    ENSURE(int64_t(B) * T <= std::numeric_limits<int>::max(),
           "--micro-batch %d x --seq-len %d is %s tokens in a micro-batch; at most 2,147,483,647 are supported", B, T,
           with_commas(int64_t(B) * T).c_str());
}

void check_heads(int N, const GPT2Config& config, int world_size) {
    ENSURE(config.NH % N == 0, "--tensor-parallel %d does not divide the model's %d heads; give %s", N, config.NH,
           possible_tensor_parallel(world_size, config.NH).c_str());
}

void check_tensor_parallel(const Options& o, const GPT2Config& config, int T, int world_size) {
    const int N = o.tensor_parallel;
    check_heads(N, config, world_size);
    const bool fixed = !o.init.empty() || o.resume;  // else a new model has as many positions as --seq-len
    const int above = round_up(T, N), nearest = !fixed || above <= config.max_T ? above : config.max_T / N * N;
    const int64_t least = int64_t(std::max(1, o.micro_batch)) * nearest * std::max(1, world_size / N);
    const int64_t global = o.global_batch_tokens;
    std::string advice = nearest > 0 ? format("give --seq-len %d", nearest) : "leave it out";
    if (nearest > 0 && global % least != 0)
        advice += format(" and --global-batch %lld", static_cast<long long>(round_up(global, least)));
    ENSURE(!o.sequence_parallel || T % N == 0,
           "--sequence-parallel divides the tokens of a sequence: --seq-len %d is not a multiple of --tensor-parallel "
           "%d; %s",
           T, N, advice.c_str());
}

void check_virtual_ranks(const Options& o, const BatchPlan& batch) {
    const int n = o.virtual_ranks;
    if (n == 0) return;
    const auto power_of_two = [](int x) { return (x & (x - 1)) == 0; };
    ENSURE(power_of_two(n) && power_of_two(batch.world_size) && n >= batch.world_size,
           "--deterministic-ranks %d on %d ranks: both must be powers of two, and the first not less than the second; "
           "try 8",
           n, batch.world_size);
    const int64_t least_tokens = int64_t(batch.B) * batch.T * n;  // one micro-batch on each virtual rank
    ENSURE(batch.tokens_per_step % least_tokens == 0 || !o.default_global_batch,
           "--deterministic-ranks %d x --micro-batch %d x --seq-len %d = %lld tokens do not divide the default "
           "--global-batch of %lld; try --global-batch %lld",
           n, batch.B, batch.T, static_cast<long long>(least_tokens), static_cast<long long>(batch.tokens_per_step),
           static_cast<long long>(round_up(batch.tokens_per_step, least_tokens)));
    ENSURE(batch.tokens_per_step % least_tokens == 0,
           "--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x "
           "--deterministic-ranks %d; try %lld",
           static_cast<long long>(batch.tokens_per_step), static_cast<long long>(least_tokens), batch.B, batch.T, n,
           static_cast<long long>(round_up(batch.tokens_per_step, least_tokens)));
}

void check_sample_prompt(const Options& o, const RunSource& source, int T) {
    if (o.sample_every > 0 && source.tokenizer && !o.sample_prompt.empty())
        check_prompt(encode(*source.tokenizer, o.sample_prompt), T, "--sample-prompt");
}

GradDtype grad_dtype(const Options& o) { return o.grad_dtype == "bf16" ? GradDtype::bf16 : GradDtype::fp32; }

void warn_of_data(Log& log, const Options& o, const RunSource& source, const Corpus& train, const Corpus* val) {
    for (const std::string& pattern : {o.train_data, o.val_data})
        if (const std::string warning = warn_of_tokenizer(source.tokenizer_path, pattern); !warning.empty())
            log.warn(warning);
    if (!source.weights.empty() && source.tokenizer_path != source.weights &&
        differ_as_tokenizers(source.tokenizer_path, source.weights))
        log.warn(format("the tokenizer %s differs from that of %s, whose weights were trained with other tokens",
                        source.tokenizer_path.c_str(), source.weights.c_str()));
    if (!val) return;
    for (const Shard& shard : val->shards)
        for (const Shard& other : train.shards)
            if (std::filesystem::equivalent(shard.path, other.path))
                log.warn(format("%s is in both --train-data and --val-data: its loss says nothing about new text",
                                shard.path.c_str()));
}

void warn_of_warmup(Log& log, const Options& o) {
    if (o.schedule == "constant" || o.steps == 1 || o.warmup < o.steps) return;
    log.warn(format("--warmup %lld is the whole run: the learning rate rises until the last step and never falls",
                    static_cast<long long>(o.warmup)));
}

// "those of every 6 steps": what is at multiples of both numbers. "" if the run ends before the first one.
static std::string steps_in_common(int64_t a, int64_t b, int64_t steps) {
    const int64_t factor = b / std::gcd(a, b);
    return factor > steps / a ? "" : format("those of every %s steps", with_commas(a * factor).c_str());
}

void note_keep_rules(Log& log, const Options& o) {
    const int64_t saved = o.checkpoint_every;
    if (!saves_checkpoints(o) || o.keep == 0) return;
    if (o.keep_every > 0 && o.keep_every % saved != 0) {
        const std::string kept = steps_in_common(saved, o.keep_every, o.steps);
        log.note(
            format("--keep-every %lld keeps %s, because --checkpoint-every %lld saves at no other of its multiples",
                   static_cast<long long>(o.keep_every), kept.empty() ? "no checkpoint" : kept.c_str(),
                   static_cast<long long>(saved)));
    }
    if (o.keep_best && o.val_every > 0 && saved % o.val_every != 0) {
        const std::string compared = steps_in_common(saved, o.val_every, o.steps);
        log.note(
            format("--keep-best compares only checkpoints that were validated at their own step: the last one%s; a "
                   "--val-every that divides --checkpoint-every %lld compares all",
                   compared.empty() ? "" : (", and " + compared).c_str(), static_cast<long long>(saved)));
    }
}

std::unique_ptr<OutputLock> lock_output(const Options& o) {
    if (o.output.empty()) return nullptr;
    auto lock = std::make_unique<OutputLock>(o.output);
    const std::string newest = o.resume ? "" : newest_directory(o.output);
    ENSURE(newest.empty(),
           "%s holds the checkpoints of an earlier run (%s): continue it with --resume, or choose another --output",
           o.output.c_str(), newest.c_str());
    return lock;
}

int64_t bytes_of_save(const Options& o, const RunSource& source) {
    return checkpoint_bytes(ParamLayout(source.config),
                            checkpoint_format(o, find_update_rule<float>(o.optimizer).state));
}

void make_room_to_resume(const Options& o, const RunSource& source, int64_t step, std::vector<std::string>& notes) {
    if (o.checkpoint_every == 0) return;
    const int64_t bytes = bytes_of_save(o, source);
    try {
        make_room(o.output, keep_rules(o), step + 1, bytes, [&](const std::string& line) { notes.push_back(line); });
    } catch (const Error& error) {
        notes.push_back(error.what());
    }
}

// ---- comparison of ranks

using Json = nlohmann::ordered_json;

static std::string hex(uint64_t hash) { return format("%016llx", static_cast<unsigned long long>(hash)); }

Json run_info(const Options& o, const RunSource& source, const BatchPlan& batch, const Corpus& corpus,
              const DeviceInfo& device, Dtype dtype, int world_size, const std::string& command_line) {
    const GPT2Config& config = source.config;
    Json info = {
        {"version", version()},
        {"command_line", command_line},
        {"directory", current_directory()},
        {"device", device.name},
        {"peak_flops", peak_flops(device, dtype)},
        {"peak_source", device.peak_source},
        {"libraries", device_libraries()},
        {"precision", o.precision == "fp8" ? o.precision : dtype_name(dtype)},
        {"world_size", world_size},
        {"threads", openmp_threads()},
        {"model",
         {{"layers", config.L},
          {"heads", config.NH},
          {"channels", config.C},
          {"vocab_size", config.V},
          {"positions", config.max_T},
          {"parameters", count_parameters(config)},
          {"flops_per_token", flops_per_token(config, batch.T)}}},
        {"data", {{"train", o.train_data}, {"tokens", corpus.tokens}, {"fingerprint", hex(corpus.fingerprint)}}},
        {"tokens_per_step", batch.tokens_per_step},
        {"steps", o.steps},
        {"seed", o.seed},
        {"options", Json::parse(options_json(o))}};
    if (!device.cpu_isa.empty()) info["cpu_isa"] = device.cpu_isa;
    return info;
}

// Equal for two builds of the same sources, by other compilers for example.
static std::string describe_program() {
    const char* kind = device_memory_is_host() ? "for the CPU" : "for GPUs";
    return version() + " " + kind + ", sources " + SOURCES_CHECKSUM;
}

static std::string hash_of_build() {
    const char* self = "/proc/self/exe";
    return path_exists(self) ? hex(checksum_file(self).xxh3) : "";  // "": not Linux
}

static std::string with_options(Json rank_info, const Options& o) {
    for (const Setting& setting : settings(o)) rank_info["--" + setting.name] = setting.value;
    return rank_info.dump(-1, ' ', false, Json::error_handler_t::replace);  // file names need not be UTF-8
}

std::string rank_info(const Options& o, const RunSource& source, const Corpus& train_data, const Corpus* val_data,
                      const std::string& precision, const DeviceInfo& device, int gpu) {
    return with_options({{"host", host_name()},
                         {"machine", host_id()},
                         {"device", device.name},
                         {"gpu", gpu < 0 ? "" : std::to_string(gpu)},
                         {"CPU_ISA", device.cpu_isa},
                         {"build", hash_of_build()},
                         {"program", describe_program()},
                         {"precision", precision},
                         {"checkpoint", source.resume},
                         {"weights", source.weights},
                         {"training data", hex(train_data.fingerprint)},
                         {"validation data", val_data ? hex(val_data->fingerprint) : ""}},
                        o);
}

void compare_ranks(Comm& comm, const Options& o, const RunSource& source, const Corpus* data) {
    const Json own = {{"program", describe_program()},
                      {"weights", source.weights},
                      {"validation data", data ? hex(data->fingerprint) : ""}};
    check_same(comm.all_gather_text(with_options(own, o)), fields_of_one_rank());
}

std::vector<std::string> fields_of_one_rank() { return {"host", "machine", "device", "gpu", "CPU_ISA", "build"}; }

std::string differing_rounding(const std::vector<std::string>& rank_infos) {
    const auto field = [&](size_t rank, const char* name) {
        return nlohmann::json::parse(rank_infos[rank]).value(name, "");
    };
    for (size_t rank = 1; rank < rank_infos.size(); rank++) {
        const std::string isa = field(rank, "CPU_ISA"), first = field(0, "CPU_ISA");
        if (isa != first) return format("rank %zu has CPU_ISA=%s, rank 0 has %s", rank, isa.c_str(), first.c_str());
        if (field(rank, "build") != field(0, "build"))
            return format("rank %zu runs another build of the sources than rank 0", rank);
    }
    return "";
}

std::string describe_ranks(const Comm& comm, const std::vector<std::string>& rank_infos) {
    std::string text = comm.describe();
    if (comm.world_size == 1) return text;
    std::vector<nlohmann::json> ranks;
    for (const std::string& rank_info : rank_infos) ranks.push_back(nlohmann::json::parse(rank_info));
    for (size_t first = 0, end = 0; first < ranks.size(); first = end) {
        const auto together = [&](const auto& r) {
            return r["machine"] == ranks[first]["machine"] && r["device"] == ranks[first]["device"];
        };
        std::string gpus;
        for (; end < ranks.size() && together(ranks[end]); end++) gpus += " " + ranks[end]["gpu"].get<std::string>();
        text += format("%s%zu", first ? ", " : ": ", first);
        if (end - first > 1) text += format("-%zu", end - 1);
        text += " on " + ranks[first]["host"].get<std::string>() + " (" + ranks[first]["device"].get<std::string>();
        text += ranks[first]["gpu"] == "" ? ")" : "; GPU" + gpus + ")";
    }
    return text;
}
