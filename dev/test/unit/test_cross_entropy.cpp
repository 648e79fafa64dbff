// test_cross_entropy.cpp: the shared cases of softmax and cross entropy (cases_cross_entropy.h) on every CPU variant,
// at GPT-2's vocabulary and at awkward ones.
#include "support/cases_cross_entropy.h"
#include "support/cpu_backend.h"

using namespace cross_entropy_cases;

static const CpuBackend cpu_backend;

template <class floatX>
static void compare(Shape s, float spread = 2.0f) {
    cross_entropy_cases::compare<floatX>(cpu_backend, 8.0f, s, spread);
}

TEST_CASE_TEMPLATE("cross entropy over GPT-2's vocabulary agrees with the definition", floatX, float, bf16) {
    compare<floatX>({7, 50257, 50304});
}

TEST_CASE_TEMPLATE("cross entropy over awkward vocabularies agrees with the definition", floatX, float, bf16) {
    for (int V : {1, 2, 7, 8, 9, 16, 17, 65, 127, 128}) compare<floatX>({9, V, 128});
    compare<floatX>({65, 31, 31});
    compare<floatX>({9, 100, 128}, 1000.0f);
}

TEST_CASE_TEMPLATE("equal logits: the loss is log V, gradients sum to 0, padding and ignored rows have none", floatX,
                   float, bf16) {
    equal_logits<floatX>(cpu_backend);
}

TEST_CASE_TEMPLATE("logits of 1e30 and -1e30 do not overflow", floatX, float, bf16) {
    for (int Vp : {33, 40}) huge_logits<floatX>(cpu_backend, Vp);
}

TEST_CASE_TEMPLATE("NaN and infinite logits give a NaN loss; minus infinity is a probability of 0", floatX, float,
                   bf16) {
    for (int V : {37, 40})
        for (int Vp : {40, 48}) not_finite_logits<floatX>(cpu_backend, V, Vp);
}

TEST_CASE_TEMPLATE("a row whose only finite logit is the target has the loss 0", floatX, float, bf16) {
    for (int V : {8000, 8001}) one_finite_logit<floatX>(cpu_backend, V);
}

TEST_CASE_TEMPLATE("cross entropy over vocabulary shards agrees with double and with the whole", floatX, float, bf16) {
    random_shards<floatX>(cpu_backend, 8.0f, 12);
    for (const int shards : {3, 4, 8}) compare_shards<floatX>(cpu_backend, 8.0f, {5, 50257, 50304}, shards);
    for (const int shards : {2, 3}) compare_shards<floatX>(cpu_backend, 8.0f, {9, 101, 128}, shards, 1000.0f);
}

TEST_CASE_TEMPLATE("in shards, logits of 1e30 and 3e38 do not overflow, and NaN gives a NaN loss", floatX, float,
                   bf16) {
    huge_logits_in_shards<floatX>(cpu_backend);
    not_finite_logits_in_shards<floatX>(cpu_backend);
    for (const int V : {8000, 8001}) one_finite_logit_in_shards<floatX>(cpu_backend, V);
}

TEST_CASE("cross entropy of no rows, no shards, or shards larger than the rows of logits is refused") {
    refuse_impossible_shards();
}

TEST_CASE("losses are added up in double") { sum_of_losses(cpu_backend, 1e-7); }

TEST_CASE("cross entropy of no rows, or of rows shorter than the vocabulary, is refused") { refuse_impossible_rows(); }
