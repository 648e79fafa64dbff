// orders.h: the emulator's orders of threads, and a test with work on two streams.
#pragma once
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gpu/arrays.h"

inline std::vector<simt::Config> orders() {
    return {{.order = simt::Order::random, .order_seed = 1},
            {.order = simt::Order::forward},
            {.order = simt::Order::reverse, .async = simt::Async::early},
            {.order = simt::Order::random, .order_seed = 2, .async = simt::Async::early, .deferred_streams = true}};
}

template <class F>
void in_every_order(F f) {
    const simt::Config before = simt::config;
    for (const simt::Config& c : orders()) {
        CAPTURE(int(c.order));
        simt::config = c;
        f();
    }
    simt::config = before;
}

static __global__ void add_kernel(float* out, const float* in, float x) { out[threadIdx.x] = in[threadIdx.x] + x; }

// Computes a from `in` on one stream and b from a on another one. With `wait`, the second stream waits for an event of
// the first; without it, the streams have a race.
inline void two_streams(bool wait) {
    cudaStream_t first, second;
    cudaEvent_t event;
    cudaStreamCreate(&first), cudaStreamCreate(&second), cudaEventCreate(&event);
    {
        const Array<float> in(floats(64, [](int i) { return i; })), a(64), b(64);
        for (int round = 0; round < 3; round++) {
            simt::launch(add_kernel, 1, 64, 0, first, a.data, in.data, 1.0f);
            cudaEventRecord(event, first);
            if (wait) cudaStreamWaitEvent(second, event);
            simt::launch(add_kernel, 1, 64, 0, second, b.data, a.data, 1.0f);
            cudaEventRecord(event, second);
            cudaStreamWaitEvent(first, event);
            cudaMemcpyAsync(in.data, b.data, 64 * sizeof(float), cudaMemcpyDeviceToDevice, first);
        }
        const std::vector<float> result = in.host();
        for (int i = 0; i < 64; i++)
            if (result[size_t(i)] != float(i + 6)) {
                fprintf(stderr, "wrong result\n");
                exit(3);
            }
    }
    cudaStreamDestroy(first), cudaStreamDestroy(second), cudaEventDestroy(event);
}
