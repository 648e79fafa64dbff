#include "train/fit.h"

#include <algorithm>

#include "model/mfu.h"
#include "train/report.h"
#include "train/run_checks.h"

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
    layout.seconds = flops / (ASSUMED_MFU * devices.peak_flops) + double(layout.sent.inside) / devices.bandwidth;
    if (layout.sent.between > 0) layout.seconds += double(layout.sent.between) / devices.network;
    return layout;
}

// The values of an option in the search: the given one, or all.
template <class T>
static std::vector<T> values_of(const Options& o, const char* name, const T& given, const std::vector<T>& all) {
    return is_given(o, name) ? std::vector<T>{given} : all;
}

// The smallest micro-batch of the search.
static int least_micro_batch(const Options& o) {
    return is_given(o, "micro-batch") && o.micro_batch > 0 ? o.micro_batch : 1;
}

// Refuses a micro-batch with which no run starts on this many data-parallel ranks.
static void check_batch(const Options& o, int B, int T, int data_parallel) {
    check_virtual_ranks(o, plan_batch(B, T, o.global_batch_tokens, data_parallel, o.default_global_batch));
}

static bool can_start(const Options& o, int B, int T, int data_parallel) {
    try {
        check_batch(o, B, T, data_parallel);
        return true;
    } catch (const Error&) {
        return false;
    }
}

// The numbers of tensor-parallel ranks that the model, the hosts, and a global batch in the smallest micro-batches
// allow. Refuses a global batch that allows none.
static std::vector<int> possible_tensor_parallel(const Options& o, const GPT2Config& config, int T,
                                                 const RankPlaces& places) {
    const int on_host = places.world_size / places.hosts, most = o.precision == "fp8" ? 1 : on_host;
    const int B = least_micro_batch(o);
    std::vector<int> all, possible;
    for (int tp = 1; tp <= most; tp++) all.push_back(tp);
    for (const int tp : values_of(o, "tensor-parallel", o.tensor_parallel, all))
        if (config.NH % tp == 0 && on_host % tp == 0 && can_start(o, B, T, places.world_size / tp))
            possible.push_back(tp);
    if (possible.empty()) check_batch(o, B, T, places.world_size / o.tensor_parallel);  // says why
    ENSURE(!possible.empty(), "--tensor-parallel %d does not divide the %d heads and the %d rank%s of a machine",
           o.tensor_parallel, config.NH, on_host, on_host == 1 ? "" : "s");
    return possible;
}

// Calls f with the options of each layout that has the given values.
template <class F>
static void for_each_layout(Options o, const GPT2Config& config, int T, const RankPlaces& places, const F& f) {
    const std::vector<bool> sequence_parallel =
        values_of<bool>(o, "sequence-parallel", o.sequence_parallel, {false, true});
    const std::vector<int> zero_if_alone = values_of(o, "zero", o.zero, {0});
    const std::vector<int> zero = values_of(o, "zero", o.zero, {0, 1, 2, 3});
    const std::vector<std::string> recompute = values_of(o, "recompute", o.recompute, {"none", "gelu", "layer"});
    for (const int tp : possible_tensor_parallel(o, config, T, places))
        for (const bool sp : sequence_parallel) {
            if (sp && (tp == 1 || T % tp != 0)) continue;
            for (const int stage : tp == places.world_size ? zero_if_alone : zero)
                for (const std::string& recomputed : recompute) {
                    o.tensor_parallel = tp;
                    o.sequence_parallel = sp;
                    o.zero = stage;
                    o.recompute = recomputed;
                    f(o);
                }
        }
}

Layout smallest_layout(Dtype dtype, const Options& o, const GPT2Config& config, int T, const FitDevices& devices) {
    const int least = least_micro_batch(o);
    std::vector<Layout> all;
    for_each_layout(o, config, T, devices.places,
                    [&](const Options& own) { all.push_back(layout_of(dtype, own, config, T, devices, least)); });
    ENSURE(!all.empty(),
           "--sequence-parallel needs a number of tensor-parallel ranks above 1 that divides %d heads, %d ranks of a "
           "machine and %d tokens of a sequence; there is none",
           config.NH, devices.places.world_size / devices.places.hosts, T);
    return *std::min_element(all.begin(), all.end(),
                             [](const Layout& a, const Layout& b) { return a.bytes < b.bytes; });
}

std::vector<Layout> fitting_layouts(Dtype dtype, const Options& o, const GPT2Config& config, int T,
                                    const FitDevices& devices) {
    const int least = least_micro_batch(o);
    const bool any_micro_batch = !is_given(o, "micro-batch") || o.micro_batch == 0;
    std::vector<Layout> fitting;
    for_each_layout(o, config, T, devices.places, [&](const Options& own) {
        if (layout_of(dtype, own, config, T, devices, least).bytes > devices.memory) return;
        const int data_parallel = devices.places.world_size / own.tensor_parallel;
        int B = least;
        if (any_micro_batch)
            B = largest_micro_batch(dtype, config, T, o.global_batch_tokens, data_parallel,
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
