#include "optimizer.h"

#include <cstring>
#include <type_traits>

#include "ops.h"

template <class floatX>
static int64_t master_elements(const GPT2Config& config, Saving saving) {
    const bool apart = saving.master_weights && !std::is_same_v<floatX, float>;
    return apart ? ParamLayout(config).total : 0;
}

template <class floatX>
AdamW<floatX>::AdamW(GPT2<floatX>& model, AdamWConfig config, Saving saving)
    : model(model),
      config(config),
      master(master_elements<floatX>(model.config, saving), "fp32 master weights (--master-weights)"),
      m(model.layout.total, "AdamW's first moments"),
      v(model.layout.total, "AdamW's second moments"),
      stats(3, "gradient norm") {}

template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, Saving saving) {
    const int64_t size = sizeof(float), masters = master_elements<floatX>(config, saving);
    return {{"master weights", masters * size}, {"AdamW moments", 2 * ParamLayout(config).total * size}};
}

template <class floatX>
void AdamW<floatX>::set_param(Param p, int l, const float* values) {
    model.set_param(p, l, values);
    if (!master.data) return;
    const int64_t bytes = model.layout.size(p) * int64_t(sizeof(float));
    copy_to_device(master.data + model.layout.offset(p, l), values, bytes, model.stream);
    wait_for_stream(model.stream);
}

template <class floatX>
void AdamW<floatX>::get_param(float* values, Param p, int l) {
    const int64_t size = model.layout.size(p);
    if (master.data) {
        const float* from = master.data + model.layout.offset(p, l);
        copy_to_host(values, from, size * int64_t(sizeof(float)), model.stream);
        wait_for_stream(model.stream);
        return;
    }
    // They come into the second half of values: float i then covers at most bf16 number i, which has been read.
    char* unwidened = reinterpret_cast<char*>(values) + size * int64_t(sizeof(float) - sizeof(floatX));
    copy_to_host(unwidened, model.w(p, l), size * int64_t(sizeof(floatX)), model.stream);
    wait_for_stream(model.stream);
    for (int64_t i = 0; i < size; i++) {
        floatX w;
        std::memcpy(&w, unwidened + i * int64_t(sizeof(floatX)), sizeof w);
        values[i] = float(w);
    }
}

template <class floatX>
void AdamW<floatX>::clip(float max_norm) {
    ops::sum_of_squares(stats.data, model.grads.data, model.layout.total, model.stream);
    ops::clip_factor(stats.data + 1, stats.data + 2, stats.data, max_norm, model.stream);
}

template <class floatX>
void AdamW<floatX>::step(float lr, int step) {
    ops::adamw(model.weights.data, master.data, m.data, v.data, model.grads.data, factor(), 0, model.layout.total,
               model.layout.decay_pattern(), config, lr, step, model.stream);
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
}

template struct AdamW<float>;
template struct AdamW<bf16>;
template std::vector<MemoryItem> optimizer_memory<float>(const GPT2Config&, Saving);
template std::vector<MemoryItem> optimizer_memory<bf16>(const GPT2Config&, Saving);
