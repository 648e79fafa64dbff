#include "optimizer.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ops.h"

constexpr Comm::Ticket HERE = -1;

static Comm& alone() {
    static Comm comm;
    return comm;
}

template <class floatX>
static int64_t master_elements(const ParamLayout& layout, Saving saving) {
    const bool apart = saving.master_weights && !std::is_same_v<floatX, float>;
    return apart ? layout.total / saving.shards : 0;
}

template <class floatX>
AdamW<floatX>::AdamW(GPT2<floatX>& model, AdamWConfig config, Saving saving)
    : AdamW(model, config, saving, alone(), WireType::fp32) {}

template <class floatX>
AdamW<floatX>::AdamW(GPT2<floatX>& model, AdamWConfig config, Saving saving, Comm& comm, WireType wire)
    : model(model),
      config(config),
      gradients(comm, model.layout, {saving.parts, saving.shards, wire}, model.grads.data, model.acts.loss,
                &model.stream),
      shards(saving.shards),
      part(saving.shards > 1 ? comm.part : 0),
      master(master_elements<floatX>(model.layout, saving), "fp32 master weights (--master-weights, --zero)"),
      m(model.layout.total / shards, "AdamW's first moments (--zero)"),
      v(model.layout.total / shards, "AdamW's second moments (--zero)"),
      stats(2, "gradient norm"),
      gathering(model.layout.num_buckets(), HERE) {}

template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, Saving saving, int world_size) {
    const ParamLayout layout(config, saving.parts);
    const int64_t size = sizeof(float), masters = master_elements<floatX>(layout, saving);
    return {{"master weights", masters * size},
            {"AdamW moments", 2 * layout.total / saving.shards * size},
            {"sums of a step", gradient_sum_bytes(layout, saving.parts, world_size)},
            {"gradients on their way", saving.wire_buffer ? largest_bucket(layout) * int64_t(sizeof(bf16)) : 0}};
}

template <class floatX>
typename AdamW<floatX>::Piece AdamW<floatX>::piece_of(int b, int part) const {
    const Bucket bucket = model.layout.bucket(b);
    const int64_t count = (bucket.end - bucket.begin) / shards;
    return {bucket.begin + part * count, count, bucket.begin / shards};
}

static int bucket_of(Param p, int l) { return param_table[p].scope == Scope::model ? 0 : 1 + l; }

template <class floatX>
void AdamW<floatX>::set_state(StateKind kind, Param p, int l, const float* values) {
    if (kind == StateKind::weights) model.set_param(p, l, values);
    const DeviceBuffer<float>& to = state(kind);
    if (!to.data) return;
    const Piece piece = piece_of(bucket_of(p, l), part);
    const int64_t offset = model.layout.offset(p, l);
    const int64_t begin = std::max(offset, piece.begin);
    const int64_t end = std::min(offset + model.layout.size(p), piece.begin + piece.count);
    if (begin >= end) return;
    copy_to_device(to.data + piece.at + begin - piece.begin, values + begin - offset,
                   (end - begin) * int64_t(sizeof(float)), model.stream);
    wait_for_stream(model.stream);
}

// A tensor of fp32 state, whole: the owners' pieces come together where the tensor's gradient was.
template <class floatX>
const float* AdamW<floatX>::gather_state(const float* from, Param p, int l) {
    const int64_t offset = model.layout.offset(p, l), size = model.layout.size(p);
    if (shards == 1) return from + offset;
    float* whole = model.grads.data;
    Comm::Ticket last = 0;
    for (int q = 0; q < shards; q++) {
        const Piece piece = piece_of(bucket_of(p, l), q);
        const int64_t begin = std::max(offset, piece.begin), end = std::min(offset + size, piece.begin + piece.count);
        if (begin >= end) continue;
        const int64_t bytes = (end - begin) * int64_t(sizeof(float));
        if (q == part) copy_on_device(whole + begin, from + piece.at + begin - piece.begin, bytes, model.stream);
        last = gradients.comm.broadcast(whole + begin, bytes, q, model.stream);
    }
    gradients.comm.wait(last, model.stream);
    return whole + offset;
}

template <class floatX>
void AdamW<floatX>::get_state(float* values, StateKind kind, Param p, int l) {
    const int64_t size = model.layout.size(p);
    if (const float* from = state(kind).data) {
        copy_to_host(values, gather_state(from, p, l), size * int64_t(sizeof(float)), model.stream);
        wait_for_stream(model.stream);
        return;
    }
    need_weights(bucket_of(p, l));
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
Comm::Ticket AdamW<floatX>::draw_bucket(int b, uint64_t seed) {
    Comm& comm = gradients.comm;
    const ParamLayout& layout = model.layout;
    const Bucket bucket = layout.bucket(b);
    const int64_t size = (bucket.end - bucket.begin) / comm.world_size;
    std::vector<float> values;
    for (const ParamSpec& spec : param_table) {
        if ((spec.scope == Scope::layer) != (b > 0)) continue;
        const int l = std::max(0, b - 1);
        const int64_t offset = layout.offset(spec.id, l);
        const int64_t begin = std::max(offset, bucket.begin + comm.part * size),
                      end = std::min(offset + layout.size(spec.id), bucket.begin + (comm.part + 1) * size);
        if (begin >= end) continue;
        values.resize(end - begin);
        init_param(values.data(), layout, spec.id, l, seed, begin - offset, end - offset);
        copy_to_device(model.grads.data + begin, values.data(), (end - begin) * int64_t(sizeof(float)), model.stream);
        wait_for_stream(model.stream);
    }
    return comm.all_gather(model.grads.data + bucket.begin, comm.world_size * size * int64_t(sizeof(float)),
                           model.stream);
}

template <class floatX>
void AdamW<floatX>::draw_weights(uint64_t seed) {
    Comm::Ticket last = 0;
    for (int b = 0; b < model.layout.num_buckets(); b++) last = draw_bucket(b, seed);
    gradients.comm.wait(last, model.stream);
    std::vector<float> values;
    for (const ParamSpec& spec : param_table)
        for (int l = 0; l < model.layout.layers(spec.id); l++) {
            values.resize(model.layout.size(spec.id));
            copy_to_host(values.data(), model.grads.data + model.layout.offset(spec.id, l),
                         int64_t(values.size() * sizeof(float)), model.stream);
            wait_for_stream(model.stream);
            set_state(StateKind::weights, spec.id, l, values.data());
        }
}

template <class floatX>
void AdamW<floatX>::clip(float max_norm, Said said) {
    gradients.finish(said);
    ops::clip_factor(stats.data, stats.data + 1, gradients.squares(), max_norm, model.stream);
}

template <class floatX>
void AdamW<floatX>::step(float lr, int step) {
    const int buckets = model.layout.num_buckets();
    const DecayPattern decay = model.layout.decay_pattern();
    if (shards == 1) {
        ops::adamw(model.weights.data, master.data, m.data, v.data, model.grads.data, factor(), 0, model.layout.total,
                   decay, config, lr, step, model.stream);
        for (int b = 0; b < buckets; b++) model.pack_bucket(b);
        return;
    }
    for (int b = 0; b < buckets; b++) {
        const Piece piece = piece_of(b, part);
        floatX* weights = model.weights.data + piece.begin;
        ops::adamw(weights, master.data ? master.data + piece.at : nullptr, m.data + piece.at, v.data + piece.at,
                   model.grads.data + piece.begin, factor(), piece.begin, piece.count, decay, config, lr, step,
                   model.stream);
        gradients.comm.call_next("gather bucket", b);
        gathering[b] = gradients.comm.all_gather(model.weights.data + model.layout.bucket(b).begin,
                                                 shards * piece.count * int64_t(sizeof(floatX)), model.stream);
    }
}

template <class floatX>
void AdamW<floatX>::need_weights(int b) {
    if (gathering[b] == HERE) return;
    gradients.comm.wait(gathering[b], model.stream, {"wait for weights of bucket", b});
    gathering[b] = HERE;
    model.pack_bucket(b);
}

template <class floatX>
bool AdamW<floatX>::weights_pending() const {
    return std::any_of(gathering.begin(), gathering.end(), [](Comm::Ticket ticket) { return ticket != HERE; });
}

template struct AdamW<float>;
template struct AdamW<bf16>;
template std::vector<MemoryItem> optimizer_memory<float>(const GPT2Config&, Saving, int);
template std::vector<MemoryItem> optimizer_memory<bf16>(const GPT2Config&, Saving, int);
