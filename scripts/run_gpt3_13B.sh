#!/usr/bin/env bash
# run_gpt3_13B.sh [--plan] [OPTION...]: the shape of GPT-3 13B on 300 billion tokens, one node of 8 GPUs with
# 80 GB by mpirun.
#
# 143,051 steps of 2,097,152 tokens: 300 billion tokens. Batch, learning rate and warmup are those of Brown et al. 2020;
# all layers have dense attention. Shards of FineWeb-Edu have to be brought to data/edu_fineweb100B (huggingface.co:
# karpathy/fineweb-edu-100B-gpt2-token-shards); three epochs of them are read. 79.64 GFLOP per token (llmc/model/mfu.h),
# in all 2.39e22 FLOP. 8 H100 at 40 % of their 989 TFLOP/s in bf16: 87 days (computed, not measured). Weights, gradients
# and moments are sharded (--zero 3). The plan needs 72 GiB per GPU.
#
# NP=16 takes sixteen GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=gpt3-13b steps=143051 lr=1e-4 final_lr_fraction=0.1 checkpoint_every=1000 seq_len=2048 warmup=179 zero=3
tokens_per_step=2097152 most_micro_batch=4 data=${DATA:-data/edu_fineweb100B} ranks=${NP:-8} more=(--recompute gelu)
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
