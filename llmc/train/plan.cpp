#include "train/plan.h"

#include <algorithm>

#include "base/terminal.h"
#include "train/optimizer.h"

// The most tokens in a micro-batch of --micro-batch auto: larger micro-batches need more memory and are not faster. On
// a CPU of two cores (AMD EPYC, Zen 4) models of 4M, 12M and 124M parameters train as fast with 2,048 and 4,096 tokens
// as with 8,192, and 3 to 20 % slower with 512.
constexpr int64_t MOST_TOKENS = 1 << 20, MOST_TOKENS_ON_CPU = 1 << 12;

// Advice for a global batch that is not a multiple of the tokens of one micro-step on all ranks: a smaller micro-batch
// that divides the global batch, or else fewer ranks; and the nearest multiple.
static std::string advise_batch(int micro_batch, int seq_len, int64_t global_batch_tokens, int world_size) {
    const int64_t step_tokens = int64_t(micro_batch) * seq_len * world_size,
                  below = global_batch_tokens / step_tokens * step_tokens;
    const bool nearer_below = below > 0 && global_batch_tokens - below < below + step_tokens - global_batch_tokens;
    const std::string nearest = std::to_string(nearer_below ? below : below + step_tokens);
    for (int B = micro_batch - 1; B > 0; B--)
        if (global_batch_tokens % (int64_t(B) * seq_len * world_size) == 0)
            return format("--micro-batch %d, or --global-batch %s", B, nearest.c_str());
    for (int ranks = world_size - 1; ranks > 0; ranks--)
        if (global_batch_tokens % (int64_t(ranks) * seq_len) == 0)
            return format("--micro-batch 1 on %d rank%s, or --global-batch %s", ranks, ranks == 1 ? "" : "s",
                          nearest.c_str());
    return "--global-batch " + nearest;
}

BatchPlan plan_batch(int micro_batch, int seq_len, int64_t global_batch_tokens, int world_size, bool is_default) {
    const int64_t step_tokens = int64_t(micro_batch) * seq_len * world_size;
    if (global_batch_tokens == 0) global_batch_tokens = step_tokens;
    ENSURE(
        global_batch_tokens % step_tokens == 0 || !is_default,
        "--micro-batch %d x --seq-len %d x %d rank%s = %lld tokens do not divide the default --global-batch of %lld; "
        "try %s",
        micro_batch, seq_len, world_size, world_size == 1 ? "" : "s", static_cast<long long>(step_tokens),
        static_cast<long long>(global_batch_tokens),
        advise_batch(micro_batch, seq_len, global_batch_tokens, world_size).c_str());
    ENSURE(global_batch_tokens % step_tokens == 0,
           "--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x %d rank%s; try %s",
           static_cast<long long>(global_batch_tokens), static_cast<long long>(step_tokens), micro_batch, seq_len,
           world_size, world_size == 1 ? "" : "s",
           advise_batch(micro_batch, seq_len, global_batch_tokens, world_size).c_str());
    ENSURE(global_batch_tokens / step_tokens <= std::numeric_limits<int>::max(),
           "--global-batch %lld takes %s micro-steps of %lld tokens; at most %s are supported",
           static_cast<long long>(global_batch_tokens), with_commas(global_batch_tokens / step_tokens).c_str(),
           static_cast<long long>(step_tokens), with_commas(std::numeric_limits<int>::max()).c_str());
    return {micro_batch, seq_len, world_size, narrow(global_batch_tokens / step_tokens), global_batch_tokens};
}

std::vector<MemoryItem> training_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch,
                                        MemoryOptions options, const std::string& optimizer) {
    std::vector<MemoryItem> items = with_dtype(dtype, [&]<class floatX>(floatX) {
        std::vector<MemoryItem> items = model_memory<floatX>(config, Purpose::train, batch.B, batch.T, options);
        for (const MemoryItem& item : optimizer_memory<floatX>(config, options, batch.world_size, optimizer))
            items.push_back(item);
        return items;
    });
    const ParamLayout layout(config);
    int64_t largest = 0;
    for (const ParamSpec& spec : param_table) largest = std::max<int64_t>(largest, layout.size(spec.id));
    // Tensor-parallel ranks also hold their own shard of a tensor, and that of another rank.
    const int64_t shards = options.tensor.count > 1 ? 2 * largest / options.tensor.count : 0;
    items.push_back({"loading", (largest + shards) * int64_t(sizeof(float)), true});
    return items;
}

int64_t total_bytes(const std::vector<MemoryItem>& items) {
    int64_t total = 0;
    for (const MemoryItem& item : items) total += item.bytes;
    return total;
}

int64_t device_bytes(const std::vector<MemoryItem>& items, bool own_memory) {
    int64_t total = 0;
    for (const MemoryItem& item : items)
        if (!own_memory || !item.on_host) total += item.bytes;
    return total;
}

int largest_micro_batch(Dtype dtype, const GPT2Config& config, int seq_len, int64_t global_batch_tokens, int world_size,
                        MemoryOptions options, int64_t available, const std::string& optimizer, bool own_memory) {
    const int shares = std::max(world_size, options.virtual_ranks);  // of a step, in whole micro-batches
    const int64_t sequences = global_batch_tokens / (int64_t(seq_len) * shares);
    const auto bytes = [&](int B) {
        const BatchPlan batch = plan_batch(B, seq_len, 0, world_size);
        return device_bytes(training_memory(dtype, config, batch, options, optimizer), own_memory);
    };
    const int64_t most_tokens = own_memory ? MOST_TOKENS : MOST_TOKENS_ON_CPU;
    const int64_t most_bytes = own_memory ? available : available - available / 10;
    const auto fits = [&](int B) { return int64_t(B) * seq_len <= most_tokens && bytes(B) <= most_bytes; };
    ENSURE(bytes(1) <= available, "--micro-batch auto: one sequence of %d tokens needs %s, but only %s are free; %s",
           seq_len, human_bytes(bytes(1)).c_str(), human_bytes(available).c_str(),
           advise_memory(dtype, config, plan_batch(1, seq_len, 0, world_size), options, available, optimizer).c_str());
    int largest = 1;
    for (int B = 2; fits(B); B++)
        if (global_batch_tokens == 0 || (B <= sequences && sequences % B == 0)) largest = B;
    return largest;
}

// What is left if no option on these ranks makes training fit. CPU ranks share the memory of their machine. So
// neither more ranks on the same machine help, nor --tensor-parallel, whose ranks are on one machine.
static std::string advise_ranks(const GPT2Config& config, const MemoryOptions& options) {
    if (device_memory_is_host())
        return std::string("try a smaller model, or ") + (options.shard_weights ? "" : "--zero 3 on ") +
               "more machines";
    std::string ways = options.shard_weights ? "" : "--zero 3";
    if (options.tensor.count < config.NH && !options.fp8)
        ways +=
            format("%s%s--tensor-parallel", ways.empty() ? "" : " or ", options.tensor.count > 1 ? "a larger " : "");
    return "try a smaller model, or " + ways + (ways.empty() ? "more ranks" : " on more ranks");
}

std::string advise_memory(Dtype dtype, const GPT2Config& config, const BatchPlan& batch, MemoryOptions options,
                          int64_t available, const std::string& optimizer) {
    const auto fits = [&](int B) {
        const BatchPlan smaller = {B, batch.T, batch.world_size, 1, 0};
        return device_bytes(training_memory(dtype, config, smaller, options, optimizer)) <= available;
    };
    if (fits(batch.B)) return "";
    const MemoryOptions given = options;
    std::string text = batch.B > 1 ? "try --micro-batch auto" : "try";
    if (fits(1)) return text;
    if (options.recompute != Recompute::layer) text += " --recompute layer";
    options.recompute = Recompute::layer;
    if (fits(1)) return text;
    if (batch.world_size > 1) {
        if (!options.shard_weights) text += " --zero 3";
        options.shards = batch.world_size;
        options.shard_gradients = options.shard_weights = true;
        if (fits(1)) return text;
    }
    if (options.master_weights) text += " --master-weights off";
    options.master_weights = false;
    return fits(1) ? text : advise_ranks(config, given);
}

std::string describe_memory(const std::vector<MemoryItem>& items) {
    std::string text;
    for (const MemoryItem& item : items)
        if (item.bytes)
            text += format("%s%s %s%s", text.empty() ? "" : ", ", item.purpose, human_bytes(item.bytes).c_str(),
                           item.on_host && !device_memory_is_host() ? " of the host" : "");
    return text;
}

std::string describe_model(const GPT2Config& config) {
    return format("%s, %s, %d channels, %s, vocabulary %d (%d in memory), %s parameters",
                  counted(config.L, "layer").c_str(), counted(config.NH, "head").c_str(), config.C,
                  counted(config.max_T, "position").c_str(), config.V, config.Vp(),
                  with_commas(count_parameters(config)).c_str());
}

std::string describe_batch(const BatchPlan& batch, int tensor_parallel) {
    const std::string ranks = tensor_parallel == 1 ? counted(batch.world_size, "rank")
                                                   : counted(batch.world_size, "group") +
                                                         format(" of %d tensor-parallel ranks", tensor_parallel);
    return format("%s per step = %d sequence%s x %d token%s x %s x %s", counted(batch.tokens_per_step, "token").c_str(),
                  batch.B, batch.B == 1 ? "" : "s", batch.T, batch.T == 1 ? "" : "s", ranks.c_str(),
                  counted(batch.grad_accum_steps, "micro-step").c_str());
}
