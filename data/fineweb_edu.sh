#!/usr/bin/env bash
# fineweb_edu.sh [SHARDS]: downloads educational web pages as ready-made shards of GPT-2 tokens: the validation shard
# and the first SHARDS training shards (default 100, at most 1001), of 100 million tokens and 200 MB each.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

parse_arguments 1 "" "$@"
shard_count 100 1001

out=data/fineweb_edu
fetch_gpt2_tokenizer $out
mapfile -t names < <(seq -f 'edu_fineweb_train_%06.0f.bin' "$shards")
fetch_all karpathy/fineweb-edu-100B-gpt2-token-shards $out edu_fineweb_val_000000.bin "${names[@]}"
print_train_command $out "--model d12 --lr 6e-4 --warmup 700 --val-every 250 --val-tokens 10485760 \\
      --checkpoint-every 1000" edu_fineweb_
