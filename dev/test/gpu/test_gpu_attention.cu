// test_gpu_attention.cu: gpu::attention_* against the definition, cpu::plain: on tensor cores (bf16 heads of 64 and 128
// channels) and in float arithmetic (the rest), at lengths around every tile; inputs whose result can be read off; huge
// scores; NaN. The same source runs on a GPU and in the emulator.
#include <cstring>

#include "cpu/variants.h"
#include "cuda/attention.cuh"
#include "gpu/on_gpu.h"

struct Shape {
    int B, T, NH, HS;
    int C() const { return NH * HS; }
    int64_t tokens() const { return int64_t(B) * T; }
};

template <class floatX>
struct Outputs {
    Tensor<floatX> out, dqkv, decoded;
    Tensor<float> lse;
    explicit Outputs(Shape s)
        : out(poisoned<floatX>(s.tokens() * s.C())),
          dqkv(poisoned<floatX>(s.tokens() * 3 * s.C())),
          decoded(poisoned<floatX>(s.C())),
          lse(poisoned<float>(s.tokens() * s.NH)) {}
};

template <class floatX>
static bool on_tensor_cores(Shape s) {
    return sizeof(floatX) == sizeof(bf16) && (s.HS == 64 || s.HS == 128);
}

// Working memory as the call before left it may hold what this one should write.
static void poison_scratch(int64_t bytes) { check_cuda(cudaMemset(device_scratch(bytes), 0xff, size_t(bytes))); }

// The definition's results. Decoding: of the first sequence.
template <class floatX>
static Outputs<floatX> defined(Shape s, const Tensor<floatX>& qkv, const Tensor<floatX>& dout) {
    Outputs<floatX> r(s);
    const auto [B, T, NH, HS] = s;
    cpu::plain::attention_forward(r.out.data(), r.lse.data(), qkv.data(), B, T, NH, HS, nullptr);
    cpu::plain::attention_backward(r.dqkv.data(), dout.data(), r.out.data(), r.lse.data(), qkv.data(), B, T, NH, HS,
                                   nullptr);
    cpu::plain::attention_decode(r.decoded.data(), qkv.data(), T, NH, HS, nullptr);
    return r;
}

// out and lse are backward's inputs: given, so that an error of forward does not hide one of backward; or null: its
// own.
template <class floatX>
static Outputs<floatX> computed(Shape s, Tensor<floatX>& qkv, Tensor<floatX>& dout, Outputs<floatX>* given) {
    Outputs<floatX> r(s);
    const auto [B, T, NH, HS] = s;
    {
        OnGpu<floatX> x(qkv), dy(dout), out(r.out), dqkv(r.dqkv), decoded(r.decoded);
        OnGpu<float> lse(r.lse);
        poison_scratch(gpu::attention_scratch_bytes<floatX>(B, T, NH, HS));
        gpu::attention_forward<floatX>(out, lse, x, B, T, NH, HS, nullptr);
        gpu::attention_decode<floatX>(decoded, x, T, NH, HS, nullptr);
        out.back(), lse.back(), decoded.back();
        if (given) {
            OnGpu<floatX> given_out(given->out);
            OnGpu<float> given_lse(given->lse);
            gpu::attention_backward<floatX>(dqkv, dy, given_out, given_lse, x, B, T, NH, HS, nullptr);
            dqkv.back();
        } else {
            gpu::attention_backward<floatX>(dqkv, dy, out, lse, x, B, T, NH, HS, nullptr);
            dqkv.back();
        }
    }
    return r;
}

// In float arithmetic: two orders of summing HS products of standard normal numbers, over sqrt(HS), differ by about
// sqrt(HS) roundings, the sums over T keys by sqrt(T); an error in a score is a relative one in its weight, and weights
// and gradients multiply numbers of up to about 5. All is rounded to floatX once.
//
// On tensor cores the weights and their gradients are bf16 operands: each off by half a step at most, which is 1/512 of
// it, by chance, a third of that squared on average. out is a mean of values with weights p, and sum of p^2 <= 1; rows
// of dscore / sqrt(HS) and columns of p have a root of the sum of squares below about 2 (the first keys, which the most
// queries see). So 6 standard deviations are 6 * 2 * (1/512) / sqrt(3) = 1.7 steps for gradients, half of that for out.
template <class floatX>
static void compare(Shape s, float scale = 1.0f) {
    CAPTURE(s.B);
    CAPTURE(s.T);
    CAPTURE(s.NH);
    CAPTURE(s.HS);
    auto qkv = random_tensor<floatX>(s.tokens() * 3 * s.C(), 1, scale);
    auto dout = random_tensor<floatX>(s.tokens() * s.C(), 2);
    Outputs<floatX> want = defined(s, qkv, dout);
    const Outputs<floatX> got = computed(s, qkv, dout, &want);
    const float sum_error = 4.0f * (std::sqrt(float(s.HS)) + std::sqrt(float(s.T))) * epsilon<float>() * scale * scale;
    const float rounding = sizeof(floatX) == sizeof(float) ? 8 * epsilon<float>() : epsilon<floatX>();
    const float operands = on_tensor_cores<floatX>(s) ? epsilon<floatX>() * scale : 0.0f;
    expect_close("out", got.out, want.out, s.C(), rounding, sum_error + 0.85f * operands);
    expect_close("lse", got.lse, want.lse, s.T, 4 * epsilon<float>(), sum_error);
    expect_close("dqkv", got.dqkv, want.dqkv, 3 * s.C(), rounding, 4 * sum_error + 1.7f * operands);
    expect_close("decoded", got.decoded, want.decoded, s.C(), rounding, sum_error);
}

TEST_CASE_TEMPLATE("attention with GPT-2's heads", floatX, float, bf16) {
    compare<floatX>({2, 256, 3, 64});
    compare<floatX>({1, 1024, 1, 64});
}

TEST_CASE("bf16 heads of 64 and 128 at lengths around the tiles") {
    for (const int HS : {64, 128})
        for (const int T : {1, 2, 7, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200}) compare<bf16>({1, T, 2, HS});
    compare<bf16>({3, 70, 2, 64});
    compare<bf16>({3, 70, 2, 128});
}

TEST_CASE_TEMPLATE("heads of other sizes", floatX, float, bf16) {
    for (const int T : {1, 7, 17, 33, 65}) compare<floatX>({2, T, 2, 24});
    for (const int HS : {8, 16, 56, 72, 80, 120, 136, 192, 200, 248, 256}) compare<floatX>({1, 37, 2, HS});
}

TEST_CASE("fp32 heads at lengths around the tiles") {
    for (const int T : {1, 15, 16, 17, 63, 64, 65, 129}) compare<float>({1, T, 2, 64});
    for (const int T : {31, 32, 33}) compare<float>({1, T, 2, 128});
    for (const int HS : {4, 12, 60, 68, 252}) compare<float>({1, 18, 2, HS});
}

TEST_CASE("large, but not one-hot scores") {
    compare<bf16>({1, 150, 2, 64}, 2.0f);
    compare<bf16>({1, 150, 2, 128}, 2.0f);
    compare<float>({1, 70, 2, 64}, 2.0f);
}

TEST_CASE_TEMPLATE("the same bits twice", floatX, float, bf16) {
    for (const int HS : {64, 128, 40}) {
        const Shape s{2, 130, 2, HS};
        auto qkv = random_tensor<floatX>(s.tokens() * 3 * s.C(), 1),
             dout = random_tensor<floatX>(s.tokens() * s.C(), 2);
        Outputs<floatX>* own = nullptr;
        const auto first = computed(s, qkv, dout, own), second = computed(s, qkv, dout, own);
        CHECK(memcmp(first.out.data(), second.out.data(), size_t(first.out.buffer.bytes())) == 0);
        CHECK(memcmp(first.lse.data(), second.lse.data(), size_t(first.lse.buffer.bytes())) == 0);
        CHECK(memcmp(first.dqkv.data(), second.dqkv.data(), size_t(first.dqkv.buffer.bytes())) == 0);
    }
}

// Query t is 1000 times the unit vector of one earlier place, and key t is the unit vector of place t: the weight of
// that place is 1, that of every other one exp(-1000 / sqrt(HS)), which is 4e-39 at most.
TEST_CASE_TEMPLATE("huge queries select one value", floatX, float, bf16) {
    for (const int HS : {64, 128, 72}) {
        const int T = 64, C = HS;
        auto qkv = filled<floatX>(T * 3 * C, 0.0f), out = poisoned<floatX>(T * C), decoded = poisoned<floatX>(C);
        auto lse = poisoned<float>(T);
        const auto chosen_key = [](int t) { return t * 7 % (t + 1); };
        for (int t = 0; t < T; t++) {
            qkv[t * 3 * C + chosen_key(t)] = floatX(1000.0f);
            qkv[t * 3 * C + C + t] = floatX(1.0f);
            for (int i = 0; i < HS; i++) qkv[t * 3 * C + 2 * C + i] = floatX(float(t + i));
        }
        OnGpu<floatX> x(qkv), y(out), z(decoded);
        OnGpu<float> l(lse);
        gpu::attention_forward<floatX>(y, l, x, 1, T, 1, HS, nullptr);
        gpu::attention_decode<floatX>(z, x, T, 1, HS, nullptr);
        y.back(), l.back(), z.back();
        for (int t = 0; t < T; t++) {
            CHECK(std::fabs(lse[t] - 1000.0f / std::sqrt(float(HS))) <= 125.0f * epsilon<float>());
            for (int i = 0; i < HS; i++)
                CHECK(std::fabs(float(out[t * C + i]) - float(floatX(float(chosen_key(t) + i)))) < 1e-30f);
        }
        for (int i = 0; i < HS; i++) CHECK(float(decoded[i]) == float(out[(T - 1) * C + i]));
    }
}

// Equal keys: each query takes the mean of the values it sees, and lse is the log of their number.
TEST_CASE_TEMPLATE("equal keys average the past, and nothing of the future", floatX, float, bf16) {
    for (const int HS : {64, 128, 32}) {
        const int T = 200, C = HS;
        auto qkv = filled<floatX>(T * 3 * C, 0.0f), out = poisoned<floatX>(T * C);
        auto lse = poisoned<float>(T);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < HS; i++) qkv[t * 3 * C + 2 * C + i] = floatX(float(t));
        OnGpu<floatX> x(qkv), y(out);
        OnGpu<float> l(lse);
        gpu::attention_forward<floatX>(y, l, x, 1, T, 1, HS, nullptr);
        y.back(), l.back();
        for (int t = 0; t < T; t++) {
            CHECK(std::fabs(lse[t] - std::log(float(t + 1))) <= 8 * epsilon<float>());
            CHECK(std::fabs(float(out[t * C + t % HS]) - float(t) / 2) <= epsilon<floatX>() * float(t) / 2 + 1e-5f);
        }
    }
}

// Scores of up to 1e32: the largest is subtracted before any exponential, without an error that could overflow. From
// about 1e7 on, the rounding of lse alone is more than a weight can bear in backward. One key has all the weight, so
// out is its value, dv a sum of rows of dout, and dq and dk are what rounding leaves of 0.
template <class floatX>
static void compare_far_scores(int HS, float magnitude) {
    CAPTURE(HS);
    CAPTURE(magnitude);
    const Shape s{1, 140, 1, HS};
    auto qkv = random_tensor<floatX>(s.tokens() * 3 * HS, 1), dout = random_tensor<floatX>(s.tokens() * HS, 2);
    for (int t = 0; t < s.T; t++)
        for (int i = 0; i < 2 * HS; i++) {
            floatX& x = qkv[t * 3 * HS + i];
            x = floatX(float(x) * magnitude);
        }
    const Outputs<floatX> got = computed<floatX>(s, qkv, dout, nullptr);
    auto out = poisoned<floatX>(s.tokens() * HS);
    auto lse = poisoned<float>(s.T), dv = filled<float>(s.tokens() * HS, 0.0f), got_dv = poisoned<float>(dv.size());
    cpu::plain::attention_forward(out.data(), lse.data(), qkv.data(), 1, s.T, 1, HS, nullptr);
    for (int t = 0; t < s.T; t++) {
        int key = 0;
        while (key < t && memcmp(&out[t * HS], &qkv[(key * 3 + 2) * HS], size_t(HS) * sizeof(floatX)) != 0) key++;
        for (int i = 0; i < HS; i++) dv[key * HS + i] += float(dout[t * HS + i]);
    }

    // Below 1e9 a weight of tensor cores may be 2^-0.5 to 2^0.5, and is rounded before it is divided by itself. A score
    // may cancel: the error is that of its terms, of 10 magnitude^2 each.
    const float rounding = on_tensor_cores<floatX>(s) ? epsilon<floatX>() : float(HS) * epsilon<float>();
    expect_close("out", got.out, out, HS, on_tensor_cores<floatX>(s) ? rounding : 0.0f, 0.0f);
    expect_close("lse", got.lse, lse, s.T, 1e-5f, 10.0f * magnitude * magnitude * float(HS) * epsilon<float>());
    // dout.v is 5 sqrt(HS) at most, and a query or key 5 magnitude; a key has up to T queries.
    const float left = rounding * 5.0f * std::sqrt(float(HS)) * 5.0f * magnitude / std::sqrt(float(HS));
    for (int t = 0; t < s.T; t++)
        for (int i = 0; i < HS; i++) {
            const floatX* row = got.dqkv.data() + t * 3 * HS + i;
            CHECK(std::fabs(float(row[0])) <= left);
            CHECK(std::fabs(float(row[HS])) <= float(s.T) * left);
            got_dv[t * HS + i] = float(row[2 * HS]);
        }
    expect_close("dv", got_dv, dv, HS, epsilon<floatX>(), float(s.T) * epsilon<float>());
}

TEST_CASE_TEMPLATE("scores near the end of the range", floatX, float, bf16) {
    for (const int HS : {64, 128, 16})
        for (const float magnitude : {3e3f, 3e4f, 1e15f}) compare_far_scores<floatX>(HS, magnitude);
}

TEST_CASE_TEMPLATE("NaN in a key reaches every later query, and none before", floatX, float, bf16) {
    for (const int HS : {64, 128, 32}) {
        const Shape s{1, 150, 1, HS};
        auto qkv = random_tensor<floatX>(s.tokens() * 3 * s.C(), 1);
        auto dout = random_tensor<floatX>(s.tokens() * s.C(), 2);
        qkv[100 * 3 * s.C() + s.C() + 3] = floatX(NAN);
        const Outputs<floatX> got = computed<floatX>(s, qkv, dout, nullptr);
        for (int t = 0; t < s.T; t++) {
            CAPTURE(t);
            CHECK(std::isnan(float(got.out[t * s.C()])) == (t >= 100));
            CHECK(std::isnan(got.lse[t]) == (t >= 100));
        }
        const auto gradient = [&](int t, int part) { return float(got.dqkv[(t * 3 + part) * s.C()]); };
        for (int part = 0; part < 3; part++) CHECK(std::isnan(gradient(100, part)));
        CHECK(std::isnan(gradient(149, 0)));
        CHECK(std::isnan(float(got.decoded[0])));
    }
}

TEST_CASE("all is NaN, and it ends") {
    const Shape s{1, 70, 1, 64};
    auto qkv = filled<bf16>(s.tokens() * 3 * s.C(), NAN), dout = filled<bf16>(s.tokens() * s.C(), NAN);
    const Outputs<bf16> got = computed<bf16>(s, qkv, dout, nullptr);
    for (int64_t i = 0; i < got.out.size(); i++) REQUIRE(std::isnan(float(got.out[i])));
    for (int64_t i = 0; i < got.dqkv.size(); i++) REQUIRE(std::isnan(float(got.dqkv[i])));
}

TEST_CASE("impossible heads are refused") {
    bf16 x[8] = {};
    float y[8] = {};
    CHECK_THROWS_WITH_AS(gpu::attention_forward(x, y, x, 1, 1, 1, 20, nullptr),
                         doctest::Contains("heads of 20 channels must be a multiple of 8, at most 256"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_forward(y, y, y, 1, 1, 1, 260, nullptr),
                         doctest::Contains("heads of 260 channels must be a multiple of 4, at most 256"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_backward(y, y, y, y, y, 1, 1, 0, 8, nullptr),
                         doctest::Contains("attention_backward of 1 sequences of 1 tokens, 0 heads"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_decode(x, x, 0, 1, 8, nullptr), doctest::Contains("of 0 tokens"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_forward(x, y, x, 65536, 1, 1, 64, nullptr),
                         doctest::Contains("attention of 65536 sequences of 1 tokens: at most 65535"), Error);
    CHECK_THROWS_WITH_AS(gpu::attention_forward(x, y, x, 1, 1 << 20, 12, 64, nullptr),
                         doctest::Contains("a sequence has 2147483647 numbers at most"), Error);
}
