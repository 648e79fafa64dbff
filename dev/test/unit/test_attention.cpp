// test_attention.cpp: the shared cases of causal attention (cases_attention.h) on every CPU variant, with heads like
// GPT-2's and with awkward ones. test_matrix_attention.cpp compares the variants for AMX and AVX512-BF16 with the
// definition.
#include "support/cases_attention.h"
#include "support/cpu_backend.h"

using namespace attention_cases;

static const CpuBackend cpu_backend;
static const CpuBackend float_arithmetic{{}, available_isas(Isa::avx512)};  // all variants except for matrix units

TEST_CASE_TEMPLATE("attention with GPT-2's heads and at awkward sizes agrees with the definition", floatX, float,
                   bf16) {
    compare<floatX>(float_arithmetic, {2, 256, 3, 64});
    compare<floatX>(float_arithmetic, {1, 300, 2, 80});
    for (int T : {1, 2, 7, 17, 64, 65, 129}) compare<floatX>(float_arithmetic, {2, T, 2, 24});
    for (int HS : {1, 7, 17, 33, 65, 256}) compare<floatX>(float_arithmetic, {1, 70, 1, HS});
    compare<floatX>(float_arithmetic, {1, 70, 2, 64}, {}, 2.0f);  // large, but not one-hot scores
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

TEST_CASE("attention of no heads, no tokens or too wide heads is refused") {
    refuse_no_heads_and_no_tokens();
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(cpu::attention_forward(&x, &x, &x, 1, 1, 1, 257, nullptr),
                         doctest::Contains("heads of 257 channels"), Error);
}
