// verify.cpp: the command `verify`: checks that checkpoints are as they were saved, and that Hugging Face directories
// can be read.
#include <algorithm>
#include <set>

#include "base/files.h"
#include "base/terminal.h"
#include "checkpoint/checkpoint.h"
#include "commands/commands.h"

struct Verification {
    bool quiet = false;
    int intact = 0;
    std::vector<Error> failures;
    ProgressLine progress;

    bool shows_progress() const { return !quiet && progress.due(); }
    void print(const std::string& line) {
        progress.clear();
        if (!quiet) print_stdout(message_text(line) + "\n");
    }
};

// Returns a description of the checkpoint.
static std::string check_checkpoint(Verification& v, const std::string& dir) {
    if (!path_exists(dir + "/trainer.json"))
        fail(EXIT_BAD_DATA, "%s/trainer.json: is missing; the checkpoint is damaged", dir.c_str());
    const VerifiedFiles found = verify_checkpoint(dir, [&](const std::string& file, int64_t done, int64_t of) {
        if (v.shows_progress())
            v.progress.show(format("%s: %s of %s", file.c_str(), human_bytes(done).c_str(), human_bytes(of).c_str()));
    });
    read_trainer_state(dir);  // refuses values that are impossible, although the checksum is right
    return format("%d files, %s, intact", found.files, human_bytes(found.bytes).c_str());
}

// Returns a description of the Hugging Face directory.
static std::string check_weights(Verification& v, const std::string& dir) {
    const ParamLayout layout(read_hf_config(dir).model);
    int64_t all = 0, read = 0;
    for_each_tensor(layout, [&](Param, int) { all++; });
    load_weights(dir, layout, [&](const float*, Slot, Param, int) {
        read++;
        if (v.shows_progress())
            v.progress.show(format("%s: %lld of %lld tensors", dir.c_str(), static_cast<long long>(read),
                                   static_cast<long long>(all)));
    });
    return format("%lld tensors, readable and finite; a Hugging Face directory has no checksums",
                  static_cast<long long>(all));
}

// Prints a line about `dir`. Returns false if an active run deleted it meanwhile.
static bool check_directory_with(Verification& v, const std::string& dir,
                                 std::string (*check)(Verification& v, const std::string& dir)) {
    std::string found = "damaged";
    try {
        found = check(v, dir);
        v.intact++;
    } catch (const Error& error) {
        if (is_deleted(dir)) return false;
        v.failures.push_back(error);
    }
    v.print(dir + ": " + found);
    return true;
}

// Checks the checkpoints in a run's OUTPUT, oldest first. Those that an active run deletes meanwhile are left out; it
// has saved newer ones, which are checked too.
static void check_run(Verification& v, const std::string& output) {
    std::set<std::string> checked;
    for (int i = 0; i < READ_ATTEMPTS; i++) {
        std::vector<std::string> dirs = list_checkpoints(output);
        std::reverse(dirs.begin(), dirs.end());
        bool all = true;
        for (const std::string& dir : dirs) {
            if (checked.contains(dir)) continue;
            if (check_directory_with(v, dir, check_checkpoint))
                checked.insert(dir);
            else
                all = false;
        }
        if (all && !checked.empty()) return;
    }
    if (checked.empty()) refuse_deleted(output);
}

static void check_path(Verification& v, const std::string& path) {
    check_directory(path);
    const bool checkpoint = path_exists(path + "/trainer.json") || path_exists(path + "/optimizer.safetensors");
    if (checkpoint || path_exists(path + "/config.json"))
        return read_from(path, [&] {
            if (!check_directory_with(v, path, checkpoint ? check_checkpoint : check_weights)) check_directory(path);
        });
    if (list_checkpoints(path).empty()) refuse_without_model(path);
    check_run(v, path);
}

int run_verify(const Options& o) {
    Verification v;
    v.quiet = o.quiet;
    for (const std::string& path : o.inputs) {
        try {
            check_path(v, path);
        } catch (const Error& error) {
            v.failures.push_back(error);
        }
    }
    v.progress.clear();
    if (v.failures.empty()) return 0;
    if (v.failures.size() == 1) throw v.failures[0];
    std::vector<std::string> items;
    int exit_code = v.failures[0].exit_code;
    for (const Error& error : v.failures) {
        items.push_back(error.what());
        exit_code = std::min(exit_code, error.exit_code);  // a damaged file (65) before a missing directory (66)
    }
    const size_t all = items.size() + size_t(v.intact);
    throw ListError(exit_code, format("%zu of %zu are not intact:", items.size(), all), items);
}
