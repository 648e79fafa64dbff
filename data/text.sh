#!/usr/bin/env bash
# text.sh FILE|DIR... [--out DIR] [--vocab N]: your own text as train and val shards. Takes text files, .jsonl files and
# folders of them; trains a vocabulary of N tokens on the text (default: by its size, from 512 to 16384).
set -euo pipefail
usage() {
    sed -n '2,3s/^# //p' "$0"
    exit "$1"
}

inputs=() out="" vocab=""
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$(realpath -m "${2:?--out needs a folder}"); shift ;;
        --vocab) vocab=${2:?--vocab needs a number}; shift ;;
        -h | --help) usage 0 ;;
        -*) usage 2 >&2 ;;
        *)
            if [ ! -e "$1" ]; then
                echo "text.sh: $1: there is no such file or folder" >&2
                exit 66
            fi
            inputs+=("$(realpath "$1")")
            ;;
    esac
    shift
done
[ ${#inputs[@]} -gt 0 ] || usage 2 >&2

cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

name=$(basename "${inputs[0]}")
name=$(tr -c 'A-Za-z0-9_.\n-' _ <<<"${name%.*}")
[ -n "$name" ] || name=text
out=${out:-data/$name}
out=${out#"$PWD"/}
bytes=$(find -L "${inputs[@]}" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }')
[ "$bytes" -gt 0 ] || die "${inputs[*]}: no text in there"
tokenize "$out" "${inputs[@]}" --train-bpe "${vocab:-$(suitable_vocab "$bytes")}"
print_train_command "$out" "$small_model"
