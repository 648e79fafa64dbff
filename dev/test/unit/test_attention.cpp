// test_attention.cpp: the shared cases of causal attention (cases_attention.h) on every CPU variant, with heads like
// GPT-2's and with awkward ones; with AMX and AVX512-BF16 for every head size that they support, at lengths around
// their blocks of 32 and their chunks.
#include "support/cases_attention.h"
#include "support/cpu_backend.h"

using namespace attention_cases;

static const CpuBackend cpu_backend;
static const CpuBackend float_arithmetic{{}, available_isas(Isa::avx512)};  // all variants except for matrix units

static void compare_matrix_units(Shape s, float scale = 1.0f) {
    CpuBackend backend;
    std::erase_if(backend.levels, [](Isa level) { return level < Isa::avx512bf16; });
    if (backend.levels.empty()) return skip_case("this machine has no matrix unit for bf16");
    compare<bf16>(backend, s, {2.35f * epsilon<bf16>(), 1e-6f, 1e-5f}, scale);
}

TEST_CASE_TEMPLATE("attention with GPT-2's heads and at awkward sizes agrees with the definition", floatX, float,
                   bf16) {
    compare<floatX>(float_arithmetic, {2, 256, 3, 64});
    compare<floatX>(float_arithmetic, {1, 300, 2, 80});
    for (int T : {1, 2, 7, 17, 64, 65, 129}) compare<floatX>(float_arithmetic, {2, T, 2, 24});
    for (int HS : {1, 7, 17, 33, 65, 256}) compare<floatX>(float_arithmetic, {1, 70, 1, HS});
    compare<floatX>(float_arithmetic, {1, 70, 2, 64}, {}, 2.0f);  // large, but not one-hot scores
}

TEST_CASE("attention on matrix units agrees with the definition, at all head sizes and around the blocks of 32") {
    for (const int HS : {32, 64, 96, 128}) compare_matrix_units({2, 96, 3, HS});
    for (const int T : {1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 257}) compare_matrix_units({2, T, 2, 64});
    compare_matrix_units({1, 200, 2, 64}, 2.0f);
}

TEST_CASE("lengths around the chunks of 512 in backward and of 2048 in forward" * LARGE) {
    for (const int T : {511, 512, 513, 1024, 1030, 2048, 2049, 2200}) compare_matrix_units({1, T, 1, 32});
}

TEST_CASE_TEMPLATE("huge queries select one value, and scores of up to 1e32 do not overflow", floatX, float, bf16) {
    one_hot_queries<floatX>(cpu_backend, 64, 0.0f);
    for (const int HS : {128, 72}) one_hot_queries<floatX>(cpu_backend, HS, 125.0f * epsilon<float>());
    // Matrix units run heads of 32, 64, 96 and 128 channels. Of these scales 1 / sqrt(HS), only 1/8 is exact in binary.
    for (const float magnitude : {3e3f, 3e4f, 1e15f})
        for (const int HS : {64, 16, 32, 96, 128}) far_scores<floatX>(cpu_backend, HS, magnitude, false);
}

TEST_CASE_TEMPLATE("a NaN in a key reaches every later query, and none before", floatX, float, bf16) {
    nan_in_a_key<floatX>(cpu_backend, 70, 50, 32);
    nan_in_a_key<floatX>(cpu_backend, 70, 0, 64);
}
