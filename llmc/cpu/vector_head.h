// vector_head.h: the head (ops/ops.inc) in fp32, and in bf16 widened to fp32. Compiled as vector_ops.h is.
//
// The epilogue of the logits' matmul writes the exponentials while the sums are in the cache. They are the
// operand of both matmuls of backward, whose epilogues and operands have the factors of rows.
#pragma once
#include "cpu/vec.h"
#include "cpu/vector_matmul.h"

namespace cpu::VARIANT {

// The layout of `exponentials` (head_bytes).
template <class floatX>
struct HeadMemory {
    floatX *e, *scaled;    // (N, Vp) and (N, C), inp times f; only with `keep`
    float* block_sums;     // (N, blocks): sums of e over BLOCK_COLUMNS columns
    float *factor, *pull;  // (N): f, -f S
    int64_t blocks, bytes;

    HeadMemory(void* base, int N, int C, int Vp, bool keep) : blocks(ceil_div(Vp, BLOCK_COLUMNS)) {
        Arena arena{base, 0, 64};
        e = arena.take<floatX>(keep ? int64_t(N) * Vp : 0);
        scaled = arena.take<floatX>(keep ? int64_t(N) * C : 0);
        block_sums = arena.take<float>(N * blocks);
        factor = arena.take<float>(N), pull = arena.take<float>(N);
        bytes = arena.used;
    }
};

// e (count) of these logits, unless it is null. Returns their sum.
template <class floatX>
static float exponentials(floatX* e, const float* logits, int count, float target_logit) {
    floatv total = {};
    for_vectors(count, [&](int64_t i, auto width) {
        const floatv x = load(logits + i, width) - target_logit;
        const floatv value = exp(x > HEAD_LIMIT ? broadcast(HEAD_LIMIT) : x);  // NaN stays NaN
        if (e) store(e + i, value, width);
        total += mask_lanes(value, 0.0f, width);
    });
    return reduce_sum(total);
}

// The same for columns v to v + count - 1 of a row, of which `vocabulary` are before the padding.
template <class floatX>
static float exponentials(floatX* e, const float* logits, int v, int count, int target, int vocabulary,
                          float target_logit) {
    const auto part = [&](int begin, int end) {
        return begin < end ? exponentials(e ? e + begin : nullptr, logits + begin, end - begin, target_logit) : 0.0f;
    };
    const int used = std::min(count, std::max(0, vocabulary - v)), lane = target - v;
    for (int i = used; i < count && e; i++) e[i] = floatX(0.0f);
    if (lane < 0 || lane >= used) return part(0, used);
    if (e) e[lane] = floatX(0.0f);
    return part(0, lane) + part(lane + 1, used);
}

// dweight[target] += pull inp[n], in the order of n. Threads share the channels.
template <class floatX>
static void add_target_rows(float* dweight, const float* pull, const HeadInput<floatX>& head) {
    constexpr int width = 4 * VL;
#pragma omp parallel for schedule(static)
    for (int begin = 0; begin < head.C; begin += width)
        for (int64_t n = 0; n < head.N; n++) {
            const int column = head.shard.row(head.targets[n]);
            if (column < 0) continue;
            float* to = dweight + int64_t(column) * head.C + begin;
            for_vectors(std::min(width, head.C - begin), [&](int64_t c, auto lanes) {
                store(to + c, load(to + c, lanes) + load(head.inp + n * head.C + begin + c, lanes) * pull[n], lanes);
            });
        }
}

// Bytes of scratch for up to N rows at a time.
template <class floatX>
int64_t head_scratch_bytes(int N, int C, int Vp) {
    return std::max(MatmulScratch(nullptr, N, Vp, C, false).bytes, matmul_scratch_bytes<floatX>(N, C, Vp));
}

template <class floatX>
int64_t head_bytes(int N, int C, int Vp, bool keep) {
    return HeadMemory<floatX>(nullptr, N, C, Vp, keep).bytes;
}

template <class floatX>
void head_forward(float* sums, void* memory_block, const float* target_logits, const HeadInput<floatX>& head, bool keep,
                  Stream) {
    const HeadMemory<floatX> memory(memory_block, head.N, head.C, head.Vp, keep);
    const Operand<floatX> inp{head.inp, false, head.C}, weight{head.weight.rows, true, head.C};
    const auto epilogue = [&](int n, int v, int count, const float* logits) {
        const int target = head.shard.row(head.targets[n]);
        floatX* e = keep ? memory.e + int64_t(n) * head.Vp + v : nullptr;
        memory.block_sums[n * memory.blocks + v / BLOCK_COLUMNS] =
            exponentials(e, logits, v, count, target, head.shard.count, target_logits[n]);
    };
    blocked_matmul(nullptr, inp, weight, head.N, head.Vp, head.C, false, epilogue, BLOCK_COLUMNS);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < head.N; n++) {
        double sum = 0.0;
        for (int64_t i = 0; i < memory.blocks; i++) sum += double(memory.block_sums[n * memory.blocks + i]);
        sums[n] = float(sum);
    }
}

template <class floatX>
void head_backward(floatX* dinp, float* dweight, void* memory_block, const float* sums, const HeadInput<floatX>& head,
                   float scale, bool accumulate, Stream) {
    const HeadMemory<floatX> memory(memory_block, head.N, head.C, head.Vp, true);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < head.N; n++) {
        const bool counts = head.targets[n] >= 0;
        memory.factor[n] = counts ? scale / (1.0f + sums[n]) : 0.0f;
        memory.pull[n] = counts ? -scale * (sums[n] / (1.0f + sums[n])) : 0.0f;
        for_vectors(head.C, [&](int64_t c, auto width) {
            store(memory.scaled + n * head.C + c, load(head.inp + n * head.C + c, width) * memory.factor[n], width);
        });
    }
    const Operand<floatX> e{memory.e, false, head.Vp}, columns{memory.e, true, head.Vp};
    const Operand<floatX> weight{head.weight.rows, false, head.C}, scaled{memory.scaled, false, head.C};
    blocked_matmul(sums_in(dinp), e, weight, head.N, head.C, head.Vp, false,
                   [&](int n, int c, int count, const float* from) {
                       const int target = head.shard.row(head.targets[n]);
                       const floatX* pulled = target < 0 ? nullptr : head.weight.rows + int64_t(target) * head.C + c;
                       for_vectors(count, [&](int64_t i, auto width) {
                           const floatv x = load(from + i, width) * memory.factor[n];
                           store(dinp + int64_t(n) * head.C + c + i,
                                 pulled ? x + load(pulled + i, width) * memory.pull[n] : x, width);
                       });
                   });
    blocked_matmul(dweight, columns, scaled, head.Vp, head.C, head.N, accumulate, {});
    add_target_rows(dweight, memory.pull, head);
}

}  // namespace cpu::VARIANT
