// small_state.h: weights and moments of a small model in flat buffers, with different values everywhere.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/random.h"
#include "checkpoint/hf.h"

constexpr GPT2Config small_model = {.max_T = 5, .V = 7, .L = 2, .NH = 2, .C = 6};  // only attprojw is a square matrix

struct FlatState {
    ParamLayout layout;
    std::vector<float> weights, m, v;

    // Random values, with zero padding as in a model. With seed 0 all values are NaN, for states that are loaded into.
    FlatState(const GPT2Config& config, uint64_t seed) : layout(config) {
        uint64_t stream = 0;
        for (std::vector<float>* buffer : {&weights, &m, &v}) {
            buffer->assign(size_t(layout.total), seed ? 0.0f : NAN);
            for (const ParamSpec& spec : param_table)
                for (int l = 0; seed && l < layout.layers(spec.id); l++) {
                    const Philox random{seed, stream++};
                    const int64_t count = int64_t(dim_size(config, spec.rows)) * layout.cols(spec.id);
                    float* to = buffer->data() + layout.offset(spec.id, l);
                    for (int64_t i = 0; i < count; i++) to[i] = random.normal(uint64_t(i));
                }
        }
    }
    TensorView view() const { return view_flat(layout, {weights.data(), m.data(), v.data()}); }
    TensorWriter writer() {
        return [this](const float* host, Slot slot, Param p, int l) {
            std::vector<float>& to = slot == WEIGHTS ? weights : slot == 1 ? m : v;
            std::copy_n(host, layout.size(p), to.begin() + layout.offset(p, l));
        };
    }
    float at(Param p, int l, int row, int col) const {
        return weights[size_t(layout.offset(p, l) + int64_t(row) * layout.cols(p) + col)];
    }
};

// Whether all tensors are equal bit for bit, with their padded rows, but not the gaps between tensors.
inline bool same_tensors(const FlatState& a, const FlatState& b, bool moments = true) {
    for (const ParamSpec& spec : param_table)
        for (int l = 0; l < a.layout.layers(spec.id); l++) {
            const auto same = [&](const std::vector<float>& x, const std::vector<float>& y) {
                const auto begin = x.begin() + a.layout.offset(spec.id, l);
                return std::equal(begin, begin + a.layout.size(spec.id), y.begin() + a.layout.offset(spec.id, l));
            };
            if (!same(a.weights, b.weights)) return false;
            if (moments && !(same(a.m, b.m) && same(a.v, b.v))) return false;
        }
    return true;
}
