// small_checkpoint.h: checkpoints of the model of small_state.h, for the tests of checkpoint/checkpoint.h.
#pragma once
#include <omp.h>
#include <unistd.h>

#include <xxhash.h>

#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "support/refusal.h"
#include "support/small_state.h"
#include "support/temporary.h"

inline TrainerState trainer_state(int64_t step) {
    TrainerState state;
    state.step = step, state.position = step * 17 + 3, state.tokens = step << 40;
    state.seed = ~uint64_t(0) - uint64_t(step);
    state.val_loss = 3.0 + 1.0 / 3.0;
    state.options = R"({"lr":0.0006,"model":"d12","steps":100})";
    state.data = R"({"files":2,"hash":"00ff"})";
    return state;
}

inline SaveOptions save_options(const std::string& output, int keep = 0, bool bf16_weights = false) {
    SaveOptions options;
    options.output = output, options.keep.newest = keep, options.format.bf16_weights = bf16_weights,
    options.end_of_text = 6;
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

// Saves a checkpoint whose weights and moments are random numbers with seed `step`, so each step has different ones.
inline Saved save(SaveOptions options, int64_t step) {
    const FlatState state(small_model, uint64_t(step));
    Names warnings;
    options.warn = [&](const std::string& line) { warnings.push_back(line); };
    const std::string dir = save_checkpoint(options, state.layout, state.view(), trainer_state(step));
    return {dir, warnings};
}

// Whether the checkpoint in `dir` is whole and has the weights and moments of `seed`. save() uses the step as the seed.
inline bool holds(const std::string& dir, int64_t step, uint64_t seed) {
    FlatState got(small_model, 0);
    const TrainerState trainer = load_checkpoint(dir, got.layout, {"m", "v"}, got.writer());
    const TrainerState want = trainer_state(step);
    return same_tensors(got, FlatState(small_model, seed)) && trainer.step == step &&
           trainer.position == want.position && trainer.tokens == want.tokens && trainer.seed == want.seed &&
           trainer.val_loss == want.val_loss;
}
inline bool holds(const std::string& dir, int64_t step) { return holds(dir, step, uint64_t(step)); }

// The error that verify_checkpoint throws, as "65 message". Empty if the checkpoint is whole.
inline std::string verify_error(const std::string& dir) {
    return refusal([&] { verify_checkpoint(dir); });
}

// Writes a trainer.json with a checksum that matches.
inline void write_sealed(const std::string& path, nlohmann::json state) {
    state.erase("xxh3_64");
    const std::string text = state.dump();
    state["xxh3_64"] = format("%016llx", static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
    write_bytes(path, state.dump());
}

// Changes values in the trainer.json of a checkpoint, whose checksum matches again afterwards.
inline void write_changed_state(const std::string& dir, const std::function<void(nlohmann::json& state)>& change) {
    nlohmann::json state = nlohmann::json::parse(read_bytes(dir + "/trainer.json"));
    change(state);
    write_sealed(dir + "/trainer.json", state);
}

// Puts later temporary directories into memory, so that hundreds of saves are fast.
inline void save_in_memory() {
    const char* shm = "/dev/shm";
    if (access(shm, W_OK) == 0) setenv("TMPDIR", shm, 1);
    omp_set_num_threads(1);
}
