// attention_cudnn.cpp: routes to compute bf16 attention by the plans of cudnn_plan.h.
//
// Memory traffic: forward reads qkv, and writes out and lse, once. Non-deterministic backward accumulates dQ in a float
// buffer, mostly in the L2 cache. Deterministic backward writes dS, (B, NH, T, T) in bf16, and reads it again: 3.2 GB
// per layer for B = 64, NH = 12, T = 1024. On Blackwell an engine of newer versions stores no dS. Deterministic
// backward is the default, so that the same seed gives the same bits. It processes the micro-batch in parts, so that dS
// takes at most a 32nd of the GPU's memory for any B. Smaller parts, whose dS stays in the L2 cache, are slower: on an
// H200 a layer of 124M, B 64, takes 1.11 ms in one part, 1.39 to 2.22 in parts of 256 to 50 MiB. Non-deterministic
// backward would gain nothing from parts.
//
// cuDNN does not say whether an engine is deterministic: it defines a numerical note for engines that are not, but sets
// it on none. test_gpu_cudnn.cu compares the bits of several runs instead.
#include "cuda/attention_cudnn.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/device.h"
#include "cuda/cuda_check.h"
#include "cuda/cudnn_plan.h"

namespace gpu {

namespace {

// The handle is never destroyed: at exit the driver may already be unloaded. One host thread queues all work of a GPU,
// so one handle is enough.
cudnnHandle_t handle() {
    static const cudnnHandle_t handle = [] {
        cudnnHandle_t h;
        CUDNN_CHECK(cudnnCreate(&h));
        return h;
    }();
    return handle;
}

std::string version_text(size_t v) { return format("%d.%d.%d", int(v / 10000), int(v / 100 % 100), int(v % 100)); }

// ---- Parts of a micro-batch

using Key = AttentionKey;

AttentionSizes part_of(const AttentionSizes& all, int sequences) { return {sequences, all.T, all.NH, all.HS}; }

int64_t ds_bytes(const AttentionSizes& s) { return int64_t(s.B) * s.NH * s.T * s.T * int64_t(sizeof(bf16)); }

// Each part's lse begins at a multiple of 16 bytes.
int part_step(const AttentionSizes& all) { return all.NH * all.T % 4 == 0 ? 1 : 4; }

// Number of sequences of which dS takes at most `bytes`; 0: a 32nd of the GPU's memory. The parts of a micro-batch are
// as equal as possible.
int part_size(const Key& key, int64_t bytes) {
    const auto& [pass, all] = key;
    if (pass != AttentionPass::deterministic_backward) return all.B;
    if (bytes == 0) bytes = device_info().memory_bytes / 32;
    const int64_t step = part_step(all), most = std::max(step, bytes / ds_bytes(part_of(all, 1)));
    if (most >= all.B) return all.B;
    return int(round_up(ceil_div<int64_t>(all.B, ceil_div<int64_t>(all.B, most)), step));
}

// Layout of device_scratch for a part: row sums at offset 0, which forward does not have, then the plan's memory.
int64_t row_sums_bytes(const Key& key, int part) {
    constexpr int64_t alignment = 256;
    if (key.pass == AttentionPass::forward) return 0;
    return round_up(int64_t(part) * key.sizes.NH * key.sizes.T * int64_t(sizeof(float)), alignment);
}

// ---- Execution

struct Binding {
    Uid uid;
    const void* address;
};

// The tensors of the sequences from b on.
std::vector<Binding> tensors_from(const AttentionCall& call, int64_t b, void* row_sums) {
    const auto& [B, T, NH, HS] = call.key.sizes;
    const int64_t C = int64_t(NH) * HS, tokens = b * T;
    const bf16* const x = call.qkv + tokens * 3 * C;
    std::vector<Binding> all = {{uid_q, x},
                                {uid_k, x + C},
                                {uid_v, x + 2 * C},
                                {uid_out, call.out + tokens * C},
                                {uid_lse, call.lse + tokens * NH}};
    if (call.key.pass == AttentionPass::forward) return all;
    bf16* const dx = call.dqkv + tokens * 3 * C;
    const std::initializer_list<Binding> of_backward = {{uid_dout, call.dout + tokens * C},
                                                        {uid_dq, dx},
                                                        {uid_dk, dx + C},
                                                        {uid_dv, dx + 2 * C},
                                                        {uid_row_sums, row_sums}};
    all.insert(all.end(), of_backward);
    return all;
}

// The workspace begins with the plan's dq_sums, if it has them.
cudnnStatus_t try_execute(const CudnnPlan& plan, std::vector<Binding> tensors, void* workspace, Stream stream) {
    if (plan.dq_sums_bytes) tensors.push_back({uid_dq_sums, workspace});
    workspace = static_cast<char*>(workspace) + plan.dq_sums_bytes;
    std::vector<int64_t> ids;
    std::vector<const void*> addresses;
    for (const auto& [uid, address] : tensors) {
        ids.push_back(uid);
        addresses.push_back(address);
    }
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set_attribute(pack.handle, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, int64_t(ids.size()), ids.data());
    set_attribute(pack.handle, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, int64_t(addresses.size()),
                  addresses.data());
    set_attribute(pack.handle, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    CUDNN_CHECK(cudnnBackendFinalize(pack.handle));
    CUDNN_CHECK(cudnnSetStream(handle(), stream));
    return cudnnBackendExecute(handle(), plan.plan.handle, pack.handle);
}

// ---- Routes

// `part` sequences at a time by one plan, and the last ones by another if they are fewer.
struct CudnnRoute : AttentionRoute {
    Key key;
    int part;
    CudnnPlan whole, rest;

    // The first plan from candidate `first` on.
    CudnnRoute(const Key& key, int64_t part_bytes, int first) : key(key), part(part_size(key, part_bytes)) {
        const auto& [pass, all] = key;
        const CudnnTarget target{handle(), ""};
        whole = plan_attention(pass, part_of(all, part), target, first);
        if (const int last = all.B % part; last && whole) {
            rest = plan_attention(pass, part_of(all, last), target, whole.candidate);
            if (!rest) rest = plan_attention(pass, part_of(all, last), target, 0);
        }
    }

    bool has_plans() const { return whole && (key.sizes.B % part == 0 || rest); }

    std::string text() const override {
        const int B = key.sizes.B;
        std::string text = cudnn_version() + ", engine " + std::to_string(whole.engine);
        if (key.pass == AttentionPass::deterministic_backward) text += ", deterministic";
        if (key.pass == AttentionPass::backward) text += ", not deterministic";
        return part == B ? text : text + format(", %d of %d sequences at a time", part, B);
    }
    std::string choice() const override { return format("%d engine %d", whole.candidate, whole.engine); }
    int64_t scratch_bytes() const override { return row_sums_bytes(key, part) + std::max(whole.bytes(), rest.bytes()); }
    bool run(const AttentionCall& call, Stream stream) override {
        // cuDNN reads these host values before execute returns.
        const float scale = 1.0f / std::sqrt(float(key.sizes.HS)), masked = -INFINITY, one = 1.0f;
        char* const scratch = static_cast<char*>(device_scratch(scratch_bytes()));
        for (int b = 0; b < key.sizes.B; b += part) {
            std::vector<Binding> tensors = tensors_from(call, b, scratch);
            tensors.push_back({uid_scale, &scale});
            tensors.push_back({uid_masked, &masked});
            if (key.pass != AttentionPass::forward) tensors.push_back({uid_one, &one});
            const CudnnPlan& plan = key.sizes.B - b < part ? rest : whole;
            void* const workspace = scratch + row_sums_bytes(key, part);
            if (try_execute(plan, std::move(tensors), workspace, stream) != CUDNN_STATUS_SUCCESS) return false;
        }
        return true;
    }
};

}  // namespace

std::string cudnn_version() { return "cuDNN " + version_text(cudnnGetVersion()); }

std::string cudnn_unavailable() {
    const size_t version = cudnnGetVersion();
    if (version >= OLDEST_CUDNN && version / 10000 == CUDNN_MAJOR) return "";
    return format("%s is here, %s or a later %d is needed", cudnn_version().c_str(), version_text(OLDEST_CUDNN).c_str(),
                  CUDNN_MAJOR);
}

OwnedRoute cudnn_chosen_route(const AttentionKey& key, int64_t part_bytes, const std::string& kept) try {
    int candidate;
    if (std::sscanf(kept.c_str(), "%d engine", &candidate) != 1 || candidate < 0) return nullptr;
    auto route = std::make_unique<CudnnRoute>(key, part_bytes, candidate);
    return route->has_plans() && (kept + " ").starts_with(route->choice() + " ") ? std::move(route) : nullptr;
} catch (const Error&) {
    return nullptr;
}

OwnedRoute cudnn_first_route(const AttentionKey& key, int64_t part_bytes, std::string& reason) try {
    auto route = std::make_unique<CudnnRoute>(key, part_bytes, 0);
    if (route->has_plans()) return route;
    reason = "cuDNN has no engine for this shape on this GPU";
    const CudnnPlan& missing = route->whole ? route->rest : route->whole;
    if (!missing.reason.empty()) reason += ": " + missing.reason;
    return nullptr;
} catch (const Error& error) {
    reason = error.what();
    return nullptr;
}

std::vector<OwnedRoute> cudnn_candidates(const AttentionKey& key, int64_t part_bytes) {
    constexpr size_t max_plans = 4;
    std::vector<OwnedRoute> routes;
    for (int next = 0; routes.size() < max_plans;) {
        auto route = std::make_unique<CudnnRoute>(key, part_bytes, next);
        if (!route->has_plans()) break;
        next = route->whole.candidate + 1;
        routes.push_back(std::move(route));
    }
    return routes;
}

int64_t cudnn_scratch_limit(const AttentionKey& key, int64_t part_bytes) {
    const int part = part_size(key, part_bytes);
    return row_sums_bytes(key, part) + workspace_limit(key.pass, part_of(key.sizes, part));
}

}  // namespace gpu
