#!/usr/bin/env bash
# hellaswag.sh: downloads the validation rows of HellaSwag (10,042 choices between four endings, 12 MB) to
# data/hellaswag/hellaswag_val.jsonl, and prints the command that evaluates a model on them. HELLASWAG_URL: a mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

parse_arguments 0 "" "$@"
file=data/hellaswag/hellaswag_val.jsonl
fetch "${HELLASWAG_URL:-https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl}" $file "" \
    0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588
say "$file is ready; evaluate a model with"
printf '\n  ./train_gpt2 eval --init out/my --task %s\n\n' $file
