// generate.h: text from the model, a token at a time, keys and values kept from one to the next.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "infer/sampler.h"
#include "model/gpt2.h"

// Refuses a prompt that is empty or longer than the model's T.
void check_prompt(const std::vector<int>& prompt, int T);
// Continues the prompt (at least one token, at most model.T) by up to max_tokens tokens; each goes to emit, which
// returns false to stop. When the context is full, its later half becomes the prompt and generation goes on.
// The model needs Purpose::generate or train, and B of at least 1. `text` numbers the random draws (sampler.h).
template <class floatX>
void generate(GPT2<floatX>& model, const std::vector<int>& prompt, int max_tokens, Sampler& sampler, uint64_t text,
              const std::function<bool(int token)>& emit);
