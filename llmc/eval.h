// eval.h: the loss on a fixed set of text.
#pragma once
#include <functional>

#include "comm.h"
#include "dataloader.h"
#include "gpt2.h"

// Mean loss, in nats per token, over one pass of the loaders of all ranks with fixed_set; leaves them at the start of
// the next pass. Its bits depend neither on the number of ranks nor on the micro-batch. progress(batches done, of how
// many) is called before each batch.
template <class floatX>
double evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm,
                const std::function<void(int64_t done, int64_t of)>& progress);
