#include "train/start.h"

#include <wordexp.h>

#include <algorithm>
#include <set>

#include "base/common.h"
#include "base/content.h"
#include "base/device.h"
#include "base/files.h"
#include "base/print.h"
#include "checkpoint/checkpoint.h"
#include "data/dataloader.h"
#include "parallel/comm.h"
#include "train/options.h"

// Returns the directory that find_latest or find_model finds, and notes which checkpoints are damaged or replaced.
static std::string search(FoundCheckpoint (*find)(const std::string&, const VerifyProgress&), const std::string& path,
                          RunStart& start, const Comm& comm) {
    const FoundCheckpoint found = find(path, [&] { comm.reached("verification of a checkpoint"); });
    if (found.replaced)
        start.notes.push_back(found.dir +
                              ": transformers has saved a model over this checkpoint: its weights are read, "
                              "and the optimizer's state does not belong to them any more");
    for (const std::string& damaged : found.damaged) start.notes.push_back("skipping a damaged checkpoint: " + damaged);
    return found.dir;
}

// Returns the path in a variable, as huggingface_hub reads it: ~ and $NAME stand for what they are in a shell.
static std::string path_in(const char* variable, const std::string& unset) {
    const char *value = getenv(variable), *home = getenv("HOME");
    std::string path = value && *value ? value : unset;
    if (home && (path + "/").starts_with("~/")) path.replace(0, 1, home);
    wordexp_t words;
    if (wordexp(('"' + path + '"').c_str(), &words, WRDE_NOCMD | WRDE_UNDEF) != 0) return path;
    path = words.we_wordv[0];
    wordfree(&words);
    return path;
}

// Returns the folder of a model's name on the Hub, such as openai-community/gpt2, in the cache that the Hub's programs
// fill; "" if it is no such name.
static std::string hub_cache_folder(std::string name) {
    if (!isalnum(static_cast<unsigned char>(name[0])) || std::ranges::count(name, '/') > 1) return "";
    const std::string cache = path_in("XDG_CACHE_HOME", "~/.cache"),
                      hub = path_in("HF_HOME", cache + "/huggingface") + "/hub";
    for (size_t slash; (slash = name.find('/')) != name.npos;) name.replace(slash, 1, "--");
    return path_in("HF_HUB_CACHE", path_in("HUGGINGFACE_HUB_CACHE", hub)) + "/models--" + name;
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
    const InputFile file(init);
    std::string begin(size_t(std::min<int64_t>(file.size, 512)), '\0');
    file.read_at(begin.data(), 0, int64_t(begin.size()));
    const ForeignContent* content = foreign_content(begin);
    fail(EXIT_BAD_DATA,
         "--init %s is %s: give a directory with config.json and model.safetensors, such as save_pretrained() of "
         "transformers makes, or a checkpoint, or the output of a run, or a model of llm.c%s",
         init.c_str(), content ? content->what : "no model that can be read", name_other_weights({name}).c_str());
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

void check_vocabulary(Corpus& data, const char* option, const RunStart& start, const Options& o) {
    if (!start.tokenizer || o.allow_other_tokenizer) return;
    for (Shard& shard : data.shards) shard.vocab_size = start.tokenizer->vocab_size();
    if (data.vocab_size != 0 && data.vocab_size != start.tokenizer->vocab_size())
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
    const std::vector<int> first = text_start(tokenizer);
    ENSURE(tokenizer.vocab_size() - beyond <= config.V && tokenizer.end_of_text < config.V &&
               *std::ranges::max_element(first) < config.V,
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
    const bool own = start.tokenizer_path == start.weights, keep = known && own;
    const int bos = start.hf_config.bos, pad = own ? start.hf_config.pad : tokenizer.pad;
    const bool has_bos = own && bos >= 0 && bos < start.config.V;
    if (!keep) set_tokens(start.hf_config, tokenizer.end_of_text, has_bos ? bos : tokenizer.bos, pad);
    if (is_new || !known || eos.empty()) return;
    start.notes.push_back(format("texts end with token %d in %s, and with %d in the tokenizer %s: %s", eos[0],
                                 start.weights.c_str(), tokenizer.end_of_text, start.tokenizer_path.c_str(),
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
    const Json before = read_trainer_state(start.resume).options;
    const std::string init = before.value("init", std::string());
    ENSURE(o.init.empty() || o.default_model || init == o.init || is_same_file(init, o.init),
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

Dtype compute_dtype(const Options& o) {
    const bool is_fp32 =
        o.precision == Precision::automatic ? !device_bf16_is_faster() : o.precision == Precision::fp32;
    ENSURE(!is_fp32 || o.master_weights,
           "--master-weights off, but --precision auto is fp32 on this device; give --precision bf16");
    if (o.precision == Precision::fp8) device_check_fp8();
    ENSURE(o.offload == Offload::none || !device_memory_is_host(),
           "--offload %s is for GPUs: on a CPU the optimizer's state is in host memory already; leave it out",
           option_text(o, "offload").c_str());
    ENSURE(o.offload != Offload::master || (o.master_weights && !is_fp32),
           "--offload master: this run has no master weights (--master-weights off or --precision fp32); leave it out");
    return is_fp32 ? Dtype::fp32 : Dtype::bf16;
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
    check_model(start, o);  // first: a folder without weights is no model, with any tokenizer
    if (need_tokenizer && !start.tokenizer)
        fail(EXIT_NO_INPUT, "%s has no tokenizer; give one with --tokenizer", start.weights.c_str());
    fit_tokenizer(start);
    return start;
}
