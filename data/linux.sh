#!/usr/bin/env bash
# linux.sh [--vocab N]: makes train and val shards from Linux's source and documentation, 1.3 GB of text, from the
# system's package mirror. Any user can run it: the package linux-source is unpacked into data/linux and not installed.
# One file in 350, chosen by its name, is held out.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

vocab=16384
parse_arguments 0 vocab "$@"
out=data/linux
text=$out/text
packages=$out/packages

make_text() {
    if [ -f $text/train.jsonl ]; then return; fi
    say "Linux's source: package linux-source"
    local newest
    unpack $packages linux-source && newest=$(dpkg-deb -f $packages/linux-source_*.deb Depends | sed 's/ .*//') &&
        unpack $packages "$newest" ||
        die "cannot download the package linux-source. By hand: fetch linux-6.*.tar.xz from kernel.org, run" \
            "mkdir -p $text; python3 data/source_archive.py linux-6.*.tar.xz $text" \
            "and this again"
    mkdir -p $text.part
    python3 data/source_archive.py $packages/usr/src/linux-source-*.tar.* $text.part
    mv $text.part $text
}

make_text
rm -rf $packages
val_tokens=$(($(stat -c %s $text/held_out.jsonl) / 4))  # a token has 2.8 bytes: none of train.jsonl
tokenize $out $text/held_out.jsonl $text/train.jsonl --train-bpe "$vocab" --val-tokens $val_tokens
print_train_command $out "--model d12 --lr 6e-4 --warmup 700 --val-every 250 --checkpoint-every 1000"
