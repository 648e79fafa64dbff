// cases_embedding.h: the cases of the embeddings that test_embedding.cpp and test_gpu_embedding.cu share.
#pragma once
#include <algorithm>

#include "support/cases.h"

namespace embedding_cases {

struct Shape {
    int B, T, C, V;
};

template <class floatX>
struct Ops {
    decltype(&cpu::embedding_forward<floatX>) forward;
    decltype(&cpu::embedding_backward<floatX>) backward;
};
template <class floatX>
const Ops<floatX> definition{cpu::plain::embedding_forward<floatX>, cpu::plain::embedding_backward<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::embedding_forward<floatX>, ops::embedding_backward<floatX>};

// Random tokens, of which the low ones are frequent, as some words are in a text.
inline Tensor<int> skewed_tokens(int N, int V) {
    Tensor<int> tokens(N);
    const Philox random{1, 0};
    for (int n = 0; n < N; n++) {
        const double x = double(random(uint64_t(n))[0]) / 4294967296.0;
        tokens[n] = int(x * x * x * x * V);
    }
    return tokens;
}

inline int most_frequent(const Tensor<int>& tokens, int V) {
    std::vector<int> count(V);
    for (int64_t i = 0; i < tokens.size(); i++) count[tokens[i]]++;
    return *std::max_element(count.begin(), count.end());
}

// Gradients start at values other than zero, because backward adds to them.
struct Gradients {
    Tensor<float> dwte, dwpe;
    explicit Gradients(Shape s)
        : dwte(filled<float>(int64_t(s.V) * s.C, 0.5f)), dwpe(filled<float>(int64_t(s.T) * s.C, -0.5f)) {}
};

template <class Backend, class floatX>
Gradients backward(const Backend& backend, const Ops<floatX>& ops, const Tensor<floatX>& dout,
                   const Tensor<int>& tokens, Shape s) {
    Gradients g(s);
    backend.call(ops.backward, g.dwte, g.dwpe, dout, tokens, s.B, s.T, s.C, VocabShard{0, s.V});
    return g;
}

// Whether a backend adds the rows of dout that belong to one row of a gradient in the order of the definition.
enum class Sums { in_order, in_any_order };

// The sum of two embeddings is rounded once, in the backend and in the definition. Gradients that are summed in the
// definition's order have the same bits. In another order the error is bounded: a sum of n terms of about 1 is about
// sqrt(n), the roundings of its n additions grow like sqrt(n), and each is at most half an epsilon of the sum.
template <class floatX, class Backend>
void compare(const Backend& backend, Sums sums, Shape s, const Tensor<int>& tokens) {
    CAPTURE(s.B);
    CAPTURE(s.T);
    CAPTURE(s.C);
    CAPTURE(s.V);
    const int64_t size = int64_t(s.B) * s.T * s.C;
    const auto wte = random_tensor<floatX>(int64_t(s.V) * s.C, 2), wpe = random_tensor<floatX>(int64_t(s.T) * s.C, 3);
    const auto dout = random_tensor<floatX>(size, 4);
    const bool exact = sums == Sums::in_order;
    const auto error = [&](int n) {
        return exact ? 0.0f : std::sqrt(float(n)) * (4.0f + std::sqrt(float(n))) * epsilon<float>();
    };
    const float relative = exact ? 0.0f : epsilon<float>();
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        auto out = poisoned<floatX>(size);
        where.call(ops.forward, out, tokens, wte, wpe, s.B, s.T, s.C, VocabShard{0, s.V});
        const Gradients g = backward(where, ops, dout, tokens, s);
        Outputs outputs;
        outputs.push_back(output("out", out, s.C, 0.0f, 0.0f));
        outputs.push_back(output("dwte", g.dwte, s.C, relative, error(most_frequent(tokens, s.V))));
        outputs.push_back(output("dwpe", g.dwpe, s.C, relative, error(s.B)));
        return outputs;
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, tested<floatX>); });
}

template <class floatX, class Backend>
void compare(const Backend& backend, Sums sums, Shape s) {
    compare<floatX>(backend, sums, s, skewed_tokens(s.B * s.T, s.V));
}

// The results of all shards together. The embeddings of position are added in the first shard.
template <class floatX>
struct ShardResults {
    Tensor<float> out;                // the sum over the shards
    Tensor<float> dwte;               // the rows of all shards
    std::vector<Tensor<float>> dwpe;  // one per shard
};

// Behind the rows of each shard there is one that the operations must neither read nor write.
template <class Backend, class floatX>
ShardResults<floatX> run_shards(const Backend& backend, const Ops<floatX>& ops, const Tensor<floatX>& wte,
                                const Tensor<floatX>& wpe, const Tensor<floatX>& dout, const Tensor<int>& tokens,
                                Shape s, int shards) {
    ShardResults<floatX> r{filled<float>(dout.size(), 0.0f), poisoned<float>(wte.size()), {}};
    for (int i = 0; i < shards; i++) {
        const VocabShard shard = shard_of(s.V, shards, i);
        const int64_t first = int64_t(shard.first) * s.C, size = int64_t(shard.count) * s.C;
        auto rows = poisoned<floatX>(size + s.C), out = poisoned<floatX>(dout.size());
        for (int64_t at = 0; at < size; at++) rows[at] = wte[first + at];
        backend.call(ops.forward, out, tokens, rows, i == 0 ? &wpe : nullptr, s.B, s.T, s.C, shard);
        for (int64_t at = 0; at < out.size(); at++) r.out[at] += float(out[at]);

        Gradients g(s);
        auto dwte = filled<float>(size + s.C, 0.5f);
        backend.call(ops.backward, dwte, g.dwpe, dout, tokens, s.B, s.T, s.C, shard);
        for (int64_t at = 0; at < size; at++) r.dwte[first + at] = dwte[at];
        for (int c = 0; c < s.C; c++) REQUIRE(dwte[size + c] == 0.5f);
        r.dwpe.push_back(std::move(g.dwpe));
    }
    return r;
}

// The sum of the shards' outputs, rounded, has the bits of the whole vocabulary's output: all shards but one add zeros.
template <class floatX, class Backend>
void compare_shards(const Backend& backend, Sums sums, Shape s, int shards) {
    CAPTURE(s.B);
    CAPTURE(s.T);
    CAPTURE(s.C);
    CAPTURE(s.V);
    CAPTURE(shards);
    const int64_t size = int64_t(s.B) * s.T * s.C;
    const auto wte = random_tensor<floatX>(int64_t(s.V) * s.C, 2), wpe = random_tensor<floatX>(int64_t(s.T) * s.C, 3);
    const auto dout = random_tensor<floatX>(size, 4);
    const auto tokens = random_tokens(s.B * s.T, s.V, 1);
    const bool exact = sums == Sums::in_order;
    const auto error = [&](int n) {
        return exact ? 0.0f : std::sqrt(float(n)) * (4.0f + std::sqrt(float(n))) * epsilon<float>();
    };
    const float relative = exact ? 0.0f : epsilon<float>();
    const auto outputs = [&](const Tensor<floatX>& out, const Tensor<float>& dwte, const auto& dwpe_of) {
        Outputs outputs;
        outputs.push_back(output("out", out, s.C, 0.0f, 0.0f));
        outputs.push_back(output("dwte", dwte, s.C, relative, error(most_frequent(tokens, s.V))));
        for (int i = 0; i < shards; i++)
            outputs.push_back(output("dwpe of a shard", dwpe_of(i), s.C, relative, error(s.B)));
        return outputs;
    };
    auto whole = poisoned<floatX>(size);
    const VocabShard all{0, s.V};
    OnHost{}.call(definition<floatX>.forward, whole, tokens, wte, wpe, s.B, s.T, s.C, all);
    const Gradients g = backward(OnHost{}, definition<floatX>, dout, tokens, s);
    backend.compare(outputs(whole, g.dwte, [&](int) -> const Tensor<float>& { return g.dwpe; }), [&] {
        const auto r = run_shards(backend, tested<floatX>, wte, wpe, dout, tokens, s, shards);
        auto rounded = poisoned<floatX>(size);
        for (int64_t at = 0; at < size; at++) rounded[at] = floatX(r.out[at]);
        return outputs(rounded, r.dwte, [&](int i) -> const Tensor<float>& { return r.dwpe[i]; });
    });
}

// Random shapes; C is a multiple of `unit`. The second half has so few tokens that some shards are empty.
template <class floatX, class Backend>
void random_shards(const Backend& backend, Sums sums, int unit, int shapes) {
    const Philox random{11, 0};
    for (int i = 0; i < shapes; i++) {
        const auto x = random(uint64_t(i));
        const int V = i < shapes / 2 ? 1 + int(x[3] % 300) : 1 + int(x[3] % 4);
        const Shape s{1 + int(x[0] % 3), 1 + int(x[1] % 60), unit * (1 + int(x[2] % 12)), V};
        for (const int shards : {1, 2, 3, 4}) compare_shards<floatX>(backend, sums, s, shards);
    }
}

// Tokens that all occur equally often, in random order, and tokens that occur once, twice, and so on, in runs.
template <class floatX, class Backend>
void token_counts(const Backend& backend, Sums sums) {
    for (int length : {15, 16, 31, 32, 33, 64, 95, 96, 97}) {
        const int V = 20, N = V * length;
        Tensor<int> tokens(N);
        for (int n = 0; n < N; n++) tokens[n] = int(int64_t(n) * 7919 % N) / length;
        compare<floatX>(backend, sums, {1, N, 8, V}, tokens);
    }
    Tensor<int> tokens(65 * 66 / 2);
    for (int v = 0, n = 0; v < 65; v++)
        for (int i = 0; i <= v; i++) tokens[n++] = v;
    compare<floatX>(backend, sums, {1, int(tokens.size()), 8, 65}, tokens);
}

template <class floatX, class Backend>
void same_bits_twice(const Backend& backend, Shape s) {
    const auto tokens = skewed_tokens(s.B * s.T, s.V);
    const auto dout = random_tensor<floatX>(int64_t(s.B) * s.T * s.C, 4);
    backend.on_each_variant([&] {
        const Gradients first = backward(backend, tested<floatX>, dout, tokens, s);
        const Gradients second = backward(backend, tested<floatX>, dout, tokens, s);
        CHECK(same_bits(second.dwte, first.dwte));
        CHECK(same_bits(second.dwpe, first.dwpe));
    });
}

// The text is token 2 at both positions.
template <class floatX, class Backend>
void known_sums(const Backend& backend, int C) {
    CAPTURE(C);
    Tensor<int> tokens(2);
    tokens[0] = tokens[1] = 2;
    auto wte = filled<floatX>(3 * C, 0.0f), wpe = filled<floatX>(2 * C, 1.0f), dout = filled<floatX>(2 * C, 8.0f);
    for (int c = 0; c < C; c++) {
        wte[2 * C + c] = floatX(4.0f);
        wpe[C + c] = floatX(2.0f);
        dout[C + c] = floatX(16.0f);
    }
    backend.on_each_variant([&] {
        auto out = poisoned<floatX>(2 * C);
        auto dwte = filled<float>(3 * C, 1.0f), dwpe = filled<float>(2 * C, 1.0f);
        backend.call(tested<floatX>.forward, out, tokens, wte, wpe, 1, 2, C, VocabShard{0, 3});
        backend.call(tested<floatX>.backward, dwte, dwpe, dout, tokens, 1, 2, C, VocabShard{0, 3});
        for (int c = 0; c < C; c++) {
            CHECK(float(out[c]) == 5.0f);
            CHECK(float(out[C + c]) == 6.0f);
            CHECK(dwte[c] == 1.0f);
            CHECK(dwte[C + c] == 1.0f);
            CHECK(dwte[2 * C + c] == 25.0f);
            CHECK(dwpe[c] == 9.0f);
            CHECK(dwpe[C + c] == 17.0f);
        }
    });
}

template <class floatX, class Backend>
void nan_in_dout(const Backend& backend) {
    const Shape s{2, 40, 8, 7};
    Tensor<int> tokens(80);
    for (int n = 0; n < 80; n++) tokens[n] = n % 7;
    auto dout = filled<floatX>(80 * 8, 1.0f);
    dout[45 * 8 + 2] = floatX(NAN);  // token 3, position 5
    backend.on_each_variant([&] {
        const Gradients got = backward(backend, tested<floatX>, dout, tokens, s);
        for (int i = 0; i < 7 * 8; i++) REQUIRE(std::isnan(got.dwte[i]) == (i == 3 * 8 + 2));
        for (int i = 0; i < 40 * 8; i++) REQUIRE(std::isnan(got.dwpe[i]) == (i == 5 * 8 + 2));
    });
}

inline void refuse_no_rows() {
    float x = 0.0f;
    const int token = 0;
    CHECK_THROWS_WITH_AS(ops::embedding_forward(&x, &token, &x, &x, 1, 0, 8, {0, 5}, nullptr),
                         doctest::Contains("embedding_forward of 0 rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::embedding_backward(&x, &x, &x, &token, 1, 0, 8, {0, 5}, nullptr),
                         doctest::Contains("embedding_backward of 0 rows of 8"), Error);
}

inline void refuse_impossible_shards() {
    float x = 0.0f;
    const int token = 0;
    CHECK_THROWS_WITH_AS(ops::embedding_forward(&x, &token, &x, &x, 1, 1, 8, {-1, 5}, nullptr),
                         doctest::Contains("embedding_forward: a shard of 5 rows from row -1"), Error);
    CHECK_THROWS_WITH_AS(ops::embedding_backward(&x, &x, &x, &token, 1, 1, 8, {0, -1}, nullptr),
                         doctest::Contains("embedding_backward: a shard of -1 rows from row 0"), Error);
}

}  // namespace embedding_cases
