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
    Layout layout = {o.zero, o.recompute, plan_batch(B, T, o.global_batch_tokens, devices.world_size), 0, 0, 0.0};
    const MemoryOptions options = memory_options_of(o, devices.world_size);
    layout.bytes = device_bytes(training_memory(dtype, config, layout.batch, options, o.optimizer));
    if (devices.world_size > 1) layout.sent = bytes_sent(dtype, config, o, layout.batch).per_step;
    const double flops = (flops_per_token(config, T) + recomputed_flops(config, T, o.recompute)) *
                         double(layout.batch.tokens_per_step) / devices.world_size;
    layout.seconds = flops / (FIT_UTILIZATION * devices.peak_flops) + double(layout.sent) / devices.bandwidth;
    return layout;
}

// Calls f with the options of each layout.
template <class F>
static void for_each_layout(Options o, int world_size, const F& f) {
    for (o.zero = 0; o.zero <= (world_size > 1 ? 3 : 0); o.zero++)
        for (const char* recompute : {"none", "gelu", "layer"}) {
            o.recompute = recompute;
            f(o);
        }
}

Layout smallest_layout(Dtype dtype, const Options& o, const GPT2Config& config, int T, const FitDevices& devices) {
    std::vector<Layout> all;
    for_each_layout(o, devices.world_size,
                    [&](const Options& own) { all.push_back(layout_of(dtype, own, config, T, devices, 1)); });
    return *std::min_element(all.begin(), all.end(),
                             [](const Layout& a, const Layout& b) { return a.bytes < b.bytes; });
}

std::vector<Layout> fitting_layouts(Dtype dtype, const Options& o, const GPT2Config& config, int T,
                                    const FitDevices& devices) {
    std::vector<Layout> fitting;
    for_each_layout(o, devices.world_size, [&](const Options& own) {
        if (layout_of(dtype, own, config, T, devices, 1).bytes > devices.memory) return;
        const int B = largest_micro_batch(dtype, config, T, o.global_batch_tokens, devices.world_size,
                                          memory_options_of(own, devices.world_size), devices.memory, o.optimizer);
        fitting.push_back(layout_of(dtype, own, config, T, devices, B));
    });
    // Stable: of two layouts with the same computed time, the one that recomputes less comes first.
    std::stable_sort(fitting.begin(), fitting.end(),
                     [](const Layout& a, const Layout& b) { return a.seconds < b.seconds; });
    return fitting;
}

std::string layout_options(const Layout& layout) {
    return format("--zero %d --recompute %s --micro-batch %d", layout.zero, layout.recompute.c_str(), layout.batch.B);
}
