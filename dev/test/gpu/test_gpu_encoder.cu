// test_gpu_encoder.cu: embeddings of llmc/cuda against their definition in cpu::plain, at GPT-2's widths and at awkward
// ones; the sort; tokens that come once, often, and always.
#include <algorithm>
#include <vector>

#include "cpu/variants.h"
#include "cuda/encoder.cuh"
#include "gpu/on_gpu.h"

struct Shape {
    int B, T, C, V;
};

// Low tokens come often, as words do.
static Tensor<int> skewed_tokens(int N, int V) {
    Tensor<int> tokens(N);
    const Philox random{1, 0};
    for (int n = 0; n < N; n++) {
        const double x = double(random(uint64_t(n))[0]) / 4294967296.0;
        tokens[n] = int(x * x * x * x * V);
    }
    return tokens;
}

static int most_frequent(const Tensor<int>& tokens, int V) {
    std::vector<int> count(V);
    for (int64_t i = 0; i < tokens.size(); i++) count[tokens[i]]++;
    return *std::max_element(count.begin(), count.end());
}

template <class floatX>
struct Gradients {
    Tensor<float> dwte, dwpe;
    explicit Gradients(Shape s)
        : dwte(filled<float>(int64_t(s.V) * s.C, 0.5f)), dwpe(filled<float>(int64_t(s.T) * s.C, -0.5f)) {}
};

template <class floatX>
static Gradients<floatX> backward(Tensor<floatX>& dout, Tensor<int>& tokens, Shape s) {
    Gradients<floatX> got(s);
    OnGpu<floatX> d(dout);
    OnGpu<int> t(tokens);
    OnGpu<float> dwte(got.dwte), dwpe(got.dwpe);
    gpu::encoder_backward<floatX>(dwte, dwpe, d, t, s.B, s.T, s.C, s.V, nullptr);
    dwte.back(), dwpe.back();
    return got;
}

// The sum of two numbers is rounded once on both sides. A sum of n terms of about 1 is about sqrt(n), and at most
// sqrt(n) of the additions on a term's way to it matter, each of which rounds by half an epsilon of it.
template <class floatX>
static void compare(Shape s, Tensor<int>& tokens) {
    const int B = s.B, T = s.T, C = s.C, V = s.V;
    CAPTURE(B);
    CAPTURE(T);
    CAPTURE(C);
    CAPTURE(V);
    const int64_t size = int64_t(B) * T * C;
    auto wte = random_tensor<floatX>(int64_t(V) * C, 2), wpe = random_tensor<floatX>(int64_t(T) * C, 3);
    auto out = poisoned<floatX>(size), want_out = poisoned<floatX>(size), dout = random_tensor<floatX>(size, 4);
    {
        OnGpu<floatX> o(out), e(wte), p(wpe);
        OnGpu<int> t(tokens);
        gpu::encoder_forward<floatX>(o, t, e, p, B, T, C, nullptr);
        o.back();
    }
    cpu::plain::encoder_forward<floatX>(want_out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C, nullptr);
    expect_close("out", out, want_out, C, 0.0f, 0.0f);

    const auto got = backward(dout, tokens, s);
    Gradients<floatX> want(s);
    cpu::plain::encoder_backward<floatX>(want.dwte.data(), want.dwpe.data(), dout.data(), tokens.data(), B, T, C, V,
                                         nullptr);
    const auto error = [](int n) { return std::sqrt(float(n)) * (4.0f + std::sqrt(float(n))) * epsilon<float>(); };
    expect_close("dwte", got.dwte, want.dwte, C, epsilon<float>(), error(most_frequent(tokens, V)));
    expect_close("dwpe", got.dwpe, want.dwpe, C, epsilon<float>(), error(B));
}

template <class floatX>
static void compare(Shape s) {
    auto tokens = skewed_tokens(s.B * s.T, s.V);
    compare<floatX>(s, tokens);
}

TEST_CASE_TEMPLATE("embeddings at GPT-2's widths", floatX, float, bf16) {
    compare<floatX>({2, 128, 768, 100});
    compare<floatX>({1, 64, 1600, 50});
    compare<floatX>({3, 1000, 8, 50257});
}

TEST_CASE_TEMPLATE("embeddings at awkward sizes", floatX, float, bf16) {
    for (int T : {1, 7, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 1025}) compare<floatX>({1, T, 8, 13});
    for (int C : {16, 24, 120, 128, 136, 248, 256, 264}) compare<floatX>({3, 17, C, 5});
    for (int V : {2, 255, 256, 257, 65535, 65536, 65537, 100000}) compare<floatX>({2, 150, 8, V});
    compare<floatX>({65, 2, 8, 3});
}

TEST_CASE_TEMPLATE("a token that is all there is", floatX, float, bf16) {
    compare<floatX>({1, 32 * 33, 8, 1});      // 32 heads behind the tail
    compare<floatX>({1, 32 * 34 + 1, 8, 1});  // more
    compare<floatX>({1, 32 * 66, 8, 1});
}

// Tokens 0, 1, 2, ... come first, second, ... times in a row, shuffled.
TEST_CASE("tokens that begin and end at each place of a chunk") {
    for (int length : {15, 16, 31, 32, 33, 64, 95, 96, 97}) {
        const int V = 20, N = V * length;
        Tensor<int> tokens(N);
        for (int n = 0; n < N; n++) tokens[n] = int(int64_t(n) * 7919 % N) / length;
        compare<float>({1, N, 8, V}, tokens);
    }
    Tensor<int> tokens(65 * 66 / 2);
    for (int v = 0, n = 0; v < 65; v++)
        for (int i = 0; i <= v; i++) tokens[n++] = v;
    compare<float>({1, int(tokens.size()), 8, 65}, tokens);
}

TEST_CASE("two runs have the same bits") {
    const Shape s{2, 600, 264, 40};
    auto tokens = skewed_tokens(s.B * s.T, s.V);
    auto dout = random_tensor<bf16>(int64_t(s.B) * s.T * s.C, 4);
    const auto first = backward(dout, tokens, s), second = backward(dout, tokens, s);
    expect_close("dwte", second.dwte, first.dwte, s.C, 0.0f, 0.0f);
    expect_close("dwpe", second.dwpe, first.dwpe, s.C, 0.0f, 0.0f);
}

TEST_CASE("rows are sorted by token, and those of a token stay in order") {
    for (const int N : {1, 31, 33, 1023, 1024, 1025, 2500})
        for (const int V : {1, 3, 256, 257, 65536, 65537, 1 << 24}) {
            CAPTURE(N);
            CAPTURE(V);
            auto tokens = skewed_tokens(N, V);
            Tensor<TokenRow> first(N), second(N);
            Tensor<int> counting(int64_t(ceil_div(N, SORT_TILE)) * SORT_DIGITS);
            OnGpu<TokenRow> a(first), b(second);
            OnGpu<int> t(tokens), counts(counting);
            const TokenRow* sorted = sort_by_token(a, b, counts, t, N, V, nullptr);
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

TEST_CASE("a NaN reaches its token and its position, and no others") {
    const Shape s{2, 40, 8, 7};
    Tensor<int> tokens(80);
    for (int n = 0; n < 80; n++) tokens[n] = n % 7;
    auto dout = filled<bf16>(80 * 8, 1.0f);
    dout[45 * 8 + 2] = bf16(NAN);  // token 3, position 5
    const auto got = backward(dout, tokens, s);
    for (int i = 0; i < 7 * 8; i++) REQUIRE(std::isnan(got.dwte[i]) == (i == 3 * 8 + 2));
    for (int i = 0; i < 40 * 8; i++) REQUIRE(std::isnan(got.dwpe[i]) == (i == 5 * 8 + 2));
}

TEST_CASE("impossible sizes of embeddings are refused") {
    bf16* none = nullptr;
    CHECK_THROWS_WITH_AS(gpu::encoder_forward<bf16>(none, nullptr, none, none, 1, 4, 100, nullptr),
                         doctest::Contains("encoder_forward: 100 channels must be a multiple of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::encoder_backward<bf16>(nullptr, nullptr, none, nullptr, 1, 0, 8, 5, nullptr),
                         doctest::Contains("encoder_backward of 0 rows of 8"), Error);
    CHECK_THROWS_WITH_AS(gpu::encoder_backward<bf16>(nullptr, nullptr, none, nullptr, 1, 4, 8, 0, nullptr),
                         doctest::Contains("a vocabulary of 0"), Error);
    CHECK_THROWS_WITH_AS(gpu::encoder_forward<bf16>(none, nullptr, none, none, 1 << 15, 1 << 15, 8, nullptr),
                         doctest::Contains("1073741824 rows: at most 16777216"), Error);
}
