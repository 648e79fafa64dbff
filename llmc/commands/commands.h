// commands.h: the program's commands, one function each, and the set-up that main does before a command. The command
// train is in train_gpt2.cu.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "train/options.h"
#include "parallel/comm.h"
#include "parallel/launch.h"

// Each of these functions returns the exit code, and throws Error for bad input.
// Several ranks divide the layers (--tensor-parallel), and in eval also the windows; rank 0 prints.
// Prints each token at once; notes go to stderr.
int run_generate(const Options& options, Dtype dtype, Comm& comm);
int run_eval(const Options& options, Dtype dtype, Comm& comm, const Launch& launch);  // prints the loss on --val-data
int run_tokenize(const Options& options);                                             // text to token shards
int print_launch(const Launch& launch);   // --print-launch
// Prints the batch, memory, time and disk space of a training run on --world-size ranks, or on as many ranks as were
// launched.
int run_plan(const Options& options, Dtype dtype, const Launch& launch);

// Finds this process's rank and the number of ranks. `train` and `plan` also have options for them.
Launch launch_of(const Options& options);
// Whether this process starts ranks (--gpus, --ranks) and is not a rank itself.
bool starts_ranks(const Options& options);
// Runs the command of this process's rank, which is joined to the others by `comm`. Returns the exit code.
using RunCommand =
    std::function<int(const Options& options, char** argv, const Launch& launch, std::unique_ptr<Comm>& comm)>;
// Starts the ranks, and starts them again if they fail (--max-restarts). Returns the exit code.
int start_ranks(const Options& options, char** argv, const RunCommand& run_command);
int print_launches(const Options& options);  // the lines of --print-launch for --gpus and --ranks

// Calls a function and reports its errors. If a rank fails, it ends the other ranks too, because they would wait for
// the failed rank forever. Returns the exit code.
int report_errors(Launch launch, const std::function<int(Launch& launch, std::unique_ptr<Comm>& comm)>& function);

// Refuses several processes that would all do the same, and mix their output: of tokenize and verify, and of generate
// unless they divide the layers.
void check_processes(const Options& options, const Launch& launch);
// Chooses the device and the number of threads, before any other use of the device.
void start_device(const Options& options, const Launch& launch);
// The dtype of weights and activations with --precision; auto is bf16 on devices where bf16 is faster than fp32.
// Refuses fp8 on a GPU that has none.
Dtype training_dtype(const Options& options);
