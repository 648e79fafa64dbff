#!/usr/bin/env bash
# test_checkpoints.sh: tests the care for checkpoints: which ones a run keeps, a damaged one, and other data at a
# resume.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
run=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin" "${tiny[@]}"
     --precision fp32 --val-batches 4 --val-every 2 --checkpoint-every 2)
steps_of() { find "$1" -maxdepth 1 -name 'step_*' | sort | sed 's/.*step_0*//' | tr '\n' ' '; }
# best_step RUN: the step with the lowest validation loss after the first step, by the log.
best_step() { sed -n 's/.*"kind":"val","step":\([1-9][0-9]*\),"val_loss":\([0-9.]*\).*/\2 \1/p' "$1/log.jsonl" |
    sort -g | head -n 1 | cut -d' ' -f2; }
file_of() { find "$1" -name "$2"; }

# ---- --keep, --keep-every and --keep-best, over a restart: the learning rate of the second start ruins the weights
kept=("${run[@]}" --output "$scratch/kept" --keep 1 --keep-every 6 --keep-best)
check "--keep-best: 8 steps" "${kept[@]}" --steps 8 --warmup 1
best=$(best_step "$scratch/kept")
check "--keep-best: the file best names the step with the lowest loss" \
    test "$(cat "$scratch/kept/best")" = "step_00000$best"
check "--keep-best: resumed with a larger --lr" "${kept[@]}" --steps 20 --warmup 1 --lr 1 --resume
check "--keep-best: the best step is of the first start" test "$(best_step "$scratch/kept")" = "$best"
check "--keep-best: the file best still names it" test "$(cat "$scratch/kept/best")" = "step_00000$best"
check "--keep-best: it is kept beyond --keep 1 and --keep-every 6" test "$(steps_of "$scratch/kept")" = \
    "$(printf '%s\n' "$best" 6 12 18 20 | sort -nu | tr '\n' ' ')"
check "--keep-best: the options may change without a warning" \
    test "$(grep -c 'changed since.*keep' "$scratch/kept/log.jsonl")" = 0
check "without --keep-best and --keep-every: resumed" \
    "${run[@]}" --output "$scratch/kept" --steps 22 --keep 2 --keep-every 0 --keep-best=0 --resume
check "without --keep-best and --keep-every: the newest are kept" test "$(steps_of "$scratch/kept")" = "20 22 "
check "without --keep-best: no file best" test ! -e "$scratch/kept/best"
refused "--keep-best without --val-data" 2 "--keep-best needs validation losses" "$program" --train-data x --keep-best
check "plan prints which checkpoints are kept" \
    grep -q "^disk .* per checkpoint, 3 kept, and the best, and those of every 8 steps$" \
    <("$program" plan "${tiny[@]}" --steps 20 --checkpoint-every 2 --keep-every 8 --keep-best)

# ---- a damaged checkpoint
out=$scratch/three more=("${run[@]}" --output "$scratch/three" --steps 8)
check "a run with 3 checkpoints" "${run[@]}" --output "$out" --steps 6
printf x | dd of="$out/step_000006/model.safetensors" bs=1 seek=5000 conv=notrunc status=none
"${more[@]}" --resume >"$scratch/said" 2>&1
check "--resume takes the older checkpoint" grep -q '"resumed_at":4' "$out/log.jsonl"
check "--resume names the damaged file" \
    grep -q "^warning: skipping a damaged checkpoint: $out/step_000006/model.safetensors: its checksum does not match" \
        "$scratch/said"
cp -r "$out" "$scratch/damaged"
for file in "$scratch"/damaged/step_*/config.json; do echo >>"$file"; done
refused "all checkpoints are damaged" 65 \
    "$scratch/damaged: none of its checkpoints is intact: $scratch/damaged/step_000008/config.json: has " \
    "${more[@]}" --output "$scratch/damaged" --resume

# ---- the data of a resume
cp -r "$scratch/data" "$scratch/changed" && cp "$(file_of "$scratch/data" 'val_*.bin')" \
    "$(file_of "$scratch/changed" 'train_*.bin')"
"${more[@]}" --train-data "$scratch/changed/train_*.bin" --steps 10 --seed 7 --resume >"$scratch/said" 2>&1
check "a resume with other data gives a warning" \
    grep -q "^warning: the train data differ from those of the checkpoint" "$scratch/said"
check "a resume with the same validation data gives no warning about them" \
    test "$(grep -c 'the val data differ' "$scratch/said")" = 0
check "a resume with another seed gives a warning" \
    grep -q "^warning: changed since the checkpoint: .*--seed 7 (was 42)" "$scratch/said"
check "the checkpoint of a resume has its seed" grep -q '"seed": 7,' "$scratch/three/step_000010/trainer.json"
"${more[@]}" --train-data "$scratch/changed/train_*.bin" --steps 12 --seed 7 --resume >"$scratch/said" 2>&1
check "a second resume with the same data and seed gives no warning" \
    test "$(grep -cE 'data differ|--seed' "$scratch/said")" = 0

cp "$(file_of "$scratch/data" 'train_*.bin')" "$(file_of "$scratch/changed" 'val_*.bin')"
"${run[@]}" --output "$scratch/three" --val-data "$scratch/changed/val_*.bin" --steps 14 --resume >"$scratch/said" 2>&1
check "a resume with other validation data gives a warning" \
    grep -q "^warning: the val data differ from those of the checkpoint" "$scratch/said"
finish
