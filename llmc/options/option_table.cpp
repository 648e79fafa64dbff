#include "options/option_table.h"

#include "base/threads.h"

static void model_options(OptionSpecs& all, Options& o) {
    Section s{all, "model"};
    s.add("-e,--model", o.model, "", "NAME",
          "shape: d12, d24, d36, d48 (or gpt2, gpt2-medium, gpt2-large, gpt2-xl), or gpt3-125m, -350m, -760m, -1.3b, "
          "-2.7b, -6.7b, -13b")
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
        .shown("524288 with --model, else 0")
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

// Ranks that this process starts.
static void local_rank_options(Section& s, Options& o) {
    s.add("--gpus", o.gpus, "", "all|N|LIST", "use these GPUs of this machine, one rank each: all, 4, or 0,2,3")
        .not_empty()
        .planned()
        .of_one_start()
        .may_differ();
    s.add("--ranks", o.ranks, 0, "N", "use N CPU ranks of this machine, started by mpirun")
        .between(0, 1 << 16)
        .shown("")
        .planned()
        .of_one_start();
}

static void start_options(OptionSpecs& all, Options& o) {
    Section s{all, "ranks"};
    local_rank_options(s, o);
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

static void tensor_options(Section& s, Options& o) {
    s.add("--tensor-parallel", o.tensor_parallel, 1, "N", "N ranks of a host share each layer; N divides the heads")
        .between(1, 1024)
        .planned()
        .may_change();
    s.add_flag("--tp-across-hosts", o.tp_across_hosts, "let the ranks that share a layer be on different hosts")
        .of_one_start();
}

static void rank_options(OptionSpecs& all, Options& o) {
    Section s{all, "ranks"};
    s.add("-z,--zero", o.zero, 0, "0|1|2|3",
          "ZeRO stage: ranks share the optimizer's state (1), gradients too (2), weights too (3)")
        .between(0, 3)
        .planned()
        .may_change();
    s.add("--grad-dtype", o.grad_dtype, "fp32", "fp32|bf16", "dtype of gradients in collectives")
        .one_of_unit()
        .planned();
    tensor_options(s, o);
    s.add_flag("--sequence-parallel", o.sequence_parallel,
               "with --tensor-parallel: ranks also share the tokens between the layers' matmuls")
        .planned()
        .may_change();
    s.add("--deterministic-ranks", o.virtual_ranks, 0, "N",
          "add gradients in the order of N data-parallel ranks: the same bits on 1, 2, 4 .. N of them on the CPU, or "
          "on 2 GPUs, with the same --tensor-parallel; 0 = off")
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

static void watchdog_options(OptionSpecs& all, Options& o) {
    Section s{all, "watchdog"};
    s.add("--timeout-start", o.timeout_start, -1.0, "SECONDS",
          "end with exit code 124 after so long without progress before the first step; 0 = never")
        .zero_or_between(1.0, 1e9)
        .shown("the largest tensor at 50 MB/s, at least 300")
        .may_change();
    s.add("--timeout-step", o.timeout_step, -1.0, "SECONDS",
          "the same for a micro-step, a collective, a token of a sample; 0 = never")
        .zero_or_between(1.0, 1e9)
        .shown("20 median steps, at least 120")
        .may_change();
    s.add("--timeout-validation", o.timeout_validation, -1.0, "SECONDS", "the same for a validation batch; 0 = never")
        .zero_or_between(1.0, 1e9)
        .shown("20 median batches, at least 120")
        .may_change();
    s.add("--timeout-checkpoint", o.timeout_checkpoint, -1.0, "SECONDS", "the same for a checkpoint; 0 = never")
        .zero_or_between(1.0, 1e9)
        .shown("10 times the longest save, before the first its bytes at 50 MB/s; at least 300")
        .may_change();
}

// Of the commands generate and eval, which save nothing.
static void inference_watchdog_options(OptionSpecs& all, Options& o) {
    Section s{all, "watchdog"};
    s.add("--timeout-start", o.timeout_start, -1.0, "SECONDS",
          "end with exit code 124 after so long without progress before the first batch or token; 0 = never")
        .zero_or_between(1.0, 1e9)
        .shown("the largest tensor at 50 MB/s, at least 300");
    s.add("--timeout-step", o.timeout_step, -1.0, "SECONDS", "the same for a batch or a token; 0 = never")
        .zero_or_between(1.0, 1e9)
        .shown("20 median batches or tokens, at least 120");
}

static void fit_options(OptionSpecs& all, Options& o) {
    Section s{all, "plan"};
    s.add_flag("--fit", o.fit,
               "list the --tensor-parallel, --sequence-parallel, --zero, --recompute and --micro-batch that fit, the "
               "fastest first, on the number of GPUs in --gpus, or of ranks in --ranks or --world-size; a given one "
               "keeps its value")
        .planned();
    s.add("--gpu-memory", o.gpu_memory, 0.0, "GIB", "with --fit: memory of each GPU; 0 = this one's")
        .between(0.0, 1e6)
        .planned();
}

static void health_options(Section& s, Options& o) {
    s.add("--on-nan", o.on_nan, "halt", "halt|skip|rollback",
          "at a loss or gradient norm that is not finite: end the run, leave out the step, or go back to the newest "
          "checkpoint and leave out the step")
        .one_of_unit();
    s.add("--on-spike", o.on_spike, "warn", "warn|skip|rollback",
          "at a step with a loss or gradient norm far above the last 128 steps (--spike-z); warn: only the loss")
        .one_of_unit();
    s.add("--spike-z", o.spike_z, 6.0, "Z", "a spike is Z standard deviations above the mean; 0 = off")
        .between(0.0, 1e6);
    s.add("--hash-check", o.hash_check, 1000, "STEPS",
          "compare the ranks' weights every N steps, and end with exit code 17 if they differ; 0 = never")
        .at_least(0)
        .may_change();
    s.add("--recompute-check", o.recompute_check, 0, "STEPS",
          "compute the gradients of a micro-batch twice every N steps, and end with exit code 16 if they differ; 0 = "
          "never")
        .at_least(0)
        .may_change();
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
    s.add("--max-time", o.max_time, 0.0, "TIME",
          "save and end, as at SIGTERM, before this command has run for TIME: 1d, 3h50m, 90s, or a number of seconds; "
          "0 = off")
        .is_duration()
        .between(0.0, 1e9)
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
    health_options(s, o);
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
        .planned()
        .may_change();
    s.add("--checkpoint-async", o.checkpoint_async, "auto", "auto|on|off",
          "write checkpoints while training goes on, from a copy in memory; auto = if there is memory for it")
        .one_of_unit()
        .planned()
        .may_change();
    s.add("--keep", o.keep, 3, "CHECKPOINTS", "number of newest checkpoints to keep; 0 = all")
        .at_least(0)
        .planned()
        .may_change();
    s.add("--keep-every", o.keep_every, 0, "STEPS", "also keep the checkpoints of every N steps; 0 = off")
        .at_least(0)
        .planned()
        .may_change();
    s.add_flag("--keep-best", o.keep_best, "also keep the checkpoint with the lowest validation loss")
        .planned()
        .may_change();
    s.add_flag("--resume", o.resume,
               "continue from the newest checkpoint in --output (-y 1); options not given come from that run; strict = "
               "never from an older one because the newest is damaged",
               "-y")
        .or_equals("strict", o.resume_strict)
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
          "print a line every N steps when the output is not a terminal; log.jsonl has every step")
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

static void inference_rank_options(OptionSpecs& all, Options& o) {
    Section s{all, "ranks"};
    local_rank_options(s, o);
    tensor_options(s, o);
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

OptionSpecs declare(Command command, Options& o) {
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
            watchdog_options(all, o);
            if (command == Command::plan) fit_options(all, o);
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
            inference_rank_options(all, o);
            inference_watchdog_options(all, o);
            seed_option(all, o, "seed of the samples; the same seed gives the same text");
            threads_option(all, o);
            break;
        case Command::eval:
            eval_options(all, o);
            inference_rank_options(all, o);
            inference_watchdog_options(all, o);
            threads_option(all, o);
            break;
        case Command::tokenize:
            tokenize_options(all, o);
            break;
        case Command::verify:
            quiet_option(all, o);
            break;
        case Command::explain:
        case Command::help:
            break;
    }
    return all;
}
