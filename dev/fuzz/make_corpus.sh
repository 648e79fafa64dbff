#!/usr/bin/env bash
# make_corpus.sh NAME [SECONDS]: fuzzes with build/fuzz/fuzz_NAME (made by `make fuzz`, with clang), 300 seconds if
# none are given, and adds the inputs that reach other code than dev/fuzz/corpus/NAME to that folder. The corpus is a
# test and does not replace fuzzing, so inputs have at most 1 KiB, and of those only the 60 largest stay. Inputs that a
# person has named always stay.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=${1:?give the name of a fuzzer: bpe for dev/fuzz/fuzz_bpe.cpp} seconds=${2:-300}
found=build/fuzz/corpus_fuzz_$name kept=dev/fuzz/corpus/$name
mkdir -p "$found" "$kept"
"build/fuzz/fuzz_$name" "$found" "$kept" -max_len=1024 -max_total_time="$seconds" -timeout=5 -rss_limit_mb=1024 \
    -malloc_limit_mb=256
# Whether code is reached decides, and not how often: with counters libFuzzer would keep thousands of inputs.
"build/fuzz/fuzz_$name" -set_cover_merge=1 -use_counters=0 "$kept" "$found"

# libFuzzer's names are SHA-1 sums.
find "$kept" -type f -regextype posix-extended -regex '.*/[0-9a-f]{40}' -printf '%s %p\n' |
    sort -k1,1nr -k2 | tail -n +61 | cut -d' ' -f2- | xargs -r rm --
