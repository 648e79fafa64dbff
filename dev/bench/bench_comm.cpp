// bench_comm.cpp: times collectives on activations between ranks, by default of 3 MB: a micro-batch of 2,048 tokens of
// GPT-2 124M in bf16. Prints the time of a collective with its wait, the best and the median of many. GB/s is the size
// of the buffer divided by the best time.
//
//   mpirun -np 2 build/release/bench_comm
//   mpirun -np 2 build/release/bench_comm --tokens 1024 --channels 1600
#include <CLI/CLI.hpp>

#include <cstdlib>

#include "bench.h"
#include "parallel/comm.h"

namespace {

// All ranks make the same number of calls.
template <class Run>
void measure(Comm& comm, const char* name, int64_t bytes, int rounds, const Run& run) {
    std::vector<double> seconds;
    for (int i = 0; i < rounds + 10; i++) {
        const double start = seconds_now();
        run();
        if (i >= 10) seconds.push_back(seconds_now() - start);  // the first calls connect the ranks
    }
    std::sort(seconds.begin(), seconds.end());
    if (comm.rank == 0)
        std::printf("%-22s %10.1f %10.1f %8.2f\n", name, 1e6 * seconds[0], 1e6 * seconds[seconds.size() / 2],
                    double(bytes) / seconds[0] * 1e-9);
}

template <class floatX>
void measure_dtype(Comm& comm, const std::string& dtype, int64_t count, int rounds) {
    const DeviceBuffer<floatX> x(count, "activations");
    const int64_t bytes = x.bytes();
    const auto wait = [&](Comm::Ticket ticket) { comm.wait(ticket, nullptr); };
    measure(comm, (dtype + " all_reduce").c_str(), bytes, rounds,
            [&] { wait(comm.all_reduce(x.data, count, nullptr)); });
    measure(comm, (dtype + " reduce_scatter").c_str(), bytes, rounds,
            [&] { wait(comm.reduce_scatter(x.data, count, nullptr)); });
    measure(comm, (dtype + " all_gather").c_str(), bytes, rounds,
            [&] { wait(comm.all_gather(x.data, bytes, nullptr)); });
}

}  // namespace

int main(int argc, char** argv) try {
    int tokens = 2048, channels = 768, rounds = 300;
    CLI::App app("Times collectives on activations between the ranks that mpirun started.");
    app.add_option("--tokens", tokens, "tokens of a micro-batch [2048]")->check(CLI::PositiveNumber);
    app.add_option("--channels", channels, "channels of a token [768]")->check(CLI::PositiveNumber);
    app.add_option("--rounds", rounds, "calls of each collective [300]")->check(CLI::PositiveNumber);
    CLI11_PARSE(app, argc, argv);
    const Launch launch = find_launch(getenv);
    device_init(launch.local_rank, 1);
    const std::unique_ptr<Comm> comm = make_comm(launch, nullptr);
    const int64_t count = round_up<int64_t>(int64_t(tokens) * channels, comm->world_size);
    if (comm->rank == 0)
        std::printf("%s, %lld elements\n%-22s %10s %10s %8s\n", comm->describe().c_str(), static_cast<long long>(count),
                    "", "best us", "median us", "GB/s");
    measure_dtype<bf16>(*comm, "bf16", count, rounds);
    measure_dtype<float>(*comm, "fp32", count, rounds);
    comm->all_gather_text("");
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    std::exit(error.exit_code);
}
