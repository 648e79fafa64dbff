#include "optimizer.h"

#include <type_traits>

#include "ops.h"

template <class floatX>
constexpr bool has_master = !std::is_same_v<floatX, float>;

template <class floatX>
AdamW<floatX>::AdamW(GPT2<floatX>& model, AdamWConfig config)
    : model(model),
      config(config),
      master(has_master<floatX> ? model.layout.total : 0, "fp32 master weights"),
      m(model.layout.total, "AdamW's first moments"),
      v(model.layout.total, "AdamW's second moments"),
      stats(3, "gradient norm") {}

template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config) {
    const int64_t bytes = ParamLayout(config).total * int64_t(sizeof(float));
    return {{"master weights", has_master<floatX> ? bytes : 0}, {"AdamW moments", 2 * bytes}};
}

template <class floatX>
const float* AdamW<floatX>::masters() const {
    if constexpr (has_master<floatX>)
        return master.data;
    else
        return model.weights.data;
}

template <class floatX>
void AdamW<floatX>::set_param(Param p, int l, const float* values) {
    model.set_param(p, l, values);
    if constexpr (has_master<floatX>) {
        const int64_t bytes = model.layout.size(p) * int64_t(sizeof(float));
        copy_to_device(master.data + model.layout.offset(p, l), values, bytes, model.stream);
        wait_for_stream(model.stream);
    }
}

template <class floatX>
void AdamW<floatX>::clip(float max_norm) {
    ops::sum_of_squares(stats.data, model.grads.data, model.layout.total, model.stream);
    ops::clip_factor(stats.data + 1, stats.data + 2, stats.data, max_norm, model.stream);
}

template <class floatX>
void AdamW<floatX>::step(float lr, int step) {
    for (int b = 0; b < model.layout.num_buckets(); b++) {
        const Bucket bucket = model.layout.bucket(b);
        const int64_t at = bucket.begin;
        float* bucket_master = has_master<floatX> ? master.data + at : nullptr;
        ops::adamw(model.weights.data + at, bucket_master, m.data + at, v.data + at, model.grads.data + at, factor(),
                   bucket.end - at, bucket.decayed_end - at, config, lr, step, model.stream);
        model.pack_bucket(b);
    }
}

template struct AdamW<float>;
template struct AdamW<bf16>;
template std::vector<MemoryItem> optimizer_memory<float>(const GPT2Config&);
template std::vector<MemoryItem> optimizer_memory<bf16>(const GPT2Config&);
