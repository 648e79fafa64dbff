// test_gpu_cross_entropy.cu: the shared cases of softmax and cross entropy (cases_cross_entropy.h) on the kernels of
// llmc/cuda, at GPT-2's vocabulary and at awkward ones, with rows that fit in shared memory and rows that do not.
#include "cuda/cross_entropy.cuh"
#include "gpu/gpu_backend.h"
#include "support/cases_cross_entropy.h"

using namespace cross_entropy_cases;

static const GpuBackend gpu_backend;

// The exp(x) of a GPU has a relative error of 2^-21 + |x| 2^-23. The logits that contribute to the loss have |x| below
// 20. If spread is large, only the largest logit contributes, with x = 0.
template <class floatX>
static void compare(Shape s, float spread = 2.0f) {
    cross_entropy_cases::compare<floatX>(gpu_backend, 32.0f, s, spread);
}

// This test must run first: once a kernel has opted in to more shared memory for a longer row, it keeps it.
TEST_CASE("a row that fits into 48 KiB of shared memory only without the kernel's own variables agrees") {
    compare<bf16>({2, 24448, 24576});
    compare<bf16>({2, 24500, 24576});
    compare<bf16>({2, 24576, 24576});
}

TEST_CASE_TEMPLATE("cross entropy over GPT-2's vocabulary agrees with the definition", floatX, float, bf16) {
    compare<floatX>({6, 50257, 50304});
}

TEST_CASE_TEMPLATE("cross entropy over awkward vocabularies agrees with the definition", floatX, float, bf16) {
    for (int V : {1, 2, 7, 8, 9, 16, 17, 65, 127, 128}) compare<floatX>({9, V, 128});
    for (int V : {4095, 4096, 4097, 8191, 8192, 8193}) compare<floatX>({3, V, 8200});  // around one step
    compare<floatX>({65, 24, 24});
    compare<floatX>({9, 100, 128}, 1000.0f);
}

// A row is copied in parts, each a whole number of steps of 512 threads. The last vector of a row may
// be partial.
TEST_CASE_TEMPLATE("cross entropy over rows that end at a part's border agrees with the definition", floatX, float,
                   bf16) {
    const int step = CROSS_ENTROPY_THREADS * Vec<floatX>::size;
    for (int steps : {1, 2, 3, 4, 5, 8, 9})
        for (int more : {-1, 0, 1}) compare<floatX>({1, steps * step + more, (steps + 1) * step});
}

TEST_CASE_TEMPLATE("cross entropy over rows larger than shared memory agrees with the definition", floatX, float,
                   bf16) {
    const int most = int(shared_memory_limit() - CROSS_ENTROPY_STATIC_BYTES) / int(sizeof(floatX));
    compare<floatX>({2, most, most + 1000});
    compare<floatX>({2, most + 1, most + 1000});
    compare<floatX>({6, most + 1001, most + 1008});
}

TEST_CASE_TEMPLATE("huge, infinite and NaN logits", floatX, float, bf16) {
    huge_logits<floatX>(gpu_backend, 40);
    for (int V : {37, 40, 41}) not_finite_logits<floatX>(gpu_backend, V, 48);
    for (int V : {8000, 8001, 7999}) one_finite_logit<floatX>(gpu_backend, V);
}

TEST_CASE_TEMPLATE("cross entropy over vocabulary shards agrees with double and with the whole", floatX, float, bf16) {
    random_shards<floatX>(gpu_backend, 32.0f, 8);
    const int step = CROSS_ENTROPY_SHARD_THREADS * Vec<floatX>::size;  // shards that end around a step of the block
    for (const int V : {2 * step - 1, 2 * step, 2 * step + 1, 4 * step + 2})
        compare_shards<floatX>(gpu_backend, 32.0f, {2, V, round_up(V, 8)}, 2);
    compare_shards<floatX>(gpu_backend, 32.0f, {3, 50257, 50304}, 3);
    for (const int shards : {2, 3}) compare_shards<floatX>(gpu_backend, 32.0f, {9, 101, 128}, shards, 1000.0f);
}

// A thread adds every 1024th loss, and a tree adds the sums of the threads: log2(1024) + N / 1024 roundings.
TEST_CASE("losses are added up, with the same bits in two runs") { sum_of_losses(gpu_backend, 16e-7); }

TEST_CASE("no rows, no shards, rows shorter than the vocabulary or not a multiple of 16 bytes are refused") {
    refuse_impossible_rows();
    refuse_impossible_shards();
    float* x = nullptr;
    const int* target = nullptr;
    CHECK_THROWS_WITH_AS(gpu::cross_entropy(x, x, target, 1, 9, 10, 1.0f, nullptr),
                         doctest::Contains("rows of 10 logits; must be a multiple of 4"), Error);
}
