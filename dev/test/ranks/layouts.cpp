// layouts.cpp: trains small models of random shapes on several CPU ranks in random layouts (tensor parallelism, ZeRO,
// sequence parallelism, ...) and on one rank, and compares the results. test_layouts.py starts it on four ranks.
//
//   layouts [N]                    the sweep: the first N shapes, or all 240
//   layouts "L=2 NH=4 ... seed=7"  one shape, as a failure prints it
//
// A rank compares with the reference what it holds: the loss and the gradient norm of each step, its shard of every
// gradient of the first step, and after the last step the weights, the optimizer's state, the losses of each token in
// evaluation, the logits of a token, and in fp32 a generated text.
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
// zero without rounding, as for K's bias) become steps of any size up to the learning rate. Most shapes therefore have
// a large eps, with which an error in a step is proportional to the gradient's. The others (tiny_eps) add to the bound
// of the weights: for each element, learning rate x steps x the relative error of its gradient, which is at most 2.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <sstream>
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
    int recompute, sp, chunks;
    int virt;  // virtual ranks
    int bf16, master;
    int gain;      // scale of the initial matrices
    int big_head;  // factor of the initial wte, for large logits
    int ignore;    // whether some targets are ignored
    int clip, tiny_eps, seed;

    GPT2Config config() const { return {T + 1, V, L, NH, NH * HS}; }
    int micro_batches() const { return dp * accum; }  // per step
    int64_t tokens_per_step() const { return int64_t(B) * T * micro_batches(); }
    float lr() const { return tiny_eps ? 1e-3f : 1e-2f; }
    AdamWConfig constants() const { return {0.9f, 0.95f, tiny_eps ? 1e-8f : 3e-3f, 0.1f, uint64_t(seed)}; }
};

constexpr struct {
    const char* name;
    int Shape::*value;
} fields[] = {{"L", &Shape::L},
              {"NH", &Shape::NH},
              {"HS", &Shape::HS},
              {"V", &Shape::V},
              {"T", &Shape::T},
              {"B", &Shape::B},
              {"accum", &Shape::accum},
              {"tp", &Shape::tp},
              {"dp", &Shape::dp},
              {"zero", &Shape::zero},
              {"recompute", &Shape::recompute},
              {"sp", &Shape::sp},
              {"chunks", &Shape::chunks},
              {"virtual", &Shape::virt},
              {"bf16", &Shape::bf16},
              {"master", &Shape::master},
              {"gain", &Shape::gain},
              {"big_head", &Shape::big_head},
              {"ignore", &Shape::ignore},
              {"clip", &Shape::clip},
              {"tiny_eps", &Shape::tiny_eps},
              {"seed", &Shape::seed}};

static std::string describe(const Shape& shape) {
    std::string text;
    for (const auto& field : fields) text += format("%s%s=%d", text.empty() ? "" : " ", field.name, shape.*field.value);
    return text;
}

static Shape parse(const std::string& text) {
    Shape shape{};
    std::istringstream words(text);
    size_t given = 0;
    for (std::string word; words >> word; given++) {
        const size_t equals = word.find('=');
        const auto field = std::find_if(std::begin(fields), std::end(fields),
                                        [&](const auto& f) { return word.substr(0, equals) == f.name; });
        ENSURE(equals != word.npos && field != std::end(fields), "%s is no field of a shape", word.c_str());
        shape.*field->value = atoi(word.c_str() + equals + 1);
    }
    ENSURE(given == std::size(fields), "a shape has %zu fields, not %zu", std::size(fields), given);
    return shape;
}

// The sizes are reduced until a step takes this many multiplications with a parameter, so that the sweep is short.
constexpr int64_t MOST_WORK = 5'000'000;

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
    // With a larger gain attention is so sharp that most gradients of Q and K are rounding errors only.
    s.tiny_eps = s.gain <= 5 && one_in(4);
    while (s.tokens_per_step() * count_parameters(s.config()) > MOST_WORK) {
        const int least_T = s.sp ? s.tp : 1;
        switch (from_to(0, 5)) {
            case 0:
            case 1:
                s.HS = std::max(2, s.HS - s.HS / 3);
                break;
            case 2:
            case 3:
                s.T = std::max(least_T, s.T / 2 / least_T * least_T);
                break;
            case 4:
                s.B = std::max(1, s.B - 1);
                break;
            case 5:
                s.L = std::max(1, s.L - 1);
                break;
        }
    }
    return s;
}

// ---- Training

// Results of a shape's training on one rank: tensors as in a flat buffer of the whole model.
struct Results {
    ParamLayout whole;
    std::vector<float> losses, norms;  // one per step
    std::vector<float> gradients;      // after the first step
    std::vector<float> slots[3];       // weights and state after the last step
    std::vector<float> token_losses, logits;
    std::vector<int> generated;  // tokens, each the likeliest one

    explicit Results(const Shape& shape)
        : whole(shape.config()),
          losses(STEPS),
          norms(STEPS),
          gradients(size_t(whole.total)),
          token_losses(size_t(shape.B * shape.T)),
          logits(size_t(shape.V)),
          generated(size_t(shape.T - shape.seed % shape.T + 2)) {
        for (std::vector<float>& slot : slots) slot.resize(size_t(whole.total));
    }

    // Calls f(name, values, tensors) for each vector. tensors: whether the values are a flat buffer.
    template <class F>
    void for_each(F f) {
        f("losses", losses, false), f("norms", norms, false), f("gradients", gradients, true);
        f("weights", slots[0], true), f("first state", slots[1], true), f("second state", slots[2], true);
        f("token losses", token_losses, false), f("logits", logits, false);
    }
};

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

    Training(const Shape& shape, const Groups& groups, MemoryOptions options)
        : shape(shape),
          groups(groups),
          model(shape.config(), Purpose::train, shape.B, shape.T, options),
          optimizer(model, {shape.constants()}, options, groups, GradDtype::fp32) {
        if (groups.tp.world_size > 1) model.tensor_ranks = &groups.tp;
    }

    bool has_state() const { return groups.world.rank == 0; }  // whether get_state gives this rank whole tensors

    void start(Rounding rounding = Rounding::none) {
        for_each_tensor(optimizer.full_layout, [&](Param p, int l) {
            optimizer.set_state(WEIGHTS, p, l, start_values(shape, optimizer.full_layout, p, l, rounding).data());
        });
        optimizer.weights_loaded();
    }

    // The micro-batches of this rank, as train_step in train_gpt2.cu computes them.
    void accumulate(int step) {
        GradReducer& gradients = optimizer.gradients;
        const int dp = groups.dp.world_size, accum = shape.micro_batches() / dp;
        const int own = gradients.local_virtual_ranks(), micro_steps = accum / own;
        const bool in_turns = model.shard_gradients;
        gradients.begin_step();
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

    // Calls with_gradients between the first backward and the first update.
    template <class F>
    Results train(const F& with_gradients) {
        Results results(shape);
        for (int step = 0; step < STEPS; step++) {
            accumulate(step);
            copy_to_host(&results.losses[size_t(step)], optimizer.gradients.step_loss(), sizeof(float), model.stream);
            copy_to_host(&results.norms[size_t(step)], optimizer.norm(), sizeof(float), model.stream);
            if (step == 0) with_gradients();
            optimizer.step(shape.lr(), step + 1);
        }
        evaluate(results);
        results.generated = generate_text();
        for_each_tensor(optimizer.full_layout, [&](Param p, int l) {
            for (Slot slot : {0, 1, 2})
                optimizer.get_state(has_state() ? results.slots[slot].data() + results.whole.offset(p, l) : nullptr,
                                    slot, p, l);
        });
        optimizer.finish_collectives();
        return results;
    }

    // A text that is longer than the context, so that generate also reads its second half again.
    std::vector<int> generate_text() {
        const std::vector<int> prompt = random_token_list(1 + shape.seed % shape.T, shape.V, uint64_t(shape.seed));
        std::vector<int> text;
        Sampler sampler;
        sampler.temperature = 0.0f;
        generate(model, prompt, shape.T - int(prompt.size()) + 3, sampler, 0, [&](int token) {
            text.push_back(token);
            return true;
        });
        return text;
    }

    // All ranks have the same micro-batch here.
    void evaluate(Results& results) {
        const MicroBatch batch = micro_batch(shape, STEPS, 0);
        model.forward(batch.tokens.data(), shape.B, shape.T);
        model.token_losses(batch.targets.data(), shape.B, shape.T);
        std::copy_n(model.acts.losses, results.token_losses.size(), results.token_losses.data());
        const floatX* logits = model.row_logits(shape.B * shape.T / 2);
        for (int i = 0; i < shape.V; i++) results.logits[size_t(i)] = float(logits[i]);
    }
};

// ---- The reference

static Groups alone() {
    static Comm comm;
    return make_groups(comm, 1);
}

template <class floatX>
static Results train_on_one_rank(const Shape& shape, Rounding rounding = Rounding::none) {
    const Groups groups = alone();
    Training<floatX> training(shape, groups, {.logit_chunks = 1, .master_weights = shape.master == 1});
    training.start(rounding);
    std::vector<float> gradients;
    Results results = training.train([&] {
        const float* first = training.model.grads.memory.data;
        gradients.assign(first, first + training.model.layout.total);
    });
    results.gradients = gradients;
    return results;
}

struct Tensor {
    std::string name;
    int64_t begin, count;
};

static std::vector<Tensor> tensors_of(const ParamLayout& whole) {
    std::vector<Tensor> tensors;
    for_each_tensor(whole, [&](Param p, int l) {
        tensors.push_back({format("%s of layer %d", param_table[p].name, l), whole.offset(p, l), whole.size(p)});
    });
    return tensors;
}

static double norm_of(const float* x, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += double(x[i]) * double(x[i]);
    return std::sqrt(sum);
}

static double distance(const float* x, const float* y, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += (double(x[i]) - double(y[i])) * (double(x[i]) - double(y[i]));
    return std::sqrt(sum);
}

struct Reference {
    Results results;
    std::map<std::string, double> bounds;  // largest norm of a difference, by quantity and tensor
};

// Calls f(name, first, second, count) for each quantity that has a bound.
template <class F>
static void for_each_quantity(Results& first, Results& second, F f) {
    std::vector<std::vector<float>*> others;
    second.for_each([&](const char*, std::vector<float>& values, bool) { others.push_back(&values); });
    size_t i = 0;
    first.for_each([&](const char* name, std::vector<float>& values, bool are_tensors) {
        const float *x = values.data(), *y = others[i++]->data();
        if (!are_tensors) return f(std::string(name), x, y, int64_t(values.size()));
        for (const Tensor& tensor : tensors_of(first.whole))
            f(name + (": " + tensor.name), x + tensor.begin, y + tensor.begin, tensor.count);
    });
}

static double median(std::vector<double> values) {
    if (values.empty()) return 0.0;
    std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
    return values[values.size() / 2];
}

// With eps near zero: the norm of the errors of a tensor's update, of which the gradient's average has an error of
// at most gradient_error. squares: AdamW's average of the gradient's squares.
static double update_error(const Shape& shape, const float* squares, int64_t count, double gradient_error) {
    const double correction = 1.0 - std::pow(double(shape.constants().beta2), STEPS);
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double gradient = std::sqrt(double(squares[i]) / correction);
        const double relative = gradient > 0.0 ? std::min(2.0, gradient_error / gradient) : 2.0;
        sum += relative * relative;
    }
    return double(shape.lr()) * STEPS * std::sqrt(sum);
}

static Reference make_reference(const Shape& shape) {
    Results fine = train_on_one_rank<float>(shape), coarse = train_on_one_rank<bf16>(shape);
    Results other = train_on_one_rank<bf16>(shape, Rounding::bf16);
    std::map<std::string, double> distances;
    const auto measure = [&](const std::string& name, const float* x, const float* y, int64_t count) {
        distances[name] = std::max(distances[name], distance(x, y, count));
    };
    for_each_quantity(fine, coarse, measure);
    for_each_quantity(fine, other, measure);
    std::vector<double> relative;
    double all_gradients = 0.0;
    for_each_quantity(fine, coarse, [&](const std::string& name, const float* x, const float*, int64_t count) {
        if (!name.starts_with("gradients")) return;
        const double norm = norm_of(x, count);
        all_gradients = std::max(all_gradients, norm);
        if (norm > 0.0) relative.push_back(distances[name] / norm);
    });
    const double usual = median(relative);
    const int64_t longest = std::max({int64_t(4 * shape.config().C), shape.tokens_per_step(), int64_t(shape.V)});
    const double scale = 4.0 * (shape.bf16 ? 1.0 : double(longest) / 65536.0);
    Reference reference{shape.bf16 ? coarse : fine, {}};
    for_each_quantity(fine, coarse, [&](const std::string& name, const float* x, const float*, int64_t count) {
        const double unit = std::max(distances[name], usual * norm_of(x, count));
        reference.bounds[name] = scale * unit + 1e-12 * all_gradients;
    });
    if (!shape.bf16) {
        Results moved = train_on_one_rank<float>(shape, Rounding::fp32);
        for_each_quantity(fine, moved, [&](const std::string& name, const float* x, const float* y, int64_t count) {
            if (!name.starts_with("gradients")) reference.bounds[name] += 4.0 * distance(x, y, count);
        });
    }
    if (!shape.tiny_eps) return reference;
    for (const Tensor& tensor : tensors_of(fine.whole))
        reference.bounds["weights: " + tensor.name] +=
            update_error(shape, reference.results.slots[2].data() + tensor.begin, tensor.count,
                         reference.bounds["first state: " + tensor.name]);
    return reference;
}

// Gives all ranks the reference of one of them.
static void broadcast(std::unique_ptr<Reference>& reference, const Shape& shape, int from, Comm& world) {
    if (world.world_size == 1) return;
    const auto send = [&](void* x, int64_t bytes) { world.wait(world.broadcast(x, bytes, from, nullptr), nullptr); };
    if (!reference) {
        reference = std::make_unique<Reference>(Reference{Results(shape), {}});
        for_each_quantity(
            reference->results, reference->results,
            [&](const std::string& name, const float*, const float*, int64_t) { reference->bounds[name] = 0.0; });
    }
    reference->results.for_each(
        [&](const char*, std::vector<float>& x, bool) { send(x.data(), int64_t(x.size() * sizeof(float))); });
    send(reference->results.generated.data(), int64_t(reference->results.generated.size() * sizeof(int)));
    std::vector<double> bounds;
    for (const auto& [name, bound] : reference->bounds) bounds.push_back(bound);
    send(bounds.data(), int64_t(bounds.size() * sizeof(double)));
    size_t i = 0;
    for (auto& [name, bound] : reference->bounds) bound = bounds[i++];
}

// ---- The comparison

using Failures = std::vector<std::string>;

static void expect_close(Failures& failures, const std::string& name, double error, double bound) {
    if (!(error <= bound)) failures.push_back(format("%s: error %.3g, bound %.3g", name.c_str(), error, bound));
}

// The initial weights are the same bits in any layout.
template <class floatX>
static void check_init(Failures& failures, Training<floatX>& training) {
    Optimizer<floatX>& optimizer = training.optimizer;
    init_weights(optimizer, 42);
    optimizer.weights_loaded();
    for_each_tensor(optimizer.full_layout, [&](Param p, int l) {
        std::vector<float> want(size_t(optimizer.full_layout.size(p))), got(want.size());
        init_param(want.data(), training.model.config, p, l, 42, 0, optimizer.full_layout.size(p));
        if (!optimizer.master.data)
            for (float& x : want) x = float(floatX(x));
        optimizer.get_state(got.data(), WEIGHTS, p, l);
        if (training.has_state() && got != want)
            failures.push_back(format("initial %s of layer %d has other bits", param_table[p].name, l));
    });
}

// Compares the gradients of this rank's shards. Elements that belong to no parameter must be zero.
template <class floatX>
static void check_gradients(Failures& failures, Training<floatX>& training, Reference& reference) {
    const ParamLayout &layout = training.model.layout, &whole = reference.results.whole;
    const GradReducer& gradients = training.optimizer.gradients;
    const int shards = gradients.sharding.shards;
    std::vector<float> want(size_t(layout.total));
    std::vector<bool> is_parameter(size_t(layout.total));
    for_each_tensor(layout, [&](Param p, int l) {
        const int64_t offset = layout.offset(p, l);
        take_shard(want.data() + offset, reference.results.gradients.data() + whole.offset(p, l), layout, p);
        for_each_run(layout, p, [&](int64_t own, int64_t, int64_t count) {
            std::fill_n(is_parameter.begin() + offset + own, count, true);
        });
    });
    for (int b = 0; b < layout.num_buckets(); b++) {
        const Bucket bucket = layout.bucket(b);
        const int64_t count = (bucket.end - bucket.begin) / shards;
        const int64_t first = bucket.begin + (shards > 1 ? gradients.comm.shard_index : 0) * count;
        const float* got = gradients.reduced_grads(b, first);
        for (const Tensor& tensor : tensors_of(layout)) {
            const int64_t begin = std::max(first, tensor.begin);
            const int64_t end = std::min(first + count, tensor.begin + tensor.count);
            if (begin >= end) continue;
            const std::string name = "gradients: " + tensor.name;
            expect_close(failures, name, distance(got + begin - first, want.data() + begin, end - begin),
                         reference.bounds.at(name));
        }
        for (int64_t i = 0; i < count; i++)
            if (!is_parameter[size_t(first + i)] && got[i] != 0.0f)
                return failures.push_back(format("padding of bucket %d has a gradient of %g", b, double(got[i])));
    }
}

template <class floatX>
static Failures train_in_layout(const Shape& shape, Reference& reference, const Groups& groups) {
    Failures failures;
    const int dp = groups.dp.world_size;
    const MemoryOptions options = {.recompute = Recompute(shape.recompute),
                                   .logit_chunks = shape.chunks,
                                   .master_weights = shape.master == 1,
                                   .virtual_ranks = shape.virt,
                                   .shards = shape.zero ? dp : 1,
                                   .shard_gradients = shape.zero >= 2,
                                   .shard_weights = shape.zero >= 3 && dp > 1,
                                   .tensor = {groups.tp.shard_index, shape.tp},
                                   .sequence_parallel = shape.sp == 1};
    Training<floatX> training(shape, groups, options);
    check_init(failures, training);
    training.start();
    Results results = training.train([&] { check_gradients(failures, training, reference); });
    for_each_quantity(results, reference.results,
                      [&](const std::string& name, const float* x, const float* y, int64_t count) {
                          if (name.starts_with("gradients")) return;  // compared above
                          const bool state = name.starts_with("weights") || name.find(" state") != std::string::npos;
                          if (state && !training.has_state()) return;
                          expect_close(failures, name, distance(x, y, count), reference.bounds.at(name));
                      });
    if (!shape.bf16 && results.generated != reference.results.generated)
        failures.push_back("another text is generated");
    return failures;
}

// ---- The sweep

// The groups of each layout. They are made once, by all ranks of the world.
struct Layouts {
    std::map<int, std::unique_ptr<Comm>> worlds;   // the first 1, 2 and 4 ranks
    std::map<std::pair<int, int>, Groups> groups;  // by ranks and tensor_parallel

    explicit Layouts(Comm& world) {
        for (int ranks = 1; ranks <= world.world_size; ranks *= 2) {
            worlds[ranks] = world.split(world.rank < ranks ? 0 : 1 + world.rank);
            if (world.rank >= ranks) continue;
            for (int tp = 1; tp <= ranks; tp *= 2)
                groups.emplace(std::pair(ranks, tp), make_groups(*worlds[ranks], tp));
        }
    }
};

// Returns whether a rank failed. The first rank prints why, once if several ranks say the same.
static bool test_shape(const Shape& shape, Reference& reference, Layouts& layouts) try {
    const int ranks = shape.tp * shape.dp;
    const Groups& groups = layouts.groups.at({ranks, shape.tp});
    const Failures own =
        shape.bf16 ? train_in_layout<bf16>(shape, reference, groups) : train_in_layout<float>(shape, reference, groups);
    std::string text;
    for (size_t i = 0; i < std::min<size_t>(own.size(), 6); i++) text += "    " + own[i] + "\n";
    const std::vector<std::string> all = groups.world.all_gather_text(text);
    const bool failed = std::any_of(all.begin(), all.end(), [](const std::string& x) { return !x.empty(); });
    if (!failed || groups.world.rank > 0) return failed;
    printf("FAIL  layouts \"%s\"\n", describe(shape).c_str());
    for (size_t rank = 0; rank < all.size(); rank++)
        if (std::find(all.begin(), all.begin() + long(rank), all[rank]) == all.begin() + long(rank))
            printf("  rank %zu:\n%s", rank, all[rank].c_str());
    return failed;
} catch (const Error& error) {
    fail(error.exit_code, "\"%s\": %s", describe(shape).c_str(), error.what());
}

// Each rank makes the reference of one of `ranks` shapes, and the ranks then test these shapes together.
static int sweep(const std::vector<Shape>& shapes, Comm& world) {
    Layouts layouts(world);
    const int ranks = world.world_size;
    const double start = seconds_now();
    int failed = 0;
    for (size_t first = 0; first < shapes.size(); first += size_t(ranks)) {
        std::vector<std::unique_ptr<Reference>> references(static_cast<size_t>(ranks));
        const size_t own = first + size_t(world.shard_index);
        if (own < shapes.size())
            references[size_t(world.shard_index)] = std::make_unique<Reference>(make_reference(shapes[own]));
        for (int i = 0; i < ranks && first + size_t(i) < shapes.size(); i++) {
            const Shape& shape = shapes[first + size_t(i)];
            broadcast(references[size_t(i)], shape, i, world);
            if (world.rank < shape.tp * shape.dp) failed += test_shape(shape, *references[size_t(i)], layouts);
        }
        if (world.rank == 0 && first / 40 != (first + size_t(ranks)) / 40)
            printf("%zu shapes, %d failed, %.0f s\n", first + size_t(ranks), failed, seconds_now() - start);
        fflush(stdout);
    }
    if (world.rank == 0) printf("%s  %zu shapes, %d failed\n", failed ? "FAIL" : "PASS", shapes.size(), failed);
    return failed;
}

int main(int argc, char** argv) {
    omp_set_num_threads(1);
    std::unique_ptr<Comm> world;
    try {
        std::vector<Shape> shapes;
        const bool is_sweep = argc == 1 || (argc == 2 && std::string(argv[1]).find('=') == std::string::npos);
        const int count = argc == 2 ? atoi(argv[1]) : SHAPES;
        for (int seed = 1; is_sweep && seed <= count; seed++) shapes.push_back(random_shape(seed));
        for (int i = 1; !is_sweep && i < argc; i++) shapes.push_back(parse(argv[i]));
        ENSURE(!shapes.empty(), "%s is no number of shapes", argv[1]);
        world = make_comm(find_launch(getenv));
        ENSURE(world->world_size == RANKS, "the sweep needs %d ranks; start it by mpirun -np %d", RANKS, RANKS);
        return sweep(shapes, *world) > 0;
    } catch (const Error& error) {
        fprintf(stderr, "error: rank %d: %s\n", world ? world->rank : -1, error.what());
        if (world) world->abort(error.exit_code);
        return error.exit_code;
    }
}
