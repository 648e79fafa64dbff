// cases_head.h: the cases of the head, the losses and their gradients, that test_head.cpp and test_gpu_head.cu share.
// They compare with the definition in double: softmax and cross entropy of the logits of the rounded operands.
#pragma once
#include <algorithm>
#include <numeric>

#include "support/cases.h"

namespace head_cases {

constexpr float SCALE = 0.125f;

struct Shape {
    int N, C, V, shards = 1;

    // The rows of a shard's weight: some have padding.
    int rows(int i) const { return round_up(std::max(1, shard_of(V, shards, i).count), 8) + i % 2 * 8; }
    int first_row(int i) const {
        int first = 0;
        for (int j = 0; j < i; j++) first += rows(j);
        return first;
    }
    int all_rows() const { return first_row(shards); }
};

// The operands. The shards of the weight lie one after another; padded rows hold 1e9, which must count nowhere.
template <class floatX>
struct Inputs {
    Shape s;
    Tensor<floatX> inp, weight;  // (N, C), (all_rows, C)
    Tensor<int> targets;         // every fifth is ignored

    explicit Inputs(Shape s)
        : s(s),
          inp(random_tensor<floatX>(int64_t(s.N) * s.C, 1)),
          weight(filled<floatX>(int64_t(s.all_rows()) * s.C, 0.0f)),
          targets(random_tokens(s.N, s.V, 2)) {
        targets[0] = 0;
        if (s.N > 1) targets[1] = s.V - 1;
        for (int n = 4; n < s.N; n += 5) targets[n] = -1;
    }

    int64_t at(int v, int c) const {
        const int share = ceil_div(s.V, s.shards), i = v / share;
        return int64_t(s.first_row(i) + v - i * share) * s.C + c;
    }
    floatX& w(int v, int c) { return weight[at(v, c)]; }
    const floatX& w(int v, int c) const { return weight[at(v, c)]; }
    double logit(int n, int v) const {
        double sum = 0.0;
        for (int c = 0; c < s.C; c++) sum += double(float(inp[int64_t(n) * s.C + c])) * double(float(w(v, c)));
        return sum;
    }
};

// The kinds of logits: their standard deviation about a number that all logits of a row share, and how much larger the
// target's logit is.
struct Kind {
    const char* name;
    float spread, common, target;
};
constexpr Kind KINDS[] = {{"initial", 0.5f, 0.0f, 0.0f},
                          {"trained", 2.5f, 0.0f, 4.0f},
                          {"trained, near -100", 2.5f, -100.0f, 4.0f},
                          {"confident", 8.0f, 0.0f, 12.0f},
                          {"loss near 0", 1.0f, 0.0f, 24.0f}};

// Channel 0 of inp is 1 and carries what the logits share. The target's row of the weight has a part along inp.
template <class floatX>
Inputs<floatX> inputs_of(Shape s, const Kind& kind) {
    Inputs<floatX> in(s);
    const Philox random{3, 0};
    for (int v = 0; v < s.V; v++)
        for (int c = 0; c < s.C; c++)
            in.w(v, c) = floatX(kind.spread / std::sqrt(float(s.C)) * random.normal(uint64_t(v) * s.C + c) +
                                (c == 0 ? kind.common : 0.0f));
    for (int n = 0; n < s.N; n++) {
        in.inp[int64_t(n) * s.C] = floatX(1.0f);
        for (int c = 1; c < s.C && in.targets[n] >= 0; c++)
            in.inp[int64_t(n) * s.C + c] =
                floatX(float(in.inp[int64_t(n) * s.C + c]) +
                       kind.target / (kind.spread * kind.spread) * float(in.w(in.targets[n], c)));
    }
    return in;
}

struct Results {
    Tensor<float> losses, validated, dinp, dweight;  // (N), (N): without `keep`, (N, C), (V, C)
};

// The definition in double. rounded(x): a rounding of each logit and of each of their gradients, or none.
template <class floatX, class Rounded>
Results define(const Inputs<floatX>& in, bool accumulate, const Rounded& rounded) {
    const Shape s = in.s;
    std::vector<double> dinp(size_t(s.N) * s.C), dweight(size_t(s.V) * s.C), row(size_t(s.V));
    Results r{Tensor<float>(s.N), Tensor<float>(s.N), Tensor<float>(int64_t(s.N) * s.C),
              Tensor<float>(int64_t(s.V) * s.C)};
    for (int n = 0; n < s.N; n++) {
        const int target = in.targets[n];
        r.losses[n] = r.validated[n] = 0.0f;
        if (target < 0) continue;
        for (int v = 0; v < s.V; v++) row[v] = rounded(in.logit(n, v));
        double sum = 0.0;
        for (int v = 0; v < s.V; v++)
            if (v != target) sum += std::exp(row[v] - row[target]);
        r.losses[n] = r.validated[n] = float(std::log1p(sum));
        const double at_target = row[target];
        for (int v = 0; v < s.V; v++) {
            const double e = v == target ? -sum : std::exp(row[v] - at_target);
            const double gradient = rounded(double(SCALE) * e / (1.0 + sum));
            for (int c = 0; c < s.C; c++) {
                dinp[size_t(n) * s.C + c] += gradient * double(float(in.w(v, c)));
                dweight[size_t(v) * s.C + c] += gradient * double(float(in.inp[int64_t(n) * s.C + c]));
            }
        }
    }
    const auto before = random_tensor<float>(int64_t(s.V) * s.C, 6);
    for (size_t i = 0; i < dinp.size(); i++) r.dinp[int64_t(i)] = float(dinp[i]);
    for (size_t i = 0; i < dweight.size(); i++)
        r.dweight[int64_t(i)] = float(dweight[i] + (accumulate ? double(before[int64_t(i)]) : 0.0));
    return r;
}

inline double exact(double x) { return x; }

// The head's operations in the order in which GPT2::head calls them, on the device, for one micro-batch. parts (shards,
// N, C): dinp of each shard.
template <class floatX>
void run_on_device(float* losses, float* validated, floatX* dinp_parts, float* dweight, const floatX* inp,
                   const floatX* weight, const int* targets, float* numbers, Shape s, bool accumulate, Stream stream) {
    const int64_t N = s.N, C = s.C;
    float *own = numbers, *parts = own + N, *sums = parts + s.shards * N, *target_logits = sums + N;
    std::vector<DeviceBuffer<char>> packed, exponentials;
    std::vector<HeadInput<floatX>> heads;
    for (int i = 0; i < s.shards; i++) {
        const int rows = s.rows(i);
        const floatX* const shard = weight + int64_t(s.first_row(i)) * C;
        packed.emplace_back(ops::packed_bytes<floatX>(rows, s.C), "a packed weight");
        if (packed[i].data) ops::pack_weight(packed[i].data, shard, rows, s.C, stream);
        exponentials.emplace_back(ops::head_bytes<floatX>(s.N, s.C, rows, true), "exponentials");
        heads.push_back({inp, {shard, packed[i].data}, targets, shard_of(s.V, s.shards, i), s.N, s.C, rows});
    }
    const auto for_shards = [&](float* out, const auto& run) {
        for (int i = 0; i < s.shards; i++) run(parts + i * N, i);
        ops::sum_of_shards(out, parts, s.shards, s.N, stream);
    };
    for_shards(target_logits, [&](float* part, int i) { ops::head_targets(part, heads[i], stream); });
    for (const bool keep : {false, true}) {
        for_shards(sums, [&](float* part, int i) {
            ops::head_forward(part, exponentials[i].data, target_logits, heads[i], keep, stream);
        });
        ops::head_losses(keep ? losses : validated, sums, targets, s.N, stream);
    }
    for (int i = 0; i < s.shards; i++)
        ops::head_backward(dinp_parts + i * N * C, dweight + int64_t(s.first_row(i)) * C, exponentials[i].data, sums,
                           heads[i], SCALE, accumulate, stream);
}

template <class Backend, class floatX>
Results run(const Backend& backend, const Inputs<floatX>& in, bool accumulate) {
    const Shape s = in.s;
    auto losses = poisoned<float>(s.N), validated = poisoned<float>(s.N);
    auto parts = poisoned<floatX>(int64_t(s.shards) * s.N * s.C);
    auto dweight = poisoned<float>(int64_t(s.all_rows()) * s.C), numbers = poisoned<float>(int64_t(s.shards + 3) * s.N);
    const auto before = random_tensor<float>(int64_t(s.V) * s.C, 6);
    const auto for_rows = [&](const auto& use) {  // use(element of a shard, element of the whole vocabulary)
        for (int v = 0; v < s.V; v++)
            for (int c = 0; c < s.C; c++) use(in.at(v, c), int64_t(v) * s.C + c);
    };
    if (accumulate) {
        std::fill_n(dweight.data(), dweight.size(), 0.0f);
        for_rows([&](int64_t to, int64_t from) { dweight[to] = before[from]; });
    }
    const auto op = [&](float* losses, float* validated, floatX* parts, float* dweight, const floatX* inp,
                        const floatX* weight, const int* targets, float* numbers, Stream stream) {
        run_on_device(losses, validated, parts, dweight, inp, weight, targets, numbers, s, accumulate, stream);
    };
    backend.call(op, losses, validated, parts, dweight, in.inp, in.weight, in.targets, numbers);

    Results r{copy_of(losses), copy_of(validated), filled<float>(int64_t(s.N) * s.C, 0.0f),
              poisoned<float>(int64_t(s.V) * s.C)};
    for (int64_t i = 0; i < parts.size(); i++) r.dinp[i % r.dinp.size()] += float(parts[i]);
    for_rows([&](int64_t from, int64_t to) { r.dweight[to] = dweight[from]; });
    return r;
}

// The allowed errors of a backend. Those of a loss, without `keep` and with it, are relative to the largest logit and
// 8; those of the gradients are the norm of the difference, relative to the gradient's.
struct Bounds {
    double validated, loss, dinp, dweight;
};

template <class floatX>
double largest_logit(const Inputs<floatX>& in) {
    double largest = 0.0;
    for (int n = 0; n < in.s.N; n++)
        for (int v = 0; v < in.s.V; v++) largest = std::max(largest, std::fabs(in.logit(n, v)));
    return largest;
}

inline void expect_losses(const char* name, const Tensor<float>& got, const Tensor<float>& want, double bound) {
    expect_close(name, got, want, 1, 1e-6f, float(bound));
}

template <class Backend, class floatX>
void compare(const Backend& backend, const Inputs<floatX>& in, bool accumulate, Bounds bounds) {
    const Shape s = in.s;
    INFO("N=", s.N, " C=", s.C, " V=", s.V, " shards=", s.shards, " accumulate=", accumulate);
    const Results want = define(in, accumulate, exact);
    const double logit = largest_logit(in) + 8.0;
    backend.on_each_variant([&] {
        const Results got = run(backend, in, accumulate);
        expect_losses("losses without keep", got.validated, want.losses, bounds.validated * logit);
        expect_losses("losses", got.losses, want.losses, bounds.loss * logit);
        CHECK(distance(got.dinp, want.dinp) <= bounds.dinp);
        CHECK(distance(got.dweight, want.dweight) <= bounds.dweight);
    });
}

// Awkward sizes; of 4 shards of 5 tokens the last is empty. Channels are a multiple of `multiple`.
template <class floatX, class Backend>
void awkward_shapes(const Backend& backend, Bounds bounds, int multiple) {
    for (const Shape& s : {Shape{1, 8, 2},
                           {2, 16, 5, 4},
                           {31, 40, 33},
                           {33, 8, 257, 2},
                           {65, 72, 100, 3},
                           {150, 264, 40},
                           {70, 40, 2100}})
        for (const bool accumulate : {false, true}) {
            Inputs<floatX> in = inputs_of<floatX>({s.N, round_up(s.C, multiple), s.V, s.shards}, KINDS[0]);
            compare(backend, in, accumulate, bounds);
        }
}

// inp is the identity, so the logits are the weight, transposed: {logits of row 0}, {of row 1} ...
template <class floatX>
Inputs<floatX> chosen_logits(const std::vector<std::vector<float>>& logits, const std::vector<int>& targets,
                             int shards) {
    const int N = int(logits.size()), C = round_up(N, 8);
    Inputs<floatX> in({N, C, int(logits[0].size()), shards});
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) in.inp[int64_t(n) * C + c] = floatX(c == n ? 1.0f : 0.0f);
        for (int v = 0; v < in.s.V; v++) {
            if (n == 0)
                for (int c = 0; c < C; c++) in.w(v, c) = floatX(0.0f);
            in.w(v, n) = floatX(logits[n][v]);
        }
        in.targets[n] = targets[n];
    }
    return in;
}

// Losses from 2 to 1,000 nats. Those above HEAD_LIMIT are too small, and the gradient still points the right way.
template <class floatX, class Backend>
void large_losses(const Backend& backend) {
    for (const int shards : {1, 3})
        for (const float logit : {1.0f, 30.0f, 59.0f, 100.0f, 500.0f}) {
            CAPTURE(logit);
            CAPTURE(shards);
            const float most = std::min(2 * logit, HEAD_LIMIT);
            const double least = std::log1p(2 * std::exp(-double(logit)) + std::exp(-2 * double(logit)));
            const Inputs<floatX> in =
                chosen_logits<floatX>({{-logit, logit, logit, -logit}, {logit, -logit, 0, 0}}, {0, 0}, shards);
            backend.on_each_variant([&] {
                const Results got = run(backend, in, false);
                for (const Tensor<float>* losses : {&got.losses, &got.validated}) {
                    CHECK(double((*losses)[0]) ==
                          doctest::Approx(std::log(2 * std::exp(double(most)) + 2)).epsilon(1e-5));
                    CHECK(std::fabs(double((*losses)[1]) - least) <= 2e-5 * least + 1e-37);  // keeps its digits
                }
                const auto dw = [&](int v) { return got.dweight[int64_t(v) * in.s.C]; };
                CHECK(dw(0) < 0.0f);
                CHECK(dw(1) > 0.0f);
                CHECK(std::fabs(dw(0) + dw(1) + dw(2) + dw(3)) <= 1e-3f);
                for (int64_t i = 0; i < got.dinp.size(); i++) CHECK(std::isfinite(got.dinp[i]));
            });
        }
}

// A NaN reaches the losses of its rows; ignored rows have loss 0 and no gradient.
template <class floatX, class Backend>
void not_finite(const Backend& backend) {
    for (const int shards : {1, 2}) {
        Inputs<floatX> in = inputs_of<floatX>({6, 16, 37, shards}, KINDS[0]);
        in.inp[3 * 16 + 5] = floatX(NAN);
        backend.on_each_variant([&] {
            const Results got = run(backend, in, false);
            for (int n = 0; n < 6; n++) {
                CHECK(std::isnan(got.losses[n]) == (n == 3));
                CHECK(std::isnan(got.validated[n]) == (n == 3));
            }
        });
        Inputs<floatX> weights = inputs_of<floatX>({6, 16, 37, shards}, KINDS[0]);
        weights.w(20, 3) = floatX(NAN);
        backend.on_each_variant([&] {
            const Results got = run(backend, weights, false);
            for (int n = 0; n < 6; n++) CHECK(std::isnan(got.losses[n]) == (n != 4));
        });
        Inputs<floatX> ignored = inputs_of<floatX>({6, 16, 37, shards}, KINDS[1]);
        for (int n = 0; n < 6; n++) ignored.targets[n] = -1;
        backend.on_each_variant([&] {
            const Results got = run(backend, ignored, false);
            for (int n = 0; n < 6; n++) CHECK(got.losses[n] == 0.0f);
            for (int64_t i = 0; i < got.dinp.size(); i++) CHECK(got.dinp[i] == 0.0f);
            for (int64_t i = 0; i < got.dweight.size(); i++) CHECK(got.dweight[i] == 0.0f);
        });
    }
}

// ---- the sum of losses

// tolerance: the allowed relative error of the sum.
template <class Backend>
void sum_of_losses(const Backend& backend, double tolerance) {
    const auto total_of = [&](const Tensor<float>& losses) {
        auto total = filled<float>(1, 5.0f);
        backend.call(ops::accumulate_loss, total, losses, int(losses.size()), 0.5f);
        return total[0];
    };
    for (const int N : {1, 31, 33, 1000, 1023, 1024, 1025, 5000}) {
        CAPTURE(N);
        auto losses = random_tensor<float>(N, 1, 1.0f, 10.0f);
        double sum = 0.0;
        for (int n = 0; n < N; n++) sum += double(losses[n]);
        const float got = total_of(losses);
        CHECK(double(got) == doctest::Approx(5.0 + 0.5 * sum).epsilon(tolerance));
        CHECK(total_of(losses) == got);
        losses[N - 1] = NAN;
        CHECK(std::isnan(total_of(losses)));
    }
}

inline void refuse_impossible_heads() {
    float x = 0.0f;
    const int target = 0;
    HeadInput<float> head{&x, {&x, nullptr}, &target, {0, 9}, 1, 8, 8};
    CHECK_THROWS_WITH_AS(ops::head_targets(&x, head, nullptr),
                         doctest::Contains("head_targets: a shard of 9 tokens in rows of 8"), Error);
    head.shard = {0, -1};
    CHECK_THROWS_WITH_AS(ops::head_backward(&x, &x, &x, &x, head, 1.0f, false, nullptr),
                         doctest::Contains("a shard of -1 rows from row 0"), Error);
    head.shard = {0, 8}, head.N = 0;
    CHECK_THROWS_WITH_AS(ops::head_forward(&x, &x, &x, head, true, nullptr), doctest::Contains("0 rows of 8"), Error);
    CHECK_THROWS_WITH_AS(ops::sum_of_shards(&x, &x, 0, 1, nullptr), doctest::Contains("0 shards of 1 rows"), Error);
}

}  // namespace head_cases
