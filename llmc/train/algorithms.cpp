#include "train/algorithms.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "base/common.h"
#include "base/files.h"
#include "train/plan.h"

// Only rank 0 runs this micro-step, so it gathers no weights (BucketHook) and sums over no ranks: values do not matter.
template <class floatX>
static void time_micro_step(GPT2<floatX>& model) {
    const BucketHook on_wait_for_weights = std::exchange(model.on_wait_for_weights, nullptr);
    Comm* const tensor_ranks = std::exchange(model.tensor_ranks, &single_rank_groups().world);
    const DeviceBuffer<int> tokens = random_tokens(int64_t(model.B) * model.T + 1, model.config.V, model.stream);
    model.zero_gradients();
    model.forward(tokens.data, model.B, model.T);
    model.backward(tokens.data, tokens.data + 1, model.B, model.T, 0, 1.0f);
    wait_for_stream(model.stream);
    model.on_wait_for_weights = on_wait_for_weights;
    model.tensor_ranks = tensor_ranks;
}

static std::string algorithms_file() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && *cache) return std::string(cache) + "/train_gpt2/algorithms.txt";
    if (home && *home) return std::string(home) + "/.cache/train_gpt2/algorithms.txt";
    fail(EXIT_CANNOT_CREATE, "neither HOME nor XDG_CACHE_HOME is set");
}

static void share_algorithms(Comm& world) {
    const std::string text = world.all_gather_text(device_algorithms())[0];
    if (text != device_algorithms()) device_load_algorithms(text);
}

void load_kept_algorithms(const Options& o, Comm& world) {
    if (device_memory_is_host() || !o.autotune) return;
    try {
        if (world.rank == 0) device_load_algorithms(read_file(algorithms_file(), 16 << 20));
    } catch (const Error&) {  // none are kept
    }
    share_algorithms(world);
}

template <class floatX>
static void time_here(GPT2<floatX>& model, Optimizer<floatX>& optimizer, Log& log) {
    const std::string known = device_algorithms();
    const double begin = seconds_now();
    device_time_algorithms(true);
    time_micro_step(model);
    if (optimizer.muon) optimizer.muon->time_matmuls(model.stream);
    wait_for_stream(model.stream);
    device_time_algorithms(false);
    const std::string choices = device_algorithms();
    if (choices == known) return;
    std::string problem;
    try {
        make_directories(parent_directory(algorithms_file()));
        replace_file(algorithms_file(), choices);
    } catch (const Error& error) {
        problem = std::string("; the next start times them again: ") + error.what();
    }
    const auto timed = std::ranges::count(choices, '\n') - std::ranges::count(known, '\n');
    log.note(format("timed the algorithms of %d matmuls and attentions in %.1f s%s", int(timed), seconds_now() - begin,
                    problem.c_str()));
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);)
        if (line.find(" refused, ") != line.npos && known.find(line) == known.npos) log.note(line);
}

template <class floatX>
void time_algorithms(GPT2<floatX>& model, Optimizer<floatX>& optimizer, const Options& o, Comm& world, Log& log) {
    if (device_memory_is_host() || !o.autotune) return;
    optimizer.weights.finish();  // rank 0 reads them without on_wait_for_weights
    if (world.rank == 0) time_here(model, optimizer, log);
    share_algorithms(world);
}
template void time_algorithms(GPT2<float>&, Optimizer<float>&, const Options&, Comm&, Log&);
template void time_algorithms(GPT2<bf16>&, Optimizer<bf16>&, const Options&, Comm&, Log&);
