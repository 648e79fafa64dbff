#include "infer/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/print.h"
#include "base/random.h"

// ---- the next token

// Refuses logits from which no token can be sampled. Returns the most likely token.
static int check_logits(const float* logits, int V) {
    int best = 0;
    for (int v = 0; v < V; v++) {
        if (std::isnan(logits[v]) || logits[v] == std::numeric_limits<float>::infinity())
            fail(EXIT_BAD_DATA, "the model gives token %d a logit of %g: its weights are damaged or training diverged",
                 v, std::fabs(double(logits[v])));  // prints nan, never -nan
        if (logits[v] > logits[best]) best = v;
    }
    if (!std::isfinite(logits[best]))
        fail(EXIT_BAD_DATA, "the logits of all %d tokens are -infinity, so no token can be sampled", V);
    return best;
}

// A uniform number in [0, 1) with 53 bits, so that even a token of probability 1e-9 is drawn with its probability.
static double draw(uint64_t seed, uint64_t text, uint64_t position) {
    const auto x = Philox{seed, uint64_t(1) << 63 | text}(position);  // streams: base/random.h
    return double((uint64_t(x[0]) << 32 | x[1]) >> 11) * 0x1p-53;
}

int sample_token(Sampler& s, const float* logits, int V, uint64_t text, uint64_t position) {
    V = std::min(V, s.vocab_size);
    const int best = check_logits(logits, V);
    if (s.temperature == 0.0f) return best;

    const auto likelier = [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
    s.candidates.resize(V);
    std::iota(s.candidates.begin(), s.candidates.end(), 0);
    if (s.top_k > 0 && s.top_k < V) {
        std::nth_element(s.candidates.begin(), s.candidates.begin() + s.top_k, s.candidates.end(), likelier);
        s.candidates.resize(s.top_k);
    }
    // Sorts after top-k too, although only top-p needs it: the draw depends on the order, and nth_element's order
    // depends on the library.
    if (s.top_p < 1.0f || s.candidates.size() < size_t(V))
        std::sort(s.candidates.begin(), s.candidates.end(), likelier);

    s.weights.clear();
    double total = 0.0;
    for (int v : s.candidates) {
        s.weights.push_back(std::exp((double(logits[v]) - double(logits[best])) / double(s.temperature)));
        total += s.weights.back();
    }
    if (s.top_p < 1.0f) {
        double kept = 0.0;
        size_t count = 0;
        while (count < s.weights.size() && (count == 0 || kept < double(s.top_p) * total)) kept += s.weights[count++];
        s.weights.resize(count);
        total = kept;
    }
    double left = draw(s.seed, text, position) * total;
    int last = best;  // the result if rounding leaves a remainder after the last candidate
    for (size_t i = 0; i < s.weights.size(); i++) {
        if (s.weights[i] == 0.0) continue;
        last = s.candidates[i];
        if (left < s.weights[i]) break;
        left -= s.weights[i];
    }
    return last;
}

// ---- the text

void check_prompt(const std::vector<int>& prompt, int T, const char* option) {
    ENSURE(!prompt.empty(), "%s has no tokens; give a longer text", option);
    ENSURE(int64_t(prompt.size()) <= T, "%s has %s, which do not fit into the model's context of %d; shorten it by %zu",
           option, counted(int64_t(prompt.size()), "token").c_str(), T, prompt.size() - size_t(T));
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
        return to_host(model.row_logits(int(context.size()) - 1), model.config.V);
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
        logits = to_host(model.row_logits(0), model.config.V);
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

INSTANTIATE(generate);
