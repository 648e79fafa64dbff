// test_encoder.cpp: embeddings against their definition: exactly, since each number is one sum in one order; known
// values; "=" and "+=".
#include "support/each_variant.h"

struct Shape {
    int B, T, C, V;
};

template <class floatX>
static Results run(decltype(&cpu::encoder_forward<floatX>) forward, decltype(&cpu::encoder_backward<floatX>) backward,
                   Shape s) {
    const auto [B, T, C, V] = s;
    const auto tokens = random_tokens(B * T, V, 1);
    const auto wte = random_tensor<floatX>(int64_t(V) * C, 2), wpe = random_tensor<floatX>(int64_t(T) * C, 3);
    const auto dout = random_tensor<floatX>(int64_t(B) * T * C, 4);
    auto out = poisoned<floatX>(int64_t(B) * T * C);
    auto dwte = filled<float>(int64_t(V) * C, 0.5f), dwpe = filled<float>(int64_t(T) * C, -0.5f);
    forward(out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C, nullptr);
    backward(dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T, C, V, nullptr);
    Results results;
    results.push_back(result("out", out, C, 0.0f, 0.0f));
    results.push_back(result("dwte", dwte, C, 0.0f, 0.0f));
    results.push_back(result("dwpe", dwpe, C, 0.0f, 0.0f));
    return results;
}

template <class floatX>
static void compare(Shape s) {
    check_variants(run<floatX>(cpu::plain::encoder_forward, cpu::plain::encoder_backward, s),
                   [=] { return run<floatX>(cpu::encoder_forward, cpu::encoder_backward, s); });
}

TEST_CASE_TEMPLATE("embeddings at GPT-2 sizes", floatX, float, bf16) {
    compare<floatX>({2, 128, 768, 100});
    compare<floatX>({1, 64, 1600, 50});
}

// Few tokens in the vocabulary: their rows are added to again and again.
TEST_CASE_TEMPLATE("embeddings at awkward sizes", floatX, float, bf16) {
    for (int C : {1, 7, 17, 65}) compare<floatX>({3, 7, C, 5});
    compare<floatX>({65, 1, 63, 1});
}

TEST_CASE_TEMPLATE("a token and its position are added, and gradients added to what is there", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        Tensor<int> tokens(2);
        tokens[0] = 2, tokens[1] = 2;
        auto wte = filled<floatX>(3, 0.0f), wpe = filled<floatX>(2, 0.0f), out = poisoned<floatX>(2);
        auto dout = filled<floatX>(2, 0.0f);
        wte[2] = floatX(4.0f), wpe[0] = floatX(1.0f), wpe[1] = floatX(2.0f);
        dout[0] = floatX(8.0f), dout[1] = floatX(16.0f);
        auto dwte = filled<float>(3, 1.0f), dwpe = filled<float>(2, 1.0f);
        cpu::encoder_forward(out.data(), tokens.data(), wte.data(), wpe.data(), 1, 2, 1, nullptr);
        cpu::encoder_backward(dwte.data(), dwpe.data(), dout.data(), tokens.data(), 1, 2, 1, 3, nullptr);
        CHECK(float(out[0]) == 5.0f);
        CHECK(float(out[1]) == 6.0f);
        CHECK(dwte[0] == 1.0f);
        CHECK(dwte[2] == 25.0f);
        CHECK(dwpe[0] == 9.0f);
        CHECK(dwpe[1] == 17.0f);
    }
}

TEST_CASE("no rows or no channels are refused") {
    float x = 0.0f;
    int token = 0;
    CHECK_THROWS_WITH_AS(cpu::encoder_forward(&x, &token, &x, &x, 1, 0, 1, nullptr),
                         doctest::Contains("encoder_forward of 0 rows of 1"), Error);
    CHECK_THROWS_WITH_AS(cpu::encoder_backward(&x, &x, &x, &token, 1, 1, 0, 1, nullptr),
                         doctest::Contains("encoder_backward of 1 rows of 0"), Error);
}
