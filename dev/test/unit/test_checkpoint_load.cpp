// test_checkpoint_load.cpp: tests which checkpoint of a run is loaded, and that checkpoints with damaged files,
// impossible counts, or without read permission are refused. dev/test/cli/test_damaged_files.py tests
// what the commands say.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/faults.h"
#include "support/parse.h"
#include "support/small_checkpoint.h"
#include "train/run.h"

namespace fs = std::filesystem;
using nlohmann::json;

TEST_CASE_FIXTURE(Output, "a NaN in weights or moments is refused, even if the checksum matches") {
    for (std::vector<float> FlatState::*buffer : {&FlatState::weights, &FlatState::m, &FlatState::v}) {
        FlatState state(small_model, 1), got(small_model, 0);
        (state.*buffer)[size_t(state.layout.offset(fcb, 1) + 3)] = NAN;
        const std::string saved = save_checkpoint(save_options(out), state.layout, state.view(), trainer_state(1));
        CHECK(verify_error(saved) == "");
        const auto loaded = [&] { load_checkpoint(saved, got.layout, got.writer()); };
        CHECK(contains(refusal(loaded), "transformer.h.1.mlp.c_fc.bias is nan, so the model cannot"));
    }
}

TEST_CASE_FIXTURE(Output, "impossible values in trainer.json are refused, even if its checksum matches") {
    SaveOptions without_tokenizer = save_options(out);
    without_tokenizer.write_tokenizer = nullptr;
    const std::string saved = save(without_tokenizer, 1).dir, path = saved + "/trainer.json";
    const json good = json::parse(read_bytes(path));
    const auto said = [&](const char* pointer, const json& value) {
        write_changed_state(saved, [&](json& state) { (state = good)[json::json_pointer(pointer)] = value; });
        verify_checkpoint(saved);
        return refusal([&] { read_trainer_state(saved); });
    };
    CHECK(said("/seed", UINT64_MAX) == "");
    const std::pair<const char*, std::vector<json>> cases[] = {
        {"/step", {-1, 1e300, "1", nullptr, INT32_MAX, UINT64_MAX}},
        {"/position", {-1, 1.5, "1", nullptr, UINT64_MAX, (int64_t(1) << 60) + 1}},
        {"/tokens", {-1, 1.5, "1", nullptr, UINT64_MAX, (int64_t(1) << 60) + 1}},
        {"/seed", {-1, 1.5, 1e300}},
        {"/options", {json::array(), "--lr 1", nullptr}},
        {"/val_step", {2, -2, "1"}},
        {"/best_step", {2, -2, "1"}},
        {"/best_loss", {"1", false}},
    };
    for (const auto& [pointer, bad] : cases)
        for (const json& value : bad) {
            const std::string what = format("%s %s", std::string(pointer).c_str(), value.dump().c_str());
            CAPTURE(what);
            CHECK(said(pointer, value).starts_with("65 " + path + ": "));
            CHECK(said(pointer, value).ends_with("; the checkpoint is damaged"));
        }
    for (const auto& [pointer, value] : {std::pair{"/options/seq-len", json("16")}, {"/options/init", json(3)}}) {
        CHECK(said(pointer, value) == "");
        const Options resume = train({"--resume", "--output", out.c_str()});
        CHECK(
            contains(refusal([&] { find_training_start(resume, Comm()); }), "an option has a value of the wrong type"));
    }
}

TEST_CASE_FIXTURE(Output, "a checkpoint of Muon has no second moments of matrices, and they are estimated") {
    SaveOptions options = save_options(out);
    options.format.muon = true;
    const std::string saved = save(options, 1).dir;
    CHECK(open_safetensors(saved + "/optimizer.safetensors").tensors.size() == 2 * 28 - 8);
    FlatState got(small_model, 0), want(small_model, 1);
    CHECK(load_checkpoint(saved, got.layout, got.writer()).by_muon);
    for_each_tensor(got.layout, [&](Param p, int l) {
        double squares = 0.0;
        const auto size = got.layout.size(p), begin = got.layout.offset(p, l);
        for (int64_t i = begin; i < begin + size; i++) squares += std::pow(double(want.m[size_t(i)]), 2);
        for (int64_t i = begin; i < begin + size && is_layer_matrix(p); i++) {
            CHECK(got.v[size_t(i)] == doctest::Approx(39.0 * squares / double(size)));
            want.v[size_t(i)] = got.v[size_t(i)];
        }
    });
    CHECK(same_tensors(got, want));
}

TEST_CASE_FIXTURE(Output, "a trainer.json is refused that names other files, is of another version, or is missing") {
    const std::string saved = save(save_options(out), 1).dir, path = saved + "/trainer.json";
    const json good = json::parse(read_bytes(path));
    write_bytes(out + "/outside", "x");
    for (const std::string& name : {std::string("../outside"), out + "/outside", std::string("..\0", 3),
                                    std::string("a\x1b[2J"), std::string("a\nerror: b")}) {
        json state = good;
        state["files"][name] = {{"size", 1}, {"xxh3_64", "0"}};
        write_state(saved, state);
        CHECK(verify_error(saved) == "65 " + path + ": its list of files cannot be read; the checkpoint is damaged");
    }
    write_changed_state(saved, [](json& state) { state["format"] = 2; });
    CHECK(contains(verify_error(saved), "has format 2, but this program reads format 1"));
    remove_tree(path);
    CHECK(contains(verify_error(saved), "give it with --init"));
    CHECK(verify_error(out).starts_with("66 "));  // a run's output, not one of its checkpoints
}

TEST_CASE_FIXTURE(Output, "damage of any file is found, the file is named, and the previous checkpoint is used") {
    save(save_options(out), 1);
    const std::string newest = save(save_options(out), 2).dir;
    for (const std::string& name : list_directory(newest)) {
        const std::string path = newest + "/" + name, bytes = read_bytes(path);
        std::vector<std::string> contents = {bytes.substr(0, bytes.size() - 2), bytes + "x", ""};
        for (size_t i = 0; i < bytes.size(); i += std::max<size_t>(1, bytes.size() / 200)) {
            contents.push_back(bytes);
            contents.back()[i] = char(bytes[i] ^ 1 << i % 8);
        }
        int found = 0;
        for (const std::string& damaged : contents) {
            write_bytes(path, damaged);
            found += verify_error(newest).starts_with("65 " + path + ": ");
        }
        CAPTURE(name);
        CHECK(found == int(contents.size()));
        const FoundCheckpoint latest = find_latest(out);
        CHECK(latest.dir == out + "/step_000001");
        REQUIRE(latest.damaged.size() == 1);
        CHECK(latest.damaged[0].starts_with(path + ": "));
        remove_tree(path);
        CHECK(contains(verify_error(newest), name));
        CHECK(verify_error(newest).starts_with(name == "trainer.json" ? "66 " : "65 "));
        write_bytes(path, bytes);
    }
    CHECK(find_latest(out).dir == newest);
}

TEST_CASE_FIXTURE(Output, "a file of another size is refused before it is read") {
    const std::string saved = save(save_options(out), 1).dir, path = saved + "/config.json";  // the first file
    for (const auto& [size, says] : {std::pair{uintmax_t(1) << 40, "has 1,099,511,627,776 bytes, not "},  // sparse
                                     {uintmax_t(0), "has 0 bytes, not "}}) {
        fs::resize_file(path, size);
        CHECK(contains(refusal([&] { verify_checkpoint(saved, [] { FAIL("a file is read"); }); }), says));
    }
}

TEST_CASE_FIXTURE(Output, "find_latest and find_model take the newest whole checkpoint") {
    CHECK(find_latest(out).dir == "");
    CHECK(exit_code_of([&] { find_model(out); }) == EXIT_NO_INPUT);
    save(save_options(out), 1);
    const std::string newest = save(save_options(out), 2).dir;
    write_bytes(out + "/latest", "step_000001\n");  // as after a crash before `latest` was updated
    int parts = 0;                                  // calls of the function by which the watchdog sees progress
    CHECK(find_latest(out, [&] { parts++; }).dir == newest);
    CHECK(parts >= 4);
    CHECK(find_model(out).dir == newest);
    CHECK(find_model(newest).dir == newest);
    CHECK(
        contains(refusal([&] { find_model(newest + "/config.json"); }), "is a file; give the directory that holds it"));
    make_directories(out + "/step_000009");  // empty
    const FoundCheckpoint found = find_latest(out);
    CHECK(found.dir == newest);
    REQUIRE(found.damaged.size() == 1);
    CHECK(contains(found.damaged[0], "step_000009: is not a checkpoint"));
    make_directories(dir / "bad/step_000001");
    CHECK(exit_code_of([&] { find_latest(dir / "bad"); }) == EXIT_BAD_DATA);
    CHECK(exit_code_of([&] { find_model(dir / "bad"); }) == EXIT_BAD_DATA);
    write_bytes(newest + "/model.safetensors", "x");
    CHECK(contains(refusal([&] { find_model(newest); }), "/model.safetensors: has 1 bytes, not "));
}

TEST_CASE_FIXTURE(Output, "a directory with both a model and checkpoints is refused as ambiguous") {
    const std::string newest = save(save_options(out), 2).dir;
    CHECK(holds_model(newest));
    fs::copy(newest + "/config.json", out);
    CHECK_FALSE(holds_model(out));  // a config.json without weights is no model
    CHECK(find_model(out).dir == newest);
    for (const char* weights : {"/model.safetensors", "/model.safetensors.index.json"}) {
        write_bytes(out + weights, "x");
        CHECK(contains(refusal([&] { find_model(out); }), newest));
        remove_tree(out + weights);
    }
}

TEST_CASE_FIXTURE(Output, "a checkpoint without read permission is reported as such") {
    const std::string newest = out + "/step_000002";
    save(save_options(out), 1);
    const int failed = as_ordinary_user(dir.path, [&] {
        save(save_options(out), 2);
        const std::string hidden = newest + ": cannot open the directory: Permission denied";
        chmod(newest.c_str(), 0);
        const FoundCheckpoint found = find_latest(out);
        if (found.dir != out + "/step_000001" || found.damaged != Names{hidden}) return 1;
        if (refusal([&] { find_model(newest); }) != "66 " + hidden) return 2;
        chmod(newest.c_str(), 0700);
        return holds(find_latest(out).dir, 2) ? 0 : 3;
    });
    CHECK(failed == 0);
}
