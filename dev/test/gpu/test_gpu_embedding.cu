// test_gpu_embedding.cu: the shared cases of the embeddings (cases_embedding.h) on the kernels of llmc/cuda, at GPT-2's
// widths and at awkward ones, with tokens that occur once, often, and everywhere; and tests of the sort.
#include <algorithm>
#include <vector>

#include "cuda/embedding.cuh"
#include "gpu/gpu_backend.h"
#include "support/cases_embedding.h"

using namespace embedding_cases;

static const GpuBackend gpu_backend;

template <class floatX>
static void compare(Shape s) {
    embedding_cases::compare<floatX>(gpu_backend, Sums::in_any_order, s);
}

TEST_CASE_TEMPLATE("embeddings at GPT-2's widths agree with the definition", floatX, float, bf16) {
    compare<floatX>({2, 128, 768, 100});
    compare<floatX>({1, 64, 1600, 50});
    compare<floatX>({3, 1000, 8, 50257});
}

TEST_CASE_TEMPLATE("embeddings at awkward sizes agree with the definition", floatX, float, bf16) {
    for (int T : {1, 7, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 1025}) compare<floatX>({1, T, 8, 13});
    for (int C : {16, 24, 120, 128, 136, 248, 256, 264}) compare<floatX>({3, 17, C, 5});
    for (int V : {2, 255, 256, 257, 65535, 65536, 65537, 100000}) compare<floatX>({2, 150, 8, V});
    compare<floatX>({65, 2, 8, 3});
}

TEST_CASE_TEMPLATE("embeddings with a vocabulary of one token agree with the definition", floatX, float, bf16) {
    compare<floatX>({1, 32 * 33, 8, 1});      // 33 chunks: one tail and 32 heads
    compare<floatX>({1, 32 * 34 + 1, 8, 1});  // 35 chunks
    compare<floatX>({1, 32 * 66, 8, 1});
}

TEST_CASE("embeddings agree with the definition, however often a token occurs, and two runs have the same bits") {
    token_counts<float>(gpu_backend, Sums::in_any_order);  // rows that begin and end at any position of a chunk
    same_bits_twice<bf16>(gpu_backend, {2, 600, 264, 40});
}

TEST_CASE_TEMPLATE("a NaN reaches the gradient of its token and of its position, and no others", floatX, float, bf16) {
    nan_in_dout<floatX>(gpu_backend);
}

TEST_CASE_TEMPLATE("embeddings of vocabulary shards agree with the whole vocabulary's", floatX, float, bf16) {
    random_shards<floatX>(gpu_backend, Sums::in_any_order, 8, 6);
    // Rows of other shards begin at different positions of a chunk, and take whole chunks.
    for (const int T : {31, 32, 33, 200}) compare_shards<floatX>(gpu_backend, Sums::in_any_order, {1, T, 8, 7}, 3);
    // The shards' keys need one, two and three passes of the sort.
    for (const int V : {510, 511, 512, 513, 131070, 131071})
        compare_shards<floatX>(gpu_backend, Sums::in_any_order, {2, 150, 8, V}, 2);
}

TEST_CASE("sort_by_token sorts rows by token and keeps the order of a token's rows") {
    for (const int N : {1, 31, 33, 1023, 1024, 1025, 2500})
        for (const int V : {1, 3, 255, 256, 257, 65535, 65536, 65537, SORT_MAX_KEY}) {
            CAPTURE(N);
            CAPTURE(V);
            auto tokens = skewed_tokens(N, V);
            Tensor<TokenRow> first(N), second(N);
            Tensor<int> counting(int64_t(ceil_div(N, SORT_TILE)) * SORT_DIGITS);
            OnGpu<TokenRow> a(first), b(second);
            OnGpu<int> t(tokens), counts(counting);
            const TokenRow* sorted = sort_by_token(a, b, counts, t, N, {0, V}, nullptr);
            a.back(), b.back();
            const Tensor<TokenRow>& got = sorted == a.device ? first : second;
            std::vector<TokenRow> want(N);
            for (int n = 0; n < N; n++) want[n] = {tokens[n], n};
            std::stable_sort(want.begin(), want.end(), [](TokenRow x, TokenRow y) { return x.token < y.token; });
            int wrong = 0;
            for (int n = 0; n < N; n++) wrong += got[n].token != want[n].token || got[n].n != want[n].n;
            CHECK(wrong == 0);
        }
}

TEST_CASE("embeddings of no rows, too many rows, ragged rows or impossible shards are refused") {
    refuse_no_rows();
    refuse_impossible_shards();
    bf16* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::embedding_forward<bf16>(none, nullptr, none, none, 1, 4, 100, {0, 1}, nullptr),
                         doctest::Contains("embedding_forward: 100 channels must be a multiple of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::embedding_backward<bf16>(nullptr, nullptr, none, nullptr, 1, 4, 8, {0, 1 << 24}, nullptr),
                         doctest::Contains("a vocabulary of 16777216 tokens; at most 16777215"), Error);
    CHECK_THROWS_WITH_AS(gpu::embedding_forward<bf16>(none, nullptr, none, none, 1 << 15, 1 << 15, 8, {0, 1}, nullptr),
                         doctest::Contains("1073741824 rows: at most 16777216"), Error);
}
