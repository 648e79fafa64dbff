// random_tokens.h: random tokens for tests and benchmarks.
#pragma once
#include <cstdint>
#include <vector>

#include "base/random.h"

// `count` integers in [0, below).
inline std::vector<int> random_token_list(int64_t count, int below, uint64_t seed) {
    std::vector<int> tokens(static_cast<size_t>(count));
    const Philox random{seed, 1};
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int(random(i)[0] % uint32_t(below));
    return tokens;
}
