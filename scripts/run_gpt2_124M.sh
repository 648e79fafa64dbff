#!/usr/bin/env bash
# run_gpt2_124M.sh [--plan] [OPTION...]: GPT-2 124M on 10 billion tokens of FineWeb, one node of 8 GPUs by mpirun.
#
# 18,865 steps of 524,288 tokens: 9.89 billion tokens, one epoch of data/fineweb10B.sh.
# 0.8033 GFLOP per token (llmc/model/mfu.h), in all 7.95e18 FLOP.
# Published by llm.c for 8 A100-80GB: 0.3 s per step, 94 minutes.
# 8 H100 at 40 % of their 989 TFLOP/s in bf16: 0.13 s per step, 42 minutes (computed, not measured).
#
# NP=4 takes four GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=d12 steps=18865 lr=6e-4 final_lr_fraction=0 checkpoint_every=1000
tokens_per_step=524288 most_micro_batch=64 data=${DATA:-data/fineweb10B} ranks=${NP:-8} more=()
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
