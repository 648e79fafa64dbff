// commands.h: the commands that only read a model; what they return is the exit code. And what main needs to know of a
// run that is continued.
#pragma once
#include "options.h"

// For --resume: the options in OUTPUT/run.json, as options_json wrote them at the last start of the run there. Relative
// paths become absolute if that start was in another directory. Empty: there is no such file, and the options that were
// given are enough.
std::string saved_options(const Options& options);

// Prints the text as it comes; notes go to stderr, so that stdout holds text alone.
template <class floatX>
int generate_text(const Options& options);
// Prints the loss on --val-data.
template <class floatX>
int eval_loss(const Options& options);
