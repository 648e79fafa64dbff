// foreign_options.h: options as other trainers call them, for a hint at ours: nanoGPT, Hugging Face's Trainer,
// PyTorch's scripts, and the letters of llm.c that mean nothing here.
#pragma once
#include <string>

struct ForeignOption {
    const char* names;  // separated by blanks; after "--" with underscores
    const char* whose;
    const char* here;  // "it is --steps", or why there is none; the first option in it is ours
};

// The row of --max_iters, --max-iters and so on; null: nobody calls an option so.
const ForeignOption* find_foreign_option(const std::string& name);
// The option of ours that its text names first: "--steps"; empty: there is none.
std::string own_option(const ForeignOption& foreign);
