#include "train/run_source.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hf_config.h"
#include "parallel/watchdog.h"

// A large checkpoint may take longer to verify than --timeout.
static VerifyProgress progress_for(Watchdog* watchdog) {
    if (!watchdog) return {};
    watchdog->reached("verification of a checkpoint");
    return [watchdog](const std::string&, int64_t, int64_t) { watchdog->reached("verification of a checkpoint"); };
}

static void note_damaged(const FoundCheckpoint& found, std::vector<std::string>& notes) {
    for (const DamagedCheckpoint& damaged : found.damaged)
        notes.push_back("skipping a damaged checkpoint: " + damaged.what);
}

// Returns the model directory that --init names: itself, or the newest checkpoint of a run's output.
static std::string resolve_init(const std::string& path, std::vector<std::string>& notes, Watchdog* watchdog) {
    const bool there = access((path + "/.").c_str(), F_OK) == 0;
    if (!there && errno == ENOENT)
        fail(EXIT_NO_INPUT, "--init %s: there is no such directory; nothing is downloaded, so give a local one",
             path.c_str());
    if (!there) fail_errno(EXIT_NO_INPUT, "--init " + path, "open the directory");
    const FoundCheckpoint found = find_model(path, progress_for(watchdog));
    note_damaged(found, notes);
    if (!found.unverified.empty()) notes.push_back("the weights are not verified: " + found.unverified);
    return found.dir;
}

static bool has_tokenizer(const std::string& dir) {
    for (const char* file : {"tokenizer.json", "vocab.json", "encoder.json"})
        if (path_exists(dir + "/" + file)) return true;
    return false;
}

static void find_tokenizer(RunSource& source, const Options& options) {
    source.tokenizer_path = options.tokenizer;
    if (source.tokenizer_path.empty() && !source.weights.empty() && has_tokenizer(source.weights))
        source.tokenizer_path = source.weights;
    const std::string data = parent_directory(options.train_data);
    if (source.tokenizer_path.empty() && !options.train_data.empty() && has_tokenizer(data))
        source.tokenizer_path = data;
    if (!source.tokenizer_path.empty()) source.tokenizer = load_tokenizer(source.tokenizer_path);
}

static void check_tokenizer(const RunSource& source) {
    if (!source.tokenizer) return;
    ENSURE(source.tokenizer->vocab_size() <= source.config.V,
           "the tokenizer %s has %d tokens, but the model's vocabulary has %d; give the --tokenizer of the model",
           source.tokenizer_path.c_str(), source.tokenizer->vocab_size(), source.config.V);
}

static std::string shape(const GPT2Config& c) {
    return format("%d layers, %d heads, %d channels, %d positions, vocabulary %d", c.L, c.NH, c.C, c.max_T, c.V);
}

// Refuses options whose shape differs from the resumed checkpoint's.
static void check_shape(const RunSource& source, const Options& options) {
    if (options.default_model || (options.model.empty() && options.layers == 0)) return;
    Options asked = options;
    if (asked.vocab_size == 0) asked.vocab_size = source.config.V;
    if (asked.seq_len == 0 && options.model.empty()) asked.seq_len = source.config.max_T;
    const GPT2Config config = model_config(asked);
    ENSURE(config == source.config, "%s holds a model of %s, but the options ask for %s; resume with the same options",
           source.resume.c_str(), shape(source.config).c_str(), shape(config).c_str());
}

static void check_seq_len(const RunSource& source, const Options& options) {
    ENSURE(options.seq_len <= source.config.max_T,
           "--seq-len %d is more than the %d positions that %s was trained with; give %d or less", options.seq_len,
           source.config.max_T, source.weights.c_str(), source.config.max_T);
}

static void check_vocab_size(const RunSource& source, const Options& options) {
    ENSURE(options.vocab_size == 0 || options.vocab_size == source.config.V,
           "--vocab-size %d: %s has a vocabulary of %d; give that, or leave the option out", options.vocab_size,
           source.weights.c_str(), source.config.V);
}

static bool is_same_path(const std::string& a, const std::string& b) {
    std::error_code ignored;
    return a == b || std::filesystem::weakly_canonical(a, ignored) == std::filesystem::weakly_canonical(b, ignored);
}

// The same command line may start a run and resume it, so --init is accepted if the run was started with it.
static void check_resumed_init(const RunSource& source, const Options& options, const nlohmann::json& before) {
    if (options.init.empty() || options.default_model) return;  // default_model: --init comes from run.json
    const std::string now = nlohmann::json::parse(options_json(options)).at("init");
    ENSURE(
        is_same_path(before.value("init", ""), now),
        "--resume continues from %s, so the weights of --init %s would not be read; leave out --init, or start a new "
        "run from them in another --output",
        source.resume.c_str(), now.c_str());
}

// The checkpoint stores its position in the data as a number of windows of --seq-len tokens.
static void check_resumed_seq_len(const RunSource& source, const Options& options, const nlohmann::json& before) {
    const int saved = before.value("seq-len", options.seq_len);
    const int T = options.seq_len ? options.seq_len : source.config.max_T,
              saved_T = saved ? saved : source.config.max_T;
    ENSURE(
        T == saved_T,
        "--seq-len %d: %s counts its position in the data in windows of %d tokens; give --seq-len %d, or start a new "
        "run from its weights with --init in another --output",
        T, source.resume.c_str(), saved_T, saved_T);
}

// The options in trainer.json. The file's checksum does not prove that this program wrote it.
static nlohmann::json options_before(const RunSource& source) {
    nlohmann::json before = parse_json(read_trainer_state(source.resume).options, "the options in trainer.json");
    const auto init = before.find("init"), seq_len = before.find("seq-len");
    if ((init != before.end() && !init->is_string()) || (seq_len != before.end() && !seq_len->is_number_integer()))
        fail(EXIT_BAD_DATA, "%s/trainer.json: an option has a value of the wrong type; the checkpoint is damaged",
             source.resume.c_str());
    return before;
}

static void check_resumed(const RunSource& source, const Options& options) {
    check_shape(source, options);
    const nlohmann::json before = options_before(source);
    check_resumed_init(source, options, before);
    check_resumed_seq_len(source, options, before);
}

// Calls `find`, and calls it again if the checkpoint that it chose was deleted before it was read.
static RunSource find_again_if_deleted(const std::function<void(RunSource&)>& find) {
    for (int i = 1;; i++) {
        RunSource source;
        try {
            find(source);
            return source;
        } catch (const Error&) {
            if (source.weights.empty() || !is_deleted(source.weights) || i == READ_ATTEMPTS) throw;
        }
    }
}

// Refuses an --output that holds a model: later commands could not tell its weights from the run's.
static void check_output(const Options& options) {
    ENSURE(options.output.empty() || !holds_model(options.output),
           "--output %s already holds a model (config.json and model.safetensors); give another directory, such as "
           "--output %s/run, or move that model elsewhere",
           options.output.c_str(), options.output.c_str());
}

// --resume=strict refuses what --resume skips.
static void refuse_damaged(const FoundCheckpoint& found) {
    if (found.damaged.empty()) return;
    const std::string all =
        found.damaged.size() > 1 ? format("; in all %zu checkpoints are damaged", found.damaged.size()) : "";
    fail(EXIT_BAD_DATA, "%s%s; --resume=strict refuses to skip it, --resume would continue from %s",
         found.damaged[0].what.c_str(), all.c_str(), found.dir.c_str());
}

static void find_training_start(RunSource& source, const Options& options, Watchdog* watchdog) {
    if (options.resume && is_directory(options.output)) {
        const FoundCheckpoint found = find_resumable(options.output, progress_for(watchdog));
        if (options.resume_strict) refuse_damaged(found);
        note_damaged(found, source.notes);
        source.resume = source.weights = found.dir;
    }
    if (options.resume && source.resume.empty())
        source.notes.push_back(format("%s has no checkpoint yet: starting a new run", options.output.c_str()));
    if (source.weights.empty() && !options.init.empty())
        source.weights = resolve_init(options.init, source.notes, watchdog);
    find_tokenizer(source, options);
    if (source.weights.empty()) {
        source.config = model_config(options, source.tokenizer ? source.tokenizer->vocab_size() : 50257);
    } else {
        const HFConfig config = read_hf_config(source.weights);
        source.config = config.model;
        source.end_of_text = config.end_of_text;
        if (!source.resume.empty()) check_resumed(source, options);
        check_seq_len(source, options);
        check_vocab_size(source, options);
    }
    check_config(source.config);
    check_tokenizer(source);
}

RunSource find_training_start(const Options& options, Watchdog* watchdog) {
    check_output(options);
    return find_again_if_deleted([&](RunSource& source) { find_training_start(source, options, watchdog); });
}

static void find_trained_model(RunSource& source, const Options& options, bool need_tokenizer, Watchdog* watchdog) {
    source.weights = resolve_init(options.init, source.notes, watchdog);
    source.config = read_hf_config(source.weights).model;
    check_seq_len(source, options);
    if (need_tokenizer) {
        find_tokenizer(source, options);
        if (!source.tokenizer)
            fail(EXIT_NO_INPUT, "%s has no tokenizer; give one with --tokenizer", source.weights.c_str());
        check_tokenizer(source);
    }
}

RunSource find_trained_model(const Options& options, bool need_tokenizer, Watchdog* watchdog) {
    return find_again_if_deleted(
        [&](RunSource& source) { find_trained_model(source, options, need_tokenizer, watchdog); });
}

void load_from(RunSource& source, const Options& options, Comm& comm,
               const std::function<void(const std::string& dir)>& load,
               const std::function<void(const std::string& line)>& note) {
    const bool chosen = source.resume.empty() && !is_same_path(source.weights, options.init);  // not named by the user
    for (int i = 1;; i++) {
        bool deleted = false;
        try {
            load(source.weights);
        } catch (const Error&) {
            deleted = chosen && i < READ_ATTEMPTS && is_deleted(source.weights);
            if (!deleted) throw;
        }
        const std::vector<std::string> ranks = comm.all_gather_text(deleted ? "deleted" : "");
        if (std::find(ranks.begin(), ranks.end(), "deleted") == ranks.end()) return;
        const std::string before = source.weights;
        std::vector<std::string> ignored;  // a newer checkpoint is as intact as the one that was verified first
        source.weights =
            comm.all_gather_text(comm.rank == 0 ? resolve_init(options.init, ignored, comm.watchdog.get()) : "")[0];
        note(format("%s was deleted by its run while it was read: %s is read instead", before.c_str(),
                    source.weights.c_str()));
    }
}

bool differ_as_tokenizers(const std::string& path, const std::string& other_path) {
    try {
        const Tokenizer tokenizer = load_tokenizer(path), other = load_tokenizer(other_path);
        const auto same_merge = [](const Merge& a, const Merge& b) { return a.left == b.left && a.right == b.right; };
        return tokenizer.tokens != other.tokens || !std::equal(tokenizer.merges.begin(), tokenizer.merges.end(),
                                                               other.merges.begin(), other.merges.end(), same_merge);
    } catch (const Error&) {
        return false;
    }
}

std::string warn_of_tokenizer(const std::string& path, const std::string& pattern) {
    const std::string dir = parent_directory(pattern);
    if (path.empty() || pattern.empty() || dir == path || !differ_as_tokenizers(dir, path)) return "";
    return format(
        "%s was made with the tokenizer in its directory, which differs from that of %s: its tokens mean other "
        "text to the model",
        pattern.c_str(), path.c_str());
}
