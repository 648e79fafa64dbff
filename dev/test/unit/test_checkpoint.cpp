// test_checkpoint.cpp: a run's state comes back bit for bit, damage is found and named, and no failure of the machine,
// at any system call of a save, loses the checkpoint that was there.
#include "checkpoint/checkpoint.h"

#include <doctest/doctest.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "support/faults.h"
#include "support/refusal.h"
#include "support/skip.h"
#include "support/small_state.h"
#include "support/temporary.h"

namespace fs = std::filesystem;

static TrainerState trainer_state(int64_t step) {
    TrainerState state;
    state.step = step, state.position = step * 17 + 3, state.tokens = step << 40;
    state.seed = ~uint64_t(0) - uint64_t(step);
    state.val_loss = 3.0 + 1.0 / 3.0;
    state.options = R"({"lr":0.0006,"model":"d12","steps":100})";
    state.data = R"({"files":2,"hash":"00ff"})";
    state.extra = R"({"window":[0.1,2.5,1e-300]})";
    return state;
}

static SaveOptions save_options(const std::string& output, int keep = 0, bool bf16_weights = false) {
    SaveOptions options;
    options.output = output, options.keep = keep, options.format.bf16_weights = bf16_weights, options.end_of_text = 6;
    options.write_tokenizer = [](const std::string& dir) {
        write_bytes(dir + "/vocab.json", R"({"a":0})");
        write_bytes(dir + "/merges.txt", "#version: 0.2\n");
    };
    return options;
}

using Names = std::vector<std::string>;

// The state of step n is that of seed n, so that a directory can be told from another.
struct Saved : SavedCheckpoint {
    Names notes;
};
static Saved save(SaveOptions options, int64_t step) {
    const FlatState state(small_model, uint64_t(step));
    Names notes;
    options.note = [&](const std::string& line) { notes.push_back(line); };
    return {save_checkpoint(options, state.layout, state.reader(), trainer_state(step)), notes};
}

static bool holds(const std::string& dir, int64_t step, uint64_t seed) {
    FlatState got(small_model, 0);
    const TrainerState trainer = load_checkpoint(dir, got.layout, {"m", "v"}, got.writer());
    const TrainerState want = trainer_state(step);
    return same_tensors(got, FlatState(small_model, seed)) && trainer.step == step &&
           trainer.position == want.position && trainer.tokens == want.tokens && trainer.seed == want.seed &&
           trainer.val_loss == want.val_loss;
}
static bool holds(const std::string& dir, int64_t step) { return holds(dir, step, uint64_t(step)); }

// What verify_checkpoint throws, as "65 message". Empty: the checkpoint is whole.
static std::string verify_error(const std::string& dir) {
    return refusal([&] { verify_checkpoint(dir); });
}

TEST_CASE("weights, moments and state come back bit for bit, in fp32 and with bf16 weights") {
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
        CHECK(got.extra == want.extra);
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

TEST_CASE("a moment or a weight that is not finite is refused, though its checksum is right") {
    for (std::vector<float> FlatState::*buffer : {&FlatState::weights, &FlatState::m, &FlatState::v}) {
        const TemporaryDirectory dir;
        FlatState state(small_model, 1), got(small_model, 0);
        (state.*buffer)[size_t(state.layout.offset(fcb, 1) + 3)] = NAN;
        const std::string saved =
            save_checkpoint(save_options(dir / "out"), state.layout, state.reader(), trainer_state(1)).dir;
        CHECK(verify_error(saved) == "");
        CHECK_THROWS_WITH_AS(load_checkpoint(saved, got.layout, {"m", "v"}, got.writer()),
                             doctest::Contains("transformer.h.1.mlp.c_fc.bias[3] is NaN"), Error);
    }
}

TEST_CASE("a checkpoint is a model directory: --init reads its weights, rounded if they are bf16") {
    const TemporaryDirectory dir;
    FlatState want(small_model, 7), got(small_model, 0);
    load_weights(save(save_options(dir / "a"), 7).dir, got.layout, got.writer());
    CHECK(same_tensors(got, want, false));
    load_weights(save(save_options(dir / "b", 0, true), 7).dir, got.layout, got.writer());
    for (float& x : want.weights) x = float(bf16(x));
    CHECK(same_tensors(got, want, false));
}

TEST_CASE("the size that is announced is the size that is needed") {
    for (bool bf16_weights : {false, true}) {
        const TemporaryDirectory dir;
        const int64_t bytes = save(save_options(dir / "out", 0, bf16_weights), 1).bytes;
        const int64_t announced = checkpoint_bytes(ParamLayout(small_model), {bf16_weights});
        CHECK(bytes <= announced);
        CHECK(announced - bytes < 300 << 10);
    }
}

TEST_CASE("a flipped byte in any file is found, the file is named, and the previous checkpoint is used") {
    const TemporaryDirectory dir;
    save(save_options(dir / "out"), 1);
    const std::string newest = save(save_options(dir / "out"), 2).dir;
    for (const std::string& name : list_directory(newest)) {
        const std::string path = newest + "/" + name, bytes = read_bytes(path);
        const size_t stride = std::max<size_t>(1, bytes.size() / 200);
        for (size_t i = 0; i < bytes.size(); i += stride) {
            std::string damaged = bytes;
            damaged[i] = char(damaged[i] ^ 1 << i % 8);
            write_bytes(path, damaged);
            CAPTURE(name);
            CAPTURE(i);
            const bool named = verify_error(newest).starts_with("65 " + path + ": ");
            CHECK(named);
        }
        const FoundCheckpoint found = find_latest(dir / "out");
        CHECK(found.dir == dir / "out/step_000001");
        REQUIRE(found.damaged.size() == 1);
        CHECK(found.damaged[0].dir == newest);
        CHECK(found.damaged[0].what.find(path) != std::string::npos);
        write_bytes(path, bytes);
    }
    CHECK(find_latest(dir / "out").dir == newest);
}

TEST_CASE("files that are cut, longer, empty or missing are found and named") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir;
    for (const std::string& name : list_directory(ckpt)) {
        const std::string path = ckpt + "/" + name, bytes = read_bytes(path);
        CAPTURE(name);
        for (const std::string& other : {bytes.substr(0, bytes.size() - 2), bytes + "x", std::string()}) {
            write_bytes(path, other);
            CHECK(verify_error(ckpt).starts_with("65 " + path + ": "));
        }
        remove_tree(path);
        CHECK(verify_error(ckpt).find(name) != std::string::npos);
        CHECK(verify_error(ckpt).starts_with(name == "trainer.json" ? "66 " : "65 "));
        write_bytes(path, bytes);
        CHECK(verify_error(ckpt) == "");
    }
}

TEST_CASE("a state that is not ours is refused even if its checksum matches") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir;
    CHECK(verify_error(dir / "none").starts_with("66 "));
    CHECK(verify_error(dir / "out").starts_with("66 "));  // a run's output, not one of its checkpoints
    write_bytes(ckpt + "/trainer.json", "[]");
    CHECK(verify_error(ckpt).starts_with("65 "));
    write_bytes(ckpt + "/trainer.json", R"({"format":2,"xxh3_64":"x"})");
    CHECK(verify_error(ckpt).starts_with("65 "));
    remove_tree(ckpt + "/trainer.json");
    CHECK(verify_error(ckpt).find("give it by --init") != std::string::npos);
}

TEST_CASE("counts that cannot be are refused, though the checksum is right") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir, path = ckpt + "/trainer.json";
    const nlohmann::json good = nlohmann::json::parse(read_bytes(path));
    const auto said = [&](const char* name, const nlohmann::json& value) {
        nlohmann::json state = good;
        state[name] = value;
        state.erase("xxh3_64");
        const std::string text = state.dump();
        state["xxh3_64"] = format("%016llx", static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
        write_bytes(path, state.dump());
        verify_checkpoint(ckpt);
        return refusal([&] { read_trainer_state(ckpt); });
    };
    for (const char* name : {"step", "position", "tokens"}) {
        CHECK(said(name, 0) == "");
        CHECK(said(name, INT32_MAX - 1) == "");
        for (const nlohmann::json& bad :
             {nlohmann::json(-1), nlohmann::json(INT64_MAX), nlohmann::json(UINT64_MAX), nlohmann::json(1e300),
              nlohmann::json((int64_t(1) << 60) + 1), nlohmann::json("1"), nlohmann::json(nullptr)})
            CHECK(said(name, bad) == "65 " + path + ": " + name + " is " + bad.dump() +
                                         ", which is impossible; the checkpoint is damaged");
    }
    CHECK(said("step", INT32_MAX).starts_with("65 "));
}

TEST_CASE("a checkpoint of another shape is refused before a tensor is handed over") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir;
    const ParamLayout other({.max_T = 5, .V = 7, .L = 2, .NH = 2, .C = 8});
    const TensorWriter nowhere = [](const float*, Slot, Param, int) { FAIL("nothing may be handed over"); };
    CHECK_THROWS_WITH_AS(
        load_checkpoint(ckpt, other, {"m", "v"}, nowhere),
        doctest::Contains("model.safetensors: transformer.wte.weight is F32 [7, 6], but a model of 2 layers "
                          "and 8 channels needs [7, 8]; wrong --model?"),
        Error);
}

TEST_CASE("the newest N are kept, none is deleted before its successor is there") {
    const TemporaryDirectory dir;
    for (int step : {8, 9, 10, 11}) save(save_options(dir / "out", 2), step);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000010", "step_000011"});
    save(save_options(dir / "out", 0), 1'000'000);  // sorts by number, and 0 keeps all
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
    save_checkpoint(save_options(dir / "out"), other.layout, other.reader(), trainer_state(3));
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000003"});
    CHECK(holds(dir / "out/step_000003", 3, 99));
}

TEST_CASE("a run that goes on from an older step sets later ones aside, and none is lost") {
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

TEST_CASE("leftovers of interrupted saves are removed, everything else stays") {
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

TEST_CASE("leftovers that cannot be removed are noted, and no obstacle to a later save of their step") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        for (const char* stuck : {"step_000002.tmp", "step_000003.tmp", "step_000004.replaced"}) {
            make_directories(out + "/" + stuck);
            write_bytes(out + "/" + stuck + "/file", "x");
            fs::permissions(out + "/" + stuck, fs::perms::owner_read | fs::perms::owner_exec);
        }
        write_bytes(out + "/step_000005.tmp", "half");
        save(save_options(out), 4);
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

TEST_CASE("a step that is saved again is saved, also where the old one cannot be removed") {
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
            options.note = [&](const std::string& line) { notes.push_back(line); };
            save_checkpoint(options, state.layout, state.reader(), trainer_state(1));
            if (!holds(first, 1, uint64_t(90 + i)) || notes.size() != size_t(1 + i)) return 1 + i;
            if (notes.back().find("the replaced checkpoint was not deleted: ") != 0) return 3;
            freeze(first);
        }
        return find_latest(out).dir == first ? 0 : 4;
    });
    CHECK(failed == 0);
}

TEST_CASE("a step is saved where latest cannot be written: a note says so, and what it names stays") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save(save_options(out, 1), 1);
    remove_tree(out + "/latest");
    make_directories(out + "/latest/in the way");
    const Saved saved = save(save_options(out, 1), 2);
    REQUIRE(saved.notes.size() == 1);
    CHECK(saved.notes[0].find("latest still names an earlier one") != std::string::npos);
    CHECK(saved.notes[0].find("Is a directory") != std::string::npos);
    CHECK(holds(saved.dir, 2));
    CHECK(find_model(out).dir == saved.dir);
    CHECK(holds(out + "/step_000001", 1));
    remove_tree(out + "/latest");
    CHECK(save(save_options(out, 1), 3).notes.empty());
    CHECK(list_directory(out) == Names{"latest", "step_000003"});
}

TEST_CASE("find_latest and find_model") {
    const TemporaryDirectory dir;
    const auto model = [&](const std::string& path) {
        try {
            return find_model(path).dir;
        } catch (const Error& error) {
            return format("%d", error.exit_code);
        }
    };
    CHECK(find_latest(dir / "none").dir == "");
    CHECK(find_latest(dir.path).dir == "");
    CHECK(model(dir / "none") == "66");
    CHECK(model(dir.path) == "66");
    save(save_options(dir / "out"), 1);
    const std::string newest = save(save_options(dir / "out"), 2).dir;
    write_bytes(dir / "out/latest",
                "step_000001\n");  // a crash between the rename and `latest`: the newest still counts
    CHECK(model(dir / "out") == newest);
    CHECK(model(newest) == newest);
    make_directories(dir / "out/step_000009");  // empty
    const FoundCheckpoint found = find_latest(dir / "out");
    CHECK(found.dir == newest);
    REQUIRE(found.damaged.size() == 1);
    CHECK(found.damaged[0].what.find("step_000009: is not a checkpoint") != std::string::npos);
    make_directories(dir / "bad/step_000001");
    CHECK(find_latest(dir / "bad").dir == "");
    CHECK(find_latest(dir / "bad").damaged.size() == 1);
    CHECK(model(dir / "bad") == "65");
}

TEST_CASE("a model and the checkpoints of a run in one directory: neither is taken for the other") {
    const TemporaryDirectory dir;
    save(save_options(dir / "out"), 1);
    const std::string newest = dir / "out/step_000002";
    save(save_options(dir / "out"), 2);
    CHECK_FALSE(holds_model(dir / "out"));
    CHECK(holds_model(newest));
    fs::copy(newest + "/config.json", dir / "out");
    CHECK_FALSE(holds_model(dir / "out"));  // without weights it is none
    CHECK(find_model(dir / "out").dir == newest);
    for (const char* weights : {"model.safetensors", "model.safetensors.index.json"}) {
        write_bytes(dir / "out/" + weights, "x");
        CHECK(holds_model(dir / "out"));
        CHECK_THROWS_WITH_AS(find_model(dir / "out"), doctest::Contains(newest.c_str()), Error);
        remove_tree(dir / "out/" + weights);
    }
}

TEST_CASE("checkpoints that are all damaged are refused by name, with what --init can still read") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", advice = "--init " + out + "/step_00000";
    const auto refusal_of = [&] { return refusal([&] { find_resumable(out); }); };
    const auto says = [&](const std::string& text) { return refusal_of().find(text) != std::string::npos; };
    const auto damage = [&](int step, const std::string& name) {
        const std::string path = format("%s/step_%06d/%s", out.c_str(), step, name.c_str());
        std::string bytes = read_bytes(path);
        bytes[bytes.size() / 2] = char(bytes[bytes.size() / 2] ^ 1);
        write_bytes(path, bytes);
    };
    CHECK(find_resumable(out).dir == "");  // there is none yet
    CHECK(newest_directory(out) == "");
    save(save_options(out), 1);
    save(save_options(out), 2);
    CHECK(find_resumable(out).dir == out + "/step_000002");
    damage(2, "optimizer.safetensors");
    CHECK(find_resumable(out).dir == out + "/step_000001");
    CHECK(find_resumable(out).damaged.size() == 1);
    CHECK(newest_directory(out) == out + "/step_000002");
    damage(1, "model.safetensors");
    CHECK(refusal_of().starts_with("65 " + out + ": none of its checkpoints is intact:\n"));
    CHECK(
        says("step_000002/optimizer.safetensors: its checksum does not match what was written; the checkpoint is "
             "damaged; its weights are intact\n"));
    CHECK(
        says("step_000001/model.safetensors: its checksum does not match what was written; the checkpoint is "
             "damaged\n"));
    CHECK(says(advice + "2 starts from its weights"));
    remove_tree(out + "/step_000002/trainer.json");
    CHECK(says("it has no trainer.json"));
    CHECK(says("its weights can be read, but not verified\n"));
    CHECK(says(advice + "2 starts from its weights"));
    write_bytes(out + "/step_000002/config.json", "{}");  // another shape than the weights have
    CHECK(says("restore one from a copy, or start anew in another --output"));
    CHECK_FALSE(says("--init " + out));
}

TEST_CASE("a checkpoint that may not be read is passed over or refused with the reason, not called damaged") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", newest = out + "/step_000002";
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        save(save_options(out), 2);
        const auto refused = [](const std::function<void()>& f, const char* exit_code, const std::string& text) {
            const std::string said = refusal(f);
            return said.starts_with(exit_code) && said.find(text) != std::string::npos &&
                   said.find("Permission denied") != std::string::npos;
        };
        const std::string hidden = newest + ": cannot open the directory: Permission denied";
        chmod(newest.c_str(), 0);
        if (!refused([&] { verify_checkpoint(newest); }, "66 ", hidden)) return 1;
        const FoundCheckpoint found = find_resumable(out);
        if (found.dir != out + "/step_000001" || found.damaged.size() != 1 || found.damaged[0].what != hidden) return 2;
        remove_tree(out + "/step_000001");
        if (!refused([&] { find_resumable(out); }, "65 ", "this user may not read all of it")) return 3;
        if (!refused([&] { find_model(newest); }, "66 ", hidden)) return 4;
        chmod(newest.c_str(), 0700);
        chmod((newest + "/optimizer.safetensors").c_str(), 0);
        if (!refused([&] { find_resumable(out); }, "65 ", "this user may not read all of it")) return 5;
        chmod((newest + "/optimizer.safetensors").c_str(), 0600);
        return holds(find_resumable(out).dir, 2) ? 0 : 6;
    });
    CHECK(failed == 0);
}

TEST_CASE("an output that cannot be made is EXIT_CANNOT_CREATE") {
    const TemporaryDirectory dir;
    write_bytes(dir / "file", "x");
    for (const std::string& output : {dir / "file", dir / "file/out", std::string("/proc/none/out")}) {
        CAPTURE(output);
        CHECK(exit_code_of([&] { save(save_options(output), 1); }) == EXIT_CANNOT_CREATE);
    }
    CHECK(read_bytes(dir / "file") == "x");
}

// The exit code and message of a save that must fail; the checkpoint of step 1 must be whole, nothing may lie about,
// and once there is room a later save must work.
static void check_failed_save(const TemporaryDirectory& dir, int code, int want) {
    CHECK(code == want);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000001"});
    CHECK(holds(dir / "out/step_000001", 1));
    save(save_options(dir / "out"), 2);
    CHECK(holds(find_latest(dir / "out").dir, 2));
}

TEST_CASE("a limit on the size of files fails the save and loses nothing") {
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

TEST_CASE("a disk that is full, or becomes full while options, fails the save and loses nothing") {
    for (bool full_at_start : {true, false}) {  // else the tokenizer's files take the room that there was at first
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

// On a small disk that holds the checkpoints 1 to 3, the newest damaged, and 100 KiB beside them: what `f` returns,
// which is the number of the check that failed. A save needs 256 KiB and more to be free, and deleting one makes that
// room.
static int on_full_disk(const std::function<int(const std::string& out)>& f) {
    const TemporaryDirectory dir;
    return on_small_disk(dir.path, "2m", [&] {
        const std::string out = dir / "out";
        for (int step : {1, 2, 3}) {
            save(save_options(out), step);
            write_bytes(format("%s/step_00000%d/large", out.c_str(), step), std::string(300 << 10, 'x'));
        }
        write_bytes(out + "/step_000003/config.json", "{}");
        write_bytes(dir / "ballast", std::string(size_t(free_bytes(out) - (100 << 10)), 'x'));
        return f(out);
    });
}

TEST_CASE("a full disk: what --keep gives up goes before the save, but never the newest that is whole") {
    const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
    const Names all = {"latest", "step_000001", "step_000002", "step_000003"};
    const int saved = on_full_disk([&](const std::string& out) {
        const Saved saved = save(save_options(out, 1), 4);
        if (saved.notes.size() != 1 || !has(saved.notes[0], "step_000001: deleted before the next save")) return 1;
        if (list_directory(out) != Names{"latest", "step_000004"}) return 2;
        return holds(out + "/step_000004", 4) ? 0 : 3;
    });
    CHECK(saved == 0);
    // A checkpoint on which something is mounted cannot be renamed, and so not deleted.
    const auto pin = [](const std::string& dir, size_t bytes) {
        if (mount("none", dir.c_str(), "tmpfs", 0, "size=1m") != 0) return false;
        write_bytes(dir + "/large", std::string(bytes, 'x'));
        return true;
    };
    const int passed_over = on_full_disk([&](const std::string& out) {
        if (!pin(out + "/step_000001", 10)) return CHILD_SKIPPED;
        const Saved saved = save(save_options(out, 1), 4);
        if (!has(saved.notes.at(0), "an old checkpoint was not deleted, although the disk is full: ") ||
            !has(saved.notes[0], "step_000001"))
            return 1;
        if (!has(saved.notes.at(1), "step_000003: deleted before the next save")) return 2;
        if (list_directory(out) != Names{"latest", "step_000001", "step_000004"}) return 3;
        return holds(out + "/step_000004", 4) ? 0 : 4;
    });
    CHECK(passed_over == 0);
    const int rest_too_small = on_full_disk([&](const std::string& out) {
        write_bytes(out + "/step_000003/large", "");  // the room that this gives is taken
        write_bytes(out + "/more", std::string(size_t(free_bytes(out) - (40 << 10)), 'x'));
        if (!pin(out + "/step_000001", 600 << 10)) return CHILD_SKIPPED;
        const std::string error = refusal([&] { save(save_options(out, 1), 4); });
        if (!error.starts_with("74 ") || !has(error, "are free; ")) return 1;
        return is_directory(out + "/step_000002") && is_directory(out + "/step_000003") ? 0 : 2;
    });
    CHECK(rest_too_small == 0);
    const int failed = on_full_disk([&](const std::string& out) {
        const FlatState state(small_model, 4);
        const TensorReader failing = [](float*, Slot, Param, int) { fail(EXIT_INTERNAL, "the device is gone"); };
        SaveOptions options = save_options(out, 1);
        Names notes;
        options.note = [&](const std::string& line) { notes.push_back(line); };
        const std::string error = refusal([&] { save_checkpoint(options, state.layout, failing, trainer_state(4)); });
        if (error != "1 the device is gone") return 1;
        if (notes.size() != 1 || !has(notes[0], "step_000001: deleted before the next save")) return 4;
        if (list_directory(out) != Names{"latest", "step_000002", "step_000003"}) return 2;
        return find_latest(out).dir == out + "/step_000002" ? 0 : 3;
    });
    CHECK(failed == 0);
    const int refused = on_full_disk([&](const std::string& out) {
        for (int keep : {0, 4}) {
            const std::string error = refusal([&] { save(save_options(out, keep), 4); });
            if (!error.starts_with("74 ") || !has(error, "are free; --keep 3 would make room, or free ")) return 1;
        }
        write_bytes(out + "/step_000003/large", "");  // little is to be had by deleting
        write_bytes(out + "/step_000001/large", "");
        write_bytes(out + "/more", std::string(size_t(free_bytes(out) - (40 << 10)), 'x'));
        const std::string error = refusal([&] { save(save_options(out, 1), 4); });
        if (!error.starts_with("74 ") || !has(error, "are free; free ")) return 2;
        remove_tree(out + "/more");
        return list_directory(out) == all ? 0 : 3;
    });
    CHECK(refused == 0);
    const int same_step = on_full_disk([&](const std::string& out) {
        const Saved saved = save(save_options(out, 3), 3);  // replaces the damaged one, and needs its room
        if (list_directory(out) != Names{"latest", "step_000001", "step_000002", "step_000003"}) return 1;
        return saved.notes.size() == 1 && holds(out + "/step_000003", 3) ? 0 : 2;
    });
    CHECK(same_step == 0);
}

TEST_CASE("a validation loss that comes after the save replaces trainer.json, and nothing else changes") {
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
    CHECK(got.extra == want.extra);
    CHECK(list_directory(ckpt) == names);
    set_val_loss(ckpt, want.val_loss);
    CHECK(holds(ckpt, 5));
    write_bytes(ckpt + "/trainer.json", "{}");
    CHECK_THROWS_AS(set_val_loss(ckpt, 2.5), Error);
    CHECK(read_bytes(ckpt + "/trainer.json") == "{}");
}

TEST_CASE("trainer.json rewritten by a process that is killed or fails: the checkpoint stays whole") {
    const FaultTest set_loss = {
        .least_calls = 5,
        .prepare = [](const TemporaryDirectory& dir) { save(save_options(dir / "out"), 5); },
        .run = [](const TemporaryDirectory& dir) { set_val_loss(dir / "out/step_000005", 2.5); },
        .check =
            [](const TemporaryDirectory& dir, const FaultResult& result) {
                const std::string ckpt = dir / "out/step_000005";
                CHECK(verify_error(ckpt) == "");
                if (result.code == 0) CHECK(read_trainer_state(ckpt).val_loss == 2.5);
            },
        .codes = {EXIT_IO, EXIT_CANNOT_CREATE, EXIT_NO_INPUT},  // EXIT_NO_INPUT: a stat failed
    };
    for (int error : {0, EIO, ENOSPC})
        if (!fault_at_each_call(error, set_loss)) return;
}

TEST_CASE("an error while a tensor is fetched leaves no trace") {
    const TemporaryDirectory dir;
    save(save_options(dir / "out"), 1);
    const FlatState state(small_model, 2);
    const TensorReader failing = [&](float* host, Slot slot, Param p, int l) {
        if (slot == 2 && l == 1) fail(EXIT_INTERNAL, "the device is gone");
        state.reader()(host, slot, p, l);
    };
    CHECK_THROWS_WITH_AS(save_checkpoint(save_options(dir / "out"), state.layout, failing, trainer_state(2)),
                         "the device is gone", Error);
    CHECK(list_directory(dir / "out") == Names{"latest", "step_000001"});
}

static bool is_below(const std::string& path, const std::string& dir) { return path.starts_with(dir + "/"); }

// What a power failure could take away although the program goes on as if it were on disk; empty: nothing. The rules:
//   * what gets a new name is on disk with all that is below it: files, and directories with the names in them;
//   * a new name is on disk before another thing is renamed to `latest`, and before anything but a .tmp is removed: it
//     may be the only copy;
//   * at the end all is on disk, but removals.
static std::string lost_by_power_failure(const std::vector<FileChange>& changes, const std::string& below) {
    std::set<std::string> files, names, renames;  // not on disk: files with new bytes, directories with new names
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
                    return file + ": renamed before it was on disk";
                if (const std::string dir = find(names, path); !dir.empty())
                    return dir + ": renamed before the names in it were on disk";
                if (change.to.ends_with("/latest") && !renames.empty())
                    return *renames.begin() + ": `latest` moved before the new name in it was on disk";
                names.insert(parent), names.insert(parent_directory(change.to));
                renames.insert(parent_directory(change.to));
                break;
            case FileChange::remove:
                if (path.find(".tmp") == std::string::npos && !renames.empty())
                    return path + ": removed before the new name in " + *renames.begin() + " was on disk";
                files.erase(path), names.erase(path);
                break;
        }
    }
    if (!files.empty()) return *files.begin() + ": never brought to disk";
    if (!names.empty()) return *names.begin() + ": the names in it were never brought to disk";
    return "";
}

TEST_CASE("everything is on disk before the name that publishes it, and the name before the old one goes") {
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
    // 7 files, their directory, the output, `latest` and the output again; and what holds a new output.
    check(1, dir / "out", 12);
    check(1, dir / "new/runs/out", 14);  // what holds it is new as well
    check(2, dir / "out", 11);
    check(2, dir / "out", 11);  // replaces
    check(1, dir / "out", 11);  // sets aside
}

// In memory, so that hundreds of saves are fast; there is nothing to lose but what the process itself has not written.
static std::string fast_directory() {
    const char* shm = "/dev/shm";
    if (access(shm, W_OK) == 0) setenv("TMPDIR", shm, 1);
    omp_set_num_threads(1);
    return fs::temp_directory_path().string();
}

// Saves `step` into a copy of the output `before`, whose newest checkpoint is `old_step`, with a fault at each system
// call. Afterwards the newest checkpoint must be the old or the new one, whole, and a new run must be able to clean up
// and save.
static void check_every_call(const std::string& before, int64_t old_step, int64_t step, int error) {
    const auto save_new = [step](const std::string& output) {  // of seed 99, which no checkpoint of `before` has
        const FlatState state(small_model, 99);
        save_checkpoint(save_options(output, 1), state.layout, state.reader(), trainer_state(step));
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

TEST_CASE("the checkpoints of a run that goes on, and deletes them, can be found and read") {
    fast_directory();
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    save(save_options(out, 1), 1);
    std::atomic<bool> ended = false;
    std::thread run([&] {
        for (int step = 2; !ended; step++) save(save_options(out, 1), step);
    });
    int found_damage = 0;
    std::set<std::string> errors;
    for (int i = 0; i < 500; i++) {
        try {
            found_damage += !find_model(out).damaged.empty();
        } catch (const Error& error) {
            errors.insert(error.what());
        }
    }
    ended = true;
    run.join();
    CHECK(found_damage == 0);
    CHECK(errors == std::set<std::string>{});
    FlatState state(small_model, 0);
    CHECK_THROWS_WITH_AS(load_weights(out + "/step_000001", state.layout, state.writer()),
                         doctest::Contains("step_000001: was deleted while it was read, probably by a run"), Error);
}

TEST_CASE("a save killed or failing at any system call: the next step") {
    fast_directory();
    const TemporaryDirectory dir;
    save(save_options(dir / "before"), 1);
    for (int error : {0, EIO, ENOSPC}) check_every_call(dir / "before", 1, 2, error);
}

TEST_CASE("a save killed or failing at any system call: the same step again") {
    fast_directory();
    const TemporaryDirectory dir;
    save(save_options(dir / "before"), 2);
    for (int error : {0, EIO}) check_every_call(dir / "before", 2, 2, error);
}
