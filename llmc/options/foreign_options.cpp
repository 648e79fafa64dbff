#include "options/foreign_options.h"

#include <algorithm>

static constexpr const char *nanogpt = "nanoGPT", *trainer = "Hugging Face's Trainer", *pytorch = "PyTorch's scripts",
                            *llmc = "llm.c", *torchrun = "torchrun", *accelerate = "accelerate",
                            *megatron = "Megatron-LM";

static constexpr ForeignOption table[] = {
    // model
    {"--n_layer --num_layers --n_layers --depth", nanogpt, "it is --layers"},
    {"--n_head --num_heads --n_heads --num_attention_heads", nanogpt, "it is --heads"},
    {"--n_embd --hidden_size --d_model --embed_dim", nanogpt, "it is --channels"},
    {"--block_size --context_length --max_seq_len --max_length --sequence_length", nanogpt,
     "it is --seq-len, which is also the number of positions of a new model"},
    {"--dropout --bias", nanogpt, "there is none: no dropout, and biases as GPT-2 has them"},
    {"--init_from", nanogpt, "it is --init DIR for Hugging Face weights, and --resume to continue a run"},
    {"--model_name_or_path --model_name", trainer, "it is --init DIR for weights, --model NAME for a size"},
    // data
    {"--dataset --data_dir --dataset_name", nanogpt, "it is --train-data, a quoted pattern of token shards"},
    {"--train_file", trainer, "it is --train-data, token shards that train_gpt2 tokenize makes"},
    {"--validation_file", trainer, "it is --val-data, token shards that train_gpt2 tokenize makes"},
    {"--input_bin", llmc, "it is --train-data"},
    {"--input_val_bin", llmc, "it is --val-data"},
    {"--num_workers --workers", pytorch, "there is none: a thread reads ahead by itself"},
    // batch
    {"--batch_size", "nanoGPT and PyTorch's scripts",
     "it is --micro-batch in sequences per rank; --global-batch is in tokens per step"},
    {"--device_batch_size", "nanochat", "it is --micro-batch, in sequences"},
    {"--total_batch_size", "nanochat and llm.c", "it is --global-batch, in tokens"},
    {"--per_device_train_batch_size --per_gpu_train_batch_size", trainer, "it is --micro-batch, in sequences"},
    {"--micro_batch_size", megatron, "it is --micro-batch, in sequences"},
    {"--global_batch_size", megatron, "it is --global-batch, in tokens: sequences times --seq-len"},
    {"--gradient_accumulation_steps --grad_accum_steps", "nanoGPT and Hugging Face's Trainer",
     "it follows from --global-batch: its tokens divided by those of --micro-batch sequences on all ranks"},
    {"--gradient_checkpointing", trainer, "it is --recompute layer"},
    {"--recompute_activations --recompute_granularity", megatron, "it is --recompute layer"},
    // precision and device
    {"--dtype --mixed_precision --amp --bf16 --fp16 --fp8 --torch_dtype", "nanoGPT and Hugging Face's Trainer",
     "it is --precision bf16, fp32 or fp8"},
    {"--compile --torch_compile --flash --tensorcores", nanogpt, "there is none: nothing is compiled at run time"},
    {"--device --gpu --cpu --cuda --no_cuda --backend", "nanoGPT and PyTorch's scripts",
     "there is none: train_gpt2 runs on the CPU, train_gpt2cu on GPUs, one for each rank"},
    // ranks
    {"--nproc_per_node", torchrun, "it is --gpus, and --ranks on the CPU"},
    {"--num_processes --num_gpus --n_gpus --ngpus --devices --num_devices", "accelerate and PyTorch's scripts",
     "it is --gpus, and --ranks on the CPU"},
    {"-np --np", "mpirun", "it is --ranks on the CPU, and --gpus on GPUs"},
    {"--num_machines --num_nodes", accelerate, "it is --nnodes"},
    {"--machine_rank", accelerate, "it is --node-rank"},
    {"--master_addr --master_port --rdzv_endpoint --main_process_ip --main_process_port", "torchrun and accelerate",
     "it is --rendezvous HOST:PORT"},
    {"--standalone --rdzv_backend", torchrun, "there is none: leave it out"},
    {"--ddp_timeout --distributed_timeout", trainer, "it is --timeout-step, in seconds"},
    {"--distributed_timeout_minutes", megatron, "it is --timeout-step, in seconds"},
    {"--tensor_model_parallel_size --tp --tp_size --tensor_parallel_size", "Megatron-LM and vLLM",
     "it is --tensor-parallel"},
    {"--use_distributed_optimizer", megatron, "it is --zero 1"},
    {"--zero_stage --deepspeed --fsdp --use_fsdp", "DeepSpeed and FSDP", "it is --zero 1, 2 or 3"},
    // optimizer and schedule
    {"--max_iters --num_iterations --num_steps --total_steps", nanogpt, "it is --steps"},
    {"--max_steps", trainer, "it is --steps"},
    {"--train_iters", megatron, "it is --steps"},
    {"--exit_duration_in_mins --time_limit", "Megatron-LM and schedulers", "it is --max-time, as in 3h50m"},
    {"--epochs --num_epochs --num_train_epochs --max_epochs", "PyTorch's scripts and Hugging Face's Trainer",
     "it is --steps; --steps 0 is one epoch"},
    {"--learning_rate", "nanoGPT and PyTorch's scripts", "it is --lr"},
    {"--min_lr --learning_rate_decay_frac", nanogpt, "it is --final-lr-fraction, as a fraction of --lr"},
    {"--warmup_iters --warmup_steps", nanogpt, "it is --warmup"},
    {"--warmup_ratio", trainer, "it is --warmup, in steps"},
    {"--lr_decay_iters --decay_lr", nanogpt, "it is --schedule, which ends with --steps"},
    {"--lr_scheduler_type --lr_scheduler", trainer, "it is --schedule"},
    {"--max_grad_norm", trainer, "it is --grad-clip"},
    {"--adam_beta1", trainer, "it is --beta1"},
    {"--adam_beta2", trainer, "it is --beta2"},
    {"--adam_epsilon", trainer, "it is --eps"},
    // evaluation, output
    {"--eval_interval --val_loss_every", nanogpt, "it is --val-every"},
    {"--eval_steps", trainer, "it is --val-every"},
    {"--eval_iters --val_max_steps", nanogpt, "it is --val-batches"},
    {"--eval_only --inference_only", nanogpt, "there is none: that is the command eval"},
    {"--log_interval", nanogpt, "it is --log-every"},
    {"--logging_steps", trainer, "it is --log-every"},
    {"--out_dir --output_dir --save_dir --log_dir", "nanoGPT and Hugging Face's Trainer", "it is --output"},
    {"--save_steps --save_every --save_interval --always_save_checkpoint", trainer, "it is --checkpoint-every"},
    {"--save_total_limit", trainer, "it is --keep"},
    {"--load_best_model_at_end --save_best", trainer, "it is --keep-best"},
    {"--overwrite_output_dir", trainer, "there is none: a new run needs an --output without checkpoints"},
    {"--resume_from_checkpoint --resume_from", trainer, "it is --resume, from the newest checkpoint in --output"},
    {"--checkpoint --ckpt --ckpt_path --checkpoint_path --load", pytorch,
     "it is --init DIR, which reads the weights alone"},
    {"--config --config_file", "nanoGPT and Hugging Face's Trainer", "there is none: give options on the command line"},
    {"--wandb --wandb_log --wandb_project --wandb_run_name --report_to", nanogpt,
     "there is none: log.jsonl in --output has every step"},
    // generate
    {"--start", nanogpt, "it is --prompt"},
    {"--max_new_tokens", nanogpt, "it is --max-tokens"},
    {"--num_return_sequences", "Hugging Face's generate", "it is --num-samples"},
    {"--do_sample", trainer, "it is --temperature; 0 always takes the likeliest token"},
    // llm.c's letters that this program does not have
    {"-m", llmc, "it is --val-batches"},
    {"-r", llmc, "it is --recompute none, gelu or layer for 0, 1 and 2"},
    {"-w", llmc, "it is --master-weights on or off"},
    {"-f", llmc, "it is --precision"},
    {"-a", llmc, "there is none: train on a file of a few tokens"},
    {"-h 0 -h 1", llmc, "there is no HellaSwag; leave it out"},
    {"-nk", llmc, "it is --keep"},
    {"-nm", llmc, "there is none: --keep 0 keeps all checkpoints"},
    {"-sl -sg", llmc, "it is --on-spike skip --spike-z Z, for the loss and the norm"},
    {"-ge", llmc, "there is none: leave it out"},
    {"-lg", llmc, "there is none: leave it out"},
    {"-pn", llmc, "it is --world-size, which launchers give by themselves"},
    {"-pr", llmc, "it is --rank, which launchers give by themselves"},
    {"-pg", llmc, "it is --local-rank, which launchers give by themselves"},
    {"-ps", llmc, "it is --rendezvous HOST:PORT"},
    {"-pi -pm -pf -pp", llmc, "there is none: --rendezvous HOST:PORT is for ranks without a launcher"},
};

std::span<const ForeignOption> foreign_options() { return table; }

const ForeignOption* find_foreign_option(const std::string& name) {
    std::string wanted = name;
    if (name.starts_with("--")) std::replace(wanted.begin() + 2, wanted.end(), '-', '_');
    for (const ForeignOption& foreign : table)
        if ((" " + std::string(foreign.names) + " ").find(" " + wanted + " ") != std::string::npos) return &foreign;
    return nullptr;
}

std::string own_option(const ForeignOption& foreign) {
    const std::string text = foreign.here;
    const size_t begin = text.find("--");
    return begin == text.npos ? "" : text.substr(begin, text.find_first_of(" ,;:", begin) - begin);
}
