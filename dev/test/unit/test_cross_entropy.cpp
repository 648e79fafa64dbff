// test_cross_entropy.cpp: the shared cases of softmax and cross entropy (cases_cross_entropy.h) on every CPU variant,
// at GPT-2's vocabulary and at awkward ones.
#include "support/cases_cross_entropy.h"
#include "support/cpu_backend.h"

using namespace cross_entropy_cases;

static const CpuBackend cpu_backend;
constexpr float EXP_ROUNDINGS = 8.0f;

TEST_CASE_TEMPLATE("cross entropy over GPT-2's vocabulary and awkward ones agrees with the definition", floatX, float,
                   bf16) {
    compare<floatX>(cpu_backend, EXP_ROUNDINGS, {7, 50257, 50304});
    for (int V : {1, 2, 7, 8, 9, 16, 17, 65, 127, 128}) compare<floatX>(cpu_backend, EXP_ROUNDINGS, {9, V, 128});
    compare<floatX>(cpu_backend, EXP_ROUNDINGS, {65, 31, 31});
    compare<floatX>(cpu_backend, EXP_ROUNDINGS, {9, 100, 128}, 1000.0f);
}

TEST_CASE_TEMPLATE("cross entropy over vocabulary shards agrees with the whole", floatX, float, bf16) {
    random_shards<floatX>(cpu_backend, EXP_ROUNDINGS, 12);
    for (const int shards : {3, 4, 8}) compare_shards<floatX>(cpu_backend, EXP_ROUNDINGS, {5, 50257, 50304}, shards);
    for (const int shards : {2, 3}) compare_shards<floatX>(cpu_backend, EXP_ROUNDINGS, {9, 101, 128}, shards, 1000.0f);
}

TEST_CASE_TEMPLATE("huge logits do not overflow, NaN gives a NaN loss, and minus infinity is a probability of 0",
                   floatX, float, bf16) {
    for (const int Vp : {33, 40}) huge_logits<floatX>(cpu_backend, Vp);
    for (const int V : {37, 40}) not_finite_logits<floatX>(cpu_backend, V, 40);
    for (const int V : {8000, 8001}) one_finite_logit<floatX>(cpu_backend, V);
}

TEST_CASE("losses are added up in double") { sum_of_losses(cpu_backend, 1e-7); }

TEST_CASE("cross entropy of no rows, no shards, or shards larger than the rows of logits is refused") {
    refuse_impossible_shards();
    refuse_impossible_rows();
}
