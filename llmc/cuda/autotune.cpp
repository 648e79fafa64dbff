#include "cuda/autotune.h"

#include <charconv>
#include <cinttypes>
#include <string_view>

#include "base/common.h"

std::string choices_text(const AlgorithmChoices& choices) {
    std::string text;
    for (const auto& [shape, algorithm] : choices) text += shape + ": " + algorithm + "\n";
    return text;
}

AlgorithmChoices parse_choices(const std::string& text) {
    AlgorithmChoices choices;
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        const size_t colon = line.rfind(": ");
        if (colon != std::string::npos) choices[line.substr(0, colon)] = line.substr(colon + 2);
    }
    return choices;
}

// Takes `before` and a number from the start of the text. Returns false if they are not there, or if the number is
// out of range.
template <class Number>
static bool take(std::string_view& text, std::string_view before, Number& number, int base = 10) {
    if (!text.starts_with(before)) return false;
    text.remove_prefix(before.size());
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
    text.remove_prefix(size_t(end - text.data()));
    return error == std::errc();
}

std::string choice_text(const MatmulChoice& choice) {
    std::string text = std::to_string(choice.route);
    for (const uint64_t word : choice.algorithm) text += format(" %" PRIx64, word);
    return text;
}

std::optional<MatmulChoice> parse_matmul_choice(const std::string& text) {
    std::string_view rest = text;
    MatmulChoice choice;
    if (!take(rest, "", choice.route) || choice.route < 0) return {};
    for (uint64_t& word : choice.algorithm)
        if (!take(rest, " ", word, 16)) return {};
    return choice;
}

std::string choice_text(const PlanChoice& choice) {
    return format("%d engine %d part %d", choice.candidate, choice.engine, choice.part);
}

std::optional<PlanChoice> parse_plan_choice(const std::string& text) {
    std::string_view rest = text;
    PlanChoice choice;
    const bool read =
        take(rest, "", choice.candidate) && take(rest, " engine ", choice.engine) && take(rest, " part ", choice.part);
    if (!read || choice.candidate < 0 || choice.part < 1) return {};
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
