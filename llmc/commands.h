// commands.h: the commands that only read a model. What they return is the exit code.
#pragma once
#include "options.h"

// Prints the text as it comes; notes go to stderr, so that stdout holds text alone.
template <class floatX>
int generate_text(const Options& options);
// Prints the loss on --val-data.
template <class floatX>
int eval_loss(const Options& options);
