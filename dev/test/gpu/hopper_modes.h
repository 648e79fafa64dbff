// hopper_modes.h: for tests of kernels that use the instructions of hopper.h.
#pragma once
#include <doctest/doctest.h>

#include <vector>

#include "cuda/attention_routes.h"
#include "cuda/autotune.h"
#include "cuda/matmul_routes.h"
#include "cuda/simt.h"
#include "support/skip.h"

inline bool skips_on_other_gpus() {
    if (gpu::runs_hopper_code()) return false;
    skip_case("these kernels need a GPU of compute capability 9.0 and a program built for sm_90a");
    return true;
}

// Our matmul, and no choices, after a test has changed them.
struct OwnMatmul {
    const gpu::MatmulKernels own = gpu::wgmma_matmul;
    ~OwnMatmul() {
        gpu::wgmma_matmul = own;
        gpu::load_algorithms({});
    }
};

// Copies and products run late, early and at random, with the threads in several orders.
template <class F>
void in_every_mode(F f) {
#ifdef SIMT_EMULATOR
    const simt::Config before = simt::config;
    for (const simt::Config& c : std::vector<simt::Config>{
             {.order = simt::Order::forward, .async = simt::Async::late},
             {.order = simt::Order::reverse, .async = simt::Async::early},
             {.order = simt::Order::random, .order_seed = 1, .async = simt::Async::random, .async_seed = 1},
             {.order = simt::Order::random, .order_seed = 2, .async = simt::Async::late, .async_seed = 2}}) {
        CAPTURE(int(c.order));
        CAPTURE(int(c.async));
        simt::config = c;
        f();
    }
    simt::config = before;
#else
    f();
#endif
}
