// gpt2.h: the network: its weights, activations and gradients on the device, forward, backward, and one token at a
// time.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "base/device.h"
#include "model/params.h"

// What a layer computes from the residual stream x. backward needs all of it; what is recomputed is shared by the
// layers.
template <class floatX>
struct LayerActivations {
    floatX* ln1;                 // (N, C)
    float *ln1_mean, *ln1_rstd;  // (N)
    floatX* qkv;                 // (N, 3C)    also the cache of keys and values when generating
    floatX* att;                 // (N, C)
    float* lse;                  // (B, NH, T)
    floatX* residual2;           // (N, C)     x + attention
    floatX* ln2;                 // (N, C)
    float *ln2_mean, *ln2_rstd;  // (N)
    floatX* fc;                  // (N, 4C)    before GELU
    floatX* gelu;                // (N, 4C)
    floatX* residual3;           // (N, C)     residual2 + MLP: the next layer's x
};

// train keeps every layer's activations and has gradients; generate keeps every layer's qkv; eval keeps nothing.
enum class Purpose { train, generate, eval };

// What backward makes again instead of reading what forward left: nothing; GELU's output, which saves 4 C of the 16 C
// elements that a token has in a layer; or all of a layer but its output, which leaves C and costs a third of forward's
// time more.
enum class Recompute { none, gelu, layer };

// What is given up for less memory, and what ranks share.
struct MemoryOptions {
    Recompute recompute = Recompute::none;
    int logit_chunks = 0;        // pieces in which the logits are made; 0: as the backend likes them
    bool master_weights = true;  // fp32 copies of bf16 weights, in the optimizer
    int parts = 1;               // of a bucket, for ranks and virtual ranks (GradientSum)
    int shards = 1;              // ranks that share the optimizer's state (ZeRO-1); divides parts
    bool reduce_buffer = false;  // gradients are rounded for their way between ranks into memory of their own
};

struct MemoryItem {
    const char* purpose;
    int64_t bytes;
    bool on_host = false;  // of the host, though the device may have memory of its own
};

// All that lies in the activations' block.
template <class floatX>
struct Activations {
    std::vector<LayerActivations<floatX>> layer;
    floatX* encoded;             // (N, C)
    floatX* branch;              // (N, C)     what the next residual addition adds
    floatX* lnf;                 // (N, C)
    float *lnf_mean, *lnf_rstd;  // (N)
    float* losses;               // (N)
    float* loss;                 // (1)        the mean over the tokens of all micro-steps so far
    floatX *dx, *dtmp;           // (N, C)     gradients of the residual stream, and within a layer
    floatX* dlarge;              // (N, 4C)
    floatX* logits;              // (logit_rows, Vp)
};

// Before the first model: whether bf16 attention may run by cuDNN on a GPU, and whether it must be deterministic there.
void choose_attention(bool cudnn, bool deterministic);

template <class floatX>
struct GPT2 {
    ParamLayout layout;
    GPT2Config config;
    Purpose purpose;
    Recompute recompute;
    int B, T;        // the largest micro-batch that fits
    int logit_rows;  // rows of logits in memory at a time
    Stream stream = nullptr;

    DeviceBuffer<floatX> weights;    // (layout.total)
    DeviceBuffer<std::byte> packed;  // the backend's copies of the matrices
    DeviceBuffer<float> grads;       // (layout.total), with Purpose::train
    DeviceBuffer<std::byte> memory;  // of acts
    Activations<floatX> acts;
    std::string attention;  // by what it runs, where that is not plain: for the start of a log

    // Weights are zero until set_param has given them.
    GPT2(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options = {});

    floatX* w(Param p, int l = 0) { return weights.data + layout.offset(p, l); }
    float* g(Param p, int l = 0) { return grads.data + layout.offset(p, l); }
    Weight<floatX> matrix(Param p, int l = 0);

    // Copies a tensor from host floats in memory layout (layout.size(p)), rounded to floatX. pack_bucket comes after.
    void set_param(Param p, int l, const float* values);
    void pack_bucket(int bucket);  // after its weights have changed

    // Called with a bucket's number (params.h): data-parallel training waits for weights, and sends gradients, bucket
    // by bucket while the model computes.
    using BucketHook = std::function<void(int bucket)>;
    // tokens (B, T) on the device, B and T at most those of the model. Ends with lnf. before(bucket) is called before
    // the first read of the bucket's weights.
    void forward(const int* tokens, int B, int T, const BucketHook& before = nullptr);
    // After forward: the loss of each token into acts.losses, without gradients.
    void token_losses(const int* targets, int B, int T);
    // After forward: adds scale * (gradient of the mean loss) to grads, and scale * mean loss to acts.loss. The first
    // micro-step of a step overwrites the gradients of the matrices; zero_gradients comes before it. after(bucket) is
    // called when the bucket's gradients are complete, from the last layer to the embeddings.
    void zero_gradients();
    void backward(const int* tokens, const int* targets, int B, int T, int micro_step, float scale,
                  const BucketHook& after = nullptr);

    // After forward of one sequence (B = 1) of t tokens: the next token, at position t; keys and values are in qkv.
    void decode(const int* token, int t);
    // Logits (Vp) of row `row` of lnf, on the device.
    const floatX* row_logits(int row);

  private:
    void embeddings_forward(const int* tokens, int B, int T);
    void layer_forward(int l, int B, int T);
    void layer_attention(int l, int B, int T);
    void layer_hidden(int l, int N);
    void layer_output(int l, int N);
    void head_backward(const int* targets, int B, int T, int micro_step, float scale);
    void layer_backward(int l, int B, int T, int micro_step);
    void recompute_layer(int l, int B, int T);
    void embeddings_backward(const int* tokens, int B, int T);
};

// What GPT2(...) will allocate, without allocating it.
template <class floatX>
std::vector<MemoryItem> model_memory(const GPT2Config& config, Purpose purpose, int B, int T,
                                     MemoryOptions options = {});
