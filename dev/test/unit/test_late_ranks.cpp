// test_late_ranks.cpp: training on 2 and 4 ranks whose collectives run as late as comm.h permits, when a rank waits for
// them, has the bits of one rank, for every ZeRO stage.
//
// A real collective may run at any time between its call and the wait. LateComm chooses the worst: it reads its input
// at the wait, so that an input which was overwritten too early gives wrong sums, and a gather fills the memory that it
// will overwrite with NaN at the call, so that weights which are read too early give NaN. A reduce-scatter leaves NaN
// in the other shards, whose values are undefined.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include <omp.h>

#include "base/common.h"
#include "parallel/comm.h"
#include "support/random_tokens.h"
#include "support/temporary.h"
#include "train/optimizer.h"

// Memory that the ranks share. A rank sleeps while it waits: ranks that only look take minutes on a busy machine.
struct Meeting {
    static constexpr int64_t CAPACITY = 1 << 22;  // bytes of a rank's buffer in a collective
    std::atomic<int> arrived = 0, round = 0;
    char buffers[4][CAPACITY];

    void wait_for_all(int ranks) {
        const int own_round = round;
        if (++arrived == ranks) {
            arrived = 0;
            round++;
        }
        while (round == own_round) usleep(50);
    }
};

struct LateComm : Comm {
    using Job = std::function<void()>;
    Meeting& meeting;
    std::deque<Job> jobs;
    Ticket queued = 0, done = 0;

    LateComm(Meeting& meeting, int own_rank, int ranks) : meeting(meeting) {
        rank = own_rank;
        world_size = ranks;
        shard_index = (rank + 1) % ranks;  // not the rank, so that a test finds where one is taken for the other
    }

    Ticket queue(Job job) {
        jobs.push_back(std::move(job));
        return ++queued;
    }
    void wait(Ticket ticket, Stream) override {
        for (; done < ticket; done++) {
            jobs.front()();
            jobs.pop_front();
        }
    }

    // Calls f while the buffer of each rank is what its x holds now.
    template <class F>
    void exchange(const void* x, int64_t bytes, const F& f) {
        INVARIANT(bytes <= Meeting::CAPACITY, "a test's collective of %lld bytes", static_cast<long long>(bytes));
        std::memcpy(meeting.buffers[rank], x, size_t(bytes));
        meeting.wait_for_all(world_size);
        f();
        meeting.wait_for_all(world_size);
    }
    void poison_other_shards(void* x, int64_t bytes) const {
        const int64_t own = bytes / world_size;
        for (int shard = 0; shard < world_size; shard++)
            if (shard != shard_index) std::memset(static_cast<char*>(x) + shard * own, 0xff, size_t(own));
    }
    // The sum over ranks first .. first + count as a balanced tree (gradients.h).
    float sum(int64_t i, int first, int count) const {
        if (count == 1) return reinterpret_cast<const float*>(meeting.buffers[first])[i];
        return sum(i, first, count / 2) + sum(i, first + count / 2, count / 2);
    }

    Ticket all_reduce(float* x, int64_t count, GradDtype, Stream) override {
        return queue([=, this] {
            exchange(x, count * 4, [&] {
                for (int64_t i = 0; i < count; i++) x[i] = sum(i, 0, world_size);
            });
        });
    }
    Ticket reduce_scatter(float* x, int64_t count, GradDtype, Stream) override {
        return queue([=, this] {
            const int64_t own = count / world_size;
            exchange(x, count * 4, [&] {
                for (int64_t i = shard_index * own; i < (shard_index + 1) * own; i++) x[i] = sum(i, 0, world_size);
            });
            poison_other_shards(x, count * 4);
        });
    }
    Ticket all_gather(void* x, int64_t bytes, Stream) override {
        poison_other_shards(x, bytes);
        return queue([=, this] {
            exchange(x, bytes, [&] {
                const int64_t own = bytes / world_size;
                for (int r = 0; r < world_size; r++) {
                    const int64_t at = (r + 1) % world_size * own;
                    std::memcpy(static_cast<char*>(x) + at, meeting.buffers[r] + at, size_t(own));
                }
            });
        });
    }
};

// Runs f as `ranks` processes, at most 4, and returns the result of each; an empty one if the process failed. The
// process that calls it must not have used OpenMP, whose threads a fork does not copy.
static std::vector<std::string> run_late_ranks(int ranks, const std::function<std::string(Comm&)>& f) {
    const TemporaryDirectory dir;
    void* const memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Meeting& meeting = *new (memory) Meeting;
    std::vector<pid_t> processes;
    fflush(nullptr);
    for (int rank = 0; rank < ranks; rank++) {
        processes.push_back(fork());
        if (processes.back() != 0) continue;
        alarm(120);  // ends a rank that waits for one that has ended
        try {
            LateComm late(meeting, rank, ranks);
            Comm alone;
            write_bytes(dir / std::to_string(rank), f(ranks == 1 ? alone : late));
            _exit(0);
        } catch (const std::exception& error) {
            fprintf(stderr, "rank %d: %s\n", rank, error.what());
            _exit(EXIT_INTERNAL);
        }
    }
    std::vector<std::string> results;
    for (int rank = 0; rank < ranks; rank++) {
        int status = 0;
        waitpid(processes[size_t(rank)], &status, 0);
        results.push_back(status == 0 ? read_bytes(dir / std::to_string(rank)) : "");
    }
    munmap(memory, sizeof(Meeting));
    return results;
}

// More layers than the two that ZeRO-2 and ZeRO-3 keep in memory.
static const GPT2Config config = {16, 100, 5, 2, 32};
static constexpr int B = 1, T = 16, VIRTUAL_RANKS = 4, MICRO_STEPS = 2, STEPS = 3;

namespace {
template <class floatX>
struct Training {
    Comm& comm;
    Groups groups;
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    std::string results;  // losses and norms of each step, losses of tokens

    Training(Comm& comm, const MemoryOptions& options)
        : comm(comm),
          groups(make_groups(comm, 1)),
          model(config, Purpose::train, B, T, options),
          optimizer(model, {}, options, groups, GradDtype::fp32) {
        init_weights(optimizer, 42);
        optimizer.weights_loaded();
    }

    void add_results(const float* x, int64_t count) {
        results.append(reinterpret_cast<const char*>(x), size_t(count) * sizeof(float));
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
        add_results(gradients.step_loss(), 1);
        add_results(optimizer.norm(), 1);
    }

    void validate() {
        const auto tokens = random_token_list(B * T, config.V, 1000),
                   targets = random_token_list(B * T, config.V, 1001);
        model.forward(tokens.data(), B, T);
        model.token_losses(targets.data(), B, T);
        add_results(model.acts.losses, B * T);
    }
};
}  // namespace

template <class floatX>
static std::vector<std::string> train(int ranks, int zero, Recompute recompute) {
    return run_late_ranks(ranks, [&](Comm& comm) {
        omp_set_num_threads(1);
        Training<floatX> training(comm, {.recompute = recompute,
                                         .virtual_ranks = VIRTUAL_RANKS,
                                         .shards = zero >= 1 ? ranks : 1,
                                         .shard_gradients = zero >= 2,
                                         .shard_weights = zero >= 3 && ranks > 1});
        for (int number = 0; number < STEPS; number++) {
            if (number == 1) training.validate();
            training.step(number);
        }
        training.validate();
        training.optimizer.finish_collectives();
        return training.results;
    });
}

TEST_CASE_TEMPLATE("2 and 4 ranks with late collectives have the bits of one rank, with every ZeRO stage", floatX,
                   float, bf16) {
    for (const Recompute recompute : {Recompute::none, Recompute::layer})
        for (const int zero : {0, 1, 2, 3}) {
            // ZeRO-2 and ZeRO-3 add the micro-steps in another order.
            const std::string one = train<floatX>(1, zero >= 2 ? 2 : 0, recompute)[0];
            REQUIRE(one.size() == sizeof(float) * (2 * STEPS + 2 * B * T));
            for (const int ranks : {2, 4}) {
                CAPTURE(zero);
                CAPTURE(ranks);
                for (const std::string& result : train<floatX>(ranks, zero, recompute)) CHECK(result == one);
            }
        }
}
