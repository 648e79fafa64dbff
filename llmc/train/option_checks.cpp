// option_checks.cpp: refuses unknown options and those that contradict each other, and sets those that follow from
// others.
#include <algorithm>
#include <numeric>
#include <utility>

#include <unistd.h>

#include "base/common.h"
#include "base/files.h"
#include "base/print.h"
#include "text/tokenizer.h"
#include "train/options.h"

// Resolves the ways to choose a model. --model is also llm.c's -e: "d12", "gpt2:d12", or weights to start from.
static void sort_out_model(Options& o) {
    if (o.model.starts_with("gpt2:")) o.model.erase(0, 5);
    if (o.model.find('/') != std::string::npos || o.model == "." || o.model == ".." || o.model.ends_with(".bin")) {
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
    o.default_global_batch = o.global_batch == -1;
    if (o.default_global_batch) o.global_batch = o.model.empty() ? 0 : 524288;
    ENSURE(!trains || !o.train_data.empty(),
           "--train-data is missing: quote a pattern of token shards, such as "
           "--train-data 'data/x/train_*.bin' (train_gpt2 tokenize makes them)");
    ENSURE(o.master_weights || o.precision != Precision::fp32,
           "--master-weights off needs bf16 weights; give --precision bf16");
    ENSURE(!trains || !(o.keep_best || o.patience > 0) || (!o.val_data.empty() && o.val_every > 0),
           "%s needs validation losses: give --val-data, and --val-every above 0",
           o.patience > 0 ? "--patience" : "--keep-best");
    ENSURE(!trains || o.patience == 0 || (!o.output.empty() && o.checkpoint_every > 0),
           "--patience keeps the best checkpoint: give --output, and --checkpoint-every above 0");
    ENSURE(o.eval_every == 0 || !o.eval_task.empty(), "--eval-every needs --eval-task FILE");
    ENSURE(!trains || o.reference.empty() || o.reference == "none" || (!o.val_data.empty() && o.val_every > 0),
           "--reference compares validation losses: give --val-data, and --val-every above 0");
    ENSURE(!o.tensorboard || !o.output.empty(), "--tensorboard writes into --output, which is empty; name a directory");
    ENSURE(o.schedule == Decay::wsd || o.cooldown == Options().cooldown,
           "--cooldown %g needs --schedule wsd; with --schedule %s leave it at %g", o.cooldown,
           option_text(o, "schedule").c_str(), Options().cooldown);
    ENSURE(o.tensor_parallel > 1 || !o.sequence_parallel,
           "--sequence-parallel needs --tensor-parallel 2 or more, on as many ranks; --sequence-parallel=false "
           "switches it off");
    ENSURE(o.tensor_parallel == 1 || o.precision != Precision::fp8,
           "--precision fp8 does not combine with --tensor-parallel %d; give --precision bf16", o.tensor_parallel);
}

static void check_tokenize(Options& o) {
    ENSURE(!o.inputs.empty(), "no INPUT: name files or folders of text, JSON, CSV or Parquet, or - for stdin");
    ENSURE(!o.output.empty(), "--output is missing: the directory for the token shards");
    ENSURE((o.train_bpe > 0) != !o.tokenizer.empty(),
           "give one of --train-bpe TOKENS, to train a vocabulary, and --tokenizer, to use one that exists");
    ENSURE(o.train_bpe == 0 || o.train_bpe >= MIN_VOCAB_SIZE,
           "--train-bpe %d must be %d (the 256 bytes and <|endoftext|>) or more", o.train_bpe, MIN_VOCAB_SIZE);
    ENSURE(
        !o.special_tokens || o.train_bpe == 0,
        "--special-tokens needs a --tokenizer; with --train-bpe, --split end-of-text cuts the text at <|endoftext|>");
    ENSURE(o.val_tokens == 0 || o.val_fraction == -1,
           "--val-tokens %lld and --val-fraction %g are two ways to hold out text; give one",
           static_cast<long long>(o.val_tokens), o.val_fraction);
    if (o.val_fraction == -1) o.val_fraction = o.val_tokens > 0 ? 0.0 : 0.05;
}

static void check_export(Options& o) {
    ENSURE(o.inputs.size() == 2,
           "export takes a model and a new file, such as: export out/d12 d12.gguf --type q8_0; it got %s",
           counted(int64_t(o.inputs.size()), "name").c_str());
    ENSURE(o.inputs[1].ends_with(".gguf"), "%s: the file to write must end in .gguf", o.inputs[1].c_str());
    o.init = o.inputs[0];
}

static void check_eval(const Options& o) {
    const int given = !o.val_data.empty() + !o.task.empty() + !o.text.empty();
    ENSURE(given > 0, "--val-data is missing: quote a pattern of token shards to evaluate, or give --task or --text");
    ENSURE(given == 1, "--val-data, --task and --text are three things to evaluate on; give one");
    ENSURE(!o.task.empty() || (o.rows.empty() && !o.prepend_eot), "--rows and --prepend-eot need --task FILE");
    ENSURE(!o.text.empty() || o.stride == 0, "--stride needs --text FILE");
    ENSURE(!o.text.empty() || o.text_key == "text", "--text-key needs --text FILE");
    ENSURE(!o.val_data.empty() || o.val_tokens == 0, "--val-tokens needs --val-data; tasks and texts are read whole");
}

// Refuses what --ranks N would have to share among its ranks, which have no stdin and no files that the caller opened.
static void check_shared(const Options& o) {
    if (o.ranks == 0 || o.ranks == 1 || o.command == Command::plan) return;
    for (const auto& [name, path] : {std::pair("--config", o.config),
                                     {"--text", o.text},
                                     {"--task", o.task},
                                     {"--prompt-file", o.reads_stdin ? "" : o.prompt_file}})
        ENSURE(path != "-" && path != "/dev/stdin" && !path.starts_with("/dev/fd/") && !is_pipe(path),
               "%s %s: the ranks of --ranks cannot share a pipe or stdin; write its content to a file, and name that",
               name, path.c_str());
}

// Puts each path of a list in a line. A comma stays in the longest name that exists.
static void put_in_lines(std::string& files) {
    for (size_t begin = 0, end; begin < files.size(); begin = end + 1) {
        end = files.size();
        while (!path_exists(files.substr(begin, end - begin))) {
            const size_t separator = files.find_last_of(",\n", end - 1);
            if (separator == files.npos || separator <= begin) break;
            end = separator;
        }
        if (end < files.size()) files[end] = '\n';
    }
}

void check_options(Options& o) {
    const bool trains = o.command == Command::train || o.command == Command::plan;
    for (std::string* files : {&o.eval_task, &o.task}) put_in_lines(*files);
    if (trains) check_training(o);
    if (o.command == Command::tokenize) check_tokenize(o);
    if (o.command == Command::export_model) check_export(o);
    if (o.command == Command::eval) check_eval(o);
    check_shared(o);
    ENSURE(o.prompt.empty() || o.prompt_file.empty(), "--prompt and --prompt-file are two texts to continue; give one");
    ENSURE(!o.reads_stdin || o.tensor_parallel == 1 || !isatty(STDIN_FILENO),
           "one rank alone takes lines from a terminal; with --tensor-parallel %d give --prompt or --prompt-file",
           o.tensor_parallel);
    ENSURE(trains || o.command == Command::tokenize || !o.init.empty(),
           "--init is missing: a checkpoint, a run's output directory, or a Hugging Face directory");
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
    o.warmup_steps = o.warmup == -1 ? usual : o.warmup;
    ENSURE(o.warmup_steps <= o.steps, "--warmup %lld is longer than the run of %lld step%s; try --warmup %lld",
           static_cast<long long>(o.warmup_steps), static_cast<long long>(o.steps), o.steps == 1 ? "" : "s",
           static_cast<long long>(usual));
}

// ---- recipes

// Compiled in, so that an installed program has them in any folder.
static constexpr std::pair<const char*, const char*> recipes[] = {
#include <recipes.inc>  // the files of recipes/, by mk/version.mk
};

std::string recipe_text(const std::string& name) {
    for (const auto& [known, text] : recipes)
        if (name == known) return text;
    fail(EXIT_USAGE, "--recipe %s is not known; give fast|gpt2, or a file with --config", shell_word(name).c_str());
}

// ---- names that are no options

// Options of nanoGPT and llm.c. --cudnn is of version 0.3.0, and goes after the next one.
static constexpr struct {
    const char *name, *use;
} replaced[] = {
    {"--cudnn", "--attention auto in place of on, mma in place of off"},
    {"--batch-size", "--micro-batch, in sequences per rank; --global-batch is in tokens per step"},
    {"--gradient-accumulation-steps", "--global-batch, in tokens per step over all ranks"},
    {"--max-iters", "--steps"},
    {"--learning-rate", "--lr"},
    {"--block-size", "--seq-len"},
    {"--eval-iters", "--val-tokens, in tokens over all ranks"},
    {"-m", "--val-tokens, in tokens over all ranks"},
    {"-r", "--recompute none, gelu or layer"},
    {"-w", "--master-weights on or off"},
    {"-f", "--precision"},
};

// Counts the insertions, deletions and substitutions that turn a into b.
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

std::string unknown_option(const std::string& name, const std::vector<std::string>& known) {
    std::string dashed = name, nearest;
    if (name.starts_with("--")) std::ranges::replace(dashed, '_', '-');  // --max_iters
    for (const auto& row : replaced)
        if (row.name == dashed) return format("there is no %s; use %s", name.c_str(), row.use);
    size_t least = 1 + std::max<size_t>(2, name.size() / 3);
    for (const std::string& other : known) {
        const bool part = name.size() > 4 && other.find(name.substr(2)) != std::string::npos;  // --batch
        const size_t distance = part ? 1 : edit_distance(name, "--" + other);
        if (distance < least) nearest = "; did you mean --" + other + "?", least = distance;
    }
    return format("unknown option %s%s (see --help)", name.c_str(), name.starts_with("--") ? nearest.c_str() : "");
}
