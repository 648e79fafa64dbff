// init_weights.h: GPT-2's initialization (init_param in params.h) of a whole model, by all ranks together.
#pragma once
#include "train/optimizer.h"

// Called by all ranks. Uses the memory of the gradients. The weights do not depend on the number of ranks.
template <class floatX>
void init_weights(Optimizer<floatX>& optimizer, uint64_t seed);
