// run_source.h: finds what a command starts from: the shape of its model, its weights and its tokenizer.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/params.h"
#include "train/options.h"
#include "parallel/comm.h"
#include "text/tokenizer.h"

struct RunSource {
    GPT2Config config;
    int end_of_text = 50256;  // token id, from config.json beside the weights
    std::string weights;      // Hugging Face directory or checkpoint; empty: initialized from the seed
    std::string resume;       // the checkpoint that training continues; empty: a new run
    std::optional<Tokenizer> tokenizer;
    std::string tokenizer_path;      // where the tokenizer was found; empty: no tokenizer
    std::vector<std::string> notes;  // lines to print: which checkpoints were skipped, and why
};

// For train and plan: --resume, else --init, else the shape that the options ask for. The vocabulary of a new model is
// --vocab-size, or that of the tokenizer. The tokenizer is --tokenizer, or the one in the directory of the weights, or
// the one in the directory of the training data. watchdog: sees that the verification of a checkpoint goes on; null:
// there is none.
RunSource find_training_start(const Options& options, Watchdog* watchdog = nullptr);
// For generate and eval: --init is a Hugging Face directory, a checkpoint, or a run's output directory, of which the
// newest checkpoint is used. If `need_tokenizer`, refuses a model without a tokenizer.
RunSource find_trained_model(const Options& options, bool need_tokenizer, Watchdog* watchdog);

// Called by all ranks of `comm` with the same source. Calls `load` with the directory source.weights. If that is a
// checkpoint of the run's output --init, and the run deletes it meanwhile, source.weights becomes the newest checkpoint
// on all ranks, and `load` is called again, READ_ATTEMPTS times in all. `note` prints a line for each.
void load_from(RunSource& source, const Options& options, Comm& comm,
               const std::function<void(const std::string& dir)>& load,
               const std::function<void(const std::string& line)>& note);

// Whether two tokenizers (paths as for load_tokenizer) differ in tokens or merges. False if one cannot be read.
bool differ_as_tokenizers(const std::string& path, const std::string& other_path);
// Returns a warning if the shards (a pattern) were made with another tokenizer than that at `path`, else an empty
// string. The tokenizer of the shards is the one in their directory. The result is also empty if either tokenizer
// cannot be read.
std::string warn_of_tokenizer(const std::string& path, const std::string& pattern);
