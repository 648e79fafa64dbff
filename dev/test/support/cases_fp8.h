// cases_fp8.h: the cases of the FP8 matmuls that test_fp8_matmul.cpp and test_gpu_fp8.cu share. The definition is that
// of the bf16 matmul, for operands that are rounded with base/fp8.h. These cases need a backend with
// bound(value, K, gelu), the error bound of a sum of K products.
#pragma once
#include "base/fp8.h"
#include "support/cases_matmul.h"

namespace fp8_cases {

using matmul_cases::Bound;
using matmul_cases::Forward;
using matmul_cases::Gradients;
using matmul_cases::Inputs;
using matmul_cases::Options;
using matmul_cases::Shape;
using matmul_cases::Value;

// The magnitudes of the operands. of() is the magnitude of the products whose sum is the given output.
struct Scales {
    float activations = 1.0f, weights = 1.0f, gradients = 1.0f;
    float of(Value value) const {
        switch (value) {
            case Value::out:
            case Value::pre_gelu:
                return activations * weights;
            case Value::dinp:
                return gradients * weights;
            case Value::dweight:
                return gradients * activations;
            case Value::dbias:
                return gradients;
        }
        return 0.0f;
    }
};

inline Inputs<bf16> scaled_inputs(Shape s, Scales scales) {
    Inputs<bf16> in(s);
    in.inp = random_tensor<bf16>(in.inp.size(), 1, scales.activations);
    in.weight = random_tensor<bf16>(in.weight.size(), 2, scales.weights);
    in.dout = random_tensor<bf16>(in.dout.size(), 4, scales.gradients);
    return in;
}

inline float largest(const Tensor<bf16>& x) {
    float amax = 0.0f;
    for (int64_t i = 0; i < x.size(); i++) {
        if (std::isnan(float(x[i]))) return std::fabs(float(x[i]));
        amax = std::max(amax, std::fabs(float(x[i])));
    }
    return amax;
}

// The values of a tensor in FP8, which are exact in bf16.
template <class Format>
Tensor<bf16> rounded(const Tensor<bf16>& x) {
    const Fp8Scale s = fp8_scale<Format>(largest(x));
    Tensor<bf16> out(x.size());
    for (int64_t i = 0; i < x.size(); i++)
        out[i] = bf16(fp8_value<Format>(fp8_code<Format>(float(x[i]) * s.scale)) * s.inverse);
    return out;
}

inline Inputs<bf16> rounded_inputs(const Inputs<bf16>& in) {
    Inputs<bf16> r(in.s);
    r.inp = rounded<E4M3>(in.inp), r.weight = rounded<E4M3>(in.weight), r.dout = rounded<E5M2>(in.dout);
    return r;
}

// A weight in FP8, and the device memory that its matmuls need. With finds_amax they find the amax of inp and dout,
// from zero; else it is given.
struct Fp8Memory {
    const bf16* weight;
    DeviceBuffer<char> packed, workspace;
    Fp8Memory(const bf16* weight, Shape s, Stream stream)
        : weight(weight),
          packed(ops::fp8_weight_bytes(s.OC, s.IC), "a packed weight"),
          workspace(ops::fp8_workspace_bytes(s.N, s.IC, s.OC), "FP8 operands") {
        ops::pack_fp8_weight(packed.data, weight, s.OC, s.IC, stream);
    }
    Weight<bf16> in_fp8(float* input_amax, float* gradient_amax, bool finds_amax) const {
        return {weight, nullptr, {packed.data, workspace.data, input_amax, gradient_amax, finds_amax, finds_amax}};
    }
};

// Compares NaNs as equal, because their bits depend on the operation that made them.
inline bool same_amax(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

template <class Backend>
Forward<bf16> forward(const Backend& backend, const Inputs<bf16>& in, Options options) {
    const Shape s = in.s;
    Forward<bf16> r{poisoned<bf16>(int64_t(s.N) * s.OC), poisoned<bf16>(int64_t(s.N) * s.OC)};
    const bool finds_amax = options.gelu;  // one of the two ways with each option
    auto inp_amax = filled<float>(1, finds_amax ? 0.0f : largest(in.inp)), out_amax = filled<float>(1, 0.0f);
    const auto op = [&](bf16* out, bf16* pre_gelu, float* out_amax, const bf16* inp, float* inp_amax,
                        const bf16* weight, const bf16* bias, const bf16* residual, Stream stream) {
        const Fp8Memory memory(weight, s, stream);
        ops::matmul_forward<bf16>({.out = {out, out_amax},
                                   .pre_gelu = pre_gelu,
                                   .inp = inp,
                                   .weight = memory.in_fp8(inp_amax, nullptr, finds_amax),
                                   .bias = bias,
                                   .residual = residual},
                                  s.N, s.IC, s.OC, stream);
        wait_for_device();
    };
    backend.call(op, r.out, options.gelu ? &r.pre_gelu : nullptr, out_amax, in.inp, inp_amax, in.weight,
                 options.bias ? &in.bias : nullptr, options.residual ? &in.residual : nullptr);
    CHECK(same_amax(inp_amax[0], largest(in.inp)));
    CHECK(same_amax(out_amax[0], largest(r.out)));
    return r;
}

template <class Backend>
Gradients<bf16> backward(const Backend& backend, const Inputs<bf16>& in, Options options) {
    const Shape s = in.s;
    Gradients<bf16> r(s, options.accumulate);
    const bool finds_amax = options.gelu;
    auto inp_amax = filled<float>(1, largest(in.inp)), dinp_amax = filled<float>(1, 0.0f);
    auto dout_amax = filled<float>(1, finds_amax ? 0.0f : largest(in.dout));
    const auto op = [&](bf16* dinp, float* dinp_amax, float* dweight, float* dbias, const bf16* dout, float* dout_amax,
                        const bf16* inp, float* inp_amax, const bf16* weight, const bf16* pre_gelu, Stream stream) {
        const Fp8Memory memory(weight, s, stream);
        ops::matmul_backward<bf16>({.dinp = {dinp, dinp_amax},
                                    .dweight = dweight,
                                    .dbias = dbias,
                                    .dout = dout,
                                    .inp = inp,
                                    .weight = memory.in_fp8(inp_amax, dout_amax, finds_amax),
                                    .pre_gelu = pre_gelu,
                                    .accumulate = options.accumulate},
                                   s.N, s.IC, s.OC, stream);
        wait_for_device();
    };
    backend.call(op, r.dinp, dinp_amax, r.dweight, options.bias ? &r.dbias : nullptr, in.dout, dout_amax, in.inp,
                 inp_amax, in.weight, options.gelu ? &in.pre_gelu : nullptr);
    CHECK(same_amax(dout_amax[0], largest(in.dout)));
    CHECK(same_amax(dinp_amax[0], largest(r.dinp)));
    return r;
}

// The gradient of the bias is the sum of the gradients before they are rounded.
template <class Backend>
void compare(const Backend& backend, const Inputs<bf16>& in, Options options) {
    const std::string what = matmul_cases::describe(in.s, options);
    CAPTURE(what);
    const auto bound_of = [&](Value value, int K) { return backend.bound(value, K, options.gelu); };
    const auto& definition = matmul_cases::definition<bf16>;
    const Inputs<bf16> in_fp8 = rounded_inputs(in);
    if (!options.accumulate)
        backend.compare(list(forward(OnHost{}, definition, in_fp8, options), in.s, options, bound_of),
                        [&] { return list(forward(backend, in, options), in.s, options, bound_of); });
    if (options.residual) return;
    auto want = backward(OnHost{}, definition, in_fp8, options);
    want.dbias = backward(OnHost{}, definition, in, options).dbias;
    backend.compare(list(want, in.s, options, bound_of),
                    [&] { return list(backward(backend, in, options), in.s, options, bound_of); });
}

// Infinity and NaN must not be rounded to the largest FP8 value. If a tensor contains one, all results of the tensor
// are NaN.
template <class Backend>
void not_finite(const Backend& backend, Shape s) {
    const auto all_nan = [](const auto& tensor) {
        int64_t numbers = 0;
        for (int64_t i = 0; i < tensor.size(); i++) numbers += !std::isnan(float(tensor[i]));
        return numbers == 0;
    };
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        CAPTURE(bad);
        Inputs<bf16> in(s), of_weight(s), of_gradient(s);
        in.inp[s.IC + 1] = bf16(-bad);
        of_weight.weight[s.IC + 1] = bf16(bad);
        of_gradient.dout[s.OC + 3] = bf16(bad);
        backend.on_each_variant([&] {
            CHECK(all_nan(forward(backend, in, {}).out));
            CHECK(all_nan(forward(backend, of_weight, {}).out));
            CHECK(all_nan(backward(backend, in, {}).dweight));
            CHECK(all_nan(backward(backend, of_weight, {}).dinp));
            const auto r = backward(backend, of_gradient, {});
            CHECK(all_nan(r.dinp));
            CHECK(all_nan(r.dweight));
            for (int o = 0; o < s.OC; o++) CHECK(std::isfinite(r.dbias[o]) == (o != 3));
        });
    }
}

// LayerNorm computes the same with and without amax, and like GELU raises amax to the largest magnitude of its output.
template <class Backend>
void amax_of_outputs(const Backend& backend, int N, int C) {
    CAPTURE(N);
    CAPTURE(C);
    const int64_t size = int64_t(N) * C;
    const auto inp = random_tensor<bf16>(size, 1), weight = random_tensor<bf16>(C, 2), bias = random_tensor<bf16>(C, 3);
    const auto dout = random_tensor<bf16>(size, 4), dresidual = random_tensor<bf16>(size, 5);
    const auto with_amax = [](const auto& op) {
        return [op](bf16* out, float* amax, auto... arguments) { op({out, amax}, arguments...); };
    };
    const auto forward = with_amax(ops::layernorm_forward<bf16>);
    const auto backward = with_amax(ops::layernorm_backward<bf16>);
    backend.on_each_variant([&] {
        auto out = poisoned<bf16>(size), alone = poisoned<bf16>(size);
        auto mean = poisoned<float>(N), rstd = poisoned<float>(N), amax = filled<float>(1, 0.0f);
        backend.call(ops::layernorm_forward<bf16>, alone, mean, rstd, inp, weight, bias, N, C);
        backend.call(forward, out, amax, mean, rstd, inp, weight, bias, N, C);
        CHECK(same_bits(out, alone));
        CHECK(amax[0] == largest(out));

        auto dinp = poisoned<bf16>(size);
        alone = poisoned<bf16>(size);
        auto dweight = filled<float>(C, 0.0f), dbias = filled<float>(C, 0.0f), dbranch_bias = filled<float>(C, 0.0f);
        amax[0] = 0.0f;
        backend.call(ops::layernorm_backward<bf16>, alone, dweight, dbias, dbranch_bias, dout, inp, weight, mean, rstd,
                     dresidual, N, C);
        backend.call(backward, dinp, amax, dweight, dbias, dbranch_bias, dout, inp, weight, mean, rstd, dresidual, N,
                     C);
        CHECK(same_bits(dinp, alone));
        CHECK(amax[0] == largest(dinp));
        amax[0] = 1000.0f;  // amax is never lowered
        backend.call(forward, out, amax, mean, rstd, inp, weight, bias, N, C);
        CHECK(amax[0] == 1000.0f);

        amax[0] = 0.0f;
        backend.call(with_amax(ops::gelu_forward<bf16>), out, amax, inp, size);
        CHECK(amax[0] == largest(out));
        amax[0] = 0.0f;
        backend.call(with_amax(ops::gelu_backward<bf16>), dinp, amax, inp, dout, size);
        CHECK(amax[0] == largest(dinp));
    });
}

// A single row is not rounded to FP8: the same bits as with a weight in bf16, and amax is raised.
template <class Backend>
void single_row(const Backend& backend, int IC, int OC) {
    const Inputs<bf16> in({1, IC, OC});
    auto amax = filled<float>(1, 0.0f);
    const auto op = [&](bf16* out, bf16* as_bf16, float* amax, const bf16* inp, const bf16* weight, Stream stream) {
        const Fp8Memory memory(weight, in.s, stream);
        const Weight<bf16> in_fp8 = memory.in_fp8(nullptr, nullptr, false);
        ops::matmul_forward<bf16>({.out = {out, amax}, .inp = inp, .weight = in_fp8}, 1, IC, OC, stream);
        ops::matmul_forward<bf16>({.out = as_bf16, .inp = inp, .weight = {weight, nullptr}}, 1, IC, OC, stream);
        wait_for_device();
    };
    backend.on_each_variant([&] {
        auto out = poisoned<bf16>(OC), as_bf16 = poisoned<bf16>(OC);
        amax[0] = 0.0f;
        backend.call(op, out, as_bf16, amax, in.inp, in.weight);
        CHECK(same_bits(out, as_bf16));
        CHECK(amax[0] == largest(out));
    });
}

}  // namespace fp8_cases
