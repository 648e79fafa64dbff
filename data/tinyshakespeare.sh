#!/usr/bin/env bash
# tinyshakespeare.sh [--vocab N]: makes train and val shards from 1.1 MB of Shakespeare's plays. Without --vocab it uses
# GPT-2's vocabulary, to fine-tune GPT-2, and llm.c's split, byte for byte. With --vocab it trains a vocabulary of N
# tokens on the text, to train a model from scratch.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

vocab=""
parse_arguments 0 vocab "$@"
out=data/tinyshakespeare
fetch https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt $out/input.txt \
    1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
if [ -n "$vocab" ]; then
    tokenize $out $out/input.txt --split blank-lines --train-bpe "$vocab"
    print_train_command $out "$small_model"
else
    fetch_gpt2_tokenizer data/gpt2
    # The split of llm.c, so that losses can be compared: the first 32,768 tokens for validation, the rest for training.
    tokenize $out $out/input.txt --split blank-lines --tokenizer data/gpt2 --val-tokens 32768
    print_train_command $out "--init data/gpt2 --seq-len 256 --global-batch 4096 --steps 100 --lr 1e-5 --warmup 10"
    if [ ! -f data/gpt2/model.safetensors ]; then
        say "data/gpt2 has no weights yet: put GPT-2's config.json and model.safetensors there (see docs/data.md)."
    fi
    say "To train from scratch, use a vocabulary of its own: $0 --vocab 2048"
fi
