// algorithm_choices.h: algorithms that were chosen by timing, as text for a file and for other ranks. The text may have
// any content: lines and choices that cannot be read are ignored, and their shapes are timed again.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

using AlgorithmChoices = std::map<std::string, std::string>;

// Writes one choice per line: "device; libraries; shape: algorithm".
std::string choices_text(const AlgorithmChoices& choices);
AlgorithmChoices parse_choices(const std::string& text);

// A matmul's choice: the index of the route, and cuBLASLt's algorithm, of which only cuBLASLt knows the meaning.
struct MatmulChoice {
    int route;
    std::array<uint64_t, 8> algorithm;
    bool operator==(const MatmulChoice&) const = default;
};
std::string choice_text(const MatmulChoice& choice);
std::optional<MatmulChoice> parse_matmul_choice(const std::string& text);

// The choice of an attention by cuDNN: the number of the candidate, its engine, and the sequences that it processes at
// a time.
struct PlanChoice {
    int plan, engine, part;
    bool operator==(const PlanChoice&) const = default;
};
std::string choice_text(const PlanChoice& choice);
std::optional<PlanChoice> parse_plan_choice(const std::string& text);
