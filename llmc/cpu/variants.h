// variants.h: the variants of the CPU operations. A variant is a source that is compiled for an instruction set, into a
// namespace of the same name, and exports a table of its operations: base.cpp, avx2.cpp and avx512.cpp have all of them
// (vector_*.h), avx512bf16.cpp and amx.cpp the bf16 matmul, attention and head (matrix_*.h). cpu::<op> calls the
// variant of the best set up to isa() that has it (dispatch.cpp). Tests compare all variants with cpu::reference
// (reference.cpp).
//
// Variants read neither amax nor an FP8 weight, which are up to cpu::<op>. Their sources must not emit shared inline
// functions: the linker keeps one of several copies, perhaps one with instructions that the CPU lacks. So they are
// compiled with -O1 at least, and test_cpu_isa.py looks for such copies.
#pragma once
#include "cpu/isa.h"
#include "ops/ops.h"

struct Philox;

namespace cpu {

// The operations on tensors of both element types that a full variant has. reference.cpp defines the first ones.
// clang-format off
#define EACH_DEFINED(OP)                                                                                  \
    OP(embedding_forward) OP(embedding_backward) OP(layernorm_forward) OP(layernorm_backward)             \
    OP(matmul_forward) OP(matmul_backward) OP(add_residual) OP(attention_forward) OP(attention_backward)  \
    OP(attention_decode) OP(gelu_forward) OP(gelu_backward) OP(adamw)
#define EACH_OPERATION(OP) EACH_DEFINED(OP) OP(head_bytes) OP(head_targets) OP(head_forward) OP(head_backward) \
    OP(muon_polynomial) OP(muon_update)
// clang-format on

inline constexpr int MICROKERNEL_BYTES = 72 << 10;  // the operands of run_microkernel, or more

// The operations of a variant for one element type; null: the variant lacks it.
template <class floatX>
struct Operations {
    decltype(&cpu::sum_of_squares) sum_of_squares = nullptr;
    decltype(&cpu::accumulate_rounded) accumulate_rounded = nullptr;
    decltype(&cpu::muon_momentum) muon_momentum = nullptr;
    // sums (columns) = the column sums of x (N, columns), or += if accumulate
    void (*column_sums)(float* sums, const floatX* x, int N, int columns, bool accumulate) = nullptr;
    int64_t (*matmul_scratch_bytes)(int N, int IC, int OC) = nullptr;
    int64_t (*batch_scratch_bytes)(int N, int IC, int OC) = nullptr;  // of matmul_batch
    decltype(&cpu::scratch_bytes<floatX>) scratch_bytes = nullptr;    // scratch of all operations but the matmuls
    double (*run_microkernel)(const void* operands) = nullptr;    // runs the matmul's in the caches; returns the FLOP
    decltype(&cpu::packed_bytes<floatX>) packed_bytes = nullptr;  // only matrix units have this and the next two
    decltype(&cpu::pack_weight<floatX>) pack_weight = nullptr;
    decltype(&cpu::matmul_batch<floatX>) matmul_batch = nullptr;
#define FIELD(op) decltype(&cpu::op<floatX>) op = nullptr;
    EACH_OPERATION(FIELD)
#undef FIELD
};

struct Variant {
    Operations<float> of_float;
    Operations<bf16> of_bf16;
};

#define DECLARE(name, test)       \
    namespace name {              \
    extern const Variant variant; \
    }
INSTRUCTION_SETS(DECLARE)
#undef DECLARE

namespace reference {
#include "ops/ops.inc"
}

// The peak FLOP/s that MFU is relative to: the microkernel's rate on operands in the nearest caches, summed over all
// threads, or over as many of them as there are cores. bf16: the matrix unit's microkernel, or the fp32 one on CPUs
// without a matrix unit. Takes 0.05 s.
template <class floatX>
double measure_peak_flops();

// The highest FLOP/s of run(), which returns its FLOP. The calling thread repeats it for 0.02 s, and at least 10 times.
// It takes longer when other programs use its core.
template <class Run>
double peak_of(const Run& run) {
    double best = 0.0;
    const double start = seconds_now();
    for (int tries = 0; tries < 10 || seconds_now() < start + 0.02; tries++) {
        const double before = seconds_now(), flop = run(), rate = flop / (seconds_now() - before);
        best = rate > best ? rate : best;
    }
    return best;
}

// store_moment as adamw does it: rounded by random bits (small_ops.cpp). begin: the first element's index.
void round_moment(Moment moment, const float* values, WhichMoment which, int64_t begin, int64_t count,
                  const Philox& random);

}  // namespace cpu
