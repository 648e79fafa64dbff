// cases_matmul.h: the cases of the matmuls that test_matmul.cpp and test_gpu_matmul.cu share. The error bounds depend
// on the order in which a backend sums, and on where it rounds. So these cases need a backend with bound<floatX>(value,
// K, options), the error bound of a sum of K products.
#pragma once
#include <limits>

#include "support/cases.h"

namespace matmul_cases {

struct Shape {
    int N, IC, OC;
};

struct Options {
    bool bias = true, gelu = false, accumulate = false, residual = false;
};

enum class Value { out, pre_gelu, dinp, dweight, dbias };

struct Bound {
    float relative, absolute;
};

template <class floatX>
struct Ops {
    decltype(&cpu::matmul_forward<floatX>) forward;
    decltype(&cpu::matmul_backward<floatX>) backward;
};
template <class floatX>
const Ops<floatX> definition{cpu::reference::matmul_forward<floatX>, cpu::reference::matmul_backward<floatX>};
template <class floatX>
const Ops<floatX> tested{ops::matmul_forward<floatX>, ops::matmul_backward<floatX>};

template <class floatX>
struct Inputs {
    Shape s;
    Tensor<floatX> inp, weight, bias, residual, dout, pre_gelu;
    explicit Inputs(Shape s)
        : s(s),
          inp(random_tensor<floatX>(int64_t(s.N) * s.IC, 1)),
          weight(random_tensor<floatX>(int64_t(s.OC) * s.IC, 2)),
          bias(random_tensor<floatX>(s.OC, 3)),
          residual(random_tensor<floatX>(int64_t(s.N) * s.OC, 8)),
          dout(random_tensor<floatX>(int64_t(s.N) * s.OC, 4)),
          pre_gelu(random_tensor<floatX>(int64_t(s.N) * s.IC, 5)) {}
};

// Outputs, which start as NaN to detect elements that are not written.
template <class floatX>
struct Forward {
    Tensor<floatX> out, pre_gelu;
};

template <class Backend, class floatX>
Forward<floatX> forward(const Backend& backend, const Ops<floatX>& ops, const Inputs<floatX>& in, Options options) {
    const Shape s = in.s;
    Forward<floatX> r{poisoned<floatX>(int64_t(s.N) * s.OC), poisoned<floatX>(int64_t(s.N) * s.OC)};
    const auto op = [&](floatX* out, floatX* pre_gelu, const floatX* inp, const floatX* weight, const floatX* bias,
                        const floatX* residual, Stream stream) {
        ops.forward({.out = out,
                     .pre_gelu = pre_gelu,
                     .inp = inp,
                     .weight = {weight, nullptr},
                     .bias = bias,
                     .residual = residual},
                    s.N, s.IC, s.OC, stream);
    };
    backend.call(op, r.out, options.gelu ? &r.pre_gelu : nullptr, in.inp, in.weight, options.bias ? &in.bias : nullptr,
                 options.residual ? &in.residual : nullptr);
    return r;
}

// The gradients of parameters start at random numbers with `accumulate`, and at NaN without.
template <class floatX>
struct Gradients {
    Tensor<floatX> dinp;
    Tensor<float> dweight, dbias;
    Gradients(Shape s, bool accumulate)
        : dinp(poisoned<floatX>(int64_t(s.N) * s.IC)),
          dweight(before(int64_t(s.OC) * s.IC, 6, accumulate)),
          dbias(before(s.OC, 7, accumulate)) {}
    static Tensor<float> before(int64_t size, uint64_t seed, bool accumulate) {
        return accumulate ? random_tensor<float>(size, seed) : poisoned<float>(size);
    }
};

template <class Backend, class floatX>
Gradients<floatX> backward(const Backend& backend, const Ops<floatX>& ops, const Inputs<floatX>& in, Options options) {
    const Shape s = in.s;
    Gradients<floatX> r(s, options.accumulate);
    const auto op = [&](floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                        const floatX* weight, const floatX* pre_gelu, Stream stream) {
        ops.backward({.dinp = dinp,
                      .dweight = dweight,
                      .dbias = dbias,
                      .dout = dout,
                      .inp = inp,
                      .weight = {weight, nullptr},
                      .pre_gelu = pre_gelu,
                      .accumulate = options.accumulate},
                     s.N, s.IC, s.OC, stream);
    };
    backend.call(op, r.dinp, r.dweight, options.bias ? &r.dbias : nullptr, in.dout, in.inp, in.weight,
                 options.gelu ? &in.pre_gelu : nullptr);
    return r;
}

// bound_of(value, K): the error bound of a sum of K products.
template <class floatX, class BoundOf>
Outputs list(const Forward<floatX>& r, Shape s, Options options, const BoundOf& bound_of) {
    const Bound of_out = bound_of(Value::out, s.IC), of_pre_gelu = bound_of(Value::pre_gelu, s.IC);
    Outputs outputs = outputs_of(output("out", r.out, s.OC, of_out.relative, of_out.absolute));
    if (options.gelu)
        outputs.push_back(output("pre_gelu", r.pre_gelu, s.OC, of_pre_gelu.relative, of_pre_gelu.absolute));
    return outputs;
}

template <class floatX, class BoundOf>
Outputs list(const Gradients<floatX>& r, Shape s, Options options, const BoundOf& bound_of) {
    Outputs outputs;
    const auto add = [&](const char* name, Value value, const auto& tensor, int columns, int K) {
        const Bound bound = bound_of(value, K);
        outputs.push_back(output(name, tensor, columns, bound.relative, bound.absolute));
    };
    add("dinp", Value::dinp, r.dinp, s.IC, s.OC);
    add("dweight", Value::dweight, r.dweight, s.IC, s.N);
    if (options.bias) add("dbias", Value::dbias, r.dbias, s.OC, s.N);
    return outputs;
}

inline std::string describe(Shape s, Options options) {
    return format("N=%d IC=%d OC=%d bias=%d gelu=%d residual=%d accumulate=%d ", s.N, s.IC, s.OC, options.bias,
                  options.gelu, options.residual, options.accumulate);
}

// pass(where, ops): the outputs of forward or of backward.
template <class floatX, class Backend, class Pass>
void compare(const Backend& backend, const Inputs<floatX>& in, Options options, const Pass& pass) {
    const std::string what = describe(in.s, options);
    CAPTURE(what);
    const auto bound_of = [&](Value value, int K) { return backend.template bound<floatX>(value, K, options); };
    backend.compare(list(pass(OnHost{}, definition<floatX>), in.s, options, bound_of),
                    [&] { return list(pass(backend, tested<floatX>), in.s, options, bound_of); });
}
template <class floatX, class Backend>
void compare_forward(const Backend& backend, const Inputs<floatX>& in, Options options) {
    compare(backend, in, options, [&](const auto& where, const auto& ops) { return forward(where, ops, in, options); });
}
template <class floatX, class Backend>
void compare_backward(const Backend& backend, const Inputs<floatX>& in, Options options) {
    compare(backend, in, options,
            [&](const auto& where, const auto& ops) { return backward(where, ops, in, options); });
}

// Two calls, one for dinp and one for the parameters' gradients, have the bits of one call. Each gets null for the
// operands that it does not read.
template <class floatX, class Backend>
void gradients_one_by_one(const Backend& backend, const Ops<floatX>& ops, const Inputs<floatX>& in, Options options) {
    const Shape s = in.s;
    const std::string what = describe(s, options);
    CAPTURE(what);
    const auto of_input = [&](floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pre_gelu,
                              Stream stream) {
        ops.backward({.dinp = dinp,
                      .dout = dout,
                      .weight = {weight, nullptr},
                      .pre_gelu = pre_gelu,
                      .accumulate = options.accumulate},
                     s.N, s.IC, s.OC, stream);
    };
    const auto of_parameters = [&](float* dweight, float* dbias, const floatX* dout, const floatX* inp, Stream stream) {
        ops.backward({.dweight = dweight, .dbias = dbias, .dout = dout, .inp = inp, .accumulate = options.accumulate},
                     s.N, s.IC, s.OC, stream);
    };
    backend.on_each_variant([&] {
        const auto both = backward(backend, ops, in, options);
        const auto no_bound = [](Value, int) { return Bound{}; };
        Gradients<floatX> apart(s, options.accumulate);
        backend.call(of_input, apart.dinp, in.dout, in.weight, options.gelu ? &in.pre_gelu : nullptr);
        backend.call(of_parameters, apart.dweight, options.bias ? &apart.dbias : nullptr, in.dout, in.inp);
        expect_same_bits("", list(apart, s, options, no_bound), list(both, s, options, no_bound));
    });
}

inline void refuse_no_gradients() {
    float x = 0.0f;
    const auto backward = [&](float* dinp, float* dweight, float* dbias) {
        ops::matmul_backward<float>({.dinp = dinp, .dweight = dweight, .dbias = dbias, .dout = &x, .inp = &x}, 1, 8, 8,
                                    nullptr);
    };
    CHECK_THROWS_WITH_AS(backward(nullptr, nullptr, nullptr), doctest::Contains("without dinp and without dweight"),
                         Error);
    CHECK_THROWS_WITH_AS(backward(&x, nullptr, &x), doctest::Contains("with dbias but without dweight"), Error);
}

// One element of inp and one of dout are NaN or infinity. Only the outputs that depend on them may become so.
template <class floatX, class Backend>
void not_finite(const Backend& backend, Shape s) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        const int n = s.N - 1, i = 33, o = 65;
        Inputs<floatX> in(s);
        in.inp[n * s.IC + i] = floatX(bad);
        in.dout[n * s.OC + o] = floatX(bad);
        backend.on_each_variant([&] {
            CAPTURE(bad);
            CAPTURE(s.N);
            const auto f = forward(backend, tested<floatX>, in, {});
            const auto g = backward(backend, tested<floatX>, in, {});
            for (int at = 0; at < s.N * s.OC; at++) CHECK(std::isfinite(float(f.out[at])) == (at / s.OC != n));
            for (int at = 0; at < s.N * s.IC; at++) CHECK(std::isfinite(float(g.dinp[at])) == (at / s.IC != n));
            for (int at = 0; at < s.OC * s.IC; at++)
                CHECK(std::isfinite(g.dweight[at]) == (at / s.IC != o && at % s.IC != i));
            for (int at = 0; at < s.OC; at++) CHECK(std::isfinite(g.dbias[at]) == (at != o));
        });
    }
}

// Products of pairs of matrices, with the second of each pair transposed and not.
template <class floatX, class Backend>
void compare_batch(const Backend& backend, int count, Shape s) {
    CAPTURE(count);
    CAPTURE(s.OC);
    const auto left = random_tensor<floatX>(int64_t(count) * s.N * s.IC, 1);
    const auto right = random_tensor<floatX>(int64_t(count) * s.OC * s.IC, 2);
    const Bound bound = backend.template bound<floatX>(Value::out, s.IC, {});
    for (const bool transposed : {true, false}) {
        CAPTURE(transposed);
        auto want = poisoned<float>(int64_t(count) * s.N * s.OC);
        for (int64_t row = 0; row < int64_t(count) * s.N; row++)
            for (int64_t c = 0; c < s.OC; c++) {
                double sum = 0.0;
                for (int64_t k = 0; k < s.IC; k++)
                    sum += double(float(left[row * s.IC + k])) *
                           double(float(right[row / s.N * s.OC * s.IC + (transposed ? c * s.IC + k : k * s.OC + c)]));
                want[row * s.OC + c] = float(sum);
            }
        const auto outputs = [&](const auto& out) {
            return outputs_of(output("out", out, s.OC, bound.relative, bound.absolute));
        };
        backend.compare(outputs(want), [&] {
            auto got = poisoned<floatX>(want.size());
            backend.call(ops::matmul_batch<floatX>, got, left, right, transposed, count, s.N, s.IC, s.OC);
            return outputs(got);
        });
    }
}

}  // namespace matmul_cases
