// test_late_ranks.cpp: training on 2 and 4 ranks whose collectives run as late as they may (support/late_comm.h) has
// the bits of one rank, for every ZeRO stage: no gradients are overwritten before they are summed, and no weights are
// read before they are gathered. Also: the ranks send the bytes that plan prints.
#include <doctest/doctest.h>

#include <omp.h>

#include "support/late_comm.h"
#include "train/options.h"
#include "support/random_tokens.h"
#include "train/optimizer.h"
#include "train/plan.h"

// More layers than the two that ZeRO-2 and ZeRO-3 keep in memory.
static const GPT2Config config = {16, 100, 5, 2, 32};
static constexpr int B = 1, T = 16, VIRTUAL_RANKS = 4, MICRO_STEPS = 2, STEPS = 3;

static MemoryOptions options_of(int zero, int ranks, Recompute recompute) {
    return {.recompute = recompute,
            .virtual_ranks = VIRTUAL_RANKS,
            .shards = zero >= 1 ? ranks : 1,
            .shard_gradients = zero >= 2,
            .shard_weights = zero >= 3 && ranks > 1};
}

static void append(std::string& bytes, const float* x, int64_t count) {
    bytes.append(reinterpret_cast<const char*>(x), size_t(count) * sizeof(float));
}

namespace {
template <class floatX>
struct Training {
    Comm& comm;
    Groups groups;
    MemoryOptions options;
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    std::string results;  // losses and norms of each step, losses of tokens, weights and state

    Training(Comm& comm, const MemoryOptions& options)
        : comm(comm),
          groups(make_groups(comm, 1)),
          options(options),
          model(config, Purpose::train, B, T, options),
          optimizer(model, {}, options, groups, GradDtype::fp32) {
        std::vector<float> values;
        for_each_tensor([&](Param p, int l) {
            values.assign(size_t(model.layout.size(p)), 0.0f);
            init_param(values.data(), model.config, p, l, 42, 0, model.layout.size(p));
            optimizer.set_state(WEIGHTS, p, l, values.data());
        });
        optimizer.weights_loaded();
    }

    template <class F>
    void for_each_tensor(const F& f) {
        for (const ParamSpec& spec : param_table)
            for (int l = 0; l < model.layout.layers(spec.id); l++) f(spec.id, l);
    }

    void micro_step(uint64_t batch, int index, int v, bool last) {
        const auto tokens = random_token_list(B * T, config.V, 2 * batch),
                   targets = random_token_list(B * T, config.V, 2 * batch + 1);
        GradReducer& gradients = optimizer.gradients;
        model.forward(tokens.data(), B, T);
        model.backward(
            tokens.data(), targets.data(), B, T, index, 1.0f / (VIRTUAL_RANKS * MICRO_STEPS),
            [&](int bucket) {
                if (last) gradients.reduce_bucket(bucket, v);
            },
            [&](int bucket) { gradients.begin_bucket(bucket); });
    }

    // A step as in train_gpt2.cu.
    void step(int number) {
        GradReducer& gradients = optimizer.gradients;
        const int own = gradients.local_virtual_ranks();
        const bool in_turns = model.shard_gradients;
        gradients.begin_step();
        for (int i = 0; i < own * MICRO_STEPS; i++) {
            const int v = in_turns ? i % own : i / MICRO_STEPS, micro = in_turns ? i / own : i % MICRO_STEPS;
            const bool first = in_turns || micro == 0, last = in_turns || micro + 1 == MICRO_STEPS;
            if (first) model.zero_gradients();
            micro_step(uint64_t((number * VIRTUAL_RANKS + comm.rank * own + v) * MICRO_STEPS + micro),
                       in_turns ? 0 : micro, v, last);
            if (last) gradients.virtual_rank_done(v);
        }
        optimizer.clip(1.0f);
        optimizer.step(1e-2f, number + 1);
        append(results, gradients.step_loss(), 1);
        append(results, optimizer.norm(), 1);
    }

    void validate() {
        const auto tokens = random_token_list(B * T, config.V, 1000),
                   targets = random_token_list(B * T, config.V, 1001);
        model.forward(tokens.data(), B, T);
        model.token_losses(targets.data(), B, T);
        append(results, model.acts.losses, B * T);
    }

    // with_state: the rank of shard 0 also returns weights and moments, for which the ranks meet in many broadcasts.
    std::string run(bool with_state) {
        for (int number = 0; number < STEPS; number++) {
            if (number == 1) validate();
            step(number);
        }
        validate();
        std::vector<float> values;
        if (with_state)
            for_each_tensor([&](Param p, int l) {
                for (int slot = WEIGHTS; slot <= int(STATE_NAMES.size()); slot++) {
                    values.assign(size_t(model.layout.size(p)), 0.0f);
                    optimizer.get_state(values.data(), Slot(slot), p, l);
                    if (comm.shard_index == 0) append(results, values.data(), model.layout.size(p));
                }
            });
        optimizer.finish_collectives();
        return results;
    }
};
}  // namespace

template <class floatX>
static std::vector<std::string> train(int ranks, int zero, Recompute recompute, bool with_state) {
    return run_late_ranks(ranks, [&](Comm& comm) {
        omp_set_num_threads(1);
        return Training<floatX>(comm, options_of(zero, ranks, recompute)).run(with_state);
    });
}

TEST_CASE_TEMPLATE("2 and 4 ranks with late collectives have the bits of one rank, with every ZeRO stage", floatX,
                   float, bf16) {
    for (const Recompute recompute : {Recompute::none, Recompute::layer})
        for (const int zero : {0, 1, 2, 3}) {
            // ZeRO-2 and ZeRO-3 add the micro-steps in another order.
            const std::string one = train<floatX>(1, zero >= 2 ? 2 : 0, recompute, true)[0];
            REQUIRE(one.size() > sizeof(float) * 3 * size_t(count_parameters(config)));
            for (const int ranks : {2, 4}) {
                CAPTURE(zero);
                CAPTURE(ranks);
                const bool with_state = ranks == 2 && recompute == Recompute::none;
                const std::vector<std::string> results = train<floatX>(ranks, zero, recompute, with_state);
                CHECK(std::count_if(results.begin(), results.end(), [&](const std::string& x) {
                          return x.size() == one.size();
                      }) == (with_state ? 1 : 0));
                for (const std::string& result : results) {
                    CHECK(result.size() > 100);
                    CHECK(result == one.substr(0, result.size()));
                }
            }
        }
}

TEST_CASE_TEMPLATE("the ranks send the bytes of the plan", floatX, float, bf16) {
    for (const int ranks : {2, 4})
        for (const int zero : {0, 1, 2, 3}) {
            const int micro_steps = VIRTUAL_RANKS / ranks * MICRO_STEPS;
            const char* const arguments[] = {"train_gpt2", "plan", "--model", "d12"};
            Options options = parse_options(int(std::size(arguments)), arguments);
            options.zero = zero, options.deterministic_ranks = VIRTUAL_RANKS;
            const int64_t plan = sent_bytes(dtype_of<floatX>, config, options, {B, T, ranks, micro_steps, 0});
            const auto sent = run_late_ranks(ranks, [&](Comm& comm) {
                omp_set_num_threads(1);
                Training<floatX> training(comm, options_of(zero, ranks, Recompute::none));
                training.step(0);
                const int64_t before = comm.bytes_sent;
                training.step(1);
                const int64_t bytes = comm.bytes_sent - before;
                training.optimizer.finish_collectives();
                return std::to_string(bytes);
            });
            CAPTURE(ranks);
            CAPTURE(zero);
            for (const std::string& bytes : sent) CHECK(bytes == std::to_string(plan));
        }
}
