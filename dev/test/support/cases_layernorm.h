// cases_layernorm.h: the cases of LayerNorm that test_layernorm.cpp and test_gpu_layernorm.cu share.
#pragma once
#include "support/cases.h"

namespace layernorm_cases {

template <class floatX>
struct Ops {
    decltype(&cpu::layernorm_forward<floatX>) forward;
    decltype(&cpu::layernorm_backward<floatX>) backward;
};
template <class floatX>
const Ops<floatX> definition{cpu::reference::layernorm_forward<floatX>, cpu::reference::layernorm_backward<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::layernorm_forward<floatX>, ops::layernorm_backward<floatX>};

// Two sums of C terms of about 1 in different orders differ by about sqrt(C) roundings. This is the error of mean and
// rstd, relative to the size of the inputs, whose mean is `offset`.
inline float row_error(int C, float offset) {
    return 2.0f * std::sqrt(float(C)) * epsilon<float>() * (1.0f + std::fabs(offset));
}

// ---- forward

template <class floatX>
struct Forward {
    Tensor<floatX> out;
    Tensor<float> mean, rstd;
};

template <class Backend, class floatX>
Forward<floatX> forward(const Backend& backend, const Ops<floatX>& ops, const Tensor<floatX>& inp,
                        const Tensor<floatX>& weight, const Tensor<floatX>& bias) {
    const int C = int(weight.size()), N = int(inp.size() / C);
    Forward<floatX> r{poisoned<floatX>(inp.size()), poisoned<float>(N), poisoned<float>(N)};
    backend.call(ops.forward, r.out, r.mean, r.rstd, inp, weight, bias, N, C);
    return r;
}

// out has the errors of mean and rstd, and is rounded to floatX once. Of several rows the first is constant: eps alone
// keeps its rstd finite.
template <class floatX, class Backend>
void compare_forward(const Backend& backend, int N, int C, float offset = 0.0f) {
    INFO("N=", N, " C=", C, " offset=", offset);
    auto inp = random_tensor<floatX>(int64_t(N) * C, 1, 1.0f, offset);
    for (int c = 0; c < C && N > 1; c++) inp[c] = floatX(0.0f);
    const auto weight = random_tensor<floatX>(C, 3), bias = random_tensor<floatX>(C, 4);
    const float error = row_error(C, offset);
    const auto outputs = [&](const auto& where, const Ops<floatX>& ops) {
        const auto r = forward(where, ops, inp, weight, bias);
        return outputs_of(output("mean", r.mean, 1, 0.0f, error), output("rstd", r.rstd, 1, error, 0.0f),
                          output("out", r.out, C, rounding_step<floatX>(), 8 * error));
    };
    backend.compare(outputs(OnHost{}, definition<floatX>), [&] { return outputs(backend, tested<floatX>); });
}

template <class floatX, class Backend>
void nan_in_a_row(const Backend& backend, int C) {
    CAPTURE(C);
    auto inp = random_tensor<floatX>(2 * C, 1);
    inp[5] = floatX(NAN);
    backend.on_each_variant([&] {
        const auto r = forward(backend, tested<floatX>, inp, filled<floatX>(C, 1.0f), filled<floatX>(C, 1.0f));
        for (int n : {0, 1}) CHECK((std::isnan(r.mean[n]) == (n == 0) && std::isnan(r.rstd[n]) == (n == 0)));
        for (int i = 0; i < 2 * C; i++) CHECK(std::isnan(float(r.out[i])) == (i < C));
    });
}

// ---- backward

constexpr float before = 0.25f;  // gradients of parameters start at this value, because backward adds to them

// mean and rstd are unrelated to the rows, to test that backward uses its arguments and does not compute its own.
template <class floatX>
struct BackwardInputs {
    int N, C;
    float offset;
    Tensor<floatX> dout, inp, weight, dresidual;
    Tensor<float> mean, rstd;
    BackwardInputs(int N, int C, float offset = 0.0f)
        : N(N),
          C(C),
          offset(offset),
          dout(random_tensor<floatX>(int64_t(N) * C, 1)),
          inp(random_tensor<floatX>(int64_t(N) * C, 2, 1.0f, offset)),
          weight(random_tensor<floatX>(C, 3)),
          dresidual(random_tensor<floatX>(int64_t(N) * C, 4)),
          mean(random_tensor<float>(N, 5, 0.1f, offset)),
          rstd(random_tensor<float>(N, 6, 0.1f, 1.0f)) {}
};

enum class Dresidual { none, apart, in_place };

template <class floatX>
struct Gradients {
    Tensor<floatX> dinp;
    Tensor<float> dweight, dbias, dbranch_bias;
};

template <class Backend, class floatX>
Gradients<floatX> backward(const Backend& backend, const Ops<floatX>& ops, const BackwardInputs<floatX>& in,
                           Dresidual where = Dresidual::apart, bool with_branch_bias = true) {
    Gradients<floatX> g{where == Dresidual::in_place ? copy_of(in.dresidual) : poisoned<floatX>(in.inp.size()),
                        filled<float>(in.C, before), filled<float>(in.C, before), filled<float>(in.C, before)};
    const Tensor<floatX>* dresidual = where == Dresidual::none    ? nullptr
                                      : where == Dresidual::apart ? &in.dresidual
                                                                  : &g.dinp;
    backend.call(ops.backward, g.dinp, g.dweight, g.dbias, with_branch_bias ? &g.dbranch_bias : nullptr, in.dout,
                 in.inp, in.weight, in.mean, in.rstd, dresidual, in.N, in.C);
    return g;
}

// The errors of sums that should be `before` plus the column sums of d, relative to the sum of the terms' magnitudes.
template <class floatX>
Tensor<float> off_column_sums(const Tensor<float>& sums, const Tensor<floatX>& d, int C) {
    auto off = poisoned<float>(C);
    for (int c = 0; c < C; c++) {
        double sum = double(before), size = sum;
        for (int64_t i = c; i < d.size(); i += C) {
            sum += double(float(d[i]));
            size += std::fabs(double(float(d[i])));
        }
        off[c] = float((double(sums[c]) - sum) / size);
    }
    return off;
}

// dinp has the error of the averages over a row, which sum C terms of about 1, and is rounded once.
//
// A gradient of a parameter is a sum of N terms of about 1. It is about sqrt(N), and the roundings of its N additions
// grow like sqrt(N).
//
// dbranch_bias is compared with the sums in double of the dinp that was stored, because backend and definition may
// round an element of dinp in different directions. Each of its additions rounds by at most half an epsilon of the sum
// of the magnitudes, and they grow like sqrt(N). The bound is twice that and a few more, for the worst of C columns.
template <class Backend, class floatX>
Outputs backward_outputs(const Backend& backend, const Ops<floatX>& ops, const BackwardInputs<floatX>& in,
                         Dresidual where) {
    const Gradients<floatX> g = backward(backend, ops, in, where);
    const float root = std::sqrt(float(in.N)), error = row_error(in.C, in.offset);
    const float column_error = root * (8.0f + 2.0f * root) * epsilon<float>();
    expect_close("dbranch_bias", off_column_sums(g.dbranch_bias, g.dinp, in.C), filled<float>(in.C, 0.0f), 1, 0.0f,
                 std::min(4.0f * root, 8.0f + root) * epsilon<float>());
    return outputs_of(output("dinp", g.dinp, in.C, rounding_step<floatX>(), 8 * error),
                      output("dweight", g.dweight, 1, 0.0f, column_error * (1.0f + std::fabs(in.offset))),
                      output("dbias", g.dbias, 1, 0.0f, column_error));
}

template <class floatX, class Backend>
void compare_backward(const Backend& backend, int N, int C, Dresidual where = Dresidual::apart, float offset = 0.0f) {
    INFO("N=", N, " C=", C, " offset=", offset, " dresidual=", int(where));
    const BackwardInputs<floatX> in(N, C, offset);
    backend.compare(backward_outputs(OnHost{}, definition<floatX>, in, where),
                    [&] { return backward_outputs(backend, tested<floatX>, in, where); });
}

// Two runs have the same bits, with dresidual in place too, and without dbranch_bias.
template <class floatX, class Backend>
void optional_arguments(const Backend& backend, int N, int C) {
    BackwardInputs<floatX> in(N, C);
    const auto bits = [&](Dresidual where, bool with_branch_bias, bool of_branch_bias) {
        const auto g = backward(backend, tested<floatX>, in, where, with_branch_bias);
        return outputs_of(output("dinp", g.dinp, C, 0, 0), output("dweight", g.dweight, C, 0, 0),
                          output("dbias", g.dbias, C, 0, 0),
                          output("dbranch_bias", of_branch_bias ? g.dbranch_bias : g.dbias, C, 0, 0));
    };
    backend.on_each_variant([&] {
        const Outputs whole = bits(Dresidual::apart, true, true);
        expect_same_bits("a second run: ", bits(Dresidual::apart, true, true), whole);
        expect_same_bits("dresidual in place: ", bits(Dresidual::in_place, true, true), whole);
        expect_same_bits("without dbranch_bias: ", bits(Dresidual::apart, false, false),
                         bits(Dresidual::apart, true, false));
        in.dresidual = filled<floatX>(int64_t(N) * C, 0.0f);
        expect_same_bits("without dresidual: ", bits(Dresidual::none, true, true), bits(Dresidual::apart, true, true));
        in.dresidual = random_tensor<floatX>(int64_t(N) * C, 4);
    });
}

template <class floatX, class Backend>
void nan_in_dout(const Backend& backend, int N, int C) {
    CAPTURE(C);
    BackwardInputs<floatX> in(N, C);
    const int row = N - 2, column = C * 3 / 5;
    in.dout[row * C + column] = floatX(NAN);
    backend.on_each_variant([&] {
        const auto got = backward(backend, tested<floatX>, in);
        for (int c = 0; c < C; c++) {
            for (int n = 0; n < N; n++) REQUIRE(std::isnan(float(got.dinp[n * C + c])) == (n == row));
            REQUIRE(std::isnan(got.dweight[c]) == (c == column));
            REQUIRE(std::isnan(got.dbias[c]) == (c == column));
            REQUIRE(std::isnan(got.dbranch_bias[c]));
        }
    });
}

}  // namespace layernorm_cases
