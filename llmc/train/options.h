// options.h: the options of the command line. --lr is the field lr, with its default; options.inc has its unit, help
// and range. The parser, --help, run.toml and the comparison of ranks use these declarations.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "checkpoint/gguf.h"
#include "model/memory.h"
#include "ops/ops.h"
#include "parallel/comm.h"
#include "train/schedule.h"

// help: --help or --version was given; the text is in Options::answer, to be printed on stdout.
enum class Command { train, generate, eval, plan, tokenize, export_model, help };

// The words of a choice are in its row of options.inc, in the order of the values here.
enum class Precision { fp32, bf16, automatic, fp8 };
enum class UpdateRule { adamw, muon };
enum class OnNan { halt, skip };

enum class SplitAt;  // text/text_reader.h

struct Options {
    Command command = Command::train;
    std::string command_line;  // quoted for a shell
    std::string answer;
    std::string taken;                         // options that --resume takes from run.toml: " --lr 0.001 --seed 7"
    std::map<std::string, std::string> saved;  // name and TOML value of each option in that run.toml

    // data and model
    std::string train_data, val_data;    // shell patterns, one in each line
    std::string tokenizer;               // directory or file; empty: beside the data or in init
    bool allow_other_tokenizer = false;  // true: the data may be made with another tokenizer
    std::string model;                   // a name of config_by_name; empty: layers, heads and channels, or init
    bool default_model = false;          // no shape was given: --resume uses the checkpoint's shape
    std::string init;                    // a Hugging Face directory, a checkpoint, a run's output, or llm.c's .bin
    int layers = 0, heads = 0, channels = 0;
    int vocab_size = 0;  // 0: the tokenizer's, or 50257
    int seq_len = 0;     // T; 0: the model's positions
    Precision precision = Precision::automatic;

    // batch
    int micro_batch = 4;                // B; 0: the largest that fits, which resolve_batch sets
    int64_t global_batch = -1;          // tokens per step over all ranks; 0: one micro-batch per rank; -1: not given
    bool default_global_batch = false;  // global_batch is neither given nor from the run that is resumed
    Recompute recompute = Recompute::none;
    int logit_chunks = 0;        // chunks in which the logits are computed; 0: automatic
    bool master_weights = true;  // fp32 copies of bf16 weights

    // ranks
    int ranks = 0;         // ranks to start on this machine; 0: none, -1: one for each visible GPU
    double timeout = 600;  // seconds without progress that end the run; 0: never
    int zero = 0;          // 1: the optimizer's state is sharded; 2: gradients too; 3: weights too
    GradDtype grad_dtype = GradDtype::fp32;
    int tensor_parallel = 1;  // ranks that share each layer
    bool sequence_parallel = false;
    int deterministic_ranks = 0;  // virtual ranks; 0: as many as ranks
    int64_t check_replicas = 1000;

    // optimizer and schedule
    UpdateRule optimizer = UpdateRule::adamw;
    MomentDtype moments = MomentDtype::fp32;
    int64_t steps = 0;       // 0: one epoch, which resolve_steps sets
    int64_t stop_after = 0;  // 0: off
    double lr = 6e-4, final_lr_fraction = 0.1;
    Decay schedule = Decay::cosine;
    int64_t warmup = -1;       // steps; -1: not given, so each start of a run computes it from its own --steps
    int64_t warmup_steps = 0;  // set by resolve_steps
    double cooldown = 0.2;     // fraction of the steps in which wsd's rate goes down
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double grad_clip = 1.0;  // 0: off
    OnNan on_nan = OnNan::halt;
    double spike_z = 0.0;  // 0: off

    // evaluation, samples, checkpoints; *_every are in steps, 0: never
    int64_t val_every = 250, eval_every = 0, sample_every = 0, checkpoint_every = 1000;
    int64_t patience = 0;   // validations without a better loss that end the run; 0: off
    std::string eval_task;  // files, one in each line; eval_every 0: after each validation
    int sample_tokens = 64;
    std::string sample_prompt;
    std::string reference;       // file or directory, none; empty: the matching curve of data/curves
    std::string output = "out";  // directory; empty: nothing is written
    bool tensorboard = false;    // event files in output
    bool checkpoint_async = true;
    int keep = 3;            // newest checkpoints; 0: all
    int64_t keep_every = 0;  // interval of steps whose checkpoints are kept, too; 0: none
    bool keep_best = false, resume = false;
    Dtype export_dtype = Dtype::fp32;  // dtype of model.safetensors

    // run
    std::string config;  // file; empty: none
    AttentionBackend attention = AttentionBackend::automatic;
    bool deterministic = true, cuda_graph = true, autotune = true;
    uint64_t seed = 42;
    int64_t log_every = 1;
    bool quiet = false;
    std::string trace;  // file; empty: none

    // generate
    std::string prompt, prompt_file;
    int max_tokens = 256, num_samples = 1;
    bool keep_prompt = false;
    double temperature = 0.8;         // 0: the likeliest token
    int top_k = 200;                  // 0: off
    double top_p = 1.0;               // 1: off
    double repetition_penalty = 1.0;  // 1: off
    std::vector<std::string> stop;    // texts that end the new text
    bool reads_stdin = false;         // neither a prompt nor a file was given, or the file is stdin

    // eval: val_data, or one of
    std::string task, text;  // files, with commas between them; a file
    bool prepend_eot = false;
    std::string rows;  // file for the results of each row; empty: none
    int stride = 0;    // tokens that each window of the text scores; 0: all

    // plan
    bool measure = true, fits = false;
    std::string memory;           // "16GiB"; empty: what is free
    double dollars_per_hour = 0;  // 0: unknown

    // export
    GGUFMatrices type = GGUFMatrices::f16;

    // tokenize
    std::vector<std::string> inputs;  // files to tokenize; of export the model and the new file
    bool special_tokens = false, skip_bad_lines = false;
    int train_bpe = 0;         // vocabulary size; 0: off
    double val_fraction = -1;  // 0: nothing is held out; -1: 0.05, or 0 with val_tokens
    int64_t val_tokens = 0;    // instead of val_fraction; 0: off. train and eval: see windows_of
    int64_t shard_tokens = 100000000;
    bool replace = false;
    SplitAt split = {};  // none
    std::string text_key = "text";
};

// Reads the command line, then --config FILE, then, with --resume, OUTPUT/run.toml; the first that has an option sets
// it. Refuses invalid options with EXIT_USAGE, and a file's invalid values with EXIT_BAD_DATA. The error names a
// replacement for options of older versions and of nanoGPT, and the nearest option for unknown ones.
Options parse_options(int argc, const char* const* argv);

// Parts of it. check_options refuses contradictions, and sets options that follow from others.
void check_options(Options& options);
// Returns "there is no --max_iters; use --steps", or "" for a name that has no replacement.
std::string replacement(const std::string& name);
// Says that there is no such option, and which of the known ones may be meant.
std::string unknown_option(const std::string& name, const std::vector<std::string>& known);

const char* command_name(Command command);
std::string run_toml(const Options& options);      // the content of OUTPUT/run.toml
std::string options_json(const Options& options);  // all options of the command as a JSON object
// Returns an option's value as on the command line: "cosine" for "schedule".
std::string option_text(const Options& options, const std::string& name);
// Returns the options that differ from those of the run that is resumed and may not: "--lr 0.001 (was 0.0006)".
std::string changed_options(const Options& options);

// Returns the shape that --model, or --layers, --heads and --channels, ask for (not --init). default_vocab is used if
// --vocab-size is 0. The number of positions is --seq-len (1024 if that is 0), and at least 1024 for a named model.
GPT2Config model_config(const Options& options, int default_vocab = 50257);

// Sets the fields that depend on the data: steps 0 becomes steps_per_epoch, and warmup_steps becomes --warmup, by
// default the less of 700 and a tenth of the steps. Refuses an epoch without a step and a warmup longer than the run.
void resolve_steps(Options& options, int64_t steps_per_epoch);

// To be called after resolve_steps.
inline Schedule schedule_of(const Options& o) {
    return {o.schedule, o.lr, o.final_lr_fraction, o.warmup_steps, o.steps, o.cooldown};
}

// Returns how many windows of T + 1 tokens --val-tokens means: 80 if -1; 0: all; else those with so many targets.
inline int64_t windows_of(int64_t val_tokens, int T) { return val_tokens < 0 ? 80 : (val_tokens + T - 1) / T; }
