// sources: llmc/checkpoint/*.cpp llmc/model/params.cpp llmc/base/json.cpp llmc/base/files.cpp llmc/base/print.cpp
// llmc/text/unicode.cpp llmc/base/common.cpp
//
// fuzz_trainer_state.cpp: reads any text as the trainer.json of a checkpoint, or, by the first byte, any text as one
// value of a valid one. The target writes the checksum that matches, to reach the checks after it. The text must be
// refused by an Error, or give a state whose values are possible.
#include <xxhash.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "base/files.h"
#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "fuzz.h"

// OUTPUT, with a checkpoint of which only trainer.json exists.
static std::string make_output() {
    make_directories(checkpoint_directory(memory_directory().path, 1));
    return memory_directory().path;
}

static const nlohmann::json valid = {{"format", 1},
                                     {"step", 20},
                                     {"position", 640},
                                     {"tokens", 10240},
                                     {"seed", 42},
                                     {"val_loss", 3.5},
                                     {"val_step", 20},
                                     {"options", {{"lr", 0.001}}},
                                     {"data", {{"train", "00ff"}}},
                                     {"files", {{"config.json", {{"size", 1}, {"xxh3_64", "00"}}}}}};

// trainer.json with a checksum that matches; the text itself if it is no JSON.
static std::string make_state(const uint8_t* data, size_t size) {
    if (size == 0) return "";
    const std::string text = as_text(data + 1, size - 1);
    auto value = std::next(valid.begin(), data[0] % (valid.size() + 1));
    try {
        nlohmann::json state = valid;
        if (value == valid.end())
            state = parse_json(text, "trainer.json");
        else
            state[value.key()] = parse_json(text, "a value");
        if (!state.is_object()) return text;
        state.erase("xxh3_64");
        const std::string rest = state.dump();
        state["xxh3_64"] = format("%016llx", static_cast<unsigned long long>(XXH3_64bits(rest.data(), rest.size())));
        return state.dump();
    } catch (const Error&) {
        return text;
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const std::string output = make_output(), dir = checkpoint_directory(output, 1);
    write_bytes(dir + "/trainer.json", make_state(data, size));
    try {
        verify_checkpoint(dir);  // reads the list of files
    } catch (const Error&) {
    }
    TrainerState state;
    try {
        state = read_trainer_state(dir);
    } catch (const Error&) {
        return 0;
    }
    require(0 <= state.step && 0 <= state.position && 0 <= state.tokens);
    require(-1 <= state.val_step && state.val_step <= state.step);
    require(parse_json(state.options, "options").is_object());
    parse_json(state.data, "data");
    best_checkpoint(output);
    return 0;
}
