// commands.h: the program's commands, one function each, and the set-up that main does before a command. The command
// train is in train_gpt2.cu.
#pragma once
#include <functional>
#include <string>

#include "base/dtype.h"
#include "options/options.h"
#include "parallel/launch.h"

// Each of these functions returns the exit code, and throws Error for bad input.
int run_generate(const Options& options, Dtype dtype);  // prints each token at once; notes go to stderr
int run_eval(const Options& options, Dtype dtype);      // prints the loss on --val-data
int run_tokenize(const Options& options);               // text to token shards
int print_launch(const Launch& launch);                 // --print-launch
// Prints the batch, memory, time and disk space of a training run on --world-size ranks, or on as many ranks as were
// launched.
int run_plan(const Options& options, Dtype dtype, const Launch& launch);

// Finds this process's rank and the number of ranks. `train` and `plan` also have options for them.
Launch launch_of(const Options& options);
// Whether this process starts ranks (--gpus, --ranks) and is none itself.
bool starts_ranks(const Options& options);
// Runs a rank that this process started. resume: after a restart, which continues from the newest checkpoint.
using RankMain = std::function<int(const Launch& launch, bool resume)>;
// Starts the ranks, and again if they fail (--max-restarts). Returns the exit code.
int start_ranks(const Options& options, char** argv, const RankMain& rank_main);
int print_launches(const Options& options);  // --print-launch of the ranks that --gpus or --ranks would start

// Parses the command line; with --resume, options that are not given come from OUTPUT/run.json.
Options read_options(int argc, char** argv);
// Chooses the device and the number of threads, before any other use of the device.
void start_device(const Options& options, const Launch& launch);
// The dtype of weights and activations with --precision; auto is bf16 on devices where bf16 is faster than fp32.
// Refuses fp8 on a GPU that has none.
Dtype training_dtype(const Options& options);
