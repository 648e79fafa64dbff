// options.h: the options of the command line. A row of options.inc declares the option --lr and the field lr. The
// parser, --help, run.toml and the comparison of ranks use these declarations.
#pragma once
#include <cstdint>
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

struct Json;         // base/json.h
enum class SplitAt;  // text/text_reader.h

struct Options {
    Command command = Command::train;
    std::string command_line;  // quoted for a shell
    std::string answer;
    std::vector<std::string> taken;   // settings of files: "options from x/run.toml: --lr 0.001"
    std::vector<std::string> inputs;  // files to tokenize; of export the model and the new file

    bool default_model = false;         // no shape was given: --resume uses the checkpoint's shape
    bool default_global_batch = false;  // global_batch is neither given nor from the run that is resumed
    int64_t warmup_steps = 0;           // set by resolve_steps
    bool reads_stdin = false;           // neither a prompt nor a file was given, or the file is stdin

#define SECTION(...)
#define OPTION(kind, letter, field, initial, ...) decltype(initial) field = initial;
#define AGAIN(...)
#include "train/options.inc"
};

// Reads the command line, then --config FILE, then, with --resume, OUTPUT/run.toml, then --recipe; the first that has
// an option sets it. Refuses invalid options with EXIT_USAGE, and a file's invalid values with EXIT_BAD_DATA. The error
// names a replacement for options of older versions and of nanoGPT, and the nearest option for unknown ones.
Options parse_options(int argc, const char* const* argv);

// Parts of it. check_options refuses contradictions, and sets options that follow from others.
void check_options(Options& options);
// Says that there is no such option, and which of the known ones may be meant, or what replaces it.
std::string unknown_option(const std::string& name, const std::vector<std::string>& known);
std::string recipe_text(const std::string& name);  // the content of recipes/NAME.toml; refuses an unknown name

const char* command_name(Command command);
std::string run_toml(const Options& options);  // the content of OUTPUT/run.toml
Json options_json(const Options& options);     // all options of the command as a JSON object
// Returns an option's value as on the command line: "cosine" for "schedule".
std::string option_text(const Options& options, const std::string& name);
// Returns the options that differ from those of the checkpoint that is resumed and may not: "--lr 0.001 (was 0.0006)".
// before: options_json of the checkpoint's run, after its start.
std::string changed_options(const Options& options, const Json& before);

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
