// test_checkpoint_save.cpp: tests the files that a save writes, which checkpoints it replaces or renames, and how it
// handles files that an earlier save left.
#include <doctest/doctest.h>

#include <filesystem>
#include <map>

#include "support/faults.h"
#include "support/parse.h"
#include "support/small_checkpoint.h"

namespace fs = std::filesystem;

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
        const TrainerState got = read_trainer_state(saved.dir), want = trainer_state(5000);
        CHECK(got.options == want.options);
        CHECK(got.data == want.data);
        CHECK(list_directory(saved.dir) == Names{"config.json", "generation_config.json", "merges.txt",
                                                 "model.safetensors", "optimizer.safetensors", "trainer.json",
                                                 "vocab.json"});
        CHECK(list_directory(run.out) == Names{"latest", "step_005000"});
        CHECK(read_bytes(run.out + "/latest") == "step_005000\n");
        const HFConfig config = read_hf_config(saved.dir);
        CHECK(config.model == small_model);
        CHECK(config.end_of_text == 6);
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
    const std::string first = out + "/step_000001";
    save(save_options(out), 1);
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
    save(save_options(out, {3}), 2);
    save(save_options(out, {1}), 2);
    CHECK(list_directory(out) == Names{"latest", "step_000002", "step_000003.stale"});
    CHECK(holds(out + "/step_000003.stale", 3));
    CHECK(find_latest(out).dir == out + "/step_000002");
    save(save_options(out, {1}), 3);
    const Saved saved = save(save_options(out, {1}), 2);
    REQUIRE(saved.warnings.size() == 1);
    CHECK(contains(saved.warnings[0], "step_000003.stale2"));
}

TEST_CASE_FIXTURE(Output, "leftovers of interrupted saves are removed, and all other files stay") {
    CHECK(remove_leftovers(out).empty());
    save(save_options(out), 1);
    make_directories(out + "/step_000003.tmp");
    write_bytes(out + "/step_000003.tmp/model.safetensors", "half");
    write_bytes(out + "/latest.tmp", "half");
    write_bytes(out + "/notes.tmp", "mine");
    make_directories(out + "/step_old");
    CHECK(remove_leftovers(out).size() == 2);
    CHECK(list_directory(out) == Names{"latest", "notes.tmp", "step_000001", "step_old"});
    CHECK(find_latest(out).dir == out + "/step_000001");
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
    const std::map<std::string, std::string> before = tree();
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
    CHECK(!fs::is_symlink(out + "/step_000010"));
    CHECK(!fs::is_symlink(out + "/latest"));
    plant("step_000030.tmp", "/step_000002");
    plant("latest.tmp", "/file");
    remove_leftovers(out);
    CHECK(tree() == before);
    CHECK(list_directory(out) == Names{"latest", "step_000010", "step_000020.stale"});
}

TEST_CASE_FIXTURE(Output, "if `latest` cannot be written, a save succeeds with a warning, and deletes older ones") {
    save(save_options(out, {1}), 1);
    remove_tree(out + "/latest");
    make_directories(out + "/latest/in the way");
    const Saved saved = save(save_options(out, {1}), 2);
    REQUIRE(saved.warnings.size() == 1);
    CHECK(contains(saved.warnings[0], "is saved, but the file latest does not name it: "));
    CHECK(contains(saved.warnings[0], "Is a directory"));
    CHECK(holds(saved.dir, 2));
    CHECK(find_model(out).dir == saved.dir);
    CHECK(!path_exists(out + "/step_000001"));
    remove_tree(out + "/latest");
    CHECK(save(save_options(out, {1}), 3).warnings.empty());
    CHECK(list_directory(out) == Names{"latest", "step_000003"});
}

TEST_CASE_FIXTURE(Output, "a save whose tensors cannot be read leaves no files") {
    save(save_options(out), 1);
    const FlatState state(small_model, 2);
    const TensorView failing = [&](Slot slot, Param p, int l) {
        if (slot == 2 && l == 1) fail(EXIT_INTERNAL, "the device is gone");
        return state.view()(slot, p, l);
    };
    CHECK(refusal([&] { save_checkpoint(save_options(out), state.layout, failing, trainer_state(2)); }) ==
          "1 the device is gone");
    CHECK(list_directory(out) == Names{"latest", "step_000001"});
}
