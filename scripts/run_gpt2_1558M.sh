#!/usr/bin/env bash
# run_gpt2_1558M.sh [--plan] [OPTION...]: GPT-2 1558M on 34 billion tokens of FineWeb-Edu, one node of 8 GPUs by mpirun.
#
# 32,000 steps of 1,048,576 tokens: 33.6 billion tokens. Shards of FineWeb-Edu have to be brought to
# data/edu_fineweb100B (huggingface.co: karpathy/fineweb-edu-100B-gpt2-token-shards); 336 of them are read. 9.818 GFLOP
# per token (llmc/model/mfu.h), in all 3.29e20 FLOP. Published by llm.c for 8 H100-80GB: 2.8 s per step, 24 hours, which
# is 46 % of 989 TFLOP/s. At 40 %: 3.25 s per step, 29 hours (computed, not measured).
#
# NP=4 takes four GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=d48 steps=32000 lr=6e-4 final_lr_fraction=0.1 checkpoint_every=2000
tokens_per_step=1048576 most_micro_batch=16 data=${DATA:-data/edu_fineweb100B} ranks=${NP:-8} more=(--recompute gelu)
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
