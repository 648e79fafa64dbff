# shellcheck shell=bash
# functions.sh: what the shell tests share. Sourced from the repository's root; each check prints PASS or FAIL.

program=$PWD/build/release/train_gpt2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

pass() { echo "PASS  $1"; }
fail() {
    echo "FAIL  $1"
    failures=$((failures + 1))
}

# check NAME COMMAND...: it succeeds.
check() {
    local name=$1
    shift
    if "$@" >"$scratch/check.log" 2>&1; then pass "$name"; else fail "$name: $*: $(tail -n 5 "$scratch/check.log")"; fi
}

# refused NAME CODE TEXT COMMAND...: ends with the exit code, one line on stderr that holds the text, and nothing on stdout
# that could be taken for a result.
refused() {
    local name=$1 code=$2 text=$3 status=0
    shift 3
    timeout 60 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || status=$?
    if [ $status != "$code" ]; then
        fail "$name: exit code $status instead of $code: $(tail -n 3 "$scratch/err")"
    elif [ "$(grep -c '^error: ' "$scratch/err")" != 1 ] || ! grep -qF -- "$text" "$scratch/err"; then
        fail "$name: said $(cat "$scratch/err")"
    else
        pass "$name: $(grep '^error: ' "$scratch/err")"
    fi
}

# Random words of a small language, the same each time: enough structure for a loss that falls.
make_text() {
    awk -v n="$1" 'BEGIN { srand(1); split("the a king queen old young saw heard of and to in house river went came", w, " ")
        for (i = 0; i < n; i++) printf "%s%s", w[int(rand() * 16) + 1], i % 12 == 11 ? ".\n" : " " }'
}

# A model and steps that take a second. A caller's options come later and win.
tiny=(--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --lr 1e-2 --warmup 2 --quiet --threads 2)

make_shards() {
    make_text "${2:-6000}" >"$1.txt"
    "$program" tokenize "$1.txt" --output "$1" --train-bpe 300 --quiet
}

finish() { exit $((failures > 0)); }
