#!/usr/bin/env bash
# fineweb10B.sh [SHARDS]: downloads web text for the GPT-2 recipes, as ready-made shards of GPT-2 tokens: the validation
# shard and the first SHARDS training shards (default: all 103), of 100 million tokens and 200 MB each.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

parse_arguments 1 "" "$@"
shard_count 103 103

out=data/fineweb10B
fetch_gpt2_tokenizer $out
mapfile -t names < <(seq -f 'fineweb_train_%06.0f.bin' "$shards")
fetch_all kjj0/fineweb10B-gpt2 $out fineweb_val_000000.bin "${names[@]}"
print_train_command $out "--model d12 --lr 6e-4 --warmup 700 --val-every 250 --val-tokens 10485760 \\
      --checkpoint-every 1000" fineweb_
