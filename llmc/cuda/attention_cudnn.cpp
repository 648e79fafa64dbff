// attention_cudnn.cpp: bf16 attention by cuDNN: chooses, times and executes the plans of cudnn_plan.h.
//
// Memory traffic: forward reads qkv, and writes out and lse, once. Non-deterministic backward accumulates dQ in a float
// buffer, mostly in the L2 cache. Deterministic backward writes dS, (B, NH, T, T) in bf16, and reads it again: 3.2 GB
// per layer for B = 64, NH = 12, T = 1024. Two engines of newer versions of cuDNN store no dS: on Blackwell one that is
// tried first, and on Hopper one that adds dQ up in a fixed order and is tried last, by the autotuner. Deterministic
// backward is the default, so that the same seed gives the same bits.
// It processes the micro-batch in parts, so that dS takes at most part_bytes for any B; large parts occupy the GPU
// better.
// Non-deterministic backward would gain nothing from parts.
//
// cuDNN does not say whether an engine is deterministic: it defines a numerical note for engines that are not, but sets
// it on none. test_gpu_cudnn.cu compares the bits of several runs instead.
#include "cuda/attention_cudnn.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
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
    if (!choice().cudnn) return "as chosen";
    if (version < OLDEST_CUDNN || version / 10000 != CUDNN_MAJOR)
        return format("cuDNN %s is here, %s or a later %d is needed", version_text(version).c_str(),
                      version_text(OLDEST_CUDNN).c_str(), CUDNN_MAJOR);
    return "";
}

// ---- Plans

struct Prepared {
    CudnnPlans candidates;    // the first plan; also others if one of them was chosen by time
    size_t chosen = 0;        // index in the candidates
    int version = -1;         // gpu::algorithms_version() when the plan was chosen
    std::string unavailable;  // why there is no plan
};

using Key = std::pair<AttentionPass, CudnnShape>;

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

CudnnPlans make_plans(const Key& key, size_t max_plans) {
    return plan_attention(key.first, key.second, {handle(), ""}, max_plans);
}

const Prepared& prepare(const Key& key) {
    const auto [at, is_new] = prepared().try_emplace(key);
    Prepared& p = at->second;
    if (!is_new) return p;
    try {
        p.candidates = make_plans(key, 1);
        if (p.candidates.plans.empty()) {
            p.unavailable = "cuDNN has no engine for this shape on this GPU";
            if (!p.candidates.reason.empty()) p.unavailable += ": " + p.candidates.reason;
        }
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

void execute(const CudnnPlan& plan, const std::vector<Binding>& tensors, void* workspace, Stream stream) {
    CUDNN_CHECK(try_execute(plan, tensors, workspace, stream));
}

bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// Times candidates on the operands of the current call. That is safe because a plan overwrites its results and does not
// accumulate into them.
void choose_fastest(const Key& key, Prepared& p, const std::vector<Binding>& tensors, void* workspace, Stream stream) {
    constexpr size_t max_candidates = 4;
    p.candidates = make_plans(key, max_candidates);
    const std::vector<CudnnPlan>& plans = p.candidates.plans;
    const std::optional<Fastest> best = fastest(stream, plans.size(), [&](size_t i) {
        if (try_execute(plans[i], tensors, workspace, stream) == CUDNN_STATUS_SUCCESS) return true;
        CUDA_CHECK(cudaStreamSynchronize(stream));  // reports an earlier error that is not the candidate's
        return false;
    });
    p.chosen = best ? best->index : 0;
    if (best)
        keep_choice(choice_key(key),
                    choice_text(PlanChoice{int(p.chosen), plans[p.chosen].engine}, {best->ms, best->first_ms}));
}

// Takes the plan that was chosen by time, if cuDNN still offers it, else the first.
void take_choice(const Key& key, Prepared& p) {
    p.chosen = 0;
    const std::optional<PlanChoice> choice = parse_plan_choice(choice_for(choice_key(key)));
    if (!choice) return;
    const size_t index = size_t(choice->plan);
    if (index >= p.candidates.plans.size()) p.candidates = make_plans(key, index + 1);
    if (index < p.candidates.plans.size() && p.candidates.plans[index].engine == choice->engine) p.chosen = index;
}

void settle(const Key& key, Prepared& p, const std::vector<Binding>& tensors, void* workspace, Stream stream) {
    p.version = algorithms_version();
    if (timing_algorithms() && choice_for(choice_key(key)).empty())
        choose_fastest(key, p, tensors, workspace, stream);
    else
        take_choice(key, p);
}

void run(const Key& key, Prepared& p, std::vector<Binding> tensors, void* workspace, Stream stream) {
    // cuDNN reads these host values before execute returns.
    const float scale = 1.0f / std::sqrt(float(key.second.HS)), masked = -INFINITY, one = 1.0f;
    tensors.push_back({uid_scale, &scale});
    tensors.push_back({uid_masked, &masked});
    if (key.first != AttentionPass::forward) tensors.push_back({uid_one, &one});
    if (p.version != algorithms_version() && !is_capturing(stream)) settle(key, p, tensors, workspace, stream);
    execute(p.candidates.plans[p.chosen], tensors, workspace, stream);
}

// ---- Parts of a micro-batch, and their workspace

// Number of sequences that backward processes at a time; the parts are as equal as possible. Each part's lse begins at
// a multiple of 16 bytes.
int part_size(AttentionPass pass, const CudnnShape& all) {
    if (pass != AttentionPass::deterministic_backward) return all.B;
    const int64_t T = all.T, ds_bytes = all.NH * T * T * int64_t(sizeof(bf16));
    const int64_t part_bytes = choice().part_bytes ? choice().part_bytes : device_info().memory_bytes / 32;
    const int64_t step = all.NH * T % 4 == 0 ? 1 : 4, max_part = std::max(step, part_bytes / ds_bytes);
    if (max_part >= all.B) return all.B;
    return int(round_up(ceil_div<int64_t>(all.B, ceil_div<int64_t>(all.B, max_part)), step));
}

CudnnShape part_of(const CudnnShape& all, int sequences) { return {sequences, all.T, all.NH, all.HS}; }

// Layout of device_scratch for one part: row sums at offset 0, then the workspace.
struct BackwardScratch {
    int64_t workspace, bytes;  // an offset, and the total size

    BackwardScratch(AttentionPass pass, const CudnnShape& part) {
        constexpr int64_t alignment = 256;
        const int64_t rows = int64_t(part.B) * part.NH * part.T;
        workspace = round_up(rows * int64_t(sizeof(float)), alignment);
        bytes = workspace + workspace_limit(pass, part);
    }
};

}  // namespace

void set_attention(AttentionChoice chosen) { choice() = chosen; }

int64_t cudnn_attention_scratch_bytes(int B, int T, int NH, int HS) {
    if (!unavailable().empty()) return 0;
    const CudnnShape all{B, T, NH, HS};
    const int64_t forward = workspace_limit(AttentionPass::forward, all);
    return std::max(forward, BackwardScratch(backward_pass(), part_of(all, part_size(backward_pass(), all))).bytes);
}

std::string cudnn_prepare_attention(int B, int T, int NH, int HS, bool backward) {
    const CudnnShape all{B, T, NH, HS};
    if (!unavailable().empty()) return "kernels of ours: " + unavailable();
    const std::string cudnn = "cuDNN " + version_text(cudnnGetVersion());
    const Key forward{AttentionPass::forward, all};
    const Prepared& forward_plans = prepare(forward);
    std::string text = forward_plans.unavailable.empty() ? cudnn : "kernels of ours: " + forward_plans.unavailable;
    if (!backward) return text;

    const AttentionPass pass = backward_pass();
    const int part = part_size(pass, all), last_part = B % part;
    const Prepared* plans = &prepare({pass, part_of(all, part)});
    if (last_part && plans->unavailable.empty()) plans = &prepare({pass, part_of(all, last_part)});
    if (!plans->unavailable.empty()) return text + "; backward kernels of ours: " + plans->unavailable;
    text += "; backward " + cudnn + (choice().deterministic ? ", deterministic" : ", not deterministic");
    return part == B ? text : text + format(", %d of %d sequences at a time", part, B);
}

bool cudnn_attention_forward(bf16* out, float* lse, const bf16* qkv, int B, int T, int NH, int HS, Stream stream) {
    const Key key{AttentionPass::forward, {B, T, NH, HS}};
    Prepared* plans = find(key);
    if (!plans) return false;
    const int64_t C = int64_t(NH) * HS;
    void* workspace = device_scratch(workspace_limit(key.first, key.second));
    run(key, *plans, {{uid_q, qkv}, {uid_k, qkv + C}, {uid_v, qkv + 2 * C}, {uid_out, out}, {uid_lse, lse}}, workspace,
        stream);
    return true;
}

bool cudnn_attention_backward(bf16* dqkv, const bf16* dout, const bf16* out, const float* lse, const bf16* qkv, int B,
                              int T, int NH, int HS, Stream stream) {
    const CudnnShape all{B, T, NH, HS};
    const AttentionPass pass = backward_pass();
    const int part = part_size(pass, all), last_part = B % part;
    if (!find({pass, part_of(all, part)}) || (last_part && !find({pass, part_of(all, last_part)}))) return false;

    const int64_t C = int64_t(NH) * HS;
    const BackwardScratch at(pass, part_of(all, part));
    char* scratch = static_cast<char*>(device_scratch(at.bytes));
    for (int b = 0; b < B; b += part) {
        const Key key{pass, part_of(all, std::min(part, B - b))};
        const int64_t tokens = int64_t(b) * T;
        const bf16* x = qkv + tokens * 3 * C;
        bf16* dx = dqkv + tokens * 3 * C;
        std::vector<Binding> tensors = {{uid_q, x},
                                        {uid_k, x + C},
                                        {uid_v, x + 2 * C},
                                        {uid_out, out + tokens * C},
                                        {uid_lse, lse + tokens * NH},
                                        {uid_dout, dout + tokens * C},
                                        {uid_dq, dx},
                                        {uid_dk, dx + C},
                                        {uid_dv, dx + 2 * C},
                                        {uid_row_sums, scratch}};
        run(key, *find(key), std::move(tensors), scratch + at.workspace, stream);
    }
    return true;
}

}  // namespace gpu
