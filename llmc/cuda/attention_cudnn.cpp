// attention_cudnn.cpp: runs the plans of cudnn_plan.h.
//
// Bytes: forward reads qkv and writes out once, and lse. Backward, not deterministic, adds up dQ in float memory of its
// own, mostly in the second-level cache. The deterministic form writes dS, (B, NH, T, T) in bf16, and reads it again:
// 3.2 GB a layer for B = 64, NH = 12, T = 1024. It is the default all the same: the same seed gives the same bits. It
// takes the micro-batch in parts, so that dS has part_bytes at most, whatever B is; the other has nothing to gain by
// them.
//
// cuDNN cannot be asked whether an engine is deterministic: it has a note for those that are not, and sets it on none.
// test_gpu_cudnn.cu compares the bits of several runs.
#include "cuda/attention_cudnn.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <map>

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

// Never destroyed: at exit the driver may be gone. One host thread queues the work of a GPU.
cudnnHandle_t handle() {
    static const cudnnHandle_t handle = [] {
        cudnnHandle_t h;
        CUDNN_CHECK(cudnnCreate(&h));
        return h;
    }();
    return handle;
}

std::string version_text(size_t v) { return format("%d.%d.%d", int(v / 10000), int(v / 100 % 100), int(v % 100)); }

// Why cuDNN, as it is here, is not to be used for any shape; empty: nothing is in its way.
std::string obstacle() {
    const size_t version = cudnnGetVersion();
    if (!choice().cudnn) return "as chosen";
    if (version < OLDEST_CUDNN || version / 10000 != CUDNN_MAJOR)
        return format("cuDNN %s is here, %s or a later %d is needed", version_text(version).c_str(),
                      version_text(OLDEST_CUDNN).c_str(), CUDNN_MAJOR);
    return "";
}

// ---- Plans

struct Prepared {
    CudnnPlans found;
    size_t chosen = 0;
    bool final = true;     // false: to be timed when it first runs
    std::string obstacle;  // why there is no plan
};

using Key = std::pair<AttentionPass, CudnnShape>;

std::map<Key, Prepared>& prepared() {
    static std::map<Key, Prepared>& prepared = *new std::map<Key, Prepared>;  // never destroyed, as the handle
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

// What an earlier run chose, if it is still offered.
void recall_choice(const Key& key, Prepared& p) {
    size_t index = 0;
    int engine = 0;
    const bool is_kept = sscanf(choice_for(choice_key(key)).c_str(), "%zu %d", &index, &engine) == 2;
    if (is_kept && index < p.found.plans.size() && p.found.plans[index].engine == engine)
        p.chosen = index;
    else
        p.final = p.found.plans.size() == 1;
}

const Prepared& prepare(const Key& key) {
    constexpr size_t candidates = 4;  // of one engine and another, which the heuristics offer
    const auto [at, is_new] = prepared().try_emplace(key);
    Prepared& p = at->second;
    if (!is_new) return p;
    try {
        p.found = plan_attention(key.first, key.second, {handle(), ""}, autotuning() ? candidates : 1);
        if (p.found.plans.empty()) p.obstacle = "cuDNN has no engine for this shape on this GPU";
    } catch (const Error& error) {
        p.obstacle = error.what();
    }
    if (!p.found.plans.empty() && autotuning()) recall_choice(key, p);
    return p;
}

// Null where the shape was not prepared, or cuDNN has nothing for it.
Prepared* find(const Key& key) {
    if (!obstacle().empty()) return nullptr;
    const auto at = prepared().find(key);
    return at == prepared().end() || !at->second.obstacle.empty() ? nullptr : &at->second;
}

// ---- Running

struct Binding {
    Uid uid;
    const void* address;
};

void execute(const CudnnPlan& plan, const std::vector<Binding>& tensors, void* workspace, Stream stream) {
    std::vector<int64_t> ids;
    std::vector<const void*> addresses;
    for (const auto& [uid, address] : tensors) ids.push_back(uid), addresses.push_back(address);
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set_attribute(pack.handle, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, int64_t(ids.size()), ids.data());
    set_attribute(pack.handle, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, int64_t(addresses.size()),
                  addresses.data());
    set_attribute(pack.handle, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    CUDNN_CHECK(cudnnBackendFinalize(pack.handle));
    CUDNN_CHECK(cudnnSetStream(handle(), stream));
    CUDNN_CHECK(cudnnBackendExecute(handle(), plan.plan.handle, pack.handle));
}

bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

// Runs every candidate on the call's own operands: results are written and not added to, so they come out right.
void choose_fastest(const Key& key, Prepared& p, const std::vector<Binding>& tensors, void* workspace, Stream stream) {
    constexpr float clearly = 0.98f;  // else the first stays
    float best_ms = 0.0f, first_ms = 0.0f;
    for (const CudnnPlan& plan : p.found.plans) {
        const size_t i = size_t(&plan - p.found.plans.data());
        const float ms = least_ms(stream, [&] { execute(plan, tensors, workspace, stream); });
        if (i == 0) first_ms = ms;
        if (i != 0 && ms >= clearly * best_ms) continue;
        p.chosen = i, best_ms = ms;
    }
    p.final = true;
    keep_choice(choice_key(key), format("%zu %d %.4f %.4f", p.chosen, p.found.plans[p.chosen].engine, double(best_ms),
                                        double(first_ms)));
}

void run(const Key& key, Prepared& p, std::vector<Binding> tensors, void* workspace, Stream stream) {
    // The numbers are read before execute returns.
    const float scale = 1.0f / std::sqrt(float(key.second.HS)), masked = -INFINITY, one = 1.0f;
    tensors.push_back({uid_scale, &scale});
    tensors.push_back({uid_masked, &masked});
    if (key.first != AttentionPass::forward) tensors.push_back({uid_one, &one});
    if (!p.final && autotuning() && !is_capturing(stream)) choose_fastest(key, p, tensors, workspace, stream);
    execute(p.found.plans[p.chosen], tensors, workspace, stream);
}

// ---- Parts of a micro-batch, and where their working memory is

// Sequences that backward takes at a time, as even as can be. Each part's lse begins at a multiple of 16 bytes.
int part_size(AttentionPass pass, const CudnnShape& all) {
    if (pass != AttentionPass::deterministic_backward) return all.B;
    const int64_t T = all.T, ds_bytes = all.NH * T * T * int64_t(sizeof(bf16));
    const int64_t step = all.NH * T % 4 == 0 ? 1 : 4, most = std::max(step, choice().part_bytes / ds_bytes);
    if (most >= all.B) return all.B;
    return int(round_up(ceil_div<int64_t>(all.B, ceil_div<int64_t>(all.B, most)), step));
}

CudnnShape part_of(const CudnnShape& all, int sequences) { return {sequences, all.T, all.NH, all.HS}; }

// Offsets into device_scratch, for a part.
struct BackwardScratch {
    int64_t dq_sums, workspace, bytes;  // after the row sums

    BackwardScratch(AttentionPass pass, const CudnnShape& part) {
        constexpr int64_t alignment = 256;
        const int64_t rows = int64_t(part.B) * part.NH * part.T;
        const int64_t sums = pass == AttentionPass::backward ? rows * part.HS : 0;
        dq_sums = round_up(rows * int64_t(sizeof(float)), alignment);
        workspace = dq_sums + round_up(sums * int64_t(sizeof(float)), alignment);
        bytes = workspace + workspace_limit(pass, part);
    }
};

}  // namespace

void set_attention(AttentionChoice chosen) { choice() = chosen; }

int64_t cudnn_attention_scratch_bytes(int B, int T, int NH, int HS) {
    if (!obstacle().empty()) return 0;
    const CudnnShape all{B, T, NH, HS};
    const int64_t forward = workspace_limit(AttentionPass::forward, all);
    return std::max(forward, BackwardScratch(backward_pass(), part_of(all, part_size(backward_pass(), all))).bytes);
}

std::string cudnn_prepare_attention(int B, int T, int NH, int HS, bool backward) {
    const CudnnShape all{B, T, NH, HS};
    if (!obstacle().empty()) return "kernels of ours: " + obstacle();
    const std::string cudnn = "cuDNN " + version_text(cudnnGetVersion());
    const Key forward{AttentionPass::forward, all};
    const Prepared& forward_plans = prepare(forward);
    std::string text = forward_plans.obstacle.empty() ? cudnn : "kernels of ours: " + forward_plans.obstacle;
    if (!backward) return text;

    const AttentionPass pass = backward_pass();
    const int part = part_size(pass, all), rest = B % part;
    const Prepared* plans = &prepare({pass, part_of(all, part)});
    if (rest && plans->obstacle.empty()) plans = &prepare({pass, part_of(all, rest)});
    if (!plans->obstacle.empty()) return text + "; backward kernels of ours: " + plans->obstacle;
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
    const int part = part_size(pass, all), rest = B % part;
    if (!find({pass, part_of(all, part)}) || (rest && !find({pass, part_of(all, rest)}))) return false;

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
        if (pass == AttentionPass::backward) tensors.push_back({uid_dq_sums, scratch + at.dq_sums});
        run(key, *find(key), std::move(tensors), scratch + at.workspace, stream);
    }
    return true;
}

}  // namespace gpu
