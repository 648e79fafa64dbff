// bench_ops.cpp: the operations that are bound by memory, at GPT-2 124M's sizes (B 4, T 256): time, bytes that they
// must read and write at least, over that time, and the share of what a copy reaches in the same run. Arrays that fit
// in a cache may go beyond 100 %. Products and attention have benchmarks of their own.
//
//   bench_ops                                     every operation, both precisions, on the best instruction set
//   bench_ops --op adamw --dtype bf16 --isa avx2 --threads 1
#include <CLI/CLI.hpp>

#include <omp.h>

#include <cstring>
#include <functional>
#include <string>

#include "../../llmc/cpu/isa.h"
#include "../../llmc/ops.h"
#include "bench.h"

namespace {

constexpr int B = 4, T = 256, N = B * T, C = 768, NH = 12, V = 50257, Vp = 50304;
constexpr int64_t parameters = 124439808;

struct Choice {
    std::string op, dtype;
    double budget = 0.5;
    double copy_bandwidth = 0.0;  // bytes per second, read and written
};

double measure_copy_bandwidth(double budget) {
    const int64_t bytes = int64_t(256) << 20, piece = int64_t(4) << 20;
    const auto from = random_buffer<float>(bytes / 4, 1);
    DeviceBuffer<float> to(bytes / 4, "a copy");
    return 2.0 * double(bytes) /
           best_seconds(
               [&] {
#pragma omp parallel for schedule(dynamic)
                   for (int64_t i = 0; i < bytes; i += piece)
                       memcpy(reinterpret_cast<char*>(to.data) + i, reinterpret_cast<const char*>(from.data) + i,
                              size_t(piece));
               },
               budget);
}

// One row of the table. bytes: read and written at least.
void report(const Choice& choice, const char* op, const char* dtype, double bytes, const std::function<void()>& run) {
    if (!choice.op.empty() && choice.op != op) return;
    const double seconds = best_seconds(run, choice.budget);
    printf("%-28s %-5s %-7s %2d | %10.1f %8.1f %8.0f %%\n", op, dtype, isa_name(isa()), omp_get_max_threads(),
           1e6 * seconds, 1e-9 * bytes / seconds, 100.0 * bytes / seconds / choice.copy_bandwidth);
    fflush(stdout);
}

template <class floatX>
void bench_rows(const Choice& choice) {
    const double x = sizeof(floatX), rows = double(N) * C;
    const char* dtype = dtype_name<floatX>();
    const auto a = random_buffer<floatX>(int64_t(N) * C, 1), b = random_buffer<floatX>(int64_t(N) * C, 2);
    const auto wte = random_buffer<floatX>(int64_t(Vp) * C, 3), wpe = random_buffer<floatX>(int64_t(T) * C, 4);
    const auto weight = random_buffer<floatX>(C, 5);
    DeviceBuffer<floatX> sum(int64_t(N) * C, "sum"), out(int64_t(N) * C, "out");
    DeviceBuffer<float> mean(N, "mean"), rstd(N, "rstd"), dwte(int64_t(Vp) * C, "dwte"), dwpe(int64_t(T) * C, "dwpe");
    DeviceBuffer<float> dweight(C, "dweight"), dbias(C, "dbias");
    DeviceBuffer<int> tokens(N, "tokens");
    const Philox random{6, 0};
    for (int n = 0; n < N; n++) tokens.data[n] = int(random(uint64_t(n))[0] % V);
    report(choice, "encoder_forward", dtype, 3 * x * rows,
           [&] { cpu::encoder_forward(out.data, tokens.data, wte.data, wpe.data, B, T, C, nullptr); });
    report(choice, "encoder_backward", dtype, (x + 8 + 8.0 / B) * rows,
           [&] { cpu::encoder_backward(dwte.data, dwpe.data, a.data, tokens.data, B, T, C, V, nullptr); });
    report(choice, "layernorm_forward", dtype, 2 * x * rows, [&] {
        cpu::layernorm_forward(out.data, mean.data, rstd.data, a.data, weight.data, weight.data, N, C, nullptr);
    });
    report(choice, "residual_layernorm_forward", dtype, 4 * x * rows, [&] {
        cpu::residual_layernorm_forward(sum.data, out.data, mean.data, rstd.data, a.data, b.data, weight.data,
                                        weight.data, N, C, nullptr);
    });
    report(choice, "layernorm_backward", dtype, 4 * x * rows, [&] {
        cpu::layernorm_backward(out.data, dweight.data, dbias.data, a.data, b.data, weight.data, mean.data, rstd.data,
                                N, C, nullptr);
    });
}

template <class floatX>
void bench_gelu(const Choice& choice) {
    const int64_t count = int64_t(N) * 4 * C;
    const double x = sizeof(floatX) * double(count);
    const auto inp = random_buffer<floatX>(count, 1), dout = random_buffer<floatX>(count, 2);
    DeviceBuffer<floatX> out(count, "out");
    report(choice, "gelu_forward", dtype_name<floatX>(), 2 * x,
           [&] { cpu::gelu_forward(out.data, inp.data, count, nullptr); });
    report(choice, "gelu_backward", dtype_name<floatX>(), 3 * x,
           [&] { cpu::gelu_backward(out.data, inp.data, dout.data, count, nullptr); });
}

template <class floatX>
void bench_decode(const Choice& choice) {
    constexpr int context = 1024;
    const auto qkv = random_buffer<floatX>(int64_t(context) * 3 * C, 1);
    DeviceBuffer<floatX> out(C, "out");
    report(choice, "attention_decode", dtype_name<floatX>(), 2.0 * sizeof(floatX) * context * C,
           [&] { cpu::attention_decode(out.data, qkv.data, context, NH, C / NH, nullptr); });
}

// The gradients replace the logits, which next time are logits again: any numbers take the same time.
template <class floatX>
void bench_classifier(const Choice& choice) {
    auto logits = random_buffer<floatX>(int64_t(N) * Vp, 1);
    DeviceBuffer<float> losses(N, "losses");
    DeviceBuffer<int> targets(N, "targets");
    const double x = double(sizeof(floatX)) * N * Vp;
    report(choice, "cross_entropy_forward", dtype_name<floatX>(), x,
           [&] { cpu::cross_entropy_forward(losses.data, logits.data, targets.data, N, V, Vp, nullptr); });
    report(choice, "cross_entropy", dtype_name<floatX>(), 2 * x,
           [&] { cpu::cross_entropy(logits.data, losses.data, targets.data, N, V, Vp, 1.0f, nullptr); });
}

template <class floatX>
void bench_optimizer(const Choice& choice) {
    constexpr bool rounds = sizeof(floatX) != sizeof(float);
    auto weight = random_buffer<floatX>(parameters, 1);
    const auto grad = random_buffer<float>(parameters, 3);
    DeviceBuffer<float> master(rounds ? parameters : 0, "masters"), m(parameters, "m"), v(parameters, "v");
    const float factor = 1.0f;
    float squares = 0.0f;
    report(choice, "adamw", dtype_name<floatX>(), (28.0 + (rounds ? 2.0 : 0.0)) * double(parameters), [&] {
        cpu::adamw(weight.data, master.data, m.data, v.data, grad.data, &factor, parameters, parameters, AdamWConfig{},
                   1e-4f, 1, nullptr);
    });
    if (!rounds)
        report(choice, "sum_of_squares", "fp32", 4.0 * double(parameters),
               [&] { cpu::sum_of_squares(&squares, grad.data, parameters, nullptr); });
}

template <class floatX>
void bench(const Choice& choice) {
    if (!choice.dtype.empty() && choice.dtype != dtype_name<floatX>()) return;
    bench_rows<floatX>(choice);
    bench_gelu<floatX>(choice);
    bench_decode<floatX>(choice);
    bench_classifier<floatX>(choice);
    bench_optimizer<floatX>(choice);
}

}  // namespace

int main(int argc, char** argv) try {
    CLI::App app{"times the operations that are bound by memory"};
    Choice choice;
    std::string isa_wanted;
    int threads = 0;
    app.add_option("--op", choice.op, "one operation, by its name in ops.inc");
    app.add_option("--dtype", choice.dtype, "fp32 or bf16");
    app.add_option("--isa", isa_wanted, "plain, avx2 or avx512 [the best]");
    app.add_option("--threads", threads, "0 = one per core");
    app.add_option("--seconds", choice.budget, "for each row");
    CLI11_PARSE(app, argc, argv);
    device_init(0, threads);
    for (const Isa level : {Isa::plain, Isa::avx2, Isa::avx512})
        if (isa_wanted == isa_name(level)) set_isa(level);
    choice.copy_bandwidth = measure_copy_bandwidth(choice.budget);
    printf("copy of 256 MiB: %.1f GB/s, read and written\n", 1e-9 * choice.copy_bandwidth);
    printf("%-28s %-5s %-7s %2s | %10s %8s %10s\n", "operation", "dtype", "isa", "th", "us", "GB/s", "of copy");
    bench<float>(choice);
    bench<bf16>(choice);
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
