// bench_checkpoint.cpp: times checkpoints, by default of GPT-2 124M (weights, m, v in fp32: 1.49 GB). Prints seconds
// and GB/s to save, verify and load, three times.
//
//   build/release/bench_checkpoint                           d12 in /tmp
//   build/release/bench_checkpoint /dev/shm --model d24      in memory: without the time of the disk
#include <CLI/CLI.hpp>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "checkpoint/checkpoint.h"

int main(int argc, char** argv) try {
    std::string directory = "/tmp", model = "d12";
    CLI::App app("Times checkpoints: seconds and GB/s to save, verify and load.");
    app.add_option("DIRECTORY", directory, "where to save [/tmp]; /dev/shm shows the time without a disk");
    app.add_option("--model", model, "d12, d24, d36, d48 [d12]");
    CLI11_PARSE(app, argc, argv);
    const std::string output = directory + "/bench_checkpoint";
    const ParamLayout layout(config_by_name(model));
    std::vector<float> state[3];
    for (int i = 0; i < 3; i++) state[i].assign(size_t(layout.total), float(i) + 0.5f);
    const TensorReader read = read_from_flat(layout, {state[0].data(), state[1].data(), state[2].data()});
    const TensorWriter write = write_to_flat(layout, {state[0].data(), state[1].data(), state[2].data()});
    SaveOptions options;
    options.output = output, options.keep.newest = 1;
    std::printf("%-10s %8s %8s\n", "", "s", "GB/s");
    for (int64_t step = 1; step <= 3; step++) {
        double at = seconds_now();
        SavedCheckpoint saved;
        const auto report = [&](const char* what) {
            const double seconds = seconds_now() - at;
            std::printf("%-10s %8.2f %8.2f\n", what, seconds, double(saved.bytes) / seconds * 1e-9);
            at = seconds_now();
        };
        TrainerState trainer;
        trainer.step = trainer.position = trainer.tokens = step;
        saved = save_checkpoint(options, layout, read, trainer);
        report("save");
        verify_checkpoint(saved.dir);
        report("verify");
        load_checkpoint(saved.dir, layout, options.format.state, write);
        report("load");
    }
    std::filesystem::remove_all(output);
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
