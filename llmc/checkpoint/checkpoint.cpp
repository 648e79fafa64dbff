#include "checkpoint/checkpoint.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "base/files.h"
#include "checkpoint/safetensors.h"

constexpr int format_version = 1;
constexpr int64_t max_state_bytes = 16 << 20;      // the largest trainer.json that is read
constexpr uint64_t max_count = uint64_t(1) << 60;  // above any run's counts; adding a run's steps cannot overflow

using Warn = std::function<void(const std::string& line)>;

// Does what can also be done later: an error becomes a warning.
static void try_to(const char* what_fails, const Warn& warn, const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        if (warn) warn(format("%s: %s", what_fails, error.what()));
    }
}

// ---- names of directories

static std::string step_name(int64_t step) { return format("step_%06" PRId64, step); }

std::string checkpoint_directory(const std::string& output, int64_t step) { return output + "/" + step_name(step); }

std::map<int64_t, std::string, std::greater<>> list_checkpoints(const std::string& output) {
    std::map<int64_t, std::string, std::greater<>> found;
    if (!is_directory(output)) return found;
    for (const std::string& name : list_directory(output)) {
        int64_t step = -1;
        const bool has_step = sscanf(name.c_str(), "step_%" SCNd64, &step) == 1;
        if (has_step && name == step_name(step)) found[step] = output + "/" + name;
    }
    return found;
}

std::vector<std::string> remove_leftovers(const std::string& output) {
    std::vector<std::string> lines;
    if (!is_directory(output)) return lines;
    for (const std::string& name : list_directory(output)) {
        const bool ours = name.starts_with("step_") || name.starts_with("latest") || name.starts_with("best");
        if (!ours || !name.ends_with(".tmp")) continue;
        remove_tree(output + "/" + name);
        lines.push_back(format("%s/%s: removed, left behind by an interrupted save", output.c_str(), name.c_str()));
    }
    return lines;
}

// ---- the files of a checkpoint

static TensorGroup model_group(const CheckpointFormat& format) {
    return {WEIGHTS, "transformer.", format.bf16_weights ? "BF16" : "F32"};
}

static TensorGroups optimizer_groups(const CheckpointFormat& format) {
    TensorGroups out;
    if (format.bf16_weights) out.push_back({WEIGHTS, "master.transformer.", "F32"});
    constexpr const char* dtypes[] = {"F32", "BF16", "U8"};
    for (const auto& [slot, prefix] : {std::pair(FIRST_MOMENT, "m.transformer."), {SECOND_MOMENT, "v.transformer."}})
        out.push_back({slot, prefix, dtypes[int(format.moments)], false, slot == SECOND_MOMENT && format.muon});
    return out;
}

void for_each_read(const ParamLayout& layout, const CheckpointFormat& format,
                   const std::function<void(Slot slot, Param p, int l)>& f) {
    for (const TensorGroups& file : {TensorGroups{model_group(format)}, optimizer_groups(format)})
        for (const TensorGroup& group : file)
            for_each_tensor(layout, group, [&](Param p, int l) { f(group.slot, p, l); });
}

static Metadata state_metadata(const TrainerState& state) {
    return {{"step", std::to_string(state.step)}, {"tokens", std::to_string(state.tokens)}};
}

int64_t checkpoint_bytes(const ParamLayout& layout, const CheckpointFormat& format) {
    const Metadata metadata = state_metadata({});
    const int64_t others = 256 << 10;  // configuration files, trainer.json, directory and metadata
    const int64_t tokenizer = 128 * int64_t(layout.config.V);
    return tensors_bytes(layout, {model_group(format)}, metadata) +
           tensors_bytes(layout, optimizer_groups(format), metadata) + others + tokenizer;
}

// The checksum in trainer.json is that of the file's other values.
static std::string checksum_of_state(Json state) {
    state.erase("xxh3_64");
    const std::string text = json_text(state);
    return hex(XXH3_64bits(text.data(), text.size()));
}

static std::string state_json(const TrainerState& state, const std::map<std::string, FileSum>& files) {
    Json list;
    for (const auto& [name, sum] : files) list[name] = {{"size", sum.size}, {"xxh3_64", hex(sum.xxh3)}};
    Json out = {{"best_loss", state.best_loss}, {"best_step", state.best_step},
                {"data", state.data},           {"files", list},
                {"format", format_version},     {"health", state.health},
                {"options", state.options},     {"position", state.position},
                {"seed", state.seed},           {"step", state.step},
                {"tokens", state.tokens},       {"val_loss", state.val_loss},
                {"val_step", state.val_step}};
    out["xxh3_64"] = checksum_of_state(out);
    return json_file(out);
}

// Writes and syncs all files of the checkpoint into dir.
static void write_files(const std::string& dir, const SaveOptions& options, const ParamLayout& layout,
                        const TensorView& view, const TrainerState& state) {
    HFConfig config = options.config;
    config.model = layout.config;
    const Metadata metadata = state_metadata(state);
    std::map<std::string, FileSum> files;
    const auto text = [&](const char* name, const std::string& content) {
        files[name] = write_file(dir + "/" + name, content);
    };
    const auto tensors = [&](const char* name, const TensorGroups& groups) {
        files[name] = write_tensors(dir + "/" + name, layout, groups, view, metadata);
    };
    text("config.json", hf_config_json(config, options.format.bf16_weights ? "bfloat16" : "float32"));
    if (!config.generation.empty()) text("generation_config.json", config.generation);
    tensors("model.safetensors", {model_group(options.format)});
    tensors("optimizer.safetensors", optimizer_groups(options.format));
    if (options.write_tokenizer) options.write_tokenizer(dir);
    for (const std::string& name : list_directory(dir)) {
        if (files.count(name) || is_directory(dir + "/" + name)) continue;  // chat templates in folders are synced
        sync_path(dir + "/" + name);
        files[name] = checksum_file(dir + "/" + name);
    }
    if (!options.model_card.empty()) write_file(dir + "/README.md", options.model_card);
    text("trainer.json", state_json(state, files));
    sync_path(dir);
}

// ---- saving

static void check_free_space(const std::string& output, int64_t needed) {
    const int64_t free = free_bytes(output);
    if (needed > free)
        fail(EXIT_IO,
             "%s: a checkpoint needs %s, but only %s are free; free %s more, or move the directory to a larger disk",
             output.c_str(), human_bytes(needed).c_str(), human_bytes(free).c_str(),
             human_bytes(needed - free).c_str());
}

// Renames later directories: they belong to an abandoned run, and a resume must not take them for the newest.
static void set_aside_later(const std::string& output, int64_t step, const Warn& warn) {
    for (const auto& [later, dir] : list_checkpoints(output)) {
        if (later <= step) continue;
        std::string aside = dir + ".stale";
        for (int i = 2; path_exists(aside); i++) aside = format("%s.stale%d", dir.c_str(), i);
        rename_path(dir, aside);
        if (warn) warn(format("%s: belongs to a later step than the run's; renamed to %s", dir.c_str(), aside.c_str()));
    }
}

// Renames tmp to dir. At every moment the old or the new directory has the name `dir`.
static void put_in_place(const std::string& tmp, const std::string& dir, const Warn& warn) {
    path_exists(dir) ? exchange_paths(tmp, dir) : rename_path(tmp, dir);
    sync_path(parent_directory(dir));
    try_to("the replaced checkpoint was not deleted", warn, [&] { remove_tree(tmp); });
}

// Applies KeepRules after the save of `step`.
static void delete_older(const std::string& output, int64_t step, const KeepRules& keep, const Warn& warn) {
    const std::string best = keep.best ? best_checkpoint(output) : "", best_file = output + "/best";
    if (best.empty()) unlink(best_file.c_str());
    if (!best.empty())
        try_to("the file best does not name the best checkpoint", warn,
               [&] { replace_file(best_file, best.substr(output.size() + 1) + "\n"); });
    int kept = 0;
    for (const auto& [older, dir] : list_checkpoints(output)) {
        const bool newest = keep.newest == 0 || kept++ < keep.newest;
        const bool every = keep.every > 0 && older % keep.every == 0;
        if (newest || every || dir == best || older >= step) continue;
        try_to("an old checkpoint was not deleted", warn, [&dir = dir] {
            rename_path(dir, dir + ".tmp");  // a partly deleted checkpoint must not have a checkpoint's name
            remove_tree(dir + ".tmp");
        });
    }
}

std::string save_checkpoint(const SaveOptions& options, const ParamLayout& layout, const TensorView& view,
                            const TrainerState& state) {
    const std::string dir = checkpoint_directory(options.output, state.step), tmp = dir + ".tmp";
    make_directories(options.output);
    remove_leftovers(options.output);  // a save that failed may have left files
    check_free_space(options.output, checkpoint_bytes(layout, options.format));
    try {
        make_directories(tmp);
        write_files(tmp, options, layout, view, state);
        set_aside_later(options.output, state.step, options.warn);
        put_in_place(tmp, dir, options.warn);
    } catch (...) {
        try_to("", nullptr, [&] { remove_tree(tmp); });  // frees the space
        throw;
    }
    try_to("the checkpoint is saved, but the file latest does not name it", options.warn,
           [&] { replace_file(options.output + "/latest", step_name(state.step) + "\n"); });
    try_to("no old checkpoint was deleted", options.warn,
           [&] { delete_older(options.output, state.step, options.keep, options.warn); });
    return dir;
}

// ---- verifying

[[noreturn]] static void bad_state(const std::string& path, const std::string& what) {
    fail(EXIT_BAD_DATA, "%s: %s; the checkpoint is damaged", path.c_str(), what.c_str());
}

// Reads trainer.json and verifies its own checksum.
static Json read_state_json(const std::string& dir) {
    const std::string path = dir + "/trainer.json";
    check_directory(dir);
    if (!path_exists(path))
        fail(EXIT_NO_INPUT, "%s: is not a checkpoint of a run: it has no trainer.json%s", dir.c_str(),
             path_exists(dir + "/config.json") ? "; give it with --init to start from its weights" : "");
    const Json state = read_json_object(path, max_state_bytes);
    if (state["xxh3_64"] != checksum_of_state(state)) bad_state(path, "its checksum does not match");
    const Json& version = state["format"];
    if (version != format_version)
        fail(EXIT_BAD_DATA, "%s: has format %s, but this program reads format %d", path.c_str(),
             printable(json_text(version)).c_str(), format_version);
    return state;
}

// Verifies one file against `files`, the list in trainer.json.
static void verify_file(const std::string& dir, const std::string& name, const Json& files,
                        const VerifyProgress& progress) {
    const std::string file = dir + "/" + name;
    const Json& sum = files[name];
    if (!is_file_name(name) || sum.type != Json::object)
        bad_state(dir + "/trainer.json", "its list of files cannot be read");
    if (!path_exists(file)) bad_state(file, "is missing");
    const Json &size = sum["size"], &hash = sum["xxh3_64"];
    // Compared first, because the checksum of a file that has grown may take hours.
    if (const int64_t bytes = InputFile(file).size; size != bytes)
        bad_state(file, format("has %s bytes, not %s", with_commas(bytes).c_str(), json_text(size).c_str()));
    if (hash != hex(checksum_file(file, progress).xxh3)) bad_state(file, "its checksum does not match what was saved");
}

// Returns the list of files in trainer.json.
static Json read_file_list(const std::string& dir) {
    const std::string path = dir + "/trainer.json";
    const Json files = read_state_json(dir)["files"];
    if (files.type != Json::object) bad_state(path, "it has no list of files");
    for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors"})
        if (!files.contains(name)) bad_state(path, format("its list of files lacks %s", name));
    return files;
}

void verify_checkpoint(const std::string& dir, const VerifyProgress& progress) {
    const Json files = read_file_list(dir);
    for (const auto& [name, sum] : files.members) verify_file(dir, name, files, progress);
}

// ---- finding

// Whether transformers has saved a model over the checkpoint: its config.json then has a version, and no other has one.
static bool is_replaced(const std::string& dir) {
    const std::string config = dir + "/config.json";
    return path_exists(dir + "/trainer.json") && path_exists(config) && !is_directory(config) &&
           read_file(config, max_state_bytes).find("\"transformers_version\"") != std::string::npos;
}

FoundCheckpoint find_latest(const std::string& output, const VerifyProgress& progress) {
    FoundCheckpoint out;
    for (const auto& [step, dir] : list_checkpoints(output)) {
        ENSURE(!is_replaced(dir),
               "%s: transformers has saved a model over this checkpoint, and the optimizer's state does not belong to "
               "its weights; start a new run from it with --init in another --output, or move it away to resume from "
               "an older checkpoint",
               dir.c_str());
        try {
            verify_checkpoint(dir, progress);
            out.dir = dir;
            return out;
        } catch (const Error& error) {
            out.damaged.push_back(error.what());
        }
    }
    if (out.damaged.empty()) return out;
    std::string all;
    for (const std::string& damaged : out.damaged) all += damaged + "; ";
    fail(EXIT_BAD_DATA,
         "%s: none of its checkpoints is intact: %srestore one from a copy, or start in another --output",
         output.c_str(), all.c_str());
}

bool holds_model(const std::string& dir) {
    return path_exists(dir + "/config.json") &&
           (path_exists(dir + "/model.safetensors") || path_exists(dir + "/model.safetensors.index.json"));
}

// Returns the folder in `given` that other programs name a model by: the snapshot of a folder of the Hub's cache, or
// the newest checkpoint-N of transformers' Trainer; else `given`.
static std::string model_folder(const std::string& given) {
    if (path_exists(given + "/config.json")) return given;
    if (const std::string main = given + "/refs/main"; path_exists(main)) {
        const std::string hash = read_file(main, 256);
        const std::string snapshot = given + "/snapshots/" + hash.substr(0, hash.find('\n'));
        if (path_exists(snapshot)) return snapshot;
    }
    if (path_exists(given + "/snapshots"))
        fail(EXIT_NO_INPUT,
             "%s: refs/main of this folder of the Hub's cache names no snapshot; name one of %s/snapshots",
             given.c_str(), given.c_str());
    int64_t newest = -1, step = 0;
    for (const std::string& name : list_directory(given))
        if (sscanf(name.c_str(), "checkpoint-%" SCNd64, &step) == 1 && name == format("checkpoint-%" PRId64, step))
            newest = std::max(newest, step);
    return newest < 0 ? given : format("%s/checkpoint-%" PRId64, given.c_str(), newest);
}

FoundCheckpoint find_model(const std::string& given, const VerifyProgress& progress) {
    check_directory(given);
    const std::string path = model_folder(given);
    check_directory(path);
    const auto checkpoints = list_checkpoints(path);
    ENSURE(checkpoints.empty() || !holds_model(path),
           "%s holds both a model and the checkpoints of a run; name the checkpoint (%s), or move config.json and "
           "the model's other files to another directory",
           path.c_str(), checkpoints.begin()->second.c_str());
    const std::string newest = checkpoints.empty() ? path : checkpoints.begin()->second;
    if (is_replaced(newest)) return {newest, {}, true};
    if (!checkpoints.empty()) return find_latest(path, progress);
    if (path_exists(path + "/trainer.json")) {
        const Json files = read_file_list(path);
        for (const char* name : {"config.json", "model.safetensors"}) verify_file(path, name, files, progress);
    }
    if (path_exists(path + "/config.json") || path_exists(path + "/adapter_config.json")) return {path, {}};
    if (path_exists(path + "/run.toml"))
        fail(EXIT_NO_INPUT, "%s: this run has saved no checkpoint yet (--checkpoint-every)", path.c_str());
    const std::vector<std::string> names = list_directory(path);
    const auto is_read = [](const std::string& name) { return name.ends_with(".safetensors"); };
    const std::string advice = std::ranges::any_of(names, is_read)
                                   ? "; copy config.json and the tokenizer's files of the model into it"
                                   : name_other_weights(names);
    fail(EXIT_NO_INPUT,
         "%s: is neither a Hugging Face directory (no config.json) nor the output of a run (no step_*)%s", path.c_str(),
         advice.c_str());
}

// ---- loading

TrainerState read_trainer_state(const std::string& dir) {
    const std::string path = dir + "/trainer.json";
    const Json state = read_state_json(dir);
    const auto count = [&](const char* name, uint64_t max) {
        const uint64_t value = state.at(name).get<uint64_t>();
        if (value > max)
            bad_state(path, format("%s is %llu, which is impossible", name, static_cast<unsigned long long>(value)));
        return int64_t(value);
    };
    try {
        TrainerState out;
        out.step = count("step", std::numeric_limits<int>::max() - 1);  // the optimizer counts steps from 1 in an int
        out.position = count("position", max_count);
        out.tokens = count("tokens", max_count);
        out.seed = count("seed", std::numeric_limits<uint64_t>::max());
        out.val_loss = state.at("val_loss").type == Json::null ? NAN : state.at("val_loss").get<double>();
        if (state.contains("val_step") && state["val_step"] != -1) out.val_step = count("val_step", uint64_t(out.step));
        if (state.contains("best_step") && state["best_step"] != -1) {
            out.best_step = count("best_step", uint64_t(out.step));
            out.best_loss = state.at("best_loss").type == Json::null ? INFINITY : state.at("best_loss").get<double>();
        }
        out.options = state.at("options");
        if (out.options.type != Json::object) throw JsonError("is no object");
        out.data = state.at("data");
        out.health = state["health"];
        return out;
    } catch (const JsonError&) {
        bad_state(path, "a value is missing or of the wrong type");
    }
}

bool same_validation(const TrainerState& a, const TrainerState& b) {
    return a.data["val"] == b.data["val"] && a.options["val-tokens"] == b.options["val-tokens"];
}

std::string best_checkpoint(const std::string& output) {
    std::string best;
    double lowest = std::numeric_limits<double>::infinity();
    std::optional<TrainerState> newest;
    for (const auto& [step, dir] : list_checkpoints(output))
        try_to("", nullptr, [&, &dir = dir] {  // a damaged checkpoint is not the best
            const TrainerState state = read_trainer_state(dir);
            if (!newest) newest = state;
            if (!same_validation(state, *newest)) return;
            if (state.val_step != state.step || !(state.val_loss <= lowest)) return;
            lowest = state.val_loss;
            best = dir;
        });
    return best;
}

// Muon's runs save no second moments of matrices. A run that goes on with AdamW begins with one value of v for a whole
// matrix: so many times the mean of m^2. Muon's m is a mean of gradients with weights of 0.05 times 0.95^n: where noise
// outweighs their mean, its variance is 1/39 of theirs. v forgets this value with its half-life of 14 steps.
constexpr double MUON_SQUARES = (1 + 0.95) / (1 - 0.95);

TrainerState load_checkpoint(const std::string& dir, const ParamLayout& layout, const TensorWriter& write) {
    TrainerState state = read_trainer_state(dir);
    const Safetensors model = open_safetensors(dir + "/model.safetensors");
    const Safetensors optimizer = open_safetensors(dir + "/optimizer.safetensors");
    const bool has_master = optimizer.find("master.transformer.wte.weight");
    if (!has_master) read_tensors(model, model_group({}), layout, write);
    state.by_muon = !optimizer.find("v.transformer." + hf_name(qkvw, 0));
    std::vector<float> squares;
    const TensorWriter write_both = [&](const float* host, Slot slot, Param p, int l) {
        write(host, slot, p, l);
        if (!state.by_muon || slot != FIRST_MOMENT || !is_layer_matrix(p)) return;
        const int64_t size = layout.size(p);
        const double sum = std::transform_reduce(host, host + size, host, 0.0);
        squares.assign(size_t(size), float(sum / double(size) * MUON_SQUARES));
        write(squares.data(), SECOND_MOMENT, p, l);
    };
    for (const auto& group : optimizer_groups({has_master, {}, state.by_muon}))
        read_tensors(optimizer, group, layout, write_both);
    const std::string& dtype = optimizer.find("m.transformer.wte.weight")->dtype;
    state.moments = dtype == "U8" ? MomentDtype::block8 : dtype == "BF16" ? MomentDtype::bf16 : MomentDtype::fp32;
    return state;
}
