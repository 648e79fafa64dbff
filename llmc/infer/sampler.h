// sampler.h: samples the next token from a row of logits (temperature, top-k, top-p).
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

struct Sampler {
    float temperature = 1.0f;         // divides the logits; 0: always the most likely token
    int top_k = 0;                    // only the k most likely tokens are candidates; 0: all
    float top_p = 1.0f;               // only the most likely tokens whose probabilities sum to p, at least one; 1: all
    float repetition_penalty = 1.0f;  // generate() applies it to the logits; 1: off
    uint64_t seed = 0;
    int vocab_size = std::numeric_limits<int>::max();  // tokens from here on, which pad the model's rows, are left out
    std::vector<int> candidates;                       // working memory
    std::vector<double> weights;
};

// Returns a token in [0, min(V, vocab_size)). The token depends only on the logits, settings, seed, text and position,
// not on earlier samples: text and position number the random draw. Of equal logits, the lower token counts as more
// likely. Refuses logits with NaN or +infinity, and a row without a finite logit (EXIT_BAD_DATA). A token with logit
// -infinity is never sampled.
int sample_token(Sampler& sampler, const float* logits, int V, uint64_t text, uint64_t position);
