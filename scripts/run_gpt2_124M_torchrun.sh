#!/usr/bin/env bash
# run_gpt2_124M_torchrun.sh [--plan] [OPTION...]: GPT-2 124M on 10 billion tokens of FineWeb,
# started by PyTorch's torchrun.
#
# The run of run_gpt2_124M.sh: 9.89 billion tokens, 7.95e18 FLOP, 94 minutes on 8 A100-80GB as llm.c published, 42
# minutes on 8 H100 at 40 % of their peak (computed). torchrun starts it again after a fault, at most five times.
#
# NP=4 takes four GPUs of each node, DATA= another folder of shards, OUT= another folder for checkpoints. For several
# nodes with a common file system start on each of them: NODES=2 RDZV=first-node:29400
# scripts/run_gpt2_124M_torchrun.sh. NODES=1:2 also continues on one node if the other is lost, and on both when it is
# back. The numbers of nodes must be powers of two.
set -euo pipefail
cd "$(dirname "$0")/.."
nodes=${NODES:-1} ranks_per_node=${NP:-8}
model=d12 steps=18865 lr=6e-4 final_lr_fraction=0 checkpoint_every=1000
tokens_per_step=524288 most_micro_batch=64 data=${DATA:-data/fineweb10B} ranks=$((${nodes#*:} * ranks_per_node)) more=()
# shellcheck source=scripts/recipe.sh
source scripts/recipe.sh
rendezvous=(--standalone)
if [ "$nodes" != 1 ]; then
    first_node=${RDZV:?names the first node, as in RDZV=node0:29400}
    rendezvous=(--nnodes="$nodes" --rdzv_backend=c10d --rdzv_endpoint="$first_node" --rdzv_id="$(basename "$0" .sh)")
fi
exec torchrun "${rendezvous[@]}" --nproc_per_node="$ranks_per_node" --max_restarts=5 --no_python \
    ./train_gpt2cu "${recipe[@]}"
