// gpt2.h: the GPT-2 network on the device: weights, activations and gradients; forward, backward and token-by-token
// decoding.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "base/device.h"
#include "model/bucket_buffer.h"
#include "model/params.h"

struct Comm;  // parallel/comm.h

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
// (all but fcproj). The last layer is never recomputed.
enum class Recompute { none, gelu, layer };

// Options that change memory use: recomputation, logit chunks, master weights, and how ranks share a bucket.
struct MemoryOptions {
    Recompute recompute = Recompute::none;
    int logit_chunks = 0;          // chunks in which the logits are computed; 0: the backend chooses
    bool master_weights = true;    // fp32 copies of bf16 weights, in the optimizer
    int virtual_ranks = 1;         // of all ranks together (GradientSum); each bucket is padded to divide evenly
    int shards = 1;                // ranks that share the optimizer's state (ZeRO-1); divides virtual_ranks
    bool shard_gradients = false;  // ZeRO-2: a rank keeps its shard of the gradients, and two layers' while it computes
    bool shard_weights = false;    // ZeRO-3: a rank keeps its shard of the weights, and two layers' while it computes
    bool bf16_gradients = false;   // one bucket of gradients is also stored in bf16, to be sent (--grad-dtype bf16)
    bool fp8 = false;              // the layers' matmuls of a bf16 model are in FP8 (--precision fp8)
    TensorShard tensor = {};       // this rank's shard of each layer (--tensor-parallel)
    bool sequence_parallel = false;  // tensor-parallel ranks also divide the rows of the residual stream
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
    floatX* encoded;             // (N, C)
    floatX* lnf;                 // (N, C)
    float *lnf_mean, *lnf_rstd;  // (N)
    float* losses;               // (N)
    float* amax;                 // (L, 4, 2)  with FP8, for a layer's matmuls: the largest magnitudes of the input and
                                 //            of the output's gradient
    float* loss;                 // (1)        sum of scale * mean loss over the micro-steps so far
    floatX* dx;                  // (N, C)     gradient of the residual stream
    floatX* dtmp;                // (N, C)     gradient of lnf, then in each layer of ln2, att and ln1
    floatX* dlarge;              // (N, 4C)    gradients of fc and qkv
    floatX* logits;              // (logit_rows, Vp)
    // With tensor parallelism over P ranks:
    floatX* all_rows;  // (N, C)     rows of all ranks, or a rank's part of a sum
    float* partials;   // (P, logit_rows, 2)    of each shard of the vocabulary (cross_entropy_shard)
    float* logit_lse;  // (logit_rows)
};

// Called with a bucket's number (params.h). Data-parallel training waits for weights and sends gradients bucket by
// bucket, so that communication overlaps with computation.
using BucketHook = std::function<void(int bucket)>;

// Whether bf16 attention on a GPU may use cuDNN, and whether it must be deterministic. Call it before the first model.
void choose_attention(bool cudnn, bool deterministic);

template <class floatX>
struct GPT2 {
    ParamLayout layout;
    GPT2Config config;
    Purpose purpose;
    Recompute recompute;
    bool fp8, shard_gradients, sequence_parallel;
    int B, T;        // the largest micro-batch that fits
    int logit_rows;  // rows of logits in memory at a time
    Stream stream = nullptr;
    Comm* tensor_ranks = nullptr;  // the tensor-parallel ranks, of which this rank has layout.shard; null: none

    BucketBuffer<floatX> weights;    // shared by layers with shard_weights
    int packed_layers;               // layers whose packed matrices are in memory: all, or one with shard_weights
    DeviceBuffer<std::byte> packed;  // the backend's copies of the matrices
    DeviceBuffer<std::byte> fp8_workspace;  // the operands of one matmul in FP8
    BucketBuffer<float> grads;              // with Purpose::train; shared by layers with shard_gradients
    DeviceBuffer<std::byte> memory;         // the memory that acts points into
    Activations<floatX> acts;
    std::string attention;  // attention backend, for the startup log; empty on the CPU
    // Called before forward, backward or decode reads a bucket's weights. All reads of the previous layer's weights are
    // queued by then. Null: the weights are complete.
    BucketHook before_read;

    // Weights are zero until set_param sets them.
    GPT2(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options = {});

    floatX* w(Param p, int l = 0) { return weights.tensor(p, l); }
    float* g(Param p, int l = 0) { return grads.tensor(p, l); }
    Weight<floatX> matrix(Param p, int l = 0);

    // Copies this rank's shard of a tensor from host floats in memory layout (layout.size(p)), rounded to floatX. Call
    // pack_bucket afterwards.
    void set_param(Param p, int l, const float* values);
    void pack_bucket(int bucket);  // call it after the bucket's weights have changed

    // The smallest number of tokens of a sequence, from T up, that forward takes: sequence parallelism divides them.
    int divisible_tokens(int T) const { return sequence_parallel ? round_up(T, layout.shard.count) : T; }
    // tokens (B, T) on the device; B and T are at most the model's. The last result is acts.lnf, the input of the head:
    // backward or token_losses computes the logits and losses. decode_at: see decode; -1: whole sequences.
    void forward(const int* tokens, int B, int T, int decode_at = -1);
    // After forward: writes the loss of each token to acts.losses. Computes no gradients.
    void token_losses(const int* targets, int B, int T);
    // After forward: adds scale * (gradient of the mean loss) to grads, and scale * mean loss to acts.loss. The first
    // micro-step of a step overwrites the gradients of the matrices; call zero_gradients before it. after(bucket) is
    // called when the bucket's gradients are complete, from the last layer to the embeddings.
    //
    // With shard_gradients every micro-step is a first one, and before(bucket) is called before the memory of the
    // bucket's gradients is written: the gradients there must not be needed any more when it returns.
    void zero_gradients();
    void backward(const int* tokens, const int* targets, int B, int T, int micro_step, float scale,
                  const BucketHook& after = nullptr, const BucketHook& before = nullptr);

    // After forward of one sequence (B = 1) of t tokens: processes the next token, at position t. qkv is the key-value
    // cache, which needs a model whose layers keep their keys: layers that are recomputed share the memory of qkv.
    bool keeps_keys() const { return config.L == 1 || acts.layer[1].qkv != acts.layer[0].qkv; }
    void decode(const int* token, int t);
    // Logits of row `row` of lnf, in device memory: at least V of them.
    const floatX* row_logits(int row);

  private:
    int lnf_tokens = 0;  // tokens that acts.lnf is of: of the last forward, or 1 after decode

    bool is_divided() const { return layout.shard.count > 1; }
    bool divides_rows(int N) const { return sequence_parallel && N > 1; }
    int own_rows(int N) const { return divides_rows(N) ? N / layout.shard.count : N; }
    void gather(void* x, int64_t bytes);
    const floatX* gather_rows(const floatX* x, int N);
    int64_t begin_sum(floatX* parts, int N);
    const floatX* end_sum(int64_t ticket, const floatX* parts, int N);
    const floatX* sum_of_ranks(floatX* parts, int N);
    void embed(const int* tokens, int first_position, int B, int T);
    void head(const int* targets, int N, bool backward, bool accumulate, float scale);

    void about_to_read(int bucket);
    std::byte* packed_copy(Param p, int l);
    float* input_amax(Param weight, int l);
    float* gradient_amax(Param weight, int l);
    const floatX* layer_input(int l) const;
    void layer_forward(int l, int B, int T, int decode_at, bool recomputes);
    void zero_bucket(int bucket);
    void layer_backward(int l, int B, int T, bool accumulate, const BucketHook& begin);
    void embeddings_backward(const int* tokens, int B, int T);
};

// Copies `count` host floats to the device, rounded to floatX, and waits for the copy.
template <class floatX>
void copy_rounded(floatX* to, const float* from, int64_t count, Stream stream);

// The memory that GPT2(...) will allocate. Allocates nothing.
template <class floatX>
std::vector<MemoryItem> model_memory(const GPT2Config& config, Purpose purpose, int B, int T,
                                     MemoryOptions options = {});
