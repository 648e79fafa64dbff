// matmul_routes.cpp: compares, times and runs the routes of matmul_routes.h.
#include "cuda/matmul_routes.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/common.h"
#include "base/device.h"
#include "cuda/autotune.h"
#include "cuda/cuda_check.h"

namespace gpu {

namespace {

std::string choice_key(const MatmulShape& shape) {
    return format("wgmma %d; %s", wgmma_matmul.version, matmul_key(shape).c_str());
}

// Layout of device_scratch where results are compared: memory of cuBLASLt or of our kernel, the library's results of
// some rows (e in float, then in bf16), sums and losses of both, ratios.
struct Comparison {
    int rows;  // at a time
    float *exact, *sums, *losses, *own_losses;
    bf16* rounded;
    char* ratios;
    int64_t bytes;

    Comparison(void* base, const MatmulShape& shape) {
        const int64_t row_bytes = int64_t(shape.m) * int64_t(sizeof(float) + sizeof(bf16));
        rows = int(std::clamp<int64_t>(wgmma_matmul.compared_bytes / row_bytes, 1, shape.n));
        if (rows > 64) rows -= rows % 64;  // largest_difference has pieces of 64 rows
        Arena memory{base, std::max(cublaslt_scratch_bytes(0), wgmma_matmul.scratch_bytes(shape))};
        exact = memory.take<float>(int64_t(rows) * shape.m);
        rounded = memory.take<bf16>(int64_t(rows) * shape.m);
        for (float** each : {&sums, &losses, &own_losses}) *each = memory.take<float>(rows);
        ratios = memory.take<char>(DIFFERENCE_BYTES);
        bytes = memory.used;
    }
};

int64_t comparison_bytes(const MatmulShape& shape) { return Comparison(nullptr, shape).bytes; }

// The limits of largest_difference. Both round results to bf16 once, which changes them by at most 2^-9 of them. Losses
// are float.
constexpr float RESULT_LIMIT = 0x1p-8f, LOSS_LIMIT = 0x1p-12f;

struct Difference {
    float results = 0.0f, losses = 0.0f;
    bool is_small() const { return results <= RESULT_LIMIT && losses <= LOSS_LIMIT; }  // not with NaN
};

// The difference of our results from cuBLASLt's, of rows n to n + count - 1.
Difference difference(const MatmulCall<bf16>& call, const Comparison& at, int n, int count, Stream stream) {
    const int64_t columns = call.shape.m, elements = count * columns;
    const bf16* const own = static_cast<const bf16*>(call.out) + n * columns;
    MatmulCall<bf16> part = call;
    part.shape.n = count;
    part.b = static_cast<const bf16*>(call.b) + n * int64_t(call.shape.k);
    if (call.shape.epilogue != Epilogue::exponentials) {
        part.out = at.rounded;
        part.residual = call.residual + n * columns;
        cublaslt_matmul(part, stream);
        return {largest_difference(own, at.rounded, count, 1, int(columns), at.ratios, stream), 0.0f};
    }
    // cuBLASLt's logits stay in float, because those that are rounded to bf16 have a larger error than ours.
    part.shape.to_float = true;
    part.out = at.exact;
    part.head = {at.sums, call.head.target_logits + n, call.head.targets + n, call.head.shard, true};
    cublaslt_matmul(part, stream);
    const int64_t whole = round_up(elements, FLAT_ALIGN);  // round_gradients needs it
    CUDA_CHECK(cudaMemsetAsync(at.exact + elements, 0, size_t(whole - elements) * sizeof(float), stream));
    round_gradients(at.rounded, at.exact, whole, stream);
    head_losses(at.losses, at.sums, part.head.targets, count, stream);
    head_losses(at.own_losses, call.head.sums + n, part.head.targets, count, stream);
    // Pieces of 512 or more neighbours, mostly in one row: e is much larger in some rows than in others.
    return {largest_difference(own, at.rounded, elements / 8, 1, 8, at.ratios, stream),
            largest_difference(at.own_losses, at.losses, count, 1, 1, at.ratios, stream)};
}

// Whether our results agree with cuBLASLt's. A race may show in some runs only, so the kernel runs several times.
// Results that it leaves unwritten are NaN. worst: the difference that was too large, or else of the last rows.
bool agrees(const MatmulCall<bf16>& call, Difference& worst, Stream stream) {
    constexpr int runs = 3;
    const Comparison at(device_scratch(comparison_bytes(call.shape)), call.shape);
    for (int run = 0; run < runs; run++) {
        CUDA_CHECK(cudaMemsetAsync(call.out, 0xff, size_t(call.shape.m) * size_t(call.shape.n) * sizeof(bf16), stream));
        if (call.head.sums)
            CUDA_CHECK(cudaMemsetAsync(call.head.sums, 0xff, size_t(call.shape.n) * sizeof(float), stream));
        wgmma_matmul.run(call, stream);
        for (int n = 0; n < call.shape.n; n += at.rows) {
            worst = difference(call, at, n, std::min(at.rows, call.shape.n - n), stream);
            if (!worst.is_small()) return false;
        }
    }
    return true;
}

// Keeps the faster route. The reason of a refusal is in the text of the choice.
void choose(const MatmulCall<bf16>& call, Stream stream) {
    device_reserve_scratch(comparison_bytes(call.shape));
    cublaslt_matmul(call, stream);  // times its algorithms
    device_time_algorithms(false);  // those of the parts are not timed
    Difference worst;
    const bool may_choose = agrees(call, worst, stream);
    const auto best = fastest(stream, may_choose ? 2 : 1, [&](size_t i) {
        i == 0 ? cublaslt_matmul(call, stream) : wgmma_matmul.run(call, stream);
        return true;
    });
    device_time_algorithms(true);
    std::string text = best->index == 0 ? "cuBLASLt" : "wgmma";
    if (!may_choose)
        text += format(" (wgmma refused, it differs by %.2g of the norm, losses by %.2g, and may by %.2g and %.2g)",
                       double(worst.results), double(worst.losses), double(RESULT_LIMIT), double(LOSS_LIMIT));
    keep_choice(choice_key(call.shape), text, *best);
}

// The choices that were read, of the current version.
std::map<MatmulShape, bool>& known() {
    static std::map<MatmulShape, bool> known;
    static int version = 0;
    if (std::exchange(version, algorithms_version()) != version) known.clear();
    return known;
}

}  // namespace

bool is_by_wgmma(const MatmulShape& shape) {
    if (!wgmma_matmul.computes(shape)) return false;
    if (wgmma_matmul.always) return true;
    const auto found = known().find(shape);
    if (found != known().end()) return found->second;
    const std::string choice = choice_for(choice_key(shape));
    if (choice.empty()) return false;  // it may be timed later
    return known()[shape] = choice.starts_with("wgmma ");
}

template <class floatX>
void matmul(const MatmulCall<floatX>& call, Stream stream) {
    if constexpr (sizeof(floatX) == sizeof(bf16)) {
        const bool to_choose =
            timing_algorithms() && !is_capturing(stream) && !call.amax && wgmma_matmul.computes(call.shape);
        if (to_choose && choice_for(choice_key(call.shape)).empty()) choose(call, stream);
        if (!call.amax && is_by_wgmma(call.shape)) return wgmma_matmul.run(call, stream);
    }
    cublaslt_matmul(call, stream);
}

template <class floatX>
int64_t matmul_routes_scratch_bytes(int N, int C, int Vp) {
    const MatmulShape head = {Kind::forward, Epilogue::exponentials, operands_of<floatX>, Vp, N, C},
                      residual = {Kind::forward, Epilogue::bias, operands_of<floatX>, C, N, C, true};
    int64_t bytes = 0;
    for (const MatmulShape& shape : {head, residual})
        if (wgmma_matmul.computes(shape)) bytes = std::max(bytes, comparison_bytes(shape));
    return bytes;
}

}  // namespace gpu

INSTANTIATE(gpu::matmul_routes_scratch_bytes);
INSTANTIATE(gpu::matmul);
