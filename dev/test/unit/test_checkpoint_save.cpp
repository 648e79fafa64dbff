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
        CHECK(saved.notes.empty());
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
        const int64_t bytes = save(save_options(dir / "out", 0, bf16_weights), 1).bytes;
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
    REQUIRE(saved.notes.size() == 1);
    CHECK(saved.notes[0].find("step_000003.stale2") != std::string::npos);
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
    fs::rename(dir / "out/step_000002", dir / "out/step_000002.replaced");  // killed between the two renames
    fs::copy(dir / "out/step_000001", dir / "out/step_000001.replaced");    // killed before the removal
    CHECK(find_latest(dir / "out").dir == dir / "out/step_000002.replaced");
    CHECK(remove_leftovers(dir / "out").size() == 4);
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
    for (const char* name : {"step_000010.tmp", "step_000010", "step_000010.replaced", "step_000020", "step_000002"})
        plant(name, "/step_000002");
    for (const char* name : {"latest", "latest.tmp"}) plant(name, "/file");
    CHECK(refusal([&] { set_val_loss(out + "/step_000002", 1.0); }) ==
          "73 " + out + "/step_000002: is a link, and nothing is written through it");
    save(save_options(out, 1), 10);
    CHECK(tree() == before);
    CHECK(holds(out + "/step_000010", 10));
    CHECK(!fs::is_symlink(out + "/step_000010"));
    CHECK(!fs::is_symlink(out + "/latest"));
    for (const char* name : {"step_000030.tmp", "step_000010.replaced"}) plant(name, "/step_000002");
    plant("latest.tmp", "/file");
    remove_leftovers(out);
    CHECK(tree() == before);
    CHECK(list_directory(out) == Names{"latest", "step_000010", "step_000020.stale"});
}

TEST_CASE("a leftover that cannot be removed is reported, and does not prevent a save of its step") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        for (const char* stuck : {"step_000002.tmp", "step_000003.tmp", "step_000004.replaced"}) {
            make_directories(out + "/" + stuck);
            write_bytes(out + "/" + stuck + "/file", "x");
            fs::permissions(out + "/" + stuck, fs::perms::owner_read | fs::perms::owner_exec);
        }
        if (!save(save_options(out), 4).notes.empty()) return 6;
        write_bytes(out + "/step_000005.tmp", "half");
        const Names notes = remove_leftovers(out);
        if (notes.size() != 4) return 1;
        for (const std::string& line : notes) {
            const bool removed = line.find("step_000005.tmp: removed") != std::string::npos;
            const bool stays = line.starts_with("a leftover of an interrupted save was not removed: ") &&
                               line.find("Permission denied") != std::string::npos;
            if (removed == stays) return 2;
        }
        for (int step : {2, 3}) save(save_options(out), step);
        if (list_directory(out) != Names{"latest", "step_000001", "step_000002", "step_000002.tmp", "step_000003",
                                         "step_000003.tmp", "step_000004.replaced.stale", "step_000004.stale"})
            return 3;
        if (!holds(out + "/step_000002", 2) || !holds(out + "/step_000003", 3)) return 4;
        save(save_options(out, 1), 4);
        if (list_directory(out) != Names{"latest", "step_000002.tmp", "step_000003.tmp", "step_000004",
                                         "step_000004.replaced.stale", "step_000004.stale"})
            return 5;
        return 0;
    });
    CHECK(failed == 0);
}

TEST_CASE("a step can be saved again, even if its old checkpoint cannot be removed") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", first = out + "/step_000001";
    const auto freeze = [](const std::string& path) {
        fs::permissions(path, fs::perms::owner_read | fs::perms::owner_exec);
    };
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        freeze(first);
        for (int i = 0; i < 2; i++) {
            const FlatState state(small_model, uint64_t(90 + i));
            Names notes;
            SaveOptions options = save_options(out);
            options.warn = [&](const std::string& line) { notes.push_back(line); };
            save_checkpoint(options, state.layout, state.view(), trainer_state(1));
            if (!holds(first, 1, uint64_t(90 + i)) || notes.size() != size_t(1 + i)) return 1 + i;
            if (notes.back().find("the replaced checkpoint was not deleted: ") != 0) return 3;
            freeze(first);
        }
        return find_latest(out).dir == first ? 0 : 4;
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
    CHECK(saved.notes.empty());
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

TEST_CASE("while `latest` cannot be written, the checkpoint that it names is kept") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save(save_options(out, 0), 1);
    save(save_options(out, 0), 2);
    write_bytes(out + "/latest", "step_000001\n");
    make_directories(out + "/latest.tmp");
    const int failed = as_ordinary_user(dir.path, [&] {
        write_bytes(out + "/latest.tmp/x", "");
        std::filesystem::permissions(out + "/latest.tmp", std::filesystem::perms::owner_read);  // cannot be removed
        return save(save_options(out, 1), 3).warnings.size() == 1 ? 0 : 1;
    });
    CHECK(failed == 0);
    CHECK(holds(out + "/step_000001", 1));
    CHECK(!path_exists(out + "/step_000002"));
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

TEST_CASE("set_val_loss changes only the validation loss in trainer.json") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 5).dir;
    const Names names = list_directory(ckpt);
    set_val_loss(ckpt, 2.5);
    CHECK(verify_error(ckpt) == "");
    const TrainerState got = read_trainer_state(ckpt), want = trainer_state(5);
    CHECK(got.val_loss == 2.5);
    CHECK(got.step == want.step);
    CHECK(got.position == want.position);
    CHECK(got.tokens == want.tokens);
    CHECK(got.options == want.options);
    CHECK(got.data == want.data);
    CHECK(list_directory(ckpt) == names);
    set_val_loss(ckpt, want.val_loss);
    CHECK(holds(ckpt, 5));
    write_bytes(ckpt + "/trainer.json", "{}");
    CHECK_THROWS_AS(set_val_loss(ckpt, 2.5), Error);
    CHECK(read_bytes(ckpt + "/trainer.json") == "{}");
}

// As on a disk that became read-only during the save.
TEST_CASE("a failed save whose files cannot be removed says so, and the next save removes them") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", unfinished = out + "/step_000002.tmp";
    save(save_options(out), 1);
    const int code = as_ordinary_user(dir.path, [&] {
        const FlatState state(small_model, 2);
        const TensorView failing = [&](Slot, Param, int) -> const float* {
            fs::permissions(out, fs::perms::owner_read | fs::perms::owner_exec);
            fail(EXIT_IO, "the disk is read-only");
        };
        try {
            save_checkpoint(save_options(out), state.layout, failing, trainer_state(2));
            return 1;
        } catch (const Error& error) {
            const std::string said =
                "the disk is read-only; " + unfinished + " is left, until a later save or start removes it";
            if (error.what() != said || error.exit_code != EXIT_IO) return 2;
        }
        if (!is_directory(unfinished)) return 3;
        fs::permissions(out, fs::perms::owner_all);
        const Saved saved = save(save_options(out), 3);
        if (saved.notes != Names{unfinished + ": removed, left behind by an interrupted save"}) return 4;
        return list_directory(out) == Names{"latest", "step_000001", "step_000003"} ? 0 : 5;
    });
    CHECK(code == 0);
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
