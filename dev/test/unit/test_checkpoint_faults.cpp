// test_checkpoint_faults.cpp: tests that no fault during a save loses the previous checkpoint. The faults are a full
// disk, a process killed or an error at any system call, and a power failure.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <tuple>

#include "support/faults.h"
#include "support/parse.h"
#include "support/small_checkpoint.h"

namespace fs = std::filesystem;

TEST_CASE("a save on a disk that is full, or fills up during the save, fails and loses nothing") {
    for (bool full_at_start : {true, false}) {  // false: the tokenizer's files take the space that is free at first
        const Output run;
        const int failed = on_small_disk(run.dir.path, "1m", [&] {
            save(save_options(run.out), 1);
            SaveOptions options = save_options(run.out);
            const auto fill = [](const std::string& path) {
                const int code = exit_code_of([&] { write_file(path, std::string(2 << 20, 'x')); });
                ENSURE(code == EXIT_IO, "filling the disk ended with exit code %d", code);
            };
            if (full_at_start) fill(run.dir / "ballast");
            if (!full_at_start) options.write_tokenizer = [&](const std::string& to) { fill(to + "/vocab.json"); };
            const std::string error = refusal([&] { save(options, 2); });
            if (!error.starts_with("74 ")) return 1;
            if (!contains(error, full_at_start ? "a checkpoint needs" : "No space left on device")) return 2;
            if (list_directory(run.out) != Names{"latest", "step_000001"}) return 3;
            if (!holds(find_latest(run.out).dir, 1)) return 4;
            remove_tree(run.dir / "ballast");
            save(save_options(run.out), 3);
            return holds(find_latest(run.out).dir, 3) ? 0 : 5;
        });
        CHECK(failed == 0);
    }
}

// After a power failure a file may lack all that was not synced. So a save syncs each new directory, then four files,
// two files of the tokenizer, trainer.json and the directory; renames it to step_N, and later ones to .stale; syncs the
// output before a replaced checkpoint is removed; syncs `latest` before its rename, and that before it deletes others.
TEST_CASE_FIXTURE(Output, "files are synced before their final name, and the name before old files are removed") {
    const std::tuple<int64_t, std::string, int> saves[] = {{1, out, 2},  // step, output, and new directories
                                                           {1, dir / "new/runs/out", 4},
                                                           {2, out, 1},
                                                           {2, out, 1},   // replaces the checkpoint of step 2
                                                           {1, out, 1}};  // renames the later checkpoint to .stale
    for (const auto& [step, output, directories] : saves) {
        std::string changes;
        const auto run = [&, &step = step, &output = output] { return save(save_options(output, {2}), step), 0; };
        const FaultResult result = with_fault(run, -1, 0, &changes);
        if (result.code == CHILD_SKIPPED || (result.code == 0 && changes.empty()))
            return skip_case("tracing is not permitted, or changes of files are not recorded here");
        CAPTURE(step);
        CAPTURE(changes);
        CHECK(result.code == 0);
        const std::string expected = format("(ws){%d}(w+s){4}w+ssw+ssr+su*w+srs(ru+)*", directories);
        CHECK(std::regex_match(changes, std::regex(expected)));
    }
}

// Names and bytes of all files below a directory.
static std::map<std::string, std::string> content(const std::string& dir) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(dir))
        files[entry.path().lexically_relative(dir)] = entry.is_directory() ? "" : read_file(entry.path(), 1 << 20);
    return files;
}

// Saves `step` into a copy of an output whose newest checkpoint is `old_step`, with a fault at each system call in
// turn. Afterwards the newest checkpoint must be whole, and must be the old or the new one. A new run must be able to
// clean up and save. This is checked once for each content that faults leave.
static bool check_every_call(int64_t old_step, int64_t step) {
    const Output before;
    save(save_options(before.out), old_step);
    const auto save_new = [step](const std::string& output) {  // seed 99: no checkpoint of `before` has it
        save(save_options(output, {1}), trainer_state(step), 99);
    };
    std::map<std::map<std::string, std::string>, bool> left;  // whether the newest checkpoint is the new one
    int old_ones = 0, new_ones = 0;
    const FaultTest test = {
        .least_calls = 50,
        .prepare =
            [&](const TemporaryDirectory& dir) { fs::copy(before.out, dir / "out", fs::copy_options::recursive); },
        .run = [&](const TemporaryDirectory& dir) { save_new(dir / "out"); },
        .check =
            [&](const TemporaryDirectory& dir, const FaultResult& result) {
                const std::string out = dir / "out";
                const auto [state, is_first] = left.insert({content(out), false});
                if (is_first) {
                    const FoundCheckpoint found = find_latest(out);
                    CHECK(found.damaged.empty());  // a checkpoint has its name only when it is whole
                    state->second = holds(found.dir, step, 99);
                    CHECK(state->second != holds(found.dir, old_step));
                    remove_leftovers(out);
                    CHECK(find_latest(out).dir != "");
                    save_new(out);
                    CHECK(holds(find_latest(out).dir, step, 99));
                    for (const std::string& name : list_directory(out)) CHECK_FALSE(name.ends_with(".tmp"));
                }
                (state->second ? new_ones : old_ones)++;
                if (result.code == 0) CHECK(state->second);
            },
    };
    for (int error : {0, EIO})
        if (!fault_at_each_call(error, test)) return false;
    CHECK(old_ones > 40);
    CHECK(new_ones > 0);
    return true;
}

TEST_CASE("a save interrupted at any system call leaves the old checkpoint or the new one") {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 1);  // hundreds of saves are fast in memory
    omp_set_num_threads(1);
    if (check_every_call(1, 2)) check_every_call(2, 2);
}
