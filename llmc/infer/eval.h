// eval.h: the loss on a fixed set of text.
#pragma once
#include <functional>
#include <optional>

#include "data/dataloader.h"
#include "model/gpt2.h"
#include "parallel/comm.h"

// Mean loss, in nats per token, over one pass of the loaders of all ranks with fixed_set; leaves them at the start of
// the next pass. Its bits depend neither on the number of ranks nor on the micro-batch.
//
// go_on(batches done, of how many, whether this rank has met an error) is called before each batch; false ends the pass
// early. Where any rank has not come to its end, none has a result. What the loader threw is thrown at the end, when
// the other ranks know.
template <class floatX>
std::optional<double> evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm,
                               const std::function<bool(int64_t done, int64_t of, bool failed)>& go_on);
