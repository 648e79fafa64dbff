// eval.h: computes the mean loss on a fixed set of windows, for validation and the command `eval`.
#pragma once
#include <functional>
#include <optional>

#include "data/dataloader.h"
#include "model/gpt2.h"
#include "parallel/comm.h"

// Mean loss, in nats per token, over one pass of all ranks' loaders, which must have in_order. Afterwards the loaders
// are at the start of the next pass. The result is bitwise independent of the number of ranks and the micro-batch size.
//
// go_on(batches done, number of batches) is called before each batch; false ends the pass early. If any rank did not
// finish its pass, no rank has a result.
template <class floatX>
std::optional<double> evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm,
                               const std::function<bool(int64_t done, int64_t of)>& go_on);
