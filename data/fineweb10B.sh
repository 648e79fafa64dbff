#!/usr/bin/env bash
# fineweb10B.sh [SHARDS]: downloads web text for the GPT-2 recipes, as ready-made shards of GPT-2 tokens: the validation
# shard and the first SHARDS training shards (default: all 103), of 100 million tokens and 200 MB each.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

parse_arguments 1 "" "$@"
shards=${operands[0]:-103}
if ! [[ $shards =~ ^[0-9]{1,3}$ ]] || [ "$shards" -lt 1 ] || [ "$shards" -gt 103 ]; then
    bad_usage "$shards: the number of training shards is 1 to 103"
fi

out=data/fineweb10B
name=kjj0/fineweb10B-gpt2
fetch_gpt2_tokenizer $out
fetch_from_hub $name fineweb_val_000000.bin $out/fineweb_val_000000.bin
for ((i = 1; i <= shards; i++)); do
    file=$(printf 'fineweb_train_%06d.bin' "$i")
    fetch_from_hub $name "$file" "$out/$file"
done
print_train_command $out "--model d12 --lr 6e-4 --warmup 700 --val-every 250 --val-tokens 10485760 \\
      --checkpoint-every 1000" fineweb_
