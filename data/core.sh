#!/usr/bin/env bash
# core.sh: downloads the 22 tasks of CORE, as nanochat packs them, to data/core/eval_bundle, and prints the command that
# evaluates a model on them. CORE_URL names a mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

parse_arguments 0 "" "$@"
archive=data/core/eval_bundle.zip
if [ ! -f data/core/eval_bundle/core.yaml ]; then
    fetch "${CORE_URL:-https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip}" $archive
    # the archive has a checksum of each file, which the unpacking compares
    python3 -m zipfile -e $archive data/core/unpacked || {
        rm -r $archive
        die "$archive was damaged and was removed; run this again"
    }
    mv data/core/unpacked/eval_bundle data/core/
    rm -r data/core/unpacked $archive
fi
say "data/core is ready; evaluate a model with"
printf '\n  scripts/core.py out/my\n\n'
