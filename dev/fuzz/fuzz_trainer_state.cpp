// sources: llmc/checkpoint/*.cpp llmc/model/params.cpp llmc/base/content.cpp llmc/base/json.cpp llmc/base/files.cpp
// llmc/base/print.cpp llmc/text/unicode.cpp llmc/base/common.cpp
//
// fuzz_trainer_state.cpp: reads any text as the trainer.json of a checkpoint, or, by the first byte, any text as one
// value of a valid one. The target writes the checksum that matches, to reach the checks after it. The text must be
// refused by an Error, or give a state whose values are possible.
#include <iterator>

#include "base/files.h"
#include "base/json.h"
#include "fuzz.h"
#include "support/small_checkpoint.h"

using nlohmann::json;

static const json valid = {{"format", 1},
                           {"step", 20},
                           {"position", 640},
                           {"tokens", 10240},
                           {"seed", 42},
                           {"val_loss", 3.5},
                           {"val_step", 20},
                           {"best_loss", 3.25},
                           {"best_step", 10},
                           {"options", {{"lr", 0.001}}},
                           {"data", {{"train", "00ff"}}},
                           {"files", {{"config.json", {{"size", 1}, {"xxh3_64", "00"}}}}}};

void fuzz(std::string_view input) {
    static const std::string output = memory_directory().path, dir = checkpoint_directory(output, 1);
    if (input.empty()) return;
    const std::string text(input.substr(1));
    make_directories(dir);
    write_bytes(dir + "/trainer.json", text);
    exit_code_of([&] {
        const auto value = std::next(valid.begin(), uint8_t(input[0]) % (valid.size() + 1));
        json state = valid;
        (value == valid.end() ? state : state[value.key()]) = json::parse(json_text(parse_json(text, "trainer.json")));
        if (state.is_object()) write_state(dir, state);
    });
    exit_code_of([&] { verify_checkpoint(dir); });  // reads the list of files
    const TrainerState state = read_trainer_state(dir);
    require(0 <= state.step && 0 <= state.position && 0 <= state.tokens);
    require(-1 <= state.val_step && state.val_step <= state.step);
    require(-1 <= state.best_step && state.best_step <= state.step);
    require(state.options.type == Json::object);
    best_checkpoint(output);
}
