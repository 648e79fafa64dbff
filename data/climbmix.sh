#!/usr/bin/env bash
# climbmix.sh [SHARDS] [--vocab N]: makes train and val shards from the first SHARDS files (default 20, at most 6542) of
# ClimbMix, the web text that nanochat trains on: Parquet files of 90 MB and some 60 million tokens each. The first 20
# million tokens of the last file, which nanochat validates on, are held out. Uses GPT-2's vocabulary, or trains one of
# N tokens on the text. Needs pyarrow.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

vocab=""
parse_arguments 1 vocab "$@"
shard_count 20 6542
python3 -c "import pyarrow" 2>/dev/null || die "pyarrow, which reads Parquet files, is missing: pip install pyarrow"

out=data/climbmix
mapfile -t names < <(printf 'shard_06542.parquet\n'; seq -f 'shard_%05.0f.parquet' 0 $((shards - 1)))
fetch_all karpathy/climbmix-400b-shuffle $out/parquet "${names[@]}"
if [ -n "$vocab" ]; then
    tokenizer=(--train-bpe "$vocab")
else
    fetch_gpt2_tokenizer data/gpt2
    tokenizer=(--tokenizer data/gpt2)
fi
tokenize $out "${names[@]/#/$out/parquet/}" "${tokenizer[@]}" --val-tokens 20971520
print_train_command $out "--model d12 --lr 6e-4 --warmup 700 --val-every 250 --val-tokens 10485760 \\
      --checkpoint-every 1000"
