// vector_ops.h: the operations in vector registers (vec.h), compiled for the instruction set of the including file
// (base.cpp, avx2.cpp, avx512.cpp), into its namespace VARIANT. The matmul, attention and the head are in
// vector_matmul.h, vector_attention.h and vector_head.h, the table of all is at the end. reference.cpp says what they
// compute; ops.inc has the shapes.
//
// The operations are bound by memory, and read each array once. Work is split into chunks that depend on the sizes
// only, and each chunk is summed in a fixed order: the bits do not depend on the number of threads. The schedule is
// dynamic, so that a thread which loses its core does not hold up the others.
#pragma once
#include <math.h>  // C functions: std::log(float) is an inline function with external linkage (vec.h)
#include <omp.h>

#include "base/moments.h"
#include "cpu/memory.h"
#include "cpu/variants.h"
#include "cpu/vec.h"
#include "cpu/vector_attention.h"
#include "cpu/vector_head.h"

namespace cpu::VARIANT {

// Calls body(begin, end) for chunks of [0, count), on all threads.
template <class Body>
static void for_chunks(int64_t count, int64_t chunk, Body body) {
#pragma omp parallel for schedule(dynamic) if (count > chunk)
    for (int64_t begin = 0; begin < count; begin += chunk) body(begin, begin + chunk < count ? begin + chunk : count);
}

// ---- embeddings

template <class floatX>
void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                       VocabShard shard, Stream) {
    for_chunks(int64_t(B) * T, 32, [=](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            const int row = shard.row(tokens[n]);
            const floatX* token = row < 0 ? nullptr : wte + int64_t(row) * C;
            const floatX* position = wpe ? wpe + n % T * C : nullptr;
            for_vectors(C, [&](int64_t c, auto width) {
                const floatv t = token ? load(token + c, width) : floatv{};
                store(out + n * C + c, t + (position ? load(position + c, width) : floatv{}), width);
            });
        }
    });
}

// A chunk is a range of channels and all tokens: rows of dout for the same row of dwte are added in the tokens' order.
template <class floatX>
void embedding_backward(float* dwte, float* dwpe, const floatX* dout, const int* tokens, int B, int T, int C,
                        VocabShard shard, Stream) {
    for_chunks(C, 64, [=](int64_t begin, int64_t end) {
        for (int64_t n = 0; n < int64_t(B) * T; n++) {
            const int row = shard.row(tokens[n]);
            float* token = row < 0 ? nullptr : dwte + int64_t(row) * C + begin;
            float* position = dwpe + n % T * C + begin;
            for_vectors(end - begin, [&](int64_t c, auto width) {
                const floatv d = load(dout + n * C + begin + c, width);
                if (token) store(token + c, load(token + c, width) + d, width);
                store(position + c, load(position + c, width) + d, width);
            });
        }
    });
}

// ---- residual stream

template <class floatX>
void add_residual(floatX* out, const floatX* inp, const floatX* residual, const floatX* bias, int N, int C, Stream) {
    for_chunks(N, 32, [=](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++)
            for_vectors(C, [&](int64_t c, auto width) {
                const floatv sum = load(inp + n * C + c, width) + load(bias + c, width);
                store(out + n * C + c, sum + load(residual + n * C + c, width), width);
            });
    });
}

// ---- LayerNorm

// Computes out (C), mean and rstd from x (C). The first pass over x reads it from memory, the others from the nearest
// cache.
template <class floatX>
static inline void normalize_row(floatX* out, float* mean, float* rstd, const floatX* x, const floatX* weight,
                                 const floatX* bias, int C) {
    floatv total = {};
    for_vectors(C, [&](int64_t c, auto width) { total += load(x + c, width); });
    const float m = reduce_sum(total) / C;
    floatv squares = {};
    for_vectors(C, [&](int64_t c, auto width) {
        const floatv d = mask_lanes(load(x + c, width) - m, 0.0f, width);
        squares += d * d;
    });
    const float r = 1.0f / sqrtf(reduce_sum(squares) / C + 1e-5f);
    for_vectors(C, [&](int64_t c, auto width) {
        const floatv norm = (load(x + c, width) - m) * r;
        store(out + c, norm * load(weight + c, width) + load(bias + c, width), width);
    });
    *mean = m;
    *rstd = r;
}

template <class floatX>
void layernorm_forward(Out<floatX> out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                       const floatX* bias, int N, int C, Stream) {
    for_chunks(N, 32, [=](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++)
            normalize_row(out.data + n * C, mean + n, rstd + n, inp + n * C, weight, bias, C);
    });
}

// The sums over rows in layernorm_backward, (C) each and contiguous; dbranch_bias may be null.
struct ColumnSums {
    float *dweight, *dbias, *dbranch_bias;
};
constexpr int COLUMN_SUMS = 3;

INLINE void add_to(float* sum, floatv x, auto width) { store(sum, load(sum, width) + x, width); }

// dinp (C) of one row; adds the row to the sums. dresidual null: zero.
template <class floatX>
static inline void layernorm_backward_row(floatX* dinp, ColumnSums sums, const floatX* dout, const floatX* inp,
                                          const floatX* weight, float mean, float rstd, const floatX* dresidual,
                                          int C) {
    floatv total = {}, total_norm = {};
    for_vectors(C, [&](int64_t c, auto width) {
        const floatv norm = mask_lanes((load(inp + c, width) - mean) * rstd, 0.0f, width), d = load(dout + c, width);
        const floatv dnorm = d * load(weight + c, width);
        total += dnorm;
        total_norm += dnorm * norm;
        add_to(sums.dweight + c, d * norm, width);
        add_to(sums.dbias + c, d, width);
    });
    const float average = reduce_sum(total) / C, average_norm = reduce_sum(total_norm) / C;
    for_vectors(C, [&](int64_t c, auto width) {
        const floatv norm = (load(inp + c, width) - mean) * rstd;
        const floatv dnorm = load(dout + c, width) * load(weight + c, width);
        const floatv residual = dresidual ? load(dresidual + c, width) : floatv{};
        const floatv gradient = rstd * (dnorm - average - norm * average_norm);
        store(dinp + c, residual + gradient, width);
        if (sums.dbranch_bias) add_to(sums.dbranch_bias + c, load(dinp + c, width), width);
    });
}

// Rows in a chunk. Each chunk has sums of its own, so there are at most 256 chunks.
static int layernorm_chunk(int N) { return N > 32 * 256 ? ceil_div(N, 256) : 32; }

static int64_t layernorm_scratch_bytes(int N, int C) {
    return int64_t(ceil_div(N, layernorm_chunk(N))) * COLUMN_SUMS * C * int64_t(sizeof(float));
}

template <class floatX>
void layernorm_backward(Out<floatX> dinp, float* dweight, float* dbias, float* dbranch_bias, const floatX* dout,
                        const floatX* inp, const floatX* weight, const float* mean, const float* rstd,
                        const floatX* dresidual, int N, int C, Stream) {
    const int chunk = layernorm_chunk(N), chunks = ceil_div(N, chunk);
    const int64_t stride = int64_t(COLUMN_SUMS) * C;
    float* scratch = static_cast<float*>(cpu::scratch(layernorm_scratch_bytes(N, C)));
    const auto sums_of = [=](int64_t i) {
        float* sums = scratch + i * stride;
        return ColumnSums{sums, sums + C, dbranch_bias ? sums + 2 * C : nullptr};
    };
    for_chunks(N, chunk, [=](int64_t begin, int64_t end) {
        const ColumnSums sums = sums_of(begin / chunk);
        __builtin_memset(sums.dweight, 0, stride * sizeof(float));
        for (int64_t n = begin; n < end; n++)
            layernorm_backward_row(dinp.data + n * C, sums, dout + n * C, inp + n * C, weight, mean[n], rstd[n],
                                   dresidual ? dresidual + n * C : nullptr, C);
    });
    for (int i = 0; i < chunks; i++) {
        const ColumnSums sums = sums_of(i);
        for_vectors(C, [&](int64_t c, auto width) {
            add_to(dweight + c, load(sums.dweight + c, width), width);
            add_to(dbias + c, load(sums.dbias + c, width), width);
            if (dbranch_bias) add_to(dbranch_bias + c, load(sums.dbranch_bias + c, width), width);
        });
    }
}

// ---- GELU

template <class floatX>
void gelu_forward(Out<floatX> out, const floatX* inp, int64_t count, Stream) {
    for_chunks(count, 1 << 14, [=](int64_t begin, int64_t end) {
        for_vectors(end - begin, [&](int64_t i, auto width) {
            store(out.data + begin + i, gelu(load(inp + begin + i, width)), width);
        });
    });
}

template <class floatX>
void gelu_backward(Out<floatX> dinp, const floatX* inp, const floatX* dout, int64_t count, Stream) {
    for_chunks(count, 1 << 14, [=](int64_t begin, int64_t end) {
        for_vectors(end - begin, [&](int64_t i, auto width) {
            const floatv slope = gelu_derivative(load(inp + begin + i, width));
            store(dinp.data + begin + i, load(dout + begin + i, width) * slope, width);
        });
    });
}

// ---- The head

template <class floatX>
void head_targets(float* target_logits, const HeadInput<floatX>& head, Stream) {
    for_chunks(head.N, 1, [=](int64_t n, int64_t) {
        const int column = head.shard.row(head.targets[n]);
        floatv sum = {};
        if (column >= 0)
            for_vectors(head.C, [&](int64_t c, auto width) {
                sum += load(head.inp + n * head.C + c, width) *
                       load(head.weight.rows + int64_t(column) * head.C + c, width);
            });
        target_logits[n] = reduce_sum(sum);
    });
}

// ---- gradient norm and AdamW

// Fetches memory 2 KiB ahead of a loop: the hardware's prefetcher alone reaches half of the memory's bandwidth.
INLINE void prefetch_ahead(const float* x, int64_t count) {
    for (int64_t line = 0; line < count; line += 16) __builtin_prefetch(x + 512 + line);
}

// The lanes sum a chunk in float; lanes and chunks are added in double.
void sum_of_squares(float* out, const float* x, int64_t count, Stream) {
    constexpr int max_chunks = 1024;
    // The chunk is at least 1 although count may be 0: OpenMP allows no step of 0, and clang's loop divides by it.
    const int64_t chunk = round_up<int64_t>(ceil_div<int64_t>(count > 0 ? count : 1, max_chunks), 4096);
    double sums[max_chunks] = {};
    for_chunks(count, chunk, [=, &sums](int64_t begin, int64_t end) {
        floatv a = {}, b = {}, c = {}, d = {};  // four, to hide the latency of an addition
        int64_t i = begin;
        for (; i + 4 * VL <= end; i += 4 * VL) {
            prefetch_ahead(x + i, 4 * VL);
            const floatv p = load(x + i), q = load(x + i + VL), r = load(x + i + 2 * VL), s = load(x + i + 3 * VL);
            a += p * p, b += q * q, c += r * r, d += s * s;
        }
        for_vectors(end - i, [&](int64_t j, auto width) {
            const floatv p = load(x + i + j, width);
            a += p * p;
        });
        const floatv squares = (a + b) + (c + d);
        double lanes = 0.0;
        for (int j = 0; j < VL; j++) lanes += double(squares[j]);
        sums[begin / chunk] = lanes;
    });
    double total = 0.0;
    for (double s : sums) total += s;
    *out = float(total);
}

// The moments (ops.inc), in blocks of FLAT_ALIGN elements; base/moments.h has the codes' definition.

constexpr int BLOCK_VECTORS = FLAT_ALIGN / VL;

template <WhichMoment WHICH>
using MomentFormat = std::conditional_t<WHICH == WhichMoment::first, SignedMoment, RootMoment>;

// Elements i .. i + VL of a block that begins at the moment's first element. base: code_base of the block.
template <MomentDtype DTYPE, WhichMoment WHICH>
INLINE floatv load_moment(const Moment& moment, int i, uint32_t base) {
    if constexpr (DTYPE == MomentDtype::fp32) {
        return load(static_cast<const float*>(moment.data) + i);
    } else if constexpr (DTYPE == MomentDtype::bf16) {
        return load(static_cast<const bf16*>(moment.data) + i);
    } else {
        using Format = MomentFormat<WHICH>;
        const uintv codes = load_bytes(static_cast<const uint8_t*>(moment.data) + i);
        const uintv magnitude = WHICH == WhichMoment::first ? codes & Format::largest : codes;
        const floatv value = (floatv)((magnitude << Format::shift) + base) - __builtin_bit_cast(float, base);
        if constexpr (WHICH == WhichMoment::first) return (floatv)((uintv)value | ((codes << 24) & 0x80000000));
        return value * value;
    }
}
template <MomentDtype DTYPE, WhichMoment WHICH>
INLINE uint32_t base_of_block(const Moment& moment) {
    if constexpr (DTYPE != MomentDtype::block8) return 0;
    return code_base<MomentFormat<WHICH>>(*moment.exponents);
}

// The random bits of elements i .. i + VL of a block with these words of Philox (base/moments.h).
INLINE uintv moment_bits(const uint32_t* words, int i) {
    uintv lanes;
    for (int j = 0; j < VL; j++) lanes[j] = uint32_t(j) * 0x9e3779b9u;
    const uintv x = lanes + uint32_t(i) * 0x9e3779b9u + words[i / 16];
    return (x ^ x >> 16) * 0x7feb352du;
}

// Stores them in fp32 or bf16, rounded by their random bits.
template <MomentDtype DTYPE, WhichMoment WHICH>
INLINE void store_moment(const Moment& moment, int i, floatv x, uintv random) {
    if constexpr (DTYPE == MomentDtype::fp32)
        store(static_cast<float*>(moment.data) + i, x);
    else
        store_stochastic(static_cast<bf16*>(moment.data) + i, x,
                         WHICH == WhichMoment::first ? random >> 16 : random & 0xffff);
}

// Stores a whole block as codes: of the first moment, or of the second one's roots.
template <WhichMoment WHICH>
INLINE void store_codes(const Moment& moment, const floatv (&x)[BLOCK_VECTORS], const uintv (&random)[BLOCK_VECTORS]) {
    using Format = MomentFormat<WHICH>;
    constexpr bool is_first = WHICH == WhichMoment::first;
    intv magnitude[BLOCK_VECTORS], largest = {};
    for (int j = 0; j < BLOCK_VECTORS; j++) {
        magnitude[j] = is_first ? (intv)x[j] & 0x7fffffff : (intv)x[j];  // a root is not negative
        largest = max(largest, magnitude[j]);  // floats that are not negative have the order of their bits
    }
    const uint8_t exponent = block_exponent<Format>(__builtin_bit_cast(float, reduce_max(largest)));
    const uint32_t base = code_base<Format>(exponent);
    *moment.exponents = exponent;
    for (int j = 0; j < BLOCK_VECTORS; j += 4) {
        intv code[4], bits[4];
        for (int k = 0; k < 4; k++) {
            const intv below = is_first ? (intv)(random[j + k] >> 13) : (intv)random[j + k] & 0x3ffff;
            const intv sum = (intv)((floatv)magnitude[j + k] + __builtin_bit_cast(float, base));
            code[k] = (sum - int(base) + below) >> Format::shift;
            bits[k] = (intv)x[j + k];
        }
        bytesv bytes;
        if constexpr (is_first)
            bytes = to_bytes<int8_t>(code) | (to_bytes<int8_t>(bits) & 0x80);  // a negative float's bits give -128
        else
            bytes = max(to_bytes<uint8_t>(code), to_bytes<uint8_t>(bits) > 0 ? bytesv{} + 1 : bytesv{});
        __builtin_memcpy(static_cast<uint8_t*>(moment.data) + j * VL, &bytes, sizeof bytes);
    }
}

// Calls body(i, words) for every block of [begin, end). words: Philox's of the block, if DRAWN. index: that of element
// 0 in the flat buffer.
template <bool DRAWN, class Body>
INLINE void for_blocks(int64_t begin, int64_t end, int64_t index, uint64_t seed, uint64_t stream, const Body& body) {
    for (; begin < end; begin += VL * FLAT_ALIGN) {
        uint32_t words[VL][4] = {};
        if constexpr (DRAWN) random_words(words, seed, stream, uint64_t(index + begin) / FLAT_ALIGN);
        for (int64_t j = 0; j < VL && begin + j * FLAT_ALIGN < end; j++) body(begin + j * FLAT_ALIGN, words[j]);
    }
}
template <bool DRAWN, class Body>
static void for_all_blocks(int64_t count, int64_t index, uint64_t seed, uint64_t stream, Body body) {
    for_chunks(count, 1 << 16,
               [=](int64_t begin, int64_t end) { for_blocks<DRAWN>(begin, end, index, seed, stream, body); });
}

void accumulate_rounded(bf16* sum, const float* x, int64_t index, int64_t count, uint64_t seed, int step, int addition,
                        Stream) {
    for_all_blocks<true>(count, index, seed, sum_stream(step, addition), [=](int64_t i, const uint32_t* words) {
        const Moment m(sum + i, nullptr, MomentDtype::bf16);
        for (int j = 0; j < FLAT_ALIGN; j += VL)
            store_moment<MomentDtype::bf16, WhichMoment::first>(m, j, load(sum + i + j) + load(x + i + j),
                                                                moment_bits(words, j));
    });
}

// The constants of one AdamW step. inverse1 and inverse2 are 1 / (1 - beta^step). Functions take a copy, because a
// store of bytes might change what they have by reference, for all that the compiler knows.
struct AdamWStep {
    AdamWConfig config;
    float factor, inverse1, inverse2, root_of_inverse2, lr;
    uint64_t step;
};

// Updates a block of fp32 weights, `master`, and of bf16 weights; one may be null. STOCHASTIC: master is null, and
// weights are rounded stochastically, by `bits`. words: Philox's words for the block's moments.
template <bool STOCHASTIC, MomentDtype MOMENTS>
static inline void adamw_block(bf16* weight, float* master, const Moment& m, const Moment& v, const float* grad,
                               float decay, const uint32_t* bits, const uint32_t* words, AdamWStep s) {
    using enum WhichMoment;
    constexpr bool in_codes = MOMENTS == MomentDtype::block8;
    const float beta1 = s.config.beta1, beta2 = s.config.beta2;
    const uint32_t base1 = base_of_block<MOMENTS, first>(m), base2 = base_of_block<MOMENTS, second>(v);
    floatv means[BLOCK_VECTORS], roots[BLOCK_VECTORS];
    uintv random[BLOCK_VECTORS];
    prefetch_ahead(grad, FLAT_ALIGN);
    if (!STOCHASTIC) prefetch_ahead(master, FLAT_ALIGN);
    for (int j = 0; j < BLOCK_VECTORS; j++) {
        const int i = j * VL;
        floatv w;
        if constexpr (STOCHASTIC)
            w = load(weight + i);
        else
            w = load(master + i);
        const floatv g = load(grad + i) * s.factor;
        const floatv mi = beta1 * load_moment<MOMENTS, first>(m, i, base1) + (1.0f - beta1) * g;
        const floatv vi = beta2 * load_moment<MOMENTS, second>(v, i, base2) + (1.0f - beta2) * g * g;
        floatv root;
        random[j] = moment_bits(words, i);
        if constexpr (in_codes) {
            means[j] = mi;
            roots[j] = square_root(vi);
            root = roots[j] * s.root_of_inverse2;
        } else {
            store_moment<MOMENTS, first>(m, i, mi, random[j]);
            store_moment<MOMENTS, second>(v, i, vi, random[j]);
            root = square_root(vi * s.inverse2);
        }
        const floatv update = (mi * s.inverse1) / (root + s.config.eps);
        const floatv next = w - s.lr * (update + decay * w);
        if constexpr (STOCHASTIC) {
            store_stochastic(weight + i, next, to_uint(*reinterpret_cast<const shortv_memory*>(bits + i / 2)));
        } else {
            store(master + i, next);
            if (weight) store(weight + i, next);
        }
    }
    if constexpr (in_codes) {
        store_codes<first>(m, means, random);
        store_codes<second>(v, roots, random);
    }
}

// Updates a run of `count` elements that all have the same weight decay, from element `index` of the flat buffer on.
template <bool STOCHASTIC, MomentDtype MOMENTS>
static inline void adamw_run(bf16* weight, float* master, const Moment& m, const Moment& v, const float* grad,
                             int64_t count, float decay, int64_t index, AdamWStep s) {
    // VL indices of Philox are drawn at once: each has the bits of 8 weights.
    constexpr int drawn = 8 * VL, at_once = drawn > FLAT_ALIGN ? drawn : int(FLAT_ALIGN);
    uint32_t bits[at_once / 8][4];
    const auto update = [&, s](int64_t i, const uint32_t* words) {
        for (int64_t j = i; STOCHASTIC && i % at_once == 0 && j < i + at_once; j += drawn)
            random_words(bits + (j - i) / 8, s.config.seed, ROUNDING_STREAMS + s.step, uint64_t(index + j) / 8);
        adamw_block<STOCHASTIC, MOMENTS>(weight ? weight + i : nullptr, STOCHASTIC ? nullptr : master + i, m.from(i),
                                         v.from(i), grad + i, decay, bits[i % at_once / 8], words, s);
    };
    for_blocks<MOMENTS != MomentDtype::fp32>(0, count, index, s.config.seed, MOMENT_STREAMS + s.step, update);
}

template <bool STOCHASTIC>
static void adamw_all(bf16* weight, float* master, Moment m, Moment v, const float* grad, int64_t first, int64_t count,
                      DecayPattern decay, const AdamWStep& s) {
    for_chunks(count, 1 << 16, [=, &s](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end;) {
            const DecayPattern::Run run = decay.run(first + i);
            const int64_t n = (run.end - first < end ? run.end - first : end) - i;
            with_moments(m.dtype, [&](auto dtype) {
                adamw_run<STOCHASTIC, dtype>(weight ? weight + i : nullptr, STOCHASTIC ? nullptr : master + i,
                                             m.from(i), v.from(i), grad + i, n,
                                             run.decays ? s.config.weight_decay : 0.0f, first + i, s);
            });
            i += n;
        }
    });
}

template <class floatX>
void adamw(floatX* weight, float* master, Moment m, Moment v, const float* grad, const float* factor, int64_t begin,
           int64_t count, DecayPattern decay, AdamWConfig config, float lr, int step, Stream) {
    if (!(*factor <= 1.0f)) return;  // NaN or infinite
    const double inverse1 = 1.0 / (1.0 - pow(double(config.beta1), double(step)));
    const double inverse2 = 1.0 / (1.0 - pow(double(config.beta2), double(step)));
    const AdamWStep s = {config, *factor, float(inverse1), float(inverse2), float(sqrt(inverse2)), lr, uint64_t(step)};
    if constexpr (sizeof(floatX) == sizeof(float))
        adamw_all<false>(nullptr, weight, m, v, grad, begin, count, decay, s);
    else if (master)
        adamw_all<false>(weight, master, m, v, grad, begin, count, decay, s);
    else
        adamw_all<true>(weight, nullptr, m, v, grad, begin, count, decay, s);
}

// ---- Muon

template <MomentDtype MOMENT>
static inline void momentum_block(float* out, const Moment& m, const float* grad, float factor, float mu,
                                  const uint32_t* words) {
    constexpr auto first = WhichMoment::first;
    const uint32_t base = base_of_block<MOMENT, first>(m);
    floatv means[BLOCK_VECTORS];
    uintv random[BLOCK_VECTORS];
    for (int j = 0; j < BLOCK_VECTORS; j++) {
        const floatv g = (1.0f - mu) * (load(grad + j * VL) * factor);
        means[j] = mu * load_moment<MOMENT, first>(m, j * VL, base) + g;
        random[j] = moment_bits(words, j * VL);
        store(out + j * VL, mu * means[j] + g);
        if constexpr (MOMENT != MomentDtype::block8) store_moment<MOMENT, first>(m, j * VL, means[j], random[j]);
    }
    if constexpr (MOMENT == MomentDtype::block8) store_codes<first>(m, means, random);
}

void muon_momentum(float* out, Moment moment, const float* grad, const float* factor, int64_t index, int64_t count,
                   float mu, uint64_t seed, int step, Stream) {
    if (!__builtin_isfinite(*factor)) return void(__builtin_memset(out, 0, size_t(count) * sizeof(float)));
    with_moments(moment.dtype, [=, f = *factor](auto dtype) {
        const auto block = [=](int64_t i, const uint32_t* words) {
            momentum_block<dtype>(out + i, moment.from(i), grad + i, f, mu, words);
        };
        for_all_blocks<dtype != MomentDtype::fp32>(count, index, seed, MOMENT_STREAMS + uint64_t(step), block);
    });
}

template <class floatX>
void muon_polynomial(floatX* out, const floatX* matrices, const floatX* squares, int count, int n, float a, float b,
                     float c, Stream) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < int64_t(count) * n; row++) {
        const floatX *matrix = matrices + row * n, *square = squares + row * n;
        const int64_t r = row % n;
        const float on_diagonal = b * float(matrix[r]) + c * float(square[r]) + a;  // `out` may be `squares`
        for_vectors(n, [&](int64_t i, auto width) {
            store(out + row * n + i, b * load(matrix + i, width) + c * load(square + i, width), width);
        });
        out[row * n + r] = floatX(on_diagonal);
    }
}

template <class floatX>
void muon_update(floatX* weight, float* master, const floatX* direction, const float* factor, int64_t index,
                 int64_t count, float scale, AdamWConfig config, float lr, int step, Stream) {
    if (!__builtin_isfinite(*factor)) return;
    constexpr bool rounded = sizeof(floatX) != sizeof(float);
    if constexpr (!rounded) master = weight;
    const auto next = [=](auto* weights, int64_t i, auto width) {
        const floatv w = load(weights + i, width);
        return w - lr * (scale * load(direction + i, width) + config.weight_decay * w);
    };
    for_chunks(count, 1 << 16, [=](int64_t begin, int64_t end) {
        for (int64_t n, i = begin; i < end; i += n) {
            // Up to the next element whose bits are drawn. The last vector reads behind them.
            const int64_t at = (index + i) % (8 * VL);
            n = 8 * VL - at < end - i ? 8 * VL - at : end - i;
            uint32_t bits[VL + 2][4] = {};
            const uint16_t* random = reinterpret_cast<const uint16_t*>(bits) + at;
            if (!master)
                random_words(bits, config.seed, ROUNDING_STREAMS + uint64_t(step), uint64_t(index + i - at) / 8);
            for_vectors(n, [&](int64_t j, auto width) {
                if (master) {
                    const floatv w = next(master, i + j, width);
                    store(master + i + j, w, width);
                    if constexpr (rounded) store(weight + i + j, w, width);
                } else if constexpr (rounded) {
                    store_stochastic(weight + i + j, next(weight, i + j, width),
                                     to_uint(*reinterpret_cast<const shortv_memory*>(random + j)), width);
                }
            });
        }
    });
}

// ---- all operations

template <class floatX>
int64_t scratch_bytes(int B, int T, int C, int NH, int Vp) {
    const int threads = omp_get_max_threads();
    const int64_t layernorm = layernorm_scratch_bytes(B * T, C);
    const int64_t attention = attention_scratch_bytes(T, C / NH) * threads;
    return std::max(std::max(layernorm, attention), head_scratch_bytes<floatX>(B * T, C, Vp));
}

#define ENTRY(op) .op = op<floatX>,
template <class floatX>
constexpr Operations<floatX> operations{.sum_of_squares = sum_of_squares,
                                        .accumulate_rounded = accumulate_rounded,
                                        .muon_momentum = muon_momentum,
                                        .column_sums = column_sums<floatX>,
                                        .matmul_scratch_bytes = matmul_scratch_bytes<floatX>,
                                        .scratch_bytes = scratch_bytes<floatX>,
                                        .run_microkernel = run_microkernel,
                                        EACH_OPERATION(ENTRY)};

const Variant variant{operations<float>, operations<bf16>};

}  // namespace cpu::VARIANT
