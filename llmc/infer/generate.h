// generate.h: generates text from the model, one token at a time, with a key-value cache.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "infer/sampler.h"
#include "model/gpt2.h"

// Refuses a prompt that is empty or longer than the model's T. The error names the option that it came from.
void check_prompt(const std::vector<int>& prompt, int T, const char* option = "--prompt");
// Continues the prompt (1 to model.T tokens) by up to max_tokens tokens. emit is called with each token and returns
// false to stop. When the context is full, its first `kept` tokens (less than model.T) and the newer half of the others
// become the new prompt, and generation continues. The model needs Purpose::generate or train, and B of at least 1.
// `text` numbers the random draws (sampler.h). The repetition penalty divides the positive logits of all tokens that
// are in the prompt or were generated, and multiplies the others, as transformers' RepetitionPenaltyLogitsProcessor
// does.
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
