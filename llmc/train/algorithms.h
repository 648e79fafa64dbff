// algorithms.h: the algorithms of matmuls and attention on a GPU, chosen by timing (--autotune). The choices belong
// to a machine and not to a run: $XDG_CACHE_HOME/train_gpt2/algorithms.txt keeps them, or ~/.cache/train_gpt2.
#pragma once
#include "model/gpt2.h"
#include "train/run.h"

// Called by all ranks before the first step. Rank 0 times a micro-step on random tokens for the shapes that the file
// lacks. All ranks then take the same choices, so that they compute with the same algorithms. If the file cannot be
// read or written, the log has a note and training continues. Changes gradients and activations. Does nothing on the
// CPU.
template <class floatX>
void choose_algorithms(GPT2<floatX>& model, Run& run);

// Loads the choices of earlier runs, for `plan`.
void recall_algorithms();
