// test_generate.cpp: the text of a random model, against samples from logits that are computed anew for each token.
#include "infer/generate.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
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

// Tokens that are in the text are penalized as the formula of transformers says, those too that no longer fit into the
// context.
static std::vector<int> without_cache(GPT2<float>& model, std::vector<int> context, int count, int kept,
                                      Sampler sampler) {
    std::vector<int> text;
    std::set<int> seen(context.begin(), context.end());
    while (int(text.size()) < count) {
        std::vector<int> padded = context;
        padded.resize(size_t(model.divisible_tokens(int(context.size()))));
        model.forward(padded.data(), 1, int(padded.size()));
        std::vector<float> logits = to_host(model.row_logits(int(context.size()) - 1), SHAPE.V);
        for (const int token : seen)
            logits[token] *= logits[token] < 0 ? sampler.repetition_penalty : 1 / sampler.repetition_penalty;
        text.push_back(sample_token(sampler, logits.data(), SHAPE.V, 0, text.size()));
        context.push_back(text.back());
        seen.insert(text.back());
        if (int(context.size()) <= SHAPE.max_T) continue;
        const int others = (SHAPE.max_T - kept + 1) / 2;
        std::vector<int> next(context.begin(), context.begin() + kept);
        next.insert(next.end(), context.end() - others, context.end());
        context = next;
    }
    return text;
}

TEST_CASE(
    "of a full context the first `kept` tokens and the newer half of the others stay, and the penalty counts all") {
    GPT2<float> model = random_model();
    for (const int length : {1, 5, 12})
        for (const int kept : {0, 1, std::min(length, SHAPE.max_T / 2)}) {
            Sampler sampler;
            sampler.repetition_penalty = kept == 1 ? 2.0f : 1.0f;
            CAPTURE(length);
            CAPTURE(kept);
            const std::vector<int> prompt = random_token_list(length, SHAPE.V, uint64_t(length));
            std::vector<int> text;
            const auto emit = [&](int token) {
                text.push_back(token);
                return true;
            };
            generate(model, prompt, 40, sampler, 0, emit, kept);
            CHECK(text == without_cache(model, prompt, 40, kept, sampler));
            CHECK(std::ranges::count(text, text[0]) <
                  40);  // a text that repeats one token would not show which tokens stay
        }
}

// Returns the text before the stop text that is complete first; the longest one, if several are.
static std::string before_stop(const std::string& text, const std::vector<std::string>& stops) {
    for (size_t end = 1; end <= text.size(); end++) {
        size_t size = 0;
        for (const std::string& stop : stops)
            if (text.substr(0, end).ends_with(stop)) size = std::max(size, stop.size());
        if (size > 0) return text.substr(0, end - size);
    }
    return text;
}

TEST_CASE("a text ends before a stop text, however it comes in parts, and never shows a part of it") {
    std::mt19937 random(5);
    const auto word = [&](size_t size) {
        std::string text;
        while (text.size() < size) text += "ab\n"[random() % 3];
        return text;
    };
    int ended = 0;
    for (int i = 0; i < 3000; i++) {
        StopTexts end;
        for (auto count = random() % 4; count > 0; count--) end.stops.push_back(word(1 + random() % 6));
        const std::string text = word(random() % 40), expected = before_stop(text, end.stops);
        std::string shown;
        for (size_t at = 0, size; at < text.size() && !end.found; at += size) {
            size = random() % 4;
            shown += end.add(text.substr(at, size));
            CHECK(expected.starts_with(shown));
            // Only what may begin a stop text is held back.
            CHECK(
                (end.held.empty() || std::ranges::any_of(end.stops, [&](auto& s) { return s.starts_with(end.held); })));
        }
        CHECK(shown + end.held == expected);
        ended += end.found;
    }
    CHECK((ended > 500 && ended < 2500));
}
