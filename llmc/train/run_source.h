// run_source.h: finds what a command starts from: the shape of its model, its weights and its tokenizer.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "model/params.h"
#include "parallel/comm.h"
#include "text/tokenizer.h"
#include "train/options.h"

// Where a command starts: the shape of its model, its weights and its tokenizer.
struct RunStart {
    GPT2Config config;
    int end_of_text = 50256;  // token id, from config.json beside the weights
    std::string weights;      // Hugging Face directory or checkpoint; empty: initialized from the seed
    std::string resume;       // checkpoint that training continues; empty: a new run
    std::optional<Tokenizer> tokenizer;
    std::string tokenizer_path;      // empty: no tokenizer
    std::vector<std::string> notes;  // lines to print, such as the checkpoints that were skipped
};

// For train and plan: --resume, else --init, else the shape that the options ask for. The tokenizer is --tokenizer, or
// the one in the directory of the weights, or the one in the directory of the training data.
RunStart find_training_start(const Options& options, const Comm& comm);
// For generate and eval: --init is a Hugging Face directory, a checkpoint, or a run's output directory, of which the
// newest checkpoint is used; rank 0 warns of damaged ones. need_tokenizer: refuses a model without a tokenizer.
RunStart find_trained_model(const Options& options, bool need_tokenizer, const Comm& comm);
