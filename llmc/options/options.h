// options.h: the command line. Every option is declared once, in options.cpp: names, default, unit, help, range. The
// parser, --help, the settings printed at start-up and run.json all read that table.
//
// parse_options looks at the arguments only, at no file and no environment variable. What it returns is checked as far
// as that goes: ranges, names, options that contradict each other.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/params.h"

// help: --help or --version was given; the answer is in Options::text, to be printed on stdout.
enum class Command { train, generate, eval, plan, tokenize, help };

const char* command_name(Command command);

// No defaults here: parse_options sets every field, those of other commands too.
struct Options {
    Command command;
    std::string text;
    bool needs_saved;   // --resume: the options of the run that is continued are to be found, and stand where none is
                        // given
    std::string taken;  // of those, what is not a default, for a shell: "--lr 0.001 --train-data 'x_*.bin'"
    bool val_every_given;
    std::vector<std::string> renamed;  // a note on each option that was given by its old name

    // model
    std::string model;  // a name of config_by_name, or empty: the shape comes from layers, heads, channels or from init
    bool default_model;  // neither model nor another shape was given: --resume takes that of the checkpoint
    std::string init;    // a Hugging Face directory, a checkpoint, or a run's output directory
    int layers, heads, channels;
    int vocab_size;         // 0: the tokenizer's, or 50257
    int seq_len;            // T; 0: the model's positions
    std::string precision;  // fp32, bf16, auto

    // data
    std::string train_data, val_data;  // shell patterns
    std::string tokenizer;             // directory or file; empty: beside the data or in init
    std::string output;                // directory; empty: nothing is written
    std::string export_dtype;          // fp32, bf16: of model.safetensors

    // batch
    int micro_batch;              // B; 0: the largest that fits, until resolve_micro_batch
    int64_t global_batch_tokens;  // per optimizer step over all ranks; 0: one micro-batch per rank
    std::string recompute;        // none, gelu, layer
    std::string cuda_graph;       // on, off
    std::string cudnn;            // on, off
    std::string deterministic;    // on, off
    bool debug_sync;
    int logit_chunks;            // pieces in which logits are made; 0: chosen
    std::string master_weights;  // on, off: fp32 copies of bf16 weights

    // ranks; -1 or empty: the launcher says
    int rank, world_size, local_rank;
    std::string rendezvous, run_id;
    double rendezvous_timeout;  // seconds
    bool print_launch;
    int zero;                // 1: the optimizer's state is sharded
    std::string grad_dtype;  // fp32, bf16: on the wire
    bool share_gpu;          // among ranks of a machine
    int virtual_ranks;       // --deterministic-ranks; 0: as many as ranks

    // optimizer and schedule
    std::string optimizer;  // adamw
    int64_t steps;          // 0: one epoch, until resolve_steps
    int64_t stop_after;     // 0: not
    double lr, final_lr_fraction;
    std::string schedule;
    int64_t given_warmup;  // steps; -1: not given, so that each start of a run works it out for its own --steps
    int64_t warmup;        // what resolve_steps makes of it
    double weight_decay, beta1, beta2, eps;
    double grad_clip;  // 0: not

    // evaluation, samples, checkpoints; every: steps, 0: never
    int64_t val_every, sample_every, checkpoint_every;
    int val_batches;  // 0: all
    int sample_tokens;
    std::string sample_prompt;
    int keep;  // checkpoints; 0: all
    bool resume;

    // run
    uint64_t seed;
    int threads;  // 0: one per core
    bool autotune;
    int64_t log_every;
    std::string progress;  // auto, tty, plain
    bool quiet;
    std::string trace;  // file; empty: none
    int64_t trace_steps;

    // generate
    std::string prompt;
    int max_tokens, num_samples;
    double temperature;  // 0: the likeliest token
    int top_k;           // 0: not
    double top_p;        // 1: not

    // tokenize
    std::vector<std::string> inputs;
    int train_bpe;        // vocabulary size; 0: not
    double val_fraction;  // 0: nothing held out
    int64_t val_tokens;   // instead of val_fraction; 0: not
    int64_t shard_tokens;
    bool replace;
    std::string split, text_key;
};

// Refuses, with EXIT_USAGE and one sentence, what cannot be; suggests the nearest option for an unknown one, and ours
// for one of another trainer. saved: options_json of the run to be continued, for what is not given; what belongs to
// one start only (ranks, --stop-after, --trace) is not taken from it.
Options parse_options(int argc, const char* const* argv, const std::string& saved = "");

// One option of the command with its present value, as text: {"batch", "micro-batch", "4"}.
struct Setting {
    std::string section, name, value;
    bool is_default;
};
// In the order of --help, the options of options.command.
std::vector<Setting> settings(const Options& options);
// The same as a JSON object, numbers as numbers: {"micro-batch":4,"lr":0.0006,...}.
std::string options_json(const Options& options);

// The shape that --model, or --layers, --heads and --channels, ask for (not --init). default_vocab is taken when
// --vocab-size is 0. Positions: --seq-len, and for a named model its own 1024 at least.
GPT2Config model_config(const Options& options, int default_vocab = 50257);

// Fills in what depends on the data: steps 0 becomes steps_per_epoch, and warmup is what was given, or 700 or a tenth
// of the steps, whichever is less. Refuses an epoch of less than one step and a warmup longer than the run.
void resolve_steps(Options& options, int64_t steps_per_epoch);

// "train_gpt2 0.1.0 (commit 1234abc)"; the commit when the build was told one.
std::string version();
