// memory.h: the tensors of a model in device memory: their sizes, and where each lies. GPT2 allocates what these
// functions count, and model_memory plans it.
#pragma once
#include <array>
#include <vector>

#include "base/device.h"
#include "model/params.h"

// Activations that a layer computes from the residual stream x. backward reads all of them. Layers share the memory of
// the activations that are recomputed. With tensor parallelism over P ranks (tensor_parallel.h), 3C, C and 4C of qkv,
// att, fc and gelu, and NH of lse, are divided by P. With sequence parallelism N of the other activations is too.
template <class floatX>
struct LayerActivations {
    floatX* ln1;                 // (N, C)
    float *ln1_mean, *ln1_rstd;  // (N)
    floatX* qkv;                 // (N, 3C)    also the key-value cache in generation
    floatX* att;                 // (N, C)
    float* lse;                  // (B, NH, T)
    floatX* residual2;           // (N, C)     x + attproj's output
    floatX* ln2;                 // (N, C)
    float *ln2_mean, *ln2_rstd;  // (N)
    floatX* fc;                  // (N, 4C)    before GELU
    floatX* gelu;                // (N, 4C)
    floatX* residual3;           // (N, C)     residual2 + fcproj's output: the next layer's x
};

// train keeps every layer's activations and has gradients. generate keeps every layer's qkv. eval keeps no activations
// beyond the current layer's.
enum class Purpose { train, generate, eval };

// Activations that backward recomputes, to save memory. Each layer keeps 16 C elements per token. none: nothing is
// recomputed. gelu: GELU's output, which saves 4 C of the 16 C. layer: all of a layer's activations but its output, so
// C of the 16 C stay; backward repeats the layer's LayerNorms, attention and 8/12 of the FLOPs of its matmuls
// (all but fcproj). The last layer is never recomputed. A step of 12 layers with C = 384 takes 3 % longer on a CPU with
// gelu, and 21 % longer with layer.
enum class Recompute { none, gelu, layer };

// Options that change memory use: recomputation, logit chunks, master weights, and how ranks share a bucket.
// The optimizer's state in host memory (--offload).
enum class Offload { none, moments, master, all };

struct MemoryOptions {
    Recompute recompute = Recompute::none;
    int logit_chunks = 0;        // chunks in which the logits are computed; 0: the backend chooses
    bool master_weights = true;  // fp32 copies of bf16 weights, in the optimizer
    MomentDtype moments = MomentDtype::fp32;
    Offload offload = Offload::none;
    int virtual_ranks = 1;         // number in the whole run (GradReducer); each bucket is padded to divide evenly
    int shards = 1;                // ranks that share the optimizer's state (ZeRO-1); divides virtual_ranks
    bool shard_gradients = false;  // ZeRO-2: a rank keeps its shard of the gradients, and two layers' while it computes
    bool shard_weights = false;    // ZeRO-3: a rank keeps its shard of the weights, and two layers' while it computes
    Dtype grad_dtype = Dtype::fp32;  // dtype of gradients in collectives (--grad-dtype)
    Dtype grad_accum = Dtype::fp32;  // dtype of the sums of gradients over micro-steps (--grad-accum)
    bool muon = false;               // orthogonalizes matrices (--optimizer muon)
    bool fp8 = false;                // the layers' matmuls of a bf16 model are in FP8 (--precision fp8)
    TensorShard tensor = {};         // this rank's shard of each layer (--tensor-parallel)
    bool sequence_parallel = false;  // tensor-parallel ranks also divide the rows of the residual stream

    // Whether every micro-step is summed over the ranks and added to memory apart from backward's, which has the
    // gradients of bucket 0 and of two layers.
    bool sums_apart() const { return shard_gradients || grad_accum == Dtype::bf16; }
};

struct MemoryItem {
    const char* purpose;
    int64_t bytes;
    bool on_host = false;  // host memory, even where the device has its own
};

// All tensors in the activations' memory block.
template <class floatX>
struct Activations {
    std::vector<LayerActivations<floatX>> layer;
    floatX* encoded;              // (N, C)
    floatX* lnf;                  // (N, C)
    float *lnf_mean, *lnf_rstd;   // (N)
    float* losses;                // (N)
    float* amax;                  // (L, 4, 2)  with FP8, for a layer's matmuls: the largest magnitude of the input,
                                  //            and that of the output's gradient
    float* loss;                  // (1)        sum of scale * mean loss over the micro-steps so far
    floatX* dx;                   // (N, C)     gradient of the residual stream
    floatX* dtmp;                 // (N, C)     gradient of lnf, then in each layer of ln2, att and ln1
    floatX* dlarge;               // (N, 4C)    gradients of fc and qkv
    float* logits;                // (P, Vp)    of one row, for generation
    int* first_row;               // (Vp)       zeros, which select this row
    std::byte* exponentials;      // (head_bytes)    of logit_rows rows
    float *target_logits, *sums;  // (logit_rows)    a and S of ops.inc's head
    // With tensor parallelism over P ranks:
    floatX* all_rows;  // (N, C)     rows of all ranks, or a rank's part of a sum
    float* parts;      // (P, logit_rows)    target_logits or sums of each shard of the vocabulary
};

// Device memory for a flat buffer of the parameters or gradients, bucket by bucket.
//
// With as many layer slots as layers, every bucket has memory of its own, in the order of the flat buffer. With fewer
// slots, only bucket 0 has memory of its own, and the layers l and l + layer_slots share theirs.
template <class T>
struct BucketBuffer {
    ParamLayout layout;
    int layer_slots;
    DeviceBuffer<T> memory;  // empty with 0 slots

    BucketBuffer(const ParamLayout& layout, int layer_slots, const char* purpose)
        : layout(layout), layer_slots(layer_slots), memory(elements(layout, layer_slots), purpose) {}

    static int64_t elements(const ParamLayout& layout, int layer_slots) {
        return layer_slots == 0 ? 0 : layout.bucket(0).end + layer_slots * layout.layer_stride;
    }
    // The number of a bucket's memory: 0 for bucket 0, 1 ... layer_slots for the layers.
    int slot(int b) const { return b == 0 ? 0 : 1 + (b - 1) % layer_slots; }
    T* bucket(int b) const {
        return memory.data + (b == 0 ? 0 : layout.bucket(0).end + (slot(b) - 1) * layout.layer_stride);
    }
    // Tensor p of layer l.
    T* tensor(Param p, int l) const {
        const int b = layout.bucket_of(p, l);
        return bucket(b) + layout.offset(p, l) - layout.bucket(b).begin;
    }
};

// A layer's weight matrices. With FP8 their matmuls read packed copies, as the head does of wte, in bucket 0.
inline constexpr Param layer_matrices[] = {qkvw, attprojw, fcw, fcprojw};

// Elements of acts.amax.
inline int64_t amax_count(const GPT2Config& config) { return config.L * int64_t(std::size(layer_matrices)) * 2; }

inline int local_heads(const ParamLayout& layout) { return layout.config.NH / layout.shard.count; }

int choose_logit_rows(int B, int T, int logit_chunks);

// Takes all activations of N tokens from the arena.
template <class floatX>
Activations<floatX> place_activations(Arena& arena, const ParamLayout& layout, Purpose purpose, MemoryOptions options,
                                      int64_t N, int logit_rows);

// The backend's copies of wte and, with FP8, of a matrix in each layer, or in the current one with shard_weights.
using PackedWeights = std::array<std::vector<std::byte*>, NUM_PARAMS>;
template <class floatX>
PackedWeights place_packed(Arena& arena, const ParamLayout& layout, const MemoryOptions& options);

// Layers whose gradients have memory of their own. Backward writes gradients of two layers at a time: the bias
// gradient of the layer below is computed with those of a layer.
int gradient_slots(const GPT2Config& config, Purpose purpose, MemoryOptions options);
// Layers whose weights have memory of their own. With shard_weights, one layer's arrive while the other one computes.
int weight_slots(const GPT2Config& config, MemoryOptions options);

template <class floatX>
int64_t scratch_of(const ParamLayout& layout, int B, int T, bool muon);
// Bytes of the rounded operands of a layer's largest matmul.
int64_t fp8_workspace_bytes(const ParamLayout& layout, int N, bool fp8);

// The memory that GPT2(...) will allocate. Allocates nothing.
template <class floatX>
std::vector<MemoryItem> model_memory(const GPT2Config& config, Purpose purpose, int B, int T,
                                     MemoryOptions options = {});
