// test_gpu_matmul_wgmma.cu: our matmuls for Hopper, in every mode of the emulator, and the choice between them and
// cuBLASLt. In the emulator cuBLASLt takes 3 ms or more, and our kernels what a test says.
#include "cuda/autotune.h"
#include "cuda/matmul_routes.h"
#include "cuda/matmul_wgmma.cuh"
#include "gpu/gpu_backend.h"
#include "gpu/hopper_modes.h"
#include "gpu/hopper_runs.h"
#include "support/cases_head.h"

using namespace head_cases;
using gpu::MatmulCall;

static const GpuBackend gpu_backend;
static const gpu::MatmulKernels own = gpu::wgmma_matmul;

// Logits are float. e is rounded to bf16, which has an error of 0.0016 in the mean. The parts of dinp cancel where the
// logits of a row have something in common.
static Bounds bounds_of(const Inputs<bf16>& in) {
    const double gradient = 0x1p-10 * largest_logit(in) + 3e-3;
    return {1e-6, 1e-6, gradient, gradient};
}

// Tiles have 128 rows, 192 columns and 64 channels.
TEST_CASE("the head by our kernel for Hopper agrees with double, in every mode") {
    if (skips_on_other_gpus()) return;
    const OwnMatmul restored;
    gpu::wgmma_matmul.always = true;
    in_every_mode([] {
        for (const Kind& kind : KINDS)
            for (const int shards : {1, 3}) {
                INFO(kind.name);
                const Inputs<bf16> in = inputs_of<bf16>({40, 96, 300, shards}, kind);
                head_cases::compare(gpu_backend, in, false, bounds_of(in));
            }
        awkward_shapes<bf16>(gpu_backend, bounds_of(inputs_of<bf16>({9, 8, 200}, KINDS[0])), 8);
        large_losses<bf16>(gpu_backend);
        not_finite<bf16>(gpu_backend);
    });
    const Inputs<bf16> in = inputs_of<bf16>({2200, 8, 3100}, KINDS[0]);  // two bands; blocks with two and three tiles
    head_cases::compare(gpu_backend, in, false, bounds_of(in));
    const Results a = run(gpu_backend, in, false), b = run(gpu_backend, in, false);
    CHECK(same_bits(a.losses, b.losses));
    CHECK(same_bits(a.dweight, b.dweight));
}

// The error of a product with a residual by two blocks, each of which has many tiles of results.
template <int BN>
static double error_of_two_blocks(int rows, int columns, int K) {
    using Tiles = WgmmaTiles<BN>;
    const std::vector<bf16> A = bf16s(rows * K, 1), B = bf16s(columns * K, 2), R = bf16s(rows * columns, 3);
    const Array<bf16> a(A), b(B), r(R), out(R.size());
    const auto map = [](const Array<bf16>& x, int rows, int columns, int box) {
        return simt::tensor_map<bf16, 2>(x.data, {rows, columns}, {box, 64});
    };
    simt::launch(matmul_wgmma_kernel<BN, BiasAndResidual<BN>>, 2, Tiles::THREADS, Tiles::SHARED_BYTES, nullptr,
                 map(a, rows, K, Tiles::BM), map(b, columns, K, BN),
                 {map(out, rows, columns, 64), map(r, rows, columns, 64), nullptr, columns}, rows, columns, K);
    const std::vector<bf16> got = out.host();
    Worst worst;
    for (int m = 0; m < rows; m++)
        for (int n = 0; n < columns; n++) {
            float sum = float(R[size_t(m * columns + n)]);
            for (int k = 0; k < K; k++) sum += float(A[size_t(m * K + k)]) * float(B[size_t(n * K + k)]);
            worst.compare(got[size_t(m * columns + n)], sum, 0.1);
        }
    return worst.error;
}

TEST_CASE("blocks with many tiles, and more tiles of operands than the queue has, are right in every mode") {
    if (skips_on_other_gpus()) return;
    in_every_mode([] {
        CHECK(error_of_two_blocks<192>(640, 200, 328) < 0.005);
        CHECK(error_of_two_blocks<128>(520, 200, 456) < 0.005);
    });
}

// ---- The choice

// The results of the test's kernel, and the time that it takes.
struct Planted {
    std::function<void(const MatmulCall<bf16>& call, Stream stream)> compute = own.run;
    float ms = 1.0f;
    int runs = 0;
};
static Planted planted;

// Results are compared in parts of 64 rows.
static void plant(const Planted& p) {
    planted = p;
    gpu::wgmma_matmul.compared_bytes = 64 * 304 * 6;
    gpu::wgmma_matmul.run = [](const MatmulCall<bf16>& call, Stream stream) {
        planted.runs++;
        planted.compute(call, stream);
        take_time(planted.ms, stream);
    };
    gpu::load_algorithms({});
}

static const Inputs<bf16>& inputs() {
    static const Inputs<bf16> in = inputs_of<bf16>({129, 72, 300}, KINDS[1]);
    return in;
}

// timed: the first call of each shape times both routes.
static Results computed(bool timed) {
    device_time_algorithms(timed);
    Results r = run(gpu_backend, inputs(), false);
    device_time_algorithms(false);
    return r;
}

static std::string choice() {
    for (const auto& [key, text] : gpu::algorithms())
        if (key.starts_with("wgmma ")) return text;
    return "none";
}

static bf16* row(const MatmulCall<bf16>& call, int n) { return static_cast<bf16*>(call.out) + n * call.shape.m; }

// Acts of a planted kernel, after a right computation or in place of it.
struct Fault {
    const char* what;
    void (*spoil)(const MatmulCall<bf16>& call, Stream stream);
    bool computes = true;
};
static const Fault faults[] = {
    {"a row of the last part is wrong", [](const MatmulCall<bf16>& c, Stream s) { set_bytes(row(c, 128), 0, 40, s); }},
    {"an element is NaN", [](const MatmulCall<bf16>& c, Stream s) { set_bytes(row(c, 70) + 299, 0xff, 1, s); }},
    {"a sum is wrong", [](const MatmulCall<bf16>& c, Stream s) { set_bytes(c.head.sums + 2, 0, 1, s); }},
    {"one run in three is wrong",
     [](const MatmulCall<bf16>& c, Stream s) { set_bytes(row(c, 1), 0, planted.runs % 3 ? 0 : 300, s); }},
    {"nothing is written", [](const MatmulCall<bf16>&, Stream) {}, false}};

TEST_CASE("a matmul whose results differ from the library's is refused, and costs no bit") {
    if (skips_on_other_gpus()) return;
    const OwnMatmul restored;
    for (const Fault& fault : faults) {
        INFO(std::string(fault.what));
        plant({.compute = [&](const MatmulCall<bf16>& call, Stream stream) {
            if (fault.computes) own.run(call, stream);
            fault.spoil(call, stream);
        }});
        const Results got = computed(true);
        CHECK(choice().starts_with("cuBLASLt (wgmma refused, it differs by "));
        planted.runs = 0;
        const Results want = computed(false);
        CHECK(planted.runs == 0);
        CHECK(same_bits(got.losses, want.losses));
        CHECK(same_bits(got.dweight, want.dweight));
    }
}

#ifdef SIMT_EMULATOR
TEST_CASE("a matmul that agrees is chosen if it is faster, and kept, also for validation") {
    const OwnMatmul restored;
    plant({.ms = 5.0f});
    computed(true);
    CHECK(choice() == "cuBLASLt 3.0000 ms, first 3.0000 ms");
    plant({});
    computed(true);
    CHECK(choice() == "wgmma 1.0000 ms, first 3.0000 ms");
    const AlgorithmChoices kept = gpu::algorithms();
    gpu::load_algorithms(kept);
    planted.runs = 0;
    computed(true);
    CHECK(planted.runs == 2);  // without `keep` and with it
    gpu::wgmma_matmul.version++;
    gpu::load_algorithms(kept);
    computed(false);
    CHECK(planted.runs == 2);  // the choice is another version's
}
#endif
