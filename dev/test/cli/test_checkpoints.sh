#!/usr/bin/env bash
# test_checkpoints.sh: tests the care for checkpoints: which ones a run keeps.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
run=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin" "${tiny[@]}" --precision fp32
     --val-batches 4 --val-every 2 --checkpoint-every 2)
steps_of() { find "$1" -maxdepth 1 -name 'step_*' | sort | sed 's/.*step_0*//' | tr '\n' ' '; }
# best_step RUN: the step with the lowest validation loss after the first step, by the log.
best_step() { sed -n 's/.*"kind":"val","step":\([1-9][0-9]*\),"val_loss":\([0-9.]*\).*/\2 \1/p' "$1/log.jsonl" | sort -g | head -n 1 | cut -d' ' -f2; }
file_of() { find "$1" -name "$2"; }

# ---- --keep, --keep-every and --keep-best, over a restart: the learning rate of the second start ruins the weights
kept=("${run[@]}" --output "$scratch/kept" --keep 1 --keep-every 6 --keep-best)
check "--keep-best: 8 steps" "${kept[@]}" --steps 8 --warmup 1
best=$(best_step "$scratch/kept")
check "--keep-best: the file best names the step with the lowest loss" test "$(cat "$scratch/kept/best")" = "step_00000$best"
check "--keep-best: resumed with a larger --lr" "${kept[@]}" --steps 20 --warmup 1 --lr 1 --resume
check "--keep-best: the best step is of the first start" test "$(best_step "$scratch/kept")" = "$best"
check "--keep-best: the file best still names it" test "$(cat "$scratch/kept/best")" = "step_00000$best"
check "--keep-best: it is kept beyond --keep 1 and --keep-every 6" test "$(steps_of "$scratch/kept")" = \
    "$(printf '%s\n' "$best" 6 12 18 20 | sort -nu | tr '\n' ' ')"
check "--keep-best: the options may change without a warning" test "$(grep -c 'changed since.*keep' "$scratch/kept/log.jsonl")" = 0
check "without --keep-best and --keep-every: resumed" "${run[@]}" --output "$scratch/kept" --steps 22 --keep 2 --keep-every 0 --keep-best=0 --resume
check "without --keep-best and --keep-every: the newest are kept" test "$(steps_of "$scratch/kept")" = "20 22 "
check "without --keep-best: no file best" test ! -e "$scratch/kept/best"
refused "--keep-best without --val-data" 2 "--keep-best needs validation losses" "$program" --train-data x --keep-best
check "plan counts the kept checkpoints" grep -q "^disk .* 3 kept, and the best, and those of every 8 steps: .* for 6 at the same time$" \
    <("$program" plan "${tiny[@]}" --steps 20 --checkpoint-every 2 --keep-every 8 --keep-best)
finish
