// test_layernorm.cpp: LayerNorm, alone and with the residual sum, against its definition, at the sizes of GPT-2 and at
// awkward ones; far from zero; "=" and "+="; NaN.
#include "support/each_variant.h"

// Gradients start at a value that must still be in them.
constexpr float before = 0.25f;

template <class floatX>
struct Form {
    decltype(&cpu::layernorm_forward<floatX>) forward;
    decltype(&cpu::residual_layernorm_forward<floatX>) residual_forward;
    decltype(&cpu::layernorm_backward<floatX>) backward;
};

template <class floatX>
static const Form<floatX> definition{cpu::plain::layernorm_forward<floatX>,
                                     cpu::plain::residual_layernorm_forward<floatX>,
                                     cpu::plain::layernorm_backward<floatX>};
template <class floatX>
static const Form<floatX> chosen{cpu::layernorm_forward<floatX>, cpu::residual_layernorm_forward<floatX>,
                                 cpu::layernorm_backward<floatX>};

template <class floatX>
struct Inputs {
    int N, C;
    float offset;  // of the mean
    Tensor<floatX> inp, add, weight, bias, dout, dresidual;
    Inputs(int N, int C, float offset)
        : N(N),
          C(C),
          offset(offset),
          inp(random_tensor<floatX>(int64_t(N) * C, 1, 1.0f, offset)),
          add(random_tensor<floatX>(int64_t(N) * C, 2)),
          weight(random_tensor<floatX>(C, 3)),
          bias(random_tensor<floatX>(C, 4)),
          dout(random_tensor<floatX>(int64_t(N) * C, 5)),
          dresidual(random_tensor<floatX>(int64_t(N) * C, 6)) {}
};

// How far sums are from `before` plus the column sums of d, relative to what they add up. Not compared between forms:
// a number may be rounded to either side.
template <class floatX>
static Tensor<float> off_column_sums(const Tensor<float>& sums, const Tensor<floatX>& d, int C) {
    auto off = poisoned<float>(C);
    for (int c = 0; c < C; c++) {
        double sum = double(before), size = sum;
        for (int64_t i = c; i < d.size(); i += C) sum += double(float(d[i])), size += std::fabs(double(float(d[i])));
        off[c] = float((double(sums[c]) - sum) / size);
    }
    return off;
}

// Sums of C terms of about 1 in two orders differ by about sqrt(C) roundings, which mean and rstd have relative to the
// size of the numbers; out follows them and is rounded to floatX once. Gradients of parameters are sums of N terms.
template <class floatX>
static Results run(const Form<floatX>& form, const Inputs<floatX>& in) {
    const int N = in.N, C = in.C;
    const int64_t size = int64_t(N) * C;
    auto out = poisoned<floatX>(size), sum = poisoned<floatX>(size), out2 = poisoned<floatX>(size);
    auto mean = poisoned<float>(N), rstd = poisoned<float>(N), mean2 = poisoned<float>(N), rstd2 = poisoned<float>(N);
    auto dinp = poisoned<floatX>(size);
    auto dweight = filled<float>(C, before), dbias = filled<float>(C, before), dbranch_bias = filled<float>(C, before);
    form.forward(out.data(), mean.data(), rstd.data(), in.inp.data(), in.weight.data(), in.bias.data(), N, C, nullptr);
    form.residual_forward(sum.data(), out2.data(), mean2.data(), rstd2.data(), in.inp.data(), in.add.data(),
                          in.weight.data(), in.bias.data(), N, C, nullptr);
    form.backward(dinp.data(), dweight.data(), dbias.data(), dbranch_bias.data(), in.dout.data(), in.inp.data(),
                  in.weight.data(), mean.data(), rstd.data(), in.dresidual.data(), N, C, nullptr);
    const float row_error = 2.0f * std::sqrt(float(C)) * epsilon<float>() * (1.0f + std::fabs(in.offset));
    const float column_error = 4.0f * std::sqrt(float(N)) * (row_error + std::sqrt(float(N)) * epsilon<float>());
    Results r;
    r.push_back(result("mean", mean, 1, 0.0f, row_error));
    r.push_back(result("rstd", rstd, 1, row_error, 0.0f));
    r.push_back(result("out", out, C, rounding<floatX>(), 8 * row_error));
    r.push_back(result("sum", sum, C, 0.0f, 0.0f));
    r.push_back(result("residual mean", mean2, 1, 0.0f, row_error));
    r.push_back(result("residual rstd", rstd2, 1, row_error, 0.0f));
    r.push_back(result("residual out", out2, C, rounding<floatX>(), 8 * row_error));
    r.push_back(result("dinp", dinp, C, rounding<floatX>(), 32 * row_error));
    r.push_back(result("dweight", dweight, C, 0.0f, column_error));
    r.push_back(result("dbias", dbias, C, 0.0f, column_error));
    r.push_back(result("dbranch_bias", off_column_sums(dbranch_bias, dinp, C), 1, 0.0f,
                       4.0f * std::sqrt(float(N)) * epsilon<float>()));
    return r;
}

template <class floatX>
static void compare(int N, int C, float offset = 0.0f) {
    CAPTURE(N);
    CAPTURE(C);
    const Inputs<floatX> in(N, C, offset);
    check_variants(run(definition<floatX>, in), [&] { return run(chosen<floatX>, in); });
}

TEST_CASE_TEMPLATE("LayerNorm at GPT-2 sizes", floatX, float, bf16) {
    for (int C : {768, 1024, 1280, 1600}) compare<floatX>(70, C);
}

TEST_CASE_TEMPLATE("LayerNorm at awkward sizes", floatX, float, bf16) {
    for (int N : {1, 7, 33})
        for (int C : {2, 7, 17, 65, 127}) compare<floatX>(N, C);
    compare<floatX>(9000, 7);  // more rows than 256 pieces of 32
}

// A variance taken as E[x^2] - E[x]^2 would be lost here: 1e6 has no digits left for 1.
TEST_CASE_TEMPLATE("LayerNorm of numbers far from zero", floatX, float, bf16) { compare<floatX>(8, 768, 1000.0f); }

TEST_CASE_TEMPLATE("a row becomes zero mean and unit variance", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        Tensor<floatX> inp(4);
        for (int c = 0; c < 4; c++) inp[c] = floatX(float(2 * c));  // 0 2 4 6: mean 3, variance 5
        const auto weight = filled<floatX>(4, 2.0f), bias = filled<floatX>(4, 1.0f);
        auto out = poisoned<floatX>(4);
        auto mean = poisoned<float>(1), rstd = poisoned<float>(1);
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(), 1, 4,
                               nullptr);
        CHECK(mean[0] == 3.0f);
        CHECK(rstd[0] == doctest::Approx(1.0 / std::sqrt(5.0 + 1e-5)).epsilon(1e-6));
        for (int c = 0; c < 4; c++)
            CHECK(float(out[c]) ==
                  doctest::Approx(2.0 * (2 * c - 3) / std::sqrt(5.0 + 1e-5) + 1.0).epsilon(double(epsilon<floatX>())));
    }
}

// Constant rows: eps alone keeps rstd finite.
TEST_CASE_TEMPLATE("a constant row becomes the bias", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const auto inp = filled<floatX>(19, 3.0f), weight = filled<floatX>(19, 2.0f), bias = filled<floatX>(19, 0.5f);
        auto out = poisoned<floatX>(19);
        auto mean = poisoned<float>(1), rstd = poisoned<float>(1);
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(), 1, 19,
                               nullptr);
        for (int c = 0; c < 19; c++) CHECK(float(out[c]) == 0.5f);
        CHECK(rstd[0] == doctest::Approx(1.0 / std::sqrt(1e-5)).epsilon(1e-5));
    }
}

TEST_CASE_TEMPLATE("sum may be a", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        const int N = 3, C = 65;
        const auto b = random_tensor<floatX>(N * C, 2), weight = random_tensor<floatX>(C, 3);
        auto a = random_tensor<floatX>(N * C, 1), sum = poisoned<floatX>(N * C);
        auto out = poisoned<floatX>(N * C), out2 = poisoned<floatX>(N * C);
        auto mean = poisoned<float>(N), rstd = poisoned<float>(N);
        cpu::residual_layernorm_forward(sum.data(), out.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                        weight.data(), weight.data(), N, C, nullptr);
        cpu::residual_layernorm_forward(a.data(), out2.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                        weight.data(), weight.data(), N, C, nullptr);
        expect_close("sum", a, sum, C, 0.0f, 0.0f);
        expect_close("out", out2, out, C, 0.0f, 0.0f);
    }
}

TEST_CASE_TEMPLATE("dresidual may be dinp, or nothing; dbranch_bias may be nothing", floatX, float, bf16) {
    const int N = 40, C = 65;
    const auto dout = random_tensor<floatX>(N * C, 1), inp = random_tensor<floatX>(N * C, 2);
    const auto weight = random_tensor<floatX>(C, 3), zeros = filled<floatX>(N * C, 0.0f);
    const auto mean = filled<float>(N, 0.1f), rstd = filled<float>(N, 0.9f);
    const auto backward = [&](Tensor<floatX>& dinp, const Tensor<floatX>* dresidual, bool branch) {
        auto dweight = filled<float>(C, before), dbias = filled<float>(C, before), dbranch = filled<float>(C, before);
        cpu::layernorm_backward(dinp.data(), dweight.data(), dbias.data(), branch ? dbranch.data() : nullptr,
                                dout.data(), inp.data(), weight.data(), mean.data(), rstd.data(),
                                dresidual ? dresidual->data() : nullptr, N, C, nullptr);
        CHECK((dbranch[0] == before) == !branch);
        return dweight;
    };
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto dinp = poisoned<floatX>(N * C), without = poisoned<floatX>(N * C);
        const auto dweight = backward(dinp, &zeros, true), dweight_without = backward(without, nullptr, false);
        expect_close("dinp of nothing", without, dinp, C, 0.0f, 0.0f);
        expect_close("dweight", dweight_without, dweight, 1, 0.0f, 0.0f);

        auto in_place = random_tensor<floatX>(N * C, 4);
        const auto dresidual = random_tensor<floatX>(N * C, 4);
        backward(dinp, &dresidual, true), backward(in_place, &in_place, true);
        expect_close("dinp in place", in_place, dinp, C, 0.0f, 0.0f);
    }
}

TEST_CASE_TEMPLATE("NaN stays in its row", floatX, float, bf16) {
    for (const Isa level : available_isas()) {
        const RunsOn setting(level, 2);
        auto inp = random_tensor<floatX>(2 * 33, 1), out = filled<floatX>(2 * 33, 0.0f);
        const auto weight = filled<floatX>(33, 1.0f);
        inp[5] = floatX(NAN);
        auto mean = poisoned<float>(2), rstd = poisoned<float>(2);
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), weight.data(), 2, 33,
                               nullptr);
        for (int c = 0; c < 33; c++) {
            CHECK(std::isnan(float(out[c])));
            CHECK_FALSE(std::isnan(float(out[33 + c])));
        }
    }
}

TEST_CASE("LayerNorm of no channels is refused") {
    float x = 0.0f;
    CHECK_THROWS_WITH_AS(cpu::layernorm_forward(&x, &x, &x, &x, &x, &x, 1, 0, nullptr),
                         doctest::Contains("layernorm_forward of 1 rows of 0"), Error);
}
