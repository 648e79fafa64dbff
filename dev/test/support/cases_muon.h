// cases_muon.h: the cases of Muon's operations that test_muon_ops.cpp and test_gpu_ops.cu share: the definitions of
// ops.inc, computed in double. Arrays have more elements than an operation is told of, and these must stay.
#pragma once
#include <algorithm>
#include <cmath>

#include "support/cases.h"

namespace muon_cases {

constexpr int64_t TAIL = 9;  // elements after the last
// Values here are below 6, and a result has at most 4 roundings of such values.
constexpr float ERROR = 4 * 6 * epsilon<float>();

// m, v and out after a step, where out is memory of its own or the gradients'.
template <class Backend>
void momentum(const Backend& backend, int64_t count, float value) {
    INFO(count, " elements, factor ", value);
    constexpr float mu = 0.9f;
    const auto m = random_tensor<float>(count + TAIL, 1);
    const auto factor = filled<float>(1, value);
    auto grad = random_tensor<float>(count + TAIL, 3);
    if (!std::isfinite(value)) grad[0] = value;
    for (const bool in_place : {false, true}) {
        auto want_m = copy_of(m);
        auto want = in_place ? copy_of(grad) : random_tensor<float>(count + TAIL, 4);
        const auto before = copy_of(want);
        for (int64_t i = 0; i < count; i++) {
            want[i] = 0.0f;
            if (!std::isfinite(value)) continue;
            const double g = double(grad[i]) * double(value), share = 1 - double(mu);
            const double mean = double(mu) * double(m[i]) + share * g;
            want_m[i] = float(mean);
            want[i] = float(double(mu) * mean + share * g);
        }
        const auto outputs = [](const Tensor<float>& out, const Tensor<float>& m) {
            return outputs_of(output("out", out, 1, 0.0f, ERROR), output("m", m, 1, 0.0f, ERROR));
        };
        backend.compare(outputs(want, want_m), [&] {
            auto got = copy_of(before), got_m = copy_of(m);
            const auto& from = in_place ? got : grad;
            backend.call(ops::muon_momentum, got, got_m, from, factor, 0, count, mu, uint64_t(1), 1);
            return outputs(got, got_m);
        });
    }
}

// Matrices of one shape in memory, TAIL elements apart. Every second one is transposed.
struct Matrices {
    int rows, cols, count;

    int64_t size() const { return int64_t(rows) * cols; }
    int64_t begin(int i) const { return i * (size() + TAIL); }
    MuonBatch batch(float* memory) const {
        MuonBatch out = {0, rows, cols, {}, {}};
        for (int i = 0; i < count; i++) out.add(memory + begin(i), i % 2 == 1);
        return out;
    }
    // Where the stack has element k of matrix i.
    int64_t place(int i, int64_t k) const { return i * size() + (i % 2 == 1 ? k % rows * cols + k / rows : k); }
};

// The squares of the matrices sum to about 20, to 1e-12, where the 1e-7 are a tenth of the norm, and to 0.
template <class floatX, class Backend>
void stack(const Backend& backend, int rows, int cols) {
    CAPTURE(rows);
    CAPTURE(cols);
    const Matrices m = {rows, cols, 4};
    const auto before = random_tensor<floatX>(m.count * m.size() + TAIL, 2);
    auto memory = random_tensor<float>(m.begin(m.count), 1);
    auto want = poisoned<float>(before.size());
    for (int64_t i = 0; i < before.size(); i++) want[i] = float(before[i]);
    for (int i = 0; i < m.count; i++) {
        float* const x = &memory[m.begin(i)];
        double squares = 0.0;
        for (int64_t k = 0; k < m.size(); k++) {
            x[k] *= std::sqrt(std::vector{20.0f, 1e-12f, 1.0f, 0.0f}[size_t(i)] / float(m.size()));
            squares += double(x[k]) * double(x[k]);
        }
        for (int64_t k = 0; k < m.size(); k++) want[m.place(i, k)] = float(double(x[k]) / (std::sqrt(squares) + 1e-7));
    }
    const auto outputs = [](const auto& out) {
        return outputs_of(output("stack", out, 1, rounding_step<floatX>(), 0));
    };
    const auto op = [=](floatX* stack, float* memory, Stream stream) {
        ops::muon_stack<floatX>(stack, m.batch(memory), stream);
    };
    backend.compare(outputs(want), [&] {
        auto got = copy_of(before);
        backend.call(op, got, memory);
        return outputs(got);
    });
}

template <class floatX, class Backend>
void unstack(const Backend& backend, int rows, int cols) {
    CAPTURE(rows);
    CAPTURE(cols);
    const Matrices m = {rows, cols, 3};
    const auto stack = random_tensor<floatX>(m.count * m.size(), 1);
    const auto before = random_tensor<float>(m.begin(m.count), 2);
    const auto outputs = [&](const Tensor<float>& memory, const Tensor<float>& directions) {
        return outputs_of(output("memory", memory, 1, 0, 0), output("directions", directions, 1, 0, 0));
    };
    // Reads the directions, and sets the memory that they take to zero.
    const auto take = [&](Tensor<float>& memory) {
        Tensor<float> directions(m.count * m.size());
        for (int i = 0; i < m.count; i++) {
            auto* const direction = reinterpret_cast<floatX*>(&memory[m.begin(i)]);
            for (int64_t k = 0; k < m.size(); k++) {
                directions[m.place(i, k)] = float(direction[k]);
                direction[k] = floatX(0.0f);
            }
        }
        return directions;
    };
    auto rest = copy_of(before);
    take(rest);
    Tensor<float> want(stack.size());
    for (int64_t i = 0; i < stack.size(); i++) want[i] = float(stack[i]);
    const auto op = [=](float* memory, const floatX* stack, Stream stream) {
        ops::muon_unstack<floatX>(m.batch(memory), stack, stream);
    };
    backend.compare(outputs(rest, want), [&] {
        auto got = copy_of(before);
        backend.call(op, got, stack);
        const auto directions = take(got);
        return outputs(got, directions);
    });
}

// out is memory of its own or that of the squares.
template <class floatX, class Backend>
void polynomial(const Backend& backend, int n) {
    CAPTURE(n);
    constexpr float a = 3.5f, b = -4.75f, c = 2.0f, largest = 6 * (4.75f + 2) + 3.5f;
    constexpr int matrices = 3;
    const int64_t size = int64_t(n) * n, count = matrices * size;
    const auto matrix = random_tensor<floatX>(count + TAIL, 1), square = random_tensor<floatX>(count + TAIL, 2);
    for (const bool in_place : {false, true}) {
        const auto before = in_place ? copy_of(square) : random_tensor<floatX>(count + TAIL, 3);
        auto want = poisoned<float>(count + TAIL);
        for (int64_t i = 0; i < count + TAIL; i++) {
            want[i] = float(before[i]);
            if (i >= count) continue;
            const double diagonal = i % size / n == i % n ? double(a) : 0.0;
            want[i] = float(double(b) * double(float(matrix[i])) + double(c) * double(float(square[i])) + diagonal);
        }
        const auto outputs = [](const auto& out) {
            return outputs_of(output("out", out, 1, rounding_step<floatX>(), 4 * largest * epsilon<float>()));
        };
        backend.compare(outputs(want), [&] {
            auto got = copy_of(before);
            backend.call(ops::muon_polynomial<floatX>, got, matrix, in_place ? got : square, matrices, n, a, b, c);
            return outputs(got);
        });
    }
}

// ---- the update

constexpr int64_t SHIFT = 3;  // the arrays of an update begin at any element

template <class floatX>
struct Weights {
    Tensor<floatX> weight;
    Tensor<float> master;  // master copy of bf16 weights
    explicit Weights(int64_t count)
        : weight(random_tensor<floatX>(count + TAIL, 1)), master(random_tensor<float>(count + TAIL, 1)) {}

    template <class Backend>
    void update(const Backend& backend, bool has_master, const Tensor<floatX>& direction, float factor, float scale,
                float weight_decay, float lr) {
        const int64_t count = weight.size() - TAIL;
        const auto op = [=](floatX* weight, float* master, const floatX* direction, const float* factor,
                            Stream stream) {
            ops::muon_update<floatX>(weight + SHIFT, master ? master + SHIFT : nullptr, direction + SHIFT, factor, 5,
                                     count, scale, AdamWConfig{.weight_decay = weight_decay}, lr, 3, stream);
        };
        backend.call(op, weight, has_master ? &master : nullptr, direction, filled<float>(1, factor));
    }
};

// One copy of the weights in fp32 and another, rounded, in bf16; or fp32 weights alone.
template <class floatX, class Backend>
void update(const Backend& backend, int64_t count) {
    CAPTURE(count);
    constexpr bool has_master = sizeof(floatX) != sizeof(float);
    constexpr float scale = 1.5f, decay = 0.125f, lr = 0.3f;
    const Weights<floatX> before(count);
    const auto direction = random_tensor<floatX>(count + TAIL, 2);
    Tensor<float> want = copy_of(before.master);
    for (int64_t i = SHIFT; i < count + SHIFT; i++) {
        const double w = double(want[i]);
        want[i] = float(w - double(lr) * (double(scale) * double(float(direction[i])) + double(decay) * w));
    }
    const auto outputs = [](const auto& weights) { return outputs_of(output("weight", weights, 1, 0.0f, ERROR)); };
    backend.compare(outputs(want), [&] {
        Weights<floatX> got(count);
        got.update(backend, has_master, direction, 0.1f, scale, decay, lr);
        int64_t not_rounded = 0;
        for (int64_t i = 0; i < count + TAIL && has_master; i++)
            not_rounded += float(got.weight[i]) != float(floatX(got.master[i]));
        REQUIRE(not_rounded == 0);
        if constexpr (has_master)
            return outputs(got.master);
        else
            return outputs(got.weight);
    });
    for (const float factor : {NAN, INFINITY})
        for (const bool apart : {has_master, false})
            backend.on_each_variant([&] {
                Weights<floatX> got(count);
                got.update(backend, apart, direction, factor, scale, decay, lr);
                const bool same = same_bits(got.weight, before.weight) && same_bits(got.master, before.master);
                CHECK(same);
            });
}

// Without master weights the bits are those of Philox for seed, step and element, however the range is cut. All numbers
// are multiples of 2^-16 below 8, so that every backend computes the same value before it rounds.
template <class Backend>
void stochastic_rounding(const Backend& backend, int64_t count, std::initializer_list<int64_t> cuts) {
    const auto sixteenths = [&](uint64_t seed) {
        const auto numbers = random_tokens(count, 128, seed);
        Tensor<bf16> tensor(count);
        for (int64_t i = 0; i < count; i++) tensor[i] = bf16(float(numbers[i] - 64) / 16);
        return tensor;
    };
    const auto before = sixteenths(1), direction = sixteenths(2);
    const auto factor = filled<float>(1, 1.0f);
    AdamWConfig config = {.weight_decay = 0x1p-4f, .seed = 42};
    int step = 7;
    for (const int64_t begin : {int64_t(0), int64_t(5), (int64_t(1) << 35) - 21}) {
        CAPTURE(begin);
        config.seed += 3, step++;
        auto want = copy_of(before);
        const Philox random{config.seed, ROUNDING_STREAMS + uint64_t(step)};
        for (int64_t i = 0; i < count; i++) {
            const float w = float(want[i]);
            want[i] = round_randomly(w - 0x1p-6f * (0.5f * float(direction[i]) + config.weight_decay * w),
                                     random.bits16(uint64_t(begin + i)));
        }
        for (const int64_t cut : cuts)
            backend.compare(outputs_of(output("weight", want, 1, 0.0f, 0.0f)), [&] {
                auto got = copy_of(before);
                const auto in_cuts = [&](bf16* weight, const bf16* direction, const float* factor, Stream stream) {
                    for (int64_t i = 0; i < count; i += cut)
                        ops::muon_update<bf16>(weight + i, nullptr, direction + i, factor, begin + i,
                                               std::min(cut, count - i), 0.5f, config, 0x1p-6f, step, stream);
                };
                backend.call(in_cuts, got, direction, factor);
                return outputs_of(output("weight", got, 1, 0.0f, 0.0f));
            });
    }
}

}  // namespace muon_cases
