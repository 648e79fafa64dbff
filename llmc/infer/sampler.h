// sampler.h: the next token from a row of logits.
#pragma once
#include <cstdint>
#include <vector>

struct Sampler {
    float temperature = 1.0f;  // divides the logits; 0: always the likeliest token
    int top_k = 0;             // only the likeliest k are candidates; 0: all
    float top_p = 1.0f;        // only the likeliest whose probabilities sum to p, one at least; 1: all
    uint64_t seed = 0;
    std::vector<int> candidates;  // working memory
    std::vector<double> weights;
};

// A token in [0, V). The same for the same logits, settings, seed, text and position, whatever was sampled before: text
// and position number the random draw. Among equal logits the lower token counts as the likelier. Refuses logits with
// NaN or +infinity, and a row without a finite logit (EXIT_BAD_DATA); -infinity is a token that cannot come.
int sample_token(Sampler& sampler, const float* logits, int V, uint64_t text, uint64_t position);
