// foreign_options.h: names of options in other trainers, so that an error can suggest this program's option: nanoGPT,
// Hugging Face's Trainer, PyTorch's scripts, and llm.c's letters that this program does not have.
#pragma once
#include <string>

struct ForeignOption {
    const char* names;  // separated by spaces; with underscores after "--"
    const char* whose;  // the other trainer
    const char*
        here;  // "it is --steps", or why there is no such option; the first option named in it is this program's
};

// The row for --max_iters, --max-iters and so on; null if no trainer in the table has such an option.
const ForeignOption* find_foreign_option(const std::string& name);
// This program's option that the row names first: "--steps"; empty if it names none.
std::string own_option(const ForeignOption& foreign);
