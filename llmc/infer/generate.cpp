#include "infer/generate.h"

#include <algorithm>

#include "base/print.h"

void check_prompt(const std::vector<int>& prompt, int T, const char* option) {
    ENSURE(!prompt.empty(), "%s has no tokens; give a longer text", option);
    ENSURE(int64_t(prompt.size()) <= T, "%s has %s, which do not fit into the model's context of %d; shorten it by %zu",
           option, counted(int64_t(prompt.size()), "token").c_str(), T, prompt.size() - size_t(T));
}

template <class floatX>
static std::vector<float> logits_of_row(GPT2<floatX>& model, int row) {
    const std::vector<floatX> logits = to_host(model.row_logits(row), model.config.V);
    std::vector<float> out(logits.size());
    for (size_t i = 0; i < logits.size(); i++) out[i] = float(logits[i]);
    return out;
}

template <class floatX>
void generate(GPT2<floatX>& model, const std::vector<int>& prompt, int max_tokens, Sampler& sampler, uint64_t text,
              const std::function<bool(int token)>& emit, int kept) {
    check_prompt(prompt, model.T);
    std::vector<int> context = prompt;
    std::vector<bool> in_text(size_t(model.config.V));
    for (const int token : prompt) in_text[size_t(token)] = true;
    DeviceBuffer<int> tokens(model.T, "the prompt");
    // Tokens after the context change nothing before them, and decode overwrites their keys and values.
    const auto read_context = [&] {
        std::vector<int> padded = context;
        padded.resize(size_t(model.divisible_tokens(int(context.size()))));
        copy_to_device(tokens.data, padded.data(), int64_t(padded.size() * sizeof(int)), model.stream);
        model.forward(tokens.data, 1, int(padded.size()));
        return logits_of_row(model, int(context.size()) - 1);
    };
    std::vector<float> logits = read_context();
    for (int i = 0; i < max_tokens; i++) {
        const float penalty = sampler.repetition_penalty;
        for (size_t v = 0; v < in_text.size() && penalty != 1.0f; v++)
            if (in_text[v]) logits[v] = logits[v] < 0.0f ? logits[v] * penalty : logits[v] / penalty;
        const int token = sample_token(sampler, logits.data(), model.config.V, text, uint64_t(i));
        if (!emit(token) || i + 1 == max_tokens) return;
        context.push_back(token);
        in_text[size_t(token)] = true;
        const bool is_full = int(context.size()) > model.T;
        if (is_full) context.erase(context.begin() + kept, context.end() - (model.T - kept + 1) / 2);
        if (is_full || !model.keeps_keys()) {
            logits = read_context();
            continue;
        }
        copy_to_device(tokens.data, &token, sizeof(int), model.stream);
        model.decode(tokens.data, int(context.size()) - 1);
        logits = logits_of_row(model, 0);
    }
}

std::string StopTexts::add(const std::string& part) {
    size_t kept = 0;  // bytes at the end of `held` that are a stop text, or may begin one
    for (size_t i = 0; i < part.size() && !found; i++) {
        held += part[i];
        for (const std::string& stop : stops)
            if (held.ends_with(stop)) found = true, kept = std::max(kept, stop.size());
    }
    for (const std::string& stop : stops)
        for (size_t size = found ? 0 : std::min(held.size(), stop.size()); size > kept; size--)
            if (held.ends_with(stop.substr(0, size))) kept = size;
    const std::string text = held.substr(0, held.size() - kept);
    held.erase(0, found ? held.size() : text.size());
    return text;
}

template void generate<float>(GPT2<float>&, const std::vector<int>&, int, Sampler&, uint64_t,
                              const std::function<bool(int)>&, int);
template void generate<bf16>(GPT2<bf16>&, const std::vector<int>&, int, Sampler&, uint64_t,
                             const std::function<bool(int)>&, int);
