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
const Ops<floatX> definition{cpu::reference::embedding_forward<floatX>, cpu::reference::embedding_backward<floatX>};
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

// Whether a backend adds the rows of dout that belong to one row of a gradient in the order of the definition.
enum class Sums { in_order, in_any_order };

template <class floatX>
struct Inputs {
    Shape s;
    Tensor<int> tokens;
    Tensor<floatX> wte, wpe, dout;
    Inputs(Shape s, Tensor<int> tokens)
        : s(s),
          tokens(std::move(tokens)),
          wte(random_tensor<floatX>(int64_t(s.V) * s.C, 2)),
          wpe(random_tensor<floatX>(int64_t(s.T) * s.C, 3)),
          dout(random_tensor<floatX>(int64_t(s.B) * s.T * s.C, 4)) {}
};

// The results of all shards together: out is their sum, which is rounded once, because all shards but one add zeros.
template <class floatX>
struct Results {
    Tensor<floatX> out;
    Tensor<float> dwte, dwpe;
};

// The first shard adds the embeddings of position. Every shard has the same gradient of these. Gradients start at
// values other than zero, because backward adds to them. Behind the rows of each shard there is one that the operations
// must neither read nor write.
template <class Backend, class floatX>
Results<floatX> run(const Backend& backend, const Ops<floatX>& ops, const Inputs<floatX>& in, int shards = 1) {
    const Shape s = in.s;
    Results<floatX> r{filled<floatX>(in.dout.size(), 0.0f), poisoned<float>(in.wte.size()), poisoned<float>(0)};
    for (int i = 0; i < shards; i++) {
        const VocabShard shard = shard_of(s.V, shards, i);
        const int64_t first = int64_t(shard.first) * s.C, size = int64_t(shard.count) * s.C;
        auto rows = poisoned<floatX>(size + s.C), out = poisoned<floatX>(in.dout.size());
        std::copy_n(in.wte.data() + first, size, rows.data());
        backend.call(ops.forward, out, in.tokens, std::as_const(rows), i == 0 ? &in.wpe : nullptr, s.B, s.T, s.C,
                     shard);
        for (int64_t at = 0; at < out.size(); at++) r.out[at] = floatX(float(r.out[at]) + float(out[at]));

        auto dwte = filled<float>(size + s.C, 0.5f), dwpe = filled<float>(int64_t(s.T) * s.C, -0.5f);
        backend.call(ops.backward, dwte, dwpe, in.dout, in.tokens, s.B, s.T, s.C, shard);
        std::copy_n(dwte.data(), size, r.dwte.data() + first);
        for (int c = 0; c < s.C; c++) REQUIRE(dwte[size + c] == 0.5f);
        if (i > 0) CHECK(same_bits(dwpe, r.dwpe));
        r.dwpe = std::move(dwpe);
    }
    return r;
}

// Compares with the definition over the whole vocabulary. The sum of two embeddings is rounded once, in the backend and
// in the definition. Gradients that are summed in the definition's order have the same bits. In another order the error
// is bounded: a sum of n terms of about 1 is about sqrt(n), the roundings of its n additions grow like sqrt(n), and
// each is at most half an epsilon of the sum.
template <class floatX, class Backend>
void compare(const Backend& backend, Sums sums, Shape s, Tensor<int> tokens, int shards = 1) {
    INFO("B=", s.B, " T=", s.T, " C=", s.C, " V=", s.V, " shards=", shards);
    const Inputs<floatX> in(s, std::move(tokens));
    const bool exact = sums == Sums::in_order;
    const auto error = [&](int n) {
        return exact ? 0.0f : std::sqrt(float(n)) * (4.0f + std::sqrt(float(n))) * epsilon<float>();
    };
    const float relative = exact ? 0.0f : epsilon<float>();
    const auto outputs = [&](const Results<floatX>& r) {
        return outputs_of(output("out", r.out, s.C, 0.0f, 0.0f),
                          output("dwte", r.dwte, s.C, relative, error(most_frequent(in.tokens, s.V))),
                          output("dwpe", r.dwpe, s.C, relative, error(s.B)));
    };
    backend.compare(outputs(run(OnHost{}, definition<floatX>, in)),
                    [&] { return outputs(run(backend, tested<floatX>, in, shards)); });
}

template <class floatX, class Backend>
void compare(const Backend& backend, Sums sums, Shape s) {
    compare<floatX>(backend, sums, s, skewed_tokens(s.B * s.T, s.V));
}

template <class floatX, class Backend>
void compare_shards(const Backend& backend, Sums sums, Shape s, int shards) {
    compare<floatX>(backend, sums, s, random_tokens(s.B * s.T, s.V, 1), shards);
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
        compare<floatX>(backend, sums, {1, N, 8, V}, std::move(tokens));
    }
    Tensor<int> tokens(65 * 66 / 2);
    for (int v = 0, n = 0; v < 65; v++)
        for (int i = 0; i <= v; i++) tokens[n++] = v;
    compare<floatX>(backend, sums, {1, 65 * 66 / 2, 8, 65}, std::move(tokens));
}

template <class floatX, class Backend>
void same_bits_twice(const Backend& backend, Shape s) {
    const Inputs<floatX> in(s, skewed_tokens(s.B * s.T, s.V));
    backend.on_each_variant([&] {
        const auto first = run(backend, tested<floatX>, in), second = run(backend, tested<floatX>, in);
        CHECK(same_bits(second.dwte, first.dwte));
        CHECK(same_bits(second.dwpe, first.dwpe));
    });
}

template <class floatX, class Backend>
void nan_in_dout(const Backend& backend) {
    Tensor<int> tokens(80);
    for (int n = 0; n < 80; n++) tokens[n] = n % 7;
    Inputs<floatX> in({2, 40, 8, 7}, std::move(tokens));
    in.dout[45 * 8 + 2] = floatX(NAN);  // token 3, position 5
    backend.on_each_variant([&] {
        const auto got = run(backend, tested<floatX>, in);
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
