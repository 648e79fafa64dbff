// commands.h: the program's commands, one function each, and the set-up that main does before a command. The command
// train is in train_gpt2.cu.
#pragma once
#include <exception>
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
// Prints the batch, memory, time and disk space of a training run on --ranks ranks, or on as many ranks as were
// launched.
int run_plan(const Options& options, Dtype dtype, const Launch& launch);

// Whether this process starts the ranks (--ranks) and is not a rank itself.
bool starts_ranks(const Options& options, const Launch& launch);

// Calls a function and reports its errors. If a rank fails, it ends the other ranks too, because they would wait for
// the failed rank forever. Returns the exit code.
int report_errors(const std::function<int(Launch& launch, std::unique_ptr<Comm>& comm)>& function);
// Prints the error, with the rank if there are several, and returns its exit code; one of several ranks ends here. comm:
// null before the ranks have joined.
int end_with_error(const std::exception_ptr& exception, const Launch& launch, Comm* comm);

// Refuses several processes that would all do the same, and mix their output: of tokenize, and of generate unless they
// divide the layers.
void check_processes(const Options& options, const Launch& launch);
// Chooses the device and the number of threads, before any other use of the device.
void start_device(const Options& options, const Launch& launch);
// The dtype of weights and activations with --precision; auto is bf16 on devices where bf16 is faster than fp32.
// Refuses fp8 on a GPU that has none.
Dtype training_dtype(const Options& options);
