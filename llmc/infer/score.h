// score.h: log-probabilities of the last tokens of given sequences, for evaluation.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "model/gpt2.h"
#include "parallel/comm.h"

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
// logits for most sequences.
//
// go_on(batches done, number of batches) is called before each batch; false ends the pass early, on all ranks without a
// result. Refuses ranks with different sequences (EXIT_BAD_DATA).
template <class floatX>
std::optional<std::vector<Score>> score(GPT2<floatX>& model, const std::vector<const Sequence*>& sequences, bool greedy,
                                        Comm& comm, const std::function<bool(int64_t done, int64_t of)>& go_on);
