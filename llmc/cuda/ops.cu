// ops.cu: the translation unit of the CUDA kernels. It instantiates the operations of the .cuh files for fp32 and bf16.
#include <algorithm>
#include <tuple>

#include "cuda/adamw.cuh"
#include "cuda/attention.cuh"
#include "cuda/attention_kernels.cuh"
#include "cuda/bias.cuh"
#include "cuda/difference.cuh"
#include "cuda/embedding.cuh"
#include "cuda/fp8.cuh"
#include "cuda/gelu.cuh"
#include "cuda/head.cuh"
#include "cuda/layernorm.cuh"
#include "cuda/matmul.h"
#include "cuda/muon.cuh"
#include "cuda/norm.cuh"
#include "cuda/residual.cuh"

template <class floatX>
int64_t gpu::scratch_bytes(int B, int T, int C, int NH, int Vp) {
    const int N = B * T;
    return std::max({matmul_scratch_bytes<floatX>(N, C), LayerNormBackward<floatX>(N, C).scratch_bytes(C),
                     HeadScratch<floatX>(nullptr, N, C).bytes, matmul_routes_scratch_bytes<floatX>(N, C, Vp),
                     attention_scratch_bytes<floatX>(B, T, NH, C / NH)});
}

template <class floatX>
int64_t gpu::muon_scratch_bytes(int C) {
    return std::max(matmul_scratch_bytes<floatX>(C, C), MUON_SQUARES_BYTES);
}

// Many rows at once fill a GPU best, and every further chunk reads and writes the weight's gradient again. But with
// GPT-2's vocabulary 85,000 rows of logits have more than 2^32 elements, for which cuBLASLt has few algorithms.
int gpu::preferred_logit_rows() { return 65536; }

INSTANTIATE(gpu::scratch_bytes);
INSTANTIATE(gpu::muon_scratch_bytes);
INSTANTIATE(gpu::embedding_forward);
INSTANTIATE(gpu::embedding_backward);
INSTANTIATE(gpu::add_residual);
INSTANTIATE(gpu::layernorm_forward);
INSTANTIATE(gpu::layernorm_backward);
INSTANTIATE(gpu::prepare_attention);
INSTANTIATE(gpu::attention_forward);
INSTANTIATE(gpu::attention_backward);
INSTANTIATE(gpu::attention_decode);
INSTANTIATE(gpu::head_exponentials);
INSTANTIATE(gpu::largest_difference);
INSTANTIATE(gpu::gelu_forward);
INSTANTIATE(gpu::gelu_backward);
INSTANTIATE(gpu::head_bytes);
INSTANTIATE(gpu::head_targets);
INSTANTIATE(gpu::head_forward);
INSTANTIATE(gpu::head_backward);
INSTANTIATE(gpu::adamw);
INSTANTIATE(gpu::muon_stack);
INSTANTIATE(gpu::muon_unstack);
INSTANTIATE(gpu::muon_polynomial);
INSTANTIATE(gpu::muon_update);
INSTANTIATE(gpu::bias_scratch_bytes);
INSTANTIATE(gpu::bias_backward);
template decltype(gpu::cast_to_fp8<E4M3>) gpu::cast_to_fp8<E4M3>;
template decltype(gpu::cast_to_fp8<E5M2>) gpu::cast_to_fp8<E5M2>;

// Inline functions that are not templates: taking their addresses makes the compiler emit them for the linker.
[[gnu::used]] static const auto emitted_here = std::tuple(
    &gpu::head_losses, &gpu::sum_of_shards, &gpu::accumulate_loss, &gpu::sum_of_squares, &gpu::accumulate_gradients,
    &gpu::accumulate_rounded, &gpu::round_gradients, &gpu::widen_gradients, &gpu::clip_factor, &gpu::muon_momentum,
    &gpu::widen_moment, &gpu::store_moment, &gpu::sum_bias_parts, &gpu::raise_amax);
