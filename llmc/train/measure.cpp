#include "train/measure.h"

#include <algorithm>

#include "base/random.h"
#include "model/mfu.h"
#include "train/init_weights.h"
#include "train/optimizer.h"
#include "train/plan.h"

// Time limit of a micro-step in seconds, estimated by ASSUMED_MFU. A micro-batch with a longer estimate is made
// smaller. If one sequence is estimated longer, nothing is measured. If the first run takes longer, there is no second
// run.
constexpr double MAX_MICRO_STEP_SECONDS = 2.0;

DeviceBuffer<int> random_tokens(int64_t count, int V, Stream stream) {
    std::vector<int> host(static_cast<size_t>(count));
    for (size_t i = 0; i < host.size(); i++) host[i] = int(Philox{1, 2}(i)[0] % uint32_t(V));
    DeviceBuffer<int> tokens(count, "tokens");
    copy_to_device(tokens.data, host.data(), tokens.bytes(), stream);
    wait_for_stream(stream);
    return tokens;
}

template <class floatX>
static MeasuredStep run_steps(const GPT2Config& config, int B, int T, MemoryOptions options, const std::string& rule) {
    const OwnedStream own;
    GPT2<floatX> model(config, Purpose::train, B, T, options);
    model.stream = own.stream;
    Comm single_rank;  // its collectives do nothing
    if (options.tensor.count > 1) model.tensor_ranks = &single_rank;
    Optimizer<floatX> optimizer(model, {rule}, options);
    init_weights(optimizer, 42);
    optimizer.weights_loaded();
    const DeviceBuffer<int> tokens = random_tokens(int64_t(B) * T + 1, config.V, own.stream);

    MeasuredStep measured{B, 0.0, 0.0};
    // The first run includes the first use of the memory; the times of the second run replace its times.
    for (int step = 1; step <= 2 && measured.micro_step < MAX_MICRO_STEP_SECONDS; step++) {
        wait_for_device();
        const double begin = seconds_now();
        optimizer.gradients.begin_step();
        model.zero_gradients();
        model.forward(tokens.data, B, T);
        model.backward(tokens.data, tokens.data + 1, B, T, 0, 1.0f);
        wait_for_device();
        const double update = seconds_now();
        optimizer.gradients.virtual_rank_done(0);
        optimizer.clip(1.0f);
        optimizer.step(1e-4f, step);
        wait_for_device();
        measured.micro_step = update - begin;
        measured.update = seconds_now() - update;
    }
    return measured;
}

void load_libraries(Dtype dtype, const GPT2Config& config, const std::string& optimizer) {
    if (device_memory_is_host()) return;
    const int T = std::min(64, config.max_T), V = std::min(512, config.V);
    const GPT2Config small = {T, V, 1, config.NH, config.C};
    with_dtype(dtype, [&]<class floatX>(floatX) { run_steps<floatX>(small, 1, T, {}, optimizer); });
}

std::optional<MeasuredStep> measure_step(Dtype dtype, const GPT2Config& config, int B, int T, MemoryOptions options,
                                         double peak_flops, const std::string& optimizer) {
    options.virtual_ranks = options.shards = 1;
    options.shard_gradients = options.shard_weights = false;
    const double sequence = flops_per_token(config, T) * T / options.tensor.count / (ASSUMED_MFU * peak_flops);
    if (sequence > MAX_MICRO_STEP_SECONDS) return {};
    B = std::clamp(int(std::min(MAX_MICRO_STEP_SECONDS / sequence, 1e6)), 1, B);
    const int64_t needed = device_bytes(training_memory(dtype, config, plan_batch(B, T, 0, 1), options, optimizer));
    if (needed > device_bytes_free()) return {};
    return with_dtype(dtype, [&]<class floatX>(floatX) -> std::optional<MeasuredStep> {
        return run_steps<floatX>(config, B, T, options, optimizer);
    });
}
