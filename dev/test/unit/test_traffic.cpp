// test_traffic.cpp: the bytes that plan prints, against the exchanges that each algorithm makes, counted one by one.
#include "train/traffic.h"

#include <doctest/doctest.h>

#include <vector>

#include "parallel/gradients.h"

static const GPT2Config small = {32, 300, 4, 4, 64};

// The bytes that each rank sends in a reduce-scatter of `bytes`, exchange by exchange.
static std::vector<SentBytes> halving(int64_t bytes, int n, int on_host) {
    std::vector<SentBytes> sent(static_cast<size_t>(n));
    for (int distance = 1; distance < n; distance *= 2) {
        bytes /= 2;
        for (int rank = 0; rank < n; rank++) {
            SentBytes& own = sent[size_t(rank)];
            (rank / on_host == (rank ^ distance) / on_host ? own.inside : own.between) += bytes;
        }
    }
    return sent;
}

// The bytes that a host's ranks send together in a ring: n - 1 times a piece to the next rank.
static SentBytes ring(int64_t bytes, int n, int on_host) {
    SentBytes sent;
    for (int round = 0; round < n - 1; round++)
        for (int rank = 0; rank < on_host; rank++)
            (rank / on_host == (rank + 1) % n / on_host ? sent.inside : sent.between) += bytes / n;
    return sent;
}

// What traffic_of counts for the gradients alone: ZeRO-2 sends them once more in each further micro-step.
static SentBytes gradients_sent(const RankPlaces& places, GradDtype dtype = GradDtype::fp32) {
    const TrafficOptions options = {.dtype = Dtype::fp32, .grad_dtype = dtype, .zero = 2};
    return traffic_of(small, options, places).per_micro_step;
}

TEST_CASE("recursive halving: every rank sends the bytes of the formula inside its host and to others") {
    for (const int n : {2, 4, 8, 16, 64})
        for (int hosts = 1; hosts <= n; hosts *= 2) {
            CAPTURE(n);
            CAPTURE(hosts);
            const SentBytes sent = gradients_sent({n, hosts, CollectiveAlgorithm::halving});
            for (const SentBytes& own : halving(4 * ParamLayout(small, n).total, n, n / hosts)) {
                CHECK(sent.inside == own.inside);
                CHECK(sent.between == own.between);
            }
        }
}

TEST_CASE("rings: the ranks of a host together send the bytes of the formula") {
    for (const int n : {2, 3, 6, 8, 12, 16})
        for (int hosts = 1; hosts <= n; hosts++) {
            if (n % hosts != 0) continue;
            CAPTURE(n);
            CAPTURE(hosts);
            const int on_host = n / hosts;
            const SentBytes sent = gradients_sent({n, hosts, CollectiveAlgorithm::ring});
            const SentBytes host = ring(4 * ParamLayout(small, n).total, n, hosts == 1 ? n : on_host);
            CHECK(sent.total() * on_host == host.total());
            CHECK(std::abs(sent.between * on_host - host.between) < on_host);  // rounded down
            const SentBytes same = gradients_sent({n, hosts, CollectiveAlgorithm::halving});
            if ((n & (n - 1)) != 0) CHECK(same.between == sent.between);  // MPI then sends in rings, too
        }
}

TEST_CASE("one rank sends nothing") {
    for (const int zero : {0, 1, 2, 3})
        CHECK(traffic_of(small, {.zero = zero, .grad_accum_steps = 3, .tokens = 64}, {}).per_step.total() == 0);
}

TEST_CASE("each stage of ZeRO sends gradients and weights as often as it needs them") {
    constexpr int n = 4, steps = 3;
    const ParamLayout layout(small, n);
    const int64_t share = layout.total / n * (n - 1), layers = 2 * layout.layer_stride / n * (n - 1);
    const int64_t stats = 2 * step_stats_bytes(layout, n, n) / n * (n - 1);
    const auto sent = [&](int zero, GradDtype grad_dtype, Dtype dtype) {
        return traffic_of(small, {.dtype = dtype, .grad_dtype = grad_dtype, .zero = zero, .grad_accum_steps = steps},
                          {n, 1, CollectiveAlgorithm::halving});
    };
    for (const Dtype dtype : {Dtype::fp32, Dtype::bf16})
        for (const GradDtype grad_dtype : {GradDtype::fp32, GradDtype::bf16}) {
            const int64_t weight = dtype == Dtype::fp32 ? 4 : 2, gradient = grad_dtype == GradDtype::fp32 ? 4 : 2;
            const auto total = [&](int zero) { return sent(zero, grad_dtype, dtype).per_step.total(); };
            CHECK(total(0) == 2 * share * gradient + stats);
            CHECK(total(1) == share * (gradient + weight) + stats);
            CHECK(total(2) == share * (steps * gradient + weight) + stats);
            // Of four layers, forward gathers two and backward two; the others are in memory.
            CHECK(total(3) == share * (steps * gradient + weight) + (2 * steps - 1) * layers * weight + stats);
            CHECK(sent(0, grad_dtype, dtype).per_micro_step.total() == 0);
            CHECK(sent(1, grad_dtype, dtype).per_micro_step.total() == 0);
            CHECK(sent(2, grad_dtype, dtype).per_micro_step.total() == share * gradient);
            CHECK(sent(3, grad_dtype, dtype).per_micro_step.total() == share * gradient + 2 * layers * weight);
        }
}

TEST_CASE("virtual ranks: ZeRO-2 sends their sum, and buckets are padded for them") {
    const RankPlaces two = {2, 1, CollectiveAlgorithm::halving};
    const TrafficOptions options = {.dtype = Dtype::fp32, .zero = 2, .virtual_ranks = 8, .grad_accum_steps = 8};
    const Traffic traffic = traffic_of(small, options, two);
    const int64_t share = ParamLayout(small, 8).total / 2 * 4;
    CHECK(traffic.per_step.total() == 2 * share + share + step_stats_bytes(ParamLayout(small, 8), 8, 2));
    CHECK(traffic.per_micro_step.total() == share / 4);
}

// The collectives of tensor-parallel ranks, one by one.
TEST_CASE("tensor parallelism sends activations, inside the host") {
    constexpr int64_t N = 96;
    for (const int tp : {2, 4})
        for (const Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
            const int64_t whole = N * small.C * (dtype == Dtype::fp32 ? 4 : 2), pass = whole / tp * (tp - 1);
            const int64_t partials = N * 8 * (tp - 1);
            TrafficOptions options = {.dtype = dtype, .grad_accum_steps = 2, .tokens = N, .tensor_parallel = tp};
            const RankPlaces places = {2 * tp, 2, CollectiveAlgorithm::ring};
            const Traffic plain = traffic_of(small, options, places);
            int64_t sent = partials + 2 * pass + 2 * pass;  // embedding's output, gradient of lnf
            for (int l = 0; l < small.L; l++) sent += 2 * (pass + pass) + 2 * (pass + pass);
            // Losses and norms of all ranks, in a ring: one rank of a host sends to the other host.
            const ParamLayout layout(small, 2, {0, tp});
            const int64_t stats = 2 * (step_stats_bytes(layout, 2, 2 * tp) / (2 * tp) * (2 * tp - 1));
            const int64_t stats_inside = stats - stats / tp;
            CHECK(plain.per_micro_step.inside == sent);
            CHECK(plain.per_micro_step.between == 0);
            CHECK(plain.per_step.inside == 2 * sent + stats_inside);  // gradients go to the other host only

            options.recompute_layer = true;  // of three layers: attproj's output
            CHECK(traffic_of(small, options, places).per_micro_step.inside == sent + 3 * 2 * pass);

            options.recompute_layer = false;
            options.sequence_parallel = true;
            const Traffic sequence = traffic_of(small, options, places);
            sent =
                partials + pass + pass + pass + pass;  // scatter embedding, gather lnf, scatter its gradient, gather dx
            for (int l = 0; l < small.L; l++) sent += 4 * pass + 6 * pass;
            CHECK(sequence.per_micro_step.inside == sent);
            CHECK(sequence.per_micro_step.between == 0);
            // In each bucket as many as in a layer's: LayerNorm's four, and two biases.
            const int64_t over_rows = (1 + small.L) * 6 * int64_t(small.C);
            CHECK(sequence.per_step.inside == 2 * sent + 2 * over_rows * 4 / tp * (tp - 1) + stats_inside);
            CHECK(sequence.per_step.between == plain.per_step.between);
        }
}

TEST_CASE("tensor parallelism divides the gradients that hosts exchange") {
    GPT2Config config = {1024, 50304, 12, 12, 768};  // a vocabulary that is a multiple of 3 x 128
    const RankPlaces places = {12, 2, CollectiveAlgorithm::ring};
    const TrafficOptions options = {.tensor_parallel = 3};
    const int64_t divided =
        config.V * int64_t(config.C) + config.L * (12 * int64_t(config.C) * config.C + 7 * config.C);
    const int64_t own = divided / 3 + (config.max_T + 2 + config.L * 6) * int64_t(config.C);
    const Traffic traffic = traffic_of(config, options, places);
    const int64_t gradients = 2 * own * 4 / 4 * 3;  // an all-reduce over four ranks, two of them on each host
    const int64_t stats = step_stats_bytes(ParamLayout(config, 4, {0, 3}), 4, 12);
    CHECK(traffic.per_step.total() == gradients + 2 * (stats / 12 * 11));
    CHECK(traffic.per_step.between == gradients / 2 + 2 * (stats / 12 * 11 * 2 / 12));
}
