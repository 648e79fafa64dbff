// small_checkpoint.h: checkpoints of the model of small_state.h, for the tests of checkpoint/checkpoint.h.
#pragma once
#include <xxhash.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "support/refusal.h"
#include "support/small_state.h"
#include "support/temporary.h"

inline TrainerState trainer_state(int64_t step) {
    TrainerState state;
    state.step = step, state.position = step * 17 + 3, state.tokens = step << 40, state.seed = ~uint64_t(0) - step;
    state.val_loss = 3.0 + 1.0 / 3.0, state.best_loss = 2.0 + 1.0 / 3.0, state.best_step = step;
    state.options = {{"lr", 0.0006}, {"model", "d12"}, {"steps", 100}};
    state.data = {{"files", 2}, {"hash", "00ff"}};
    return state;
}

// The directory OUTPUT of a run, for TEST_CASE_FIXTURE.
struct Output {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
};

inline SaveOptions save_options(const std::string& output, const KeepRules& keep = {}, bool bf16_weights = false) {
    SaveOptions options;
    options.output = output, options.keep = keep, options.format.bf16_weights = bf16_weights;
    options.config = new_hf_config(small_model);
    set_tokens(options.config, 6, -1, -1);
    options.write_tokenizer = [](const std::string& dir) {
        write_bytes(dir + "/vocab.json", R"({"a":0})");
        write_bytes(dir + "/merges.txt", "#version: 0.2\n");
    };
    return options;
}

using Names = std::vector<std::string>;

struct Saved {
    std::string dir;
    Names warnings;
};

// Saves a checkpoint whose weights and moments are random numbers with this seed.
inline Saved save(SaveOptions options, const TrainerState& trainer, uint64_t seed) {
    const FlatState state(small_model, seed);
    Names warnings;
    options.warn = [&](const std::string& line) { warnings.push_back(line); };
    const std::string dir = save_checkpoint(options, state.layout, state.view(), trainer);
    return {dir, warnings};
}
inline Saved save(const SaveOptions& options, int64_t step) {
    return save(options, trainer_state(step), uint64_t(step));
}

// Whether the checkpoint in `dir` is whole and has the weights and moments of `seed`. save() uses the step as the seed.
inline bool holds(const std::string& dir, int64_t step, uint64_t seed) {
    FlatState got(small_model, 0);
    const TrainerState trainer = load_checkpoint(dir, got.layout, got.writer());
    const auto values = [](const TrainerState& s) {
        return std::tuple(s.step, s.position, s.tokens, s.seed, s.val_loss, s.best_loss, s.best_step, s.options,
                          s.data);
    };
    return same_tensors(got, FlatState(small_model, seed)) && values(trainer) == values(trainer_state(step));
}
inline bool holds(const std::string& dir, int64_t step) { return holds(dir, step, uint64_t(step)); }

// The error that verify_checkpoint throws, as "65 message". Empty if the checkpoint is whole.
inline std::string verify_error(const std::string& dir) {
    return refusal([&] { verify_checkpoint(dir); });
}

// Writes a trainer.json with a checksum that matches.
inline void write_state(const std::string& dir, nlohmann::json state) {
    state.erase("xxh3_64");
    const std::string text = state.dump();
    state["xxh3_64"] = format("%016llx", static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
    write_bytes(dir + "/trainer.json", state.dump());
}
inline void write_changed_state(const std::string& dir, const std::function<void(nlohmann::json& state)>& change) {
    nlohmann::json state = nlohmann::json::parse(read_bytes(dir + "/trainer.json"));
    change(state);
    write_state(dir, state);
}
