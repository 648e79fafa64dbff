// options.h: the options of the command line. Each option is declared once, in option_table.cpp: names, default,
// unit, help, range, and what `plan`, a resume and other ranks do with the option. The parser, --help, the settings
// printed at start-up and run.json all use this table.
//
// parse_options reads only the arguments, no files and no environment variables. It checks ranges, names, and options
// that contradict each other.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/params.h"

// help: --help or --version was given; the answer is in Options::text, to be printed on stdout.
enum class Command { train, generate, eval, plan, tokenize, verify, explain, help };

const char* command_name(Command command);

// The fields have no defaults here: parse_options sets all of them, also those of other commands.
struct Options {
    Command command;
    std::string text;
    bool needs_saved;  // --resume was given: call parse_options again with the saved options of that run
    // The saved options that this start takes over and that differ from their defaults, quoted for a shell:
    // "--lr 0.001 --train-data 'x_*.bin'".
    std::string taken;
    std::vector<std::string> given;    // the options on the command line, by long name without dashes: "val-every"
    std::vector<std::string> renamed;  // a note for each option that was given by its old name

    // model
    std::string model;   // a name of config_by_name; empty: layers, heads and channels, or init, give the shape
    bool default_model;  // no shape was given: --resume uses the checkpoint's shape
    std::string init;    // a Hugging Face directory, a checkpoint, or a run's output directory
    int layers, heads, channels;
    int vocab_size;         // 0: the tokenizer's, or 50257
    int seq_len;            // T; 0: the model's positions
    std::string precision;  // fp32, bf16, fp8 (only train and plan), auto

    // data
    std::string train_data, val_data;  // shell patterns
    std::string tokenizer;             // directory or file; empty: beside the data or in init
    std::string output;                // directory; empty: nothing is written
    std::string export_dtype;          // dtype of model.safetensors: fp32, bf16

    // batch
    int micro_batch;                   // B; 0: the largest that fits, which resolve_micro_batch sets
    int64_t global_batch_tokens;       // per optimizer step over all ranks; 0: one micro-batch per rank
    bool default_global_batch;         // global_batch_tokens is neither given nor from the run that is resumed
    std::string recompute;             // none, gelu, layer
    int comm_sms;                      // 0: NCCL and cuBLASLt choose
    std::string cuda_graph, autotune;  // on, off
    std::string cudnn;                 // on, off
    std::string deterministic;         // on, off
    bool debug_sync;
    int logit_chunks;            // chunks in which the logits are computed; 0: automatic
    std::string master_weights;  // on, off: fp32 copies of bf16 weights

    // ranks that this process starts on this machine
    std::string gpus;  // all, a number, or a list; empty: none
    int ranks;         // CPU ranks, by mpirun; 0: none
    int nnodes, node_rank;
    int max_restarts;

    // ranks; -1 or empty: set by the launcher
    int rank, world_size, local_rank;
    std::string rendezvous, run_id;
    double rendezvous_timeout;                                                   // seconds
    double timeout_start, timeout_step, timeout_validation, timeout_checkpoint;  // seconds, see Timeouts
    bool print_launch;
    int zero;                // 1: the optimizer's state is sharded; 2: gradients too; 3: weights too
    std::string grad_dtype;  // dtype of gradients in collectives: fp32, bf16
    int tensor_parallel;     // ranks that share each layer
    bool sequence_parallel, tp_across_hosts;
    bool share_gpu;     // ranks of a machine may share a GPU
    int virtual_ranks;  // --deterministic-ranks; 0: as many as ranks

    // plan
    bool fit;           // list the layouts that fit
    double gpu_memory;  // GiB of each rank's device; 0: this device's

    // optimizer and schedule
    std::string optimizer;  // adamw
    int64_t steps;          // 0: one epoch, which resolve_steps sets
    int64_t stop_after;     // 0: off
    double max_time;        // seconds; 0: off
    double lr, final_lr_fraction;
    std::string schedule;
    int64_t given_warmup;  // steps; -1: not given, so each start of a run computes it from its own --steps
    int64_t warmup;        // steps, set by resolve_steps
    double weight_decay, beta1, beta2, eps;
    double grad_clip;                     // 0: off
    std::string on_nan;                   // halt, skip, rollback
    std::string on_spike;                 // warn, skip, rollback
    double spike_z;                       // 0: off
    int64_t hash_check, recompute_check;  // steps; 0: never

    // evaluation, samples, checkpoints; *_every are in steps, 0: never
    int64_t val_every, sample_every, checkpoint_every;
    int val_batches;  // 0: all
    int sample_tokens;
    std::string sample_prompt;
    std::string checkpoint_async;  // auto, on, off
    int keep;                      // newest checkpoints; 0: all
    int64_t keep_every;            // also checkpoints of steps that are multiples of this; 0: off
    bool keep_best;
    bool resume;
    bool resume_strict;  // refuse a damaged checkpoint, instead of taking an older one

    // run
    uint64_t seed;
    int threads;  // 0: one per core
    int64_t log_every;
    std::string progress;  // auto, tty, plain
    bool quiet;
    std::string trace;  // file; empty: none
    int64_t trace_steps;

    // generate
    std::string prompt;
    int max_tokens, num_samples;
    double temperature;  // 0: the likeliest token
    int top_k;           // 0: off
    double top_p;        // 1: off

    // tokenize, verify, explain
    std::vector<std::string> inputs;

    // tokenize
    int train_bpe;        // vocabulary size; 0: off
    double val_fraction;  // 0: nothing is held out
    int64_t val_tokens;   // instead of val_fraction; 0: off
    int64_t shard_tokens;
    bool replace;
    std::string split, text_key;
};

// Refuses invalid options with EXIT_USAGE. For an unknown option the error suggests the nearest one, or this program's
// name for an option of another trainer. saved: options_json of the run to be resumed; it sets the options that are not
// given, except those that belong to a single start (OptionSpec::of_one_start). A saved value that is refused is
// EXIT_BAD_DATA, and the message names the file.
Options parse_options(int argc, const char* const* argv, const std::string& saved = "");

// Whether the option ("val-every") is on the command line. A value of the earlier start of a run does not count.
bool is_given(const Options& options, const std::string& name);

// One option of the command with its current value as text: {"batch", "micro-batch", "4"}.
struct Setting {
    std::string section, name, value;
    bool is_default, is_flag;
    bool may_change;  // a resume accepts another value without a warning
    bool may_differ;  // the ranks of a run may have different values
    bool is_path;     // a resume reads a relative path from the directory in which the run was started
    bool is_pattern;  // the path is a shell pattern
};
// All options of options.command, in the order of --help.
std::vector<Setting> settings(const Options& options);
// The options of options.command as a JSON object: {"micro-batch":4,"lr":0.0006,...}. Numbers are JSON numbers.
std::string options_json(const Options& options);
// The options that an older version saved as JSON, with the names and forms that options_json gives them now.
std::string in_present_form(const std::string& saved, const Options& options);

// The shape that --model, or --layers, --heads and --channels, ask for (not --init). default_vocab is used if
// --vocab-size is 0. The number of positions is --seq-len (1024 if that is 0), and at least 1024 for a named model.
GPT2Config model_config(const Options& options, int default_vocab = 50257);
// The attention heads of the model that the options describe. 0: that of --init, which is not read here.
int heads_of(const Options& options);

// Sets the fields that depend on the data: steps 0 becomes steps_per_epoch, and warmup becomes --warmup, or by default
// 700 or a tenth of the steps, whichever is less. Refuses an epoch of less than one step and a warmup longer than the
// run.
void resolve_steps(Options& options, int64_t steps_per_epoch);

// "train_gpt2 0.1.0 (commit 1234abc)"; without the commit if the build has none.
std::string version();
// The checksum of the sources that the program was built from.
extern const char SOURCES_CHECKSUM[];
