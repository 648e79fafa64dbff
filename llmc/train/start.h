// start.h: finds where a command starts, and refuses ranks that were not started alike.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/json.h"
#include "checkpoint/hf.h"
#include "text/tokenizer.h"

struct Comm;
struct Corpus;
struct Options;
enum class Command;

// The shape of a command's model, its weights and its tokenizer.
struct RunStart {
    GPT2Config config;
    HFConfig hf_config;   // configuration beside the weights, or of a new model, which checkpoints go on with
    std::string weights;  // Hugging Face directory, checkpoint, or llm.c's .bin; empty: initialized from the seed
    std::string resume;   // checkpoint that training continues; empty: a new run
    std::optional<Tokenizer> tokenizer;
    std::string tokenizer_path;      // empty: no tokenizer
    std::vector<std::string> notes;  // lines to print, such as the checkpoints that were skipped
};

// Returns the dtype of weights and activations with --precision. Refuses what this device does not have.
Dtype compute_dtype(const Options& options);

// Finds where train and plan start: --resume, else --init, else the options' shape. The tokenizer is --tokenizer, or
// that of the weights, or the one beside the data. Without --allow-other-tokenizer, refuses data of another tokenizer.
RunStart find_training_start(const Options& options, const Comm& comm);
// Finds the model of generate and eval: --init is a Hugging Face directory, a checkpoint, or a run's output directory,
// whose newest checkpoint is used; rank 0 warns of damaged ones. need_tokenizer: refuses a model without one.
RunStart find_trained_model(const Options& options, bool need_tokenizer, const Comm& comm);

// Refuses shards of another vocabulary size than that of the tokenizer, and notes its size in the others. option: where
// the data come from.
void check_vocabulary(Corpus& data, const char* option, const RunStart& start, const Options& options);

// ---- ranks that were started alike (same_ranks.cpp). All ranks call each function.

// To be called before any other collective.
void check_same_command(Comm& comm, Command command);
// Refuses ranks that differ in the program, in options or in these facts, by name. The error names the first that
// differs, and the first rank that differs from rank 0.
void compare_ranks(Comm& comm, const Options& options, Json facts);
// Names the first rank whose CPU_ISA or build is not that of rank 0, so that it may round differently; "" if none is.
std::string differing_rounding(Comm& comm);
