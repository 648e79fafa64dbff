#include "train/init_weights.h"

#include <algorithm>

// Each rank computes its shard of the bucket, in the memory of the gradients. An all-gather completes the bucket.
template <class floatX>
static Comm::Ticket init_bucket(GPT2<floatX>& model, Comm& comm, int b, uint64_t seed) {
    const ParamLayout& layout = model.layout;
    const Bucket bucket = layout.bucket(b);
    const int64_t size = (bucket.end - bucket.begin) / comm.world_size;
    float* values_of_bucket = model.grads.bucket(b);
    std::vector<float> values;
    for (const ParamSpec& spec : param_table) {
        if ((spec.scope == Scope::layer) != (b > 0)) continue;
        const int l = std::max(0, b - 1);
        const int64_t offset = layout.offset(spec.id, l);
        const int64_t begin = std::max(offset, bucket.begin + comm.shard_index * size),
                      end = std::min(offset + layout.size(spec.id), bucket.begin + (comm.shard_index + 1) * size);
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
    return comm.all_gather(values_of_bucket, comm.world_size * size * int64_t(sizeof(float)), model.stream);
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

template void init_weights(Optimizer<float>&, uint64_t);
template void init_weights(Optimizer<bf16>&, uint64_t);
