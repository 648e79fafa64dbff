// layouts.cpp: trains small models of random shapes on several CPU ranks in random layouts (tensor parallelism, ZeRO,
// sequence parallelism, ...) and on one rank, and compares the results. test_layouts.py starts it on four ranks.
//
//   layouts [COUNT [FIRST]]   COUNT shapes (240) from number FIRST (1) on; a failure prints its number
//
// Rank 0 compares with the reference: the loss and the gradient norm of each step, every gradient of the first step,
// and after the last step the weights, the optimizer's state, the losses of each token in evaluation, the logits of a
// token, and in fp32 a generated text. The other ranks must have the bits of rank 0.
//
// The bounds follow from the roundings, whose effect on a quantity is measured. The distance between the reference in
// bf16 and the one in fp32 is the error of the former, because a rounding to fp32 is 2^-16 of one to bf16.
//   bf16: both the reference and the layout have such an error, in other directions, and the layout rounds parts of a
//     sum and their sum where the reference rounds the sum: at most twice as many roundings. Together 4 distances.
//   fp32: a sum of k terms has an error of at most k roundings, where bf16 rounds each sum once. So the bound is the
//     one of bf16 x k 2^-16, with the largest k of the model. Some models with large weights are chaotic: their errors
//     grow in each step, and those of bf16 are already as large as they can be. So after the first update the bound
//     also has 4 distances to a run in fp32 whose initial weights differ in the last bit.
// A distance may be small by chance. So that of bf16 is the larger one of two runs, of which the second one starts from
// weights that are rounded up or down at random, and relative to the quantity it is at least the median of all
// gradients. Norms are compared: of a difference of tensors, or of the losses of all steps.
//
// AdamW divides one average of gradients by another one, so rounding errors of a gradient that is nearly zero (exactly
// zero without rounding, as for K's bias) would become steps of any size up to the learning rate. The large eps makes
// an error in a step proportional to the gradient's.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <omp.h>

#include "base/common.h"
#include "base/random.h"
#include "infer/generate.h"
#include "support/random_tokens.h"
#include "train/optimizer.h"

constexpr int STEPS = 5, RANKS = 4, SHAPES = 240;

// ---- Shapes

struct Shape {
    int L, NH, HS, V, T, B, accum;
    int tp, dp, zero;
    int recompute, sp, chunks, virt;  // sp: sequence parallelism, virt: virtual ranks
    int bf16, master;
    int gain;                      // scale of the initial matrices
    int big_head;                  // factor of the initial wte, for large logits
    int ignore, clip, muon, seed;  // ignore: whether some targets are ignored
    int bf16_sums;                 // of gradients

    GPT2Config config() const { return {T + 1, V, L, NH, NH * HS}; }
    int micro_batches() const { return dp * accum; }  // per step
    int64_t tokens_per_step() const { return int64_t(B) * T * micro_batches(); }
};

static std::string describe(const Shape& s) {
    return format("L %d NH %d HS %d V %d B %d T %d accum %d tp %d dp %d zero %d ", s.L, s.NH, s.HS, s.V, s.B, s.T,
                  s.accum, s.tp, s.dp, s.zero) +
           format(
               "recompute %d sp %d chunks %d virtual %d bf16 %d master %d gain %d big_head %d ignore %d clip %d muon "
               "%d bf16_sums %d",
               s.recompute, s.sp, s.chunks, s.virt, s.bf16, s.master, s.gain, s.big_head, s.ignore, s.clip, s.muon,
               s.bf16_sums);
}

// The sizes are reduced until a step takes this many multiplications with a parameter, so that the sweep is short.
constexpr int64_t MOST_WORK = 2'500'000;

static Shape random_shape(int seed) {
    std::mt19937 random{uint32_t(seed)};
    const auto from_to = [&](int first, int last) { return first + int(random() % uint32_t(last - first + 1)); };
    const auto one_in = [&](int n) { return from_to(1, n) == 1; };
    static constexpr int layouts[][2] = {{1, 2}, {1, 4}, {2, 1}, {4, 1}, {2, 2}, {2, 2}};
    Shape s{};
    s.seed = seed;
    const auto& layout = layouts[from_to(0, int(std::size(layouts)) - 1)];
    s.tp = layout[0], s.dp = layout[1];
    s.L = from_to(1, 4);
    s.NH = s.tp * from_to(1, 8 / s.tp);
    s.HS = from_to(2, 24);
    s.V = from_to(3, 400);
    s.B = from_to(1, 4);
    s.sp = s.tp > 1 && one_in(2);
    s.T = s.sp ? s.tp * from_to(1, 48 / s.tp) : from_to(1, 48);
    s.accum = from_to(1, 4);
    s.zero = from_to(0, 3);
    s.recompute = from_to(0, 2);
    s.chunks = from_to(0, 3);
    s.virt = s.accum % 2 == 0 && one_in(2) ? 2 * s.dp : s.dp;
    s.bf16 = one_in(2);
    s.master = !one_in(4);
    // With a gain of 20 a rounding to bf16 can multiply an attention probability, and errors are not in proportion.
    const int gains[] = {1, 5, s.bf16 ? 10 : 20};
    s.gain = gains[from_to(0, 2)];
    s.big_head = one_in(4) ? 30 : 1;
    s.ignore = one_in(3);
    s.clip = one_in(2);
    s.muon = one_in(3);
    while (s.tokens_per_step() * count_parameters(s.config()) > MOST_WORK) {
        int& size = *std::vector{&s.HS, &s.T, &s.B, &s.L}[size_t(from_to(0, 3))];
        size = std::max(size * 2 / 3, &size == &s.HS ? 2 : 1);
        if (s.sp) s.T = round_up(s.T, s.tp);
    }
    s.bf16_sums = s.bf16 && one_in(3);
    return s;
}

// ---- Training

// By name, and the name of a tensor. States of tensors are on rank 0 only.
using Results = std::map<std::string, std::vector<float>>;

// How initial weights are changed at random: not, up or down to a bf16, or by one in the last bit of an fp32.
enum class Rounding { none, bf16, fp32 };

// The initial values of a whole tensor. Biases are not zero, and weights of LayerNorm not one, so that an error in
// their use changes the results.
static std::vector<float> start_values(const Shape& shape, const ParamLayout& whole, Param p, int l,
                                       Rounding rounding) {
    const ParamSpec& spec = param_table[p];
    std::vector<float> values(size_t(whole.size(p)));
    init_param(values.data(), whole.config, p, l, uint64_t(shape.seed), 0, whole.size(p));
    const Philox random{uint64_t(shape.seed), uint64_t(1000 + p) << 32 | uint64_t(l)};
    for (size_t i = 0; i < values.size(); i++) {
        const auto words = random(i);
        if (spec.rows == Dim::one)
            values[i] += 0.1f * box_muller(words[0], words[1])[0];
        else
            values[i] *= float(p == wte ? shape.big_head : shape.gain);
        const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
        if (rounding == Rounding::bf16) values[i] = std::bit_cast<float>((bits + (words[2] & 0xffff)) & 0xffff0000);
        if (rounding == Rounding::fp32) values[i] = std::bit_cast<float>(bits ^ (words[2] & 1));
    }
    return values;
}

struct MicroBatch {
    std::vector<int> tokens, targets;
};

static MicroBatch micro_batch(const Shape& shape, int step, int number) {
    const int64_t count = int64_t(shape.B) * shape.T;
    const uint64_t seed = uint64_t(shape.seed) * 1000 + uint64_t(step * shape.micro_batches() + number);
    MicroBatch batch = {random_token_list(count, shape.V, 2 * seed), random_token_list(count, shape.V, 2 * seed + 1)};
    for (int64_t i = 0; shape.ignore && i < count; i += 3) batch.targets[size_t(i)] = -1;
    return batch;
}

template <class floatX>
struct Training {
    const Shape& shape;
    const Groups& groups;
    GPT2<floatX> model;
    Optimizer<floatX> optimizer;
    Results results;

    Training(const Shape& shape, const Groups& groups, MemoryOptions options)
        : shape(shape),
          groups(groups),
          model(shape.config(), Purpose::train, shape.B, shape.T, options),
          optimizer(model, {{0.9f, 0.95f, 3e-3f, 0.1f, uint64_t(shape.seed)}}, options, groups) {
        if (groups.tp.world_size > 1) model.tensor_ranks = &groups.tp;
    }

    void train(Rounding rounding) {
        for_each_tensor(optimizer.full_layout, [&](Param p, int l) {
            optimizer.set_state(WEIGHTS, p, l, start_values(shape, optimizer.full_layout, p, l, rounding).data());
        });
        optimizer.weights_loaded();
        std::vector<float> losses(STEPS), norms(STEPS);
        for (int step = 0; step < STEPS; step++) {
            accumulate(step);
            copy_to_host(&losses[size_t(step)], optimizer.gradients.step_loss(), sizeof(float), model.stream);
            copy_to_host(&norms[size_t(step)], optimizer.norm(), sizeof(float), model.stream);
            optimizer.step(1e-2f, step + 1);
            if (step == 0) take_state("gradients", 1);  // their averages after one step
        }
        take_state("weights", 0), take_state("first state", 1), take_state("second state", 2);
        evaluate();
        results["losses"] = losses, results["norms"] = norms, results["text"] = generate_text();
        optimizer.finish_collectives();
    }

    void take_state(const std::string& name, Slot slot) {
        for_each_tensor(optimizer.full_layout, [&](Param p, int l) {
            if (!optimizer.has(slot, p)) return;
            std::vector<float> values(size_t(optimizer.full_layout.size(p)));
            optimizer.get_state(groups.world.rank == 0 ? values.data() : nullptr, slot, p, l);
            if (groups.world.rank > 0) return;
            results[format("%s: %s of layer %d", name.c_str(), param_table[p].name, l)] = values;
        });
    }

    // The micro-batches of this rank, as train_step in train_gpt2.cu computes them.
    void accumulate(int step) {
        GradReducer& gradients = optimizer.gradients;
        const int dp = groups.dp.world_size, accum = shape.micro_batches() / dp;
        const int own = gradients.local_virtual_ranks(), micro_steps = accum / own;
        const bool in_turns = model.sums_apart;
        gradients.begin_step(step + 1);
        for (int number = 0; number < accum; number++) {
            const int v = in_turns ? number % own : number / micro_steps, i = in_turns ? 0 : number % micro_steps;
            const bool last = in_turns || i + 1 == micro_steps;
            if (i == 0) model.zero_gradients();
            const MicroBatch batch = micro_batch(shape, step, groups.dp.rank * accum + number);
            model.forward(batch.tokens.data(), shape.B, shape.T);
            model.backward(
                batch.tokens.data(), batch.targets.data(), shape.B, shape.T, i, 1.0f / float(shape.micro_batches()),
                [&](int bucket) {
                    if (last) gradients.reduce_bucket(bucket, v);
                },
                [&](int bucket) { gradients.begin_bucket(bucket); });
            if (last) gradients.virtual_rank_done(v);
        }
        optimizer.clip(shape.clip ? 0.5f : 0.0f);
    }

    // A text that is longer than the context, so that generate also reads its second half again.
    std::vector<float> generate_text() {
        const std::vector<int> prompt = random_token_list(1 + shape.seed % shape.T, shape.V, uint64_t(shape.seed));
        std::vector<float> text;
        Sampler sampler;
        sampler.temperature = 0.0f;
        generate(model, prompt, shape.T - int(prompt.size()) + 3, sampler, 0, [&](int token) {
            text.push_back(float(token));
            return true;
        });
        return text;
    }

    // All ranks have the same micro-batch here.
    void evaluate() {
        const MicroBatch batch = micro_batch(shape, STEPS, 0);
        model.forward(batch.tokens.data(), shape.B, shape.T);
        model.token_losses(batch.targets.data(), shape.B, shape.T);
        results["token losses"].assign(model.acts.losses, model.acts.losses + shape.B * shape.T);
        const float* logits = model.row_logits(shape.B * shape.T / 2);
        for (int i = 0; i < shape.V; i++) results["logits"].push_back(logits[i]);
    }
};

template <class floatX>
static Results train(const Shape& shape, const Groups& groups, MemoryOptions options,
                     Rounding rounding = Rounding::none) {
    Training<floatX> training(shape, groups, options);
    training.train(rounding);
    return training.results;
}

// ---- The reference

static double distance(const std::vector<float>& x, const std::vector<float>& y) {
    double sum = 0.0;
    for (size_t i = 0; i < x.size(); i++) sum += (double(x[i]) - double(y[i])) * (double(x[i]) - double(y[i]));
    return std::sqrt(sum);
}

struct Reference {
    Results results;
    std::map<std::string, double> bounds;  // largest norm of a difference
};

static std::string bytes_of(const Results& results) {
    std::string bytes;
    for (const auto& [name, x] : results)
        bytes.append(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float));
    return bytes;
}

static Results from_bytes(Results results, const char* bytes) {
    for (auto& [name, x] : results) {
        memcpy(x.data(), bytes, x.size() * sizeof(float));
        bytes += x.size() * sizeof(float);
    }
    return results;
}

// Each of the four ranks trains alone, in one of four ways.
static Reference make_reference(const Shape& shape, Comm& world) {
    Comm comm;
    const Groups alone = make_groups(comm, 1);
    const MemoryOptions options = {.logit_chunks = 1, .master_weights = shape.master == 1, .muon = shape.muon == 1};
    const Rounding rounding = world.rank == 2 ? Rounding::bf16 : world.rank == 3 ? Rounding::fp32 : Rounding::none;
    const bool in_bf16 = world.rank == 1 || world.rank == 2;
    const Results own =
        in_bf16 ? train<bf16>(shape, alone, options, rounding) : train<float>(shape, alone, options, rounding);
    const std::vector<std::string> all = world.all_gather_text(bytes_of(own));
    const auto results_of = [&](size_t rank) { return from_bytes(own, all[rank].data()); };
    const Results fine = results_of(0), coarse = results_of(1), other = results_of(2), moved = results_of(3);
    const auto norm_of = [](const std::vector<float>& x) { return distance(x, std::vector<float>(x.size())); };
    std::map<std::string, double> distances;
    std::vector<double> relative;
    double all_gradients = 0.0;
    for (const auto& [name, x] : fine) {
        distances[name] = std::max(distance(x, coarse.at(name)), distance(x, other.at(name)));
        if (!name.starts_with("gradients")) continue;
        const double norm = norm_of(x);
        all_gradients = std::max(all_gradients, norm);
        if (norm > 0.0) relative.push_back(distances[name] / norm);
    }
    std::sort(relative.begin(), relative.end());
    const double usual = relative.empty() ? 0.0 : relative[relative.size() / 2];
    const int64_t longest = std::max({int64_t(4 * shape.config().C), shape.tokens_per_step(), int64_t(shape.V)});
    // Newton-Schulz raises the roundings of small singular values, which differ more from run to run.
    const double scale = (shape.muon ? 8.0 : 4.0) * (shape.bf16 ? 1.0 : double(longest) / 65536.0);
    Reference reference{shape.bf16 ? coarse : fine, {}};
    for (const auto& [name, x] : fine)
        reference.bounds[name] = scale * std::max(distances[name], usual * norm_of(x)) + 1e-12 * all_gradients;
    for (auto& [name, bound] : reference.bounds)
        if (!shape.bf16 && !name.starts_with("gradients")) bound += 4.0 * distance(moved.at(name), fine.at(name));
    reference.bounds["text"] = shape.bf16 ? HUGE_VAL : 0.0;
    return reference;
}

// ---- The sweep

static Results train_in_layout(const Shape& shape, const Groups& groups) {
    const int dp = groups.dp.world_size;
    const MemoryOptions options = {.recompute = Recompute(shape.recompute),
                                   .logit_chunks = shape.chunks,
                                   .master_weights = shape.master == 1,
                                   .virtual_ranks = shape.virt,
                                   .shards = shape.zero ? dp : 1,
                                   .shard_gradients = shape.zero >= 2,
                                   .shard_weights = shape.zero >= 3 && dp > 1,
                                   .grad_accum = shape.bf16_sums ? Dtype::bf16 : Dtype::fp32,
                                   .muon = shape.muon == 1,
                                   .tensor = {groups.tp.shard_index, shape.tp},
                                   .sequence_parallel = shape.sp == 1};
    return shape.bf16 ? train<bf16>(shape, groups, options) : train<float>(shape, groups, options);
}

// Returns the differences of the results from the reference; empty: there are none.
static std::string failures_of(const Shape& shape, const Reference& reference, const Groups& groups) {
    const Results results = train_in_layout(shape, groups);
    Results everywhere;
    for (const char* name : {"losses", "norms", "token losses", "logits", "text"}) everywhere[name] = results.at(name);
    const std::string bytes = bytes_of(everywhere);
    std::string failures;
    for (const std::string& other : groups.world.all_gather_text(bytes))
        if (other != bytes) failures = "    the ranks have other losses, norms, logits or texts\n";
    if (groups.world.rank > 0) return failures;
    for (const auto& [name, bound] : reference.bounds) {
        const double error = distance(results.at(name), reference.results.at(name));
        if (!(error <= bound)) failures += format("    %s: error %.3g, bound %.3g\n", name.c_str(), error, bound);
    }
    return failures;
}

// Returns the number of shapes that failed.
static int sweep(int count, int& seed, Comm& world) {
    int failed = 0;
    for (const int end = seed + count; seed < end; seed++) {
        const Shape shape = random_shape(seed);
        const Reference reference = make_reference(shape, world);
        const bool takes_part = world.rank < shape.tp * shape.dp;
        const std::unique_ptr<Comm> ranks = world.split(takes_part ? 0 : 1);
        if (!takes_part) continue;
        const std::string failures = failures_of(shape, reference, make_groups(*ranks, shape.tp));
        failed += !failures.empty();
        if (world.rank > 0) continue;
        if (!failures.empty()) printf("FAIL  layouts 1 %d: %s\n%s", seed, describe(shape).c_str(), failures.c_str());
        fflush(stdout);
    }
    if (world.rank == 0) printf("%s  %d shapes, %d failed\n", failed ? "FAIL" : "PASS", count, failed);
    return failed;
}

int main(int argc, char** argv) {
    omp_set_num_threads(1);
    std::unique_ptr<Comm> world;
    int seed = argc > 2 ? atoi(argv[2]) : 1;
    try {
        world = make_comm(find_launch(getenv));
        ENSURE(world->world_size == RANKS, "the sweep needs %d ranks; start it by mpirun -np %d", RANKS, RANKS);
        return sweep(argc > 1 ? atoi(argv[1]) : SHAPES, seed, *world) > 0;
    } catch (const Error& error) {
        fprintf(stderr, "error: rank %d, shape %d: %s\n", world ? world->rank : -1, seed, error.what());
        if (world) world->abort(error.exit_code);
        return error.exit_code;
    }
}
