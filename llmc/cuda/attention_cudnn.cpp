// attention_cudnn.cpp: bf16 attention by cuDNN: chooses, times and executes the plans of cudnn_plan.h.
//
// Memory traffic: forward reads qkv, and writes out and lse, once. Non-deterministic backward accumulates dQ in a float
// buffer, mostly in the L2 cache. Deterministic backward writes dS, (B, NH, T, T) in bf16, and reads it again: 3.2 GB
// per layer for B = 64, NH = 12, T = 1024. Two engines of newer versions of cuDNN store no dS: on Blackwell one that is
// tried first, and on Hopper one that adds dQ up in a fixed order and is tried last, by the autotuner. Deterministic
// backward is the default, so that the same seed gives the same bits.
// It processes the micro-batch in parts, so that dS takes at most a 32nd of the GPU's memory for any B. Large parts
// occupy the GPU better, and dS of a small part may stay in the L2 cache, so --autotune times both. Non-deterministic
// backward would gain nothing from parts.
//
// cuDNN does not say whether an engine is deterministic: it defines a numerical note for engines that are not, but sets
// it on none. test_gpu_cudnn.cu compares the bits of several runs instead.
#include "cuda/attention_cudnn.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>

#include "cuda/algorithm_choices.h"
#include "base/device.h"
#include "cuda/autotune.h"
#include "cuda/cuda_check.h"
#include "cuda/cudnn_plan.h"

namespace gpu {

namespace {

AttentionChoice& choice() {
    static AttentionChoice choice;
    return choice;
}

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

// Why this cuDNN is not used for any shape; empty if it can be used.
std::string unavailable() {
    const size_t version = cudnnGetVersion();
    if (!choice().cudnn) return "cuDNN is turned off";
    if (version < OLDEST_CUDNN || version / 10000 != CUDNN_MAJOR)
        return format("cuDNN %s is here, %s or a later %d is needed", version_text(version).c_str(),
                      version_text(OLDEST_CUDNN).c_str(), CUDNN_MAJOR);
    return "";
}

// ---- Ways to run a pass

using Key = std::pair<AttentionPass, CudnnShape>;

// A way to run a pass on a micro-batch: `part` sequences at a time by one plan, and the last ones by another if they
// are fewer.
struct Way {
    int part = 0;
    int first = 0;  // the candidate from which on the plan was made
    CudnnPlan whole, rest;

    const CudnnPlan& plan(int sequences) const { return sequences == part ? whole : rest; }
};

CudnnShape part_of(const CudnnShape& all, int sequences) { return {sequences, all.T, all.NH, all.HS}; }

PlanChoice choice_of(const Way& way) { return {way.whole.candidate, way.whole.engine, way.part}; }

bool has_plans(const Key& key, const Way& way) { return way.whole && (key.second.B % way.part == 0 || way.rest); }

Way make_way(const Key& key, int part, int first) {
    const auto& [pass, all] = key;
    const CudnnTarget target{handle(), ""};
    Way way{part, first, plan_attention(pass, part_of(all, part), target, first), {}};
    if (const int last = all.B % part; last && way.whole) {
        way.rest = plan_attention(pass, part_of(all, last), target, way.whole.candidate);
        if (!way.rest) way.rest = plan_attention(pass, part_of(all, last), target, 0);
    }
    return way;
}

int64_t ds_bytes(const CudnnShape& s) { return int64_t(s.B) * s.NH * s.T * s.T * int64_t(sizeof(bf16)); }

// Each part's lse begins at a multiple of 16 bytes.
int part_step(const CudnnShape& all) { return all.NH * all.T % 4 == 0 ? 1 : 4; }

bool is_part(const Key& key, int part) {
    const auto& [pass, all] = key;
    const bool smaller = pass == AttentionPass::deterministic_backward && part < all.B;
    return part == all.B || (smaller && part % part_step(all) == 0);
}

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

int largest_part(const Key& key) { return part_size(key, choice().part_bytes.back()); }

// The first plans with the largest part, and smaller parts with the first of these plans that stores dS. A small dS may
// stay in the L2 cache.
std::vector<Way> ways_to_time(const Key& key) {
    constexpr size_t max_plans = 4;
    std::vector<Way> ways;
    const auto add = [&](int part, int first) {
        Way way = make_way(key, part, first);
        const bool found = has_plans(key, way);
        if (found) ways.push_back(std::move(way));
        return found;
    };
    const int largest = largest_part(key);
    while (ways.size() < max_plans && add(largest, ways.empty() ? 0 : ways.back().whole.candidate + 1)) continue;
    int storing = -1;
    for (const Way& way : ways)
        if (storing < 0 && way.whole.workspace_bytes >= ds_bytes(part_of(key.second, largest)))
            storing = way.whole.candidate;
    if (key.first != AttentionPass::deterministic_backward || storing < 0) return ways;
    for (const int64_t bytes : choice().part_bytes)
        if (const int part = part_size(key, bytes); part < ways.back().part || part < largest) add(part, storing);
    return ways;
}

// ---- The chosen way

struct Prepared {
    Way way;
    int version = -1;         // gpu::algorithms_version() when the way was chosen
    std::string unavailable;  // why there is none
};

std::map<Key, Prepared>& prepared() {
    static std::map<Key, Prepared>& prepared = *new std::map<Key, Prepared>;  // never destroyed, like the handle
    return prepared;
}

AttentionPass backward_pass() {
    return choice().deterministic ? AttentionPass::deterministic_backward : AttentionPass::backward;
}

std::string choice_key(const Key& key) {
    constexpr const char* names[] = {"forward", "backward", "backward, deterministic"};
    const auto& [B, T, NH, HS] = key.second;
    return format("%s; cuDNN %s; attention %s B %d T %d NH %d HS %d", device_info().name.c_str(),
                  version_text(cudnnGetVersion()).c_str(), names[int(key.first)], B, T, NH, HS);
}

// Makes the plans of the kept choice, and returns true; or makes the first plans, if there is no choice or cuDNN no
// longer offers it.
bool take_choice(const Key& key, Prepared& p) {
    const auto make = [&](int part, int first) {
        if (p.way.part != part || p.way.first != first) p.way = make_way(key, part, first);
        return has_plans(key, p.way);
    };
    const std::optional<PlanChoice> kept = parse_plan_choice(choice_for(choice_key(key)));
    if (kept && is_part(key, kept->part) && make(kept->part, kept->plan) && choice_of(p.way) == *kept) return true;
    if (make(largest_part(key), 0)) return false;
    p.unavailable = "cuDNN has no engine for this shape on this GPU";
    const CudnnPlan& missing = p.way.whole ? p.way.rest : p.way.whole;
    if (!missing.reason.empty()) p.unavailable += ": " + missing.reason;
    return false;
}

const Prepared& prepare(Key key) {
    Prepared& p = prepared()[key];
    try {
        if (p.unavailable.empty()) take_choice(key, p);
    } catch (const Error& error) {
        p.unavailable = error.what();
    }
    return p;
}

// Null if the shape was not prepared, or if cuDNN has no plan for it.
Prepared* find(const Key& key) {
    if (!unavailable().empty()) return nullptr;
    const auto at = prepared().find(key);
    return at == prepared().end() || !at->second.unavailable.empty() ? nullptr : &at->second;
}

// ---- Running

struct Binding {
    Uid uid;
    const void* address;
};

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

bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// Layout of device_scratch for a part: row sums at offset 0, which forward does not have, then the plan's memory.
int64_t row_sums_bytes(const Key& key, int part) {
    constexpr int64_t alignment = 256;
    if (key.first == AttentionPass::forward) return 0;
    return round_up(int64_t(part) * key.second.NH * key.second.T * int64_t(sizeof(float)), alignment);
}
int64_t scratch_bytes(const Key& key, const Way& way) {
    return row_sums_bytes(key, way.part) + std::max(way.whole.bytes(), way.rest.bytes());
}

// The tensors of the sequences from b on. The row sums are at `scratch`.
using Tensors = std::function<std::vector<Binding>(int64_t b, void* scratch)>;

cudnnStatus_t try_run(const Key& key, const Way& way, const Tensors& tensors_of, Stream stream) {
    // cuDNN reads these host values before execute returns.
    const float scale = 1.0f / std::sqrt(float(key.second.HS)), masked = -INFINITY, one = 1.0f;
    char* const scratch = static_cast<char*>(device_scratch(scratch_bytes(key, way)));
    cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
    for (int b = 0; b < key.second.B && status == CUDNN_STATUS_SUCCESS; b += way.part) {
        std::vector<Binding> tensors = tensors_of(b, scratch);
        tensors.push_back({uid_scale, &scale});
        tensors.push_back({uid_masked, &masked});
        if (key.first != AttentionPass::forward) tensors.push_back({uid_one, &one});
        const CudnnPlan& plan = way.plan(std::min(way.part, key.second.B - b));
        status = try_execute(plan, std::move(tensors), scratch + row_sums_bytes(key, way.part), stream);
    }
    return status;
}

// Times ways on the operands of the current call, and keeps the fastest. That is safe because a plan overwrites its
// results and does not accumulate into them.
void choose_fastest(const Key& key, Prepared& p, const Tensors& tensors, Stream stream) {
    std::vector<Way> ways = ways_to_time(key);
    int64_t bytes = 0;
    for (const Way& way : ways) bytes = std::max(bytes, scratch_bytes(key, way));
    device_reserve_scratch(bytes);
    const std::optional<Fastest> best = fastest(stream, ways.size(), [&](size_t i) {
        if (try_run(key, ways[i], tensors, stream) == CUDNN_STATUS_SUCCESS) return true;
        CUDA_CHECK(cudaStreamSynchronize(stream));  // reports an earlier error that is not the candidate's
        return false;
    });
    if (!best) return;
    p.way = std::move(ways[best->index]);
    p.way.first = p.way.whole.candidate;
    keep_choice(choice_key(key), choice_text(choice_of(p.way), {best->ms, best->first_ms}));
}

void run(const Key& key, Prepared& p, const Tensors& tensors, Stream stream) {
    if (p.version != algorithms_version() && !is_capturing(stream)) {
        p.version = algorithms_version();
        if (!take_choice(key, p) && timing_algorithms()) choose_fastest(key, p, tensors, stream);
        device_reserve_scratch(scratch_bytes(key, p.way));
    }
    CUDNN_CHECK(try_run(key, p.way, tensors, stream));
}

}  // namespace

void set_attention(AttentionChoice chosen) { choice() = chosen; }

int64_t cudnn_attention_scratch_bytes(int B, int T, int NH, int HS) {
    if (!unavailable().empty()) return 0;
    const CudnnShape all{B, T, NH, HS};
    const Key forward{AttentionPass::forward, all}, backward{backward_pass(), all};
    const Prepared *f = find(forward), *b = find(backward);
    if (f) return std::max(scratch_bytes(forward, f->way), b ? scratch_bytes(backward, b->way) : 0);
    const int part = largest_part(backward);
    return std::max(workspace_limit(forward.first, all),
                    row_sums_bytes(backward, part) + workspace_limit(backward.first, part_of(all, part)));
}

std::string cudnn_prepare_attention(int B, int T, int NH, int HS, bool backward) {
    const CudnnShape all{B, T, NH, HS};
    if (!unavailable().empty()) return "kernels of ours: " + unavailable();
    const std::string cudnn = "cuDNN " + version_text(cudnnGetVersion()) + format(", engine ");
    const Prepared& forward = prepare({AttentionPass::forward, all});
    std::string text = forward.unavailable.empty() ? cudnn + std::to_string(forward.way.whole.engine)
                                                   : "kernels of ours: " + forward.unavailable;
    if (!backward) return text;

    const Prepared& p = prepare({backward_pass(), all});
    if (!p.unavailable.empty()) return text + "; backward kernels of ours: " + p.unavailable;
    text += "; backward " + cudnn + std::to_string(p.way.whole.engine);
    text += choice().deterministic ? ", deterministic" : ", not deterministic";
    return p.way.part == B ? text : text + format(", %d of %d sequences at a time", p.way.part, B);
}

bool cudnn_attention_forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream stream) {
    const Key key{AttentionPass::forward, {B, T, NH, HS}};
    Prepared* const p = find(key);
    if (!p) return false;
    const int64_t C = int64_t(NH) * HS;
    const auto tensors = [&](int64_t, void*) -> std::vector<Binding> {
        return {{uid_q, qkv}, {uid_k, qkv + C}, {uid_v, qkv + 2 * C}, {uid_out, out}, {uid_lse, lse}};
    };
    run(key, *p, tensors, stream);
    return true;
}

bool cudnn_attention_backward(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B,
                              int T, int NH, int HS, Stream stream) {
    const Key key{backward_pass(), {B, T, NH, HS}};
    Prepared* const p = find(key);
    if (!p) return false;
    const int64_t C = int64_t(NH) * HS;
    const auto tensors = [&](int64_t b, void* row_sums) -> std::vector<Binding> {
        const int64_t tokens = b * T;
        const bf16* const x = qkv + tokens * 3 * C;
        bf16* const dx = dqkv + tokens * 3 * C;
        return {{uid_q, x},
                {uid_k, x + C},
                {uid_v, x + 2 * C},
                {uid_out, out + tokens * C},
                {uid_lse, lse + tokens * NH},
                {uid_dout, dout + tokens * C},
                {uid_dq, dx},
                {uid_dk, dx + C},
                {uid_dv, dx + 2 * C},
                {uid_row_sums, row_sums}};
    };
    run(key, *p, tensors, stream);
    return true;
}

}  // namespace gpu
