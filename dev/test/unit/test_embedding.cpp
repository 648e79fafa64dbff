// test_embedding.cpp: the shared cases of the embeddings (cases_embedding.h) on every CPU variant. The variants add the
// rows of a gradient in the order of the definition, so the results have the same bits.
#include "support/cases_embedding.h"
#include "support/cpu_backend.h"

using namespace embedding_cases;

static const CpuBackend cpu_backend;

template <class floatX>
static void compare(Shape s) {
    embedding_cases::compare<floatX>(cpu_backend, Sums::in_order, s);
    embedding_cases::compare<floatX>(cpu_backend, Sums::in_order, s, random_tokens(s.B * s.T, s.V, 1));
}

// With few tokens in the vocabulary, each gradient row gets many additions.
TEST_CASE_TEMPLATE("embeddings at GPT-2's widths and at awkward sizes agree with the definition", floatX, float, bf16) {
    compare<floatX>({2, 128, 768, 100});
    compare<floatX>({1, 64, 1600, 50});
    for (int C : {1, 7, 17, 65}) compare<floatX>({3, 7, C, 5});
    compare<floatX>({65, 1, 63, 1});
    token_counts<floatX>(cpu_backend, Sums::in_order);
}

TEST_CASE_TEMPLATE("a NaN reaches the gradient of its token and of its position, and no others", floatX, float, bf16) {
    nan_in_dout<floatX>(cpu_backend);
}

TEST_CASE_TEMPLATE("embeddings of vocabulary shards have the bits of the whole vocabulary's", floatX, float, bf16) {
    random_shards<floatX>(cpu_backend, Sums::in_order, 1, 16);
    for (const int shards : {2, 3, 7}) compare_shards<floatX>(cpu_backend, Sums::in_order, {2, 64, 96, 301}, shards);
}

TEST_CASE("embeddings of impossible shards are refused") { refuse_impossible_shards(); }
