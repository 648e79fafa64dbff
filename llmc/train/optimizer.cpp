#include "train/optimizer.h"

#include <cstring>
#include <numeric>
#include <type_traits>

#include "ops/ops.h"

const Groups& single_rank_groups() {
    static Comm comm;
    static const Groups groups = make_groups(comm, 1);
    return groups;
}

// ---- the weights of all ranks

template <class floatX>
ParamGather<floatX>::ParamGather(GPT2<floatX>& model, Comm& comm, const MemoryOptions& options)
    : model(model),
      comm(comm),
      shards(options.shards),
      shard_index(options.shards > 1 ? comm.shard_index : 0),
      shard(options.shard_weights ? model.layout.total / options.shards : 0, "this rank's shard of the weights"),
      tickets(size_t(model.layout.num_buckets()), COMPLETE),
      resident_bucket(size_t(1 + model.weights.layer_slots)) {
    std::iota(resident_bucket.begin(), resident_bucket.end(), 0);
}

template <class floatX>
floatX* ParamGather<floatX>::local_shard(int b) const {
    const BucketShard own = own_shard(b);
    return sharded() ? shard.data + own.at : model.weights.bucket(b) + own.begin - model.layout.bucket(b).begin;
}

// Queues the gather of bucket b. With ZeRO-3 its memory may hold another bucket, whose gather must have ended.
template <class floatX>
void ParamGather<floatX>::gather(int b) {
    const int64_t bytes = model.layout.bucket(b).size() * int64_t(sizeof(floatX)), own_bytes = bytes / shards;
    floatX* whole = model.weights.bucket(b);
    if (sharded()) {
        int& holder = resident_bucket[model.weights.slot(b)];
        complete(holder);
        holder = b;
        char* own = reinterpret_cast<char*>(whole) + shard_index * own_bytes;
        copy_on_device(own, local_shard(b), own_bytes, model.stream);
    }
    tickets[b] = comm.all_gather(whole, bytes, model.stream);
}

template <class floatX>
void ParamGather<floatX>::wait(int b) {
    if (sharded() && resident_bucket[model.weights.slot(b)] != b) gather(b);
    const bool was_packed = tickets[b] == COMPLETE && (!sharded() || b == 0 || b == packed_layer);
    complete(b);
    if (!was_packed) model.pack_bucket(b);
    if (sharded() && b > 0) gather_next(b);
}

// Called when layer b - 1 is computed next. Queues the gather of the layer after it, into the memory of the layer
// before it. The layers run upwards in forward and downwards in backward.
template <class floatX>
void ParamGather<floatX>::gather_next(int b) {
    const int next = b == last_layer - 1 ? b - 1 : b + 1;
    packed_layer = last_layer = b;
    if (next >= 1 && next < model.layout.num_buckets() && resident_bucket[model.weights.slot(next)] != next)
        gather(next);
}

// ---- AdamW

constexpr int64_t CHUNK = 1 << 20;  // elements of a tensor that a tensor-parallel rank sends at a time

template <class floatX>
static int64_t master_elements(const ParamLayout& layout, MemoryOptions options) {
    const bool separate = options.master_weights && !std::is_same_v<floatX, float>;
    return separate ? layout.total / options.shards : 0;
}

static int64_t second_moment_elements(const ParamLayout& layout, const MemoryOptions& o) {
    return SlotLayout{layout, o.shards, 0, o.muon}.total();
}
static bool offloads_moments(const MemoryOptions& o) {
    return o.offload == Offload::moments || o.offload == Offload::all;
}
static bool offloads_master(const MemoryOptions& o) {
    return o.offload == Offload::master || o.offload == Offload::all;
}

template <class floatX>
Optimizer<floatX>::Optimizer(GPT2<floatX>& model, OptimizerConfig config, MemoryOptions options, const Groups& groups)
    : model(model),
      full_layout(model.config),
      config(config),
      gradients(groups, model.layout, options, model.grads, model.acts.loss, &model.stream, config.adamw.seed),
      weights(model, groups.dp, options),
      master(master_elements<floatX>(model.layout, options), "fp32 master weights (--master-weights, --zero)",
             offloads_master(options)),
      m(model.layout.total / options.shards, options.moments, offloads_moments(options)),
      v(second_moment_elements(model.layout, options), options.moments, offloads_moments(options)),
      chunk(options.tensor.count > 1 ? CHUNK : 0, "a tensor of another tensor-parallel rank") {
    if (options.muon) muon.emplace(model.layout, options, groups);
    if (options.shards > 1) model.on_wait_for_weights = [this](int bucket) { weights.wait(bucket); };
}

template <class floatX>
std::vector<MemoryItem> optimizer_memory(const GPT2Config& config, MemoryOptions options, int data_parallel) {
    const ParamLayout layout(config, options.virtual_ranks, options.tensor);
    const int64_t size = sizeof(float), masters = master_elements<floatX>(layout, options);
    const int64_t own = layout.total / options.shards, moments = own + second_moment_elements(layout, options);
    const bool rounds = options.grad_dtype == Dtype::bf16 && data_parallel > 1 && built_with_nccl();  // a bucket
    return {{"master weights", masters * size, offloads_master(options)},
            {"moments", MomentBuffer::element_bytes(moments, options.moments), offloads_moments(options)},
            {"exponents of moments", MomentBuffer::exponent_bytes(moments, options.moments)},
            {"shard of weights", options.shard_weights ? own * int64_t(sizeof(floatX)) : 0},
            {"sums of gradients", count_sums(layout, options) * (options.grad_accum == Dtype::bf16 ? 2 : size)},
            {"partial sums", gradient_sum_bytes(layout, options, data_parallel)},
            {"Newton-Schulz", options.muon ? muon_bytes<floatX>(layout, options) : 0},
            {"received tensor", options.tensor.count > 1 ? CHUNK * size : 0},
            {"gradients in bf16", rounds ? largest_bucket(layout) * int64_t(sizeof(bf16)) : 0}};
}

template <class floatX>
void Optimizer<floatX>::set_state(Slot slot, Param p, int l, const float* values) {
    if (model.layout.shard.count == 1) return set_shard(slot, p, l, values);
    std::vector<float> own(static_cast<size_t>(model.layout.size(p)));
    take_shard(own.data(), values, model.layout, p);
    set_shard(slot, p, l, own.data());
}

template <class floatX>
void Optimizer<floatX>::set_shard(Slot slot, Param p, int l, const float* values) {
    if (slot == WEIGHTS && !weights.sharded()) model.set_param(p, l, values);
    if (!has(slot, p)) return;
    const int b = model.layout.bucket_of(p, l);
    const BucketShard shard = weights.own_shard(b);
    const int64_t offset = model.layout.offset(p, l);
    const int64_t begin = std::max(offset, shard.begin);
    const int64_t count = std::min(offset + model.layout.size(p), shard.begin + shard.count) - begin;
    if (count <= 0) return;
    const int64_t at = slot_layout(slot).at(b, begin);
    const float* own = values + begin - offset;
    if (slot == WEIGHTS && weights.sharded()) copy_rounded(weights.shard.data + at, own, count, model.stream);
    const bool converts = is_converted(slot);
    float* const to = converts ? model.g(p, l) : floats(slot) ? floats(slot) + at : nullptr;
    if (!to) return;
    // The last block of a moment goes beyond the tensor's end: what the gradients' memory has there is no value.
    if (converts) fill_zero(to + count, (round_up(count, FLAT_ALIGN) - count) * int64_t(sizeof(float)), model.stream);
    copy_to_device(to, own, count * int64_t(sizeof(float)), model.stream);
    if (converts) ops::store_moment(state(slot, at), to, which(slot), round_up(count, FLAT_ALIGN), model.stream);
    wait_for_stream(model.stream);
}

template <class floatX>
void Optimizer<floatX>::weights_loaded() {
    for (int b = 0; b < model.layout.num_buckets(); b++) {
        if (weights.sharded())
            weights.shard_updated(b);
        else
            model.pack_bucket(b);  // every rank has loaded the whole bucket
    }
}

// Returns a whole tensor of the state in fp32, on the rank of shard 0. The other ranks broadcast theirs into its
// gradient. from: the slot's fp32 buffer on the device; null: state that is converted.
template <class floatX>
const float* Optimizer<floatX>::gather_state(Slot slot, const float* from, Param p, int l) {
    const int64_t offset = model.layout.offset(p, l), size = model.layout.size(p);
    const SlotLayout places = slot_layout(slot);
    if (weights.shards == 1 && from) return from + places.at(p, l);
    float* whole = model.g(p, l);
    Comm::Ticket last = 0;
    for (int q = 0; q < weights.shards; q++) {
        const int b = model.layout.bucket_of(p, l);
        const BucketShard shard = shard_of(model.layout, b, weights.shards, q);
        const int64_t begin = std::max(offset, shard.begin), end = std::min(offset + size, shard.begin + shard.count);
        if (begin >= end) continue;
        const int64_t bytes = (end - begin) * int64_t(sizeof(float)), at = places.at(b, begin);
        float* to = whole + begin - offset;
        if (q == weights.shard_index && from) copy_on_device(to, from + at, bytes, model.stream);
        if (q == weights.shard_index && !from)
            ops::widen_moment(to, state(slot, at), which(slot), round_up(end - begin, FLAT_ALIGN), model.stream);
        if (q > 0) last = gradients.comm.broadcast(to, bytes, q, model.stream);
    }
    gradients.comm.wait(last, model.stream);
    return whole;
}

// Each tensor-parallel rank in turn sends its shard to the others, one chunk at a time.
template <class floatX>
void Optimizer<floatX>::get_state(float* values, Slot slot, Param p, int l) {
    ParamLayout layout = model.layout;
    if (layout.shard.count == 1) return get_shard(values, slot, p, l);
    Comm& comm = gradients.tensor_comm;
    const int64_t size = layout.size(p);
    std::vector<float> own(static_cast<size_t>(size)), shard(static_cast<size_t>(size));
    get_shard(own.data(), slot, p, l);
    if (values) std::fill(values, values + full_layout.size(p), 0.0f);
    for (layout.shard.index = 0; layout.shard.index < layout.shard.count; layout.shard.index++) {
        for (int64_t at = 0; at < size; at += CHUNK) {
            const int64_t bytes = std::min(CHUNK, size - at) * int64_t(sizeof(float));
            if (layout.shard.index == comm.shard_index)
                copy_to_device(chunk.data, own.data() + at, bytes, model.stream);
            comm.wait(comm.broadcast(chunk.data, bytes, layout.shard.index, model.stream), model.stream);
            if (values) copy_to_host(shard.data() + at, chunk.data, bytes, model.stream);
            wait_for_stream(model.stream);
        }
        if (values) put_shard(values, shard.data(), layout, p);
    }
}

// Reads model values as floats. The copy goes to the end of `values`, so that float i overwrites no bf16 value after i.
template <class floatX>
static void copy_widened(float* values, const floatX* from, int64_t count, Stream stream) {
    char* unwidened = reinterpret_cast<char*>(values) + count * int64_t(sizeof(float) - sizeof(floatX));
    copy_to_host(unwidened, from, count * int64_t(sizeof(floatX)), stream);
    wait_for_stream(stream);
    if constexpr (std::is_same_v<floatX, float>) return;
    for (int64_t i = 0; i < count; i++) {
        floatX w;
        std::memcpy(&w, unwidened + i * int64_t(sizeof(floatX)), sizeof w);
        values[i] = float(w);
    }
}

template <class floatX>
void Optimizer<floatX>::get_shard(float* values, Slot slot, Param p, int l) {
    const int64_t size = model.layout.size(p);
    const float* from = floats(slot);
    if constexpr (std::is_same_v<floatX, float>)
        if (slot == WEIGHTS) from = weights.shard.data;
    if (from || is_converted(slot)) {
        from = gather_state(slot, from, p, l);
        if (!values) return;
        copy_to_host(values, from, size * int64_t(sizeof(float)), model.stream);
        return wait_for_stream(model.stream);
    }
    weights.wait(model.layout.bucket_of(p, l));
    if (values) copy_widened(values, model.w(p, l), size, model.stream);
}

template <class floatX>
void Optimizer<floatX>::clip(float max_norm, RankStatus status, StepLimits limits) {
    const ProfileRange range("clip");
    gradients.finish(status);
    if (config.skip_nan) fill_zero(stats.data, stats.bytes(), model.stream);  // clip_factor keeps a NaN
    ops::clip_factor(stats.data, stats.data + 1, gradients.grad_norm_squared(), gradients.step_loss(), max_norm, limits,
                     model.stream);
}

// Updates elements begin .. end of the flat buffer by AdamW, in place: some of this rank's shard of bucket b.
template <class floatX>
void Optimizer<floatX>::update(int b, int64_t begin, int64_t end, float lr, int step) {
    const BucketShard own = weights.own_shard(b);
    const int64_t from = begin - own.begin, at = own.at + from;
    ops::adamw(weights.local_shard(b) + from, master.data ? master.data + at : nullptr, m.from(at),
               v.from(slot_layout(SECOND_MOMENT).at(b, begin)), gradients.reduced_grads(b, begin, end), factor(), begin,
               end - begin, model.layout.decay_pattern(), config.adamw, lr, step, model.stream);
}

// The momentum of a layer's matrices, in the memory of their gradients. This rank computes it for its shard.
template <class floatX>
float* Optimizer<floatX>::momentum(int b, int step) {
    const Bucket bucket = model.layout.bucket(b);
    const BucketShard own = weights.own_shard(b);
    float* const whole = model.grads.bucket(b);
    const int64_t count = std::clamp<int64_t>(bucket.decayed_end - own.begin, 0, own.count);
    ops::muon_momentum(whole + own.begin - bucket.begin, m.from(own.at),
                       gradients.reduced_grads(b, own.begin, own.begin + count), factor(), own.begin, count,
                       Muon<floatX>::MOMENTUM, config.adamw.seed, step, model.stream);
    if (weights.shards > 1) {
        Comm& comm = gradients.comm;
        comm.wait(comm.all_gather(whole, bucket.size() * int64_t(sizeof(float)), model.stream), model.stream);
    }
    return whole;
}

// Makes the momentum of buckets b to end - 1 orthogonal.
template <class floatX>
Comm::Ticket Optimizer<floatX>::begin_muon(int b, int end, int step) {
    std::vector<float*> buckets;
    for (int bucket = b; bucket < end; bucket++) buckets.push_back(momentum(bucket, step));
    return muon->orthogonalize(buckets, b - 1, model.stream);
}

template <class floatX>
void Optimizer<floatX>::finish_muon(int b, float lr, int step) {
    const Bucket bucket = model.layout.bucket(b);
    const BucketShard own = weights.own_shard(b);
    const int64_t own_end = own.begin + own.count;
    for (const MuonMatrix& matrix : muon->matrices) {
        const int64_t begin = bucket.begin + matrix.begin;
        const int64_t from = std::max(begin, own.begin), to = std::min(begin + matrix.size(), own_end);
        if (from >= to) continue;
        const auto* direction = reinterpret_cast<const floatX*>(model.grads.bucket(b) + matrix.begin);
        const int64_t at = from - own.begin;
        ops::muon_update(weights.local_shard(b) + at, master.data ? master.data + own.at + at : nullptr,
                         direction + from - begin, factor(), from, to - from, matrix.scale(), config.adamw, lr, step,
                         model.stream);
    }
    const int64_t rest = std::max(bucket.decayed_end, own.begin);  // biases and LayerNorms
    if (rest < own_end) update(b, rest, own_end, lr, step);
}

template <class floatX>
void Optimizer<floatX>::step(float lr, int step) {
    const ProfileRange range("update");
    const int buckets = model.layout.num_buckets();
    const auto updated = [&](int b) { weights.shards == 1 ? model.pack_bucket(b) : weights.shard_updated(b); };
    if (weights.shards == 1 && !muon && !gradients.rounded_shard.data) {  // one call for all buckets
        update(0, 0, model.layout.total, lr, step);
        for (int b = 0; b < buckets; b++) updated(b);
        return;
    }
    for (int b = 0; b < (muon ? 1 : buckets); b++) {
        const BucketShard own = weights.own_shard(b);
        update(b, own.begin, own.begin + own.count, lr, step);
        updated(b);
    }
    if (!muon) return;
    const auto end_of = [&](int b) { return std::min(b + muon->stacks.layers_at_once, buckets); };
    Comm::Ticket ticket = begin_muon(1, end_of(1), step), next = 0;
    for (int b = 1; b < buckets; ticket = next) {
        const int end = end_of(b);
        if (end < buckets) next = begin_muon(end, end_of(end), step);  // while other ranks' matrices arrive
        gradients.comm.wait(ticket, model.stream);
        for (; b < end; b++) {
            finish_muon(b, lr, step);
            updated(b);
        }
    }
}

// Each rank computes its shard of the bucket, in the memory of the gradients. An all-gather completes the bucket.
template <class floatX>
static Comm::Ticket init_bucket(GPT2<floatX>& model, Comm& comm, int b, uint64_t seed) {
    const ParamLayout& layout = model.layout;
    const Bucket bucket = layout.bucket(b);
    const BucketShard own = shard_of(layout, b, comm.world_size, comm.shard_index);
    float* values_of_bucket = model.grads.bucket(b);
    std::vector<float> values;
    for (const ParamSpec& spec : param_table) {
        if ((spec.scope == Scope::layer) != (b > 0)) continue;
        const int l = std::max(0, b - 1);
        const int64_t offset = layout.offset(spec.id, l);
        const int64_t begin = std::max(offset, own.begin),
                      end = std::min(offset + layout.size(spec.id), own.begin + own.count);
        if (begin >= end) continue;
        values.assign(size_t(end - begin), 0.0f);
        // Elements that are adjacent in the whole tensor, too.
        for_each_run(layout, spec.id, [&](int64_t at, int64_t whole, int64_t count) {
            const int64_t from = std::max(at, begin - offset), to = std::min(at + count, end - offset);
            if (from < to)
                init_param(values.data() + from - (begin - offset), layout.config, spec.id, l, seed, whole + from - at,
                           whole + to - at);
        });
        copy_to_device(values_of_bucket + begin - bucket.begin, values.data(), (end - begin) * int64_t(sizeof(float)),
                       model.stream);
        wait_for_stream(model.stream);
    }
    return comm.all_gather(values_of_bucket, bucket.size() * int64_t(sizeof(float)), model.stream);
}

template <class floatX>
void init_weights(Optimizer<floatX>& optimizer, uint64_t seed) {
    GPT2<floatX>& model = optimizer.model;
    Comm& comm = optimizer.gradients.comm;
    std::vector<float> values;
    for (int b = 0; b < model.layout.num_buckets(); b++) {
        comm.wait(init_bucket(model, comm, b, seed), model.stream);
        for (const ParamSpec& spec : param_table) {
            if ((spec.scope == Scope::layer) != (b > 0)) continue;
            const int l = std::max(0, b - 1);
            values.resize(model.layout.size(spec.id));
            copy_to_host(values.data(), model.g(spec.id, l), int64_t(values.size() * sizeof(float)), model.stream);
            wait_for_stream(model.stream);
            optimizer.set_shard(WEIGHTS, spec.id, l, values.data());
        }
    }
}

template struct ParamGather<float>;
template struct ParamGather<bf16>;
template struct Optimizer<float>;
template struct Optimizer<bf16>;
template std::vector<MemoryItem> optimizer_memory<float>(const GPT2Config&, MemoryOptions, int);
template std::vector<MemoryItem> optimizer_memory<bf16>(const GPT2Config&, MemoryOptions, int);
template void init_weights(Optimizer<float>&, uint64_t);
template void init_weights(Optimizer<bf16>&, uint64_t);
