#include "train/fit.h"

#include <algorithm>

#include "model/mfu.h"
#include "train/report.h"

// FLOPs that backward repeats per token. --recompute layer repeats, for all layers but the last, attention and 8/12 of
// a layer's matmuls (Recompute in model/gpt2.h). GELU's are not counted, as in mfu.h.
static double recomputed_flops(const GPT2Config& config, int T, const std::string& recompute) {
    if (recompute != "layer") return 0.0;
    const double C = config.C, matmuls = 2.0 * 8.0 * C * C, attention = 2.0 * C * double(T);
    return (config.L - 1) * (matmuls + attention);
}

static Layout layout_of(Dtype dtype, const Options& o, const GPT2Config& config, int T, const FitDevices& devices,
                        int B) {
    const int world_size = devices.places.world_size, data_parallel = world_size / o.tensor_parallel;
    const BatchPlan batch = plan_batch(B, T, o.global_batch_tokens, data_parallel);
    Layout layout = {o.tensor_parallel, o.sequence_parallel, o.zero, o.recompute, batch, 0, {}, 0.0};
    const MemoryOptions options = memory_options_of(o, data_parallel);
    layout.bytes = device_bytes(training_memory(dtype, config, layout.batch, options, o.optimizer));
    layout.sent = traffic_of(config, traffic_options_of(dtype, o, layout.batch), devices.places).per_step;
    const double flops = (flops_per_token(config, T) + recomputed_flops(config, T, o.recompute)) *
                         double(layout.batch.tokens_per_step) / world_size;
    layout.seconds = flops / (FIT_UTILIZATION * devices.peak_flops) + double(layout.sent.inside) / devices.bandwidth;
    if (layout.sent.between > 0) layout.seconds += double(layout.sent.between) / devices.network;
    return layout;
}

// The numbers of tensor-parallel ranks that the model, the hosts, and a global batch in micro-batches of one sequence
// allow. Refuses a global batch that allows none.
static std::vector<int> possible_tensor_parallel(const Options& o, const GPT2Config& config, int T,
                                                 const RankPlaces& places) {
    const int on_host = places.world_size / places.hosts, most = o.precision == "fp8" ? 1 : on_host;
    std::vector<int> possible;
    for (int tp = 1; tp <= most; tp++)
        if (config.NH % tp == 0 && on_host % tp == 0 &&
            o.global_batch_tokens % (int64_t(T) * places.world_size / tp) == 0)
            possible.push_back(tp);
    if (possible.empty()) plan_batch(1, T, o.global_batch_tokens, places.world_size);  // says why
    return possible;
}

// Calls f with the options of each layout.
template <class F>
static void for_each_layout(Options o, const GPT2Config& config, int T, const RankPlaces& places, const F& f) {
    for (const int tp : possible_tensor_parallel(o, config, T, places)) {
        o.tensor_parallel = tp;
        const int data_parallel = places.world_size / tp;
        for (const bool sequence_parallel : {false, true}) {
            if (sequence_parallel && (tp == 1 || T % tp != 0)) continue;
            o.sequence_parallel = sequence_parallel;
            for (o.zero = 0; o.zero <= (data_parallel > 1 ? 3 : 0); o.zero++)
                for (const char* recompute : {"none", "gelu", "layer"}) {
                    o.recompute = recompute;
                    f(o);
                }
        }
    }
}

Layout smallest_layout(Dtype dtype, const Options& o, const GPT2Config& config, int T, const FitDevices& devices) {
    std::vector<Layout> all;
    for_each_layout(o, config, T, devices.places,
                    [&](const Options& own) { all.push_back(layout_of(dtype, own, config, T, devices, 1)); });
    return *std::min_element(all.begin(), all.end(),
                             [](const Layout& a, const Layout& b) { return a.bytes < b.bytes; });
}

std::vector<Layout> fitting_layouts(Dtype dtype, const Options& o, const GPT2Config& config, int T,
                                    const FitDevices& devices) {
    std::vector<Layout> fitting;
    for_each_layout(o, config, T, devices.places, [&](const Options& own) {
        if (layout_of(dtype, own, config, T, devices, 1).bytes > devices.memory) return;
        const int data_parallel = devices.places.world_size / own.tensor_parallel;
        const int B = largest_micro_batch(dtype, config, T, o.global_batch_tokens, data_parallel,
                                          memory_options_of(own, data_parallel), devices.memory, o.optimizer);
        fitting.push_back(layout_of(dtype, own, config, T, devices, B));
    });
    // Stable: of two layouts with the same computed time, the one that divides and recomputes less comes first.
    std::stable_sort(fitting.begin(), fitting.end(),
                     [](const Layout& a, const Layout& b) { return a.tokens_per_second() > b.tokens_per_second(); });
    return fitting;
}

std::string layout_options(const Layout& layout) {
    std::string text;
    if (layout.tensor_parallel > 1) text = format("--tensor-parallel %d ", layout.tensor_parallel);
    if (layout.sequence_parallel) text += "--sequence-parallel ";
    return text +
           format("--zero %d --recompute %s --micro-batch %d", layout.zero, layout.recompute.c_str(), layout.batch.B);
}
