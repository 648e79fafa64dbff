// foreign_options.h: names of options in other trainers, so that an error can suggest this program's option: nanoGPT,
// Hugging Face's Trainer, PyTorch's scripts, and llm.c's letters that this program does not have.
#pragma once
#include <span>
#include <string>

struct ForeignOption {
    const char* names;  // separated by spaces; with underscores after "--"
    const char* whose;  // the other trainer
    const char* here;   // "it is --steps", or why there is no such option; own_option() finds the option in this text
};

// The whole table.
std::span<const ForeignOption> foreign_options();

// The table's row for an option (--max_iters, --max-iters); null if no trainer in the table has such an option.
const ForeignOption* find_foreign_option(const std::string& name);
// The option of this program that a row names first: "--steps"; empty if the row names none.
std::string own_option(const ForeignOption& foreign);
