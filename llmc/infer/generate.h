// generate.h: generates text from the model, one token at a time, with a key-value cache, and samples the next token
// from a row of logits (temperature, top-k, top-p).
#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model/gpt2.h"

struct Sampler {
    float temperature = 1.0f;         // divides the logits; 0: always the most likely token
    int top_k = 0;                    // number of the most likely tokens that are candidates; 0: all
    float top_p = 1.0f;               // probability that the candidates, the most likely tokens, sum to; 1: all
    float repetition_penalty = 1.0f;  // generate() applies it to the logits; 1: off
    uint64_t seed = 0;
    int vocab_size = std::numeric_limits<int>::max();  // tokens from here on, which pad the model's rows, are left out
    std::vector<int> candidates = {};                  // working memory
    std::vector<double> weights = {};
};

// Returns a token in [0, min(V, vocab_size)). The token depends only on the logits, settings, seed, text and position,
// not on earlier samples: text and position number the random draw. Of equal logits, the lower token counts as more
// likely. Refuses logits with NaN or +infinity, and a row without a finite logit (EXIT_BAD_DATA). A token with logit
// -infinity is never sampled.
int sample_token(Sampler& sampler, const float* logits, int V, uint64_t text, uint64_t position);

// Refuses a prompt that is empty or longer than the model's T. The error names the option that it came from.
void check_prompt(const std::vector<int>& prompt, int T, const char* option = "--prompt");
// Continues the prompt (1 to model.T tokens) by up to max_tokens tokens. emit is called with each token and returns
// false to stop. When the context is full, its first `kept` tokens (less than model.T) and the newer half of the others
// become the new prompt, and generation continues. The model needs Purpose::generate or train, and B of at least 1.
// `text` numbers the random draws of sample_token. The repetition penalty divides the positive logits of all tokens
// that are in the prompt or were generated, and multiplies the others, as in transformers.
template <class floatX>
void generate(GPT2<floatX>& model, const std::vector<int>& prompt, int max_tokens, Sampler& sampler, uint64_t text,
              const std::function<bool(int token)>& emit, int kept = 0);

// Ends a text, which comes in parts, before the stop text that is complete first.
struct StopTexts {
    std::vector<std::string> stops;  // none of them empty
    std::string held;                // the end of the text so far, which may begin a stop text
    bool found = false;
    std::string add(const std::string& part);  // returns what can be printed now
};
