// algorithms.h: the algorithms of matmuls and attention on a GPU, which --autotune chooses by timing (base/device.h).
// They are kept for later runs in $XDG_CACHE_HOME/train_gpt2/algorithms.txt or below ~/.cache. All ranks compute with
// the algorithms of rank 0. On the CPU there are none.
#pragma once
#include "parallel/comm.h"
#include "train/log.h"
#include "train/optimizer.h"
#include "train/options.h"

// Called by all ranks before a model is made. Loads the algorithms that earlier runs have timed on rank 0's machine.
void load_kept_algorithms(const Options& options, Comm& world);
// Called by all ranks. Rank 0 times the algorithms of shapes that no earlier run has timed on its machine. This changes
// gradients and activations.
template <class floatX>
void time_algorithms(GPT2<floatX>& model, Optimizer<floatX>& optimizer, const Options& options, Comm& world, Log& log);
