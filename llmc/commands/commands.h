// commands.h: the program's commands, one function each; train is in train_gpt2.cu. A command returns the exit code,
// and throws Error for bad input.
#pragma once
#include <vector>

#include "base/dtype.h"
#include "model/gpt2.h"
#include "parallel/comm.h"
#include "parallel/launch.h"
#include "train/options.h"
#include "train/start.h"

int run_tokenize(const Options& options, const Launch& launch);
int run_export(const Options& options, const Launch& launch);
// Prints the batch, memory, time and disk space of a training run on --ranks ranks, or on as many ranks as were
// launched.
int run_plan(const Options& options, Dtype dtype, const Launch& launch);

// All ranks call these; ranks can divide the layers (--tensor-parallel). Rank 0 prints.
// Continues --prompt, and prints each token at once; notes go to stderr.
int run_generate(const Options& options, Dtype dtype, Comm& comm);
// Prints the loss on --val-data, whose windows the ranks can divide too.
int run_eval(const Options& options, Dtype dtype, Comm& comm, const Launch& launch);

// The function of a command that runs in one process without a device; null for other commands.
inline auto file_command(Command command) {
    return command == Command::tokenize ? run_tokenize : command == Command::export_model ? run_export : nullptr;
}
inline void check_one_process(const Options& o, const Launch& launch) {
    const char* name = command_name(o.command);
    ENSURE(launch.world_size == 1,
           "%s runs in one process, but %s started %d, which would all do the same; start it without %s", name,
           launch.launcher.c_str(), launch.world_size, launch.launcher.c_str());
}

// Options of a model that evaluates or generates: its ranks divide the layers.
inline MemoryOptions shard_of(const Comm& tensor_ranks) {
    return {.tensor = {tensor_ranks.shard_index, tensor_ranks.world_size}};
}

// Loads the weights of --init. All ranks of `comm` call it.
template <class floatX>
void load_model(GPT2<floatX>& model, const RunStart& source, Comm& comm, Comm& tensor_ranks) {
    if (tensor_ranks.world_size > 1) model.tensor_ranks = &tensor_ranks;
    std::vector<float> own;
    load_weights(source.weights, ParamLayout(model.config), [&](const float* host, Slot, Param p, int l) {
        comm.reached("loading of a tensor");
        if (tensor_ranks.world_size == 1) return model.set_param(p, l, host);
        own.resize(size_t(model.layout.size(p)));
        take_shard(own.data(), host, model.layout, p);
        model.set_param(p, l, own.data());
    });
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
}
