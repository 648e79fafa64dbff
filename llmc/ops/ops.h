// ops.h: declares the model's operations (ops.inc) in namespaces gpu and cpu. `ops` names the backend of this build.
//
// ops.inc is included in three namespaces (also in cpu::reference, cpu/variants.h), so an editor finds three
// declarations of an operation. Most calls of ops::op with the CPU backend go to cpu::op in cpu/dispatch.cpp, which
// calls the variant for the CPU's instruction set, for example cpu::avx2::op. Its definition is in cpu/vector_*.h, or
// in cpu/matrix_*.h for bf16 on matrix units, as cpu::VARIANT::op; cpu/avx2.cpp sets this macro to avx2 and includes
// the files.
#pragma once
#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/common.h"
#include "base/dtype.h"

// An output; a pointer converts to it. amax (1) may be null. Else it is raised to the largest magnitude of the output
// (NaN if an element is NaN), for the scale of a matmul in FP8 that reads this output. In fp32 it must be null.
template <class floatX>
struct Out {
    floatX* data;
    float* amax;

    Out(floatX* data, float* amax = nullptr) : data(data), amax(amax) {}
};

// The FP8 of a weight's matmuls (--precision fp8). base/fp8.h has the formats and the scales. A scale needs the largest
// magnitude of its tensor: the operations that write the tensor raise it from zero, or the matmul finds it.
struct Fp8 {
    const void* packed = nullptr;    // copy by pack_fp8_weight; null: the matmuls are not in FP8
    void* workspace = nullptr;       // rounded operands of one matmul (fp8_workspace_bytes)
    float* input_amax = nullptr;     // largest magnitude of inp
    float* gradient_amax = nullptr;  // largest magnitude of dout
    bool finds_input_amax = false, finds_gradient_amax = false;
};

// A weight matrix (OC, IC) as matmuls read it: its rows, and the copy that pack_weight made for the head, whose weight
// is large; null for the other matmuls.
template <class floatX>
struct Weight {
    const floatX* rows;
    const void* packed;
    Fp8 fp8 = {};

    bool in_fp8(int N) const { return fp8.packed && N > 1; }
};

// The arguments of matmul_forward and matmul_backward. In ops.inc they would be other types in each namespace.
template <class floatX>
struct MatmulForward {
    Out<floatX> out;                   // (N, OC) =
    floatX* pre_gelu = nullptr;        // (N, OC) =    null: no GELU
    const floatX* inp;                 // (N, IC)
    Weight<floatX> weight = {};        // (OC, IC)
    const floatX* bias = nullptr;      // (OC)
    const floatX* residual = nullptr;  // (N, OC)
};

template <class floatX>
struct MatmulBackward {
    Out<floatX> dinp = nullptr;        // (N, IC) =    null: weight is not read
    float* dweight = nullptr;          // (OC, IC)     null: inp is not read
    float* dbias = nullptr;            // (OC)
    const floatX* dout;                // (N, OC)
    const floatX* inp = nullptr;       // (N, IC)
    Weight<floatX> weight = {};        // (OC, IC)
    const floatX* pre_gelu = nullptr;  // (N, IC)
    bool accumulate = false;           // into dweight and dbias

    void check_gradients(bool in_fp8) const {
        INVARIANT(dinp.data || dweight, "matmul_backward without dinp and without dweight");
        INVARIANT(!in_fp8 || (dinp.data && dweight), "matmul_backward in FP8 without dinp or without dweight");
        INVARIANT(dweight || !dbias, "matmul_backward with dbias but without dweight");
    }
};

// The rows of the vocabulary that are in this rank's memory: first to first + count - 1. The whole vocabulary is {0,
// V}.
struct VocabShard {
    int first, count;

    // The token's row in this shard, or -1 if the token is negative or in another shard.
    HOST_DEVICE INLINE int row(int token) const { return token >= first && token - first < count ? token - first : -1; }
};

// Checks the arguments of the operations on a shard. No option can make them invalid.
inline void check_vocab_shard(const char* op, VocabShard shard) {
    INVARIANT(shard.first >= 0 && shard.count >= 0, "%s: a shard of %d rows from row %d of the vocabulary on", op,
              shard.count, shard.first);
}

constexpr float HEAD_LIMIT =
    60.0f;  // largest exponent in the head (ops.inc): e^60 times a vocabulary is far from overflow

// The operands of the head's operations.
template <class floatX>
struct HeadInput {
    const floatX* inp;      // (N, C)
    Weight<floatX> weight;  // (Vp, C)    the rows of the shard, then padding
    const int* targets;     // (N)    below 0: ignored
    VocabShard shard;
    int N, C, Vp;
};

// Checks them. No option can make them invalid.
template <class floatX>
void check_head(const char* op, const HeadInput<floatX>& head) {
    INVARIANT(head.N >= 1 && head.C >= 1, "%s of %d rows of %d channels: there must be at least one of each", op,
              head.N, head.C);
    check_vocab_shard(op, head.shard);
    INVARIANT(head.shard.count <= head.Vp, "%s: a shard of %d tokens in rows of %d", op, head.shard.count, head.Vp);
}

// The largest loss and gradient norm of a step that changes the weights.
struct StepLimits {
    float loss = FLT_MAX, norm = FLT_MAX;
};

// Alignment, in elements, of the tensors, buckets and shards in a flat parameter buffer (params.h).
constexpr int64_t FLAT_ALIGN = 64;

// The elements of a flat buffer that weight decay applies to, by index. Of the elements below `first`, the first
// `first_decayed` decay. After them, the first `decayed` elements of every `period` decay. All are multiples of
// FLAT_ALIGN.
struct DecayPattern {
    int64_t first, first_decayed;
    int64_t period, decayed;

    // A run of elements up to index `end`: either all of them decay, or none.
    struct Run {
        int64_t end;
        bool decays;
    };
    HOST_DEVICE INLINE Run run(int64_t i) const {
        if (i < first) return i < first_decayed ? Run{first_decayed, true} : Run{first, false};
        const int64_t at = int64_t(uint64_t(i - first) % uint64_t(period));
        return at < decayed ? Run{i - at + decayed, true} : Run{i - at + period, false};
    }
};

// How a mean of the gradients or of their squares is in memory (--moments).
enum class MomentDtype { fp32, bf16, block8 };
constexpr const char* MOMENT_WORDS[] = {"fp32", "bf16", "8bit"};
enum class WhichMoment { first, second };

struct Moment {
    void* data;                    // float, bf16 or codes of base/moments.h
    uint8_t* exponents = nullptr;  // with block8: one for FLAT_ALIGN elements
    MomentDtype dtype = MomentDtype::fp32;

    Moment(float* data) : data(data) {}
    Moment(void* data, uint8_t* exponents, MomentDtype dtype) : data(data), exponents(exponents), dtype(dtype) {}
    // The elements from i on, a multiple of FLAT_ALIGN with block8.
    HOST_DEVICE INLINE Moment from(int64_t i) const {
        Moment out = *this;
        constexpr int sizes[] = {4, 2, 1};
        out.data = static_cast<char*>(data) + i * sizes[int(dtype)];
        if (exponents) out.exponents = exponents + i / FLAT_ALIGN;
        return out;
    }
};

// Calls run(kind) with the dtype as a constant, for a template's argument.
template <class Run>
void with_moments(MomentDtype dtype, const Run& run) {
    if (dtype == MomentDtype::fp32) run(std::integral_constant<MomentDtype, MomentDtype::fp32>());
    if (dtype == MomentDtype::bf16) run(std::integral_constant<MomentDtype, MomentDtype::bf16>());
    if (dtype == MomentDtype::block8) run(std::integral_constant<MomentDtype, MomentDtype::block8>());
}

// AdamW's constants. Weight decay is decoupled: it acts on the weight and is not added to the gradient.
struct AdamWConfig {
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    uint64_t seed = 0;  // seed of stochastic rounding
};

// The backend of bf16 attention on a GPU: cuDNN, this program's kernels for Hopper (wgmma), or those for every GPU
// (mma). automatic: cuDNN, or mma where there is none; with --autotune the fastest of them and wgmma.
enum class AttentionBackend { automatic, cudnn, wgmma, mma };
constexpr const char* ATTENTION_WORDS[] = {"auto", "cudnn", "wgmma", "mma"};

// This program's kernels are always deterministic. With deterministic = false, cuDNN sums dQ in the order in which
// blocks finish. That order differs from run to run, but the sum moves less memory.
struct AttentionOptions {
    AttentionBackend backend = AttentionBackend::automatic;
    bool deterministic = true;
    // cuDNN's deterministic backward: bytes of score gradients stored at a time; 0 = a 32nd of the GPU's memory.
    int64_t part_bytes = 0;
    bool operator==(const AttentionOptions&) const = default;
};

// Matrices of one shape that Muon makes orthogonal together, as a stack (count, rows, cols) with rows <= cols. In
// memory each is fp32 or, when it is done, floatX from the same address on; a transposed one is (cols, rows) there.
struct MuonBatch {
    static constexpr int MOST = 64;  // a kernel takes them as an argument
    int count, rows, cols;
    float* matrices[MOST];
    bool transposed[MOST];

    void add(float* matrix, bool is_transposed) {
        matrices[count] = matrix;
        transposed[count++] = is_transposed;
    }
    // Rows and columns of matrix i in memory.
    HOST_DEVICE INLINE int rows_of(int i) const { return transposed[i] ? cols : rows; }
    HOST_DEVICE INLINE int cols_of(int i) const { return transposed[i] ? rows : cols; }
};

// Philox stream of a step's rounding: this constant plus the step. random.h lists all streams.
constexpr uint64_t ROUNDING_STREAMS = uint64_t(0x5ada) << 48;
constexpr uint64_t MOMENT_STREAMS = uint64_t(0x5adb) << 48;  // that of the moments' rounding
// That of the rounding of gradients' sums; the addition's lower 16 bits count.
inline uint64_t sum_stream(int step, int addition) {
    return (uint64_t(0x5adc) << 48) + (uint64_t(uint16_t(addition)) << 32) + uint64_t(step);
}

// Checks the arguments of adamw, and a part of those of muon_momentum. No option can make them invalid.
inline void check_range(int64_t begin, int64_t count, int step) {
    INVARIANT(step >= 1, "adamw: step %d; steps count from 1", step);
    INVARIANT(begin >= 0 && count >= 0 && begin % FLAT_ALIGN == 0 && count % FLAT_ALIGN == 0,
              "adamw: %lld elements from %lld on: multiples of %lld, from 0 up", static_cast<long long>(count),
              static_cast<long long>(begin), static_cast<long long>(FLAT_ALIGN));
}
inline void check_adamw(int64_t begin, int64_t count, const DecayPattern& decay, int step) {
    check_range(begin, count, step);
    const auto bucket = [](int64_t decayed, int64_t size) {
        INVARIANT(decayed >= 0 && decayed <= size && decayed % FLAT_ALIGN == 0 && size % FLAT_ALIGN == 0,
                  "adamw: %lld of a bucket of %lld elements decay: multiples of %lld, at most all",
                  static_cast<long long>(decayed), static_cast<long long>(size), static_cast<long long>(FLAT_ALIGN));
    };
    bucket(decay.first_decayed, decay.first);
    bucket(decay.decayed, decay.period);
    INVARIANT(decay.period > 0, "adamw: buckets of no elements; give a period of %lld or more",
              static_cast<long long>(FLAT_ALIGN));
}

namespace cpu {
#include "ops/ops.inc"
}
namespace gpu {
#include "ops/ops.inc"
}

#ifdef USE_CUDA
namespace ops = gpu;
#else
namespace ops = cpu;
#endif
