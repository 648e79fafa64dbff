// test_simt_hopper_bugs.cu: kernels for Hopper with a seeded bug, each of which the emulator must report.
#include "gpu/hopper_runs.h"
#include "seeded_bugs.h"

// A bug must show in one of these.
static const std::vector<Environment> modes = {{{"SIMT_ASYNC", "late"}, {"SIMT_ORDER", "forward"}},
                                               {{"SIMT_ASYNC", "late"}, {"SIMT_ORDER", "random:1"}},
                                               {{"SIMT_ASYNC", "random:1"}, {"SIMT_ORDER", "random:2"}},
                                               {{"SIMT_ASYNC", "early"}, {"SIMT_ORDER", "random:7"}}};

static void expect_right(double error) { require(error < 0.005, format("an error of %g", error)); }
static void gemm_bug(int bug, const Expected& expected) {
    expect_report(expected, modes, [bug] {
        if (bug == 8) return expect_right(gemm_error<128, 2, false, true>(512, 256, 192, 2, OneBug{bug}));
        if (bug == 3) return expect_right(gemm_error<128, 1, true, false>(256, 256, 192, 1, OneBug{bug}));
        expect_right(gemm_error<128, 2, false, false>(512, 256, 192, 2, OneBug{bug}));
    });
}
static void chain_bug(int bug, const Expected& expected) {
    expect_report(expected, modes, [bug] { expect_right(chain_error(5, OneBug{bug})); });
}

// The numbers are those of `bug` in hopper_kernels.cuh.
TEST_CASE("bug: a missing proxy fence or wait for a store is reported") {
    gemm_bug(1, "a bulk store reads what thread 128 has written at dev/test/gpu/hopper_kernels.cuh:");
    chain_bug(21, "without fence_proxy_async");
    chain_bug(25, "wgmma reads what thread 128 has written at dev/test/gpu/hopper_kernels.cuh:");
    gemm_bug(8, "a TMA load overwrites shared memory that a bulk store still reads: it needs store_wait_read");
    gemm_bug(14, "a thread overwrites shared memory that a bulk store still reads: it needs store_wait_read");
}

TEST_CASE("bug: a wrong phase, parity, count or order of mbarriers is reported") {
    gemm_bug(2, "a TMA load still writes: it needs mbarrier_wait");
    gemm_bug(7, "phase 0 needs 0 of 1 arrivals and 16 bytes fewer than TMA has copied");
    gemm_bug(9, "more arrivals at an mbarrier than its phase expects");
    gemm_bug(11, "at an mbarrier at dev/test/gpu/hopper_kernels.cuh:");
    gemm_bug(15, "has not waited for phase 0 of its mbarrier");
    chain_bug(22, "wgmma reads shared memory that a TMA load still writes: it needs mbarrier_wait");
    chain_bug(27, {wrong, wrong, race, msan, order});
}

TEST_CASE("bug: operands or accumulators that a wgmma still has are reported") {
    gemm_bug(5, "a TMA load overwrites an operand of the wgmma at dev/test/gpu/hopper_kernels.cuh:");
    gemm_bug(6, "a thread uses an accumulator of the wgmma at dev/test/gpu/hopper_kernels.cuh:");
    gemm_bug(10, "wgmma uses accumulators that the thread has changed, without wgmma_fence");
    chain_bug(23, "a thread uses an accumulator of the wgmma at dev/test/gpu/hopper_kernels.cuh:");
    chain_bug(24, {"without fence_proxy_async", "without fence_proxy_async", race, "without fence_proxy_async"});
    chain_bug(26, "without fence_proxy_async");
}

TEST_CASE("bug: wrong offsets, strides, steps and swizzles are reported") {
    gemm_bug(3, "a descriptor has a wrong offset, stride or swizzle");
    gemm_bug(12, "wgmma reads row 4 of the box of the TMA load at dev/test/gpu/hopper_kernels.cuh:");
    gemm_bug(4, "it was stored without the swizzle of 128 bytes");
    gemm_bug(13, "upon row 0: a descriptor has a wrong step of k");
}

// Each of these makes one thread or one operation wrong, in a block of 128 threads.
__global__ void one_wrong_step(const __grid_constant__ CUtensorMap map, float* out, int step) {
    unsigned char* const tile = simt::dynamic_shared<unsigned char, 1024>();
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(tile + 2 * TILE_BYTES);
    float d[32] = {};
    if (threadIdx.x == 0) mbarrier_init(barrier, 1);
    if (threadIdx.x == 0 && step != 0) fence_mbarrier_init();
    __syncthreads();
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, TILE_BYTES);
    if (threadIdx.x == 0) tma_load(tile + (step == 1 ? 64 : 0), &map, 0, 0, barrier);
    mbarrier_wait(barrier, 0);
    if (step == 2) mbarrier_wait(barrier, 0);
    if (step == 3) mbarrier_wait(barrier, 1), mbarrier_wait(barrier + 1, 0);
    if (step == 4) take_registers<248>(), give_registers<24>(), give_registers<40>();
    if (step == 5) mbarrier_arrive_at(barrier, 1);
    if (step == 6) take_registers<256>();
    if (step == 11) tile[threadIdx.x * 64] = 0;
    if (step == 12) out[threadIdx.x] = tile[TILE_BYTES];
    wgmma_fence();
    const uint64_t a = descriptor_of(tile) + (step == 7 ? 128 >> 4 : 0);
    wgmma<false, false>(d, a, descriptor_of(tile) + (step == 8 ? 16 * TILE_BYTES >> 4 : 0),
                        step == 9 && threadIdx.x == 5);
    wgmma_commit();
    if (step != 10) wgmma_wait<0>();
    out[threadIdx.x] = d[0];
}

static void step_bug(int step, const Expected& expected) {
    expect_report(expected, {modes[0]}, [step] {
        const Array<bf16> a(bf16s(64 * 64, 1));
        const Array<float> out(128);
        simt::launch(one_wrong_step, 1, 128, 2 * TILE_BYTES + 16, nullptr,
                     simt::tensor_map<bf16, 2>(a.data, {64, 64}, {64, 64}), out.data, step);
        out.host();
    });
}

TEST_CASE("bug: steps that no GPU allows are reported") {
    const char* const said[] = {"without fence_mbarrier_init",
                                "aligned to 128 bytes, not 64",
                                "already waited for: wrong parity",
                                "deadlock: every live thread waits",
                                "setmaxnreg.dec to 40 registers, but the warp has 24",
                                "of a block that the cluster does not have",
                                "for registers that others give back",
                                "must begin at a multiple of 1024",
                                "a wgmma descriptor reaches outside of dynamic shared memory",
                                "threads of a warpgroup issue different wgmma",
                                "a thread ends with a wgmma that it has not waited for"};
    for (int step = 0; step < 11; step++) step_bug(step, said[step]);
    // Ordinary accesses, which the emulator sees only with SANITIZE=stores.
    step_bug(11,
             Expected::only_stores("wgmma reads what thread 0 has written at dev/simt/test/test_simt_hopper_bugs.cu:"));
    step_bug(12, Expected::only_stores("a thread reads shared memory that nothing has written"));
}
