// test_generate.cpp: the text of a random model, against samples from logits that are computed anew for each token.
#include "infer/generate.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "support/random_tokens.h"

constexpr GPT2Config SHAPE = {12, 50, 2, 2, 16};  // 12 positions, 50 tokens

static GPT2<float> random_model() {
    GPT2<float> model(SHAPE, Purpose::generate, 1, SHAPE.max_T);
    std::vector<float> weights(size_t(model.layout.total));
    const Philox random{7, 1};
    for (size_t i = 0; i < weights.size(); i++) weights[i] = 0.5f * random.normal(i);
    copy_to_device(model.weights.memory.data, weights.data(), int64_t(weights.size() * sizeof(float)), model.stream);
    return model;
}

static std::vector<int> without_cache(GPT2<float>& model, std::vector<int> context, int count, int kept) {
    Sampler sampler;
    std::vector<int> text;
    while (int(text.size()) < count) {
        std::vector<int> padded = context;
        padded.resize(size_t(model.divisible_tokens(int(context.size()))));
        model.forward(padded.data(), 1, int(padded.size()));
        const float* logits = model.row_logits(int(context.size()) - 1);
        text.push_back(sample_token(sampler, logits, SHAPE.V, 0, text.size()));
        context.push_back(text.back());
        if (int(context.size()) <= SHAPE.max_T) continue;
        const int others = (SHAPE.max_T - kept + 1) / 2;
        std::vector<int> next(context.begin(), context.begin() + kept);
        next.insert(next.end(), context.end() - others, context.end());
        context = next;
    }
    return text;
}

TEST_CASE("of a full context the first `kept` tokens and the newer half of the others stay") {
    GPT2<float> model = random_model();
    Sampler sampler;
    for (const int length : {1, 5, 12})
        for (const int kept : {0, 1, std::min(length, SHAPE.max_T / 2)}) {
            CAPTURE(length);
            CAPTURE(kept);
            const std::vector<int> prompt = random_token_list(length, SHAPE.V, uint64_t(length));
            std::vector<int> text;
            const auto emit = [&](int token) {
                text.push_back(token);
                return true;
            };
            generate(model, prompt, 40, sampler, 0, emit, kept);
            CHECK(text == without_cache(model, prompt, 40, kept));
            CHECK(std::ranges::count(text, text[0]) <
                  40);  // a text that repeats one token would not show which tokens stay
        }
}
