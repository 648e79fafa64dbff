#!/usr/bin/env bash
# run_gpt2_774M.sh [--plan] [OPTION...]: GPT-2 774M on 150 billion tokens of FineWeb, one node of 8 GPUs by mpirun.
#
# 286,102 steps of 524,288 tokens: 150 billion tokens, one epoch and a half of the 100-billion sample of FineWeb, whose
# shards have to be brought to data/fineweb100B.
# 4.927 GFLOP per token (llmc/model/mfu.h), in all 7.39e20 FLOP.
# Published by llm.c for 8 A100-80GB: 1.7 s per step, 135 hours.
# 8 H100 at 40 % of their 989 TFLOP/s in bf16: 0.82 s per step, 65 hours (computed, not measured).
#
# NP=4 takes four GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=d36 steps=286102 lr=2.5e-4 final_lr_fraction=0 checkpoint_every=4000
tokens_per_step=524288 most_micro_batch=32 data=${DATA:-data/fineweb100B} ranks=${NP:-8} more=()
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
