// commands.h: the commands of the program, one function each, and what main does before them. train is in
// train_gpt2.cu.
#pragma once
#include <string>

#include "base/dtype.h"
#include "options/options.h"
#include "parallel/launch.h"

// Each returns the exit code. Bad input throws an Error with one sentence.
int run_generate(const Options& options, Dtype dtype);  // prints the text as it comes; notes go to stderr
int run_eval(const Options& options, Dtype dtype);      // prints the loss on --val-data
int run_tokenize(const Options& options);               // text to token shards
int print_launch(const Launch& launch);                 // --print-launch
// Prints batch, memory, time and disk of a training run on --world-size ranks, or on those that were launched.
int run_plan(const Options& options, Dtype dtype, const Launch& launch);

// The options of the command line, with those of OUTPUT/run.json for --resume.
Options read_options(int argc, char** argv);
// Chooses the device and the number of threads, before any other use of the device.
void start_device(const Options& options, const Launch& launch);
// --precision; auto is bf16 where that is faster.
Dtype training_dtype(const Options& options);
