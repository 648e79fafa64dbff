// test_checkpoint_faults.cpp: tests that no fault during a save loses the previous checkpoint. The faults are a full
// disk, a limit on file sizes, a process killed or an error at any system call, and a power failure.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "support/faults.h"
#include "support/small_checkpoint.h"

namespace fs = std::filesystem;

// Checks that a save failed with the exit code `want`, left no files, and left the checkpoint of step 1 whole. A later
// save must succeed.
static void check_failed_save(const TemporaryDirectory& dir, int code, int want) {
    CHECK(code == want);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000001"});
    CHECK(holds(dir / "out/step_000001", 1));
    save(save_options(dir / "out"), 2);
    CHECK(holds(find_latest(dir / "out").dir, 2));
}

TEST_CASE("a save that exceeds the limit on file sizes fails and loses nothing") {
    for (int64_t limit : {100, 1000, 6000, 10'000}) {
        const TemporaryDirectory dir;
        save(save_options(dir / "out"), 1);
        const int code = in_child([&] {
            limit_file_size(limit);
            save(save_options(dir / "out"), 2);
            return 0;
        });
        check_failed_save(dir, code, EXIT_IO);
    }
}

TEST_CASE("a save on a disk that is full, or fills up during the save, fails and loses nothing") {
    for (bool full_at_start : {true, false}) {  // false: the tokenizer's files take the space that is free at first
        const TemporaryDirectory dir;
        const int failed = on_small_disk(dir.path, "1m", [&] {
            save(save_options(dir / "out"), 1);
            SaveOptions options = save_options(dir / "out");
            const auto fill = [](const std::string& path) {
                const int code = exit_code_of([&] {
                    OutputFile file(path);
                    const std::string block(4096, 'x');
                    for (;;) file.write(block.data(), 4096);
                });
                ENSURE(code == EXIT_IO, "filling the disk ended with exit code %d", code);
            };
            if (full_at_start) fill(dir / "ballast");
            if (!full_at_start) options.write_tokenizer = [&](const std::string& to) { fill(to + "/vocab.json"); };
            const std::string error = refusal([&] { save(options, 2); });
            if (!error.starts_with("74 ")) return 1;
            if (error.find(full_at_start ? "a checkpoint needs" : "No space left on device") == std::string::npos)
                return 2;
            if (list_directory(dir / "out") != Names{"latest", "step_000001"}) return 3;
            if (!holds(find_latest(dir / "out").dir, 1)) return 4;
            remove_tree(dir / "ballast");
            save(save_options(dir / "out"), 3);
            return holds(find_latest(dir / "out").dir, 3) ? 0 : 5;
        });
        CHECK(failed == 0);
    }
}

static bool is_below(const std::string& path, const std::string& dir) { return path.starts_with(dir + "/"); }

// Describes what a power failure could lose after these changes of files. Empty if it could lose nothing. The rules:
//   * a file or directory is synced with all of its contents before it is renamed;
//   * a rename is synced before another file is renamed to `latest`, and before anything but a .tmp is removed: what is
//     removed may be the only copy on disk;
//   * at the end everything is synced, except for removals.
static std::string lost_by_power_failure(const std::vector<FileChange>& changes, const std::string& below) {
    // Not yet synced: files with new bytes, directories with new names, and renamed files.
    std::set<std::string> files, names, renames;
    const auto find = [](const std::set<std::string>& paths, const std::string& at) {
        for (const std::string& path : paths)
            if (path == at || is_below(path, at)) return path;
        return std::string();
    };
    for (const FileChange& change : changes) {
        const std::string &path = change.path, parent = parent_directory(path);
        if (!is_below(path, below) && path != below) continue;
        switch (change.kind) {
            case FileChange::create:
                names.insert(parent);
                break;
            case FileChange::write:
                files.insert(path);
                break;
            case FileChange::sync:
                files.erase(path), names.erase(path), renames.erase(path);
                break;
            case FileChange::rename:
                if (const std::string file = find(files, path); !file.empty())
                    return file + ": renamed before it was synced";
                if (const std::string dir = find(names, path); !dir.empty())
                    return dir + ": renamed before the names in it were synced";
                if (change.to.ends_with("/latest") && !renames.empty())
                    return *renames.begin() +
                           ": `latest` was replaced before the new name in this directory was synced";
                names.insert(parent), names.insert(parent_directory(change.to));
                renames.insert(parent_directory(change.to));
                break;
            case FileChange::remove:
                if (path.find(".tmp") == std::string::npos && !renames.empty())
                    return path + ": removed before the new name in " + *renames.begin() + " was synced";
                files.erase(path), names.erase(path);
                break;
        }
    }
    if (!files.empty()) return *files.begin() + ": never synced";
    if (!names.empty()) return *names.begin() + ": the names in it were never synced";
    return "";
}

TEST_CASE("files are synced before their final name, and the name before old files are removed") {
    const TemporaryDirectory dir;
    const auto check = [&](int64_t step, const std::string& output, size_t least) {
        std::vector<FileChange> changes;
        const FaultResult result = with_fault([&] { return save(save_options(output, 2), step), 0; }, -1, 0, &changes);
        if (result.code == CHILD_SKIPPED || (result.code == 0 && changes.empty())) {
            skip_case("tracing is not permitted, or changes of files are not recorded here");
            return;
        }
        CAPTURE(step);
        CHECK(result.code == 0);
        CHECK(std::count_if(changes.begin(), changes.end(),
                            [](const FileChange& c) { return c.kind == FileChange::sync; }) >= int64_t(least));
        CHECK(lost_by_power_failure(changes, dir.path) == "");
    };
    // The syncs are of 7 files, their directory, the output, `latest`, the output again, and the parents of a new
    // output.
    check(1, dir / "out", 12);
    check(1, dir / "new/runs/out", 14);  // its parents are new as well
    check(2, dir / "out", 11);
    check(2, dir / "out", 11);  // replaces the checkpoint of step 2
    check(1, dir / "out", 11);  // renames the later checkpoint to .stale
}

// Saves `step` into a copy of the output `before`, whose newest checkpoint is `old_step`, with a fault at each system
// call in turn. Afterwards the newest checkpoint must be whole, and must be the old or the new one. A new run must be
// able to clean up and save.
static void check_every_call(const std::string& before, int64_t old_step, int64_t step, int error) {
    const auto save_new = [step](const std::string& output) {  // seed 99: no checkpoint of `before` has it
        const FlatState state(small_model, 99);
        save_checkpoint(save_options(output, 1), state.layout, state.view(), trainer_state(step));
    };
    int old_ones = 0, new_ones = 0;
    const FaultTest test = {
        .least_calls = 50,
        .prepare = [&](const TemporaryDirectory& dir) { fs::copy(before, dir / "out", fs::copy_options::recursive); },
        .run = [&](const TemporaryDirectory& dir) { save_new(dir / "out"); },
        .check =
            [&](const TemporaryDirectory& dir, const FaultResult& result) {
                const FoundCheckpoint found = find_latest(dir / "out");
                REQUIRE(found.dir != "");
                CHECK(found.damaged.empty());  // a checkpoint has its name only when it is whole
                const bool is_new = holds(found.dir, step, 99), is_old = holds(found.dir, old_step);
                CHECK(is_new != is_old);
                if (result.code == 0) CHECK(is_new);
                (is_new ? new_ones : old_ones)++;

                remove_leftovers(dir / "out");
                CHECK(find_latest(dir / "out").dir != "");
                save_new(dir / "out");
                CHECK(holds(find_latest(dir / "out").dir, step, 99));
                for (const std::string& name : list_directory(dir / "out")) CHECK_FALSE(name.ends_with(".tmp"));
            },
    };
    if (!fault_at_each_call(error, test)) return;
    CHECK(old_ones > 20);
    CHECK(new_ones > 0);
}

TEST_CASE("a save of the next step interrupted at any system call leaves the old checkpoint or the new one") {
    save_in_memory();
    const TemporaryDirectory dir;
    save(save_options(dir / "before"), 1);
    for (int error : {0, EIO, ENOSPC}) check_every_call(dir / "before", 1, 2, error);
}

TEST_CASE("a repeated save of a step interrupted at any system call leaves the old checkpoint or the new one") {
    save_in_memory();
    const TemporaryDirectory dir;
    save(save_options(dir / "before"), 2);
    for (int error : {0, EIO}) check_every_call(dir / "before", 2, 2, error);
}
