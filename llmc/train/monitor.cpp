#include "train/monitor.h"

#include <xxhash.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <map>

#include "base/common.h"
#include "base/host.h"

// The mean plus z standard deviations. Without a full window, or if all values are the same: FLT_MAX. The sums are
// computed anew, because running sums would round differently after a resume.
static float limit(const std::vector<float>& values, double z) {
    if (z == 0.0 || values.size() < Outliers::WINDOW) return FLT_MAX;
    double sum = 0.0, squares = 0.0;
    for (float value : values) sum += double(value);
    const double mean = sum / double(values.size());
    for (float value : values) squares += (double(value) - mean) * (double(value) - mean);
    if (squares == 0.0) return FLT_MAX;
    return float(std::min(double(FLT_MAX), mean + z * std::sqrt(squares / double(values.size()))));
}

static void append(std::vector<float>& window, float value) {
    if (window.size() == Outliers::WINDOW) window.erase(window.begin());
    window.push_back(value);
}

Outliers::Finding Outliers::add(int64_t step, float loss, float norm, float factor) {
    Finding finding;
    const long long number = step;
    const StepLimits exceeded = limits_of(step);
    if (std::isnan(factor)) {
        finding.skipped = "non_finite";
        finding.text =
            format("step %lld: loss %g, gradient norm %g", number, std::fabs(double(loss)), std::fabs(double(norm)));
        finding.ends_run = !skip_nan;
    } else if (std::isinf(factor)) {
        const bool of_loss = loss > exceeded.loss;
        finding.skipped = "spike";
        finding.text = format("step %lld: the %s is %g, above %g, the limit of the last %zu steps (--spike-z %g)",
                              number, of_loss ? "loss" : "gradient norm", double(of_loss ? loss : norm),
                              double(of_loss ? exceeded.loss : exceeded.norm), WINDOW, z);
    } else {
        append(losses, loss);
        append(norms, norm);
    }
    skipped_in_row = finding.skipped.empty() ? 0 : skipped_in_row + 1;
    if (skipped_in_row >= MOST_SKIPPED && !finding.ends_run) {
        finding.text += format(", the last of %d steps in a row that did not change the weights", MOST_SKIPPED);
        finding.ends_run = true;
    }
    limits[step % 2] = {limit(losses, z), limit(norms, z)};
    return finding;
}

Json Outliers::json() const {
    const auto pair = [](const StepLimits& l) { return Json(std::vector{l.loss, l.norm}); };
    return {{"losses", losses},
            {"norms", norms},
            {"limits", std::vector{pair(limits[0]), pair(limits[1])}},
            {"skipped_in_row", skipped_in_row}};
}

void Outliers::restore(const Json& saved, const std::string& where) {
    if (saved.type == Json::null) return;
    try {
        losses = saved.at("losses").list<float>();
        norms = saved.at("norms").list<float>();
        skipped_in_row = std::clamp(saved.at("skipped_in_row").get<int>(), 0, MOST_SKIPPED);
        for (size_t i = 0; i < 2 && z > 0.0; i++) {
            const std::vector<float> pair = saved.at("limits").items.at(i).list<float>();
            limits[i] = {pair.at(0), pair.at(1)};
        }
    } catch (const std::out_of_range&) {
        fail(EXIT_BAD_DATA, "%s: the losses and norms of the last steps are damaged", where.c_str());
    }
    if (losses.size() > WINDOW || norms.size() > WINDOW)
        fail(EXIT_BAD_DATA, "%s: has losses or norms of more than %zu steps", where.c_str(), WINDOW);
}

static std::string describe_slowest(const Stragglers& s) {
    std::vector<double> sorted = s.own_ms;
    std::sort(sorted.begin(), sorted.end());
    const double most = sorted.back(), median = sorted[(sorted.size() - 1) / 2], cost = most - median;
    if (cost < Stragglers::LEAST_MS || cost < Stragglers::SHARE * s.all_ms) return "";
    return format(
        "rank %d is slow: the others waited %.2f s for it in %d steps, which took %.2f s; its own work takes %.0f ms "
        "per step, that of the median rank %.0f ms",
        int(std::max_element(s.own_ms.begin(), s.own_ms.end()) - s.own_ms.begin()), cost / 1e3, s.steps, s.all_ms / 1e3,
        most / s.steps, median / s.steps);
}

std::string Stragglers::add(const RankStatus* statuses, int world_size, double step_ms) {
    if (world_size == 1) return "";
    own_ms.resize(size_t(world_size));
    for (int rank = 0; rank < world_size; rank++) own_ms[size_t(rank)] += double(statuses[rank].own_ms);
    all_ms += step_ms;
    silent = std::max(0, silent - 1);
    if (++steps < STEPS) return "";
    const std::string line = silent > 0 ? "" : describe_slowest(*this);
    if (!line.empty()) silent = SILENT_STEPS;
    std::fill(own_ms.begin(), own_ms.end(), 0.0);
    all_ms = 0.0;
    steps = 0;
    return line;
}

// Returns a hash of device memory, in the order of the stream.
static uint64_t hash_of_device(const void* data, int64_t bytes, Stream stream) {
    constexpr int64_t CHUNK = 16 << 20;
    std::vector<char> chunk(size_t(std::min(bytes, CHUNK)));
    uint64_t hash = 0;
    for (int64_t at = 0; at < bytes; at += CHUNK) {
        const int64_t count = std::min(CHUNK, bytes - at);
        copy_to_host(chunk.data(), static_cast<const char*>(data) + at, count, stream);
        wait_for_stream(stream);
        hash = XXH3_64bits_withSeed(chunk.data(), size_t(count), hash);
    }
    return hash;
}

void check_replicas(const Groups& groups, const void* weights, int64_t bytes, int64_t step, Stream stream) {
    const std::string own = hex(hash_of_device(weights, bytes, stream)) + " " + host_name();
    const std::vector<std::string> all = groups.world.all_gather_text(own);
    const size_t tp = size_t(groups.tp.world_size);
    for (size_t first = 0; first < tp; first++) {  // the ranks first, first + tp, ... must have the same weights
        std::map<std::string, size_t> ranks_with;
        for (size_t rank = first; rank < all.size(); rank += tp) ranks_with[all[rank].substr(0, 16)]++;
        if (ranks_with.size() == 1) continue;
        const auto most = std::max_element(ranks_with.begin(), ranks_with.end(),
                                           [](const auto& a, const auto& b) { return a.second < b.second; });
        const bool majority = most->second * tp * 2 > all.size();
        std::string who;
        for (size_t rank = first; rank < all.size(); rank += tp)
            if (!majority || all[rank].substr(0, 16) != most->first)
                who += format("%srank %zu on %s", who.empty() ? "" : ", ", rank, all[rank].substr(17).c_str());
        fail(EXIT_WEIGHTS_DIFFER,
             "step %lld: the weights of %s differ from %s, although all add the same gradients: a memory or a "
             "processor is faulty. The weights are not saved; --resume continues from the last checkpoint, best "
             "without that machine",
             static_cast<long long>(step), who.c_str(), majority ? "those of the other ranks" : "each other");
    }
}
