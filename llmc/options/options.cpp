#include "options/options.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "base/terminal.h"
#include "base/threads.h"
#include "options/arguments.h"
#include "options/foreign_options.h"

using Json = nlohmann::ordered_json;

static constexpr const char* command_names[] = {"train", "generate", "eval", "plan", "tokenize", "help"};

const char* command_name(Command command) { return command_names[int(command)]; }

std::string version() {
#ifdef GIT_COMMIT
    return "train_gpt2 0.1.0 (commit " GIT_COMMIT ")";
#else
    return "train_gpt2 0.1.0";
#endif
}

// ---- the options, section by section

static void model_options(OptionSpecs& all, Options& o) {
    Section s{all, "model"};
    s.add("-e,--model", o.model, "", "NAME",
          "GPT-2's shape: d12, d24, d36, d48 (or gpt2, gpt2-medium, gpt2-large, gpt2-xl)")
        .shown("d12, unless --init or --layers")
        .planned()
        .of_shape();
    s.add("--init", o.init, "", "DIR", "start from the weights of a Hugging Face directory or a checkpoint")
        .planned()
        .of_shape()
        .may_change()
        .is_path();
    s.add("--layers", o.layers, 0, "N", "number of layers; with --heads and --channels")
        .at_least(0)
        .shown("")
        .planned()
        .of_shape();
    s.add("--heads", o.heads, 0, "N", "attention heads per layer").at_least(0).shown("").planned().of_shape();
    s.add("--channels", o.channels, 0, "N", "embedding width; a multiple of --heads")
        .at_least(0)
        .shown("")
        .planned()
        .of_shape();
    s.add("--vocab-size", o.vocab_size, 0, "TOKENS", "vocabulary size; 0 = the tokenizer's, or 50257")
        .between(0, 1 << 20)
        .planned();
    s.add("-t,--seq-len", o.seq_len, 0, "TOKENS", "sequence length (T); 0 = the model's number of positions")
        .between(0, 1 << 20)
        .planned();
}

static void precision_options(OptionSpecs& all, Options& o, const char* title, const char* choices, const char* help) {
    Section s{all, title};
    s.add("--precision", o.precision, "auto", choices, help).one_of_unit().planned();
}

static void training_precision(OptionSpecs& all, Options& o) {
    precision_options(all, o, "model", "fp32|bf16|fp8|auto",
                      "dtype of weights and activations; fp8 = bf16 with the layers' matmuls in FP8; auto = bf16 where "
                      "it is faster");
}

static void inference_precision(OptionSpecs& all, Options& o, const char* title) {
    precision_options(all, o, title, "fp32|bf16|auto",
                      "dtype of weights and activations; auto = bf16 where it is faster");
}

static void data_options(OptionSpecs& all, Options& o) {
    Section s{all, "data"};
    s.add("-i,--train-data", o.train_data, "", "GLOB", "token shards to train on, quoted: 'data/x/train_*.bin'")
        .planned()
        .is_pattern();
    s.add("-j,--val-data", o.val_data, "", "GLOB", "token shards to validate on").is_pattern();
    s.add("--tokenizer", o.tokenizer, "", "DIR|FILE", "tokenizer for samples and checkpoints")
        .shown("beside the training data")
        .planned()
        .may_change()
        .is_path();
}

static void batch_options(OptionSpecs& all, Options& o) {
    Section s{all, "batch"};
    s.add("-b,--micro-batch", o.micro_batch, 4, "SEQUENCES|auto",
          "sequences per rank and forward pass (B); auto = fast, and fits")
        .between(1, 1 << 20)
        .or_word("auto", 0)
        .planned();
    s.add("-d,--global-batch", o.global_batch_tokens, -1, "TOKENS",
          "tokens per optimizer step, over all ranks; 0 = one micro-batch per rank")
        .between(0, int64_t(1) << 40)
        .shown("524288 for d12 to d48, else 0")
        .planned();
    s.add("--recompute", o.recompute, "none", "none|gelu|layer", "activations to recompute in backward, to save memory")
        .one_of_unit()
        .planned();
    s.add("--logit-chunks", o.logit_chunks, 0, "N", "compute the logits in N pieces, to save memory; 0 = automatic")
        .renamed_from("--head-chunks")
        .between(0, 1 << 20)
        .planned();
    s.add("--master-weights", o.master_weights, "on", "on|off",
          "fp32 copies of bf16 weights; off = stochastic rounding, to save memory")
        .one_of_unit()
        .planned();
}

static void start_options(OptionSpecs& all, Options& o) {
    Section s{all, "ranks"};
    s.add("--gpus", o.gpus, "", "all|N|LIST", "train on these GPUs of this machine, one rank each: all, 4, or 0,2,3")
        .not_empty()
        .planned()
        .of_one_start()
        .may_differ();
    s.add("--ranks", o.ranks, 0, "N", "train on N CPU ranks of this machine, started by mpirun")
        .between(0, 1 << 16)
        .shown("")
        .planned()
        .of_one_start();
    s.add("--nnodes", o.nnodes, 1, "N", "number of machines; start the same command on each, with its number")
        .between(1, 1 << 16)
        .planned()
        .of_one_start();
    s.add("--node-rank", o.node_rank, -1, "N", "number of this machine, from 0")
        .between(-1, 1 << 16)
        .shown("")
        .of_one_start()
        .may_differ();
    s.add("--max-restarts", o.max_restarts, 0, "N",
          "with --gpus or --ranks: start the ranks again, with --resume, after at most N failures")
        .between(0, 1000000)
        .of_one_start();
}

static void rank_options(OptionSpecs& all, Options& o) {
    Section s{all, "ranks"};
    s.add("-z,--zero", o.zero, 0, "0|1|2", "ZeRO stage; 1 = shard the optimizer's state over ranks, 2 = gradients too")
        .between(0, 2)
        .planned()
        .may_change();
    s.add("--grad-dtype", o.grad_dtype, "fp32", "fp32|bf16", "dtype of gradients in collectives")
        .one_of_unit()
        .planned();
    s.add("--deterministic-ranks", o.virtual_ranks, 0, "N",
          "add gradients in the order of N ranks: the same bits on 1, 2, 4 .. N CPU ranks, or 2 GPUs; 0 = off")
        .between(0, 1024)
        .planned();
    s.add_flag("--share-gpu", o.share_gpu, "let ranks share a GPU, through host memory; for tests");
    s.add("--rank", o.rank, -1, "N", "rank of this process, if no launcher sets it")
        .between(-1, 1 << 20)
        .shown("")
        .of_one_start()
        .may_differ();
    s.add("--world-size", o.world_size, -1, "N", "number of ranks; plan: ranks to plan for")
        .between(-1, 1 << 20)
        .shown("")
        .planned()
        .of_one_start();
    s.add("--local-rank", o.local_rank, -1, "N", "GPU of this rank on its host")
        .between(-1, 1 << 20)
        .shown("")
        .of_one_start()
        .may_differ();
    s.add("--rendezvous", o.rendezvous, "", "HOST:PORT", "address of rank 0, for ranks that do not use MPI")
        .of_one_start();
    s.add("--run-id", o.run_id, "", "TEXT", "name that separates runs with the same rendezvous address").of_one_start();
    s.add("--rendezvous-timeout", o.rendezvous_timeout, 300.0, "SECONDS", "time to wait for all ranks at the start")
        .between(1.0, 1e6)
        .of_one_start();
    s.add_flag("--print-launch", o.print_launch, "print this process's rank and how it joins the others, then exit")
        .of_one_start();
}

static void optimizer_options(OptionSpecs& all, Options& o) {
    Section s{all, "optimizer"};
    s.add("-x,--steps", o.steps, 0, "STEPS", "optimizer steps of the whole run; 0 or -1 = one epoch")
        .between(-1, std::numeric_limits<int>::max())
        .planned();
    s.add("--stop-after", o.stop_after, 0, "STEPS",
          "end this run after N more steps, without changing the schedule; 0 = off")
        .at_least(0)
        .of_one_start();
    s.add("-l,--lr", o.lr, 6e-4, "RATE", "peak learning rate").between(0.0, 100.0);
    s.add("-k,--schedule", o.schedule, "cosine", "cosine|linear|constant|wsd",
          "learning rate after warmup; wsd = constant, then 1 - sqrt in the last fifth")
        .one_of_unit();
    s.add("-u,--warmup", o.given_warmup, -1, "STEPS", "steps of linear warmup")
        .at_least(0)
        .shown("700, or a tenth of a shorter run");
    s.add("-q,--final-lr-fraction", o.final_lr_fraction, 0.1, "FRACTION",
          "last step's learning rate, as a fraction of --lr")
        .between(0.0, 1.0);
    s.add("--optimizer", o.optimizer, "adamw", "adamw", "update rule").one_of_unit().planned();
    s.add("-c,--weight-decay", o.weight_decay, 0.1, "FACTOR",
          "AdamW's weight decay, of matrices and embeddings only; 0 = off")
        .between(0.0, 100.0);
    s.add("--beta1", o.beta1, 0.9, "FACTOR", "AdamW's decay rate of the first moment").from_to_below(0.0, 1.0);
    s.add("--beta2", o.beta2, 0.95, "FACTOR", "AdamW's decay rate of the second moment").from_to_below(0.0, 1.0);
    s.add("--eps", o.eps, 1e-8, "VALUE", "AdamW's epsilon").between(1e-30, 1.0);
    s.add("--grad-clip", o.grad_clip, 1.0, "NORM", "clip gradients to this global norm; 0 = off").between(0.0, 1e9);
}

static void report_options(OptionSpecs& all, Options& o) {
    Section s{all, "evaluation and samples"};
    s.add("-v,--val-every", o.val_every, 250, "STEPS",
          "compute the validation loss every N steps and after the last; 0 = never")
        .at_least(0)
        .may_change();
    s.add("--val-batches", o.val_batches, 20, "BATCHES",
          "micro-batches per validation over all ranks, always the same ones; 0 = all")
        .at_least(0)
        .may_change();
    s.add("-s,--sample-every", o.sample_every, 0, "STEPS", "generate text every N steps; 0 = never")
        .at_least(0)
        .may_change();
    s.add("-g,--sample-tokens", o.sample_tokens, 64, "TOKENS", "length of a sample").between(1, 1 << 20).may_change();
    s.add("--sample-prompt", o.sample_prompt, "", "TEXT", "prompt of the samples").shown("<|endoftext|>").may_change();
}

static void checkpoint_options(OptionSpecs& all, Options& o) {
    Section s{all, "output"};
    s.add("-o,--output", o.output, "out", "DIR", "directory for log and checkpoints; '' = write nothing")
        .planned()
        .of_one_start();
    s.add("-n,--checkpoint-every", o.checkpoint_every, 1000, "STEPS",
          "save every N steps and after the last; 0 = never")
        .at_least(0)
        .may_change();
    s.add("--keep", o.keep, 3, "CHECKPOINTS", "number of checkpoints to keep; 0 = all")
        .at_least(0)
        .planned()
        .may_change();
    s.add_flag("--resume", o.resume,
               "continue from the newest checkpoint in --output (-y 1); options not given come from that run", "-y")
        .planned()
        .of_one_start();
    s.add("--export-dtype", o.export_dtype, "fp32", "fp32|bf16", "dtype of model.safetensors").one_of_unit().planned();
}

static void seed_option(OptionSpecs& all, Options& o, const char* help) {
    Section{all, "run"}.add("--seed", o.seed, 42, "N", help);
}

static void threads_option(OptionSpecs& all, Options& o) {
    Section{all, "run"}
        .add("--threads", o.threads, 0, "N", "CPU threads; 0 = one per core")
        .between(0, MAX_THREADS)
        .planned()
        .may_change()
        .may_differ();
}

static void gpu_options(OptionSpecs& all, Options& o) {
    Section s{all, "GPU"};
    s.add("--cudnn", o.cudnn, "on", "on|off", "use cuDNN for bf16 attention; off = the program's own kernels")
        .one_of_unit();
    s.add("--deterministic", o.deterministic, "on", "on|off", "same bits in every run; off = faster cuDNN backward")
        .one_of_unit();
    s.add_flag("--debug-sync", o.debug_sync, "wait for every kernel, so that an error names it; slow");
    s.add("--cuda-graph", o.cuda_graph, "on", "on|off", "replay each micro-step as a CUDA graph").one_of_unit();
    s.add("--comm-sms", o.comm_sms, 0, "N",
          "multiprocessors that NCCL uses, and that matmuls leave to it; 0 = the libraries choose")
        .between(0, 64);
    s.add("--autotune", o.autotune, "on", "on|off",
          "before the first step, time the algorithms of matmul and attention; choices are kept in ~/.cache/train_gpt2")
        .one_of_unit()
        .was_flag();
}

static void quiet_option(OptionSpecs& all, Options& o) {
    Section{all, "run"}.add_flag("--quiet", o.quiet, "print errors only").of_one_start();
}

static void log_options(OptionSpecs& all, Options& o) {
    Section s{all, "run"};
    s.add("--log-every", o.log_every, 1, "STEPS",
          "print a line every N steps when the output is no terminal; log.jsonl has every step")
        .at_least(1)
        .may_change();
    s.add("--progress", o.progress, "auto", "auto|tty|plain", "live line, or one line per step")
        .one_of_unit()
        .may_change();
    s.add("--trace", o.trace, "", "FILE", "write a timeline of all ranks for ui.perfetto.dev").of_one_start();
    s.add("--trace-steps", o.trace_steps, 20, "STEPS", "steps in the trace, from the start of this run")
        .at_least(1)
        .of_one_start();
    quiet_option(all, o);
}

static void generate_options(OptionSpecs& all, Options& o) {
    Section s{all, "generate"};
    s.add("--init", o.init, "", "DIR", "Hugging Face directory, checkpoint, or a run's output (newest checkpoint)");
    s.add("--prompt", o.prompt, "", "TEXT", "text to continue").shown("<|endoftext|>");
    s.add("--max-tokens", o.max_tokens, 256, "TOKENS", "largest number of tokens to generate").between(1, 1 << 20);
    s.add("--temperature", o.temperature, 0.8, "VALUE", "divisor of the logits; 0 = always the likeliest token")
        .between(0.0, 1000.0);
    s.add("--top-k", o.top_k, 200, "TOKENS", "sample from the k likeliest tokens; 0 = off").at_least(0);
    s.add("--top-p", o.top_p, 1.0, "FRACTION", "sample from the likeliest tokens whose probabilities sum to p; 1 = off")
        .between(1e-9, 1.0);
    s.add("--num-samples", o.num_samples, 1, "N", "number of texts").at_least(1);
    s.add("--tokenizer", o.tokenizer, "", "DIR|FILE", "tokenizer of the prompt and the text")
        .shown("the one in --init");
    inference_precision(all, o, "generate");
}

static void eval_options(OptionSpecs& all, Options& o) {
    Section s{all, "eval"};
    s.add("--init", o.init, "", "DIR", "Hugging Face directory, checkpoint, or a run's output (newest checkpoint)");
    s.add("-j,--val-data", o.val_data, "", "GLOB", "token shards to evaluate");
    s.add("-b,--micro-batch", o.micro_batch, 4, "SEQUENCES", "sequences per forward pass (B)").between(1, 1 << 20);
    s.add("-t,--seq-len", o.seq_len, 0, "TOKENS", "sequence length (T); 0 = the model's number of positions")
        .between(0, 1 << 20);
    s.add("--batches", o.val_batches, 0, "BATCHES", "micro-batches to evaluate; 0 = all").at_least(0);
    inference_precision(all, o, "eval");
}

static void tokenize_options(OptionSpecs& all, Options& o) {
    Section s{all, "tokenize"};
    s.add("-o,--output", o.output, "", "DIR", "directory for train_*.bin, val_*.bin and the tokenizer");
    s.add("--train-bpe", o.train_bpe, 0, "TOKENS", "train a vocabulary of this size on the text; 0 = off")
        .between(0, 1 << 20);
    s.add("--tokenizer", o.tokenizer, "", "DIR|FILE",
          "existing tokenizer: tokenizer.json, or vocab.json and merges.txt");
    s.add("--val-fraction", o.val_fraction, -1, "FRACTION", "fraction of the text held out for validation; 0 = none")
        .between(0.0, 0.5)
        .shown("0.05, unless --val-tokens");
    s.add("--val-tokens", o.val_tokens, 0, "TOKENS", "hold out the first N tokens instead, as in llm.c; 0 = off")
        .at_least(0);
    s.add("--shard-tokens", o.shard_tokens, 100000000, "TOKENS", "tokens per shard").between(1, INT32_MAX);
    s.add_flag("--replace", o.replace, "replace the shards in --output");
    s.add("--split", o.split, "none", "none|blank-lines|end-of-text", "where to cut text files into documents")
        .one_of_unit();
    s.add("--text-key", o.text_key, "text", "KEY", "key of the text in .jsonl objects");
    threads_option(all, o);
    quiet_option(all, o);
}

// The options of a command, in the order of --help.
static OptionSpecs declare(Command command, Options& o) {
    OptionSpecs all;
    switch (command) {
        case Command::train:
        case Command::plan:
            data_options(all, o);
            model_options(all, o);
            training_precision(all, o);
            batch_options(all, o);
            start_options(all, o);
            rank_options(all, o);
            optimizer_options(all, o);
            report_options(all, o);
            checkpoint_options(all, o);
            gpu_options(all, o);
            seed_option(all, o, "seed of initial weights, data order and samples");
            threads_option(all, o);
            log_options(all, o);
            break;
        case Command::generate:
            generate_options(all, o);
            seed_option(all, o, "seed of the samples; the same seed gives the same text");
            threads_option(all, o);
            break;
        case Command::eval:
            eval_options(all, o);
            threads_option(all, o);
            break;
        case Command::tokenize:
            tokenize_options(all, o);
            break;
        case Command::help:
            break;
    }
    return all;
}

// ---- parsing

static const OptionSpec* find_spec(const OptionSpecs& all, const std::string& name) {
    for (const OptionSpec& d : all)
        if (d.is_called(name)) return &d;
    return nullptr;
}

// Refuses an option of another trainer if this command has the counterpart, which the error names, or if no command
// has one.
static void refuse_foreign(const OptionSpecs& all, const std::string& name) {
    const ForeignOption* foreign = find_foreign_option(name);
    if (!foreign) return;
    const std::string own = own_option(*foreign);
    if (own.empty() || find_spec(all, own))
        fail(EXIT_USAGE, "unknown option %s, known from %s: here %s (see --help)", name.c_str(), foreign->whose,
             foreign->here);
}

// Refuses llm.c's options of two letters, which would be read as a letter and its value (-nk 5 as -n k), and its -h 1,
// which would be read as --help.
static void refuse_llmc_pairs(const OptionSpecs& all, const std::vector<std::string>& arguments) {
    for (size_t i = 0; i < arguments.size(); i++) {
        const std::string& name = arguments[i];
        const OptionSpec* before = i > 0 ? find_spec(all, arguments[i - 1]) : nullptr;
        const bool is_value = before && before->kind != ValueKind::flag;
        if (is_value || !name.starts_with("-") || name.starts_with("--")) continue;
        if (name.size() == 3) refuse_foreign(all, name);
        if (name == "-h" && i + 1 < arguments.size()) refuse_foreign(all, name + " " + arguments[i + 1]);
    }
}

static const std::vector<Command> commands = {Command::train, Command::generate, Command::eval, Command::plan,
                                              Command::tokenize};

static Command find_command(const std::string& first_argument) {
    if (first_argument.empty() || first_argument[0] == '-') return Command::train;
    std::vector<std::string> names;
    for (Command command : commands) {
        if (first_argument == command_name(command)) return command;
        names.push_back(command_name(command));
    }
    const std::string nearest = nearest_name(names, first_argument);
    ENSURE(
        !nearest.empty() || first_argument.find_first_of("./") == std::string::npos,
        "'%s' is not a command: every option has its name, as in --train-data 'data/x/train_*.bin', and tokenize FILE "
        "makes such data from text (see --help)",
        first_argument.c_str());
    fail(EXIT_USAGE,
         "unknown command '%s'%s (the commands are train, which needs no name, generate, eval, plan and tokenize, each "
         "with its own --help)",
         first_argument.c_str(), nearest.empty() ? "" : ("; did you mean " + nearest + "?").c_str());
}

// Refuses an unknown argument. The error suggests the other commands that have such an option, or the nearest option of
// this command.
[[noreturn]] static void refuse_unknown(Command command, const OptionSpecs& all, const std::string& argument) {
    if (argument.size() < 2 || argument[0] != '-')
        fail(EXIT_USAGE, "unexpected argument '%s'; a command comes first, values follow their option (see --help)",
             argument.c_str());
    const std::string name = argument.substr(0, argument.find('='));
    std::string others;
    for (Command other : commands) {
        Options o;
        for (const OptionSpec& d : declare(other, o))
            if (other != command && d.is_called(name))
                others += (others.empty() ? "" : ", ") + std::string(command_name(other));
    }
    if (!others.empty())
        fail(EXIT_USAGE, "%s has no option %s, which belongs to %s (see %s --help)", command_name(command),
             name.c_str(), others.c_str(), command_name(command));
    refuse_foreign(all, name);
    const std::string nearest = nearest_option(all, name);
    if (name.starts_with("--") && !nearest.empty())
        fail(EXIT_USAGE, "unknown option %s; did you mean %s? (see --help)", name.c_str(), nearest.c_str());
    fail(EXIT_USAGE, "unknown option %s (see --help)", name.c_str());
}

static std::string help_text(Command command, const std::string& program, const OptionSpecs& all) {
    const char* p = program.c_str();
    std::string out;
    if (command == Command::train) {
        out = format("usage: %s [train] [options]\n", p);
        out += format("       %s generate | eval | plan | tokenize [options]    each with its own --help\n", p);
    } else {
        const char* arguments =
            command == Command::tokenize ? "INPUT... [options]    files, or folders of them" : "[options]";
        out = format("usage: %s %s %s\n", p, command_name(command), arguments);
    }
    OptionSpecs shown = all;
    if (command == Command::plan) std::erase_if(shown, [](const OptionSpec& d) { return !d.planned; });
    out += list_options(shown);
    if (command == Command::plan)
        out += format("\nThe other options of %s train are accepted and have no effect.\n", p);
    return out +
           "\n  -h,--help, --version\nA value in [] is the default. --name VALUE and --name=VALUE are the same.\n";
}

// Resolves the ways to choose a model. --model is also llm.c's -e: "d12", "gpt2:d12", or a directory to start from.
static void sort_out_model(Options& o) {
    if (o.model.starts_with("gpt2:")) o.model.erase(0, 5);
    ENSURE(!o.model.ends_with(".bin"),
           "--model %s: llm.c's model files cannot be read; give --init a Hugging Face directory", o.model.c_str());
    const bool directory = o.model.find('/') != std::string::npos || o.model == "." || o.model == "..";
    if (directory) {
        ENSURE(o.init.empty() || o.init == o.model, "--model %s and --init %s are two places to start from; give one",
               o.model.c_str(), o.init.c_str());
        o.init = o.model;
        o.model.clear();
    }
    const bool custom = o.layers || o.heads || o.channels;
    std::string given, missing;
    for (const auto& [name, value] :
         {std::pair("--layers", o.layers), {"--heads", o.heads}, {"--channels", o.channels}})
        if (value)
            given += format("%s%s %d", given.empty() ? "" : " ", name, value);
        else
            missing += format("%s%s", missing.empty() ? "" : ", ", name);
    ENSURE(!custom || o.model.empty(), "--model %s and %s are two ways to choose the shape; give one", o.model.c_str(),
           given.c_str());
    ENSURE(o.init.empty() || (o.model.empty() && !custom),
           "--init %s has its own shape; leave out --model, --layers, --heads and --channels", o.init.c_str());
    ENSURE(!custom || missing.empty(), "give --layers, --heads and --channels together (missing: %s)%s",
           missing.c_str(), o.resume ? "; or leave them out, for --resume keeps the run's shape" : "");
    o.default_model = o.model.empty() && o.init.empty() && !custom;
    if (o.default_model) o.model = "d12";
    if (!o.model.empty() || custom) check_config(model_config(o));
}

static void check_start(const Options& o) {
    const bool gpus = !o.gpus.empty();
    ENSURE(!gpus || o.ranks == 0, "--gpus %s starts GPU ranks and --ranks %d CPU ranks; give one", o.gpus.c_str(),
           o.ranks);
    ENSURE(gpus || o.node_rank < 0, "--node-rank needs --gpus and --nnodes");
    ENSURE(gpus || o.nnodes == 1,
           "--nnodes %d needs --gpus; CPU ranks of several machines start by mpirun --host, or by srun", o.nnodes);
    ENSURE(o.max_restarts == 0 || gpus || o.ranks > 0, "--max-restarts needs --gpus or --ranks");
    ENSURE(o.max_restarts == 0 || o.nnodes == 1,
           "--max-restarts is for one machine; torchrun restarts the ranks of --nnodes %d together", o.nnodes);
    ENSURE(o.max_restarts == 0 || (!o.output.empty() && o.checkpoint_every > 0),
           "--max-restarts needs checkpoints to continue from: an --output, and --checkpoint-every above 0");
    ENSURE(!o.share_gpu || !gpus, "--share-gpu is for ranks that mpirun starts; --gpus gives each rank its own GPU");
}

static void check_training(Options& o, bool plan) {
    sort_out_model(o);
    if (o.steps == -1) o.steps = 0;
    if (o.global_batch_tokens == -1) o.global_batch_tokens = o.model.empty() ? 0 : 524288;
    ENSURE(plan || o.print_launch || o.needs_saved || !o.train_data.empty(),
           "--train-data is missing: quote a pattern of token shards, such as "
           "--train-data 'data/x/train_*.bin' (train_gpt2 tokenize makes them)");
    ENSURE(plan || !o.val_every_given || o.val_every == 0 || o.needs_saved || !o.val_data.empty(),
           "--val-every %lld needs --val-data, the shards to validate on", static_cast<long long>(o.val_every));
    ENSURE(o.master_weights == "on" || o.precision != "fp32",
           "--master-weights off needs bf16 weights; give --precision bf16");
    ENSURE(!o.resume || !o.output.empty(), "--resume needs the --output that holds the checkpoints");
    check_start(o);
}

static void check_together(Options& o) {
    switch (o.command) {
        case Command::train:
            check_training(o, false);
            break;
        case Command::plan:
            check_training(o, true);
            break;
        case Command::eval:
            ENSURE(!o.val_data.empty(), "--val-data is missing: quote a pattern of token shards to evaluate on");
            [[fallthrough]];
        case Command::generate:
            ENSURE(!o.init.empty(),
                   "--init is missing: a checkpoint, a run's output directory, or a Hugging Face directory");
            break;
        case Command::tokenize:
            ENSURE(!o.inputs.empty(), "no INPUT: name files or folders of text, or .jsonl files");
            ENSURE(!o.output.empty(), "--output is missing: the directory for the token shards");
            ENSURE((o.train_bpe > 0) != !o.tokenizer.empty(),
                   "give one of --train-bpe TOKENS, to train a vocabulary, and --tokenizer, to use one that exists");
            ENSURE(o.val_tokens == 0 || o.val_fraction == -1,
                   "--val-tokens %lld and --val-fraction %g are two ways to hold out text; give one",
                   static_cast<long long>(o.val_tokens), o.val_fraction);
            if (o.val_fraction == -1) o.val_fraction = o.val_tokens > 0 ? 0.0 : 0.05;
            break;
        case Command::help:
            break;
    }
}

// The saved value of an option as read_value takes it.
static std::string saved_text(const OptionSpec& spec, const Json& value) {
    if (value.is_boolean() && spec.kind == ValueKind::flag) return value.get<bool>() ? "1" : "0";
    if (value.is_boolean() && spec.was_flag) return value.get<bool>() ? "on" : "off";
    if (value.is_string()) return value.get<std::string>();
    const std::string text = value.dump();
    ENSURE(spec.kind != ValueKind::text, "%s: %s is not a text", spec.long_name().c_str(), text.c_str());
    return text;
}

// Sets the field of an option to its saved value, unless that is the default, which the field has.
static void read_saved(const OptionSpec& spec, const Json& value, Options& o) {
    const std::string name = spec.long_name(), text = saved_text(spec, value);
    ENSURE(text.find("\xef\xbf\xbd") == std::string::npos, "%s %s: run.json cannot hold bytes that are not UTF-8",
           name.c_str(), text.c_str());
    if (text == spec.text()) return;
    read_value(spec, text);
    o.taken += (o.taken.empty() ? "" : " ") + name;
    if (spec.kind != ValueKind::flag) o.taken += " " + shell_word(text);
}

// Adds the saved options to those given, whose fields are set; the other fields have their defaults. Returns whether
// the shape is the saved one.
static bool add_saved(const OptionSpecs& all, const std::string& saved, const ParsedArgs& given, Options& o) {
    bool shape_given = false;
    for (const auto& [i, text] : given.values) shape_given |= all[i].of_shape;
    const Json json = Json::parse(saved);
    for (size_t i = 0; i < all.size(); i++) {
        const std::string name = all[i].long_name();
        auto found = json.find(name.substr(2));
        if (found == json.end() && !all[i].old_name.empty()) found = json.find(all[i].old_name.substr(2));
        if (found == json.end() || given.values.count(i) || all[i].of_one_start) continue;
        if (shape_given && all[i].of_shape) continue;
        try {
            read_saved(all[i], *found, o);
        } catch (const Error& error) {
            fail(EXIT_BAD_DATA, "%s (from %s/run.json; give %s on the command line)", error.what(), o.output.c_str(),
                 name.c_str());
        }
    }
    return !shape_given;
}

// Checks the options given together with the saved ones. If none of the options that a resume could take was given,
// run.json alone is to blame.
static void check_with_saved(const OptionSpecs& all, const ParsedArgs& given, Options& o) {
    const bool only_saved = std::all_of(given.values.begin(), given.values.end(),
                                        [&](const auto& value) { return all[value.first].of_one_start; });
    try {
        check_together(o);
    } catch (const Error& error) {
        if (only_saved)
            fail(EXIT_BAD_DATA, "%s (from %s/run.json; give these options on the command line)", error.what(),
                 o.output.c_str());
        fail(error.exit_code, "%s (options that are not given come from %s/run.json)", error.what(), o.output.c_str());
    }
}

Options parse_options(int argc, const char* const* argv, const std::string& saved) {
    Options o{};
    const std::string program =
        argc > 0 ? std::string(argv[0]).substr(std::string(argv[0]).rfind('/') + 1) : "train_gpt2";
    o.command = find_command(argc > 1 ? argv[1] : "");
    const int first = argc > 1 && argv[1] == std::string(command_name(o.command)) ? 2 : 1;
    for (Command command : {Command::tokenize, Command::eval, Command::generate, Command::train, o.command})
        for (const OptionSpec& d : declare(command, o)) d.reset();  // the command's own defaults are set last

    const OptionSpecs all = declare(o.command, o);
    if (o.command == Command::train || o.command == Command::plan)
        refuse_llmc_pairs(all, std::vector<std::string>(argv + std::min(first, argc), argv + argc));
    ParsedArgs given = split_arguments(all, o.command == Command::tokenize, std::max(0, argc - first), argv + first);
    if (given.help || given.version) {
        o.text = given.help ? help_text(o.command, program, all) : version() + "\n";
        o.command = Command::help;
        return o;
    }
    if (!given.unknown.empty()) refuse_unknown(o.command, all, given.unknown.front());
    o.val_every_given = std::any_of(given.values.begin(), given.values.end(),
                                    [&](const auto& value) { return all[value.first].long_name() == "--val-every"; });
    read_values(all, given);
    const bool saved_shape = !saved.empty() && add_saved(all, saved, given, o);
    o.inputs = std::move(given.inputs);
    o.renamed = std::move(given.renamed);
    const bool trains = o.command == Command::train || o.command == Command::plan;
    o.needs_saved = trains && o.resume && saved.empty();
    saved.empty() ? check_together(o) : check_with_saved(all, given, o);
    o.default_model |= saved_shape;  // the user gave no shape, so the checkpoint's shape is used
    return o;
}

// ---- the current values

std::vector<Setting> settings(const Options& options) {
    Options now = options, initial = options;
    const OptionSpecs all = declare(now.command, now), defaults = declare(now.command, initial);
    std::vector<Setting> out;
    for (size_t i = 0; i < all.size(); i++) {
        defaults[i].reset();
        const std::string value = all[i].text();
        out.push_back({all[i].section, all[i].long_name().substr(2), value, value == defaults[i].text(),
                       all[i].may_change, all[i].may_differ, all[i].is_path, all[i].is_pattern});
    }
    return out;
}

std::string options_json(const Options& options) {
    Options o = options;
    Json json = Json::object();
    for (const OptionSpec& d : declare(o.command, o)) {
        Json& value = json[d.long_name().substr(2)];
        if (d.kind == ValueKind::text) value = d.text();
        if (d.kind == ValueKind::flag) value = d.text() == "1";
        if (d.kind == ValueKind::number) value = Json::parse(d.text());
    }
    if (!o.inputs.empty()) json["inputs"] = o.inputs;
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // arguments need not be UTF-8
}

// ---- values that follow from the options

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
    if (o.steps == 0) {
        ENSURE(steps_per_epoch > 0,
               "the training data are too short for one step; lower --global-batch, or give --steps");
        o.steps = steps_per_epoch;
    }
    const int64_t usual = std::min<int64_t>(700, o.steps / 10);
    o.warmup = o.given_warmup == -1 ? usual : o.given_warmup;
    ENSURE(o.warmup <= o.steps, "--warmup %lld is longer than the run of %lld step%s; try --warmup %lld",
           static_cast<long long>(o.warmup), static_cast<long long>(o.steps), o.steps == 1 ? "" : "s",
           static_cast<long long>(usual));
}
