#include "infer/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/common.h"
#include "base/random.h"

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
    ENSURE(V > 0 && s.temperature >= 0 && s.top_k >= 0 && s.top_p > 0 && s.top_p <= 1,
           "cannot sample from %d tokens at temperature %g, top-k %d, top-p %g", V, double(s.temperature), s.top_k,
           double(s.top_p));
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
