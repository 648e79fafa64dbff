// model_memory.h: the sizes of a model's memory, and the places of its activations in it. GPT2 allocates what these
// functions count, and model_memory (gpt2.h) plans it.
#pragma once
#include "model/gpt2.h"

// Divides one memory block among tensors. With base null the arena only counts bytes, so the plan and the
// allocation always agree.
struct Arena {
    std::byte* base;
    int64_t used = 0;

    template <class T>
    T* take(int64_t count) {
        std::byte* at = base ? base + used : nullptr;
        used += round_up<int64_t>(count * int64_t(sizeof(T)), 256);
        return reinterpret_cast<T*>(at);
    }
};

// A layer's weight matrices, which are packed for the matmuls. The only other packed matrix is wte, in bucket 0.
inline constexpr Param layer_matrices[] = {qkvw, attprojw, fcw, fcprojw};

// Elements of acts.amax.
inline int64_t amax_count(const GPT2Config& config) { return config.L * int64_t(std::size(layer_matrices)) * 2; }

inline int own_heads(const ParamLayout& layout) { return layout.config.NH / layout.shard.count; }

int choose_logit_rows(int B, int T, int logit_chunks);

// Takes all activations of N tokens from the arena.
template <class floatX>
Activations<floatX> place_activations(Arena& arena, const ParamLayout& layout, Purpose purpose, MemoryOptions options,
                                      int64_t N, int logit_rows);

// The packed copies of wte and of `layers` layers, and where a matrix is among them.
template <class floatX>
int64_t packed_total_bytes(const ParamLayout& layout, int layers, bool fp8);
template <class floatX>
int64_t packed_offset(const ParamLayout& layout, Param p, int l, int layers, bool fp8);

// Layers whose gradients have memory of their own. Backward writes gradients of two layers at a time: the bias gradient
// of the layer below is computed with those of a layer.
int gradient_slots(const GPT2Config& config, Purpose purpose, MemoryOptions options);
// Layers whose weights have memory of their own. With shard_weights, one layer's arrive while the other one computes.
int weight_slots(const GPT2Config& config, MemoryOptions options);
int count_packed_layers(const GPT2Config& config, MemoryOptions options);

template <class floatX>
int64_t scratch_of(const ParamLayout& layout, int B, int T);
// Bytes of the rounded operands of a layer's largest matmul.
int64_t fp8_workspace_bytes(const ParamLayout& layout, int N, bool fp8);
