// eval.h: the loss on a fixed set of text.
#pragma once
#include <functional>

#include "dataloader.h"
#include "gpt2.h"

// Mean loss, in nats per token, over one pass of a loader with fixed_set; leaves it at the start of the next pass.
// progress(batches done, of how many) is called before each batch.
template <class floatX>
double evaluate(GPT2<floatX>& model, DataLoader& loader, const std::function<void(int64_t done, int64_t of)>& progress);
