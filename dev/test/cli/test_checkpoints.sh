#!/usr/bin/env bash
# test_checkpoints.sh: tests the care for checkpoints: which ones a run keeps, the command verify, and --resume=strict.
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
check "--keep-best: the best checkpoint is intact" "$program" verify "$scratch/kept/$(cat "$scratch/kept/best")"
check "without --keep-best and --keep-every: resumed" "${run[@]}" --output "$scratch/kept" --steps 22 --keep 2 --keep-every 0 --keep-best=0 --resume
check "without --keep-best and --keep-every: the newest are kept" test "$(steps_of "$scratch/kept")" = "20 22 "
check "without --keep-best: no file best" test ! -e "$scratch/kept/best"
refused "--keep-best without --val-data" 2 "--keep-best needs validation losses" "$program" --train-data x --keep-best
check "plan counts the kept checkpoints" grep -q "^disk .* 3 kept, and the best, and those of every 8 steps: .* for 6 at the same time$" \
    <("$program" plan "${tiny[@]}" --steps 20 --checkpoint-every 2 --keep-every 8 --keep-best)
noted() { "${run[@]}" --quiet=0 --output "$scratch/noted" --steps 2 "$@" 2>&1; rm -r "$scratch/noted"; }
noted --keep-best --val-every 3 --checkpoint-every 2 --keep-every 3 >"$scratch/said"
check "--keep-every that the saves pass over: a note" grep -q "^--keep-every 3 keeps no checkpoint, because --checkpoint-every 2 saves" "$scratch/said"
check "--keep-best that the validations pass over: a note" grep -q "^--keep-best compares only .*: the last one; a --val-every that divides --checkpoint-every 2 compares all$" "$scratch/said"
noted --keep-best --val-every 9 --checkpoint-every 6 --keep-every 4 --steps 20 --stop-after 1 >"$scratch/said"
check "--keep-every and --keep-best: the notes name the steps" test "$(grep -c "^--keep-.* those of every 1[28] steps[,;]" "$scratch/said")" = 2
noted --keep-best --keep-every 4 >"$scratch/said"
check "--keep-every and --keep-best that meet every save: no note" test "$(grep -c "^--keep-" "$scratch/said")" = 0

# ---- verify
out=$scratch/three
check "a run with 3 checkpoints" "${run[@]}" --output "$out" --steps 6
"$program" verify "$out" >"$scratch/said" 2>&1
check "verify a run: exit code 0" test $? = 0
check "verify a run: a line for each checkpoint, oldest first" diff <(sed 's/, [0-9.]* KiB, /, SIZE, /' "$scratch/said") - <<END
$out/step_000002: $(file_of "$out/step_000002" '*.*' | wc -l) files, SIZE, intact
$out/step_000004: $(file_of "$out/step_000004" '*.*' | wc -l) files, SIZE, intact
$out/step_000006: $(file_of "$out/step_000006" '*.*' | wc -l) files, SIZE, intact
END
check "verify --quiet prints nothing" test -z "$("$program" verify "$out" --quiet 2>&1)"
refused "verify a directory that does not exist" 66 "$scratch/none: cannot open the directory" "$program" verify "$scratch/none"
mkdir "$scratch/empty"
refused "verify an empty directory" 66 "$scratch/empty: is neither a Hugging Face directory" "$program" verify "$scratch/empty"
check "a run without checkpoints" "${run[@]}" --output "$scratch/unsaved" --steps 2 --checkpoint-every 0
refused "verify a run without checkpoints" 66 "this run has saved no checkpoint yet" "$program" verify "$scratch/unsaved"

damage() { printf x | dd of="$1" bs=1 seek=5000 conv=notrunc status=none; }
cp -r "$out" "$scratch/damaged"
damage "$scratch/damaged/step_000006/optimizer.safetensors"
refused "verify a run with a damaged checkpoint" 65 "$scratch/damaged/step_000006/optimizer.safetensors: its checksum does not match" "$program" verify "$scratch/damaged"
check "verify a run with a damaged checkpoint: the others are intact" test "$(sed 's/.*step_/step_/; s/:.*, /: /' "$scratch/out" | tr '\n' ' ')" = \
    "step_000002: intact step_000004: intact step_000006: damaged "
rm "$scratch/damaged/step_000004/trainer.json"
refused "verify a run with two damaged checkpoints" 65 "2 of 3 are not intact" "$program" verify "$scratch/damaged"
check "verify a run with two damaged checkpoints: both files are named" test "$(grep -cE 'step_000004/trainer.json: is missing|step_000006/optimizer.safetensors: ' "$scratch/err")" = 2
refused "verify a checkpoint without trainer.json" 65 "step_000004/trainer.json: is missing" "$program" verify "$scratch/damaged/step_000004"
refused "verify a damaged and a missing directory" 65 "2 of 3 are not intact" "$program" verify "$out/step_000002" "$scratch/damaged/step_000006" "$scratch/none"

hf=$scratch/hf
mkdir "$hf" && cp -L "$out/step_000006/"{config.json,model.safetensors} "$hf"
check "verify a Hugging Face directory" grep -q "^$hf: 28 tensors, readable and finite; a Hugging Face directory has no checksums$" <("$program" verify "$hf")
truncate -s -4 "$hf/model.safetensors"
refused "verify a Hugging Face directory with a short file" 65 "$hf/model.safetensors: its header describes" "$program" verify "$hf"
printf '\377\377\377\377' >>"$hf/model.safetensors"
refused "verify a Hugging Face directory with NaN" 65 "is NaN" "$program" verify "$hf"

# A checkpoint that a run deletes while verify reads it is left out.
check "a library that deletes a checkpoint" make_vanishes
cp -r "$out" "$scratch/live"
"${vanishes[@]}" VANISHES=step_000004/optimizer.safetensors VANISHES_AT=1 "$program" verify "$scratch/live" >"$scratch/said" 2>&1
check "verify while a checkpoint is deleted: exit code 0" test $? = 0
check "verify while a checkpoint is deleted: a line for each of the others" \
    test "$(sed 's/.*step_/step_/; s/:.*, /: /' "$scratch/said" | tr '\n' ' ')" = "step_000002: intact step_000006: intact "
rm -r "$scratch/live/step_000002"
refused "verify while the only checkpoint is deleted" 66 "$scratch/live: a run deletes its checkpoints while they are read" \
    "${vanishes[@]}" VANISHES=step_000006/model.safetensors VANISHES_AT=1 "$program" verify "$scratch/live"

# ---- --resume=strict
more=("${run[@]}" --output "$scratch/strict" --steps 8)
check "--resume=strict continues from an intact checkpoint" bash -c 'cp -r "$1" "$2" && "${@:3}" --resume=strict' strict "$out" "$scratch/strict" "${more[@]}"
damage "$scratch/strict/step_000008/model.safetensors"
tree_of() { (cd "$1" && find . -type f -exec sha256sum {} + | sort | sha256sum); }
before=$(tree_of "$scratch/strict")
refused "--resume=strict refuses a damaged checkpoint" 65 \
    "$scratch/strict/step_000008/model.safetensors: its checksum does not match what was written; the checkpoint is damaged; --resume=strict refuses to skip it, --resume would continue from $scratch/strict/step_000006" \
    "${more[@]}" --resume=strict
check "--resume=strict changes no file" test "$(tree_of "$scratch/strict")" = "$before"
refused "plan --resume=strict refuses it, too" 65 "--resume=strict refuses to skip it" "$program" plan --resume=strict --output "$scratch/strict"
refused "--resume strict, without =" 2 "did you mean --resume=strict?" "${more[@]}" --resume strict
check "--resume takes the older checkpoint" "${more[@]}" --resume
check "--resume takes the older checkpoint: the last one is whole again" "$program" verify "$scratch/strict"

# ---- the data of a resume
cp -r "$scratch/data" "$scratch/changed" && cp "$(file_of "$scratch/data" 'val_*.bin')" "$(file_of "$scratch/changed" 'train_*.bin')"
"${more[@]}" --train-data "$scratch/changed/train_*.bin" --steps 10 --seed 7 --resume >"$scratch/said" 2>&1
check "a resume with other data gives a warning" grep -q "^warning: the training data differ from those of the checkpoint" "$scratch/said"
check "a resume with the same validation data gives no warning about them" test "$(grep -c 'the validation data differ' "$scratch/said")" = 0
check "a resume with another seed gives a warning" grep -q "^warning: changed since the checkpoint: .*--seed 7 (was 42)" "$scratch/said"
check "the checkpoint of a resume has its seed" grep -q '"seed": 7,' "$scratch/strict/step_000010/trainer.json"
"${more[@]}" --train-data "$scratch/changed/train_*.bin" --steps 12 --seed 7 --resume >"$scratch/said" 2>&1
check "a second resume with the same data and seed gives no warning" test "$(grep -cE 'data differ|--seed' "$scratch/said")" = 0

cp "$(file_of "$scratch/data" 'train_*.bin')" "$(file_of "$scratch/changed" 'val_*.bin')"
"${run[@]}" --output "$scratch/strict" --val-every 0 --steps 14 --resume >"$scratch/said" 2>&1
check "a resume without validation keeps the description of the validation data" grep -q '"val": ' "$scratch/strict/step_000014/trainer.json"
"${run[@]}" --output "$scratch/strict" --val-data "$scratch/changed/val_*.bin" --steps 16 --resume >"$scratch/said" 2>&1
check "a resume with other validation data gives a warning" \
    grep -q "^warning: the validation data differ from those of the checkpoint; losses before and after" "$scratch/said"

finish
