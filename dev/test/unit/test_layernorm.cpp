// test_layernorm.cpp: LayerNorm's shared cases (cases_layernorm.h) on every CPU variant, at the sizes of GPT-2 and at
// awkward ones.
#include "support/cases_layernorm.h"
#include "support/cpu_backend.h"

using namespace layernorm_cases;

static const CpuBackend cpu_backend;

template <class floatX>
static void compare(int N, int C, float offset = 0.0f) {
    compare_forward<floatX>(cpu_backend, N, C, offset);
    compare_backward<floatX>(cpu_backend, N, C, Dresidual::apart, offset);
}

TEST_CASE_TEMPLATE("LayerNorm at GPT-2's widths and at awkward sizes agrees with the definition", floatX, float, bf16) {
    for (int C : {768, 1024, 1280, 1600}) compare<floatX>(70, C);
    for (int N : {1, 3, 7, 33})
        for (int C : {2, 7, 17, 65, 127}) compare<floatX>(N, C);
    compare<floatX>(9000, 7);  // more than 256 pieces of 32 rows
    // A variance computed as E[x^2] - E[x]^2 would cancel: a float of 1e6 is too coarse for a variance of 1.
    for (const float offset : {30.0f, 1000.0f}) compare<floatX>(8, 768, offset);
    for (const Dresidual past : {Dresidual::none, Dresidual::in_place})
        compare_backward<floatX>(cpu_backend, 9, 65, past);
}

TEST_CASE_TEMPLATE("LayerNorm backward without dresidual or dbranch_bias, or in place, has the same bits", floatX,
                   float, bf16) {
    optional_arguments<floatX>(cpu_backend, 40, 65);
}

TEST_CASE_TEMPLATE("a NaN reaches its row, and its column of the parameters' gradients, and no other", floatX, float,
                   bf16) {
    for (int C : {33, 40}) nan_in_a_row<floatX>(cpu_backend, C);
    nan_in_dout<floatX>(cpu_backend, 6, 70);
}
