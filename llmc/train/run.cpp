#include "train/run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "base/common.h"
#include "base/host.h"
#include "base/json.h"
#include "base/print.h"
#include "base/trace.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hf.h"
#include "infer/generate.h"
#include "model/mfu.h"

MemoryOptions Run::memory_options() const {
    return memory_options_of(options, groups.dp.world_size, groups.tp.shard_index);
}

std::string Run::describe_data() const {
    Json text = {{"train", hex(data.train.fingerprint)}};
    if (!data.val.shards.empty()) text["val"] = hex(data.val.fingerprint);
    return json_text(text);
}

// ---- the model and the weights to start from

// Returns the directory that find_latest or find_model finds, and notes the damaged checkpoints that it skips.
static std::string search(FoundCheckpoint (*find)(const std::string&, const VerifyProgress&), const std::string& path,
                          RunStart& start, const Comm& comm) {
    const FoundCheckpoint found = find(path, [&] { comm.reached("verification of a checkpoint"); });
    for (const std::string& damaged : found.damaged) start.notes.push_back("skipping a damaged checkpoint: " + damaged);
    return found.dir;
}

// Returns the folder of a model's name on the Hub, such as openai-community/gpt2, in the cache that the Hub's programs
// fill; "" if it is no such name.
static std::string hub_cache_folder(std::string name) {
    if (!isalnum(static_cast<unsigned char>(name[0])) || std::ranges::count(name, '/') > 1) return "";
    const auto variable = [](const char* key) { return std::string(getenv(key) ? getenv(key) : ""); };
    const std::string xdg = variable("XDG_CACHE_HOME"), cache = xdg.empty() ? variable("HOME") + "/.cache" : xdg;
    const std::string home = variable("HF_HOME"), hub = variable("HF_HUB_CACHE");
    for (size_t slash; (slash = name.find('/')) != name.npos;) name.replace(slash, 1, "--");
    return (!hub.empty() ? hub : (home.empty() ? cache + "/huggingface" : home) + "/hub") + "/models--" + name;
}

// Returns the directory that --init means: that of the Hub's cache for a name of the Hub, DIR for
// DIR/model.safetensors, and the checkpoint that the files OUTPUT/best and OUTPUT/latest name. llm.c's .bin stands for
// itself.
static std::string directory_of_init(const std::string& init) {
    const std::string folder = parent_directory(init), name = init.substr(init.rfind('/') + 1);
    if (!path_exists(init)) {
        const std::string cached = hub_cache_folder(init);
        if (is_directory(cached)) return cached;
        const std::string fetch = format("; for a model of the Hub, which is not in %s: hf download %s --local-dir %s",
                                         cached.c_str(), init.c_str(), name.c_str());
        fail(EXIT_NO_INPUT, "--init %s: there is no such directory; nothing is downloaded, so give a local one%s",
             init.c_str(), cached.empty() ? "" : fetch.c_str());
    }
    if (is_directory(init) || is_llmc_model(init)) return init;
    if (name == "model.safetensors") return folder;
    if (name == "best" || name == "latest") {
        const std::string checkpoint = read_file(init, 256);
        return folder + "/" + checkpoint.substr(0, checkpoint.find('\n'));
    }
    fail(EXIT_NO_INPUT,
         "--init %s is a file: give a directory with config.json and model.safetensors, such as save_pretrained() of "
         "transformers makes from a .pt or .bin file, or a checkpoint, or the output of a run, or a model of llm.c",
         init.c_str());
}

// Finds the weights of --init: in this directory, in the newest checkpoint of a run's output, or in llm.c's .bin.
static void resolve_init(const Options& o, RunStart& start, const Comm& comm) {
    start.weights = directory_of_init(o.init);
    if (is_directory(start.weights)) start.weights = search(find_model, start.weights, start, comm);
}

static bool has_tokenizer(const std::string& dir) {
    for (const char* file : {"tokenizer.json", "vocab.json", "encoder.json"})
        if (path_exists(dir + "/" + file)) return true;
    return false;
}

// Returns the folders of the files of a pattern, empty for none, that hold a tokenizer.
static std::set<std::string> tokenizer_folders(const std::string& pattern, const char* option) {
    std::set<std::string> folders;
    if (pattern.empty()) return folders;
    for (const std::string& file : glob_files(pattern, option)) folders.insert(parent_directory(file));
    std::erase_if(folders, [](const std::string& folder) { return !has_tokenizer(folder); });
    return folders;
}

// Takes the tokenizer of --tokenizer, else that of the weights, else that beside the data. Refuses data whose tokenizer
// is another one: the same tokens would stand for other text.
static void find_tokenizer(RunStart& start, const Options& o) {
    std::vector<std::string> places;
    if (!o.tokenizer.empty()) places.push_back(o.tokenizer);
    const std::string beside = is_directory(start.weights) ? start.weights : parent_directory(start.weights);
    if (!start.weights.empty() && has_tokenizer(beside)) places.push_back(beside);
    const bool needs_one = o.command == Command::generate || o.command == Command::export_model;
    if (needs_one && places.size() > 1) places.pop_back();  // the user has chosen
    for (const std::string& folder : tokenizer_folders(o.train_data, "--train-data")) places.push_back(folder);
    for (const std::string& folder : tokenizer_folders(o.val_data, "--val-data")) places.push_back(folder);
    for (const std::string& place : places) {
        Tokenizer tokenizer = load_tokenizer(place);
        if (start.tokenizer && !o.allow_other_tokenizer && !same_tokenizer(*start.tokenizer, tokenizer))
            fail(EXIT_BAD_DATA,
                 "%s and %s hold different tokenizers, of %d and %d tokens: the same token stands for other text; "
                 "tokenize the data with the first one, or give --allow-other-tokenizer",
                 start.tokenizer_path.c_str(), place.c_str(), start.tokenizer->vocab_size(), tokenizer.vocab_size());
        if (start.tokenizer) continue;
        start.tokenizer = std::move(tokenizer);
        start.tokenizer_path = place;
    }
}

// Weights without a tokenizer are not saved with one beside the data that has another number of tokens.
static void leave_out_other_tokenizer(RunStart& start, const Options& o) {
    const bool of_data = start.tokenizer && o.tokenizer.empty() && start.tokenizer_path != start.weights;
    if (!of_data || start.tokenizer->vocab_size() == start.config.V) return;
    start.notes.push_back(
        format("the tokenizer %s has %d tokens, the weights %s have %d and no tokenizer: it is not used and not saved; "
               "if it is theirs, give it with --tokenizer",
               start.tokenizer_path.c_str(), start.tokenizer->vocab_size(), start.weights.c_str(), start.config.V));
    start.tokenizer.reset();
}

void check_vocabulary(const Corpus& data, const char* option, const RunStart& start, const Options& o) {
    if (data.vocab_size == 0 || !start.tokenizer || o.allow_other_tokenizer) return;
    if (data.vocab_size != start.tokenizer->vocab_size())
        fail(EXIT_BAD_DATA,
             "%s has shards for a vocabulary of %d tokens, but the tokenizer %s has %d; tokenize the text with that "
             "tokenizer, or give --allow-other-tokenizer",
             option, data.vocab_size, start.tokenizer_path.c_str(), start.tokenizer->vocab_size());
}

static void check_model(const RunStart& start, const Options& o) {
    const GPT2Config& config = start.config;
    check_config(config);
    if (!start.weights.empty()) check_weights(start.weights, start.hf_config.model);
    ENSURE(o.seq_len <= config.max_T,
           "--seq-len %d is more than the %d positions that %s was trained with; give %d or less", o.seq_len,
           config.max_T, start.weights.c_str(), config.max_T);
    ENSURE(o.vocab_size == 0 || o.vocab_size == config.V || start.weights.empty(),
           "--vocab-size %d: %s has a vocabulary of %d; give that, or leave the option out%s", o.vocab_size,
           start.weights.c_str(), config.V, start.resume.empty() ? ", or give more, which adds tokens" : "");
    if (!start.tokenizer) return;
    const Tokenizer& tokenizer = *start.tokenizer;
    const auto beyond = std::ranges::count_if(tokenizer.added, [&](const AddedToken& t) { return t.id >= config.V; });
    const bool may_grow = o.command == Command::train && start.resume.empty();
    ENSURE(tokenizer.vocab_size() - beyond <= config.V && tokenizer.end_of_text < config.V,
           "the tokenizer %s has %d tokens, but the model's vocabulary has %d; give the --tokenizer of the model%s",
           start.tokenizer_path.c_str(), tokenizer.vocab_size(), config.V,
           may_grow ? format(", or --vocab-size %d", tokenizer.vocab_size()).c_str() : "");
}

// Gives config.json the tokens of the tokenizer. That of the same folder changes nothing: as in transformers, its ids
// and those of config.json may differ.
static void use_ids_of_tokenizer(RunStart& start) {
    const Tokenizer& tokenizer = *start.tokenizer;
    const std::vector<int> eos = start.hf_config.eos;
    const bool is_new = !is_directory(start.weights);
    if (!is_new && std::ranges::count(eos, tokenizer.end_of_text) > 0) return;
    const bool known = std::ranges::all_of(eos, [&](int id) { return id < start.config.V; });
    const bool keep = known && start.tokenizer_path == start.weights;
    if (!keep) set_tokens(start.hf_config, tokenizer.end_of_text, tokenizer.bos, tokenizer.pad);
    if (is_new || !known || eos.empty()) return;
    start.notes.push_back(format("texts end with token %d in %s/config.json, and with %d in the tokenizer %s: %s",
                                 eos[0], start.weights.c_str(), tokenizer.end_of_text, start.tokenizer_path.c_str(),
                                 keep ? "both stay as they are" : "checkpoints have the tokens of the tokenizer"));
}

// The tokenizer's added tokens beyond the model's embedding, such as one for padding, are kept, but no text may have
// them. A tokenizer of other weights, or of none, gets the context of these.
static void fit_tokenizer(RunStart& start) {
    if (!start.tokenizer) return;
    start.tokenizer->rows = start.config.V;
    if (start.tokenizer_path != start.weights) set_model_max_length(*start.tokenizer, start.config.max_T);
    use_ids_of_tokenizer(start);
    if (const int tokens = start.tokenizer->vocab_size(); tokens > start.config.V && start.resume.empty())
        start.notes.push_back(
            format("the tokenizer %s has %d tokens, and the model %d: the last ones have no embedding; "
                   "--vocab-size %d adds them",
                   start.tokenizer_path.c_str(), tokens, start.config.V, tokens));
}

// Refuses options whose shape differs from that of the resumed checkpoint.
static void check_shape(const RunStart& start, const Options& o) {
    if (o.default_model || (o.model.empty() && o.layers == 0)) return;
    Options asked = o;
    if (asked.vocab_size == 0) asked.vocab_size = start.config.V;
    if (asked.seq_len == 0 && o.model.empty()) asked.seq_len = start.config.max_T;
    const GPT2Config config = model_config(asked);
    ENSURE(config == start.config, "%s holds a model of %s, but the options ask for %s; resume with the same options",
           start.resume.c_str(), describe_model(start.config).c_str(), describe_model(config).c_str());
}

// Refuses an --init or a --seq-len that differs from that of the run. The same command line may start a run and resume
// it, so an --init that the run was started with is accepted.
static void check_resumed(const RunStart& start, const Options& o) try {
    check_shape(start, o);
    const Json before = parse_json(read_trainer_state(start.resume).options, "the options in trainer.json");
    const std::string init = before.value("init", std::string());
    std::error_code missing;
    ENSURE(o.init.empty() || o.default_model || init == o.init || std::filesystem::equivalent(init, o.init, missing),
           "--resume continues from %s, so the weights of --init %s would not be read; leave out --init, or start a "
           "new run from them in another --output",
           start.resume.c_str(), o.init.c_str());
    const int saved = before.value("seq-len", o.seq_len), max_T = start.config.max_T;
    const int T = o.seq_len ? o.seq_len : max_T, saved_T = saved ? saved : max_T;
    ENSURE(T == saved_T,
           "--seq-len %d: %s counts its position in the data in windows of %d tokens; give --seq-len %d, or start a "
           "new run from its weights with --init in another --output",
           T, start.resume.c_str(), saved_T, saved_T);
} catch (const JsonError&) {
    fail(EXIT_BAD_DATA, "%s/trainer.json: an option has a value of the wrong type; the checkpoint is damaged",
         start.resume.c_str());
}

RunStart find_training_start(const Options& o, const Comm& comm) {
    RunStart start;
    ENSURE(o.output.empty() || !holds_model(o.output),
           "--output %s already holds a model (config.json and model.safetensors); give another directory, such as "
           "--output %s/run, or move that model elsewhere",
           o.output.c_str(), o.output.c_str());
    if (o.resume && is_directory(o.output)) start.resume = start.weights = search(find_latest, o.output, start, comm);
    if (start.weights.empty() && !o.init.empty()) resolve_init(o, start, comm);
    if (start.weights.empty()) {
        find_tokenizer(start, o);
        start.config = model_config(o, start.tokenizer ? start.tokenizer->vocab_size() : 50257);
        start.hf_config = new_hf_config(start.config);
    } else {
        start.hf_config = read_hf_config(start.weights);
        start.config = start.hf_config.model;
        if (!start.resume.empty()) check_resumed(start, o);
        if (start.resume.empty()) start.config.V = std::max(start.config.V, o.vocab_size);
        find_tokenizer(start, o);
        leave_out_other_tokenizer(start, o);
    }
    check_model(start, o);
    fit_tokenizer(start);
    return start;
}

RunStart find_trained_model(const Options& o, bool need_tokenizer, const Comm& comm) {
    RunStart start;
    resolve_init(o, start, comm);
    for (const std::string& line : start.notes)
        if (comm.rank == 0) print_message("warning: " + line);
    start.hf_config = read_hf_config(start.weights);
    start.config = start.hf_config.model;
    find_tokenizer(start, o);
    if (need_tokenizer && !start.tokenizer)
        fail(EXIT_NO_INPUT, "%s has no tokenizer; give one with --tokenizer", start.weights.c_str());
    check_model(start, o);
    fit_tokenizer(start);
    return start;
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

static void check_virtual_ranks(const Options& o, const BatchPlan& batch) {
    const int n = o.deterministic_ranks;
    if (n == 0) return;
    ENSURE(std::has_single_bit(unsigned(n)) && std::has_single_bit(unsigned(batch.world_size)) && n >= batch.world_size,
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

BatchPlan resolve_batch(Options& o, Dtype dtype, const GPT2Config& config, const Groups& groups, int world_size,
                        int local_ranks) {
    const int T = o.seq_len ? o.seq_len : config.max_T;
    const int data_parallel = count_data_parallel(world_size, o.tensor_parallel, config.NH);
    check_tensor_parallel(o, config, T, world_size);
    if (o.micro_batch == 0) {
        load_libraries(dtype, config);
        o.micro_batch = largest_micro_batch(dtype, config, T, o.global_batch, data_parallel,
                                            memory_options_of(o, data_parallel), device_bytes_free(local_ranks));
        for (const std::string& other : groups.world.all_gather_text(std::to_string(o.micro_batch)))
            o.micro_batch = std::min(o.micro_batch, std::stoi(other));
    }
    check_tokens_at_once(o.micro_batch, T);
    const BatchPlan batch = plan_batch(o.micro_batch, T, o.global_batch, data_parallel, o.default_global_batch);
    o.global_batch = batch.tokens_per_step;  // a resume keeps the global batch on any number of ranks
    check_virtual_ranks(o, batch);
    return batch;
}

// ---- comparison of ranks

// Returns the same for two builds of the same sources, by other compilers for example.
static std::string describe_program() {
    return version() + (device_memory_is_host() ? " for the CPU" : " for GPUs") + ", sources " + SOURCES_CHECKSUM;
}

std::vector<Json> check_same(const std::vector<std::string>& rank_infos) {
    const std::set<std::string> may_differ = {"host", "CPU_ISA", "build", "--quiet", "--trace", "--config"};
    std::vector<Json> ranks;
    for (const std::string& info : rank_infos) {
        const Json& other = ranks.emplace_back(parse_json_object(info, "a rank"));
        // Backwards: different data say more than different options, whose names begin with a dash.
        for (auto field = ranks[0].members.rbegin(); field != ranks[0].members.rend(); ++field) {
            const std::string name = field->first, here = json_text(field->second),
                              there = other.contains(name) ? json_text(other[name]) : "nothing";
            ENSURE(there == here || may_differ.contains(name),
                   "rank %zu differs from rank 0: %s %s there, %s on rank 0", ranks.size() - 1, name.c_str(),
                   there.c_str(), here.c_str());
        }
    }
    return ranks;
}

void check_same_command(Comm& comm, Command command) {
    const std::vector<std::string> names = comm.all_gather_text(command_name(command));
    for (size_t rank = 1; rank < names.size(); rank++)
        ENSURE(names[rank] == names[0], "rank %zu runs %s, and rank 0 runs %s: start all ranks with one command", rank,
               names[rank].c_str(), names[0].c_str());
}

// Called by all ranks. Refuses ranks that differ in a field or in an option. Returns the objects of all ranks.
static std::vector<Json> compare(Comm& comm, const Options& o, Json own) {
    const Json options = parse_json_object(options_json(o), "the options");
    for (const auto& [name, value] : options.members) own["--" + name] = value;
    return check_same(comm.all_gather_text(json_text(own)));
}

void compare_ranks(Comm& comm, const Options& o, const RunStart& start, const Corpus* data) {
    compare(comm, o,
            {{"program", describe_program()},
             {"weights", start.weights},
             {"validation data", data ? hex(data->fingerprint) : ""}});
}

static std::vector<Json> compare_ranks(const Run& run, const DeviceInfo& device) {
    const char* self = "/proc/self/exe";
    return compare(run.groups.world, run.options,
                   {{"host", host_name()},
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
        const std::string isa = ranks[rank]["CPU_ISA"].text, first = ranks[0]["CPU_ISA"].text;
        if (isa != first) return format("rank %zu has CPU_ISA=%s, rank 0 has %s", rank, isa.c_str(), first.c_str());
        if (ranks[rank]["build"] != ranks[0]["build"])
            return format("rank %zu runs another build of the sources than rank 0", rank);
    }
    return "";
}

// ---- the start

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
    run.schedule = schedule_of(o);
}

static std::string first_shard(const Corpus& data) {
    const std::string path = data.shards.empty() ? "" : data.shards[0].path;
    return path.substr(path.rfind('/') + 1);
}

// Returns the first line of log.jsonl.
static Json run_info(const Run& run, const DeviceInfo& device) {
    const Options& o = run.options;
    const GPT2Config& config = run.start.config;
    const Corpus &data = run.data.train, &val = run.data.val;
    Json first_line = {
        {"version", version()},
        {"command_line", run.command_line},
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
        {"options", parse_json_object(options_json(o), "the options")},
        {"cpu_isa", device.cpu_isa}};  // empty on a GPU
    first_line["seq_len"] = run.batch.T;
    first_line["data"]["first_shard"] = first_shard(data);
    first_line["val_data"] = {{"first_shard", first_shard(val)}, {"fingerprint", hex(val.fingerprint)}};
    return first_line;
}

// Warns if the data are not those of the checkpoint that the run resumes.
static void compare_data(const Run& run, const TrainerState& state, Log& log) {
    const Json before = parse_json(state.data, "the data in trainer.json"),
               now = parse_json(run.describe_data(), "the data of this run");
    for (const auto& [name, fingerprint] : now.members)
        if (before.contains(name) && before[name] != fingerprint)
            log.warn("the " + name +
                     " data differ from those of the checkpoint; training continues at the same position");
}

// Says how the changed options of a resumed run change the learning rate; "" if they do not, or if no step is left.
static std::string describe_rate(const Run& run, const TrainerState& state) {
    if (state.step >= run.options.steps) return "";
    Options before = run.options;
    const Json saved = parse_json_object(state.options, "the options in trainer.json");
    before.steps = saved.value("steps", before.steps);
    before.lr = saved.value("lr", before.lr);
    before.schedule = saved.value("schedule", before.schedule);
    before.warmup = saved.value("warmup", before.warmup);
    before.final_lr_fraction = saved.value("final-lr-fraction", before.final_lr_fraction);
    before.cooldown = saved.value("cooldown", Options().cooldown);
    resolve_steps(before, 0);
    const Schedule old = schedule_of(before);
    const double was = learning_rate(old, state.step), now = learning_rate(run.schedule, state.step);
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
    const double lr = run.options.lr, factor = run.options.optimizer == "muon" ? 1.5 : 0.6, C = run.start.config.C;
    if (!run.start.weights.empty() || (lr * C <= 3 * factor && lr * C >= factor / 3)) return "";
    return format("hint: --lr %g is %s %.1e = %g / %g channels, near which new models learn fastest with %s", lr,
                  lr * C > factor ? "more than 3 times" : "less than a third of", factor / C, factor, C,
                  run.options.optimizer.c_str());
}

static void open_log(Run& run, const Launch& launch, const DeviceInfo& device, const std::vector<Json>& ranks,
                     std::unique_ptr<Log>& log) {
    Options& o = run.options;
    const bool resumes = !run.start.resume.empty();
    const TrainerState state = resumes ? read_trainer_state(run.start.resume) : TrainerState();
    LogOptions options = {.output = run.is_rank0() ? o.output : "", .quiet = o.quiet, .silent = !run.is_rank0()};
    options.log_every = o.log_every;
    options.total_steps = o.steps;
    options.resume_step = resumes ? state.step : -1;
    options.flops_per_token = flops_per_token(run.start.config, run.batch.T);
    options.peak_flops = peak_flops(device, run.dtype) * run.groups.world.world_size;
    options.pause_every = {run.data.val.shards.empty() ? 0 : o.val_every,
                           run.data.tasks.empty() ? 0 : std::max(o.val_every, o.eval_every),
                           run.start.tokenizer ? o.sample_every : 0, o.checkpoint_every};
    options.tensorboard = o.tensorboard;
    Json info = run_info(run, device);
    if (run.is_rank0() && !run.data.val.shards.empty())
        options.reference = find_reference(o.reference, json_text(info));
    const Reference& r = options.reference;
    std::vector<Json> losses;
    for (const auto& [step, loss] : r.losses) losses.push_back(std::vector<Json>{step, loss});
    if (!r.name.empty()) info["reference"] = {{"name", r.name}, {"source", r.source}, {"losses", losses}};
    log = std::make_unique<Log>(options);
    if (o.resume && !resumes) log->note(o.output + " has no checkpoint yet: a new run starts");
    // The weights of an older checkpoint than the newest are a reason for a warning.
    for (const std::string& line : run.start.notes) run.start.weights.empty() ? log->note(line) : log->warn(line);
    if (const std::string changed = changed_options(o); resumes && !changed.empty())
        log->warn("changed since the checkpoint: " + changed + describe_rate(run, state));
    if (resumes) compare_data(run, state, *log);
    const int V = run.start.hf_config.model.V;
    if (run.start.config.V > V)
        log->note(format("--vocab-size adds %s to the %d of %s, with embeddings drawn around the mean of the others",
                         counted(run.start.config.V - V, "token").c_str(), V, run.start.weights.c_str()));
    if (const std::string hint = describe_rule(run); !resumes && !hint.empty()) log->note(hint);
    for (const Shard& shard : run.data.val.shards)
        for (const Shard& other : run.data.train.shards)
            if (std::filesystem::equivalent(shard.path, other.path))
                log->warn(shard.path + " is in both --train-data and --val-data: its loss says nothing about new text");
    std::vector<Row> rows = plan_table(run.dtype, o, run.start, run.batch, device,
                                       device_bytes_free(std::max(1, launch.local_world_size)), &run.data.train);
    if (device_memory_is_host()) rows.push_back({"threads", describe_threads(launch.local_world_size)});
    rows.push_back({"launcher", describe_launch(launch)});
    std::set<std::string> hosts;
    for (const Json& rank : ranks) hosts.insert(rank["host"].text);
    const std::string on_hosts = hosts.size() > 1 ? format(" on %zu machines", hosts.size()) : "";
    rows.push_back({"ranks", run.groups.world.describe() + on_hosts});
    rows.push_back({"output", o.output.empty() ? "none" : o.output});
    if (!r.name.empty()) rows.push_back({"reference", r.name + (r.source.empty() ? "" : ", " + r.source)});
    log->table(rows);
    if (state.step >= o.steps)
        return log->note(
            format("nothing to do: the run is at step %lld, and --steps is %lld; a larger --steps continues",
                   static_cast<long long>(state.step), static_cast<long long>(o.steps)));
    log->begin_run(json_text(info));
    if (run.lock) replace_file(o.output + "/run.toml", run_toml(o));
}

Run prepare_run(const Options& options, const Launch& launch, Comm& world, Dtype dtype, const std::string& command_line,
                std::unique_ptr<Log>& log) {
    Groups groups = make_groups(world, options.tensor_parallel);
    Run run = {options, dtype, std::move(groups), {}, {}, {}, {}, {}, command_line};
    if (!options.trace.empty()) open_trace(options.trace, world.rank, world.world_size);
    const std::vector<std::string> notes = lock_output(run);  // before the search, because it may rename a checkpoint
    run.start = find_training_start(options, world);
    run.start.notes.insert(run.start.notes.begin(), notes.begin(), notes.end());
    const int local_ranks = std::max(1, launch.local_world_size);
    run.batch = resolve_batch(run.options, dtype, run.start.config, run.groups, world.world_size, local_ranks);
    open_data(run);
    const DeviceInfo device = device_info();
    const std::vector<Json> ranks = compare_ranks(run, device);
    const std::string differing = differing_rounding(ranks);
    ENSURE(differing.empty() || options.deterministic_ranks == 0,
           "%s: they may round differently, and --deterministic-ranks needs the same bits on all ranks; give all ranks "
           "the same program and CPU_ISA",
           differing.c_str());
    open_log(run, launch, device, ranks, log);
    if (!differing.empty() && options.zero == 0) {  // with ZeRO each weight is computed by one rank
        log->warn(differing +
                  ": they may round differently, so each rank's weights differ from the others' by "
                  "rounding errors; --zero 1 keeps them equal; --check-replicas is off");
        run.options.check_replicas = 0;
    }
    return run;
}
