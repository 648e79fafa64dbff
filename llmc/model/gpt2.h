// gpt2.h: the GPT-2 network on the device: weights, activations and gradients; forward, backward and token-by-token
// decoding.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "base/device.h"
#include "model/memory.h"
#include "ops/ops.h"

struct Comm;  // parallel/comm.h

// Called with a bucket's number (params.h). Data-parallel training waits for weights and sends gradients bucket by
// bucket, so that communication overlaps with computation.
using BucketHook = std::function<void(int bucket)>;

// Chooses what computes bf16 attention, and whether it must be deterministic. Call it before the first model. The main
// program, which is compiled once for CPU and GPU, cannot call the device's own ops::set_attention.
void choose_attention(AttentionBackend backend, bool deterministic);

template <class floatX>
struct GPT2 {
    ParamLayout layout;
    GPT2Config config;
    Purpose purpose;
    Recompute recompute;
    bool fp8, sums_apart, sequence_parallel;
    int B, T;        // the largest micro-batch; more sequences fit if they are so much shorter
    int logit_rows;  // rows of logits in memory at a time
    Stream stream = nullptr;
    Comm* tensor_ranks = nullptr;  // the tensor-parallel ranks, of which this rank has layout.shard; null: none

    BucketBuffer<floatX> weights;           // shared by layers with shard_weights
    DeviceBuffer<std::byte> packed_memory;  // the memory that packed points into
    PackedWeights packed;
    DeviceBuffer<std::byte> fp8_workspace;  // the operands of one matmul in FP8
    BucketBuffer<float> grads;              // gradients, with Purpose::train; shared by layers with sums_apart
    DeviceBuffer<std::byte> memory;         // the memory that acts points into
    Activations<floatX> acts;
    // Called before forward, backward or decode reads a bucket's weights. All reads of the previous layer's weights are
    // queued by then. Null: the weights are complete.
    BucketHook on_wait_for_weights;

    // Weights are zero until set_param sets them.
    GPT2(const GPT2Config& config, Purpose purpose, int B, int T, MemoryOptions options = {});

    // Prepares attention for the largest micro-batch, unless that is done. Returns which kernels it uses and why, for
    // the log; empty on the CPU.
    std::string prepare_attention() const;

    floatX* w(Param p, int l = 0) { return weights.tensor(p, l); }
    float* g(Param p, int l = 0) { return grads.tensor(p, l); }
    Weight<floatX> matrix(Param p, int l = 0);

    // Copies this rank's shard of a tensor from host floats in memory layout (layout.size(p)), rounded to floatX. Call
    // pack_bucket afterwards.
    void set_param(Param p, int l, const float* values);
    void pack_bucket(int bucket);  // call it after the bucket's weights have changed

    // The smallest number of tokens of a sequence, from T up, that forward takes: sequence parallelism divides them.
    int divisible_tokens(int T) const { return sequence_parallel ? round_up(T, layout.shard.count) : T; }
    // tokens (B, T) on the device; T and B * T are at most the model's. The last result is acts.lnf, the input of the
    // head: backward or token_losses computes the logits and losses. decode_at: see decode; -1: whole sequences.
    void forward(const int* tokens, int B, int T, int decode_at = -1);
    // After forward: writes the loss of each token to acts.losses. Computes no gradients.
    void token_losses(const int* targets, int B, int T);
    // After forward: adds scale * (gradient of the mean loss) to grads, and scale * mean loss to acts.loss. The first
    // micro-step of a step overwrites the gradients of the matrices; call zero_gradients before it. after(bucket) is
    // called when the bucket's gradients are complete, from the last layer to the embeddings.
    //
    // With sums_apart every micro-step is a first one, and before(bucket) is called before the memory of the
    // bucket's gradients is written: the gradients there must not be needed any more when it returns.
    void zero_gradients();
    void backward(const int* tokens, const int* targets, int B, int T, int micro_step, float scale,
                  const BucketHook& after = nullptr, const BucketHook& before = nullptr);

    // After forward of one sequence (B = 1) of t tokens: processes the next token, at position t. qkv is the key-value
    // cache, which needs a model whose layers keep their keys: layers that are recomputed share the memory of qkv.
    bool keeps_keys() const { return config.L == 1 || acts.layer[1].qkv != acts.layer[0].qkv; }
    void decode(const int* token, int t);
    // Logits of row `row` of lnf, in device memory: at least V of them, as exact as those of token_losses.
    const float* row_logits(int row);

  private:
    int lnf_tokens = 0;  // tokens that acts.lnf is of: of the last forward, or 1 after decode

    bool is_divided() const { return layout.shard.count > 1; }
    bool divides_rows(int N) const { return sequence_parallel && N > 1; }
    int local_rows(int N) const { return divides_rows(N) ? N / layout.shard.count : N; }
    void gather(void* x, int64_t bytes);
    void sum_over_shards(float* own, int count);
    const floatX* all_gather_rows(const floatX* x, int N);
    int64_t start_reduce(floatX* parts, int N);
    const floatX* finish_reduce(int64_t ticket, const floatX* parts, int N);
    const floatX* reduced_over_ranks(floatX* parts, int N);
    void embed(const int* tokens, int first_position, int B, int T);
    void head(const int* targets, int N, bool backward, bool accumulate, float scale);

    void wait_for_weights(int bucket);
    std::byte* packed_copy(Param p, int l) { return packed[p][size_t(l) % packed[p].size()]; }
    float* input_amax(Param weight, int l);
    float* gradient_amax(Param weight, int l);
    const floatX* layer_input(int l) const;
    void second_matmul(Param weight, Param bias, int l, MatmulForward<floatX> m, int N);
    const floatX* first_matmul_backward(Param weight, Param bias, int l, const floatX* inp, int N, bool accumulate);
    void layer_forward(int l, int B, int T, int decode_at, bool recomputes);
    void zero_bucket(int bucket);
    void layer_backward(int l, int B, int T, bool accumulate, const BucketHook& begin);
};

// Copies `count` host floats to the device, rounded to floatX, and waits for the copy.
template <class floatX>
void copy_rounded(floatX* to, const float* from, int64_t count, Stream stream);
