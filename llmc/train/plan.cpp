#include "train/plan.h"

#include <algorithm>
#include <bit>

#include "base/host.h"
#include "base/random.h"
#include "checkpoint/checkpoint.h"
#include "data/dataloader.h"
#include "model/mfu.h"
#include "train/options.h"
#include "train/optimizer.h"
#include "train/start.h"

// The most tokens in a micro-batch of --micro-batch auto: larger micro-batches need more memory and are not faster. On
// a CPU of two cores (AMD EPYC, Zen 4) models of 4M, 12M and 124M parameters train as fast with 2,048 and 4,096 tokens
// as with 8,192, and 3 to 20 % slower with 512.
constexpr int64_t MOST_TOKENS = 1 << 20, MOST_TOKENS_ON_CPU = 1 << 12;

// Advises on a global batch that micro-steps do not divide: a smaller micro-batch that does, and the nearest multiple.
static std::string advise_batch(int micro_batch, int64_t row_tokens, int64_t global_batch) {
    const int64_t step_tokens = micro_batch * row_tokens, steps = (global_batch + step_tokens / 2) / step_tokens;
    const std::string nearest = "--global-batch " + std::to_string(std::max<int64_t>(1, steps) * step_tokens);
    for (int B = micro_batch - 1; B > 0; B--)
        if (global_batch % (B * row_tokens) == 0) return format("--micro-batch %d, or %s", B, nearest.c_str());
    return nearest;
}

BatchPlan plan_batch(int micro_batch, int seq_len, int64_t global_batch, int world_size, bool is_default) {
    const int64_t row_tokens = int64_t(seq_len) * world_size, step_tokens = micro_batch * row_tokens;
    if (global_batch == 0) global_batch = step_tokens;
    ENSURE(global_batch % step_tokens == 0,
           "%s--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x %s; try %s",
           is_default ? "the default " : "", static_cast<long long>(global_batch), static_cast<long long>(step_tokens),
           micro_batch, seq_len, counted(world_size, "rank").c_str(),
           advise_batch(micro_batch, row_tokens, global_batch).c_str());
    const int64_t micro_steps = global_batch / step_tokens;
    ENSURE(micro_steps <= std::numeric_limits<int>::max(),
           "--global-batch %lld takes %s micro-steps of %lld tokens; at most 2,147,483,647 are supported",
           static_cast<long long>(global_batch), with_commas(micro_steps).c_str(), static_cast<long long>(step_tokens));
    return {micro_batch, seq_len, world_size, int(micro_steps), global_batch};
}

void check_tokens_at_once(int B, int T) {
    ENSURE(int64_t(B) * T <= std::numeric_limits<int>::max(),
           "--micro-batch %d x --seq-len %d is %s tokens in a micro-batch; at most 2,147,483,647 are supported", B, T,
           with_commas(int64_t(B) * T).c_str());
}

void check_tensor_parallel(const Options& o, const GPT2Config& config, int T, int world_size) {
    const int N = o.tensor_parallel;
    ENSURE(config.NH % N == 0, "--tensor-parallel %d does not divide the model's %d heads; give %s", N, config.NH,
           possible_tensor_parallel(world_size, config.NH).c_str());
    ENSURE(!o.sequence_parallel || T % N == 0,
           "--sequence-parallel divides the tokens of a sequence: --seq-len %d is not a multiple of --tensor-parallel "
           "%d; give --seq-len %d",
           T, N, std::max(N, T / N * N));
}

static void check_virtual_ranks(const Options& o, const BatchPlan& batch) {
    const int n = o.deterministic_ranks;
    if (n == 0) return;
    ENSURE(std::has_single_bit(unsigned(n)) && std::has_single_bit(unsigned(batch.world_size)) && n >= batch.world_size,
           "--deterministic-ranks %d on %d ranks: both must be powers of two, and the first not less than the second; "
           "try 8",
           n, batch.world_size);
    const long long least = int64_t(batch.B) * batch.T * n;  // tokens of a micro-batch on each virtual rank
    ENSURE(batch.tokens_per_step % least == 0,
           "--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x "
           "--deterministic-ranks %d; try %lld",
           static_cast<long long>(batch.tokens_per_step), least, batch.B, batch.T, n,
           static_cast<long long>(round_up<int64_t>(batch.tokens_per_step, least)));
}

Room find_room(const Options& o, int local_ranks) {
    return {o.memory.empty() ? device_bytes_free(local_ranks) : parse_memory(o.memory), local_ranks, host_bytes_free()};
}

static void load_libraries(Dtype dtype, const GPT2Config& config);

BatchPlan resolve_batch(Options& o, Dtype dtype, const GPT2Config& config, const Groups& groups, int world_size,
                        int local_ranks) {
    const int T = o.seq_len ? o.seq_len : config.max_T;
    const int data_parallel = count_data_parallel(world_size, o.tensor_parallel, config.NH);
    check_tensor_parallel(o, config, T, world_size);
    if (o.micro_batch == 0) {
        load_libraries(dtype, config);
        const BatchPlan one = {1, T, data_parallel, 1, 0};
        const MemoryOptions options = memory_options_of(o, data_parallel);
        const Room room = find_room(o, local_ranks);
        const std::string advice = advise_memory(dtype, o, config, one, room);
        ENSURE(advice.empty(), "--micro-batch auto: one sequence of %d tokens needs %s, but only %s are free; %s", T,
               human_bytes(device_bytes(training_memory(dtype, config, one, options))).c_str(),
               human_bytes(room.device).c_str(), advice.c_str());
        o.micro_batch = largest_micro_batch(dtype, config, T, o.global_batch, data_parallel, options, room.device);
        for (const std::string& other : groups.world.all_gather_text(std::to_string(o.micro_batch)))
            o.micro_batch = std::min(o.micro_batch, std::stoi(other));
    }
    check_tokens_at_once(o.micro_batch, T);
    const BatchPlan batch = plan_batch(o.micro_batch, T, o.global_batch, data_parallel, o.default_global_batch);
    o.global_batch = batch.tokens_per_step;  // a resume keeps the global batch on any number of ranks
    check_virtual_ranks(o, batch);
    return batch;
}

// ---- memory

MemoryOptions memory_options_of(const Options& o, int data_parallel, int tensor_index) {
    return {.recompute = o.recompute,
            .logit_chunks = o.logit_chunks,
            .master_weights = o.master_weights,
            .moments = o.moments,
            .offload = o.offload,
            .virtual_ranks = std::max(o.deterministic_ranks, data_parallel),
            .shards = o.zero ? data_parallel : 1,
            .shard_gradients = o.zero >= 2,
            .shard_weights = o.zero >= 3 && data_parallel > 1,
            .grad_dtype = o.grad_dtype,
            .grad_accum = o.grad_accum,
            .muon = o.optimizer == UpdateRule::muon,
            .fp8 = o.precision == Precision::fp8,
            .tensor = {tensor_index, o.tensor_parallel},
            .sequence_parallel = o.sequence_parallel};
}

int64_t largest_tensor(const GPT2Config& config) {
    const ParamLayout layout(config);
    int64_t largest = 0;
    for (const ParamSpec& spec : param_table) largest = std::max<int64_t>(largest, layout.size(spec.id));
    return largest;
}

std::vector<MemoryItem> training_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                                        MemoryOptions options) {
    std::vector<MemoryItem> items = with_dtype(dtype, [&]<class floatX>(floatX) {
        std::vector<MemoryItem> items = model_memory<floatX>(config, Purpose::train, batch.B, batch.T, options);
        for (const auto& item : optimizer_memory<floatX>(config, options, batch.world_size)) items.push_back(item);
        return items;
    });
    const int64_t largest = largest_tensor(config);
    // Tensor-parallel ranks also hold their own shard of a tensor, and that of another rank.
    const int64_t shards = options.tensor.count > 1 ? 2 * largest / options.tensor.count : 0;
    // Codes of a whole tensor are made from its floats, and read to them.
    const int64_t codes = options.moments == MomentDtype::block8 ? largest : 0;
    items.push_back({"loading", (largest + shards) * int64_t(sizeof(float)) + codes, true});
    return items;
}

int64_t offloaded_bytes(Dtype dtype, const GPT2Config& config, const MemoryOptions& options, int world_size) {
    const auto items =
        with_dtype(dtype, [&]<class floatX>(floatX) { return optimizer_memory<floatX>(config, options, world_size); });
    int64_t bytes = 0;
    for (const MemoryItem& item : items) bytes += item.on_host ? item.bytes : 0;
    return bytes;
}

int64_t device_bytes(const std::vector<MemoryItem>& items, bool own_memory) {
    int64_t total = 0;
    for (const MemoryItem& item : items)
        if (!own_memory || !item.on_host) total += item.bytes;
    return total;
}

// Returns the bytes of offloaded state that the ranks of this machine have in its memory.
static int64_t host_bytes(Dtype dtype, const GPT2Config& config, const MemoryOptions& options, int world_size,
                          const Room& room) {
    return room.local_ranks * offloaded_bytes(dtype, config, options, world_size);
}

// Returns the bytes that are missing on each device, and on the host.
static int64_t missing_bytes(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                             const MemoryOptions& options, const Room& room) {
    const int64_t device = device_bytes(training_memory(dtype, config, batch, options)) - room.device;
    const int64_t host = host_bytes(dtype, config, options, batch.world_size, room);
    return std::max<int64_t>(0, device) + (host > room.host ? host - room.host : 0);
}

SavingSet cheapest_savings(Dtype dtype, const Options& o, const GPT2Config& config, int ranks, const Room& room) {
    const BatchPlan one = {1, o.seq_len ? o.seq_len : config.max_T, ranks, 1, 0};
    return cheapest_savings(memory_options_of(o, ranks), ranks, [&](const MemoryOptions& options) {
        return missing_bytes(dtype, config, one, options, room);
    });
}

std::string advise_memory(Dtype dtype, const Options& o, const GPT2Config& config, const BatchPlan& batch,
                          const Room& room) {
    const int ranks = batch.world_size;
    if (missing_bytes(dtype, config, batch, memory_options_of(o, ranks), room) == 0) return "";
    const auto cheapest = [&](const GPT2Config& c) { return cheapest_savings(dtype, o, c, ranks, room); };
    const SavingSet set = cheapest(config);
    const std::string auto_batch = batch.B > 1 ? " --micro-batch auto" : "", added = auto_batch + set.text;
    if (set.missing == 0) return "try " + o.command_line + added;
    const MemoryOptions& options = set.options;
    std::string text = human_bytes(device_bytes(training_memory(dtype, config, {1, batch.T, ranks, 1, 0}, options)));
    if (const int64_t host = host_bytes(dtype, config, options, ranks, room); host > 0)
        text += " of each device and " + human_bytes(host) + " of the host";
    text += " are needed" + (added.empty() ? "" : " with" + added);
    const std::string smaller = smaller_model(o, config, cheapest);
    if (!smaller.empty()) return text + "; a smaller model fits: try " + o.command_line + auto_batch + smaller;
    // CPU ranks share the memory of their machine, so more of them on it do not help.
    return text + format("; try a smaller model, or %s%s", options.shard_weights ? "" : "--zero 3 on ",
                         device_memory_is_host() ? "more machines" : "more ranks");
}

int largest_micro_batch(Dtype dtype, const GPT2Config& config, int seq_len, int64_t global_batch, int world_size,
                        MemoryOptions options, int64_t available, bool own_memory) {
    const int shares = std::max(world_size, options.virtual_ranks);  // ranks that share a step, in whole micro-batches
    const int64_t sequences = global_batch / (int64_t(seq_len) * shares);
    const auto bytes = [&](int B) {
        return device_bytes(training_memory(dtype, config, plan_batch(B, seq_len, 0, world_size), options), own_memory);
    };
    const int64_t most_tokens = own_memory ? MOST_TOKENS : MOST_TOKENS_ON_CPU;
    const int64_t most_bytes = own_memory ? available : available - available / 10;
    int largest = 1;
    for (int B = 2; int64_t(B) * seq_len <= most_tokens && bytes(B) <= most_bytes; B++)
        if (global_batch == 0 || (B <= sequences && sequences % B == 0)) largest = B;
    return largest;
}

std::string memory_advice(Command command, const std::string& purpose) {
    const std::string names[] = {"weights", "gradients", "moments"};
    const bool of_model = std::ranges::any_of(names, [&](auto& name) { return purpose.find(name) != purpose.npos; });
    if (command == Command::generate || (command == Command::eval && of_model))
        return std::string("free memory, or try ") +
               (device_memory_is_host() ? "a machine with more" : "--tensor-parallel on more ranks");
    if (command == Command::eval) return "lower --micro-batch or --seq-len";
    return std::string(of_model ? "" : "lower --micro-batch, or ") + "try the options that plan --fits names";
}

// ---- bytes sent

// Returns the bytes that a rank of n sends in one pass: a reduce-scatter or an all-gather. An all-reduce is two.
static int64_t one_pass(int64_t bytes, int n) { return bytes / n * (n - 1); }

// Returns what a tensor-parallel rank sends of the activations in a micro-step, in passes over N x C elements.
//
// Without sequence parallelism a layer has four all-reduces, of two passes each: of the outputs of attproj and fcproj
// in forward, of the gradients of ln2 and ln1 in backward; the model has the embedding's output and lnf's gradient.
// With it a layer's forward gathers ln1 and ln2 and scatters the outputs of attproj and fcproj. Its backward gathers
// the gradients for fcproj and attproj, gathers ln2 and ln1 again, and scatters their gradients. The model scatters the
// embedding's output, gathers lnf, scatters its gradient, and gathers the gradient of the embedding's output.
// --recompute layer repeats, for all layers but the last, a layer's forward up to fcproj.
static int64_t activations_sent(Dtype dtype, const GPT2Config& config, const Options& o, const BatchPlan& batch) {
    const int n = o.tensor_parallel;
    if (n == 1) return 0;
    const int64_t element = dtype == Dtype::fp32 ? 4 : 2, tokens = int64_t(batch.B) * batch.T;
    const int64_t in_layer = o.sequence_parallel ? 4 + 6 : 2 * (2 + 2), in_model = o.sequence_parallel ? 4 : 2 * 2;
    const int64_t again = o.recompute == Recompute::layer ? (config.L - 1) * int64_t(o.sequence_parallel ? 3 : 2) : 0;
    const int64_t partials = tokens * 2 * 4 * n;  // the head's sums in fp32, from every rank
    return (config.L * in_layer + again + in_model) * one_pass(tokens * config.C * element, n) + one_pass(partials, n);
}

// Returns the bytes that a rank sends per step. With ZeRO-3 the first step, and a step after validation or a sample,
// send up to two layers' weights more or less.
static int64_t sent_bytes(Dtype dtype, const GPT2Config& config, const Options& o, const BatchPlan& batch) {
    const int n = batch.world_size, virtual_ranks = std::max(o.deterministic_ranks, n);
    const int local_virtual_ranks = virtual_ranks / n, ranks = n * o.tensor_parallel;
    const ParamLayout layout(config, virtual_ranks, {0, o.tensor_parallel});
    const int64_t gradient = o.grad_dtype == Dtype::bf16 ? 2 : 4;
    const int64_t gathered = o.zero == 0 ? gradient : dtype == Dtype::fp32 ? 4 : 2;
    // Each forward and each backward of ZeRO-3 gathers the layers, but for two that are in memory from the pass before.
    const int64_t in_pass = o.zero >= 3 ? std::max(0, config.L - 2) * layout.layer_stride : 0;
    const int64_t gradients = one_pass(layout.total * gradient, n);
    const int64_t in_micro_step = 2 * one_pass(in_pass * gathered, n) + activations_sent(dtype, config, o, batch);
    // With sums_apart every micro-step sums the gradients, but a rank adds up its virtual ranks first.
    const bool sums_apart = memory_options_of(o, n).sums_apart();
    const int64_t sums = sums_apart ? batch.grad_accum_steps / local_virtual_ranks : 1;
    int64_t per_step = one_pass((layout.total - in_pass) * gathered, n) +
                       2 * one_pass(4 * count_step_stats(layout, virtual_ranks, ranks), ranks) + sums * gradients +
                       batch.grad_accum_steps * in_micro_step;
    if (o.optimizer == UpdateRule::muon) {  // gathers momentum over ranks, sends directions
        const int64_t matrices = 12 * config.L * int64_t(config.C) * config.C / o.tensor_parallel;
        if (o.zero > 0) per_step += one_pass(config.L * layout.layer_stride * 4, n);
        per_step += one_pass(matrices * (dtype == Dtype::fp32 ? 4 : 2), n) +
                    one_pass(matrices * o.tensor_parallel * 4 / n, o.tensor_parallel);
    }
    // Gradients that are sums over a rank's rows are summed before them.
    if (o.sequence_parallel)
        per_step += 2 * (sums_apart ? batch.grad_accum_steps : local_virtual_ranks) *
                    one_pass(row_sums_bytes(layout), o.tensor_parallel);
    return per_step;
}

// ---- time

// Seconds. The estimated ones, by ASSUMED_MFU, may be half of the true time, or twice.
constexpr double MOST_SECONDS = 60.0;              // limit of all measuring
constexpr double MOST_SECONDS_OF_SEQUENCE = 15.0;  // estimate beyond which fewer layers are measured
constexpr double SHORT_SECONDS = 2.0;              // estimate of a micro-batch, and true time of all steps after two
constexpr double UNKNOWN_PEAK = 1e13;              // FLOP/s of a GPU that mfu.h does not list, for estimates

DeviceBuffer<int> random_tokens(int64_t count, int V, Stream stream) {
    std::vector<int> host(static_cast<size_t>(count));
    for (size_t i = 0; i < host.size(); i++) host[i] = int(Philox{1, 2}(i)[0] % uint32_t(V));
    DeviceBuffer<int> tokens(count, "tokens");
    copy_to_device(tokens.data, host.data(), tokens.bytes(), stream);
    wait_for_stream(stream);
    return tokens;
}

namespace {
struct TooSlow {};
}  // namespace

// Returns the median of the second half: in the first one, memory and threads are new.
static double settled(const std::vector<double>& times) {
    std::vector<double> later(times.begin() + int64_t(times.size() / 2), times.end());
    std::sort(later.begin(), later.end());
    return later[later.size() / 2];
}

// Trains most_steps or fewer on one rank: two if time allows, more if they are short. After most_seconds: TooSlow.
template <class floatX>
static MeasuredStep run_steps(const GPT2Config& config, int B, int T, MemoryOptions options, double most_seconds,
                              size_t most_steps = 16) {
    const double start = seconds_now();
    ProgressLine progress;
    const auto show = [&](size_t step) {
        progress.show(format("measuring step %d of %s, %d x %d tokens: %.0f s", int(step),
                             counted(config.L, "layer").c_str(), B, T, seconds_now() - start));
    };
    if (stdout_is_terminal()) show(1);
    const OwnedStream own;
    GPT2<floatX> model(config, Purpose::train, B, T, options);
    model.stream = own;
    if (options.tensor.count > 1) model.tensor_ranks = &single_rank_groups().world;  // its collectives do nothing
    Optimizer<floatX> optimizer(model, {}, options);
    // A GPU is faster with zeros. A CPU is not: with drawn weights, a plan of 124M took 54 s on two busy cores for 31.
    if (!device_memory_is_host()) init_weights(optimizer, 42);
    optimizer.weights_loaded();
    const DeviceBuffer<int> tokens = random_tokens(int64_t(B) * T + 1, config.V, own);
    std::vector<double> micro_steps, updates;
    model.on_wait_for_weights = [&](int) {
        if (seconds_now() - start > most_seconds) throw TooSlow();
        if (progress.due()) show(micro_steps.size() + 1);
    };
    wait_for_device();
    for (double spent = 0.0, last = 0.0; micro_steps.size() < most_steps;) {
        const double begin = seconds_now();
        if (micro_steps.size() == 1 ? begin - start + last > most_seconds : spent > SHORT_SECONDS) break;
        GradReducer& gradients = optimizer.gradients;
        gradients.begin_step(int(micro_steps.size()) + 1);
        model.zero_gradients();
        model.forward(tokens.data, B, T);
        model.backward(
            tokens.data, tokens.data + 1, B, T, 0, 1.0f, [&](int bucket) { gradients.reduce_bucket(bucket, 0); },
            [&](int bucket) { gradients.begin_bucket(bucket); });
        wait_for_device();
        const double update = seconds_now();
        gradients.virtual_rank_done(0);
        optimizer.clip(1.0f);
        optimizer.step(1e-4f, int(micro_steps.size()) + 1);
        wait_for_device();
        micro_steps.push_back(update - begin);
        updates.push_back(seconds_now() - update);
        last = micro_steps.back() + updates.back();
        spent += last;
    }
    return {B, settled(micro_steps), settled(updates), false};
}

// Trains a step of one small layer, so that the GPU's libraries and kernels allocate before free memory is measured.
static void load_libraries(Dtype dtype, const GPT2Config& config) {
    if (device_memory_is_host()) return;
    const GPT2Config small = {std::min(64, config.max_T), std::min(512, config.V), 1, config.NH, config.C};
    with_dtype(dtype, [&]<class floatX>(floatX) { run_steps<floatX>(small, 1, small.max_T, {}, MOST_SECONDS, 1); });
}

std::optional<MeasuredStep> measure_step(Dtype dtype, const GPT2Config& config, int B, int T, MemoryOptions options,
                                         double peak_flops) {
    options.virtual_ranks = options.shards = 1;
    options.shard_gradients = options.shard_weights = false;
    if (peak_flops == 0) peak_flops = UNKNOWN_PEAK;
    const auto with_layers = [&](int L) { return GPT2Config{config.max_T, config.V, L, config.NH, config.C}; };
    const auto seconds_of_sequence = [&](int L) {
        return flops_per_token(with_layers(L), T) * T / options.tensor.count / (ASSUMED_MFU * peak_flops);
    };
    const auto fits = [&](int L, int B) {
        const BatchPlan batch = plan_batch(B, T, 0, 1);
        return device_bytes(training_memory(dtype, with_layers(L), batch, options)) <= device_bytes_free();
    };
    const auto measure = [&](int L, double most_seconds) {
        const int shorter = std::clamp(int(std::min(SHORT_SECONDS / seconds_of_sequence(L), 1e6)), 1, B);
        return with_dtype(dtype, [&]<class floatX>(floatX) {
            return run_steps<floatX>(with_layers(L), fits(L, shorter) ? shorter : 1, T, options, most_seconds);
        });
    };
    try {
        const int L = config.L;
        if (seconds_of_sequence(L) <= MOST_SECONDS_OF_SEQUENCE && fits(L, 1)) return measure(L, MOST_SECONDS);
        if (L <= 2 || seconds_of_sequence(1) + seconds_of_sequence(2) > MOST_SECONDS / 2 || !fits(2, 1)) return {};
        // Layers are alike: each takes the difference between models of one and of two.
        const MeasuredStep two = measure(2, MOST_SECONDS * 2 / 3);
        B = two.B;
        const MeasuredStep one = measure(1, MOST_SECONDS / 3);
        const auto all = [&](double of_one, double of_two) {
            return of_one + (L - 1) * std::max(0.0, of_two - of_one);
        };
        return MeasuredStep{B, all(one.micro_step, two.micro_step), all(one.update, two.update), true};
    } catch (const TooSlow&) {
        return {};
    }
}

// ---- text

static std::string describe_schedule(const Options& o) {
    const bool decays = o.schedule != Decay::constant && o.steps > std::max<int64_t>(o.warmup_steps, 1);
    std::string end =
        decays ? format(", to %g of it at step %lld", o.final_lr_fraction, static_cast<long long>(o.steps)) : "";
    if (o.schedule == Decay::wsd)
        end = format(", constant to step %lld", static_cast<long long>(steps_to_peak_end(schedule_of(o)))) + end;
    return format("%s, lr %g, %s warmup%s; %sAdamW %g/%g, decay %g, clip %g", option_text(o, "schedule").c_str(), o.lr,
                  counted(o.warmup_steps, "step").c_str(), end.c_str(),
                  o.optimizer == UpdateRule::muon ? "Muon for the layers' matrices, else " : "", o.beta1, o.beta2,
                  o.weight_decay, o.grad_clip);
}

static std::string describe_device(const DeviceInfo& device, Dtype dtype) {
    const double peak = device.peak_flops(dtype);
    if (peak == 0) return format("%s; peak unknown, so no MFU: %s", device.name.c_str(), device.peak_source.c_str());
    return format("%s; peak %s TFLOP/s in %s, %s", device.name.c_str(), plain_number(peak / 1e12).c_str(),
                  dtype_name(dtype), device.peak_source.c_str());
}

static std::string describe_precision(const Options& o, Dtype dtype) {
    const char *gradients = dtype_name(o.grad_accum), *moments = MOMENT_WORDS[int(o.moments)];
    const std::string state = format("%s gradients, %s moments", gradients, moments);
    const bool rounds = o.grad_accum != Dtype::fp32 || o.moments != MomentDtype::fp32;
    if (dtype == Dtype::fp32) return "fp32" + (rounds ? ", " + state : "");
    const char* simulated = device_memory_is_host() ? ", simulated (slower than bf16)" : "";
    const std::string fp8 =
        o.precision == Precision::fp8 ? format("fp8 in the layers' matmuls%s; else ", simulated) : "";
    if (!o.master_weights) return fp8 + "bf16 by stochastic rounding, no master weights; " + state;
    return fp8 + "bf16, with fp32 master weights, " + state +
           (device_bf16_is_faster() ? "" : "; --precision fp32 is faster on this device");
}

static std::string describe_corpus(const Corpus& corpus, int64_t windows_per_step) {
    return format("%s, %s, %s of %d: an epoch is %.1f steps", counted(int64_t(corpus.shards.size()), "shard").c_str(),
                  counted(corpus.tokens, "token").c_str(), counted(corpus.num_windows, "window").c_str(), corpus.T,
                  double(corpus.num_windows) / double(windows_per_step));
}

static std::string describe_batch(const BatchPlan& batch, int tensor_parallel) {
    std::string ranks = counted(batch.world_size, tensor_parallel == 1 ? "rank" : "group");
    if (tensor_parallel > 1) ranks += format(" of %d tensor-parallel ranks", tensor_parallel);
    return format("%s per step = %s x %s x %s x %s", counted(batch.tokens_per_step, "token").c_str(),
                  counted(batch.B, "sequence").c_str(), counted(batch.T, "token").c_str(), ranks.c_str(),
                  counted(batch.grad_accum_steps, "micro-step").c_str());
}

// Returns the bytes of the copy from which this run's checkpoints are written, and whether it fits beside the run.
static std::pair<int64_t, bool> saved_copy(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                                           const Options& o, const Room& room) {
    const MemoryOptions options = memory_options_of(o, batch.world_size);
    const int64_t copy = saved_copy_bytes(o, config, 0);
    const int64_t left =
        device_memory_is_host()
            ? room.local_ranks * (room.device - device_bytes(training_memory(dtype, config, batch, options)))
            : room.host - host_bytes(dtype, config, options, batch.world_size, room);
    return {copy, saved_copy_fits(copy, left)};
}

// "35.0 GiB of 22.9 GiB available: weights 2.90 GiB, gradients 475 MiB, ...; does not fit: try ./train_gpt2 ..."
static std::string describe_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch, const Options& o,
                                   const Room& room) {
    const MemoryOptions options = memory_options_of(o, batch.world_size);
    const std::vector<MemoryItem> memory = training_memory(dtype, config, batch, options);
    const bool several = batch.world_size * options.tensor.count > 1;
    std::string text = human_bytes(device_bytes(memory)) + (several ? " per rank" : "");
    if (room.device > 0) text += format(" of %s available", human_bytes(room.device).c_str());
    const char* separator = ": ";
    for (const MemoryItem& item : memory) {
        if (item.bytes == 0) continue;
        const char* where = item.on_host && !device_memory_is_host() ? " of the host" : "";
        text += format("%s%s %s%s", separator, item.purpose, human_bytes(item.bytes).c_str(), where);
        separator = ", ";
    }
    if (room.device == 0) return text;
    if (const auto [copy, fits] = saved_copy(dtype, config, batch, o, room); copy > 0)
        text += (fits ? "; a copy of the state while it is saved "
                      : "; training waits for saves: no memory for a copy of ") +
                human_bytes(copy);
    const std::string advice = advise_memory(dtype, o, config, batch, room);
    return text + (advice.empty() ? "" : "; does not fit: " + advice);
}

static std::string describe_offload(Dtype dtype, const GPT2Config& config, const Options& o, const BatchPlan& batch,
                                    const Room& room) {
    const int64_t bytes = offloaded_bytes(dtype, config, memory_options_of(o, batch.world_size), batch.world_size);
    std::string text = human_bytes(room.local_ranks * bytes) + " of state in host memory";
    if (room.local_ranks > 1) text += format(" (%d ranks x %s)", room.local_ranks, human_bytes(bytes).c_str());
    if (const auto [copy, fits] = saved_copy(dtype, config, batch, o, room); copy > 0 && fits)
        text += format(" and %s for its copy while it is saved", human_bytes(copy).c_str());
    return format("%s, of which %s are free: %.0f ms of an update at 25 GB/s (PCIe 4.0 x16)", text.c_str(),
                  human_bytes(room.host).c_str(), 1e3 * bus_seconds(bytes));
}

std::vector<Row> plan_table(Dtype dtype, const Options& o, const RunStart& source, const BatchPlan& batch,
                            const DeviceInfo& device, Room room, const Corpus* data) {
    room.device = std::min(room.device, device.memory_bytes);
    const std::string start = !source.resume.empty()    ? "resumed from " + source.resume
                              : !source.weights.empty() ? "weights of " + source.weights
                                                        : "GPT-2's initialization, seed " + std::to_string(o.seed);
    const std::string tokenizer = source.tokenizer
                                      ? source.tokenizer_path + ", " + counted(source.tokenizer->vocab_size(), "token")
                                      : "none beside the data (--tokenizer): no samples, and none in checkpoints";
    std::vector<Row> rows = {{"model", describe_model(source.config)},
                             {"start", start},
                             {"tokenizer", tokenizer},
                             {"batch", describe_batch(batch, o.tensor_parallel)},
                             {"precision", describe_precision(o, dtype)},
                             {"libraries", device_libraries()},
                             {"device", describe_device(device, dtype)},
                             {"memory", describe_memory(dtype, source.config, batch, o, room)}};
    if (o.offload != Offload::none) rows.push_back({"offload", describe_offload(dtype, source.config, o, batch, room)});
    if (data) rows.push_back({"data", describe_corpus(*data, batch.tokens_per_step / batch.T)});
    if (o.steps > 0) rows.push_back({"schedule", describe_schedule(o)});
    if (batch.world_size * o.tensor_parallel > 1)
        rows.push_back({"network", format("each rank sends %s per step, in %d buckets",
                                          human_bytes(sent_bytes(dtype, source.config, o, batch)).c_str(),
                                          ParamLayout(source.config).num_buckets())});
    return rows;
}

// ---- checkpoints

int64_t saved_copy_bytes(const Options& o, const GPT2Config& config, int64_t step) {
    if (!o.checkpoint_async || o.checkpoint_every == 0 || o.output.empty()) return 0;
    const int64_t next = (step / o.checkpoint_every + 1) * o.checkpoint_every;
    const bool ends_before = o.steps > 0 && o.patience == 0 && next >= o.steps;
    if (ends_before) return 0;
    const ParamLayout layout(config);
    return (2 * layout.total + SlotLayout{layout, 1, 0, o.optimizer == UpdateRule::muon}.total()) *
           int64_t(sizeof(float));
}

CheckpointFormat checkpoint_format(const Options& o) {
    return {o.export_dtype == Dtype::bf16, o.moments, o.optimizer == UpdateRule::muon};
}

bool keeps_best(const Options& o) { return o.keep_best || o.patience > 0; }
