#!/usr/bin/env bash
# run_gpt2_124M_fast.sh [--plan] [OPTION...]: GPT-2 124M in two thirds of the tokens of run_gpt2_124M.sh, by a higher
# rate that falls in a line to 0.
#
# 12,288 steps of 524,288 tokens: 6.44 billion tokens of data/fineweb10B.sh, 5.17e18 FLOP.
# Published for 6.44 billion tokens at this rate: validation loss 3.2753, where llm.c's schedule had 3.2847 after 10
# billion; 3.2267 for 10 billion (--steps 19073). Source: the README of Tuned-NanoGPT, 2024. That run warmed up for 256
# steps, ended at a tenth of the rate, normalized each gradient, and had RMSNorm and no biases: what the model of this
# program reaches has not been measured.
#
# NP=4 takes four GPUs, DATA= another folder of shards, OUT= another folder for checkpoints. --plan prints the plan
# only. Started again, it resumes from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
model=d12 steps=12288 lr=1.8e-3 final_lr_fraction=0 checkpoint_every=1000 warmup=250
tokens_per_step=524288 most_micro_batch=64 data=${DATA:-data/fineweb10B} ranks=${NP:-8} more=(--schedule linear)
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
until_done mpirun -np "$ranks" --bind-to none ./train_gpt2cu "${recipe[@]}"
