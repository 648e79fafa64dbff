// bench_checkpoint.cpp: times checkpoints, by default of GPT-2 124M (weights, m, v in fp32: 1.49 GB). Each round writes
// as many bytes from a small buffer, as dd with conv=fsync does, saves a checkpoint, which deletes the one before, and
// verifies and loads it. Prints the seconds, those in which a core worked, and GB/s; then the best rounds, and
// save / dd.
//
//   build/release/bench_checkpoint                           d12 in /tmp
//   build/release/bench_checkpoint /dev/shm --model d24      in memory: without the time of the disk
#include <CLI/CLI.hpp>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/files.h"
#include "checkpoint/checkpoint.h"

static double cpu_seconds() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Writes a file of zeros through the file cache and syncs it, as dd does with conv=fsync.
static void write_like_dd(const std::string& path, int64_t bytes) {
    const std::vector<char> block(1 << 20);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) fail_errno(EXIT_CANNOT_CREATE, path, "create");
    while (bytes > 0) {
        const ssize_t put = write(fd, block.data(), size_t(std::min<int64_t>(bytes, int64_t(block.size()))));
        if (put < 0) fail_errno(EXIT_IO, path, "write");
        bytes -= put;
    }
    if (fsync(fd) != 0) fail_errno(EXIT_IO, path, "write to disk");
    close(fd);
}

struct Times {
    int64_t bytes = 0;
    std::map<std::string, double> best;

    template <class F>
    void measure(const char* what, const F& f) {
        const double at = seconds_now(), cpu = cpu_seconds();
        f();
        const double seconds = seconds_now() - at;
        std::printf("%-10s %8.2f %8.2f %8.2f\n", what, seconds, cpu_seconds() - cpu, double(bytes) / seconds * 1e-9);
        best[what] = best.count(what) ? std::min(best[what], seconds) : seconds;
    }
};

int main(int argc, char** argv) try {
    std::string directory = "/tmp", model = "d12";
    int rounds = 3;
    CLI::App app("Times checkpoints: seconds and GB/s to save, verify and load, and those of dd.");
    app.add_option("DIRECTORY", directory, "where to save [/tmp]; /dev/shm shows the time without a disk");
    app.add_option("--model", model, "d12, d24, d36, d48 [d12]");
    app.add_option("--rounds", rounds, "how often each is timed [3]");
    CLI11_PARSE(app, argc, argv);
    const std::string output = directory + "/bench_checkpoint", copy = output + ".dd";
    const ParamLayout layout(config_by_name(model));
    std::vector<float> state[3];
    for (int i = 0; i < 3; i++) state[i].assign(size_t(layout.total), float(i) + 0.5f);
    const TensorView view = view_flat(layout, {state[0].data(), state[1].data(), state[2].data()});
    const TensorWriter write = [&](const float* host, Slot slot, Param p, int l) {
        std::copy_n(host, layout.size(p), state[slot].begin() + layout.offset(p, l));
    };
    SaveOptions options;
    options.output = output;
    options.keep.newest = 1;
    Times times;
    times.bytes = checkpoint_bytes(layout, options.format);
    std::printf("%-10s %8s %8s %8s\n", "", "s", "CPU s", "GB/s");
    for (int64_t step = 1; step <= rounds; step++) {
        TrainerState trainer;
        trainer.step = trainer.position = trainer.tokens = step;
        times.measure("dd", [&] { write_like_dd(copy, times.bytes); });
        remove_tree(copy);
        times.measure("save", [&] { save_checkpoint(options, layout, view, trainer); });
        times.measure("verify", [&] { verify_checkpoint(checkpoint_directory(output, step)); });
        times.measure("load", [&] { load_checkpoint(checkpoint_directory(output, step), layout, write); });
    }
    std::filesystem::remove_all(output);
    std::printf("best of %d: dd %.2f s, save %.2f s, save / dd %.2f\n", rounds, times.best["dd"], times.best["save"],
                times.best["save"] / times.best["dd"]);
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
