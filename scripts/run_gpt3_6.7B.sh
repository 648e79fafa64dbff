#!/usr/bin/env bash
# run_gpt3_6.7B.sh [--plan] [OPTION...]: the shape of GPT-3 6.7B on 300 billion tokens, one node of 8 GPUs with
# 80 GB by mpirun.
#
# 143,051 steps of 2,097,152 tokens: 300 billion tokens. Batch, learning rate and warmup are those of Brown et al. 2020;
# all layers have dense attention. Shards of FineWeb-Edu have to be brought to data/edu_fineweb100B (huggingface.co:
# karpathy/fineweb-edu-100B-gpt2-token-shards); three epochs of them are read. 41.56 GFLOP per token (llmc/model/mfu.h),
# in all 1.25e22 FLOP. 8 H100 at 40 % of their 989 TFLOP/s in bf16: 46 days (computed, not measured). Master weights and
# moments are sharded (--zero 1). The plan needs 64 GiB per GPU.
#
# NP=16 takes sixteen GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=gpt3-6.7b steps=143051 lr=1.2e-4 final_lr_fraction=0.1 checkpoint_every=1000 seq_len=2048 warmup=179
tokens_per_step=2097152 most_micro_batch=2 data=${DATA:-data/edu_fineweb100B} ranks=${NP:-8} more=()
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
