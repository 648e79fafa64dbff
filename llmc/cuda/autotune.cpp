#include "cuda/autotune.h"

#include <cinttypes>
#include <sstream>

#include "base/common.h"

std::string choices_text(const AlgorithmChoices& choices) {
    std::string text;
    for (const auto& [shape, algorithm] : choices) text += shape + ": " + algorithm + "\n";
    return text;
}

AlgorithmChoices parse_choices(const std::string& text) {
    AlgorithmChoices choices;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
        if (const size_t colon = line.rfind(": "); colon != std::string::npos)
            choices[line.substr(0, colon)] = line.substr(colon + 2);
    return choices;
}

std::string choice_text(const MatmulChoice& choice) {
    std::string text = std::to_string(choice.route);
    for (const uint64_t word : choice.algorithm) text += format(" %" PRIx64, word);
    return text;
}

std::optional<MatmulChoice> parse_matmul_choice(const std::string& text) {
    std::istringstream words(text);
    MatmulChoice choice;
    words >> choice.route >> std::hex;
    for (uint64_t& word : choice.algorithm) words >> word;
    if (!words || choice.route < 0) return {};
    return choice;
}

// ---- The current choices

namespace {

// One host thread queues all work of a GPU, so the choices need no lock.
struct Choices {
    AlgorithmChoices all;
    int version = 0;
    bool timing = false;
};

Choices& choices() {
    static Choices choices;
    return choices;
}

}  // namespace

bool gpu::timing_algorithms() { return choices().timing; }
int gpu::algorithms_version() { return choices().version; }

std::string gpu::choice_for(const std::string& key) {
    const auto found = choices().all.find(key);
    return found == choices().all.end() ? "" : found->second;
}

void gpu::keep_choice(const std::string& key, const std::string& choice, const Fastest& times) {
    choices().all[key] = choice + format(" %.4f ms, first %.4f ms", double(times.ms), double(times.first_ms));
}

const AlgorithmChoices& gpu::algorithms() { return choices().all; }

void gpu::load_algorithms(const AlgorithmChoices& all) {
    choices().all = all;
    choices().version++;
}

void device_load_algorithms(const std::string& text) { gpu::load_algorithms(parse_choices(text)); }
std::string device_algorithms() { return choices_text(choices().all); }
void device_time_algorithms(bool on) { choices().timing = on; }
