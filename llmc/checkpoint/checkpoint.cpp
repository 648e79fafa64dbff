#include "checkpoint/checkpoint.h"

#include <nlohmann/json.hpp>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>

#include "base/files.h"
#include "base/json.h"
#include "base/print.h"
#include "checkpoint/safetensors.h"

using nlohmann::json;

constexpr int format_version = 1;
constexpr int64_t max_state_bytes = 16 << 20;    // the largest trainer.json that is read
constexpr int64_t max_files = 13;                // created by a save: 10 files, their directory, latest.tmp and best
constexpr int64_t max_count = int64_t(1) << 60;  // above any run's counts; adding a run's steps cannot overflow

// --- saving ---

static const std::vector<TensorGroup> model_groups = {{WEIGHTS, "transformer."}};

static std::vector<TensorGroup> optimizer_groups(const CheckpointFormat& format) {
    std::vector<TensorGroup> out;
    if (format.bf16_weights) out.push_back({WEIGHTS, "master.transformer."});
    for (size_t i = 0; i < format.state.size(); i++) out.push_back({Slot(1 + i), format.state[i] + ".transformer."});
    return out;
}

static Metadata state_metadata(const TrainerState& state) {
    return {{"step", std::to_string(state.step)}, {"tokens", std::to_string(state.tokens)}};
}

int64_t checkpoint_bytes(const ParamLayout& layout, const CheckpointFormat& format) {
    const Metadata metadata = state_metadata({});
    const int64_t others = 256 << 10;  // configuration files, trainer.json, directory and metadata
    const int64_t tokenizer = 128 * int64_t(layout.config.V);
    return safetensors_bytes(list_tensors(layout, model_groups, format.bf16_weights ? "BF16" : "F32"), metadata) +
           safetensors_bytes(list_tensors(layout, optimizer_groups(format), "F32"), metadata) + others + tokenizer;
}

// The checksum in trainer.json is that of the file's other values.
static uint64_t checksum_of_state(json state) {
    state.erase("xxh3_64");
    const std::string text = state.dump();
    return XXH3_64bits(text.data(), text.size());
}

static std::string sealed(json state) {
    state["xxh3_64"] = format("%016" PRIx64, checksum_of_state(state));
    return state.dump(2) + "\n";
}

static std::string state_json(const TrainerState& state, const std::map<std::string, FileSum>& files) {
    json out = {{"format", format_version},
                {"step", state.step},
                {"position", state.position},
                {"tokens", state.tokens},
                {"seed", state.seed},
                {"val_loss", state.val_loss},
                {"val_step", state.val_step},
                {"options", parse_json(state.options, "the run's options")},
                {"data", parse_json(state.data, "the data's description")},
                {"health", parse_json(state.health, "the run's health")},
                {"extra", json::object()}};  // version 0.1.0 requires this key
    for (const auto& [name, sum] : files)
        out["files"][name] = {{"size", sum.size}, {"xxh3_64", format("%016" PRIx64, sum.xxh3)}};
    return sealed(out);
}

// --- directories ---

using Note = std::function<void(const std::string& line)>;

static std::string step_name(int64_t step) { return format("step_%06" PRId64, step); }

std::string checkpoint_directory(const std::string& output, int64_t step) { return output + "/" + step_name(step); }

// step_005000, or step_005000.replaced: the name of the old directory while a save replaces the same step.
struct StepDirectory {
    int64_t step;
    bool replaced;
    std::string name;
};

static std::vector<StepDirectory> list_steps(const std::string& output) {  // newest first
    std::vector<StepDirectory> out;
    if (!is_directory(output)) return out;
    for (const std::string& name : list_directory(output)) {
        int64_t step;
        if (!name.starts_with("step_")) continue;
        const char *digits = name.data() + 5, *end = name.data() + name.size();
        const auto [rest, error] = std::from_chars(digits, end, step);
        if (error != std::errc() || step < 0 || (rest != end && strcmp(rest, ".replaced") != 0)) continue;
        out.push_back({step, rest != end, name});
    }
    std::sort(out.begin(), out.end(), [](const StepDirectory& a, const StepDirectory& b) {
        return std::pair(-a.step, a.replaced) < std::pair(-b.step, b.replaced);
    });
    return out;
}

// Runs a step that can also be done later: an error becomes a note.
static void try_to(const char* what_fails, const Note& note, const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        note(format("%s: %s", what_fails, error.what()));
    }
}

// Removes the unfinished files and directories whose names begin with `prefix`. Calls `note` with a line for each that
// is removed, and `stuck` with a line for each that cannot be removed.
static void remove_unfinished(const std::string& output, const char* prefix, const Note& note, const Note& stuck) {
    for (const std::string& name : list_directory(output)) {
        if (!name.starts_with(prefix) || !name.ends_with(".tmp")) continue;
        try_to("a leftover of an interrupted save was not removed", stuck, [&] {
            remove_tree(output + "/" + name);
            note(format("%s/%s: removed, left behind by an interrupted save", output.c_str(), name.c_str()));
        });
    }
}

std::vector<std::string> remove_leftovers(const std::string& output) {
    std::vector<std::string> notes;
    const Note note = [&](const std::string& line) { notes.push_back(line); };
    if (!is_directory(output)) return notes;
    for (const char* prefix : {"step_", "latest", "best"}) remove_unfinished(output, prefix, note, note);
    for (const StepDirectory& found : list_steps(output)) {
        if (!found.replaced) continue;
        const std::string aside = output + "/" + found.name, dir = checkpoint_directory(output, found.step);
        const bool superseded = path_exists(dir);
        try_to("a leftover of an interrupted save was not removed", note, [&] {
            superseded ? remove_tree(aside) : rename_path(aside, dir);
            note(format("%s: %s, left behind by an interrupted save", aside.c_str(),
                        superseded ? "removed" : "renamed back"));
        });
    }
    return notes;
}

// A temporary name for a directory that is being written or deleted. Removes what an interrupted save left under that
// name, or, if that fails, chooses another name.
static std::string temporary_name(const std::string& dir) {
    std::string tmp = dir + ".tmp";
    for (int i = 2; path_exists(tmp); i++) {
        try {
            remove_tree(tmp);
        } catch (const Error&) {
            tmp = format("%s.%d.tmp", dir.c_str(), i);
        }
    }
    return tmp;
}

// Writes and syncs all files of the checkpoint into dir. Returns their total size in bytes.
static int64_t write_files(const std::string& dir, const SaveOptions& options, const ParamLayout& layout,
                           const TensorView& view, const TrainerState& state) {
    const bool bf16_weights = options.format.bf16_weights;
    const HFConfig config = {layout.config, options.end_of_text};
    const Metadata metadata = state_metadata(state);
    std::map<std::string, FileSum> files;
    const auto text = [&](const char* name, const std::string& content) {
        files[name] = write_file(dir + "/" + name, content);
    };
    const auto tensors = [&](const char* name, const std::vector<TensorGroup>& groups, const char* dtype) {
        files[name] = write_tensors(dir + "/" + name, layout, groups, dtype, view, metadata);
    };
    text("config.json", hf_config_json(config, bf16_weights ? "bfloat16" : "float32"));
    text("generation_config.json", hf_generation_config_json(config));
    tensors("model.safetensors", model_groups, bf16_weights ? "BF16" : "F32");
    tensors("optimizer.safetensors", optimizer_groups(options.format), "F32");
    if (options.write_tokenizer) options.write_tokenizer(dir);
    for (const std::string& name : list_directory(dir)) {
        if (files.count(name)) continue;
        sync_file(dir + "/" + name);
        files[name] = checksum_file(dir + "/" + name);
    }
    text("trainer.json", state_json(state, files));
    sync_directory(dir);
    int64_t bytes = 0;
    for (const auto& [name, sum] : files) bytes += sum.size;
    return bytes;
}

// Renames the directories of later steps. They belong to an abandoned run that had continued from an earlier step here,
// and a resume must not take them for the newest.
static void set_aside_later(const std::string& output, int64_t step, const Note& note) {
    for (const StepDirectory& found : list_steps(output)) {
        if (found.step <= step) continue;
        const std::string dir = output + "/" + found.name;
        std::string aside = dir + ".stale";
        for (int i = 2; path_exists(aside); i++) aside = format("%s.stale%d", dir.c_str(), i);
        rename_path(dir, aside);
        note(
            format("%s: belongs to a later step than this run's, so it was renamed to %s", dir.c_str(), aside.c_str()));
    }
}

// Renames the directory before deleting it, so that a partly deleted checkpoint never has a checkpoint's name.
static void delete_checkpoint(const std::string& dir) {
    const std::string tmp = temporary_name(dir);
    rename_path(dir, tmp);
    remove_tree(tmp);
}

// Renames tmp to dir. At every moment the old or the new directory has a name that find_latest recognizes.
static void put_in_place(const std::string& tmp, const std::string& dir, const Note& warn) {
    const std::string aside = dir + ".replaced";
    if (path_exists(dir)) {
        if (path_exists(aside))
            try_to("a leftover of an earlier save was not deleted", warn, [&] { delete_checkpoint(aside); });
        rename_path(dir, aside);
    }
    rename_path(tmp, dir);
    sync_directory(parent_directory(dir));
    try_to("the replaced checkpoint was not deleted", warn, [&] { remove_tree(aside); });
}

static bool is_kept_forever(const StepDirectory& found, const KeepRules& keep) {
    return keep.every > 0 && found.step % keep.every == 0;
}

// Directories, newest first, that a save of this step makes superfluous: those that no rule keeps, and an older save of
// the same step. The new checkpoint counts as one of the newest.
static std::vector<std::string> superfluous(const std::string& output, int64_t step, const KeepRules& keep) {
    std::vector<std::string> out;
    if (keep.newest == 0) return out;
    const std::string best = keep.best ? best_checkpoint(output) : "";
    int kept = 1;
    for (const StepDirectory& found : list_steps(output)) {
        const std::string dir = output + "/" + found.name;
        if (found.step > step || (found.step < step && kept++ < keep.newest)) continue;
        if (dir != best && !is_kept_forever(found, keep)) out.push_back(dir);
    }
    return out;
}

// The superfluous directories that may be deleted before the save: all but the newest one that verifies (`whole`), in
// case the save fails.
static std::vector<std::string> deletable(const std::string& output, int64_t step, const KeepRules& keep,
                                          const std::string& whole) {
    std::vector<std::string> out = superfluous(output, step, keep);
    std::erase(out, whole);
    return out;
}

static bool succeeds(const std::function<void()>& check) {
    try {
        check();
        return true;
    } catch (const Error&) {
        return false;
    }
}

static int64_t files_after(int64_t free, const std::vector<std::string>& deleted) {
    for (const std::string& dir : deleted) succeeds([&] { free += 1 + int64_t(list_directory(dir).size()); });
    return free;
}

// A directory that cannot be read counts as zero bytes.
static int64_t room_after(int64_t free, const std::vector<std::string>& deleted) {
    for (const std::string& dir : deleted) succeeds([&] { free += bytes_on_disk(dir); });
    return free;
}

[[noreturn]] static void refuse_full_disk(const std::string& output, KeepRules keep, int64_t step, int64_t needed,
                                          const std::string& whole) {
    const int64_t free = free_bytes(output);
    keep.newest = keep.newest ? keep.newest - 1 : int(list_steps(output).size());
    while (keep.newest > 0 && room_after(free, deletable(output, step, keep, whole)) < needed) keep.newest--;
    const std::string other_keep = keep.newest > 0 ? format("--keep %d would make room, or ", keep.newest) : "";
    fail(EXIT_IO,
         "%s: a checkpoint needs %s, but only %s are free; %sfree %s more, or move the directory to a larger disk",
         output.c_str(), human_bytes(needed).c_str(), human_bytes(free).c_str(), other_keep.c_str(),
         human_bytes(needed - free).c_str());
}

void make_room(const std::string& output, const KeepRules& keep, int64_t step, int64_t needed, const Note& note) {
    if (needed <= free_bytes(output) && max_files <= free_files(output)) return;
    const std::string whole = find_latest(output).dir;
    std::vector<std::string> dirs = deletable(output, step, keep, whole);
    const auto deleting_helps = [&] {
        const int64_t free = free_bytes(output), files = free_files(output);
        return (free < needed && room_after(free, dirs) >= needed) ||
               (files < max_files && files_after(files, dirs) >= max_files);
    };
    while (deleting_helps()) {
        const std::string dir = dirs.back();
        dirs.pop_back();
        try_to("an old checkpoint was not deleted, although the disk is full", note, [&] {
            delete_checkpoint(dir);
            note(format("%s: deleted before the next save, because the disk is full (--keep %d)", dir.c_str(),
                        keep.newest));
        });
    }
    if (needed > free_bytes(output)) refuse_full_disk(output, keep, step, needed, whole);
    // Too few free files cause only a note, because some file systems report wrong counts.
    if (const int64_t files = free_files(output); files < max_files)
        note(format("%s: a checkpoint has up to %lld files, but only %lld more can be created there, of any size",
                    output.c_str(), static_cast<long long>(max_files), static_cast<long long>(files)));
}

// The path of the checkpoint that the file `latest` or `best` names; OUTPUT/ if the file cannot be read.
static std::string named_in(const std::string& output, const char* file) {
    std::string name;
    succeeds([&] { name = read_file(output + "/" + file, 1 << 10); });
    return output + "/" + name.substr(0, name.find('\n'));
}

static void delete_older(const std::string& output, int64_t step, const KeepRules& keep, const Note& warn) {
    // These files name older checkpoints if they could not be replaced.
    const std::string latest = named_in(output, "latest"), best = named_in(output, "best");
    for (const std::string& dir : superfluous(output, step, keep)) {
        if (dir == checkpoint_directory(output, step) || dir == latest || dir == best) continue;
        try_to("an old checkpoint was not deleted", warn, [&] { delete_checkpoint(dir); });
    }
}

// Without the rule there is no file, because it could name a checkpoint that was deleted.
static void name_best(const std::string& output, const KeepRules& keep) {
    const std::string path = output + "/best", best = keep.best ? best_checkpoint(output) : "";
    const std::string named = named_in(output, "best");
    // Only a file of this program is removed: a directory of this name belongs to the user.
    const bool ours = named.starts_with(output + "/step_");
    if (best.empty() && ours && (!keep.best || is_deleted(named))) remove_tree(path);
    if (!best.empty() && named != best) replace_file(path, best.substr(output.size() + 1) + "\n");
}

void apply_keep_rules(const std::string& output, const KeepRules& keep, int64_t step, const Note& warn) {
    try_to("the file best does not name the best checkpoint", warn, [&] { name_best(output, keep); });
    try_to("no old checkpoint was deleted", warn, [&] { delete_older(output, step, keep, warn); });
}

void for_each_read(const ParamLayout& layout, const CheckpointFormat& format,
                   const std::function<void(Slot slot, Param p, int l)>& f) {
    for (const std::vector<TensorGroup>& file : {model_groups, optimizer_groups(format)})
        for (const TensorGroup& group : file) for_each_tensor(layout, [&](Param p, int l) { f(group.slot, p, l); });
}

SavedCheckpoint save_checkpoint(const SaveOptions& options, const ParamLayout& layout, const TensorView& view,
                                const TrainerState& state) {
    const std::string name = step_name(state.step);
    SavedCheckpoint saved{checkpoint_directory(options.output, state.step), 0};
    const Note silent = [](const std::string&) {};
    const Note note = options.note ? options.note : silent, warn = options.warn ? options.warn : silent;
    make_directories(options.output);
    remove_unfinished(options.output, "step_", note, silent);  // of a save that could not remove it
    const std::string tmp = temporary_name(saved.dir);
    make_room(options.output, options.keep, state.step, checkpoint_bytes(layout, options.format), note);
    try {
        make_new_directory(tmp);
        saved.bytes = write_files(tmp, options, layout, view, state);
        set_aside_later(options.output, state.step, note);
        put_in_place(tmp, saved.dir, warn);
    } catch (const Error& error) {
        if (succeeds([&] { remove_tree(tmp); })) throw;  // removed, to free the space
        fail(error.exit_code, "%s; %s is left, until a later save or start removes it", error.what(), tmp.c_str());
    } catch (...) {
        succeeds([&] { remove_tree(tmp); });
        throw;
    }
    try_to("the checkpoint is saved, but the file latest does not name it", warn,
           [&] { replace_file(options.output + "/latest", name + "\n"); });
    apply_keep_rules(options.output, options.keep, state.step, warn);
    return saved;
}

// --- verifying ---

[[noreturn]] static void bad_state(const std::string& path, const std::string& what) {
    fail(EXIT_BAD_DATA, "%s: %s; the checkpoint is damaged", path.c_str(), what.c_str());
}

// Reads trainer.json and verifies its own checksum.
static json read_state_json(const std::string& dir) {
    const std::string path = dir + "/trainer.json";
    check_directory(dir);
    if (!path_exists(path))
        fail(EXIT_NO_INPUT, "%s: is not a checkpoint of a run: it has no trainer.json%s", dir.c_str(),
             path_exists(dir + "/config.json") ? "; give it with --init to start from its weights" : "");
    const json state = read_json_object(path, max_state_bytes);
    const json sum = state.value("xxh3_64", json());
    if (!sum.is_string() || sum.get<std::string>() != format("%016" PRIx64, checksum_of_state(state)))
        bad_state(path, "its checksum does not match");
    const json version = state.value("format", json());
    if (version != format_version)
        fail(EXIT_BAD_DATA, "%s: has format %s, but this program reads format %d", path.c_str(),
             printable(version.dump()).c_str(), format_version);
    return state;
}

// Verifies one file against `files`, the list in trainer.json. Returns its size.
static int64_t verify_file(const std::string& dir, const std::string& name, const json& files,
                           const VerifyProgress& progress = {}) {
    const std::string file = dir + "/" + name;
    const json sum = files.value(name, json());
    if (!is_file_name(name) || !sum.is_object()) bad_state(dir + "/trainer.json", "its list of files cannot be read");
    if (!path_exists(file)) fail(EXIT_BAD_DATA, "%s: is missing; the checkpoint is damaged", file.c_str());
    const json size = sum.value("size", json()), hash = sum.value("xxh3_64", json());
    // Compared first, because the checksum of a file that has grown may take hours. checksum_file refuses what is no
    // file.
    std::error_code no_file;
    const auto bytes = int64_t(std::filesystem::file_size(file, no_file));
    if (!no_file && size != bytes)
        bad_state(file, format("has %s bytes, not %s", with_commas(bytes).c_str(), size.dump().c_str()));
    const FileSum found = checksum_file(file, [&](int64_t done, int64_t of) {
        if (progress) progress(file, done, of);
    });
    if (hash != format("%016" PRIx64, found.xxh3)) bad_state(file, "its checksum does not match what was written");
    return found.size;
}

// Returns the list of files in trainer.json.
static json read_file_list(const std::string& dir) {
    const std::string path = dir + "/trainer.json";
    const json files = read_state_json(dir).value("files", json());
    if (!files.is_object()) bad_state(path, "it has no list of files");
    for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors"})
        if (!files.contains(name)) bad_state(path, format("its list of files lacks %s", name));
    return files;
}

VerifiedFiles verify_checkpoint(const std::string& dir, const VerifyProgress& progress) {
    const json files = read_file_list(dir);
    VerifiedFiles out = {1 + int(files.size()), InputFile(dir + "/trainer.json").size};
    for (const auto& [name, sum] : files.items()) out.bytes += verify_file(dir, name, files, progress);
    return out;
}

// Finds the newest checkpoint that verifies. Returns false if an active run deleted a checkpoint during the search.
static bool look_for_latest(const std::string& output, const VerifyProgress& progress, FoundCheckpoint& out) {
    for (const std::string& dir : list_checkpoints(output)) {
        try {
            verify_checkpoint(dir, progress);
            out.dir = dir;
            return true;
        } catch (const Error& error) {
            if (is_deleted(dir)) return false;
            out.damaged.push_back({dir, error.what()});
        }
    }
    return true;
}

FoundCheckpoint find_latest(const std::string& output, const VerifyProgress& progress) {
    for (int i = 0; i < READ_ATTEMPTS; i++) {
        FoundCheckpoint out;
        if (look_for_latest(output, progress, out)) return out;
    }
    refuse_deleted(output);
}

void refuse_deleted(const std::string& output) {
    fail(EXIT_NO_INPUT,
         "%s: a run deletes its checkpoints while they are read, %d times in a row; give that run a larger --keep",
         output.c_str(), READ_ATTEMPTS);
}

std::vector<std::string> list_checkpoints(const std::string& output) {
    std::vector<std::string> out;
    for (const StepDirectory& found : list_steps(output)) out.push_back(output + "/" + found.name);
    return out;
}

std::string newest_directory(const std::string& output) {
    const std::vector<std::string> all = list_checkpoints(output);
    return all.empty() ? "" : all[0];
}

// Refuses weights that differ from the saved ones. Without a readable list of checksums this function compares
// nothing and returns the reason. A directory without trainer.json is not a checkpoint, so there is nothing to compare.
static std::string verify_weights(const std::string& dir, const VerifyProgress& progress) {
    if (!path_exists(dir + "/trainer.json")) return "";
    json files;
    try {
        files = read_file_list(dir);
    } catch (const Error& error) {
        return error.what();
    }
    for (const char* name : {"config.json", "model.safetensors"}) verify_file(dir, name, files, progress);
    return "";
}

// Describes what --init can still read from a damaged checkpoint; empty: nothing.
static std::string what_is_left(const std::string& dir, const VerifyProgress& progress) {
    const bool readable = succeeds(
        [&] { load_weights(dir, ParamLayout(read_hf_config(dir).model), [](const float*, Slot, Param, int) {}); });
    if (!readable) return "";
    if (!succeeds([&] { read_file_list(dir); })) return "its weights can be read, but not verified";
    return succeeds([&] { verify_weights(dir, progress); }) ? "its weights are intact" : "";
}

FoundCheckpoint find_resumable(const std::string& output, const VerifyProgress& progress) {
    const FoundCheckpoint found = find_latest(output, progress);
    if (!found.dir.empty() || found.damaged.empty()) return found;
    std::string text, start;
    for (const DamagedCheckpoint& damaged : found.damaged) {
        const std::string left = what_is_left(damaged.dir, progress);
        if (start.empty() && !left.empty()) start = damaged.dir;
        text += damaged.what + (left.empty() ? "; " : "; " + left + "; ");
    }
    const bool denied = std::any_of(found.damaged.begin(), found.damaged.end(),
                                    [](const DamagedCheckpoint& damaged) { return is_denied(damaged.dir); });
    const std::string advice =
        denied          ? "this user may not read all files: change their permissions and try again"
        : start.empty() ? "restore one from a copy, or start anew in another --output"
                        : format("--init %s takes its weights alone; train then needs another --output", start.c_str());
    fail(EXIT_BAD_DATA, "%s: none of its checkpoints is intact: %s%s", output.c_str(), text.c_str(), advice.c_str());
}

bool holds_model(const std::string& dir) {
    return path_exists(dir + "/config.json") &&
           (path_exists(dir + "/model.safetensors") || path_exists(dir + "/model.safetensors.index.json"));
}

FoundCheckpoint find_model(const std::string& path, const VerifyProgress& progress) {
    check_directory(path);
    // A directory that may be searched but not listed can still hold a model.
    const bool may_list = access(path.c_str(), R_OK) == 0;
    const std::string newest = may_list ? newest_directory(path) : "";
    ENSURE(newest.empty() || !holds_model(path),
           "%s holds both a model and the checkpoints of a run; name the checkpoint (%s), or move config.json and "
           "the model's other files to another directory",
           path.c_str(), newest.c_str());
    if (newest.empty() && path_exists(path + "/config.json")) {
        FoundCheckpoint found{path, {}, ""};
        read_from(path, [&] { found.unverified = verify_weights(path, progress); });
        return found;
    }
    const FoundCheckpoint found = find_resumable(path, progress);
    if (found.dir.empty()) refuse_without_model(path);
    return found;
}

void refuse_without_model(const std::string& path) {
    if (path_exists(path + "/run.toml"))
        fail(EXIT_NO_INPUT, "%s: this run has saved no checkpoint yet (--checkpoint-every)", path.c_str());
    fail(EXIT_NO_INPUT, "%s: is neither a Hugging Face directory (no config.json) nor the output of a run (no step_*)",
         path.c_str());
}

// A step takes one window or more, and a window has one token or more. Nothing stricter holds for every checkpoint: a
// resume may change the batch, and version 0.1.0 let it change the sequence length.
static void check_counts(const std::string& path, const TrainerState& state) {
    const bool possible = state.step == 0 ? state.position == 0 && state.tokens == 0
                                          : state.step <= state.position && state.position <= state.tokens;
    if (!possible)
        bad_state(path, format("step %lld, position %lld and tokens %lld contradict each other",
                               static_cast<long long>(state.step), static_cast<long long>(state.position),
                               static_cast<long long>(state.tokens)));
}

TrainerState read_trainer_state(const std::string& dir) {
    const json state = read_state_json(dir);
    const auto refuse = [&](const char* name, const json& value) {
        bad_state(dir + "/trainer.json",
                  format("%s is %s, which is impossible", name, printable(value.dump()).c_str()));
    };
    const auto count = [&](const char* name, int64_t max) {
        const json& value = state.at(name);
        if (!value.is_number_integer() || value < 0 || value > max) refuse(name, value);
        return value.get<int64_t>();
    };
    try {
        TrainerState out;
        out.step = count("step", std::numeric_limits<int>::max() - 1);  // the optimizer counts steps from 1 in an int
        out.position = count("position", max_count);
        out.tokens = count("tokens", max_count);
        check_counts(dir + "/trainer.json", out);
        if (!state.at("seed").is_number_unsigned()) refuse("seed", state["seed"]);
        out.seed = state["seed"].get<uint64_t>();
        out.val_loss = state.at("val_loss").is_null() ? NAN : state.at("val_loss").get<double>();
        if (state.contains("val_step") && state["val_step"] != -1) out.val_step = count("val_step", out.step);
        out.options = json(state.at("options").get_ref<const json::object_t&>()).dump();  // throws if not an object
        out.data = state.at("data").dump();
        if (state.contains("health")) out.health = json(state["health"].get_ref<const json::object_t&>()).dump();
        return out;
    } catch (const json::exception&) {
        bad_state(dir + "/trainer.json", "a value is missing or of the wrong type");
    }
}

void set_val_loss(const std::string& dir, double val_loss) {
    if (is_link(dir)) fail(EXIT_CANNOT_CREATE, "%s: is a link, and nothing is written through it", dir.c_str());
    json state = read_state_json(dir);
    if (state["val_loss"] == val_loss && state["val_step"] == state["step"]) return;
    state["val_loss"] = val_loss;
    state["val_step"] = state["step"];
    replace_file(dir + "/trainer.json", sealed(state));
}

std::string best_checkpoint(const std::string& output) {
    std::string best;
    double lowest = std::numeric_limits<double>::infinity();
    for (const std::string& dir : list_checkpoints(output)) {
        TrainerState state;
        if (!succeeds([&] { state = read_trainer_state(dir); })) continue;
        if (state.val_step != state.step || !(state.val_loss <= lowest)) continue;
        lowest = state.val_loss;
        best = dir;
    }
    return best;
}

TrainerState load_checkpoint(const std::string& dir, const ParamLayout& layout,
                             const std::vector<std::string>& state_names, const TensorWriter& write) {
    TrainerState state = read_trainer_state(dir);
    const Safetensors model = open_safetensors(dir + "/model.safetensors");
    const Safetensors optimizer = open_safetensors(dir + "/optimizer.safetensors");
    const bool has_master = optimizer.find("master.transformer.wte.weight");
    if (!has_master) read_tensors(model, model_groups[0], layout, write);
    for (const TensorGroup& group : optimizer_groups({has_master, state_names}))
        read_tensors(optimizer, group, layout, write);
    return state;
}
