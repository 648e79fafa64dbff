#include "plan.h"

#include <algorithm>

#include "optimizer.h"

BatchPlan plan_batch(int micro_batch, int seq_len, int64_t global_batch_tokens, int world_size) {
    const int64_t once = int64_t(micro_batch) * seq_len * world_size;
    if (global_batch_tokens == 0) global_batch_tokens = once;
    const int64_t below = global_batch_tokens / once * once, above = below + once;
    const bool nearer_below = below > 0 && global_batch_tokens - below < above - global_batch_tokens;
    ENSURE(
        global_batch_tokens % once == 0,
        "--global-batch %lld is not a multiple of %lld tokens = --micro-batch %d x --seq-len %d x %d rank%s; try %lld",
        static_cast<long long>(global_batch_tokens), static_cast<long long>(once), micro_batch, seq_len, world_size,
        world_size == 1 ? "" : "s", static_cast<long long>(nearer_below ? below : above));
    return {micro_batch, seq_len, world_size, narrow(global_batch_tokens / once), global_batch_tokens};
}

template <class floatX>
std::vector<MemoryItem> training_memory(const GPT2Config& config, const BatchPlan& batch, int head_rows) {
    std::vector<MemoryItem> items = model_memory<floatX>(config, Purpose::train, batch.B, batch.T, head_rows);
    for (const MemoryItem& item : optimizer_memory<floatX>(config)) items.push_back(item);
    const ParamLayout layout(config);
    int64_t largest = 0;
    for (const ParamSpec& spec : param_table) largest = std::max<int64_t>(largest, layout.size(spec.id));
    items.push_back({"loading", largest * int64_t(sizeof(float))});
    return items;
}

int64_t total_bytes(const std::vector<MemoryItem>& items) {
    int64_t total = 0;
    for (const MemoryItem& item : items) total += item.bytes;
    return total;
}

std::string describe_memory(const std::vector<MemoryItem>& items) {
    std::string text;
    for (const MemoryItem& item : items)
        if (item.bytes)
            text += format("%s%s %s", text.empty() ? "" : ", ", item.purpose, human_bytes(item.bytes).c_str());
    return text;
}

std::string describe_model(const GPT2Config& config) {
    return format("%d layers, %d heads, %d channels, %d positions, vocabulary %d (%d in memory), %s parameters",
                  config.L, config.NH, config.C, config.max_T, config.V, config.Vp(),
                  with_commas(count_parameters(config)).c_str());
}

std::string describe_batch(const BatchPlan& batch) {
    return format("%s tokens per step = %d sequences x %d tokens x %d rank%s x %d micro-step%s",
                  with_commas(batch.tokens_per_step).c_str(), batch.B, batch.T, batch.world_size,
                  batch.world_size == 1 ? "" : "s", batch.grad_accum_steps, batch.grad_accum_steps == 1 ? "" : "s");
}

template std::vector<MemoryItem> training_memory<float>(const GPT2Config&, const BatchPlan&, int);
template std::vector<MemoryItem> training_memory<bf16>(const GPT2Config&, const BatchPlan&, int);
