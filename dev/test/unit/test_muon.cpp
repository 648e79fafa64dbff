// test_muon.cpp: Newton-Schulz against double precision, and a step of Muon against its definition.
#include "train/muon.h"

#include <cmath>
#include <random>

#include "support/test.h"
#include "train/optimizer.h"

namespace {
struct Matrix {
    int rows, cols;
    std::vector<double> values = std::vector<double>(size_t(rows) * size_t(cols));

    double& at(int r, int c) { return values[size_t(r) * size_t(cols) + size_t(c)]; }
    double at(int r, int c) const { return values[size_t(r) * size_t(cols) + size_t(c)]; }
};
}  // namespace

static Matrix transposed(const Matrix& m) {
    Matrix out{m.cols, m.rows};
    for (int r = 0; r < m.rows; r++)
        for (int c = 0; c < m.cols; c++) out.at(c, r) = m.at(r, c);
    return out;
}

static Matrix product(const Matrix& a, const Matrix& b) {
    Matrix out{a.rows, b.cols};
    for (int r = 0; r < a.rows; r++)
        for (int i = 0; i < a.cols; i++)
            for (int c = 0; c < b.cols; c++) out.at(r, c) += a.at(r, i) * b.at(i, c);
    return out;
}

// The definition, with X X^T for every form of matrix.
static Matrix reference(Matrix x) {
    double squares = 0.0;
    for (const double value : x.values) squares += value * value;
    for (double& value : x.values) value /= std::sqrt(squares) + 1e-7;
    for (int step = 0; step < 5; step++) {
        const Matrix a = product(x, transposed(x)), ax = product(a, x), aax = product(a, ax);
        for (size_t i = 0; i < x.values.size(); i++)
            x.values[i] = 3.4445 * x.values[i] - 4.7750 * ax.values[i] + 2.0315 * aax.values[i];
    }
    return x;
}

static Matrix random_matrix(int rows, int cols, int seed) {
    std::mt19937 random{uint32_t(seed)};
    std::normal_distribution<double> normal;
    Matrix m{rows, cols};
    for (double& value : m.values) value = float(normal(random));
    return m;
}

// Columns that are orthogonal and of length 1, by Gram and Schmidt.
static Matrix orthogonal(int rows, int cols, int seed) {
    Matrix m = random_matrix(rows, cols, seed);
    for (int c = 0; c < cols; c++) {
        for (int before = 0; before <= c; before++) {
            double dot = 0.0;
            for (int r = 0; r < rows; r++) dot += m.at(r, c) * m.at(r, before);
            for (int r = 0; r < rows; r++)
                m.at(r, c) = before < c ? m.at(r, c) - dot * m.at(r, before) : m.at(r, c) / std::sqrt(dot);
        }
    }
    return m;
}

// The directions of several matrices of one shape, of which those with more rows than columns are transposed.
template <class floatX>
static std::vector<Matrix> newton_schulz(const std::vector<Matrix>& matrices, int C) {
    const ParamLayout layout({16, 64, 4, 1, C});
    device_reserve_scratch(1 << 25);
    Muon<floatX> muon(layout, {}, single_rank_groups());
    const int rows = matrices[0].rows, cols = matrices[0].cols;
    MuonBatch batch = {0, std::min(rows, cols), std::max(rows, cols), {}, {}};
    std::vector<std::vector<float>> memory;
    for (const Matrix& m : matrices) memory.emplace_back(m.values.begin(), m.values.end());
    for (size_t i = 0; i < matrices.size(); i++) batch.add(memory[i].data(), matrices[i].rows > matrices[i].cols);
    muon.newton_schulz(batch, nullptr);
    std::vector<Matrix> results;
    for (size_t i = 0; i < matrices.size(); i++) {
        const auto* direction = reinterpret_cast<const floatX*>(memory[i].data());
        results.push_back({matrices[i].rows, matrices[i].cols});
        for (size_t k = 0; k < results[i].values.size(); k++) results[i].values[k] = double(float(direction[k]));
    }
    return results;
}

template <class floatX>
static Matrix newton_schulz(const Matrix& m, int C) {
    return newton_schulz<floatX>(std::vector{m}, C)[0];
}

static double largest_difference(const Matrix& a, const Matrix& b) {
    double most = 0.0;
    for (size_t i = 0; i < a.values.size(); i++) most = std::fmax(most, std::fabs(a.values[i] - b.values[i]));
    return most;
}

TEST_CASE("Newton-Schulz agrees with double precision, for every form of matrix") {
    for (const auto& form : {std::pair(48, 48), {15, 60}, {60, 15}, {32, 128}, {128, 32}, {1, 4}, {7, 7}}) {
        const int rows = form.first, cols = form.second;
        CAPTURE(rows);
        CAPTURE(cols);
        const Matrix m = random_matrix(rows, cols, rows + cols), expected = reference(m);
        CHECK(largest_difference(newton_schulz<float>(m, 48), expected) < 1e-5);
        CHECK(largest_difference(newton_schulz<bf16>(m, 48), expected) < 0.1 / std::sqrt(std::min(rows, cols)));
    }
}

TEST_CASE_TEMPLATE("matrices that are computed together have the bits that each has alone", floatX, float, bf16) {
    for (const auto& form : {std::pair(16, 16), {16, 64}}) {
        std::vector<Matrix> matrices;
        for (int seed = 0; seed < 3; seed++) matrices.push_back(random_matrix(form.first, form.second, seed));
        matrices[1] = transposed(matrices[1]);
        const std::vector<Matrix> together = newton_schulz<floatX>(matrices, 32);
        for (size_t i = 0; i < matrices.size(); i++)
            CHECK(newton_schulz<floatX>(matrices[i], 32).values == together[i].values);
    }
}

TEST_CASE_TEMPLATE("singular values of at least 0.01 become 0.68 to 1.21, and the singular vectors stay", floatX, float,
                   bf16) {
    constexpr int n = 40;
    for (const int rows : {40, 160}) {
        const Matrix u = orthogonal(rows, n, 1), v = orthogonal(n, n, 2);
        Matrix us = u;
        double squares = 0.0;
        const auto singular = [&](int i) { return std::pow(100.0, -double(i) / (n - 1)); };
        for (int i = 0; i < n; i++) squares += singular(i) * singular(i);
        for (int r = 0; r < rows; r++)  // normalized, the smallest is 0.01
            for (int i = 0; i < n; i++) us.at(r, i) *= std::fmax(singular(i), 0.01 * std::sqrt(squares));
        const Matrix m = product(us, transposed(v));
        for (const bool is_transposed : {false, true}) {
            const Matrix out = newton_schulz<floatX>(is_transposed ? transposed(m) : m, n);
            const Matrix inner = product(product(transposed(is_transposed ? v : u), out), is_transposed ? u : v);
            const double slack = std::is_same_v<floatX, float> ? 0.0 : 0.03;
            for (int r = 0; r < n; r++)
                for (int c = 0; c < n; c++) {
                    if (r != c) {
                        CHECK(std::fabs(inner.at(r, c)) < (slack > 0.0 ? 0.05 : 1e-4));
                    } else {
                        CHECK(inner.at(r, r) > 0.68 - slack);
                        CHECK(inner.at(r, r) < 1.21 + slack);
                    }
                }
        }
    }
}

TEST_CASE_TEMPLATE("a matrix of zeros, of rank one or of huge numbers has a finite direction", floatX, float, bf16) {
    const Matrix zeros{16, 64};
    CHECK(largest_difference(newton_schulz<floatX>(zeros, 16), zeros) == 0.0);
    const Matrix one = product(random_matrix(16, 1, 3), random_matrix(1, 64, 4));
    // In bf16 the roundings of X are singular values of their own, which the polynomial raises.
    const double bound = std::is_same_v<floatX, float> ? 1e-5 : 0.5;
    CHECK(largest_difference(newton_schulz<floatX>(one, 16), reference(one)) < bound);
    for (const double scale : {1e-12, 1e18, 1e37}) {
        Matrix huge = random_matrix(16, 64, 5);
        for (double& value : huge.values) value *= scale;
        for (const double value : newton_schulz<floatX>(huge, 16).values) CHECK(std::isfinite(value));
    }
}

TEST_CASE("a step of Muon agrees with its definition, and embeddings, norms and biases take AdamW's") {
    constexpr float lr = 0.01f;
    const GPT2Config config = {16, 64, 2, 2, 24};
    const auto train = [&](bool muon) {
        const MemoryOptions options = {.muon = muon};
        GPT2<float> model(config, Purpose::train, 1, 16, options);
        Optimizer<float> optimizer(model, OptimizerConfig{}, options);
        init_weights(optimizer, 42);
        optimizer.weights_loaded();
        for (int step = 1; step <= 2; step++) {
            optimizer.gradients.begin_step(step);
            for (const ParamSpec& spec : param_table)
                for (int l = 0; l < model.layout.layers(spec.id); l++) {
                    const Matrix grads =
                        random_matrix(1, int(model.layout.size(spec.id)), 100 * l + spec.id + 1000 * step);
                    for (size_t i = 0; i < grads.values.size(); i++)
                        if (spec.id != wte || int(i) < config.V * config.C)
                            model.g(spec.id, l)[i] = float(grads.values[i]);
                }
            *model.acts.loss = 1.0f;
            optimizer.gradients.virtual_rank_done(0);
            optimizer.clip(0.0f);
            optimizer.step(lr, step);
        }
        return std::vector<float>(model.weights.memory.data, model.weights.memory.data + model.layout.total);
    };
    const std::vector<float> by_adamw = train(false), by_muon = train(true);
    const ParamLayout layout(config);
    for (const ParamSpec& spec : param_table)
        for (int l = 0; l < layout.layers(spec.id); l++) {
            CAPTURE(spec.name);
            const int64_t offset = layout.offset(spec.id, l), size = layout.size(spec.id);
            if (spec.scope == Scope::model || spec.rows == Dim::one) {
                CHECK(
                    std::equal(by_adamw.begin() + offset, by_adamw.begin() + offset + size, by_muon.begin() + offset));
                continue;
            }
            const int parts = spec.id == qkvw ? 3 : 1, rows = layout.rows(spec.id) / parts, cols = layout.cols(spec.id);
            std::vector<float> weights(static_cast<size_t>(size));
            init_param(weights.data(), config, spec.id, l, 42, 0, size);
            std::vector<double> momentum(size_t(size), 0.0);
            double most = 0.0;
            for (int part = 0; part < parts; part++) {
                std::vector<double> w(weights.begin() + part * rows * cols, weights.begin() + (part + 1) * rows * cols);
                Matrix m{rows, cols}, update{rows, cols};
                for (int step = 1; step <= 2; step++) {
                    const Matrix all = random_matrix(1, int(size), 100 * l + spec.id + 1000 * step);
                    for (size_t i = 0; i < w.size(); i++) {
                        const double g = all.values[i + size_t(part) * w.size()];
                        m.values[i] = 0.95 * m.values[i] + 0.05 * g;
                        update.values[i] = 0.95 * m.values[i] + 0.05 * g;
                    }
                    const Matrix direction = reference(update);
                    const double scale = 0.2 * std::sqrt(std::max(rows, cols));
                    for (size_t i = 0; i < w.size(); i++) w[i] -= lr * (scale * direction.values[i] + 0.1f * w[i]);
                }
                for (size_t i = 0; i < w.size(); i++)
                    most = std::fmax(most, std::fabs(w[i] - by_muon[size_t(offset) + size_t(part) * w.size() + i]));
            }
            CHECK(most < 1e-5 * lr * 10);
        }
}
