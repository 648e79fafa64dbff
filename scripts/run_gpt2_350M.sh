#!/usr/bin/env bash
# run_gpt2_350M.sh [--plan] [OPTION...]: GPT-2 350M on 31 billion tokens of FineWeb, one node of 8 GPUs by mpirun.
#
# 60,000 steps of 524,288 tokens: 31.5 billion tokens. Shards of the 100-billion sample of FineWeb have to be brought to
# data/fineweb100B, 315 of them are read; with DATA=data/fineweb10B it is three epochs.
# 2.280 GFLOP per token (llmc/model/mfu.h), in all 7.17e19 FLOP.
# Published by llm.c for 8 A100-80GB: 0.82 s per step, 13.7 hours.
# 8 H100 at 40 % of their 989 TFLOP/s in bf16: 0.38 s per step, 6.3 hours (computed, not measured).
#
# NP=4 takes four GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=d24 steps=60000 lr=3e-4 final_lr_fraction=0 checkpoint_every=2000
tokens_per_step=524288 most_micro_batch=64 data=${DATA:-data/fineweb100B} ranks=${NP:-8} more=()
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
