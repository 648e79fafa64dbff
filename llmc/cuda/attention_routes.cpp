// attention_routes.cpp: prepares, times, compares and runs the routes of attention_routes.h.
#include "cuda/attention_routes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "base/common.h"
#include "base/device.h"
#include "cuda/attention_cudnn.h"
#include "cuda/autotune.h"
#include "cuda/cuda_check.h"

namespace gpu {

namespace {

AttentionOptions& options() {
    static AttentionOptions options;
    return options;
}

bool is_fixed(AttentionBackend backend) { return options().backend == backend; }
bool may_be(AttentionBackend backend) { return is_fixed(AttentionBackend::automatic) || is_fixed(backend); }

struct OwnRoute : AttentionRoute {
    const AttentionKernels& kernels;
    AttentionKey key;
    OwnRoute(const AttentionKernels& kernels, const AttentionKey& key) : kernels(kernels), key(key) {}
    std::string text() const override { return std::string(kernels.name) + " kernels of ours"; }
    std::string choice() const override { return kernels.name; }
    int64_t scratch_bytes() const override { return kernels.scratch_bytes(key); }
    bool run(const AttentionCall& call, Stream stream) override {
        kernels.run(call, stream);
        return true;
    }
};

OwnedRoute own(const AttentionKernels& kernels, const AttentionKey& key) {
    return std::make_unique<OwnRoute>(kernels, key);
}

std::string cudnn_reason() { return may_be(AttentionBackend::cudnn) ? cudnn_unavailable() : "cuDNN is not chosen"; }

bool wgmma_is_candidate(const AttentionKey& key) {
    return is_fixed(AttentionBackend::automatic) && wgmma_attention.reason(key.sizes).empty();
}

const AttentionKernels& fixed_wgmma(const AttentionSizes& sizes) {
    const std::string reason = wgmma_attention.reason(sizes);
    ENSURE(reason.empty(), "--attention wgmma: %s; give --attention auto", reason.c_str());
    return wgmma_attention;
}

// ---- The chosen route

struct Prepared {
    OwnedRoute route;
    AttentionOptions options;  // the options that the route was made for
    std::string choice;        // the kept choice that it was made for; "": none
    bool is_chosen = false;    // the route is that of the choice
    std::string remark = "";   // reason, for the log, why it is not another route
    int version = -1;          // gpu::algorithms_version() when the route was chosen
};

std::map<AttentionKey, Prepared>& prepared() {
    // Never destroyed: at exit the driver may already be unloaded.
    static auto& prepared = *new std::map<AttentionKey, Prepared>;
    return prepared;
}

std::string choice_key(const AttentionKey& key) {
    constexpr const char* names[] = {"forward", "backward", "backward, deterministic"};
    const auto& [B, T, NH, HS] = key.sizes;
    const std::string ours =
        wgmma_is_candidate(key) ? format("%s %d; ", wgmma_attention.name, wgmma_attention.version) : "";
    return format("%s; %s; %sattention %s B %d T %d NH %d HS %d", device_info().name.c_str(), cudnn_version().c_str(),
                  ours.c_str(), names[int(key.pass)], B, T, NH, HS);
}

// The route of a kept choice; null if this machine does not offer it.
OwnedRoute chosen_route(const AttentionKey& key, const std::string& choice) {
    for (const AttentionKernels* kernels : {&wgmma_attention, &mma_attention})
        if (wgmma_is_candidate(key) && choice.starts_with(std::string(kernels->name) + " ")) return own(*kernels, key);
    return choice.empty() || !cudnn_reason().empty() ? nullptr : cudnn_chosen_route(key, options().part_bytes, choice);
}

// The route without a choice.
OwnedRoute first_route(const AttentionKey& key, std::string& remark) {
    if (is_fixed(AttentionBackend::mma)) return own(mma_attention, key);
    if (is_fixed(AttentionBackend::wgmma)) return own(fixed_wgmma(key.sizes), key);
    std::string reason = cudnn_reason();
    OwnedRoute route = reason.empty() ? cudnn_first_route(key, options().part_bytes, reason) : nullptr;
    ENSURE(route || !is_fixed(AttentionBackend::cudnn), "--attention cudnn: %s; give --attention auto", reason.c_str());
    if (route) return route;
    remark = ": " + reason;
    return own(mma_attention, key);
}

// Makes the route of the kept choice, or the first route, unless it is there.
Prepared& prepare(const AttentionKey& key) {
    Prepared& p = prepared()[key];
    const std::string choice = choice_for(choice_key(key));
    if (p.route && p.options == options() && p.choice == choice) return p;
    p = {.route = chosen_route(key, choice), .options = options(), .choice = choice, .version = p.version};
    p.is_chosen = p.route != nullptr;
    if (!p.route) p.route = first_route(key, p.remark);
    return p;
}

// Null if these sizes were not prepared with the current options.
Prepared* find(const AttentionKey& key) {
    const auto at = prepared().find(key);
    return at == prepared().end() || at->second.options != options() ? nullptr : &at->second;
}

// ---- Choice by time

int64_t result_elements(const AttentionKey& key) {
    const auto& [B, T, NH, HS] = key.sizes;
    return int64_t(B) * T * NH * HS * (key.pass == AttentionPass::forward ? 1 : 3);
}
int64_t lse_elements(const AttentionKey& key) {
    return key.pass == AttentionPass::forward ? int64_t(key.sizes.B) * key.sizes.T * key.sizes.NH : 0;
}

// Layout of device_scratch where wgmma's results are compared: wgmma's memory, the results of another route, ratios.
struct Comparison {
    bf16* results;
    float* lse;
    char* ratios;
    int64_t bytes;
    Comparison(void* base, const AttentionKey& key) {
        Arena memory{base, wgmma_attention.scratch_bytes(key)};
        results = memory.take<bf16>(result_elements(key));
        lse = memory.take<float>(lse_elements(key));
        ratios = memory.take<char>(DIFFERENCE_BYTES);
        bytes = memory.used;
    }
};

int64_t comparison_bytes(const AttentionKey& key) { return Comparison(nullptr, key).bytes; }

// The limits of largest_difference. Each route rounds operands (the weights, or their gradients) and results to bf16
// once. A rounding changes a number by at most 2^-8 of it, and two routes have four. Nothing rounds lse to bf16.
constexpr float RESULT_LIMIT = 0x1p-6f, LSE_LIMIT = 0x1p-12f;

// Returns why wgmma's results are refused; empty if they agree with those that `other` has computed in this call. A
// race may show in some runs only, so it computes several times. Results that it leaves unwritten are NaN.
std::string disagreement(const AttentionCall& call, const AttentionRoute& other, AttentionRoute& wgmma, Stream stream) {
    constexpr int runs = 3;
    const Comparison at(device_scratch(comparison_bytes(call.key)), call.key);
    bf16* const results = call.dqkv ? call.dqkv : call.out;
    const int64_t count = result_elements(call.key), lse_count = lse_elements(call.key);
    const size_t bytes = size_t(count) * sizeof(bf16), lse_bytes = size_t(lse_count) * sizeof(float);
    const int C = call.key.sizes.NH * call.key.sizes.HS, parts = call.dqkv ? 3 : 1;
    copy_on_device(at.results, results, int64_t(bytes), stream);
    copy_on_device(at.lse, call.lse, int64_t(lse_bytes), stream);
    for (int i = 0; i < runs; i++) {
        CUDA_CHECK(cudaMemsetAsync(results, 0xff, bytes, stream));
        if (lse_bytes) CUDA_CHECK(cudaMemsetAsync(call.lse, 0xff, lse_bytes, stream));
        wgmma.run(call, stream);
        const float ratio = largest_difference(results, at.results, count / (parts * C), parts, C, at.ratios, stream);
        const float lse_ratio =
            lse_count ? largest_difference(call.lse, at.lse, lse_count, 1, 1, at.ratios, stream) : 0.0f;
        if (ratio <= RESULT_LIMIT && lse_ratio <= LSE_LIMIT) continue;
        return format("; %s refused: differ from %s by %.2g of the norm, lse by %.2g, and may by %.2g and %.2g",
                      wgmma.text().c_str(), other.text().c_str(), double(ratio), double(lse_ratio),
                      double(RESULT_LIMIT), double(LSE_LIMIT));
    }
    return "";
}

bool try_run(AttentionRoute& route, const AttentionCall& call, Stream stream) {
    if (route.run(call, stream)) return true;
    CUDA_CHECK(cudaStreamSynchronize(stream));  // reports an earlier error that is not the route's
    return false;
}

// The candidates for the call's operands, first the one that computes without a choice; none if there is no
// other. refused: why wgmma is not one of them.
std::vector<OwnedRoute> candidates(const AttentionCall& call, std::string& refused, Stream stream) {
    std::vector<OwnedRoute> routes;
    if (cudnn_reason().empty()) routes = cudnn_candidates(call.key, options().part_bytes);
    const bool with_wgmma = wgmma_is_candidate(call.key);
    if (routes.empty() && with_wgmma) routes.push_back(own(mma_attention, call.key));
    int64_t bytes = with_wgmma ? comparison_bytes(call.key) : 0;
    for (const OwnedRoute& route : routes) bytes = std::max(bytes, route->scratch_bytes());
    device_reserve_scratch(bytes);
    if (!with_wgmma) return routes;
    const auto other =
        std::ranges::find_if(routes, [&](const OwnedRoute& route) { return try_run(*route, call, stream); });
    if (other == routes.end()) return routes;
    OwnedRoute wgmma = own(wgmma_attention, call.key);
    refused = disagreement(call, **other, *wgmma, stream);
    if (refused.empty()) routes.push_back(std::move(wgmma));
    return routes;
}

// Keeps the fastest route.
void choose_fastest(const AttentionCall& call, Prepared& p, Stream stream) {
    std::string refused;
    std::vector<OwnedRoute> routes = candidates(call, refused, stream);
    const std::optional<Fastest> best =
        fastest(stream, routes.size(), [&](size_t i) { return try_run(*routes[i], call, stream); });
    if (!best) return;
    if (best->index > 0) p.remark.clear();
    p.remark += refused;
    p.route = std::move(routes[best->index]);
    keep_choice(choice_key(call.key), p.route->choice(), *best);
    p.choice = choice_for(choice_key(call.key));
    p.is_chosen = true;
}

// An upper bound of the scratch memory before the route is made.
int64_t scratch_limit(const AttentionKey& key) {
    int64_t bytes = cudnn_reason().empty() ? cudnn_scratch_limit(key, options().part_bytes) : 0;
    if (is_fixed(AttentionBackend::wgmma)) bytes = fixed_wgmma(key.sizes).scratch_bytes(key);
    return wgmma_is_candidate(key) ? std::max(bytes, comparison_bytes(key)) : bytes;
}

}  // namespace

void set_attention(AttentionOptions given) { options() = std::move(given); }

AttentionPass attention_backward_pass() {
    return options().deterministic ? AttentionPass::deterministic_backward : AttentionPass::backward;
}

std::string prepare_attention_routes(const AttentionSizes& sizes, bool backward) {
    const Prepared& forward = prepare({AttentionPass::forward, sizes});
    std::string text = forward.route->text() + forward.remark;
    if (!backward) return text;
    const Prepared& p = prepare({attention_backward_pass(), sizes});
    return text + "; backward " + p.route->text() + p.remark;
}

int64_t attention_routes_scratch_bytes(const AttentionSizes& sizes) {
    const AttentionKey forward{AttentionPass::forward, sizes}, backward{attention_backward_pass(), sizes};
    const Prepared *f = find(forward), *b = find(backward);
    if (f) return std::max(f->route->scratch_bytes(), b ? b->route->scratch_bytes() : 0);
    return std::max(scratch_limit(forward), scratch_limit(backward));
}

void run_attention(const AttentionCall& call, Stream stream) {
    Prepared* const p = find(call.key);
    if (!p) return mma_attention.run(call, stream);
    if (p->version != algorithms_version() && !is_capturing(stream)) {
        p->version = algorithms_version();
        if (!prepare(call.key).is_chosen && timing_algorithms()) choose_fastest(call, *p, stream);
        device_reserve_scratch(p->route->scratch_bytes());
    }
    if (!p->route->run(call, stream)) fail(EXIT_INTERNAL, "%s: it refuses to run attention", p->route->text().c_str());
}

}  // namespace gpu
