// small_ops.cpp: the operations that have a single implementation, in plain loops: on losses, on gradients, on
// moments, and those of Muon between its matmuls, which are the model's. Memory bounds their time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "base/moments.h"
#include "base/random.h"
#include "cpu/variants.h"

// The logarithm is computed in double, because log1pf of glibc before 2.41 rounds one argument in 100 otherwise than
// later ones.
void cpu::head_losses(float* losses, const float* sums, const int* targets, int N, Stream) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) losses[n] = targets[n] < 0 ? 0.0f : float(std::log1p(double(sums[n])));
}

void cpu::sum_of_shards(float* out, const float* parts, int shards, int N, Stream) {
    INVARIANT(shards >= 1 && N >= 1, "sum_of_shards of %d shards of %d rows: there must be at least one of each",
              shards, N);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        out[n] = 0.0f;
        for (int i = 0; i < shards; i++) out[n] += parts[int64_t(i) * N + n];
    }
}

void cpu::accumulate_loss(float* total, const float* losses, int N, float scale, Stream) {
    double sum = 0.0;
    for (int n = 0; n < N; n++) sum += double(losses[n]);
    *total = float(double(*total) + double(scale) * sum);
}

void cpu::accumulate_gradients(float* sum, const float* x, int64_t count, Stream) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) sum[i] += x[i];
}

void cpu::round_gradients(bf16* out, const float* x, int64_t count, Stream) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) round_to(out[i], x[i]);
}

void cpu::widen_gradients(float* out, const bf16* x, int64_t count, Stream) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) out[i] = float(x[i]);
}

void cpu::clip_factor(float* norm, float* factor, const float* squares, const float* loss, float max_norm,
                      StepLimits limits, Stream) {
    *norm = std::sqrt(*squares);
    if (std::isnan(*factor) || !std::isfinite(*norm) || !std::isfinite(*loss))
        *factor = std::numeric_limits<float>::quiet_NaN();
    else if (*norm > limits.norm || *loss > limits.loss)
        *factor = std::numeric_limits<float>::infinity();
    else
        *factor = max_norm > 0.0f && *norm > max_norm ? max_norm / *norm : 1.0f;
}

// ---- The optimizer's moments, in blocks of FLAT_ALIGN elements

// moment: from the block's first element on.
static void read_block(float* out, const Moment& moment, WhichMoment which) {
    if (moment.dtype == MomentDtype::fp32)
        return void(std::copy_n(static_cast<const float*>(moment.data), FLAT_ALIGN, out));
    if (moment.dtype == MomentDtype::bf16) {
        for (int64_t i = 0; i < FLAT_ALIGN; i++) out[i] = float(static_cast<const bf16*>(moment.data)[i]);
        return;
    }
    with_format(which == WhichMoment::first, [&](auto format) {
        decode_block<decltype(format)>(out, static_cast<const uint8_t*>(moment.data), FLAT_ALIGN, *moment.exponents);
    });
}

// Rounds by random bits, of a block from element `index` of the flat buffer on, or without `random` to nearest.
static void write_block(const Moment& moment, const float* values, WhichMoment which, const Philox* random,
                        int64_t index) {
    if (moment.dtype == MomentDtype::fp32)
        return void(std::copy_n(values, FLAT_ALIGN, static_cast<float*>(moment.data)));
    uint32_t words[4], bits[FLAT_ALIGN];
    if (random) random->words(words, uint64_t(index / FLAT_ALIGN));
    for (uint32_t i = 0; i < FLAT_ALIGN && random; i++) bits[i] = moment_bits(words[i / 16], i);
    with_format(which == WhichMoment::first, [&](auto format) {
        using Format = decltype(format);
        if (moment.dtype == MomentDtype::block8) {
            auto* const codes = static_cast<uint8_t*>(moment.data);
            *moment.exponents = encode_block<Format>(codes, values, FLAT_ALIGN, random ? bits : nullptr);
            return;
        }
        auto* const out = static_cast<bf16*>(moment.data);
        for (int64_t i = 0; i < FLAT_ALIGN; i++)
            out[i] = random ? round_randomly(values[i], Format::below_bf16(bits[i])) : bf16(values[i]);
    });
}

void cpu::widen_moment(float* out, Moment moment, WhichMoment which, int64_t count, Stream) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += FLAT_ALIGN) read_block(out + i, moment.from(i), which);
}

void cpu::store_moment(Moment moment, const float* values, WhichMoment which, int64_t count, Stream) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i += FLAT_ALIGN) write_block(moment.from(i), values + i, which, nullptr, i);
}

void cpu::round_moment(Moment moment, const float* values, WhichMoment which, int64_t begin, int64_t count,
                       const Philox& random) {
    for (int64_t i = 0; i < count; i += FLAT_ALIGN) write_block(moment.from(i), values + i, which, &random, begin + i);
}

// ---- Muon

// out (cols, rows) = the transpose of inp (rows, cols), each element by `convert`, in blocks that the L1 cache holds.
template <class Out, class In, class Convert>
static void transpose(Out* out, const In* inp, int rows, int cols, const Convert& convert) {
    constexpr int BLOCK = 32;
#pragma omp parallel for schedule(static)
    for (int first = 0; first < cols; first += BLOCK)
        for (int begin = 0; begin < rows; begin += BLOCK)
            for (int c = first; c < std::min(cols, first + BLOCK); c++)
                for (int r = begin; r < std::min(rows, begin + BLOCK); r++)
                    out[int64_t(c) * rows + r] = convert(inp[int64_t(r) * cols + c]);
}

template <class floatX>
void cpu::muon_stack(floatX* stack, const MuonBatch& batch, Stream stream) {
    const int64_t size = int64_t(batch.rows) * batch.cols;
    for (int i = 0; i < batch.count; i++) {
        float squares;
        sum_of_squares(&squares, batch.matrices[i], size, stream);
        const float *matrix = batch.matrices[i], scale = 1.0f / (std::sqrt(squares) + 1e-7f);
        floatX* const out = stack + i * size;
        if (batch.transposed[i]) {
            transpose(out, matrix, batch.cols, batch.rows, [=](float x) { return floatX(x * scale); });
            continue;
        }
#pragma omp parallel for simd schedule(static)
        for (int64_t k = 0; k < size; k++) round_to(out[k], matrix[k] * scale);
    }
}

template <class floatX>
void cpu::muon_unstack(const MuonBatch& batch, const floatX* stack, Stream) {
    const int64_t size = int64_t(batch.rows) * batch.cols;
    for (int i = 0; i < batch.count; i++) {
        auto* const out = reinterpret_cast<floatX*>(batch.matrices[i]);
        if (batch.transposed[i])
            transpose(out, stack + i * size, batch.rows, batch.cols, [](floatX x) { return x; });
        else
            std::copy_n(stack + i * size, size, out);
    }
}

INSTANTIATE(cpu::muon_stack);
INSTANTIATE(cpu::muon_unstack);
