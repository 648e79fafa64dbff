#include "train/run_source.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "base/print.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hf.h"

static void note_damaged(const FoundCheckpoint& found, std::vector<std::string>& notes) {
    for (const std::string& damaged : found.damaged) notes.push_back("skipping a damaged checkpoint: " + damaged);
}

static VerifyProgress progress_for(const Comm& comm) {
    return [&comm] { comm.reached("verification of a checkpoint"); };
}

// Returns the model directory that --init names: itself, or the newest checkpoint of a run's output.
static std::string resolve_init(const std::string& path, std::vector<std::string>& notes, const Comm& comm) {
    if (access((path + "/.").c_str(), F_OK) != 0) {
        if (errno != ENOENT) fail_errno(EXIT_NO_INPUT, "--init " + path, "open the directory");
        fail(EXIT_NO_INPUT, "--init %s: there is no such directory; nothing is downloaded, so give a local one",
             path.c_str());
    }
    const FoundCheckpoint found = find_model(path, progress_for(comm));
    note_damaged(found, notes);
    return found.dir;
}

static bool has_tokenizer(const std::string& dir) {
    for (const char* file : {"tokenizer.json", "vocab.json", "encoder.json"})
        if (path_exists(dir + "/" + file)) return true;
    return false;
}

static void find_tokenizer(RunStart& source, const Options& o) {
    source.tokenizer_path = o.tokenizer;
    for (const std::string& dir : {source.weights, o.train_data.empty() ? "" : parent_directory(o.train_data)})
        if (source.tokenizer_path.empty() && !dir.empty() && has_tokenizer(dir)) source.tokenizer_path = dir;
    if (!source.tokenizer_path.empty()) source.tokenizer = load_tokenizer(source.tokenizer_path);
}

static void check_model(const RunStart& source, const Options& o) {
    const GPT2Config& config = source.config;
    check_config(config);
    ENSURE(o.seq_len <= config.max_T,
           "--seq-len %d is more than the %d positions that %s was trained with; give %d or "
           "less",
           o.seq_len, config.max_T, source.weights.c_str(), config.max_T);
    ENSURE(o.vocab_size == 0 || o.vocab_size == config.V || source.weights.empty(),
           "--vocab-size %d: %s has a vocabulary of %d; give that, or leave the option out", o.vocab_size,
           source.weights.c_str(), config.V);
    ENSURE(!source.tokenizer || source.tokenizer->vocab_size() <= config.V,
           "the tokenizer %s has %d tokens, but the model's vocabulary has %d; give the --tokenizer of the model",
           source.tokenizer_path.c_str(), source.tokenizer->vocab_size(), config.V);
}

static std::string shape(const GPT2Config& c) {
    return format("%d layers, %d heads, %d channels, %d positions, vocabulary %d", c.L, c.NH, c.C, c.max_T, c.V);
}

// Refuses options whose shape differs from that of the resumed checkpoint.
static void check_shape(const RunStart& source, const Options& o) {
    if (o.default_model || (o.model.empty() && o.layers == 0)) return;
    Options asked = o;
    if (asked.vocab_size == 0) asked.vocab_size = source.config.V;
    if (asked.seq_len == 0 && o.model.empty()) asked.seq_len = source.config.max_T;
    const GPT2Config config = model_config(asked);
    ENSURE(config == source.config, "%s holds a model of %s, but the options ask for %s; resume with the same options",
           source.resume.c_str(), shape(source.config).c_str(), shape(config).c_str());
}

static bool is_same_path(const std::string& a, const std::string& b) {
    std::error_code ignored;
    return a == b || std::filesystem::weakly_canonical(a, ignored) == std::filesystem::weakly_canonical(b, ignored);
}

// Refuses an --init or a --seq-len that differs from that of the run. The same command line may start a run and resume
// it, so an --init that the run was started with is accepted.
static void check_resumed(const RunStart& source, const Options& o) try {
    check_shape(source, o);
    const nlohmann::json before = parse_json(read_trainer_state(source.resume).options, "the options in trainer.json");
    const std::string init = before.value("init", "");
    ENSURE(o.init.empty() || o.default_model || is_same_path(init, o.init),
           "--resume continues from %s, so the weights of --init %s would not be read; leave out --init, or start a "
           "new run from them in another --output",
           source.resume.c_str(), o.init.c_str());
    // get_ref refuses 1e300, which value() would convert.
    const bool has_T = before.contains("seq-len");
    const int saved = has_T ? int(before["seq-len"].get_ref<const int64_t&>()) : o.seq_len, max_T = source.config.max_T;
    const int T = o.seq_len ? o.seq_len : max_T, saved_T = saved ? saved : max_T;
    ENSURE(T == saved_T,
           "--seq-len %d: %s counts its position in the data in windows of %d tokens; give --seq-len %d, or start a "
           "new run from its weights with --init in another --output",
           T, source.resume.c_str(), saved_T, saved_T);
} catch (const nlohmann::json::exception&) {
    fail(EXIT_BAD_DATA, "%s/trainer.json: an option has a value of the wrong type; the checkpoint is damaged",
         source.resume.c_str());
}

RunStart find_training_start(const Options& o, const Comm& comm) {
    RunStart source;
    ENSURE(o.output.empty() || !holds_model(o.output),
           "--output %s already holds a model (config.json and model.safetensors); give another directory, such as "
           "--output %s/run, or move that model elsewhere",
           o.output.c_str(), o.output.c_str());
    if (o.resume && is_directory(o.output)) {
        const FoundCheckpoint found = find_latest(o.output, progress_for(comm));
        note_damaged(found, source.notes);
        source.resume = source.weights = found.dir;
    }
    if (o.resume && source.resume.empty())
        source.notes.push_back(o.output + " has no checkpoint yet: starting a new run");
    if (source.weights.empty() && !o.init.empty()) source.weights = resolve_init(o.init, source.notes, comm);
    find_tokenizer(source, o);
    if (source.weights.empty()) {
        source.config = model_config(o, source.tokenizer ? source.tokenizer->vocab_size() : 50257);
    } else {
        const HFConfig config = read_hf_config(source.weights);
        source.config = config.model;
        source.end_of_text = config.end_of_text;
        if (!source.resume.empty()) check_resumed(source, o);
    }
    check_model(source, o);
    return source;
}

RunStart find_trained_model(const Options& o, bool need_tokenizer, const Comm& comm) {
    RunStart source;
    source.weights = resolve_init(o.init, source.notes, comm);
    for (const std::string& line : source.notes)
        if (comm.rank == 0) print_message("warning: " + line);
    source.config = read_hf_config(source.weights).model;
    if (need_tokenizer) {
        find_tokenizer(source, o);
        if (!source.tokenizer)
            fail(EXIT_NO_INPUT, "%s has no tokenizer; give one with --tokenizer", source.weights.c_str());
    }
    check_model(source, o);
    return source;
}
