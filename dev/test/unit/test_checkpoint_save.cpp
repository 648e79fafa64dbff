// test_checkpoint_save.cpp: tests the files that a save writes, which checkpoints it keeps, deletes or renames, and how
// it handles files that an earlier save left.
#include <doctest/doctest.h>

#include <filesystem>
#include <map>

#include "support/faults.h"
#include "support/small_checkpoint.h"

namespace fs = std::filesystem;

TEST_CASE("weights, moments and state are saved and loaded bit for bit, in fp32 and with bf16 weights") {
    for (bool bf16_weights : {false, true}) {
        const TemporaryDirectory dir;
        const Saved saved = save(save_options(dir / "out", 0, bf16_weights), 5000);
        CHECK(saved.dir == dir / "out/step_005000");
        CHECK(saved.warnings.empty());
        CHECK(verify_error(saved.dir) == "");
        CHECK(holds(saved.dir, 5000));
        const TrainerState got = read_trainer_state(saved.dir), want = trainer_state(5000);
        CHECK(got.options == want.options);
        CHECK(got.data == want.data);
        CHECK(list_directory(saved.dir) == Names{"config.json", "generation_config.json", "merges.txt",
                                                 "model.safetensors", "optimizer.safetensors", "trainer.json",
                                                 "vocab.json"});
        CHECK(list_directory(dir / "out") == Names{"latest", "step_005000"});
        CHECK(read_bytes(dir / "out/latest") == "step_005000\n");
        const HFConfig config = read_hf_config(saved.dir);
        CHECK(config.model == small_model);
        CHECK(config.end_of_text == 6);
        const Safetensors model = open_safetensors(saved.dir + "/model.safetensors");
        CHECK(model.find("transformer.wte.weight")->dtype == (bf16_weights ? "BF16" : "F32"));
        CHECK(model.metadata.at("step") == "5000");
    }
}

TEST_CASE("checkpoint_bytes is an upper bound, at most 300 KiB above the size of a checkpoint") {
    for (bool bf16_weights : {false, true}) {
        const TemporaryDirectory dir;
        const std::string saved = save(save_options(dir / "out", 0, bf16_weights), 1).dir;
        int64_t bytes = 0;
        for (const auto& entry : fs::directory_iterator(saved)) bytes += int64_t(entry.file_size());
        const int64_t announced = checkpoint_bytes(ParamLayout(small_model), {bf16_weights});
        CHECK(bytes <= announced);
        CHECK(announced - bytes < 300 << 10);
    }
}

TEST_CASE("--keep N keeps the newest N checkpoints") {
    const TemporaryDirectory dir;
    for (int step : {8, 9, 10, 11}) save(save_options(dir / "out", 2), step);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000010", "step_000011"});
    save(save_options(dir / "out", 0), 1'000'000);  // sorted by number; --keep 0 keeps all
    save(save_options(dir / "out", 3), 1'000'001);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000011", "step_1000000", "step_1000001"});
    CHECK(find_latest(dir / "out").dir == dir / "out/step_1000001");
    save(save_options(dir / "out", 1), 1'000'002);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_1000002"});
    CHECK(read_bytes(dir / "out/latest") == "step_1000002\n");
}

TEST_CASE("a step that is saved again replaces the old one") {
    const TemporaryDirectory dir;
    save(save_options(dir / "out"), 3);
    const FlatState other(small_model, 99);
    save_checkpoint(save_options(dir / "out"), other.layout, other.view(), trainer_state(3));
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000003"});
    CHECK(holds(dir / "out/step_000003", 3, 99));
}

TEST_CASE("saving an older step renames the later checkpoints to .stale and loses none") {
    const TemporaryDirectory dir;
    for (int step : {1, 2, 3}) save(save_options(dir / "out", 3), step);
    save(save_options(dir / "out", 3), 2);
    save(save_options(dir / "out", 1), 2);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000002", "step_000003.stale"});
    CHECK(holds(dir / "out/step_000003.stale", 3));
    CHECK(find_latest(dir / "out").dir == dir / "out/step_000002");
    save(save_options(dir / "out", 1), 3);
    const Saved saved = save(save_options(dir / "out", 1), 2);
    REQUIRE(saved.warnings.size() == 1);
    CHECK(saved.warnings[0].find("step_000003.stale2") != std::string::npos);
    CHECK(find_latest(dir / "out").dir == dir / "out/step_000002");
}

TEST_CASE("leftovers of interrupted saves are removed, and all other files stay") {
    const TemporaryDirectory dir;
    CHECK(remove_leftovers(dir / "none").empty());
    save(save_options(dir / "out"), 1);
    save(save_options(dir / "out"), 2);
    make_directories(dir / "out/step_000003.tmp");
    write_bytes(dir / "out/step_000003.tmp/model.safetensors", "half");
    write_bytes(dir / "out/latest.tmp", "half");
    write_bytes(dir / "out/notes.tmp", "mine");
    make_directories(dir / "out/step_old");
    CHECK(remove_leftovers(dir / "out").size() == 2);
    CHECK(list_directory(dir / "out") == Names{"latest", "notes.tmp", "step_000001", "step_000002", "step_old"});
    CHECK(find_latest(dir / "out").dir == dir / "out/step_000002");
    CHECK(remove_leftovers(dir / "out").empty());
}

// A link at each name that a run with this output may write, rename or delete must not reach the directory it names.
TEST_CASE("links in the output make no save write or delete outside of it") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", outside = dir / "outside";
    save(save_options(outside), 2);
    write_bytes(outside + "/file", "precious");
    save(save_options(out), 1);
    const auto tree = [&] {
        std::map<std::string, std::string> files;
        for (const auto& entry : fs::recursive_directory_iterator(outside))
            files[entry.path().string()] = entry.is_regular_file() ? read_bytes(entry.path().string()) : "";
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
    save(save_options(out, 1), 10);
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

TEST_CASE("a step can be saved again, even if its old checkpoint cannot be removed") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", first = out + "/step_000001";
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        fs::permissions(first, fs::perms::owner_read | fs::perms::owner_exec);
        const FlatState state(small_model, 90);
        Names warnings;
        SaveOptions options = save_options(out);
        options.warn = [&](const std::string& line) { warnings.push_back(line); };
        save_checkpoint(options, state.layout, state.view(), trainer_state(1));
        if (!holds(first, 1, 90) || warnings.size() != 1) return 1;
        return warnings[0].starts_with("the replaced checkpoint was not deleted: ") ? 0 : 2;
    });
    CHECK(failed == 0);
}

TEST_CASE("if `latest` cannot be written, a save succeeds with a warning, and deletes older checkpoints") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save(save_options(out, 1), 1);
    remove_tree(out + "/latest");
    make_directories(out + "/latest/in the way");
    const Saved saved = save(save_options(out, 1), 2);
    REQUIRE(saved.warnings.size() == 1);
    CHECK(saved.warnings[0].find("is saved, but the file latest does not name it: ") != std::string::npos);
    CHECK(saved.warnings[0].find("Is a directory") != std::string::npos);
    CHECK(holds(saved.dir, 2));
    CHECK(find_model(out).dir == saved.dir);
    CHECK(!path_exists(out + "/step_000001"));
    remove_tree(out + "/latest");
    CHECK(save(save_options(out, 1), 3).warnings.empty());
    CHECK(list_directory(out) == Names{"latest", "step_000003"});
}

TEST_CASE("an output that cannot be created is EXIT_CANNOT_CREATE") {
    const TemporaryDirectory dir;
    write_bytes(dir / "file", "x");
    for (const std::string& output : {dir / "file", dir / "file/out", std::string("/proc/none/out")}) {
        CAPTURE(output);
        CHECK(exit_code_of([&] { save(save_options(output), 1); }) == EXIT_CANNOT_CREATE);
    }
    CHECK(read_bytes(dir / "file") == "x");
}

TEST_CASE("a save whose tensors cannot be read leaves no files") {
    const TemporaryDirectory dir;
    save(save_options(dir / "out"), 1);
    const FlatState state(small_model, 2);
    const TensorView failing = [&](Slot slot, Param p, int l) {
        if (slot == 2 && l == 1) fail(EXIT_INTERNAL, "the device is gone");
        return state.view()(slot, p, l);
    };
    CHECK_THROWS_WITH_AS(save_checkpoint(save_options(dir / "out"), state.layout, failing, trainer_state(2)),
                         "the device is gone", Error);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000001"});
}
