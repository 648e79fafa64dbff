#!/usr/bin/env bash
# text.sh FILE|DIR... [--out DIR] [--vocab N | --tokenizer DIR] [--text-key KEY] [--skip-bad-lines]: makes train and
# val shards from your own text: text, JSON, CSV and Parquet files, also packed (.gz .zst .xz .bz2), folders of them
# (docs/data.md), pipes, and - for stdin. Trains a vocabulary of N tokens on the text (default: 512 to 16384, depending
# on its size), or uses that in DIR. KEY is the key or column of the text; --skip-bad-lines leaves out rows without it.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

out="" vocab="" tokenizer="" text_key="" skip_bad_lines="" copies=""
parse_arguments 1000000 "out vocab tokenizer text-key skip-bad-lines!" "$@"
[ -z "$vocab" ] || [ -z "$tokenizer" ] || bad_usage "--vocab trains a tokenizer and --tokenizer names one; give one"
[ ${#operands[@]} -gt 0 ] || bad_usage "name a file or folder of text"
inputs=()
for input in "${operands[@]}"; do
    path=$(cd "$caller" && path_of "$input")
    # Can be read once, or has no size, as a file in /proc.
    if [ "$input" = - ] || [ -p "$input" ] || [ -p "$path" ] || { [ -f "$path" ] && [ ! -s "$path" ]; }; then
        trap 'rm -rf "$copies"' EXIT
        copies=${copies:-$(mktemp -d)}
        (cd "$caller" && cat -- "$input") >"$copies/new"
        # Named so that it is known again; the endings say what is in it.
        [[ ${path,,} =~ ([.][a-z]+)?($packed)?$ ]]
        path=$copies/$(sha256sum <"$copies/new" | cut -d' ' -f1)-${#inputs[@]}/text${BASH_REMATCH[0]}
        mkdir "${path%/*}"
        mv "$copies/new" "$path"
        touch -d @0 "$path"
    elif [ ! -e "$path" ]; then
        echo "text.sh: $input: there is no such file or folder" >&2
        exit 66
    fi
    inputs+=("$path")
done
if [ -n "$out" ]; then out=$(cd "$caller" && realpath -m -- "$out"); fi

name=$(name_of "${inputs[0]}")
out=${out:-data/$name}
out=${out#"$PWD"/}
[[ $out != *[][*?{}\\]* ]] || bad_usage "--out $out: --train-data takes one of []*?{}\\ in its name as a pattern"
# Packed text is about a third of the text.
bytes=$(files_in "${inputs[@]}" -printf '%s %p\n' |
    awk -v packed="($packed|[.]parquet)$" '{ sum += tolower($0) ~ packed ? 3 * $1 : $1 } END { print sum + 0 }')
[ "$bytes" -gt 0 ] || die "${operands[*]}: there is no text in it"
[ "$bytes" -ge 1000 ] || too_short "$bytes bytes"
# With =, because tokenize takes a word that names a file for one of the inputs.
rows=(${text_key:+"--text-key=$text_key"} ${skip_bad_lines:+"$skip_bad_lines"})
if [ -n "$tokenizer" ]; then
    tokenize "$out" "${inputs[@]}" --tokenizer "$(cd "$caller" && realpath -m -- "$tokenizer")" "${rows[@]}"
else
    vocab=${vocab:-$(suitable_vocab "$bytes")}
    say "a vocabulary of $vocab tokens; --vocab N sets another size"
    tokenize "$out" "${inputs[@]}" --train-bpe "$vocab" "${rows[@]}"
fi

choose_windows "$out"
if [ "$windows" = "$book_windows" ]; then model=$small_model; else model=$few_pages_model; fi
print_train_command "$out" "$model"
