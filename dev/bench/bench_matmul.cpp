// bench_matmul.cpp: times the matmuls of GPT-2 124M on the CPU. Prints GFLOP/s and milliseconds of the forward pass and
// of the backward pass (gradients of input and weight). These include packing of operands, bias, GELU and its
// gradient, and rounding. "bwd =" overwrites the gradient of the weight, "bwd +=" adds to it.
//
//   build/release/bench_matmul                     five shapes, 1024 rows, bf16 and fp32, 1 thread and all
//   build/release/bench_matmul --shape 768 3072 --rows 4096 --threads 2 --dtype bf16
#include <CLI/CLI.hpp>

#include <omp.h>

#include "bench.h"
#include "cpu/isa.h"
#include "ops/ops.h"

namespace {

struct Case {
    const char* name;
    int IC, OC;
    bool gelu_forward, gelu_backward, bias;
};

// Prints one line: forward and backward of one weight.
template <class floatX>
void time_case(const Case& c, int N, double budget) {
    const auto inp = random_buffer<floatX>(int64_t(N) * c.IC, 1),
               weight = random_buffer<floatX>(int64_t(c.OC) * c.IC, 2);
    const auto bias = random_buffer<floatX>(c.OC, 3), dout = random_buffer<floatX>(int64_t(N) * c.OC, 4);
    const auto inp_pre_gelu = random_buffer<floatX>(int64_t(N) * c.IC, 5);
    DeviceBuffer<floatX> out(int64_t(N) * c.OC, "out"), pre_gelu(int64_t(N) * c.OC, "pre_gelu");
    DeviceBuffer<floatX> dinp(int64_t(N) * c.IC, "dinp");
    DeviceBuffer<float> dweight(int64_t(c.OC) * c.IC, "dweight"), dbias(c.OC, "dbias");
    const Weight<floatX> w{weight.data, nullptr};
    const double forward = best_seconds(
        [&] {
            cpu::matmul_forward<floatX>({.out = out.data,
                                         .pre_gelu = c.gelu_forward ? pre_gelu.data : nullptr,
                                         .inp = inp.data,
                                         .weight = w,
                                         .bias = c.bias ? bias.data : nullptr},
                                        N, c.IC, c.OC, nullptr);
        },
        budget);
    const auto backward = [&](bool accumulate) {
        return best_seconds(
            [&] {
                cpu::matmul_backward<floatX>({.dinp = dinp.data,
                                              .dweight = dweight.data,
                                              .dbias = c.bias ? dbias.data : nullptr,
                                              .dout = dout.data,
                                              .inp = inp.data,
                                              .weight = w,
                                              .pre_gelu = c.gelu_backward ? inp_pre_gelu.data : nullptr,
                                              .accumulate = accumulate},
                                             N, c.IC, c.OC, nullptr);
            },
            budget);
    };
    const double overwrite = backward(false), add = backward(true);
    const double gflop = 2e-9 * N * c.IC * c.OC;
    printf("%-10s %-5s %2d %6d %6d %6d | %8.0f %8.0f %8.0f | %8.2f %8.2f %8.2f\n", c.name, dtype_name(dtype_of<floatX>),
           omp_get_max_threads(), N, c.IC, c.OC, gflop / forward, 2 * gflop / overwrite, 2 * gflop / add, 1e3 * forward,
           1e3 * overwrite, 1e3 * add);
    fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
    int rows = 1024;
    std::vector<int> shape, threads;
    std::vector<std::string> dtypes = {"bf16", "fp32"};
    double budget = 0.3;
    CLI::App app("Times the matmuls of GPT-2 124M on the CPU: GFLOP/s and milliseconds, forward and backward.");
    app.add_option("--rows", rows, "rows of the activations, which are tokens (N) [1024]");
    app.add_option("--shape", shape, "input and output channels, in place of the five shapes")->expected(2);
    app.add_option("--threads", threads, "numbers of threads [1 and all]");
    app.add_option("--dtype", dtypes, "bf16, fp32 or both [both]");
    app.add_option("--seconds", budget, "seconds to spend on each figure [0.3]");
    CLI11_PARSE(app, argc, argv);

    device_init(0, 0);
    if (threads.empty()) threads = {1, omp_get_max_threads()};
    std::vector<Case> cases = {{"qkv", 768, 2304, false, false, true},
                               {"attproj", 768, 768, false, false, true},
                               {"fc", 768, 3072, true, false, true},
                               {"fcproj", 3072, 768, false, true, true},
                               {"head", 768, 50304, false, false, false}};
    if (!shape.empty()) cases = {{"shape", shape[0], shape[1], false, false, true}};
    printf("%s\n", isa_name(isa()));
    printf("%-10s %-5s %2s %6s %6s %6s | %8s %8s %8s | %8s %8s %8s\n", "", "", "th", "N", "IC", "OC", "GFLOP/s",
           "bwd =", "bwd +=", "ms fwd", "bwd =", "bwd +=");
    for (const int t : threads) {
        omp_set_num_threads(t);
        for (const std::string& dtype : dtypes)
            for (const Case& c : cases)
                dtype == "fp32" ? time_case<float>(c, rows, budget) : time_case<bf16>(c, rows, budget);
    }
} catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
