// test_attention.cpp: causal attention against its definition, at heads like GPT-2's and at awkward sizes; inputs whose
// result can be read off; huge scores; NaN; decoding against the last row of the whole. (The AMX form has a test of its
// own: test_amx_attention.cpp.)
#include "support/each_variant.h"

struct Shape {
    int B, T, NH, HS;
};

template <class floatX>
struct Form {
    decltype(&cpu::attention_forward<floatX>) forward;
    decltype(&cpu::attention_backward<floatX>) backward;
    decltype(&cpu::attention_decode<floatX>) decode;
};

template <class floatX>
static const Form<floatX> definition{cpu::plain::attention_forward<floatX>, cpu::plain::attention_backward<floatX>,
                                     cpu::plain::attention_decode<floatX>};
template <class floatX>
static const Form<floatX> chosen{cpu::attention_forward<floatX>, cpu::attention_backward<floatX>,
                                 cpu::attention_decode<floatX>};

// Two orders of summing HS products of standard normal numbers, over sqrt(HS), differ by about sqrt(HS) roundings, the
// sums over T keys by sqrt(T); an error in a score is a relative one in its weight, and weights and gradients multiply
// numbers of up to about 5. All is rounded to floatX once.
template <class floatX>
static Results run(const Form<floatX>& form, Shape s) {
    const auto [B, T, NH, HS] = s;
    const int C = NH * HS;
    const auto qkv = random_tensor<floatX>(int64_t(B) * T * 3 * C, 1);
    const auto dout = random_tensor<floatX>(int64_t(B) * T * C, 2);
    auto out = poisoned<floatX>(int64_t(B) * T * C), decoded = poisoned<floatX>(C);
    auto lse = poisoned<float>(int64_t(B) * NH * T);
    auto dqkv = poisoned<floatX>(int64_t(B) * T * 3 * C);
    form.forward(out.data(), lse.data(), qkv.data(), B, T, NH, HS, nullptr);
    form.backward(dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), B, T, NH, HS, nullptr);
    form.decode(decoded.data(), qkv.data(), T, NH, HS, nullptr);
    const float error = 4.0f * (std::sqrt(float(HS)) + std::sqrt(float(T))) * epsilon<float>();
    // The gradient is taken at `out` as rounded, which may differ by one step: dout.out by sqrt(HS) half steps, at
    // most.
    const float step = sizeof(floatX) == sizeof(float) ? 0.0f : 0.25f * epsilon<floatX>();
    Results r;
    r.push_back(result("out", out, C, rounding<floatX>(), error));
    r.push_back(result("lse", lse, T, 0.0f, error));
    r.push_back(result("dqkv", dqkv, 3 * C, rounding<floatX>(), 4 * error + step));
    r.push_back(result("decoded", decoded, C, rounding<floatX>(), error));
    return r;
}

template <class floatX>
static void compare(Shape s) {
    CAPTURE(s.T);
    CAPTURE(s.HS);
    check_variants(
        run(definition<floatX>, s), [=] { return run(chosen<floatX>, s); }, Isa::avx512);
}

TEST_CASE_TEMPLATE("attention with GPT-2's heads", floatX, float, bf16) {
    compare<floatX>({2, 256, 3, 64});
    compare<floatX>({1, 300, 2, 80});
}

TEST_CASE_TEMPLATE("attention at awkward sizes", floatX, float, bf16) {
    for (int T : {1, 7, 17, 65, 129}) compare<floatX>({2, T, 2, 24});
    for (int HS : {1, 7, 17, 33, 65, 256}) compare<floatX>({1, 70, 1, HS});
}

// Query t is 1000 times the unit vector of one earlier place, and key t is the unit vector of place t: the weight of
// that place is 1, that of every other one exp(-1000 / sqrt(64)), which is below any float, or the least that a form
// knows.
TEST_CASE_TEMPLATE("huge queries select one value", floatX, float, bf16) {
    const int T = 64, HS = 64, C = HS;
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto qkv = filled<floatX>(T * 3 * C, 0.0f), out = poisoned<floatX>(T * C), decoded = poisoned<floatX>(C);
        auto lse = poisoned<float>(T);
        const auto chosen_key = [](int t) { return t * 7 % (t + 1); };
        for (int t = 0; t < T; t++) {
            qkv[t * 3 * C + chosen_key(t)] = floatX(1000.0f);
            qkv[t * 3 * C + C + t] = floatX(1.0f);
            for (int i = 0; i < HS; i++) qkv[t * 3 * C + 2 * C + i] = floatX(float(t + i));
        }
        cpu::attention_forward(out.data(), lse.data(), qkv.data(), 1, T, 1, HS, nullptr);
        cpu::attention_decode(decoded.data(), qkv.data(), T, 1, HS, nullptr);
        for (int t = 0; t < T; t++) {
            CHECK(lse[t] == 125.0f);
            for (int i = 0; i < HS; i++) CHECK(std::fabs(float(out[t * C + i]) - float(chosen_key(t) + i)) < 1e-30f);
        }
        for (int i = 0; i < HS; i++) CHECK(float(decoded[i]) == float(out[(T - 1) * C + i]));
    }
}

// Equal keys: each query takes the mean of the values it sees, and lse is the log of their number.
TEST_CASE_TEMPLATE("equal keys average the past, and nothing of the future", floatX, float, bf16) {
    const int T = 100, HS = 32, C = HS;
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto qkv = filled<floatX>(T * 3 * C, 0.0f), out = poisoned<floatX>(T * C);
        auto lse = poisoned<float>(T);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HS; i++) qkv[t * 3 * C + 2 * C + i] = floatX(float(t));
        cpu::attention_forward(out.data(), lse.data(), qkv.data(), 1, T, 1, HS, nullptr);
        for (int t = 0; t < T; t++) {
            CHECK(double(lse[t]) == doctest::Approx(std::log(t + 1.0)).epsilon(1e-6));
            // AMX rounds the weights to bf16: up to half a step each, which partly cancel.
            CHECK(double(float(out[t * C])) == doctest::Approx(t / 2.0).epsilon(double(rounding<floatX>())));
        }
    }
}

TEST_CASE_TEMPLATE("decoding gives the last row of the whole", floatX, float, bf16) {
    for (const Isa level : available_isas(Isa::avx512)) {
        const RunsOn setting(level, 2);
        for (int T : {1, 2, 64, 65, 200}) {
            const int NH = 3, HS = 20, C = NH * HS;
            const auto qkv = random_tensor<floatX>(T * 3 * C, 1);
            auto out = poisoned<floatX>(T * C), decoded = poisoned<floatX>(C), last = poisoned<floatX>(C);
            auto lse = poisoned<float>(NH * T);
            cpu::attention_forward(out.data(), lse.data(), qkv.data(), 1, T, NH, HS, nullptr);
            cpu::attention_decode(decoded.data(), qkv.data(), T, NH, HS, nullptr);
            for (int i = 0; i < C; i++) last[i] = out[(T - 1) * C + i];
            expect_close("decoded", decoded, last, C, rounding<floatX>(), 1e-5f);  // as derived above, HS and T small
        }
    }
}

// Scores of 1e30 overflow nothing: the largest is subtracted before any exp.
TEST_CASE("huge scores") {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const int T = 40, HS = 16, C = HS;
        auto qkv = random_tensor<float>(T * 3 * C, 1), out = poisoned<float>(T * C), lse = poisoned<float>(T);
        auto dqkv = poisoned<float>(T * 3 * C);
        const auto dout = random_tensor<float>(T * C, 2);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < 2 * C; i++) qkv[t * 3 * C + i] *= 1e15f;
        cpu::attention_forward(out.data(), lse.data(), qkv.data(), 1, T, 1, HS, nullptr);
        cpu::attention_backward(dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), 1, T, 1, HS, nullptr);
        for (int i = 0; i < T * C; i++) CHECK(std::isfinite(out[i]));
        for (int t = 0; t < T; t++) CHECK(std::isfinite(lse[t]));
    }
}

TEST_CASE_TEMPLATE("NaN in a key reaches every later query, and none before", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const int T = 70, HS = 32, C = HS;
        auto qkv = random_tensor<floatX>(T * 3 * C, 1), out = filled<floatX>(T * C, 0.0f);
        auto lse = poisoned<float>(T);
        qkv[50 * 3 * C + C + 3] = floatX(NAN);
        cpu::attention_forward(out.data(), lse.data(), qkv.data(), 1, T, 1, HS, nullptr);
        for (int t = 0; t < T; t++) {
            CAPTURE(t);
            CHECK(std::isnan(float(out[t * C])) == (t >= 50));
            CHECK(std::isnan(lse[t]) == (t >= 50));
        }
    }
}

TEST_CASE("impossible heads are refused") {
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(cpu::attention_forward(&x, &x, &x, 1, 1, 1, 257, nullptr),
                         doctest::Contains("heads of 257 channels"), Error);
    CHECK_THROWS_WITH_AS(cpu::attention_backward(&x, &x, &x, &x, &x, 1, 1, 0, 8, nullptr),
                         doctest::Contains("attention_backward of 1 sequences of 1 tokens, 0 heads"), Error);
    CHECK_THROWS_WITH_AS(cpu::attention_decode(&x, &x, 0, 1, 8, nullptr), doctest::Contains("of 0 tokens"), Error);
}
