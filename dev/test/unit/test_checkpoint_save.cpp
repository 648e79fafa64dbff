// test_checkpoint_save.cpp: tests the files that a save writes, which checkpoints it replaces, renames, or keeps by
// --keep, --keep-every and --keep-best, and how it handles files that an earlier save left.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "support/faults.h"
#include "support/parse.h"
#include "support/small_checkpoint.h"

namespace fs = std::filesystem;

// Saves a step that was validated at val_step; -1: at this step.
static Saved save_validated(const std::string& output, const KeepRules& keep, int64_t step, double loss,
                            int64_t val_step = -1) {
    TrainerState trainer = trainer_state(step);
    trainer.val_loss = loss, trainer.val_step = val_step < 0 ? step : val_step;
    return save(save_options(output, keep), trainer, uint64_t(step));
}

TEST_CASE("weights, moments and state are saved and loaded bit for bit, in fp32 and with bf16 weights") {
    for (bool bf16_weights : {false, true}) {
        const Output run;
        const Saved saved = save(save_options(run.out, {}, bf16_weights), 5000);
        CHECK(saved.dir == run.out + "/step_005000");
        CHECK(saved.warnings.empty());
        CHECK(holds(saved.dir, 5000));
        FlatState weights(small_model, 0), rounded(small_model, 5000);  // as --init reads them
        load_weights(saved.dir, weights.layout, weights.writer());
        if (bf16_weights)
            for (float& x : rounded.weights) x = float(bf16(x));
        CHECK(same_tensors(weights, rounded, false));
        CHECK(list_directory(saved.dir) == Names{"config.json", "generation_config.json", "merges.txt",
                                                 "model.safetensors", "optimizer.safetensors", "trainer.json",
                                                 "vocab.json"});
        CHECK(list_directory(run.out) == Names{"latest", "step_005000"});
        CHECK(read_bytes(run.out + "/latest") == "step_005000\n");
        for (const char* name : {"/config.json", "/generation_config.json"})
            CHECK(contains(read_bytes(saved.dir + name), "\"eos_token_id\": 6"));
        const Safetensors model = open_safetensors(saved.dir + "/model.safetensors");
        CHECK(model.find("transformer.wte.weight")->dtype == (bf16_weights ? "BF16" : "F32"));
        CHECK(model.metadata.at("step") == "5000");

        // checkpoint_bytes is an upper bound, at most 300 KiB above the size of a checkpoint.
        int64_t bytes = 0;
        for (const auto& entry : fs::directory_iterator(saved.dir)) bytes += int64_t(entry.file_size());
        const int64_t announced = checkpoint_bytes(ParamLayout(small_model), {bf16_weights});
        CHECK(bytes <= announced);
        CHECK(announced - bytes < 300 << 10);
    }
}

TEST_CASE_FIXTURE(Output, "a step that is saved again replaces the old one, even if that cannot be removed") {
    const std::string first = save(save_options(out), 1).dir;
    save(save_options(out), trainer_state(1), 99);
    CHECK(list_directory(out) == Names{"latest", "step_000001"});
    CHECK(holds(first, 1, 99));
    const int failed = as_ordinary_user(dir.path, [&] {
        fs::permissions(first, fs::perms::owner_read | fs::perms::owner_exec);
        const Names warnings = save(save_options(out), trainer_state(1), 90).warnings;
        if (!holds(first, 1, 90) || warnings.size() != 1) return 1;
        return warnings[0].starts_with("the replaced checkpoint was not deleted: ") ? 0 : 2;
    });
    CHECK(failed == 0);
}

TEST_CASE_FIXTURE(Output, "saving an older step renames the later checkpoints to .stale and loses none") {
    for (int step : {1, 2, 3}) save(save_options(out, {3}), step);
    save(save_options(out, {1}), 2);
    CHECK(list_directory(out) == Names{"latest", "step_000002", "step_000003.stale"});
    CHECK(holds(out + "/step_000003.stale", 3));
    CHECK(find_latest(out).dir == out + "/step_000002");
    save(save_options(out, {1}), 3);
    CHECK(contains(save(save_options(out, {1}), 2).warnings.at(0), "step_000003.stale2"));
}

TEST_CASE_FIXTURE(Output, "leftovers of interrupted saves are removed, and all other files stay") {
    save(save_options(out), 1);
    for (const char* name : {"/step_000003.tmp", "/step_old"}) make_directories(out + name);
    for (const char* name : {"/step_000003.tmp/x", "/latest.tmp", "/notes.tmp"}) write_bytes(out + name, "half");
    CHECK(remove_leftovers(out).size() == 2);
    CHECK(list_directory(out) == Names{"latest", "notes.tmp", "step_000001", "step_old"});
}

// A link at each name that a run with this output may write, rename or delete must not reach the directory it names.
TEST_CASE_FIXTURE(Output, "links in the output make no save write or delete outside of it") {
    const std::string outside = dir / "outside";
    save(save_options(outside), 2);
    write_bytes(outside + "/file", "precious");
    save(save_options(out), 1);
    const auto tree = [&] {
        std::map<std::string, std::string> files;
        for (const auto& entry : fs::recursive_directory_iterator(outside))
            files[entry.path()] = entry.is_regular_file() ? read_bytes(entry.path()) : "";
        return files;
    };
    const auto before = tree();
    const auto plant = [&](const std::string& name, const std::string& target) {
        fs::remove_all(out + "/" + name);
        fs::create_symlink(outside + target, out + "/" + name);
    };
    for (const char* name : {"step_000010.tmp", "step_000010", "step_000020", "step_000002"})
        plant(name, "/step_000002");
    for (const char* name : {"latest", "latest.tmp"}) plant(name, "/file");
    save(save_options(out, {1}), 10);
    CHECK(tree() == before);
    CHECK(holds(out + "/step_000010", 10));
    for (const char* name : {"/step_000010", "/latest"}) CHECK(!fs::is_symlink(out + name));
    plant("step_000030.tmp", "/step_000002");
    plant("latest.tmp", "/file");
    remove_leftovers(out);
    CHECK(tree() == before);
    CHECK(list_directory(out) == Names{"latest", "step_000010", "step_000020.stale"});
}

TEST_CASE_FIXTURE(Output, "if `latest` or `best` cannot be written, a save succeeds with a warning") {
    const KeepRules keep = {1, 0, true};
    save(save_options(out, keep), 1);
    remove_tree(out + "/latest");
    make_directories(out + "/latest/in the way");
    make_directories(out + "/best/mine");
    const Saved saved = save_validated(out, keep, 2, 1.0);
    REQUIRE(saved.warnings.size() == 2);
    CHECK(contains(saved.warnings[0], "is saved, but the file latest does not name it: "));
    CHECK(contains(saved.warnings[0], "Is a directory"));
    CHECK(saved.warnings[1].starts_with("the file best does not name the best checkpoint: "));
    CHECK(verify_error(saved.dir) == "");
    CHECK(find_model(out).dir == saved.dir);
    CHECK(!path_exists(out + "/step_000001"));
    remove_tree(out + "/latest");
    CHECK(save(save_options(out), 3).warnings.empty());
    CHECK(list_directory(out) == Names{"best", "latest", "step_000002", "step_000003"});
}

TEST_CASE_FIXTURE(Output, "--keep N keeps the newest N checkpoints, --keep-every those of its steps for ever") {
    for (int64_t step = 10; step <= 100; step += 10) save(save_options(out, {2, 40, false}), step);
    CHECK(list_directory(out) == Names{"latest", "step_000040", "step_000080", "step_000090", "step_000100"});
    save(save_options(out, {1, 0, false}), 110);  // a resume without the rule
    CHECK(list_directory(out) == Names{"latest", "step_000110"});
    save(save_options(out, {0}), 1'000'000);  // sorted by number; --keep 0 keeps all
    save(save_options(out, {2}), 1'000'001);
    CHECK(list_directory(out) == Names{"latest", "step_1000000", "step_1000001"});
    CHECK(find_latest(out).dir == out + "/step_1000001");
    CHECK(read_bytes(out + "/latest") == "step_1000001\n");
}

TEST_CASE_FIXTURE(Output, "--keep-best keeps the checkpoint with the lowest validation loss, and `best` names it") {
    const KeepRules keep = {1, 0, true};
    save(save_options(out, keep), 1);
    CHECK(best_checkpoint(out) == "");  // not validated
    save_validated(out, keep, 2, 3.0);
    save_validated(out, keep, 3, 2.5);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003"});
    save_validated(out, keep, 4, 2.75);
    save_validated(out, keep, 5, NAN);
    save_validated(out, keep, 6, 2.5);     // the older one of two equal ones is the best
    save_validated(out, keep, 7, 0.5, 6);  // validated before: this is not the loss of its own weights
    CHECK(list_directory(out) == Names{"best", "latest", "step_000003", "step_000007"});
    CHECK(read_bytes(out + "/best") == "step_000003\n");
    save_validated(out, keep, 8, 1.0);
    CHECK(list_directory(out) == Names{"best", "latest", "step_000008"});
    CHECK(read_bytes(out + "/best") == "step_000008\n");
    write_changed_state(out + "/step_000008", [](nlohmann::json& state) { state.erase("val_step"); });
    CHECK(best_checkpoint(out) == "");  // an older version did not store the step of the validation
}
