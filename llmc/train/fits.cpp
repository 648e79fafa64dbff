// fits.cpp: finds the cheapest set of options with which training fits into memory: for `plan --fits`, and for the
// advice where a run does not fit.

#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "model/mfu.h"
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

static bool share_all(MemoryOptions& o, int world_size) {
    if (world_size == 1 || o.shard_weights) return false;
    o.shards = world_size;
    return o.shard_gradients = o.shard_weights = true;
}

// The cheapest first. Values of the same option are neighbours, and a later one saves more. 6 layers of 768 channels
// took as long with each as without (AMD EPYC, Zen 5), but for --recompute layer.
static const Saving savings[] = {
    {"--logit-chunks", "8", [](MemoryOptions& o, int) { return raise_to(o.logit_chunks, 8); }},
    {"--recompute", "gelu", [](MemoryOptions& o, int) { return raise_to(o.recompute, Recompute::gelu); }},
    {"--recompute", "layer", [](MemoryOptions& o, int) { return raise_to(o.recompute, Recompute::layer); }},
    {"--zero", "3", share_all},
    {"--moments", "8bit", [](MemoryOptions& o, int) { return raise_to(o.moments, MomentDtype::block8); }},
    {"--master-weights", "off", [](MemoryOptions& o, int) { return std::exchange(o.master_weights, false); }},
    {"--offload", "all",
     [](MemoryOptions& o, int) { return !device_memory_is_host() && raise_to(o.offload, Offload::all); }},
};

// Adds the savings whose bits are set in `mask`.
static SavingSet add_savings(MemoryOptions options, int world_size, size_t mask) {
    std::vector<std::pair<std::string, std::string>> added;
    for (size_t i = 0; i < std::size(savings); i++) {
        if (!(mask >> i & 1) || !savings[i].add(options, world_size)) continue;
        if (!added.empty() && added.back().first == savings[i].name) added.pop_back();
        added.emplace_back(savings[i].name, savings[i].value);
    }
    std::string text;
    for (const auto& [name, value] : added) text += " " + name + " " + value;
    return {text, options, 0};
}

SavingSet cheapest_savings(const MemoryOptions& options, int world_size,
                           const std::function<int64_t(const MemoryOptions&)>& bytes, int64_t available) {
    const size_t all = (size_t(1) << std::size(savings)) - 1;
    const int64_t least = bytes(add_savings(options, world_size, all).options);
    for (size_t mask = 0;; mask++) {  // the dearest option of a set is its highest bit
        SavingSet set = add_savings(options, world_size, mask);
        set.bytes = bytes(set.options);
        if (set.bytes <= std::max(available, least)) return set;
    }
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
