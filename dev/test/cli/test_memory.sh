#!/usr/bin/env bash
# test_memory.sh: compares the peak resident memory of a training process with the memory that `plan` prints for the
# same options. Also the limits of --micro-batch auto and of eval. The model is GPT-2 124M, so that the memory of the
# program and its libraries (about 20 MB) hardly counts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
for precision in bf16 fp32; do
    python3 - "$program" --model d12 --vocab-size 50257 --precision $precision --micro-batch 1 --seq-len 128 \
        --global-batch 0 \
        --steps 1 --train-data "$scratch/data/train_*.bin" --output '' >"$scratch/result" 2>&1 <<'PY'
import re, resource, subprocess, sys
program, *options = sys.argv[1:]
text = subprocess.run([program, "plan", *options], capture_output=True, text=True, check=True).stdout
number, unit = re.search(r"^memory\s+([0-9.]+) (MiB|GiB) of .* available: ", text, re.M).groups()
plan = float(number) * {"MiB": 1, "GiB": 1024}[unit]
before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
run = subprocess.run([program, *options], capture_output=True, text=True)
if run.returncode:
    sys.exit(run.stderr)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of the largest child
assert peak > before, f"the peak of {peak:.0f} MiB is that of plan"
print(f"peak {peak:.0f} MiB, plan {plan:.0f} MiB")
sys.exit(not 0.95 * plan <= peak <= 1.05 * plan)
PY
    status=$?
    if grep -q "no memory for" "$scratch/result"; then
        skip "$precision" "$(cat "$scratch/result")"
    elif [ $status = 0 ]; then
        pass "$precision: $(cat "$scratch/result")"
    else
        fail "$precision: not within 5 %: $(tail -n 5 "$scratch/result")"
    fi
done

# --micro-batch auto: at most 4,096 tokens, and less under a limit on the memory of the process.
auto=("$program" --layers 8 --heads 4 --channels 128 --micro-batch auto --global-batch 0 --steps 1 --precision fp32
      --train-data "$scratch/data/train_*.bin" --output '' --quiet)
limited=(bash -c 'ulimit -v "$0" && exec "$@"')  # KIB COMMAND...
sequences() { "$program" plan "${@:2}" | sed -n 's/.* = \([0-9]*\) sequences\? x .*/\1/p'; }
check "--micro-batch auto is 4,096 tokens" test "$(sequences "${auto[@]}" --seq-len 64)" = 64
check "--micro-batch auto trains" "${auto[@]}" --seq-len 64
check "--micro-batch auto trains under ulimit -v" "${limited[@]}" 600000 "${auto[@]}" --seq-len 1024
refused "--micro-batch auto where not one sequence fits" 2 "--micro-batch auto: one sequence of 1024 tokens needs" \
    "${limited[@]}" 600000 "${auto[@]}" --seq-len 1024 --layers 12 --heads 12 --channels 768

# An error of the C++ library names the limit's option, without values. How much address space the program needs for a
# start differs.
for kib in 30000 40000 50000 60000 70000; do
    status=0
    "${limited[@]}" $kib "${auto[@]}" --seq-len 64 --micro-batch 1 >"$scratch/out" 2>"$scratch/err" || status=$?
    if [ $status = 0 ] || grep -qE '^libgomp: |error while loading' "$scratch/err"; then continue; fi
    mib=$(awk -v kib=$kib 'BEGIN { printf "%.1f", kib / 1024 }')
    check "ulimit -v $kib: $(head -n 1 "$scratch/err")" grep -qE \
        "^error: no (memory .* under a limit of $mib MiB \(ulimit -v\)|(memory|thread) .*\(check .*ulimit -v\))" \
        "$scratch/err"
    check "ulimit -v $kib: exit code" test $status = 1
done

# eval refuses a micro-batch before it allocates anything, and the one that it advises fits.
check "a run to evaluate" "$program" --layers 2 --heads 8 --channels 512 --seq-len 64 --micro-batch 2 --global-batch 0 \
    --steps 1 \
    --train-data "$scratch/data/train_*.bin" --val-every 0 --output "$scratch/run" --quiet
eval=("${limited[@]}" 2000000 "$program" eval --init "$scratch/run" --val-data "$scratch/data/val_*.bin")
refused "eval with a micro-batch beyond memory" 2 \
    "--micro-batch 1000000 with --seq-len 64 needs " "${eval[@]}" --micro-batch 1000000
check "the advice of eval is an option of eval, and both sizes are in GiB" grep -qx \
    "error: .* with --seq-len 64 needs [0-9,.]* GiB of memory, and [0-9.]* GiB are free; try --micro-batch [0-9]*" \
    "$scratch/err"
largest=$(sed 's/.* //' "$scratch/err")
check "eval with the micro-batch that it advises, less 5 %" "${eval[@]}" --micro-batch $((largest - largest / 20))

# Ranks on one machine share its memory.
too_large=("$program" eval --init "$scratch/run" --val-data "$scratch/data/val_*.bin" --micro-batch 1048576)
gib_free() { sed -n 's/.* and \([0-9.]*\) GiB are free.*/\1/p' "$scratch/err"; }
reason=$(no_ranks_because)
if [ -n "$reason" ]; then
    skip "eval on two ranks with a micro-batch beyond memory" "$reason"
else
    several_ranks_here
    refused "eval with a micro-batch beyond the memory of the machine" 2 "needs " "${too_large[@]}"
    alone=$(gib_free)
    refused "eval on two ranks: one error for both" 2 "error: rank 0 on " "${too_large[@]}" --ranks 2
    check "eval on two ranks: each has half of the $alone GiB: $(gib_free)" \
        awk -v two="$(gib_free)" -v alone="$alone" 'BEGIN { exit !(two > 0 && two < 0.75 * alone) }'
fi
finish
