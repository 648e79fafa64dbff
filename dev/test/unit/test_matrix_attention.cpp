// test_matrix_attention.cpp: the shared cases of causal attention (cases_attention.h) with AMX and with AVX512-BF16,
// for every head size that they support, at lengths around their blocks of 32 and their chunks.
#include "support/cases_attention.h"
#include "support/cpu_backend.h"

using namespace attention_cases;

// Leaves out the variants without matrix units. Skips the case if there are no others.
static CpuBackend matrix_units() {
    CpuBackend backend;
#if defined(__x86_64__)
    std::erase_if(backend.levels, [](Isa level) { return level < Isa::avx512bf16; });
#else
    backend.levels.clear();
#endif
    if (backend.levels.empty()) skip_case("this machine has no matrix unit for bf16");
    return backend;
}

static void compare(Shape s, float scale = 1.0f) {
    const CpuBackend backend = matrix_units();
    if (backend.levels.empty()) return;  // the definition alone would take seconds
    attention_cases::compare<bf16>(backend, s, {2.35f * epsilon<bf16>(), 1e-6f, 1e-5f}, scale);
}

TEST_CASE("attention on matrix units agrees with the definition, at all head sizes and around the blocks of 32") {
    for (const int HS : {32, 64, 96, 128}) compare({2, 96, 3, HS});
    for (const int T : {1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 257}) compare({2, T, 2, 64});
    compare({1, 200, 2, 64}, 2.0f);
}

TEST_CASE("lengths around the chunks of 512 in backward and of 2048 in forward" * LARGE) {
    for (const int T : {511, 512, 513, 1024, 1030, 2048, 2049, 2200}) compare({1, T, 1, 32});
}

TEST_CASE("on matrix units huge scores do not overflow, and NaN reaches the rows that see it") {
    one_hot_queries<bf16>(matrix_units(), 64, 0.0f);
    for (const int HS : {32, 64, 96, 128}) far_scores<bf16>(matrix_units(), HS, 3e4f, false);
    nan_in_a_key<bf16>(matrix_units(), 70, 50, 32);
    nan_in_a_key<bf16>(matrix_units(), 70, 0, 64);
}
