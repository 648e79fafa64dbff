#include "train/algorithms.h"

#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "base/algorithm_choices.h"
#include "base/common.h"
#include "base/files.h"
#include "train/plan.h"

// The file that keeps the choices; "" if no directory for it is known.
static std::string choices_file() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && *cache) return std::string(cache) + "/train_gpt2/algorithms.txt";
    return home && *home ? std::string(home) + "/.cache/train_gpt2/algorithms.txt" : "";
}

static AlgorithmChoices read_choices(const std::string& file) {
    constexpr int64_t max_bytes = 16 << 20;
    return path_exists(file) ? parse_choices(read_file(file, max_bytes)) : AlgorithmChoices();
}

// Writes the choices, together with those that other runs may have written meanwhile. The name of the temporary file is
// this process's own, because several runs may write at the same time.
static void write_choices(const std::string& file, AlgorithmChoices choices) {
    choices.merge(read_choices(file));
    const std::string temporary = file + "." + std::to_string(getpid()) + ".tmp";
    make_directories(parent_directory(file));
    remove_tree(temporary);
    write_file(temporary, choices_text(choices));
    rename_path(temporary, file);
}

// A group of one rank, whose collectives do nothing.
static Comm single_rank;

// Only rank 0 runs this micro-step, so it must not gather weights (BucketHook) and not sum over ranks: the values do
// not matter.
template <class floatX>
static void time_micro_step(GPT2<floatX>& model) {
    const BucketHook before_read = std::exchange(model.before_read, nullptr);
    Comm* const tensor_ranks = std::exchange(model.tensor_ranks, &single_rank);
    const DeviceBuffer<int> tokens = random_tokens(int64_t(model.B) * model.T + 1, model.config.V, model.stream);
    device_time_algorithms(true);
    model.zero_gradients();
    model.forward(tokens.data, model.B, model.T);
    model.backward(tokens.data, tokens.data + 1, model.B, model.T, 0, 1.0f);
    wait_for_stream(model.stream);
    device_time_algorithms(false);
    model.before_read = before_read;
    model.tensor_ranks = tensor_ranks;
}

// Called by rank 0: loads the choices in the file, times algorithms for shapes without a choice, and writes the
// choices.
template <class floatX>
static void time_algorithms(GPT2<floatX>& model, Log& log) {
    const std::string file = choices_file();
    std::string problem = file.empty() ? "neither HOME nor XDG_CACHE_HOME is set" : "";
    AlgorithmChoices known;
    try {
        known = read_choices(file);
    } catch (const Error& error) {
        problem = error.what();
    }
    device_load_algorithms(known);
    const double begin = seconds_now();
    time_micro_step(model);
    const AlgorithmChoices choices = device_algorithms();
    if (choices == known) return;
    const std::string timed = format("timed the algorithms of %zu matmuls and attentions in %.1f s",
                                     choices.size() - known.size(), seconds_now() - begin);
    try {
        if (problem.empty()) write_choices(file, choices);
    } catch (const Error& error) {
        problem = error.what();
    }
    log.note(problem.empty() ? timed + "; " + file + " keeps the choices"
                             : timed + "; the next start times them again: " + problem);
}

template <class floatX>
void choose_algorithms(GPT2<floatX>& model, Run& run) {
    if (device_memory_is_host()) return;
    if (run.first_rank()) time_algorithms(model, *run.log);
    const std::vector<std::string> texts =
        run.comm.all_gather_text(run.first_rank() ? choices_text(device_algorithms()) : "");
    if (!run.first_rank()) device_load_algorithms(parse_choices(texts[0]));
}

void recall_algorithms() {
    try {
        device_load_algorithms(read_choices(choices_file()));
    } catch (const Error&) {  // then the plan is made without these choices
    }
}

template void choose_algorithms<float>(GPT2<float>&, Run&);
template void choose_algorithms<bf16>(GPT2<bf16>&, Run&);
