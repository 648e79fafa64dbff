// cpu_model.h: computes GPT-2's loss and gradients in float, with the CPU's operations on host memory. test_gpt2
// compares the model of the program's backend with them. This model is independent of gpt2.cpp: it has one buffer for
// each result, no operation in place, and all rows of logits at once.
#pragma once
#include <vector>

#include "cpu/memory.h"
#include "model/params.h"
#include "ops/ops.h"

struct CpuModel {
    using Floats = std::vector<float>;

    GPT2Config config;
    ParamLayout layout;
    Floats weights, grads;  // (layout.total)
    Floats logits;          // (N, Vp)
    float loss = 0.0f;      // mean over the tokens

    explicit CpuModel(const GPT2Config& config)
        : config(config), layout(config), weights(size_t(layout.total)), grads(size_t(layout.total)) {}

    float* w(Param p, int l = 0) { return weights.data() + layout.offset(p, l); }
    float* g(Param p, int l = 0) { return grads.data() + layout.offset(p, l); }

    void run(const std::vector<int>& tokens, const std::vector<int>& targets, int B, int T) {
        // The operations refuse to take more scratch memory than was reserved. If the device is the CPU, another model
        // may have reserved less than this one needs.
        cpu::reserve_scratch(cpu::scratch_bytes<float>(B, T, config.C, config.NH, config.Vp()));
        forward(tokens, B, T);
        backward(tokens, targets, B, T);
    }

  private:
    struct Layer {
        Floats ln1, mean1, rstd1, qkv, att, lse, attproj, residual2, ln2, mean2, rstd2, fc, gelu, fcproj, residual3;
    };
    std::vector<Layer> layers;
    Floats encoded, lnf, mean, rstd;

    static Floats floats(int64_t size) { return Floats(size_t(size)); }

    void layernorm(Floats& out, Floats& means, Floats& rstds, const Floats& inp, Param weight, Param bias, int l,
                   int N) {
        const int C = config.C;
        out = floats(int64_t(N) * C), means = floats(N), rstds = floats(N);
        cpu::layernorm_forward<float>(out.data(), means.data(), rstds.data(), inp.data(), w(weight, l), w(bias, l), N,
                                      C, nullptr);
    }

    // out (N, OC) from inp (N, IC). With pre_gelu, out is its GELU.
    Floats matmul(const Floats& inp, Floats* pre_gelu, Param weight, const float* bias, int l, int N, int OC) {
        Floats out = floats(int64_t(N) * OC);
        if (pre_gelu) *pre_gelu = out;
        cpu::matmul_forward<float>({.out = out.data(),
                                    .pre_gelu = pre_gelu ? pre_gelu->data() : nullptr,
                                    .inp = inp.data(),
                                    .weight = {w(weight, l), nullptr},
                                    .bias = bias},
                                   N, int(int64_t(inp.size()) / N), OC, nullptr);
        return out;
    }

    static Floats sum(const Floats& a, const Floats& b) {
        Floats out = a;
        for (size_t i = 0; i < out.size(); i++) out[i] += b[i];
        return out;
    }

    void forward(const std::vector<int>& tokens, int B, int T) {
        const int N = B * T, C = config.C, NH = config.NH;
        layers.assign(size_t(config.L), {});
        encoded = floats(int64_t(N) * C);
        cpu::embedding_forward<float>(encoded.data(), tokens.data(), w(wte), w(wpe), B, T, C, {0, config.V}, nullptr);
        const Floats* x = &encoded;
        for (int l = 0; l < config.L; l++) {
            Layer& a = layers[size_t(l)];
            layernorm(a.ln1, a.mean1, a.rstd1, *x, ln1w, ln1b, l, N);
            a.qkv = matmul(a.ln1, nullptr, qkvw, w(qkvb, l), l, N, 3 * C);
            a.att = floats(int64_t(N) * C), a.lse = floats(int64_t(N) * NH);
            cpu::attention_forward<float>(a.att.data(), a.lse.data(), a.qkv.data(), B, T, NH, C / NH, nullptr);
            a.attproj = matmul(a.att, nullptr, attprojw, w(attprojb, l), l, N, C);
            a.residual2 = sum(*x, a.attproj);
            layernorm(a.ln2, a.mean2, a.rstd2, a.residual2, ln2w, ln2b, l, N);
            a.gelu = matmul(a.ln2, &a.fc, fcw, w(fcb, l), l, N, 4 * C);
            a.fcproj = matmul(a.gelu, nullptr, fcprojw, w(fcprojb, l), l, N, C);
            a.residual3 = sum(a.residual2, a.fcproj);
            x = &a.residual3;
        }
        layernorm(lnf, mean, rstd, *x, lnfw, lnfb, 0, N);
        logits = matmul(lnf, nullptr, wte, nullptr, 0, N, config.Vp());
    }

    // Returns the gradient of inp (N, IC) from dout (N, OC). Adds to the gradients of weight and bias.
    Floats matmul_backward(const Floats& dout, const Floats& inp, const Floats* pre_gelu, Param weight, float* dbias,
                           int l, int N) {
        const int IC = int(int64_t(inp.size()) / N), OC = int(int64_t(dout.size()) / N);
        Floats dinp = floats(int64_t(N) * IC);
        cpu::matmul_backward<float>({.dinp = dinp.data(),
                                     .dweight = g(weight, l),
                                     .dbias = dbias,
                                     .dout = dout.data(),
                                     .inp = inp.data(),
                                     .weight = {w(weight, l), nullptr},
                                     .pre_gelu = pre_gelu ? pre_gelu->data() : nullptr,
                                     .accumulate = true},
                                    N, IC, OC, nullptr);
        return dinp;
    }

    // Returns dresidual + LayerNorm's input gradient, (N, C).
    Floats layernorm_backward(const Floats& dout, const Floats& dresidual, const Floats& inp, const Floats& means,
                              const Floats& rstds, Param weight, Param bias, int l, int N) {
        Floats dinp = floats(int64_t(N) * config.C);
        cpu::layernorm_backward<float>(dinp.data(), g(weight, l), g(bias, l), nullptr, dout.data(), inp.data(),
                                       w(weight, l), means.data(), rstds.data(), dresidual.data(), N, config.C,
                                       nullptr);
        return dinp;
    }

    void backward(const std::vector<int>& tokens, const std::vector<int>& targets, int B, int T) {
        const int N = B * T, C = config.C, NH = config.NH;
        grads.assign(grads.size(), 0.0f);
        const HeadInput<float> head = {lnf.data(), {w(wte), nullptr}, targets.data(), {0, config.V}, N, C, config.Vp()};
        std::vector<char> e(size_t(cpu::head_bytes<float>(N, C, config.Vp(), true)));
        Floats target_logits = floats(N), sums = floats(N), losses = floats(N), dlnf = floats(int64_t(N) * C);
        cpu::head_targets(target_logits.data(), head, nullptr);
        cpu::head_forward(sums.data(), e.data(), target_logits.data(), head, true, nullptr);
        cpu::head_losses(losses.data(), sums.data(), targets.data(), N, nullptr);
        cpu::head_backward(dlnf.data(), g(wte), e.data(), sums.data(), head, 1.0f / float(N), true, nullptr);
        double total = 0.0;
        for (float x : losses) total += double(x);
        loss = float(total / N);
        Floats dx =
            layernorm_backward(dlnf, floats(int64_t(N) * C), layers.back().residual3, mean, rstd, lnfw, lnfb, 0, N);
        for (int l = config.L - 1; l >= 0; l--) {
            const Layer& a = layers[size_t(l)];
            const Floats& x = l == 0 ? encoded : layers[size_t(l - 1)].residual3;
            const Floats dfc = matmul_backward(dx, a.gelu, &a.fc, fcprojw, g(fcprojb, l), l, N);
            const Floats dln2 = matmul_backward(dfc, a.ln2, nullptr, fcw, g(fcb, l), l, N);
            dx = layernorm_backward(dln2, dx, a.residual2, a.mean2, a.rstd2, ln2w, ln2b, l, N);
            const Floats datt = matmul_backward(dx, a.att, nullptr, attprojw, g(attprojb, l), l, N);
            Floats dqkv = floats(int64_t(N) * 3 * C);
            cpu::attention_backward<float>(dqkv.data(), datt.data(), a.att.data(), a.lse.data(), a.qkv.data(), B, T, NH,
                                           C / NH, nullptr);
            const Floats dln1 = matmul_backward(dqkv, a.ln1, nullptr, qkvw, g(qkvb, l), l, N);
            dx = layernorm_backward(dln1, dx, x, a.mean1, a.rstd1, ln1w, ln1b, l, N);
        }
        cpu::embedding_backward<float>(g(wte), g(wpe), dx.data(), tokens.data(), B, T, C, {0, config.V}, nullptr);
    }
};
