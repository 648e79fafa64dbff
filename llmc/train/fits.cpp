// fits.cpp: finds the cheapest set of options with which training fits into memory, or the largest model: for
// `plan --fits`, and for the advice where a run does not fit.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "model/mfu.h"
#include "train/options.h"
#include "train/plan.h"

namespace {
// An option that saves memory. add sets it, and returns false where the run has it already, or more of it.
struct Saving {
    const char *name, *value;
    bool (*add)(MemoryOptions& options, int world_size);
};
}  // namespace

// Sets `field` to a larger value. Returns whether it was less.
template <class T>
static bool raise_to(T& field, T value) {
    if (field >= value) return false;
    field = value;
    return true;
}

template <int stage>
static bool share(MemoryOptions& o, int world_size) {
    const int before = o.shard_weights ? 3 : o.shard_gradients ? 2 : o.shards > 1 ? 1 : 0;
    if (world_size == 1 || before >= stage) return false;
    o.shards = world_size;
    o.shard_gradients = stage >= 2, o.shard_weights = stage >= 3;
    return true;
}

template <Offload state>
static bool offload(MemoryOptions& o, int) {
    return !device_memory_is_host() && raise_to(o.offload, state);
}

// The cheapest first. A later value of an option saves more. 6 layers of 768 channels took as long with each as without
// (AMD EPYC, Zen 5), but for --recompute layer. --zero 1 sends no more than 0, and 2 more if there are micro-steps.
static const Saving savings[] = {
    {"--zero", "1", share<1>},
    {"--logit-chunks", "8", [](MemoryOptions& o, int) { return raise_to(o.logit_chunks, 8); }},
    {"--recompute", "gelu", [](MemoryOptions& o, int) { return raise_to(o.recompute, Recompute::gelu); }},
    {"--zero", "2", share<2>},
    {"--recompute", "layer", [](MemoryOptions& o, int) { return raise_to(o.recompute, Recompute::layer); }},
    {"--zero", "3", share<3>},
    {"--moments", "8bit", [](MemoryOptions& o, int) { return raise_to(o.moments, MomentDtype::block8); }},
    {"--master-weights", "off", [](MemoryOptions& o, int) { return std::exchange(o.master_weights, false); }},
    {"--grad-accum", "bf16", [](MemoryOptions& o, int) { return raise_to(o.grad_accum, Dtype::bf16); }},
    {"--offload", "moments", offload<Offload::moments>},
    {"--offload", "all", offload<Offload::all>},
};

// Adds the savings whose bits are set in `mask`.
static SavingSet add_savings(MemoryOptions options, int world_size, size_t mask) {
    std::vector<std::pair<std::string, std::string>> added;
    for (size_t i = 0; i < std::size(savings); i++) {
        if (!(mask >> i & 1) || !savings[i].add(options, world_size)) continue;
        std::erase_if(added, [&](const auto& before) { return before.first == savings[i].name; });
        added.emplace_back(savings[i].name, savings[i].value);
    }
    std::string text;
    for (const auto& [name, value] : added) text += " " + name + " " + value;
    return {text, options, 0};
}

SavingSet cheapest_savings(const MemoryOptions& options, int world_size,
                           const std::function<int64_t(const MemoryOptions&)>& missing) {
    SavingSet best = {"", options, std::numeric_limits<int64_t>::max()};
    // The dearest option of a set is its highest bit.
    for (size_t mask = 0; best.missing > 0 && mask >> std::size(savings) == 0; mask++) {
        SavingSet set = add_savings(options, world_size, mask);
        set.missing = missing(set.options);
        if (set.missing < best.missing) best = set;
    }
    return best;
}

std::string smaller_model(const Options& o, const GPT2Config& config,
                          const std::function<SavingSet(const GPT2Config&)>& cheapest) {
    if (o.resume || !o.init.empty()) return "";
    const bool named = o.layers == 0 && !o.default_model;
    for (const char* name : {"d36", "d24", "d12"}) {
        GPT2Config other = config_by_name(name);
        other.V = config.V;
        other.max_T = std::max(other.max_T, o.seq_len);
        if (!named || other.NH % o.tensor_parallel || count_parameters(other) >= count_parameters(config)) continue;
        if (const SavingSet set = cheapest(other); set.missing == 0) return format(" --model %s", name) + set.text;
    }
    std::string text;
    const int N = o.tensor_parallel;
    for (int fits = 0, too_many = config.NH / N; too_many - fits > 1;) {
        GPT2Config shape = config;
        const int middle = (fits + too_many) / 2;
        shape.NH = middle * N;
        shape.C = config.C / config.NH * shape.NH, shape.L = std::max(1, config.L * shape.NH / config.NH);
        const SavingSet set = cheapest(shape);
        (set.missing ? too_many : fits) = middle;
        if (!set.missing) text = format(" --layers %d --heads %d --channels %d", shape.L, shape.NH, shape.C) + set.text;
    }
    return text.empty() || !named ? text : text + " in place of --model " + o.model;
}

// --recompute layer repeats a layer's forward up to fcproj: matrices of 8 C^2 elements, and attention.
double relative_speed(const GPT2Config& config, int T, Recompute recompute) {
    if (recompute != Recompute::layer) return 1.0;
    const double C = config.C, again = (config.L - 1) * (16.0 * C * C + 2.0 * C * T), once = flops_per_token(config, T);
    return once / (once + again);
}

int64_t parse_memory(const std::string& text) {
    char* end;
    double bytes = std::strtod(text.c_str(), &end);
    while (*end == ' ') end++;
    const std::string unit = end, letters = "KMGT";
    const size_t power = unit.empty() ? letters.npos : letters.find(unit[0]);
    const std::string rest = unit.empty() ? "" : unit.substr(1);
    const bool known = power != letters.npos && (rest.empty() || rest == "B" || rest == "iB");
    if (known) bytes *= std::pow(rest == "B" ? 1000.0 : 1024.0, double(power + 1));
    ENSURE(known && bytes >= 1 && bytes < 0x1p60, "--memory %s is no size; give one such as 16GiB, 512MiB or 24GB",
           text.c_str());
    return int64_t(bytes);
}
