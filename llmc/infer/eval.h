// eval.h: computes the mean loss on a fixed set of windows, and log-probabilities of the last tokens of given
// sequences, for validation, tasks and the command `eval`.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "data/dataloader.h"
#include "model/gpt2.h"
#include "parallel/comm.h"

// Called before each batch with the number of batches done and of all; false ends the pass early. If any rank did not
// finish its pass, no rank has a result.
using GoOn = std::function<bool(int64_t done, int64_t of)>;

// Mean loss, in nats per token, over one pass of all ranks' loaders, which must have in_order. Afterwards the loaders
// are at the start of the next pass. The result is bitwise independent of the number of ranks and the micro-batch size.
template <class floatX>
std::optional<double> evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm, const GoOn& go_on);

struct Sequence {
    std::vector<int> tokens;  // 2 to T + 1
    int scored;               // first token that is scored, at least 1
    int compared;             // first token of the part over which acc_mean is computed, at least 1
    int64_t bytes = 0;        // length of the scored text
};

struct Score {
    double logprob, compared;  // sums over the tokens from Sequence::scored on, and from Sequence::compared on
    double greedy;             // 1: each scored token is the likeliest one; 0: not, or not asked for
};

// Called by all ranks of `comm`, with the same sequences. Each rank scores some of the batches, in which sequences of
// similar length share at most model.B x model.T tokens; every rank returns the scores of all. A score does not depend
// on the number of ranks, because the batches do not. greedy: also computes Score::greedy, at the cost of one row of
// logits for most sequences. Refuses ranks with different sequences (EXIT_BAD_DATA).
template <class floatX>
std::optional<std::vector<Score>> score(GPT2<floatX>& model, const std::vector<const Sequence*>& sequences, bool greedy,
                                        Comm& comm, const GoOn& go_on);
