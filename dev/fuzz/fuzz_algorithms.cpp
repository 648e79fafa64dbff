// sources: llmc/cuda/autotune.cpp llmc/base/common.cpp
//
// fuzz_algorithms.cpp: reads any bytes as the file that keeps the algorithms chosen by --autotune. What it has read,
// the whole file and the choice for one matmul, must be equal after it is written and read again.
#include "cuda/autotune.h"
#include "fuzz.h"

static void check_choice(const std::string& text) {
    if (const auto choice = parse_matmul_choice(text))
        require(choice->route >= 0 && parse_matmul_choice(choice_text(*choice)) == choice);
}

void fuzz(std::string_view input) {
    const std::string text(input);
    const AlgorithmChoices choices = parse_choices(text);
    require(parse_choices(choices_text(choices)) == choices);
    for (const auto& [shape, choice] : choices) check_choice(choice);
    check_choice(text);
}
