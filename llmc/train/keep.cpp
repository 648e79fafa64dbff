#include "train/keep.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/common.h"

KeepRules keep_rules(const Options& o) { return {o.keep, o.keep_every, o.keep_best}; }

int64_t most_checkpoints(const Options& o) {
    if (o.checkpoint_every == 0) return 0;
    const int64_t saved = ceil_div(o.steps, o.checkpoint_every);
    if (o.keep == 0 || saved <= o.keep) return saved;
    // The older checkpoints, which --keep deletes, are at multiples of --checkpoint-every.
    const int64_t older = saved - o.keep;
    int64_t kept = o.keep + (o.keep_best ? 1 : 0);
    if (o.keep_every > 0) kept += older / (o.keep_every / std::gcd(o.keep_every, o.checkpoint_every));
    return std::min(saved, kept + 1);
}

static std::string describe_rules(const Options& o) {
    if (o.keep == 0) return "all kept";
    std::string text = format("%d kept", o.keep);
    if (o.keep_best) text += ", and the best";
    if (o.keep_every > 0) text += format(", and those of every %s steps", with_commas(o.keep_every).c_str());
    return text;
}

std::string describe_disk(const Options& o, int64_t checkpoint_bytes) {
    if (o.checkpoint_every == 0) return "no checkpoints";
    const std::string text =
        format("at most %s per checkpoint, %s", human_bytes(checkpoint_bytes).c_str(), describe_rules(o).c_str());
    if (o.steps == 0) return text;
    const int64_t most = most_checkpoints(o);
    int64_t bytes;
    if (__builtin_mul_overflow(most, checkpoint_bytes, &bytes)) bytes = std::numeric_limits<int64_t>::max();
    return text + format(": %s for %s at the same time", human_bytes(bytes).c_str(), with_commas(most).c_str());
}
