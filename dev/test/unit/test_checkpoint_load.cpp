// test_checkpoint_load.cpp: tests which checkpoint of a run is loaded, and that checkpoints with damaged files,
// impossible counts, another shape, or without read permission are refused.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "train/options.h"
#include "support/faults.h"
#include "support/small_checkpoint.h"
#include "train/run.h"

namespace fs = std::filesystem;

TEST_CASE("--init reads the weights of a checkpoint, in fp32 and in bf16") {
    const TemporaryDirectory dir;
    FlatState want(small_model, 7), got(small_model, 0);
    load_weights(save(save_options(dir / "a"), 7).dir, got.layout, got.writer());
    CHECK(same_tensors(got, want, false));
    load_weights(save(save_options(dir / "b", 0, true), 7).dir, got.layout, got.writer());
    for (float& x : want.weights) x = float(bf16(x));
    CHECK(same_tensors(got, want, false));
}

TEST_CASE("a NaN in weights or moments is refused, even if the checksum matches") {
    for (std::vector<float> FlatState::*buffer : {&FlatState::weights, &FlatState::m, &FlatState::v}) {
        const TemporaryDirectory dir;
        FlatState state(small_model, 1), got(small_model, 0);
        (state.*buffer)[size_t(state.layout.offset(fcb, 1) + 3)] = NAN;
        const std::string saved =
            save_checkpoint(save_options(dir / "out"), state.layout, state.view(), trainer_state(1));
        CHECK(verify_error(saved) == "");
        CHECK_THROWS_WITH_AS(load_checkpoint(saved, got.layout, {"m", "v"}, got.writer()),
                             doctest::Contains("transformer.h.1.mlp.c_fc.bias is nan, so the model cannot"), Error);
    }
}

TEST_CASE("a checkpoint of another shape is refused before any tensor is loaded") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir;
    const ParamLayout other({.max_T = 5, .V = 7, .L = 2, .NH = 2, .C = 8});
    const TensorWriter nowhere = [](const float*, Slot, Param, int) { FAIL("no tensor may be loaded"); };
    CHECK_THROWS_WITH_AS(
        load_checkpoint(ckpt, other, {"m", "v"}, nowhere),
        doctest::Contains("model.safetensors: transformer.wte.weight is F32 [7, 6], but a model of 2 layers "
                          "and 8 channels needs [7, 8]; wrong --model?"),
        Error);
}

TEST_CASE("impossible values in trainer.json are refused, even if its checksum matches") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir, path = ckpt + "/trainer.json";
    const nlohmann::json good = nlohmann::json::parse(read_bytes(path));
    const auto said = [&](const char* name, const nlohmann::json& value) {
        nlohmann::json state = good;
        state[name] = value;
        write_sealed(path, state);
        verify_checkpoint(ckpt);
        return refusal([&] { read_trainer_state(ckpt); });
    };
    const std::string wrong_type =
        "65 " + path + ": a value is missing or of the wrong type; the checkpoint is damaged";
    for (const char* name : {"step", "position", "tokens"}) {
        for (const nlohmann::json& bad :
             {nlohmann::json(-1), nlohmann::json(1e300), nlohmann::json("1"), nlohmann::json(nullptr)})
            CHECK(said(name, bad) == wrong_type);
        for (const nlohmann::json& bad : {nlohmann::json(UINT64_MAX), nlohmann::json((int64_t(1) << 60) + 1)})
            CHECK(said(name, bad) == "65 " + path + ": " + name + " is " + bad.dump() +
                                         ", which is impossible; the checkpoint is damaged");
    }
    CHECK(said("step", INT32_MAX).starts_with("65 "));
    for (const nlohmann::json& bad : {nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json(1e300)})
        CHECK(said("seed", bad) == wrong_type);
    CHECK(said("seed", UINT64_MAX) == "");
    for (const nlohmann::json& bad : {nlohmann::json::array(), nlohmann::json("--lr 1"), nlohmann::json(nullptr)})
        CHECK(said("options", bad) == wrong_type);
}

TEST_CASE("a resume refuses options of the wrong type in trainer.json, even if its checksum matches") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    SaveOptions save_without_tokenizer = save_options(out);
    save_without_tokenizer.write_tokenizer = nullptr;
    const std::string path = save(save_without_tokenizer, 1).dir + "/trainer.json";
    const nlohmann::json good = nlohmann::json::parse(read_bytes(path));
    const char* argv[] = {"train_gpt2", "--resume", "--output", out.c_str(), "--train-data", "x.bin"};
    const Options options = parse_options(6, argv);
    const auto said = [&](const char* name, const nlohmann::json& value) {
        nlohmann::json state = good;
        state["options"] = {{name, value}};
        write_sealed(path, state);
        return refusal([&] { find_training_start(options, Comm()); });
    };
    CHECK(said("seq-len", good["options"].value("seq-len", 0)) == "");
    for (const nlohmann::json& bad : {nlohmann::json("16"), nlohmann::json(1e300), nlohmann::json::array()})
        CHECK(said("seq-len", bad) ==
              "65 " + path + ": an option has a value of the wrong type; the checkpoint is damaged");
    CHECK(said("init", 3) == "65 " + path + ": an option has a value of the wrong type; the checkpoint is damaged");
}

TEST_CASE("trainer.json cannot name a file outside of the checkpoint, nor control the terminal") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir, path = ckpt + "/trainer.json";
    nlohmann::json state = nlohmann::json::parse(read_bytes(path));
    const nlohmann::json files = state["files"];
    write_bytes(dir / "out/outside", "x");
    for (const std::string& name : {std::string("../outside"), dir / "out/outside", std::string("..\0", 3),
                                    std::string("a\x1b[2J"), std::string("a\nerror: b"), std::string("..")}) {
        state["files"] = files;
        state["files"][name] = {{"size", 1}, {"xxh3_64", "0"}};
        write_sealed(path, state);
        CHECK(refusal([&] { verify_checkpoint(ckpt); }) ==
              "65 " + path + ": its list of files cannot be read; the checkpoint is damaged");
    }
}

TEST_CASE("a trainer.json of another program or version is refused") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir;
    CHECK(verify_error(dir / "none").starts_with("66 "));
    CHECK(verify_error(dir / "out").starts_with("66 "));  // a run's output, not one of its checkpoints
    write_bytes(ckpt + "/trainer.json", "[]");
    CHECK(verify_error(ckpt).starts_with("65 "));
    write_bytes(ckpt + "/trainer.json", R"({"format":2,"xxh3_64":"x"})");
    CHECK(verify_error(ckpt).starts_with("65 "));
    remove_tree(ckpt + "/trainer.json");
    CHECK(verify_error(ckpt).find("give it with --init") != std::string::npos);
}

TEST_CASE("a flipped bit in any file is found, the file is named, and the previous checkpoint is used") {
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
        CHECK(found.damaged[0].starts_with(path + ": "));
        write_bytes(path, bytes);
    }
    CHECK(find_latest(dir / "out").dir == newest);
}

TEST_CASE("a file that is cut, longer, empty or missing is found and named") {
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

TEST_CASE("a file of another size is refused before it is read") {
    const TemporaryDirectory dir;
    const std::string ckpt = save(save_options(dir / "out"), 1).dir, path = ckpt + "/config.json";
    std::filesystem::resize_file(path, uintmax_t(1) << 40);  // sparse; its checksum would take minutes
    const auto progress = [] { FAIL("a file is read"); };    // config.json is the first file
    CHECK_THROWS_WITH_AS(verify_checkpoint(ckpt, progress), doctest::Contains("has 1,099,511,627,776 bytes, not "),
                         Error);
    std::filesystem::resize_file(path, 0);
    CHECK_THROWS_WITH_AS(verify_checkpoint(ckpt, progress), doctest::Contains("has 0 bytes, not "), Error);
}

TEST_CASE("find_latest and find_model take the newest whole checkpoint") {
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
                "step_000001\n");  // as after a crash before `latest` was updated: the newest checkpoint is used
    CHECK(model(dir / "out") == newest);
    CHECK(model(newest) == newest);
    int parts = 0;  // calls of the function by which the watchdog sees progress
    const VerifyProgress progress = [&] { parts++; };
    find_latest(dir / "out", progress);
    CHECK(parts >= 4);
    find_model(newest, progress);
    CHECK(parts >= 6);
    make_directories(dir / "out/step_000009");  // empty
    const FoundCheckpoint found = find_latest(dir / "out");
    CHECK(found.dir == newest);
    REQUIRE(found.damaged.size() == 1);
    CHECK(found.damaged[0].find("step_000009: is not a checkpoint") != std::string::npos);
    make_directories(dir / "bad/step_000001");
    CHECK(exit_code_of([&] { find_latest(dir / "bad"); }) == EXIT_BAD_DATA);
    CHECK(model(dir / "bad") == "65");
}

TEST_CASE("a directory with both a model and checkpoints is refused as ambiguous") {
    const TemporaryDirectory dir;
    save(save_options(dir / "out"), 1);
    const std::string newest = dir / "out/step_000002";
    save(save_options(dir / "out"), 2);
    CHECK_FALSE(holds_model(dir / "out"));
    CHECK(holds_model(newest));
    fs::copy(newest + "/config.json", dir / "out");
    CHECK_FALSE(holds_model(dir / "out"));  // a config.json without weights is no model
    CHECK(find_model(dir / "out").dir == newest);
    for (const char* weights : {"model.safetensors", "model.safetensors.index.json"}) {
        write_bytes(dir / "out/" + weights, "x");
        CHECK(holds_model(dir / "out"));
        CHECK_THROWS_WITH_AS(find_model(dir / "out"), doctest::Contains(newest.c_str()), Error);
        remove_tree(dir / "out/" + weights);
    }
}

TEST_CASE("if all checkpoints are damaged, each is named; weights that differ from the saved ones are refused") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    const auto damage = [&](int step, const std::string& name) {
        const std::string path = format("%s/step_%06d/%s", out.c_str(), step, name.c_str());
        std::string bytes = read_bytes(path);
        bytes[bytes.size() / 2] = char(bytes[bytes.size() / 2] ^ 1);
        write_bytes(path, bytes);
    };
    CHECK(find_latest(out).dir == "");  // there is none yet
    save(save_options(out), 1);
    save(save_options(out), 2);
    damage(2, "optimizer.safetensors");
    CHECK(find_latest(out).dir == out + "/step_000001");
    CHECK(find_model(out + "/step_000002").dir == out + "/step_000002");  // its weights are intact
    damage(1, "model.safetensors");
    const std::string all = refusal([&] { find_latest(out); });
    CHECK(all.starts_with("65 " + out + ": none of its checkpoints is intact: "));
    for (const char* file : {"step_000002/optimizer.safetensors: ", "step_000001/model.safetensors: "})
        CHECK(all.find(file + std::string("its checksum does not match what was written")) != std::string::npos);
    CHECK(refusal([&] { find_model(out + "/step_000001"); }).starts_with("65 "));
}

TEST_CASE("a checkpoint without read permission is reported as such") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out", newest = out + "/step_000002";
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        save(save_options(out), 2);
        const std::string hidden = newest + ": cannot open the directory: Permission denied";
        chmod(newest.c_str(), 0);
        if (verify_error(newest) != "66 " + hidden) return 1;
        const FoundCheckpoint found = find_latest(out);
        if (found.dir != out + "/step_000001" || found.damaged != Names{hidden}) return 2;
        if (refusal([&] { find_model(newest); }) != "66 " + hidden) return 3;
        chmod(newest.c_str(), 0700);
        return holds(find_latest(out).dir, 2) ? 0 : 4;
    });
    CHECK(failed == 0);
}
