#include "train/report.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/host.h"
#include "base/threads.h"
#include "model/mfu.h"
#include "train/update_rule.h"

std::string describe_schedule(const Options& o) {
    const bool decays = o.schedule != "constant" && o.steps > std::max<int64_t>(o.warmup, 1);
    const std::string end =
        decays ? format(", to %g of it at step %lld", o.final_lr_fraction, static_cast<long long>(o.steps)) : "";
    return format("%s, lr %g, %s warmup%s; %s %g/%g, decay %g, clip %g", o.schedule.c_str(), o.lr,
                  counted(o.warmup, "step").c_str(), end.c_str(), find_update_rule<float>(o.optimizer).title.c_str(),
                  o.beta1, o.beta2, o.weight_decay, o.grad_clip);
}

static std::string describe_start(const RunSource& source, const Options& o) {
    if (!source.resume.empty()) return "resumed from " + source.resume;
    if (!source.weights.empty()) return "weights of " + source.weights;
    return format("GPT-2's initialization, seed %llu", static_cast<unsigned long long>(o.seed));
}

// The peak that MFU is a fraction of: bf16's in bf16 runs, fp32's in fp32 runs.
static double peak_of(const DeviceInfo& device, const std::string& precision) {
    return precision == "bf16" ? device.peak_flops_bf16 : device.peak_flops_fp32;
}

static std::string describe_device(const DeviceInfo& device, const std::string& precision) {
    const double peak = peak_of(device, precision);
    if (peak == 0) return format("%s; peak unknown, so no MFU: %s", device.name.c_str(), device.peak_source.c_str());
    return format("%s; peak %s TFLOP/s in %s, %s", device.name.c_str(), plain_number(peak / 1e12).c_str(),
                  precision.c_str(), device.peak_source.c_str());
}

// What is in FP8, for the row of the precision; empty without FP8.
static std::string describe_fp8(const Options& o) {
    if (o.precision != "fp8") return "";
    return device_memory_is_host() ? "fp8 in the layers' matmuls, simulated (slower than bf16); else "
                                   : "fp8 in the layers' matmuls; else ";
}

static std::string describe_precision(const Options& o, const std::string& precision) {
    if (precision == "fp32") return "fp32";
    const std::string state = find_update_rule<float>(o.optimizer).state_title;
    const std::string and_state = state.empty() ? "" : " and " + state;
    const std::string fp8 = describe_fp8(o);
    if (o.master_weights == "off")
        return fp8 + "bf16 by stochastic rounding, no master weights; fp32 gradients" + and_state;
    const std::string text =
        fp8 + "bf16, with fp32 master weights" + (state.empty() ? " and" : ",") + " gradients" + and_state;
    return device_bf16_is_faster() ? text : text + "; --precision fp32 is faster on this device";
}

static std::string describe_tokenizer(const RunSource& source) {
    if (!source.tokenizer) return "none (--tokenizer): no samples, and no tokenizer in checkpoints";
    return source.tokenizer_path + ", " + counted(source.tokenizer->vocab_size(), "token");
}

std::string describe_data(const Corpus& corpus, int64_t windows_per_step) {
    return format("%s, %s, %s of %d: an epoch is %.1f steps", counted(int64_t(corpus.shards.size()), "shard").c_str(),
                  counted(corpus.tokens, "token").c_str(), counted(corpus.num_windows, "window").c_str(), corpus.T,
                  double(corpus.num_windows) / double(windows_per_step));
}

MemoryOptions memory_options_of(const Options& o, int data_parallel, int tensor_index) {
    const Recompute recompute = o.recompute == "layer"  ? Recompute::layer
                                : o.recompute == "gelu" ? Recompute::gelu
                                                        : Recompute::none;
    const int virtual_ranks = std::max(o.virtual_ranks, data_parallel), shards = o.zero ? data_parallel : 1;
    const bool bf16_gradients = o.grad_dtype == "bf16" && data_parallel > 1 && device_joins_ranks() && !o.share_gpu;
    return {.recompute = recompute,
            .logit_chunks = o.logit_chunks,
            .master_weights = o.master_weights == "on",
            .virtual_ranks = virtual_ranks,
            .shards = shards,
            .shard_gradients = o.zero >= 2,
            .shard_weights = o.zero >= 3 && data_parallel > 1,
            .bf16_gradients = bf16_gradients,
            .fp8 = o.precision == "fp8",
            .tensor = {tensor_index, o.tensor_parallel},
            .sequence_parallel = o.sequence_parallel};
}

// "35.0 GiB of 22.9 GiB available, does not fit: try ...: weights 2.90 GiB, ..."
static std::string describe_need(Dtype dtype, const GPT2Config& config, const BatchPlan& batch, MemoryOptions options,
                                 int64_t available, const std::string& optimizer) {
    const std::vector<MemoryItem> memory = training_memory(dtype, config, batch, options, optimizer);
    std::string text =
        human_bytes(device_bytes(memory)) + (batch.world_size * options.tensor.count > 1 ? " per rank" : "");
    if (available > 0) {
        text += format(" of %s available", human_bytes(available).c_str());
        const std::string advice = advise_memory(dtype, config, batch, options, available, optimizer);
        if (!advice.empty()) text += ", does not fit: " + advice;
    }
    return text + ": " + describe_memory(memory);
}

std::vector<Row> plan_table(Dtype dtype, const Options& o, const RunSource& source, const BatchPlan& batch,
                            const DeviceInfo& device, int64_t available) {
    const MemoryOptions options = memory_options_of(o, batch.world_size);
    std::vector<Row> rows = {{"model", describe_model(source.config)},
                             {"start", describe_start(source, o)},
                             {"tokenizer", describe_tokenizer(source)},
                             {"batch", describe_batch(batch, o.tensor_parallel)},
                             {"precision", describe_precision(o, dtype_name(dtype))},
                             {"libraries", device_libraries()},
                             {"device", describe_device(device, dtype_name(dtype))}};
    const int64_t usable = std::min(available, device.memory_bytes);
    rows.push_back({"memory", describe_need(dtype, source.config, batch, options, usable, o.optimizer)});
    return rows;
}

static std::string hex(uint64_t hash) { return format("%016llx", static_cast<unsigned long long>(hash)); }

RunInfo run_info(const Options& o, const RunSource& source, const BatchPlan& batch, const Corpus& corpus,
                 const DeviceInfo& device, const std::string& precision, const std::string& command_line) {
    RunInfo info;
    info.options = options_json(o);
    info.command_line = command_line;
    info.directory = current_directory();
    info.version = version();
    info.device = device.name;
    info.precision = o.precision == "fp8" ? o.precision : precision;
    info.libraries = device_libraries();
    info.threads = openmp_threads();
    info.cpu_isa = device.cpu_isa;
    info.data = o.train_data;
    info.data_fingerprint = hex(corpus.fingerprint);
    info.layers = source.config.L;
    info.heads = source.config.NH;
    info.channels = source.config.C;
    info.vocab_size = source.config.V;
    info.positions = source.config.max_T;
    info.parameters = count_parameters(source.config);
    info.tokens_per_step = batch.tokens_per_step;
    info.steps = o.steps;
    info.train_tokens = corpus.tokens;
    info.seed = o.seed;
    info.flops_per_token = flops_per_token(source.config, batch.T);
    info.peak_flops = peak_of(device, precision);
    info.peak_source = device.peak_source;
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

std::string rank_info(const Options& o, const RunSource& source, const Corpus& train_data, const Corpus* val_data,
                      const std::string& precision, const DeviceInfo& device, int gpu) {
    nlohmann::ordered_json rank_info = {{"host", host_name()},
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
                                        {"validation data", val_data ? hex(val_data->fingerprint) : ""}};
    for (const Setting& setting : settings(o)) rank_info["--" + setting.name] = setting.value;
    return rank_info.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // file names need not be UTF-8
}

std::string files_json(const Corpus* corpus) {
    nlohmann::ordered_json files = nlohmann::ordered_json::object();
    for (size_t i = 0; corpus && i < corpus->shards.size(); i++) {
        const Shard& shard = corpus->shards[i];
        files[shard.path.substr(shard.path.rfind('/') + 1)] = {
            {"bytes", file_bytes(shard)}, {"places", shard.places}, {"hash", hex(shard.hash)}};
    }
    return files.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string differing_files(const std::string& here, const std::string& there, const std::string& here_name,
                            const std::string& there_name) {
    const auto now = nlohmann::ordered_json::parse(here), other = nlohmann::ordered_json::parse(there);
    const auto number = [](const nlohmann::ordered_json& file, const char* what) {
        const nlohmann::ordered_json value = file.value(what, nlohmann::ordered_json(0));
        return value.is_number_integer() ? value.get<int64_t>() : 0;
    };
    const auto size = [&](const nlohmann::ordered_json& file) { return with_commas(number(file, "bytes")) + " bytes"; };
    std::vector<std::string> differences;
    for (const auto& [name, file] : now.items()) {
        const char* n = name.c_str();
        if (!other.contains(name))
            differences.push_back(format("%s is only %s", n, here_name.c_str()));
        else if (size(file) != size(other[name]))
            differences.push_back(format("%s has %s %s, %s %s", n, size(file).c_str(), here_name.c_str(),
                                         size(other[name]).c_str(), there_name.c_str()));
        else if (number(file, "places") == number(other[name], "places") &&
                 file["hash"] != other[name].value("hash", ""))
            differences.push_back(format("%s has %s in both, but other tokens", n, size(file).c_str()));
    }
    for (const auto& [name, file] : other.items())
        if (!now.contains(name)) differences.push_back(format("%s is only %s", name.c_str(), there_name.c_str()));
    constexpr size_t most = 3;
    std::string text;
    for (size_t i = 0; i < std::min(most, differences.size()); i++) text += (i > 0 ? "; " : "") + differences[i];
    if (differences.size() > most) text += format("; and %zu more", differences.size() - most);
    return text;
}

void check_same_files(Comm& comm, const std::vector<std::string>& rank_infos, const char* field, const Corpus* corpus) {
    const auto fingerprint = [&](size_t rank) { return nlohmann::json::parse(rank_infos[rank]).value(field, ""); };
    size_t rank = 1;
    while (rank < rank_infos.size() && fingerprint(rank) == fingerprint(0)) rank++;
    if (rank >= rank_infos.size()) return;
    const std::vector<std::string> files = comm.all_gather_text(files_json(corpus));  // all ranks found the same rank
    fail(EXIT_USAGE, "rank %zu differs from rank 0: %s: %s", rank, field,
         differing_files(files[rank], files[0], format("on rank %zu", rank), "on rank 0").c_str());
}

void compare_ranks(Comm& comm, const Options& o, const RunSource& source, const Corpus* data) {
    nlohmann::ordered_json own = {{"program", describe_program()},
                                  {"weights", source.weights},
                                  {"validation data", data ? hex(data->fingerprint) : ""}};
    for (const Setting& setting : settings(o)) own["--" + setting.name] = setting.value;
    const std::vector<std::string> rank_infos =
        comm.all_gather_text(own.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    check_same_files(comm, rank_infos, "validation data", data);
    check_same(rank_infos, fields_of_one_rank(o));
}

std::vector<std::string> fields_of_one_rank(const Options&) {
    return {"host", "machine", "device", "gpu", "CPU_ISA", "build"};
}

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

std::vector<std::string> hosts_of(const std::vector<std::string>& rank_infos) {
    std::vector<std::string> hosts;
    for (const std::string& rank_info : rank_infos) hosts.push_back(nlohmann::json::parse(rank_info)["host"]);
    return hosts;
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

TrafficOptions traffic_options_of(Dtype dtype, const Options& o, const BatchPlan& batch) {
    return {.dtype = dtype,
            .grad_dtype = o.grad_dtype == "bf16" ? GradDtype::bf16 : GradDtype::fp32,
            .zero = o.zero,
            .virtual_ranks = o.virtual_ranks,
            .grad_accum_steps = batch.grad_accum_steps,
            .tokens = int64_t(batch.B) * batch.T,
            .tensor_parallel = o.tensor_parallel,
            .sequence_parallel = o.sequence_parallel,
            .recompute_layer = o.recompute == "layer"};
}

RankPlaces rank_places_of(const Options& o, int world_size, int local_ranks) {
    constexpr int gpus_of_a_host = 8;
    int hosts = o.nnodes;
    if (hosts == 1 && local_ranks > 0 && world_size % local_ranks == 0) hosts = world_size / local_ranks;
    if (hosts == 1 && local_ranks == 0 && o.gpus.empty()) {
        const int most = device_memory_is_host() ? 1 : gpus_of_a_host;  // ranks of a host, in whole groups
        hosts = ceil_div(world_size, std::max(most, o.tensor_parallel));
        while (world_size % hosts != 0) hosts++;
    }
    ENSURE(world_size % hosts == 0, "--nnodes %d does not divide %d ranks", hosts, world_size);
    ENSURE(world_size / hosts % o.tensor_parallel == 0,
           "--tensor-parallel %d does not divide the %d ranks of a machine; give a divisor of %d", o.tensor_parallel,
           world_size / hosts, world_size / hosts);
    const bool nccl = device_joins_ranks() && !o.share_gpu;
    return {world_size, hosts, nccl ? CollectiveAlgorithm::ring : CollectiveAlgorithm::halving};
}

static std::string describe_sent(SentBytes sent, int hosts) {
    const std::string total = human_bytes(sent.total());
    if (hosts == 1) return total;
    const std::string between = sent.inside == 0 ? "all" : human_bytes(sent.between);
    return total + format(" (%s to other machines)", between.c_str());
}

std::string describe_traffic(Dtype dtype, const GPT2Config& config, const Options& o, const BatchPlan& batch,
                             const RankPlaces& places) {
    const Traffic traffic = traffic_of(config, traffic_options_of(dtype, o, batch), places);
    std::string text = format("each rank sends %s per step, in %d buckets, ",
                              describe_sent(traffic.per_step, places.hosts).c_str(), ParamLayout(config).num_buckets());
    if (traffic.per_micro_step.total() == 0) return text + "for any number of micro-steps";
    return text + format("of which %s in each micro-step", describe_sent(traffic.per_micro_step, places.hosts).c_str());
}
