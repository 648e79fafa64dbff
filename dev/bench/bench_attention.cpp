// bench_attention.cpp: times causal attention of one layer on the CPU, by default of GPT-2 124M (12 heads of 64
// channels). Prints milliseconds and GFLOP/s of the forward and the backward pass, and milliseconds of one generated
// token ("decode"), for each instruction set that this machine has.
//
//   build/release/bench_attention          1024 tokens as 4 x 256 and 1 x 1024, bf16 and fp32, all threads
//   build/release/bench_attention --batch 2 --seq-len 4096 --heads 8 --head-size 128
#include <CLI/CLI.hpp>

#include <omp.h>

#include "bench.h"
#include "cpu/isa.h"
#include "ops/ops.h"

namespace {

template <class floatX>
void time_case(int B, int T, int NH, int HS, double budget) {
    const int64_t size = int64_t(B) * T * NH * HS;
    const auto qkv = random_buffer<floatX>(3 * size, 1), dout = random_buffer<floatX>(size, 2);
    DeviceBuffer<floatX> out(size, "out"), dqkv(3 * size, "dqkv");
    DeviceBuffer<float> lse(int64_t(B) * NH * T, "lse");
    const double forward =
        best_seconds([&] { cpu::attention_forward(out.data, lse.data, qkv.data, B, T, NH, HS, nullptr); }, budget);
    const double backward = best_seconds(
        [&] { cpu::attention_backward(dqkv.data, dout.data, out.data, lse.data, qkv.data, B, T, NH, HS, nullptr); },
        budget);
    const double decode =
        best_seconds([&] { cpu::attention_decode(out.data, qkv.data, T, NH, HS, nullptr); }, budget / 4);
    // Causal attention computes half of each T x T matmul. Forward has two of them. Backward has five, because it
    // computes the scores again.
    const double gflop = 1e-9 * B * NH * double(T) * T * HS;
    printf("%-7s %-5s %2d %4d %6d %4d %4d | %9.3f %9.3f %9.4f | %8.0f %8.0f\n", isa_name(isa()),
           dtype_name(dtype_of<floatX>), omp_get_max_threads(), B, T, NH, HS, 1e3 * forward, 1e3 * backward,
           1e3 * decode, 2 * gflop / forward, 5 * gflop / backward);
    fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
    int batch = 0, seq_len = 1024, heads = 12, head_size = 64, threads = 0;
    double budget = 0.2;
    CLI::App app(
        "Times causal attention on the CPU: milliseconds and GFLOP/s, for each instruction set of this machine.");
    app.add_option("--batch", batch, "number of sequences; 0 = 4 x 256 and 1 x 1024 tokens");
    app.add_option("--seq-len", seq_len, "tokens per sequence [1024]");
    app.add_option("--heads", heads, "number of heads [12]");
    app.add_option("--head-size", head_size, "channels per head [64]");
    app.add_option("--threads", threads, "number of threads; 0 = one per core");
    app.add_option("--seconds", budget, "seconds to spend on each figure [0.2]");
    CLI11_PARSE(app, argc, argv);

    device_init(0, threads);
    std::vector<std::pair<int, int>> cases = {{4, 256}, {1, 1024}};
    if (batch) cases = {{batch, seq_len}};
    printf("%-7s %-5s %2s %4s %6s %4s %4s | %9s %9s %9s | %8s %8s\n", "", "", "th", "B", "T", "NH", "HS", "ms fwd",
           "bwd", "decode", "GFLOP/s", "bwd");
    for (const auto& [B, T] : cases)
        for (int level = int(Isa::avx2); level <= int(best_isa()); level++) {
            set_isa(Isa(level));
            time_case<bf16>(B, T, heads, head_size, budget);
            if (level < int(Isa::amx)) time_case<float>(B, T, heads, head_size, budget);
        }
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
