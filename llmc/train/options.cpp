#include "train/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <deque>
#include <numeric>
#include <variant>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "base/print.h"

static constexpr const char* command_names[] = {"train", "generate", "eval", "plan", "tokenize", "help"};

const char* command_name(Command command) { return command_names[int(command)]; }

// Options and commands of version 0.2.0, which go from this table after 0.3.0, and options of nanoGPT and llm.c.
static constexpr struct {
    const char *names, *use;
} replaced[] = {
    {"--gpus", "--ranks N, or --ranks all; CUDA_VISIBLE_DEVICES chooses the GPUs"},
    {"--nnodes --node-rank --max-restarts", "torchrun, which starts several machines and starts ranks again"},
    {"--rank --world-size --local-rank --rendezvous --run-id",
     "the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or plan --ranks N"},
    {"--print-launch", "the table at the start, which has the ranks"},
    {"--rendezvous-timeout --timeout-start --timeout-step --timeout-validation --timeout-checkpoint", "--timeout"},
    {"--share-gpu", "one GPU for each rank"},
    {"--tp-across-hosts", "--tensor-parallel alone"},
    {"--max-time", "timeout -s TERM 3h50m, or Slurm's --signal=USR1@120"},
    {"--on-spike", "--spike-z Z, which leaves out such steps"},
    {"--hash-check --recompute-check", "--check-replicas"},
    {"--debug-sync", "the variable CUDA_LAUNCH_BLOCKING=1"},
    {"--comm-sms", "the variable NCCL_MAX_CTAS"},
    {"--threads", "the variable OMP_NUM_THREADS"},
    {"--progress", "--quiet, or a pipe, which gets plain lines"},
    {"--trace-steps", "--trace, which has the first 20 steps"},
    {"--fit --gpu-memory", "plan, once for each layout"},
    {"--head-chunks", "--logit-chunks"},
    {"verify", "--resume or --init, which verify what they read"},
    {"explain", "the messages of the ranks, which say where each one is"},
    {"--batch-size", "--micro-batch, in sequences per rank; --global-batch is in tokens per step"},
    {"--gradient-accumulation-steps", "--global-batch, in tokens per step over all ranks"},
    {"--max-iters", "--steps"},
    {"--learning-rate", "--lr"},
    {"--block-size", "--seq-len"},
    {"-m", "--val-batches"},
    {"-r", "--recompute none, gelu or layer"},
    {"-w", "--master-weights on or off"},
    {"-f", "--precision"},
};

// ---- declarations

namespace {
enum Kind : unsigned {
    ONE_START = 1,     // never stored in run.toml
    FREE = 2,          // a resume accepts another value without a warning
    SHAPE = 4,         // if one such option is given, a file sets none of them
    PATH = 8,          // relative to the directory in which the run was started
    PATTERN = 8 | 16,  // a path that is a shell pattern
};

// An option of the command, and the field that it sets.
struct Declared {
    unsigned kind;
    const char *section, *unit, *help;
    std::variant<std::string*, bool*, int*, int64_t*, uint64_t*, double*> field;
    double least, most;
    CLI::Option* option;
    std::string initial;  // the default
    bool is_set = false;  // by the command line or a file

    std::string name() const { return option->get_lnames().front(); }
    bool is_text() const { return std::holds_alternative<std::string*>(field); }
    std::string value() const;
    void set(const std::string& text);
};

// The options of a command. CLI11 takes the command line apart.
struct Parser {
    Command command;
    CLI::App app;
    std::deque<Declared> all;
    const char* section = "";
    CLI::Option *y, *help, *version;

    explicit Parser(Options& o);

    template <class T>
    void add(unsigned kind, const char* names, T& field, const char* unit, const char* help, double least = 0,
             double most = HUGE_VAL) {
        CLI::Option* option = std::is_same_v<T, bool> ? app.add_flag(names) : app.add_option(names);
        all.push_back({kind, section, unit, help, &field, least, most, option->take_last(), ""});
        all.back().initial = all.back().value();
    }
    void training_options(Options& o);
    void optimizer_options(Options& o);
    void output_options(Options& o);
    void inference_options(Options& o);
    void tokenize_options(Options& o);
    void rank_options(Options& o);
    Declared* find(const std::string& name);  // "--lr" or "-l"; null if there is none
    bool has_shape() const {
        return std::any_of(all.begin(), all.end(), [](auto& d) { return d.is_set && d.kind & SHAPE; });
    }
    std::string unknown(const std::string& name) const;
    std::string help_text(const std::string& program) const;
    void read_command_line(Options& o, int argc, const char* const* argv);
    void read_given(const std::string& file);
    void read_text(Options& o, const std::string& path, const std::string& text, bool saved);
    void read_saved(Options& o);
    std::string toml_of(const nlohmann::json& run);
};
}  // namespace

// A lower-case unit lists the words that the option accepts: "fp32|bf16|auto". That of a number may end with a word,
// which stands for the least value: "N|all". A help that ends with a bracket says the default itself.
void Parser::training_options(Options& o) {
    section = "data";
    add(PATTERN, "-i,--train-data", o.train_data, "GLOB", "token shards to train on, quoted: 'data/x/train_*.bin'");
    add(PATTERN, "-j,--val-data", o.val_data, "GLOB", "token shards to validate on");
    add(PATH | FREE, "--tokenizer", o.tokenizer, "DIR|FILE",
        "tokenizer for samples and checkpoints [beside the training data]");
    section = "model";
    add(SHAPE, "-e,--model", o.model, "NAME",
        "shape: d12, d24, d36, d48 (or gpt2, gpt2-medium ...), gpt3-125m to gpt3-13b [d12]");
    add(SHAPE | PATH | FREE, "--init", o.init, "DIR",
        "start from the weights of a Hugging Face directory or a checkpoint");
    add(SHAPE, "--layers", o.layers, "N", "number of layers; with --heads and --channels [those of --model]");
    add(SHAPE, "--heads", o.heads, "N", "attention heads per layer [those of --model]");
    add(SHAPE, "--channels", o.channels, "N", "embedding width; a multiple of --heads [that of --model]");
    add(0, "--vocab-size", o.vocab_size, "TOKENS", "vocabulary size; 0 = the tokenizer's, or 50257", 0, 1 << 20);
    add(0, "-t,--seq-len", o.seq_len, "TOKENS", "sequence length (T); 0 = the model's number of positions", 0, 1 << 20);
    add(0, "--precision", o.precision, "fp32|bf16|fp8|auto",
        "fp8 = bf16 with the layers' matmuls in FP8; auto = bf16 where it is faster");
    section = "batch";
    add(0, "-b,--micro-batch", o.micro_batch, "SEQUENCES|auto",
        "sequences per rank and forward pass (B); auto = fast, and fits", 0, 1 << 20);
    add(0, "-d,--global-batch", o.global_batch_tokens, "TOKENS",
        "tokens per step over all ranks; 0 = one micro-batch per rank [524288 with --model]", 0, 0x1p40);
    add(0, "--recompute", o.recompute, "none|gelu|layer", "activations to recompute in backward, to save memory");
    add(0, "--logit-chunks", o.logit_chunks, "N", "compute the logits in N chunks, to save memory; 0 = automatic", 0,
        1 << 20);
    add(0, "--master-weights", o.master_weights, "on|off",
        "fp32 copies of bf16 weights; off = stochastic rounding, to save memory");
    section = "ranks";
    rank_options(o);
    add(FREE, "-z,--zero", o.zero, "0|1|2|3",
        "ZeRO stage: share the optimizer's state (1), gradients too (2), weights too (3)", 0, 3);
    add(0, "--grad-dtype", o.grad_dtype, "fp32|bf16", "dtype of gradients in collectives");
    add(FREE, "--sequence-parallel", o.sequence_parallel, "",
        "with --tensor-parallel: ranks also share the tokens between matmuls");
    add(0, "--deterministic-ranks", o.virtual_ranks, "N",
        "add gradients in the order of N ranks: same bits on 1, 2, 4 .. N; 0 = off", 0, 1 << 16);
    add(FREE, "--check-replicas", o.check_replicas, "STEPS",
        "compare the ranks' weights; end with exit code 17 if they differ; 0 = never");
    optimizer_options(o);
    output_options(o);
}

void Parser::rank_options(Options& o) {
    add(ONE_START, "--ranks", o.ranks, "N|all", "start N ranks on this machine; all = one for each visible GPU [none]",
        -1, 1 << 16);
    add(FREE, "--timeout", o.timeout, "SECONDS", "end with exit code 124 after so long without progress; 0 = never", 0,
        1e9);
    add(FREE, "--tensor-parallel", o.tensor_parallel, "N", "N ranks share each layer; N divides the heads", 1, 1024);
}

void Parser::optimizer_options(Options& o) {
    section = "optimizer";
    add(0, "-x,--steps", o.steps, "STEPS", "optimizer steps of the whole run; 0 or -1 = one epoch", -1, 0x1p31 - 1);
    add(ONE_START | FREE, "--stop-after", o.stop_after, "STEPS",
        "end this run after N more steps, without changing the schedule; 0 = off");
    add(0, "-l,--lr", o.lr, "RATE", "peak learning rate", 0, 1e30);
    add(0, "-k,--schedule", o.schedule, "cosine|linear|constant|wsd",
        "learning rate after warmup; wsd = constant, then 1 - sqrt in the last fifth");
    add(0, "-u,--warmup", o.given_warmup, "STEPS", "steps of linear warmup [-1 = 700, or a tenth of a shorter run]",
        -1);
    add(0, "-q,--final-lr-fraction", o.final_lr_fraction, "FRACTION",
        "last step's learning rate, as a fraction of --lr", 0, 1);
    add(0, "--optimizer", o.optimizer, "adamw", "update rule");
    add(0, "-c,--weight-decay", o.weight_decay, "FACTOR",
        "AdamW's weight decay, of matrices and embeddings only; 0 = off", 0, 100);
    add(0, "--beta1", o.beta1, "FACTOR", "AdamW's decay rate of the first moment", 0, 1 - 1e-9);
    add(0, "--beta2", o.beta2, "FACTOR", "AdamW's decay rate of the second moment", 0, 1 - 1e-9);
    add(0, "--eps", o.eps, "VALUE", "AdamW's epsilon", 1e-30, 1);
    add(0, "--grad-clip", o.grad_clip, "NORM", "clip gradients to this global norm; 0 = off", 0, 1e9);
    add(0, "--on-nan", o.on_nan, "halt|skip",
        "at a loss or norm that is not finite: end the run, or leave out the step");
    add(0, "--spike-z", o.spike_z, "Z", "leave out steps with a loss or norm Z deviations above the last 128; 0 = off",
        0, 1e6);
}

void Parser::output_options(Options& o) {
    section = "evaluation and samples";
    add(FREE, "-v,--val-every", o.val_every, "STEPS",
        "compute the validation loss every N steps and after the last; 0 = never");
    add(FREE, "--val-batches", o.val_batches, "BATCHES", "micro-batches per validation, over all ranks; 0 = all");
    add(FREE, "-s,--sample-every", o.sample_every, "STEPS", "generate text every N steps; 0 = never");
    add(FREE, "-g,--sample-tokens", o.sample_tokens, "TOKENS", "length of a sample", 1, 1 << 20);
    add(FREE, "--sample-prompt", o.sample_prompt, "TEXT", "prompt of the samples [<|endoftext|>]");
    section = "output";
    add(ONE_START | FREE, "-o,--output", o.output, "DIR", "directory for log and checkpoints; '' = write nothing");
    add(FREE, "-n,--checkpoint-every", o.checkpoint_every, "STEPS", "save every N steps and after the last; 0 = never");
    add(FREE, "--checkpoint-async", o.checkpoint_async, "on|off",
        "write checkpoints while training goes on, from a copy in memory");
    add(FREE, "--keep", o.keep, "CHECKPOINTS", "number of newest checkpoints to keep; 0 = all");
    add(FREE, "--keep-every", o.keep_every, "STEPS", "also keep the checkpoints of every N steps; 0 = off");
    add(FREE, "--keep-best", o.keep_best, "", "also keep the checkpoint with the lowest validation loss");
    add(ONE_START | FREE, "--resume", o.resume, "",
        "continue from the newest checkpoint in --output, with that run's options (-y 1)");
    y = app.add_option("-y")->take_last();
    add(0, "--export-dtype", o.export_dtype, "fp32|bf16", "dtype of model.safetensors");
    section = "GPU";
    add(0, "--cudnn", o.cudnn, "on|off", "use cuDNN for bf16 attention; off = the program's own kernels");
    add(0, "--deterministic", o.deterministic, "on|off", "same bits in every run; off = faster cuDNN backward");
    add(0, "--cuda-graph", o.cuda_graph, "on|off", "replay each micro-step as a CUDA graph");
    add(0, "--autotune", o.autotune, "on|off", "time the algorithms of matmul and attention, and keep the choices");
    section = "run";
    add(ONE_START | FREE, "--config", o.config, "FILE", "take options that are not given from a TOML file: lr = 6e-4");
    add(0, "--seed", o.seed, "N", "seed of initial weights, data order and samples");
    add(FREE, "--log-every", o.log_every, "STEPS", "print a line every N steps; log.jsonl has every step", 1);
    add(ONE_START | FREE, "--trace", o.trace, "FILE", "write a timeline of the first 20 steps, for ui.perfetto.dev");
    add(ONE_START | FREE, "--quiet", o.quiet, "", "print errors only");
}

void Parser::inference_options(Options& o) {
    section = command_name(o.command);
    add(0, "--init", o.init, "DIR", "Hugging Face directory, checkpoint, or a run's output (newest checkpoint)");
    if (o.command == Command::generate) {
        add(0, "--prompt", o.prompt, "TEXT", "text to continue [<|endoftext|>]");
        add(0, "--max-tokens", o.max_tokens, "TOKENS", "largest number of tokens to generate", 1, 1 << 20);
        add(0, "--temperature", o.temperature, "VALUE", "divisor of the logits; 0 = always the likeliest token", 0,
            1000);
        add(0, "--top-k", o.top_k, "TOKENS", "sample from the k likeliest tokens; 0 = off");
        add(0, "--top-p", o.top_p, "FRACTION", "sample from the likeliest tokens whose probabilities sum to p; 1 = off",
            1e-9, 1);
        add(0, "--num-samples", o.num_samples, "N", "number of texts", 1);
        add(0, "--tokenizer", o.tokenizer, "DIR|FILE", "tokenizer of the prompt and the text [the one in --init]");
        add(0, "--seed", o.seed, "N", "seed of the samples; the same seed gives the same text");
    } else {
        add(0, "-j,--val-data", o.val_data, "GLOB", "token shards to evaluate");
        add(0, "-b,--micro-batch", o.micro_batch, "SEQUENCES", "sequences per forward pass (B)", 1, 1 << 20);
        add(0, "-t,--seq-len", o.seq_len, "TOKENS", "sequence length (T); 0 = the model's number of positions", 0,
            1 << 20);
        add(0, "--batches", o.val_batches, "BATCHES", "micro-batches to evaluate; 0 = all");
    }
    add(0, "--precision", o.precision, "fp32|bf16|auto",
        "dtype of weights and activations; auto = bf16 where it is faster");
    section = "ranks";
    rank_options(o);
}

void Parser::tokenize_options(Options& o) {
    section = "tokenize";
    add(0, "-o,--output", o.output, "DIR", "directory for train_*.bin, val_*.bin and the tokenizer");
    add(0, "--train-bpe", o.train_bpe, "TOKENS", "train a vocabulary of this size on the text; 0 = off", 0, 1 << 20);
    add(0, "--tokenizer", o.tokenizer, "DIR|FILE", "existing tokenizer: tokenizer.json, or vocab.json and merges.txt");
    add(0, "--val-fraction", o.val_fraction, "FRACTION",
        "fraction of the text held out for validation; 0 = none [0.05, unless --val-tokens]", 0, 0.5);
    add(0, "--val-tokens", o.val_tokens, "TOKENS", "hold out the first N tokens instead, as in llm.c; 0 = off");
    add(0, "--shard-tokens", o.shard_tokens, "TOKENS", "tokens per shard", 1, 0x1p31 - 1);
    add(0, "--replace", o.replace, "", "replace the shards in --output");
    add(0, "--split", o.split, "none|blank-lines|end-of-text", "where to cut text files into documents");
    add(0, "--text-key", o.text_key, "KEY", "key of the text in .jsonl objects");
    add(0, "--quiet", o.quiet, "", "print errors only");
}

Parser::Parser(Options& o) : command(o.command) {
    app.set_help_flag();
    app.allow_extras();
    help = app.add_flag("-h,--help");
    version = app.add_flag("--version");
    y = help;
    if (o.command == Command::tokenize)
        tokenize_options(o);
    else if (o.command == Command::train || o.command == Command::plan)
        training_options(o);
    else
        inference_options(o);
}

// ---- values

std::string Declared::value() const {
    return std::visit(
        [](auto* field) -> std::string {
            using T = std::remove_pointer_t<decltype(field)>;
            if constexpr (std::is_same_v<T, std::string>)
                return *field;
            else if constexpr (std::is_same_v<T, bool>)
                return *field ? "true" : "false";
            else if constexpr (std::is_integral_v<T>)
                return std::to_string(*field);
            else
                for (int digits = 6;; digits++)
                    if (const std::string text = format("%.*g", digits, *field);
                        digits == 17 || strtod(text.c_str(), nullptr) == *field)
                        return text;
        },
        field);
}

template <class T>
static T number(const std::string& name, const std::string& text) {
    T value{};
    const char *begin = text.c_str(), *end = begin + text.size();
    if constexpr (std::is_floating_point_v<T>) {
        char* stop = nullptr;
        if (text.find_first_not_of("+-.0123456789eE") == text.npos) value = strtod(begin, &stop);
        ENSURE(stop == end && !text.empty(), "%s: '%s' is not a number", name.c_str(), text.c_str());
    } else {
        const auto [stop, error] = std::from_chars(begin, end, value);
        ENSURE(error != std::errc::result_out_of_range, "%s: %s is out of range", name.c_str(), text.c_str());
        ENSURE(error == std::errc() && stop == end, "%s: '%s' is not a whole number%s", name.c_str(), text.c_str(),
               std::is_signed_v<T> ? "" : ", 0 or more");
    }
    return value;
}

void Declared::set(const std::string& text) {
    const std::string name = "--" + this->name(), words = format("|%s|", unit);
    const bool is_word = !text.empty() && isalpha(text[0]) && words.find("|" + text + "|") != words.npos;
    is_set = true;
    if (auto** field = std::get_if<std::string*>(&this->field)) {
        ENSURE(!islower(unit[0]) || (is_word && text.find('|') == text.npos), "%s %s is not known; give %s",
               name.c_str(), shell_word(text).c_str(), unit);
        **field = text;
    } else if (auto** field = std::get_if<bool*>(&this->field)) {
        **field = text == "1" || text == "true";
        ENSURE(**field || text == "0" || text == "false", "%s: '%s' is neither true nor false", name.c_str(),
               text.c_str());
    } else {
        std::visit(
            [&](auto* field) {
                using T = std::remove_pointer_t<decltype(field)>;
                if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
                    *field = is_word ? T(least) : number<T>(name, text);
                    const double value = double(*field);
                    const std::string at_most = most < HUGE_VAL ? format(" and at most %.15g", most) : "";
                    ENSURE(value >= least && value <= most, "%s %s must be at least %.15g%s", name.c_str(),
                           text.c_str(), least, at_most.c_str());
                }
            },
            this->field);
    }
}

// ---- run.toml and --config

static std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text)
        if (c == '"' || c == '\\')
            out += std::string("\\") + c;
        else if (uint8_t(c) < 0x20 || c == 0x7f)
            out += format("\\u%04x", unsigned(c));
        else
            out += c;
    return out + '"';
}

// Takes the value at the start of a line, and removes it there.
static std::string take_value(std::string& line, const std::string& where) {
    std::string value;
    const char quote = line[0];
    if (quote != '"' && quote != '\'') {
        value = CLI::detail::trim_copy(line.substr(0, line.find('#')));
        if (isdigit(quote)) std::erase(value, '_');
        line.clear();
        return value;
    }
    size_t at = 1;
    for (; at < line.size() && line[at] != quote; at++) {
        if (line[at] != '\\' || quote == '\'') {
            value += line[at];
            continue;
        }
        const char letters[] = "btnfr\"\\", characters[] = "\b\t\n\f\r\"\\";
        const size_t i = std::string_view(letters).find(line[++at]);
        if (i == std::string::npos && line[at] != 'u')
            fail(EXIT_BAD_DATA, "%s: '\\' before %c", where.c_str(), line[at]);
        value += i < std::string::npos ? std::string(1, characters[i])
                                       : parse_json("\"\\" + line.substr(at, 5) + "\"", where).get<std::string>();
        at += i < std::string::npos ? 0 : 4;
    }
    if (at >= line.size()) fail(EXIT_BAD_DATA, "%s: the text has no closing %c", where.c_str(), quote);
    line.erase(0, at + 1);
    return value;
}

// Reads lines of the form name = value, as TOML has them. CLI11's own reader (2.1.2) would cut texts at #, and splits
// them at commas.
static std::vector<std::pair<std::string, std::string>> read_toml(const std::string& text, const std::string& path) {
    std::vector<std::pair<std::string, std::string>> items;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        const std::string where = format("%s, line %d", path.c_str(), number);
        CLI::detail::trim(line);
        if (line.empty() || line[0] == '#') continue;
        const size_t equals = line.find('=');
        const std::string name = CLI::detail::trim_copy(line.substr(0, equals));
        line.erase(0, equals < line.size() ? equals + 1 : equals);
        CLI::detail::trim(line);
        if (line.empty()) fail(EXIT_BAD_DATA, "%s: is not of the form name = value", where.c_str());
        const std::string value = take_value(line, where);
        CLI::detail::trim(line);
        if (!line.empty() && line[0] != '#') fail(EXIT_BAD_DATA, "%s: more follows the value", where.c_str());
        if (value.find('\0') != value.npos) fail(EXIT_BAD_DATA, "%s: has a zero byte", where.c_str());
        items.emplace_back(name, value);
    }
    return items;
}

// Sets the options that were given and have no value yet. file: empty for the command line.
void Parser::read_given(const std::string& file) {
    for (Declared& d : all) try {
            if (!d.is_set && d.option->count() > 0) d.set(d.option->results().back());
        } catch (const Error& error) {
            if (file.empty()) throw;
            fail(EXIT_BAD_DATA, "%s (from %s; --%s on the command line comes first)", error.what(), file.c_str(),
                 d.name().c_str());
        }
}

// A path of a file's option. A relative one belongs to the directory in which the run was started. If that does not
// exist here, the run was moved together with its data, and the path stays relative.
static std::string resolve_path(const std::string& path, const std::string& directory, bool is_pattern) {
    const size_t start = path.find_first_not_of('{');  // "{/a,/b}/train_*.bin" is absolute
    const bool absolute = start == path.npos || path[start] == '/' || path[start] == '~';
    if (absolute || directory == current_directory() || !is_directory(directory)) return path;
    std::string out;
    for (const char c : directory) out += std::string(is_pattern && strchr("*?[]{}\\", c) ? "\\" : "") + c;
    return out + "/" + path;
}

// Takes the options in a file that are not set. saved: the file is run.toml of the run that is resumed.
void Parser::read_text(Options& o, const std::string& path, const std::string& text, bool saved) {
    const bool shape_is_set = has_shape();
    std::string directory;
    for (const auto& [name, value] : read_toml(text, path)) {
        if (name == "directory") directory = value;
        if (name == "directory") continue;
        const Declared* d = find("--" + name);
        if (!d) fail(EXIT_BAD_DATA, "%s: %s", path.c_str(), unknown("--" + name).c_str());
        if (saved) o.saved[name] = d->is_text() ? quoted(value) : value;
        if (d->is_set || (saved && d->kind & ONE_START) || (shape_is_set && d->kind & SHAPE)) continue;
        const std::string here = d->kind & PATH ? resolve_path(value, directory, d->kind & PATTERN & ~PATH) : value;
        d->option->add_result(here);
        if (saved && here != d->initial) o.taken += " --" + name + " " + shell_word(here);
    }
    read_given(path);
}

// The options that version 0.2.0 has saved in run.json, in the form of run.toml. Goes after 0.3.0.
std::string Parser::toml_of(const nlohmann::json& run) {
    std::string text = "directory = " + run.value("directory", nlohmann::json("")).dump() + "\n";
    const nlohmann::json options = run.value("options", nlohmann::json::object());
    for (const auto& [old_name, old] : options.items()) {
        const std::string name = old_name == "hash-check" ? "check-replicas" : old_name;
        const nlohmann::json value = old == "rollback"                             ? "skip"
                                     : name == "checkpoint-async" && old == "auto" ? "on"
                                                                                   : old;
        const bool spikes = name != "spike-z" || (options.contains("on-spike") && options["on-spike"] != "warn");
        if (find("--" + name) && spikes) text += name + " = " + value.dump() + "\n";
    }
    return text;
}

void Parser::read_saved(Options& o) {
    const std::string path = o.output + "/run.toml", old_path = o.output + "/run.json";
    if (path_exists(path)) return read_text(o, path, read_file(path, 1 << 20), true);
    if (path_exists(old_path)) return read_text(o, old_path, toml_of(read_json_object(old_path, 16 << 20)), true);
    ENSURE(o.command == Command::plan || !o.train_data.empty(),
           "--train-data is missing, and %s, from which --resume takes options, does not exist: give the --output of a "
           "run, or all options",
           path.c_str());
}

// ---- the command line

// The number of insertions, deletions and substitutions that turn a into b.
static size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = std::exchange(row[0], i);
        for (size_t j = 1; j <= b.size(); j++)
            diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])}));
    }
    return row[b.size()];
}

Declared* Parser::find(const std::string& name) {
    const auto d = std::find_if(all.begin(), all.end(), [&](auto& d) { return d.option->check_name(name); });
    return d == all.end() ? nullptr : &*d;
}

// Says that there is no such option or command, and what may be meant.
std::string Parser::unknown(const std::string& name) const {
    std::string dashed = name;
    if (name.starts_with("--")) std::replace(dashed.begin(), dashed.end(), '_', '-');
    for (const auto& row : replaced)
        if (format(" %s ", row.names).find(" " + dashed + " ") != std::string::npos)
            return format("there is no %s; use %s", name.c_str(), row.use);
    std::string nearest;
    size_t least = 1 + std::max<size_t>(2, name.size() / 3);
    for (const Declared& d : all) {
        const std::string known = "--" + d.name();
        const bool part = name.size() > 4 && known.find(name.substr(2)) != std::string::npos;  // --batch
        const size_t distance = part ? 1 : edit_distance(dashed, known);
        if (distance < least) nearest = "; did you mean " + known + "?", least = distance;
    }
    return format("unknown option %s%s (see --help)", name.c_str(), name.starts_with("--") ? nearest.c_str() : "");
}

std::string Parser::help_text(const std::string& program) const {
    const std::string p = message_text(program), name = command_name(command);
    std::string out = format("usage: %s %s%s [options]\n", p.c_str(), name.c_str(),
                             command == Command::tokenize ? " INPUT...    files, or folders of them," : "");
    if (command == Command::train)
        out = format(
            "usage: %s [train] [options]\n       %s generate | eval | plan | tokenize [options]    each with its "
            "own --help\n",
            p.c_str(), p.c_str());
    const char* shown = "";
    for (const Declared& d : all) {
        if (shown != d.section) out += format("\n%s:\n", shown = d.section);
        const std::string left = "  " + d.option->get_name(false, true) + (*d.unit ? " " : "") + d.unit;
        out += left + (left.size() < 35 ? std::string(36 - left.size(), ' ') : "\n" + std::string(36, ' ')) + d.help;
        const bool has_default = !*d.unit || d.help[strlen(d.help) - 1] == ']' || d.initial.empty();
        out += (has_default ? "" : " [" + d.initial + "]") + "\n";
    }
    return out +
           "\n  -h,--help, --version\nA value in [] is the default. --name VALUE and --name=VALUE are the same.\n";
}

// The arguments as CLI11 takes them, from the last to the first. "--name=" becomes "--name" and "": CLI11 would take
// the next argument for the value.
static std::vector<std::string> reversed(Parser& p, const char* const* begin, const char* const* end) {
    std::vector<std::string> arguments;
    for (const char* const* at = begin; at < end; at++) {
        const std::string text = *at, name = text.substr(0, text.find('='));
        ENSURE(!text.starts_with("-") || text.starts_with("--") || text.size() < 3 || !p.find("-" + name),
               "%s: a long option takes two dashes: -%s", text.c_str(),
               name.c_str());  // else "-output=x" is -o utput=x
        const bool empty = text.starts_with("--") && name.size() > 2 && name.size() + 1 == text.size();
        arguments.push_back(empty ? name : text);
        if (empty) arguments.push_back("");
    }
    std::reverse(arguments.begin(), arguments.end());
    return arguments;
}

void Parser::read_command_line(Options& o, int argc, const char* const* argv) {
    // Everything after "--" is an input of tokenize, also if it looks like an option.
    const bool has_inputs = command == Command::tokenize;
    const char* const* end = has_inputs ? std::find(argv, argv + argc, std::string("--")) : argv + argc;
    try {
        app.parse(reversed(*this, argv, end));
    } catch (const CLI::ArgumentMismatch& error) {
        const std::string text = error.what();
        fail(EXIT_USAGE, "%s needs a value (see --help)", text.substr(0, text.find(':')).c_str());
    } catch (const CLI::ParseError& error) {
        fail(EXIT_USAGE, "%s (see --help)", error.what());
    }
    if (help->count() + version->count() > 0) return;
    for (const Declared& d : all)
        ENSURE(d.option->count() == 0 || !d.option->results().back().starts_with("--") ||
                   !find(d.option->results().back()),
               "--%s needs a value (%s), but the option %s follows", d.name().c_str(), d.unit,
               d.option->results().back().c_str());
    for (const std::string& extra : app.remaining()) {
        const bool is_option = extra.size() > 1 && extra[0] == '-';
        ENSURE(!is_option, "%s", unknown(extra.substr(0, extra.find('='))).c_str());
        ENSURE(has_inputs, "unexpected argument '%s'; a command comes first, values follow their option (see --help)",
               extra.c_str());
        o.inputs.push_back(extra);
    }
    if (end < argv + argc) o.inputs.insert(o.inputs.end(), end + 1, argv + argc);
    read_given("");
    if (y->count() > 0) o.resume = number<int>("-y", y->results().back()) > 0;
}

static Command find_command(const std::string& first) {
    if (first.empty() || first[0] == '-') return Command::train;
    for (int i = 0; i < int(Command::help); i++)
        if (first == command_names[i]) return Command(i);
    for (const auto& row : replaced) ENSURE(first != row.names, "there is no %s; use %s", row.names, row.use);
    fail(EXIT_USAGE, "unknown command '%s'; the commands are train, generate, eval, plan and tokenize (see --help)",
         first.c_str());
}

// Resolves the ways to choose a model. --model is also llm.c's -e: "d12", "gpt2:d12", or a directory to start from.
static void sort_out_model(Options& o) {
    if (o.model.starts_with("gpt2:")) o.model.erase(0, 5);
    ENSURE(!o.model.ends_with(".bin"),
           "--model %s: llm.c's model files cannot be read; give --init a Hugging Face directory", o.model.c_str());
    if (o.model.find('/') != std::string::npos || o.model == "." || o.model == "..") {
        ENSURE(o.init.empty() || o.init == o.model, "--model %s and --init %s are two places to start from; give one",
               o.model.c_str(), o.init.c_str());
        o.init = std::exchange(o.model, "");
    }
    const bool custom = o.layers || o.heads || o.channels;
    ENSURE(!custom || (o.layers && o.heads && o.channels),
           "give --layers, --heads and --channels together, not --layers %d --heads %d --channels %d", o.layers,
           o.heads, o.channels);
    ENSURE(!custom || o.model.empty(), "--model %s and --layers %d are two ways to choose the shape; give one",
           o.model.c_str(), o.layers);
    ENSURE(o.init.empty() || (o.model.empty() && !custom),
           "--init %s has its own shape; leave out --model, --layers, --heads and --channels", o.init.c_str());
    o.default_model = o.model.empty() && o.init.empty() && !custom;
    if (o.default_model) o.model = "d12";
    if (!o.model.empty() || custom) check_config(model_config(o));
}

static void check_training(Options& o) {
    const bool trains = o.command == Command::train;
    sort_out_model(o);
    if (o.steps == -1) o.steps = 0;
    o.default_global_batch = o.global_batch_tokens == -1;
    if (o.default_global_batch) o.global_batch_tokens = o.model.empty() ? 0 : 524288;
    ENSURE(!trains || !o.train_data.empty(),
           "--train-data is missing: quote a pattern of token shards, such as "
           "--train-data 'data/x/train_*.bin' (train_gpt2 tokenize makes them)");
    ENSURE(o.master_weights == "on" || o.precision != "fp32",
           "--master-weights off needs bf16 weights; give --precision bf16");
    ENSURE(!trains || !o.keep_best || (!o.val_data.empty() && o.val_every > 0),
           "--keep-best needs validation losses: give --val-data, and --val-every above 0");
    ENSURE(o.tensor_parallel > 1 || !o.sequence_parallel,
           "--sequence-parallel needs --tensor-parallel 2 or more, on as many ranks; --sequence-parallel=false "
           "switches it off");
    ENSURE(o.tensor_parallel == 1 || o.precision != "fp8",
           "--precision fp8 does not combine with --tensor-parallel %d; give --precision bf16", o.tensor_parallel);
}

static void check_tokenize(Options& o) {
    ENSURE(!o.inputs.empty(), "no INPUT: name files or folders of text, or .jsonl files");
    ENSURE(!o.output.empty(), "--output is missing: the directory for the token shards");
    ENSURE((o.train_bpe > 0) != !o.tokenizer.empty(),
           "give one of --train-bpe TOKENS, to train a vocabulary, and --tokenizer, to use one that exists");
    ENSURE(o.val_tokens == 0 || o.val_fraction == -1,
           "--val-tokens %lld and --val-fraction %g are two ways to hold out text; give one",
           static_cast<long long>(o.val_tokens), o.val_fraction);
    if (o.val_fraction == -1) o.val_fraction = o.val_tokens > 0 ? 0.0 : 0.05;
}

Options parse_options(int argc, const char* const* argv) {
    const std::string program = argc > 0 ? argv[0] : "train_gpt2", first = argc > 1 ? argv[1] : "";
    Options o;
    o.command = find_command(first);
    if (o.command == Command::tokenize) o.output.clear();
    if (o.command == Command::eval) o.val_batches = 0;
    const bool trains = o.command == Command::train || o.command == Command::plan;
    Parser parser(o);
    const int skip = std::min(argc, first == command_name(o.command) ? 2 : 1);
    parser.read_command_line(o, argc - skip, argv + skip);
    if (parser.help->count() + parser.version->count() > 0) {
        o.text = parser.help->count() > 0 ? parser.help_text(program.substr(program.rfind('/') + 1)) : version() + "\n";
        o.command = Command::help;
        return o;
    }
    if (!o.config.empty()) parser.read_text(o, o.config, read_file(o.config, 1 << 20), false);
    ENSURE(!o.resume || !o.output.empty(), "--resume needs the --output that holds the checkpoints");
    const bool has_shape = parser.has_shape();
    if (o.resume) parser.read_saved(o);
    if (trains) check_training(o);
    o.default_model |= o.resume && !has_shape;  // the checkpoint's shape is used
    if (o.command == Command::tokenize) check_tokenize(o);
    ENSURE(o.command != Command::eval || !o.val_data.empty(),
           "--val-data is missing: quote a pattern of token shards to evaluate on");
    ENSURE(trains || o.command == Command::tokenize || !o.init.empty(),
           "--init is missing: a checkpoint, a run's output directory, or a Hugging Face directory");
    return o;
}

// ---- the current values

std::vector<Setting> settings(const Options& options) {
    Options o = options;
    std::vector<Setting> out;
    const Parser parser(o);
    for (const Declared& d : parser.all) {
        const std::string value = d.is_text() ? quoted(d.value()) : d.value();
        out.push_back({d.name(), value, !(d.kind & ONE_START), (d.kind & FREE) != 0});
    }
    return out;
}

std::string run_toml(const Options& o) {
    std::string text = "# The options of this run, which --resume reads. A new run may take them with --config.\n";
    text += "directory = " + quoted(current_directory()) + "\n";
    for (const Setting& s : settings(o))
        if (s.stored) text += s.name + " = " + s.value + "\n";
    return text;
}

std::string options_json(const Options& options) {
    Options o = options;
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
    const Parser parser(o);
    for (const Declared& d : parser.all)
        json[d.name()] = d.is_text() ? nlohmann::ordered_json(d.value()) : nlohmann::ordered_json::parse(d.value());
    return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // arguments need not be UTF-8
}

std::string changed_options(const Options& o) {
    std::string text;
    for (const Setting& s : settings(o))
        if (const auto was = o.saved.find(s.name);
            s.stored && !s.may_change && was != o.saved.end() && was->second != s.value)
            text += format("%s--%s %s (was %s)", text.empty() ? "" : ", ", s.name.c_str(), s.value.c_str(),
                           was->second.c_str());
    return text;
}

// ---- values that follow from the options

int heads_of(const Options& o) {
    const bool described = o.init.empty() && (!o.model.empty() || o.layers > 0);
    return described ? model_config(o).NH : 0;
}

GPT2Config model_config(const Options& o, int default_vocab) {
    GPT2Config config;
    if (o.layers > 0)
        config = {o.seq_len > 0 ? o.seq_len : 1024, 0, o.layers, o.heads, o.channels};
    else
        config = config_by_name(o.model.empty() ? "d12" : o.model);
    config.max_T = std::max(config.max_T, o.seq_len);
    config.V = o.vocab_size > 0 ? o.vocab_size : default_vocab;
    return config;
}

void resolve_steps(Options& o, int64_t steps_per_epoch) {
    ENSURE(o.steps > 0 || steps_per_epoch > 0,
           "the training data are too short for one step; lower --global-batch, or give --steps");
    if (o.steps == 0) o.steps = steps_per_epoch;
    const int64_t usual = std::min<int64_t>(700, o.steps / 10);
    o.warmup = o.given_warmup == -1 ? usual : o.given_warmup;
    ENSURE(o.warmup <= o.steps, "--warmup %lld is longer than the run of %lld step%s; try --warmup %lld",
           static_cast<long long>(o.warmup), static_cast<long long>(o.steps), o.steps == 1 ? "" : "s",
           static_cast<long long>(usual));
}
