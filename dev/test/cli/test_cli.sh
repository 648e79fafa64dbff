#!/usr/bin/env bash
# test_cli.sh: train, generate, eval, plan and tokenize end to end on a tiny model, and their messages for bad input.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
train_data=(--train-data "$scratch/data/train_*.bin") val_data=(--val-data "$scratch/data/val_*.bin")
data=("${train_data[@]}" "${val_data[@]}")
train=("$program" "${data[@]}" "${tiny[@]}" --output '' --steps 3)
run=$scratch/run
# Starts $scratch/train_gpt2, a copy that any user may start, as a user who is not root.
chmod a+rx "$scratch" && cp "$program" "$scratch/train_gpt2"
not_root=()
if [ "$(id -u)" = 0 ]; then not_root=(setpriv --reuid=65534 --regid=65534 --clear-groups); fi
can_drop_root() { [ "$(id -u)" = 0 ] && "${not_root[@]}" "$scratch/train_gpt2" --version >/dev/null; }
first_shard=$(find "$scratch/data" -name 'train_*.bin' | head -1)

# ---- runs that succeed
# warned NAME TEXT COMMAND...: the command succeeds and prints a warning with this text.
warned() { check "$1" bash -c '"${@:2}" 2>&1 >/dev/null | grep -qF -- "warning: $1"' warned "${@:2}"; }
check "train runs to its last step" "$program" "${data[@]}" "${tiny[@]}" --output "$run" --steps 30 --val-every 10 --checkpoint-every 15
loss_of() { sed -n 's/.*"kind":"val".*"step":'"$1"',.*"val_loss":\([0-9.]*\).*/\1/p' "$run/log.jsonl"; }
check "the loss falls" awk -v a="$(loss_of 0)" -v b="$(loss_of 30)" 'BEGIN { exit !(a > 0 && b > 0 && b < 0.8 * a) }'
# trainer_val STEP LOG_STEP: the checkpoint of STEP has the validation loss that the log has at LOG_STEP.
trainer_val() {
    python3 -c "import json, sys; got = json.load(open('$run/step_0000$1/trainer.json'))['val_loss']; sys.exit(abs(got - $(loss_of "$2")) > 1e-5)"
}
check "a checkpoint has the validation loss of its own step" trainer_val 30 30
check "a checkpoint between two validations has the loss of the last one" trainer_val 15 10
check "run.json is JSON with the options" python3 -c "import json; r = json.load(open('$run/run.json')); assert r['options']['lr'] == 0.01, r"
command_line=$(python3 -c "import json; print(json.load(open('$run/run.json'))['command_line'])")
check "the command line in run.json can be pasted into a shell" test "$(bash -c "printf '%s\n' $command_line")" = \
    "$(printf '%s\n' "$program" "${data[@]}" "${tiny[@]}" --output "$run" --steps 30 --val-every 10 --checkpoint-every 15)"
check "log.jsonl is JSON" python3 -c "import json; [json.loads(line) for line in open('$run/log.jsonl')]"
generate() { "$program" generate --init "$run" --prompt "the king" --max-tokens 40 "$@"; }
check "generate with the same seed writes the same text" test "$(generate --seed 3)" = "$(generate --seed 3)"
check "generate with another seed writes another text" test "$(generate --seed 3)" != "$(generate --seed 4)"
check "generate begins with the prompt" grep -q '^the king' <(generate)
check "generate writes more tokens than the context has" test "$(generate --max-tokens 100 --temperature 0 | wc -c)" -gt 100
check "eval gives the validation loss of training" python3 - "$run" "$scratch" "$program" <<'PY'
import json, re, subprocess, sys
run, scratch, program = sys.argv[1:]
val = [json.loads(line) for line in open(run + "/log.jsonl")]
want = [x["val_loss"] for x in val if x["kind"] == "val" and x["step"] == 30][-1]
out = subprocess.run([program, "eval", "--init", run, "--val-data", scratch + "/data/val_*.bin", "--seq-len", "16", "--micro-batch", "2",
                      "--batches", "20"], capture_output=True, text=True, check=True).stdout
got = float(re.search(r"loss ([0-9.]+)", out).group(1))
assert abs(got - want) < 1e-4 * want, (got, want)
PY
check "eval counts one window in the singular" grep -q "over 1 window of 16 tokens" <("$program" eval --init "$run" \
    --val-data "$scratch/data/val_*.bin" --seq-len 16 --micro-batch 1 --batches 1)
mkdir "$scratch/unlisted"
cp -L "$run"/step_000030/*.json "$run/step_000030/model.safetensors" "$scratch/unlisted/"
rm -f "$scratch/unlisted/trainer.json"
chmod -R a+r "$scratch/unlisted"
chmod 111 "$scratch/unlisted"
check "a model is read from a directory that may not be listed" "${not_root[@]}" "$scratch/train_gpt2" generate --init "$scratch/unlisted" --max-tokens 3
chmod 755 "$scratch/unlisted"
check "plan succeeds" "$program" plan --model d12 --micro-batch 4
check "plan succeeds for every named size" bash -c "for m in d12 d24 d36 d48 gpt2 gpt2-medium gpt2-large gpt2-xl gpt3-{125m,350m,760m,1.3b,2.7b,6.7b,13b}; do '$program' plan --model \$m -b 4 -t 1024 | grep -q parameters || exit 1; done"

check "plan prints large numbers without an exponent" grep -q "^work .* [0-9,]*,[0-9]* TFLOP per step" <("$program" plan --model d48 -d 1048576)
check "training takes llm.c's one-letter options" "$program" -i "$scratch/data/train_*.bin" -j "$scratch/data/val_*.bin" -o '' -b 2 -t 16 -d 64 -l 1e-2 -u 1 -q 0.1 \
    -c 0.1 -v 2 -s 2 -g 4 -x 3 -n 0 -y 0 -k cosine --layers 2 --heads 2 --channels 32 --quiet
check "plan measures a step" grep -q "per step.*: measured here with 2 x 16 tokens, .* tokens/s, .* % of the peak" \
    <("$program" plan "${data[@]}" "${tiny[@]}")
"$program" plan "${data[@]}" "${tiny[@]}" --ranks 64 --global-batch 0 >"$scratch/out"
check "plan of 64 ranks shows the memory per rank" grep -q "^memory .* per rank of .* available" "$scratch/out"
check "plan of 64 ranks shows the bytes that they send" grep -q "^network  *each rank sends .* per step, in .* buckets, for any number" "$scratch/out"
check "plan of 64 ranks gives each the memory of this machine" test "$(sed -n 's/^memory .* of \([0-9.]*\) .* available.*/\1/p' "$scratch/out")" = \
    "$("$program" plan "${data[@]}" "${tiny[@]}" | sed -n 's/^memory .* of \([0-9.]*\) .* available.*/\1/p')"
check "plan of 64 ranks measures one of them" grep -q "^time .*, on one rank alone, without the network" "$scratch/out"
check "plan says that a checkpoint's size is an upper bound" grep -q "^disk .*at most .* per checkpoint, 3 kept" <("$program" plan "${data[@]}" "${tiny[@]}")
check "plan says that it does not measure a step that is too large" grep -q "estimated at 40 % of the peak: a step is too large" <("$program" plan --model d48 -b 4 -t 1024)
check "plan says how much memory there is" grep -q "^memory .* of .* available: weights" <("$program" plan --layers 1 --heads 1 --channels 16)
check "plan says what does not fit, and what to try" grep -q "^memory .* of .* available, does not fit: try a smaller model" \
    <("$program" plan --layers 2 --heads 250 --channels 64000 --micro-batch 1)
"${train[@]}" --quiet=0 >"$scratch/out"
check "train says how much memory there is" grep -q "^memory .* of .* available: weights" "$scratch/out"
cp -r "$run" "$scratch/again"
"$program" "${data[@]}" "${tiny[@]}" --quiet=0 --output "$scratch/again" --steps 30 --resume >"$scratch/out" 2>&1
check "--resume says that there is nothing to do" grep -q "^nothing to do: the run is at step 30, and --steps is 30; a larger --steps continues" "$scratch/out"
"$program" --resume --output "$scratch/again" --steps 33 --quiet=0 >"$scratch/out" 2>&1
options_of() { python3 -c "import json; o = json.load(open('$1/run.json'))['options']; print(o['lr'], o['layers'], o['global-batch'])"; }
"$program" --resume --output "$scratch/again" --steps 5 --lr 1e-5 >"$scratch/nothing" 2>&1
check "--resume without anything to do leaves run.json alone" test "$(options_of "$scratch/again")" = "0.01 2 64"
check "--resume alone takes the options of the run" grep -q '"step":32,' "$scratch/again/log.jsonl"
check "--resume alone prints the options of the run" grep -q "^options from $scratch/again/run.json: --train-data .* --layers 2 .* --lr 0.01 " "$scratch/out"
default_warmup=("$program" "${data[@]}" "${tiny[@]:0:14}" --quiet --output "$scratch/warmup")
rate_of() { sed -n 's/.*"step":'"$1"',.*"lr":\([0-9.e-]*\),.*/\1/p' "$scratch/warmup/log.jsonl"; }
"${default_warmup[@]}" --steps 400 --stop-after 1
check "the default warmup is a tenth of the steps" test "$(rate_of 0)" = 0.00025
"$program" --resume --quiet --output "$scratch/warmup" --steps 20 --stop-after 1
check "a warmup that was not given follows --steps on resume" test "$(rate_of 1)" = 0.01
check "a warmup that was not given fits a shorter run on resume" "$program" --resume --quiet --output "$scratch/warmup" --steps 3
warned "a warmup of the whole run gives a warning" "--warmup 3 is the whole run: the learning rate rises until the last step and never falls" "${train[@]}" --warmup 3
check "a warmup of the whole run gives no warning with --schedule constant" bash -c '! "$@" 2>&1 | grep warmup' constant "${train[@]}" --warmup 3 --schedule constant
# A run that is started in one directory and continued from another. Its relative paths are relative to the first one.
started="$scratch/started [here]"
mkdir -p "$started" "$scratch/elsewhere" && cp -r "$scratch/data" "$started/"
started_run=("$program" --output "$started/run" --checkpoint-every 2)
check "a run with relative paths" env -C "$started" "${started_run[@]}" "${tiny[@]}" --steps 2 \
    --train-data 'data/train_*.bin' --val-data 'data/val_*.bin' --tokenizer data/tokenizer.json
check "--resume from another directory" env -C "$scratch/elsewhere" "${started_run[@]}" --resume --steps 4 --quiet
check "--resume from another directory trains the next steps" grep -q '"step":3,' "$started/run/log.jsonl"
check "--resume from a third directory" env -C "$scratch" "${started_run[@]}" --resume --steps 6 --quiet
cp -r "$started/data" "$scratch/elsewhere/near"
check "a path that is given on resume is relative to the current directory" env -C "$scratch/elsewhere" "${started_run[@]}" --resume \
    --steps 8 --quiet --train-data 'near/train_*.bin'
cp -r "$started/run" "$scratch/elsewhere/run"
python3 - "$scratch/elsewhere/run/run.json" <<'PY'
import json, sys
path = sys.argv[1]
run = json.load(open(path))
for name in "train-data", "val-data", "tokenizer":
    run["options"][name] = "near/" + run["options"][name].rsplit("/", 1)[1]
del run["directory"]
json.dump(run, open(path, "w"))
PY
check "a run.json without a directory is read relative to the current one" env -C "$scratch/elsewhere" "$program" --resume --output run --steps 10 --quiet
cp -r "$run" "$scratch/fewer"
"$program" --resume --output "$scratch/fewer" "${train_data[@]}" --steps 33 --quiet >"$scratch/out" 2>&1
check "--resume with some options takes the others" test "$(options_of "$scratch/fewer")" = "0.01 2 64"
check "--resume with some options reports only these as changed" grep -q "^warning: changed since the checkpoint: --steps 33 (was 30)$" "$scratch/out"
"$program" "${train_data[@]}" --layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --global-batch 0 --steps 2 --quiet \
    --output "$scratch/no_warmup"
"$program" --resume --output "$scratch/no_warmup" --steps 3 --warmup 1 --quiet >"$scratch/out" 2>&1
check "a first --warmup on resume is reported as not given before" grep -q -- "--warmup 1 (was not given)$" "$scratch/out"
refused "one part of the shape on resume" 2 "or leave them out, for --resume keeps the run's shape" "$program" --resume --output "$scratch/no_warmup" --channels 32
refused "another --seq-len on resume, also a longer one" 2 "give --seq-len 16" "$program" --resume --output "$scratch/no_warmup" --seq-len 32
"$program" "${train_data[@]}" "${tiny[@]}" --global-batch 0 --output "$scratch/no_batch" --steps 2 --checkpoint-every 2
"$program" --resume --output "$scratch/no_batch" --steps 3 --micro-batch 1 --quiet
check "another --micro-batch on resume keeps the tokens of a step" test "$(sed -n 's/.*"step":2,"tokens":\([0-9]*\),.*/\1/p' \
    "$scratch/no_batch/log.jsonl")" = 96
refused "a larger --micro-batch on resume: the advice keeps the batch" 2 "try --micro-batch 2, or --global-batch 64" \
    "$program" --resume --output "$scratch/no_batch" --steps 4 --micro-batch 4
# bad_run OPTION VALUE: a copy of the run whose run.json has this value, in JSON.
bad_run() {
    rm -rf "$scratch/bad_run" && cp -r "$run" "$scratch/bad_run"
    python3 - "$scratch/bad_run/run.json" "$1" "$2" <<'PY'
import json, sys
run = json.load(open(sys.argv[1]))
run["options"][sys.argv[2]] = json.loads(sys.argv[3])
json.dump(run, open(sys.argv[1], "w"))
PY
}
resume_bad=("$program" --resume --output "$scratch/bad_run" --steps 31 --quiet)
for bad in "lr 1000" 'lr "fast"' 'schedule ""' "train-data 7" "micro-batch null"; do
    bad_run "${bad%% *}" "${bad#* }"
    refused "a bad value in run.json: $bad" 65 "(from $scratch/bad_run/run.json; give --${bad%% *} on the command line)" "${resume_bad[@]}"
done
bad_run lr 1000
refused "a bad value on the command line of a resume" 2 "--lr 2000 must be at least 0 and at most 100" "${resume_bad[@]}" --lr 2000
check "a bad value in run.json is replaced on the command line" "${resume_bad[@]}" --lr 0.01
make_text 3000 | tr a-m n-z >"$scratch/other_text.txt"
"$program" tokenize "$scratch/other_text.txt" --output "$scratch/other" --train-bpe 300 --quiet
other="$scratch/other/train_*.bin was made with the tokenizer in its directory"
warned "eval on the tokens of another tokenizer gives a warning" "$other" "$program" eval --init "$run" --val-data "$scratch/other/train_*.bin"
warned "train on the tokens of another tokenizer gives a warning" "$other" "$program" --init "$run" --train-data "$scratch/other/train_*.bin" --seq-len 16 --steps 1 --output ''
warned "validation on the training data gives a warning" "$first_shard is in both --train-data and --val-data" "${train[@]}" --val-data "$first_shard"
check "tokenize takes the tokenizer of a run" "$program" tokenize "$scratch/data.txt" --output "$scratch/by_run" --tokenizer "$run" --quiet
check "tokenize with the tokenizer of a run makes its shards again" cmp "$scratch/by_run/train_000001.bin" "$first_shard"
check "-x -1 trains one epoch" bash -c "'$program' ${data[*]@Q} ${tiny[*]@Q} --output '' --quiet -x -1"

# The numbers of tokens and of documents. Every document begins with the same token.
shard_counts() {
    python3 - "$1" <<'PY'
import array, sys
data = open(sys.argv[1], "rb").read()
tokens = array.array("H", data[1024:])
print(len(tokens), tokens.count(tokens[0]))
PY
}
printf 'one king\n<|endoftext|>\nthe old queen\n\nand a river\n<|endoftext|>\n' >"$scratch/documents.txt"
check "tokenize --split end-of-text" "$program" tokenize "$scratch/documents.txt" --output "$scratch/documents" \
    --tokenizer "$scratch/data" --split end-of-text --val-fraction 0 --quiet
check "--split end-of-text makes two documents" grep -q ' 2$' <(shard_counts "$scratch/documents/train_000001.bin")
check "tokenize --val-tokens" "$program" tokenize "$scratch/data.txt" --output "$scratch/held_out" --tokenizer "$scratch/data" \
    --val-tokens 777 --quiet
check "--val-tokens holds out exactly so many" grep -q '^777 ' <(shard_counts "$scratch/held_out/val_000000.bin")
shakespeare=../shared/data/tinyshakespeare/input.txt bpe=../shared/data/gpt2-bpe
if [ -e $shakespeare ] && [ -e $bpe ]; then
    tree=$scratch/tree
    mkdir -p "$tree/data/tinyshakespeare" "$tree/data/gpt2"
    cp data/*.sh "$tree/data/" && ln -s "$program" "$tree/train_gpt2"
    cp $shakespeare "$tree/data/tinyshakespeare/"
    cp $bpe/encoder.json "$tree/data/gpt2/vocab.json" && cp $bpe/vocab.bpe "$tree/data/gpt2/merges.txt"
    check "tinyshakespeare.sh" "$tree/data/tinyshakespeare.sh"
    check "tinyshakespeare.sh makes llm.c's validation shard" sha256sum --check --quiet - \
        <<<"fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62  $tree/data/tinyshakespeare/val_000000.bin"
    check "tinyshakespeare.sh makes llm.c's training shard" sha256sum --check --quiet - \
        <<<"8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8  $tree/data/tinyshakespeare/train_000001.bin"
else
    skip "tinyshakespeare.sh" "its text and GPT-2's vocabulary are not here"
fi

# ---- usage
refused "unknown option" 2 "did you mean --micro-batch?" "$program" --mirco-batch 4
refused "the option of a test program" 2 "unknown option --fault" "$program" --fault kill:rank=0,step=1
refused "no training data" 2 "--train-data is missing" "$program"
refused "unknown model" 2 "d12 (gpt2), d24 (gpt2-medium), d36 (gpt2-large), d48 (gpt2-xl)" "$program" "${data[@]}" --model d13
refused "no master weights in fp32" 2 "--master-weights off, but --precision auto is fp32 on this device" env CPU_ISA=plain \
    "$program" "${data[@]}" --master-weights off
refused "unknown precision" 2 "--precision fp16 is not known" "$program" "${data[@]}" --precision fp16
refused "fp8 without training" 2 "--precision fp8 is not known; give fp32|bf16|auto" "$program" eval --init "$scratch" \
    --val-data "$scratch/val_*.bin" --precision fp8
refused "fp8 with channels that are not a multiple of 16" 2 "needs a multiple of 16 channels, and the model has 8" \
    "${train[@]}" --precision fp8 --channels 8
refused "global batch that does not divide" 2 "is not a multiple of 32 tokens = --micro-batch 2 x --seq-len 16 x 1 rank; try --global-batch 96" "${train[@]}" --global-batch 100
refused "a default global batch that does not divide" 2 "x 1 rank = 6144 tokens do not divide the default --global-batch of 524288; try --micro-batch 2, or " \
    "$program" plan --model d12 --seq-len 2048 --micro-batch 3
refused "deterministic ranks with the default global batch" 2 \
    "--deterministic-ranks 8 x --micro-batch 2 x --seq-len 16 = 256 tokens do not divide the default --global-batch of 32; try --global-batch 256" \
    "$program" "${data[@]}" --layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --output '' --deterministic-ranks 8
refused "more than half held out" 2 "--val-fraction 0.6 must be at least 0 and at most 0.5" "$program" tokenize "$scratch/data.txt" \
    --output "$scratch/never" --train-bpe 300 --val-fraction 0.6
refused "--val-fraction and --val-tokens together" 2 "are two ways to hold out text; give one" "$program" tokenize "$scratch/data.txt" \
    --output "$scratch/never" --train-bpe 300 --val-fraction 0.1 --val-tokens 100
check "a refused tokenize makes no output" test ! -e "$scratch/never"
refused "channels that are not a multiple of the heads" 2 "33 channels are not a multiple of 2 heads" "${train[@]}" --channels 33
refused "unknown instruction set" 2 "CPU_ISA=mmx is not known" env CPU_ISA=mmx "$program" "${data[@]}" "${tiny[@]}" --output ''
refused "a second run in the same output" 2 "--resume" "$program" "${data[@]}" "${tiny[@]}" --output "$run" --steps 3
"$program" plan --resume --output "$scratch/again" >"$scratch/out" 2>&1
check "plan --resume takes the options of the run" grep -q "^options from $scratch/again/run.json: .* --layers 2 " "$scratch/out"
check "plan --resume plans its model" grep -q "2 layers" "$scratch/out"
cp -r "$scratch/data" "$scratch/changed"
printf '\1\1' | dd of="$scratch/changed/$(basename "$first_shard")" bs=1 seek=1024 conv=notrunc status=none
cp -r "$run" "$scratch/other_data"
warned "a resumed run names the training data that changed" \
    "the training data differ from those of the checkpoint ($(basename "$first_shard") has " \
    "$program" --resume --output "$scratch/other_data" --steps 31 --warmup 0 --train-data "$scratch/changed/train_*.bin"
"$program" plan --resume --output "$scratch/again" --steps 1000 >"$scratch/out" 2>&1
check "plan --resume says how long the rest takes" grep -q "^time .* for the remaining 967 of 1,000 steps: measured" "$scratch/out"
refused "a sample prompt that does not fit" 2 "error: --sample-prompt has " \
    "${train[@]}" --sample-every 5 --sample-prompt "$(printf 'king queen %.0s' $(seq 40))" --output "$scratch/prompt"
check "a refused sample prompt leaves no output" test ! -e "$scratch/prompt"
refused "--resume alone without a run" 2 "run.json, from which --resume takes options, does not exist" "$program" --resume --output "$scratch/none"
refused "an option of nanoGPT" 2 "here it is --steps" "${train[@]}" --max_iters=100
cp -r "$run/step_000030" "$scratch/own_model"
for resume in '' --resume; do
    # shellcheck disable=SC2086  # nothing, or an option
    refused "an output that already holds a model $resume" 2 "--output $scratch/own_model already holds a model" "$program" \
        "${train_data[@]}" --init "$scratch/own_model" --seq-len 16 --steps 1 --output "$scratch/own_model" $resume
done
check "an output that already holds a model gets no new file" diff -r "$run/step_000030" "$scratch/own_model"
cp -r "$run/step_000015" "$scratch/own_model/"
refused "a directory with both a model and checkpoints" 2 "name the checkpoint ($scratch/own_model/step_000015)" "$program" generate --init "$scratch/own_model"
refused "an unknown command" 2 "did you mean train?" "$program" trian
refused "--init on resume" 2 "--resume continues from $scratch/again/step_0000" "$program" --resume --output "$scratch/again" --init "$run" --steps 40
started_by_init=("$program" "${train_data[@]}" --init "$run" --seq-len 16 --micro-batch 2 --quiet --checkpoint-every 2 --resume)
for steps in 2 4; do
    check "--resume --init, to step $steps" "${started_by_init[@]}" --output "$scratch/by_init" --steps $steps
done
cp "$scratch/check.log" "$scratch/by_init.log"
check "--resume --init reports only --steps as changed" grep -qx "warning: changed since the checkpoint: --steps 4 (was 2)" "$scratch/by_init.log"
check "--resume --init trains the next steps" grep -q '"step":3,' "$scratch/by_init/log.jsonl"
check "--resume without other options after --init, from another directory" env -C "$scratch/elsewhere" "$program" --resume --output "$scratch/by_init" --steps 6 --quiet
check "--resume --init again, by another name" "${started_by_init[@]}" --init "$run/." --output "$scratch/by_init" --steps 8
refused "another --init on resume" 2 "so the weights of --init $run/step_000015 would not be read" "${started_by_init[@]}" \
    --init "$run/step_000015" --output "$scratch/by_init" --steps 10
refused "another --seq-len on resume" 2 "--seq-len 8: $scratch/again/step_0000" "$program" --resume --output "$scratch/again" --seq-len 8 --steps 40
check "the same --seq-len on resume" "$program" --resume --output "$scratch/by_init" --seq-len 16 --steps 8 --quiet
refused "another shape on resume" 2 "4 layers" "$program" "${data[@]}" "${tiny[@]}" --layers 4 --output "$run" --resume --steps 40
vocabulary=$(python3 -c "import json; print(json.load(open('$run/step_000030/config.json'))['vocab_size'])")
for from in "--init $run" "--resume --output $scratch/again"; do
    # shellcheck disable=SC2086  # words
    refused "another vocabulary than the model's: ${from%% *}" 2 "has a vocabulary of $vocabulary" \
        "$program" "${train_data[@]}" --output '' $from --seq-len 16 --steps 31 --vocab-size 999
done
check "--vocab-size of the model itself is accepted" "$program" "${train_data[@]}" --output '' --init "$run" --seq-len 16 --steps 1 --quiet --vocab-size "$vocabulary"
refused "tokenizer larger than the vocabulary" 2 "but the model's vocabulary has 256" "${train[@]}" --vocab-size 256
long_prompt=$(make_text 200)
refused "prompt longer than the context" 2 "error: --prompt has " "$program" generate --init "$run" --prompt "$long_prompt"
check "prompt longer than the context: nothing is printed" test ! -s "$scratch/out"

# ---- missing and damaged input
mkdir "$scratch/no_steps" && cp "$run/run.json" "$scratch/no_steps"
refused "a run without a checkpoint" 66 "this run has saved no checkpoint yet" "$program" generate --init "$scratch/no_steps"
longer="--seq-len 128 is more than the 16 positions that $run/step_000030 was trained with"
refused "eval with --seq-len above the model's context" 2 "$longer" "$program" eval --init "$run" "${val_data[@]}" --seq-len 128
refused "train with --seq-len above the model's context" 2 "$longer" "$program" --init "$run" "${train_data[@]}" --seq-len 128 --output ''
refused "--val-every without --val-data" 2 "--val-every 5 needs --val-data" "$program" "${train_data[@]}" "${tiny[@]}" --val-every 5
odd=$scratch/$(printf 'd\xffx')
cp -r "$scratch/data" "$odd"
odd_run=("$program" "${tiny[@]}" --output "$scratch/odd_run" --checkpoint-every 2)
check "data whose name is not UTF-8" "${odd_run[@]}" --train-data "$odd/train_*.bin" --steps 2
refused "data whose name is not UTF-8, on resume" 65 \
    "run.json cannot hold bytes that are not UTF-8 (from $scratch/odd_run/run.json; give --train-data on the command line)" \
    "$program" --resume --output "$scratch/odd_run" --steps 4
check "data whose name is not UTF-8, given again" "${odd_run[@]}" --train-data "$odd/train_*.bin" --steps 4 --resume
mkfifo "$scratch/a_pipe" && ln -s none "$scratch/dangling"
for output in "data.txt is a file" "a_pipe is a pipe"; do
    refused "an output: $output" 73 "--output $scratch/$output, not a directory; give another name" \
        "${train[@]}" --output "$scratch/${output%% *}" --checkpoint-every 1
done
refused "an output below a file" 73 "--output $scratch/data.txt/a/b: $scratch/data.txt is a file, not a directory; give another name" \
    "${train[@]}" --output "$scratch/data.txt/a/b" --checkpoint-every 1
refused "an output that is a broken link" 73 "--output $scratch/dangling is a link to none, which does not exist; make that directory, or" \
    "${train[@]}" --output "$scratch/dangling" --checkpoint-every 1
refused "an output of tokenize that is a file" 73 "--output $scratch/data.txt is a file, not a directory; give another name" \
    "$program" tokenize "$scratch/data.txt" --output "$scratch/data.txt" --train-bpe 300
ln -s loop "$scratch/loop"
refused "an output that is a loop of links" 73 "$scratch/loop: cannot follow this link: Too many levels of symbolic links" \
    "${train[@]}" --output "$scratch/loop" --checkpoint-every 1
hostile=$scratch/$(printf 'h\033[2J\nerror: x\302\233')
refused "control characters in a name are printed as escapes" 66 'h\x1b[2J\x0aerror: x\x9b: there is no such file' \
    "$program" tokenize "$hostile" --output "$scratch/hostile" --train-bpe 300
cp "$scratch/data.txt" "$hostile"
printf '\xff' >>"$hostile"
warned "control characters in the name of an input are printed as escapes" "$scratch/h\\x1b[2J\\x0aerror: x\\x9b: is not UTF-8 text" \
    "$program" tokenize "$hostile" --output "$scratch/hostile" --train-bpe 300
# escaped TEXT COMMAND...: the command succeeds and prints TEXT, and no escape character.
escaped() {
    local text=$1
    shift
    "$@" >"$scratch/shown" 2>&1 && grep -qF -- "$text" "$scratch/shown" && ! grep -q $'\e' "$scratch/shown"
}
cp -r "$run" "$scratch/"$'e\e[2J'
hostile=$scratch/$'e\e[2J'
check "eval escapes control characters in names" escaped '/e\x1b[2J/step_000030 on ' "$program" eval --init "$hostile" "${val_data[@]}" \
    --batches 1
printf x >>"$hostile/step_000030/optimizer.safetensors"
check "plan escapes control characters in names" escaped '/e\x1b[2J/step_000030/optimizer.safetensors: has ' "$program" plan --resume \
    --output "$hostile"
check "an output whose name is not UTF-8" "${train[@]}" --output "$scratch/$(printf 'f\xffx')"
check "an output whose name is not UTF-8 can be resumed" "$program" --resume --output "$scratch/$(printf 'f\xffx')" --steps 4 --quiet
check "a working directory whose name is not UTF-8" \
    env -C "$odd" "${train[@]}" --output here
refused "threads beyond all cores" 2 "OMP_NUM_THREADS=100000 is more than 4096 threads" env OMP_NUM_THREADS=100000 "${train[@]}"
refused "a micro-batch of more than 2^31 tokens" 2 "--micro-batch 1048576 x --seq-len 65536 is 68,719,476,736 tokens in a micro-batch" "$program" plan \
    --layers 1 --heads 1 --channels 16 --micro-batch 1048576 --seq-len 65536 --global-batch 0
cp -r "$run" "$scratch/to_the_end"
check "--stop-after with the largest number" "$program" --resume --output "$scratch/to_the_end" --steps 31 --stop-after 9223372036854775807 --quiet
check "--stop-after with the largest number trains to the last step" grep -q '"step":30,' "$scratch/to_the_end/log.jsonl"
warned "another tokenizer on resume gives a warning" "the tokenizer $scratch/other differs from that of" "$program" --resume --output "$scratch/to_the_end" \
    --steps 32 --tokenizer "$scratch/other"
if can_drop_root; then
    mkdir "$scratch/nobody" && chown 65534 "$scratch/nobody"
    refused "no thread can be started" 1 "no thread can be started, which needs" "${not_root[@]}" bash -c 'ulimit -u 1; exec "$@"' nobody \
        "$scratch/train_gpt2" "${train[@]:1}" --output "$scratch/nobody/run"
else
    skip "no thread can be started" "only root can become another user, by setpriv"
fi
refused "a pattern that matches no shard" 66 "nothing_*.bin" "${train[@]}" --train-data "$scratch/nothing_*.bin" --output "$scratch/fresh/output"
check "a refused start leaves no empty output" test ! -e "$scratch/fresh"
refused "a directory that does not exist" 66 "--init $scratch/nowhere: there is no such directory; nothing is downloaded" "$program" generate --init "$scratch/nowhere"
if can_drop_root; then
    mkdir -m 700 "$scratch/closed" && cp -r "$run" "$scratch/closed/run"
    for command in generate plan; do
        refused "a directory below one that may not be searched: $command" 66 \
            "--init $scratch/closed/run: cannot open the directory: Permission denied" \
            "${not_root[@]}" "$scratch/train_gpt2" "$command" --init "$scratch/closed/run"
    done
else
    skip "a directory below one that may not be searched" "only root can become another user, by setpriv"
fi
mkdir "$scratch/empty"
refused "a directory that is no checkpoint" 66 "neither a Hugging Face directory" "$program" generate --init "$scratch/empty"

# overwrite FILE OFFSET BYTES
overwrite() { printf '%b' "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
cp "$first_shard" "$scratch/truncated.bin" && truncate -s -100 "$scratch/truncated.bin"
refused "truncated shard" 65 "truncated.bin" "${train[@]}" --train-data "$scratch/truncated.bin"
: >"$scratch/empty.bin"
refused "an empty shard" 65 "empty.bin: has 0 bytes, too few for a token shard" "${train[@]}" --train-data "$scratch/empty.bin"
cp "$first_shard" "$scratch/magic.bin" && overwrite "$scratch/magic.bin" 0 '\x01\x02\x03\x04'
refused "wrong magic" 65 "magic.bin" "${train[@]}" --train-data "$scratch/magic.bin"
cp "$first_shard" "$scratch/token.bin" && overwrite "$scratch/token.bin" 1400 '\xff\xff'
refused "a token outside of the vocabulary" 65 "65535" "${train[@]}" --train-data "$scratch/token.bin" --steps 100
refused "fewer tokens than a batch" 65 "train_" "${train[@]}" --global-batch 1048576

# A copy without trainer.json, which has the checksums: a plain Hugging Face directory.
copy_run() { rm -rf "$scratch/copy" && cp -r "$run/step_000030" "$scratch/copy" && rm "$scratch/copy/trainer.json"; }
copy_run && overwrite "$scratch/copy/model.safetensors" 9 x
refused "broken safetensors header" 65 "model.safetensors" "$program" generate --init "$scratch/copy"
copy_run && truncate -s 1000 "$scratch/copy/model.safetensors"
refused "truncated weights" 65 "model.safetensors" "$program" generate --init "$scratch/copy"
copy_run && overwrite "$scratch/copy/model.safetensors" $(($(stat -c %s "$scratch/copy/model.safetensors") - 4)) '\x00\x00\xc0\x7f'
not_a_number="model.safetensors: transformer.h.1.mlp.c_proj.bias[31] is NaN"
refused "NaN weights: generate" 65 "$not_a_number" "$program" generate --init "$scratch/copy"
refused "NaN weights: eval" 65 "$not_a_number" "$program" eval --init "$scratch/copy" "${val_data[@]}"
refused "NaN weights: train --init" 65 "$not_a_number" "$program" "${train_data[@]}" --init "$scratch/copy" --steps 1 --output ''
# Both biases of 3e38 are finite, but LayerNorm's sum over them overflows to infinity.
copy_run && overwrite "$scratch/copy/model.safetensors" \
    $(($(stat -c %s "$scratch/copy/model.safetensors") - 8)) '\xe6\xb1\x61\x7f\xe6\xb1\x61\x7f'
refused "eval of weights whose activations overflow fp32" 65 "with these weights, values exceed the range of fp32" \
    "$program" eval --init "$scratch/copy" "${val_data[@]}" --precision fp32
# stdout and stderr in one file, as on a terminal.
"$program" generate --init "$scratch/copy" --prompt "the king" --precision fp32 >"$scratch/both" 2>&1
check "an error of generate begins a new line" grep -q "^error: the model gives token 0 a logit of nan" "$scratch/both"
# eval on a terminal, with a shard that becomes shorter once the progress is shown.
python3 - "$program" eval --init "$run" --val-data "$scratch/shrinks.bin" --micro-batch 1 --seq-len 16 >"$scratch/both" <<'PY'
import os, pty, struct, sys
shard, tokens = sys.argv[6], 1 << 23
with open(shard, "wb") as file:
    file.write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + bytes(2 * tokens))
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
shown = b""
try:
    while chunk := os.read(terminal, 4096):
        shown += chunk
        if b"batches" in shown:
            os.truncate(shard, 1024)
except OSError:  # the program has closed the terminal
    os.waitpid(child, 0)
print(shown.decode().replace("\r\n", "\n"))
PY
python3 - "$scratch/long.bin" <<'PY'
import struct, sys
tokens = 1 << 23
open(sys.argv[1], "wb").write(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + bytes(2 * tokens))
PY
check "an error of eval begins a new line, below the progress" bash -c \
    'grep -q "[0-9]/524287 batches$" "$1" && grep -q "^error: .* became shorter while it was in use" "$1"' own_line "$scratch/both"
# A signal ends eval at once, with the exit code of that signal.
for signal in INT TERM; do
    rm -f "$scratch/err"
    "${interruptible[@]}" "$program" eval --init "$run" --val-data "$scratch/long.bin" --micro-batch 1 --seq-len 16 >"$scratch/out" 2>"$scratch/err" &
    pid=$!
    wait_for "$scratch/err" batches
    start=${EPOCHREALTIME/./}
    kill -$signal $pid
    wait $pid 2>/dev/null
    check "SIG$signal in eval: its exit code" test $? = $((128 + $(kill -l $signal)))
    check "SIG$signal in eval: within a second" test $((${EPOCHREALTIME/./} - start)) -lt $((1000000 * slower))
    check "SIG$signal in eval: no half-written result" test ! -s "$scratch/out"
done
# generate escapes control characters on a terminal, and only there.
odd_prompt=$'a\tking\n\e[2Jof\a'
text=$("$program" generate --init "$run" --prompt "$odd_prompt" --max-tokens 2)
check "generate into a pipe writes the bytes of a prompt" test "${text:0:${#odd_prompt}}" = "$odd_prompt"
check "generate on a terminal escapes control characters, but not tab and newline" python3 - "$program" generate --init "$run" \
    --prompt "$odd_prompt" --max-tokens 2 <<'PY'
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.argv[1], sys.argv[1:])
shown = b""
try:
    while chunk := os.read(terminal, 4096):
        shown += chunk
except OSError:  # the program has closed the terminal
    os.waitpid(child, 0)
assert b"\x1b" not in shown and b"\a" not in shown and b"a\tking\r\n" in shown and b"[2Jof" in shown, shown
PY
copy_run && sed 's/"tokens": [0-9]*/"tokens": 1/' "$run/step_000030/trainer.json" >"$scratch/copy/trainer.json"
refused "a checkpoint whose trainer.json is damaged" 65 "$scratch/copy/trainer.json: its checksum does not match" \
    "$program" generate --init "$scratch/copy" --max-tokens 3
copy_run && cp "$run/step_000030/trainer.json" "$scratch/copy" && overwrite "$scratch/copy/model.safetensors" 20000 '\x01\x02\x03'
for command in "generate" "eval ${val_data[*]}" "train ${train_data[*]} --steps 1 --output $scratch/none"; do
    # shellcheck disable=SC2086
    refused "other weights than were saved: ${command%% *}" 65 "model.safetensors: its checksum does not match" \
        "$program" $command --init "$scratch/copy"
done
copy_run && sed -i 's/"n_embd": *32/"n_embd": 64/' "$scratch/copy/config.json"
refused "weights of another shape" 65 "needs" "$program" generate --init "$scratch/copy"
copy_run && rm "$scratch/copy/tokenizer.json" "$scratch/copy/vocab.json"
refused "no tokenizer" 66 "tokenizer" "$program" generate --init "$scratch/copy"

head -c 3000 "$program" >"$scratch/program.txt"
check "tokenize warns of a binary file" bash -c '"$@" 2>&1 | grep -q "^warning: .*program.txt: is not UTF-8 text (byte "' binary \
    "$program" tokenize "$scratch/program.txt" --output "$scratch/binary" --tokenizer "$run" --quiet
printf 'caf\xe9 au lait\n' >"$scratch/latin1.txt"
echo '[{"text": "one king"}]' >"$scratch/array.json"
check "tokenize of odd files" "$program" tokenize "$scratch/latin1.txt" "$scratch/array.json" "$scratch/data.txt" \
    --output "$scratch/odd" --tokenizer "$run" --quiet
cp "$scratch/check.log" "$scratch/odd.log"
check "tokenize warns of Latin-1 text" grep -q "^warning: .*latin1.txt: is not UTF-8 text (byte 4).* iconv -f ISO-8859-1" "$scratch/odd.log"
check "tokenize warns of a .json file" grep -q "^warning: .*array.json: is JSON, but is read as plain text" "$scratch/odd.log"
check "tokenize warns of no other file" test "$(grep -c warning: "$scratch/odd.log")" = 2
mkdir "$scratch/mixed"
cp "$scratch/data.txt" "$scratch/mixed/"
touch "$scratch/mixed/"{a.csv,b.csv,c.gz,README}
ln -s data.txt "$scratch/mixed/link.txt"
mixed=("$program" tokenize "$scratch/mixed" --tokenizer "$run")
check "tokenize of a folder with other files" "${mixed[@]}" --output "$scratch/of_mixed"
cp "$scratch/check.log" "$scratch/mixed.log"
check "tokenize counts the files that it leaves out" grep -qx "4 files in the folders left out" "$scratch/mixed.log"
mkdir "$scratch/with_tokens"
cp "$scratch/data.txt" "$scratch/with_tokens/"
cp -r "$scratch/data" "$scratch/with_tokens/earlier"
check "tokenize of a folder with an earlier tokenization" "$program" tokenize "$scratch/with_tokens" --tokenizer "$run" --output "$scratch/of_tokens"
cp "$scratch/check.log" "$scratch/of_tokens.log"
check "the merges.txt of an earlier tokenization is left out, and counted" grep -qx "$(find "$scratch/data" -type f | wc -l) files in the folders left out" "$scratch/of_tokens.log"
check "the merges.txt of an earlier tokenization adds no tokens" cmp "$scratch/of_tokens/train_000001.bin" "$first_shard"
check "tokenize --quiet succeeds" "${mixed[@]}" --output "$scratch/quiet_mixed" --quiet
cp "$scratch/check.log" "$scratch/mixed.log"
check "tokenize --quiet prints no counts" test ! -s "$scratch/mixed.log"
: >"$scratch/empty.txt"
refused "an empty file" 65 "empty.txt: is empty" "$program" tokenize "$scratch/empty.txt" --output "$scratch/never" --train-bpe 300
head -c 100000 /dev/zero | tr '\0' x >"$scratch/word.txt"
refused "one long word" 65 "they suffice for 257; 100,000 bytes are in words of more than 1024 bytes" "$program" tokenize "$scratch/word.txt" \
    --output "$scratch/word" --train-bpe 300

# A model without a tokenizer keeps its own end of text.
copy_run && rm "$scratch"/copy/{tokenizer,vocab}.json "$scratch"/copy/merges.txt && sed -i 's/"\(.os_token_id\)": *[0-9]*/"\1": 0/' "$scratch/copy/config.json"
mkdir "$scratch/bare" && cp "$scratch"/data/*.bin "$scratch/bare"
check "train from a model without a tokenizer" "$program" --train-data "$scratch/bare/train_*.bin" --init "$scratch/copy" --quiet --steps 1 \
    --output "$scratch/continued"
check "its checkpoint has the model's end of text" test \
    "$(grep -c '"[be]os_token_id": 0' "$scratch/continued/step_000001/config.json")" = 2

# If the newest checkpoint is damaged, --resume names it and takes the one before.
cp -r "$run" "$scratch/damaged_run"
overwrite "$scratch/damaged_run/step_000030/optimizer.safetensors" 5000 x
"$program" "${data[@]}" "${tiny[@]}" --output "$scratch/damaged_run" --steps 30 --resume --checkpoint-every 15 >"$scratch/out" 2>&1
check "damaged checkpoint: the one before is used" grep -q '"step":15' "$scratch/damaged_run/log.jsonl"
check "damaged checkpoint: a warning, also with --quiet" grep -q "^warning: skipping a damaged checkpoint: .*step_000030/optimizer" "$scratch/out"
check "damaged checkpoint: a warning in the log" grep -q '"kind":"warning","text":"skipping a damaged checkpoint: ' "$scratch/damaged_run/log.jsonl"

# A save that was killed between its two renames: --resume restores the old name.
cp -r "$run" "$scratch/renamed_run"
mv "$scratch/renamed_run/step_000030" "$scratch/renamed_run/step_000030.replaced"
check "--resume takes a checkpoint that a killed save had renamed" "$program" "${data[@]}" "${tiny[@]}" --output "$scratch/renamed_run" --steps 31 --resume

# If all checkpoints are damaged, no run starts from the beginning and no file is deleted. One has lost its optimizer state, the
# other its trainer.json; both still have their weights.
cp -r "$run" "$scratch/all_damaged"
overwrite "$scratch/all_damaged/step_000030/optimizer.safetensors" 5000 x
overwrite "$scratch/all_damaged/step_000015/trainer.json" 5 x
tree_of() { (cd "$1" && find . -type f -exec sha256sum {} + | sort | sha256sum); }
before=$(tree_of "$scratch/all_damaged")
on_damaged=("$program" "${data[@]}" "${tiny[@]}" --output "$scratch/all_damaged" --steps 40 --keep 1)
refused "every checkpoint damaged" 65 "none of its checkpoints is intact" "${on_damaged[@]}" --resume
check "every checkpoint damaged: both files are named" test "$(grep -cE 'step_000030/optimizer.safetensors: its checksum|step_000015/trainer.json: ' "$scratch/err")" = 2
check "every checkpoint damaged: the message says how to use the weights" grep -q -- "--init $scratch/all_damaged/step_000030 takes its weights alone" "$scratch/err"
refused "every checkpoint damaged: a new run" 2 "holds the checkpoints of an earlier run" "${on_damaged[@]}"
refused "every checkpoint damaged: generate" 65 "none of its checkpoints is intact" "$program" generate --init "$scratch/all_damaged"
check "every checkpoint damaged: no file is changed" test "$(tree_of "$scratch/all_damaged")" = "$before"
check "every checkpoint damaged: the advice works" "$program" "${train_data[@]}" --init "$scratch/all_damaged/step_000030" --seq-len 16 \
    --micro-batch 2 --global-batch 64 --steps 2 --quiet --output "$scratch/from_damaged"

# ---- one run at a time in an output
busy=$scratch/busy
in_busy=("$program" "${data[@]}" "${tiny[@]}" --output "$busy" --val-every 0 --checkpoint-every 50 --keep 1)
"${in_busy[@]}" --steps 1000000 &
owner=$!
check "a run in the background saves" wait_for "$busy/latest"
refused "a second run in the output of a live one" 73 "$busy is in use by another run: pid $owner on $(hostname) since" "${in_busy[@]}" --steps 3
refused "--resume in the output of a live run" 73 "is in use by another run: pid $owner" "${in_busy[@]}" --steps 1000000 --stop-after 200 --resume
check "a refused second run changes no file" test -z "$(find "$busy" -name '*.stale*' -o -name 'log.1.jsonl')"
kill -9 $owner
wait $owner 2>/dev/null
check "after kill -9 the run can be resumed" "${in_busy[@]}" --steps 1000000 --resume --stop-after 5
check "a run that ends leaves no lock" test ! -e "$busy/run.lock"

# ---- output that cannot be written
bash -c '"$@" >&-' closed "$program" "${train_data[@]}" "${tiny[@]}" --log-every 1 --quiet=0 --output "$scratch/unheard_run" --steps 3 2>"$scratch/err"
check "train with a closed stdout continues" test $? = 0
check "train with a closed stdout warns once" test "$(grep -c 'cannot write to stdout: Bad file descriptor; the run continues' "$scratch/err")" = 1
check "train with a closed stdout logs every step" test "$(grep -c '"kind":"step"' "$scratch/unheard_run/log.jsonl")" = 3
if [ -e /dev/full ]; then
    for command in "plan --layers 1 --heads 1 --channels 16 -t 16 -d 0" "generate --init $run --max-tokens 5" "eval --init $run --val-data $scratch/data/val_*.bin --batches 1" \
        "tokenize $scratch/data.txt --output $scratch/unread --train-bpe 300" "--help" "--version"; do
        # shellcheck disable=SC2086  # words
        refused "${command%% *} to a full device" 74 "cannot write to standard output: No space left on device" \
            bash -fc 'exec "$@" >/dev/full' full "$program" $command
    done
    check "tokenize to a full device leaves its shards" test -s "$scratch/unread/train_000001.bin"
    bash -c '"$@" >/dev/full' full "$program" "${train_data[@]}" "${tiny[@]}" --log-every 1 --quiet=0 --output "$scratch/unread_run" \
        --steps 3 2>"$scratch/err"
    check "train to a full device continues" test $? = 0
    check "train to a full device warns once" test "$(grep -c 'cannot write to stdout: No space left on device; the run continues' "$scratch/err")" = 1
    check "train to a full device logs every step" test "$(grep -c '"kind":"step"' "$scratch/unread_run/log.jsonl")" = 3
else
    skip "output to a full device" "there is no /dev/full"
fi
timeout 20 "$program" generate --init "$run" --max-tokens 1000 --num-samples 100000 2>"$scratch/err" | head -c 10 >"$scratch/out"
check "generate ends when its reader has ended" test "${PIPESTATUS[0]}" = 74
check "generate names the broken pipe" grep -q "^error: cannot write to standard output: Broken pipe" "$scratch/err"
: >"$scratch/file"
refused "output below a file" 73 "$scratch/file" "${train[@]}" --output "$scratch/file/out" --checkpoint-every 1
long=$scratch/long
while [ ${#long} -lt 4065 ]; do long=$long/xxxxxxxxxxxx; done
refused "an output whose name is too long for the files of a checkpoint" 73 "the name of the directory has 4065 bytes" \
    "${train[@]}" --output "${long:0:4065}" --checkpoint-every 3
check "an output whose name is too long is not created" test ! -e "$scratch/long"
# A directory in the place of `latest`: each save warns, and deletes older checkpoints as before.
mkdir -p "$scratch/no_latest/latest"
check "a directory named latest: the run succeeds" bash -c '"$@" 2>"$0"' "$scratch/err" \
    "$program" "${data[@]}" "${tiny[@]}" --output "$scratch/no_latest" --steps 6 --checkpoint-every 3 --keep 1
check "a directory named latest: a warning for each save" test "$(grep -c '^warning: the checkpoint is saved, but the file latest' "$scratch/err")" = 2
check "a directory named latest: older checkpoints are deleted" test ! -e "$scratch/no_latest/step_000003"
# Files may have 200 KiB. model.safetensors has 140, and writing optimizer.safetensors fails in the middle, in three saves in a row.
limited=$scratch/limited_run
check "6 steps without a limit" "$program" "${data[@]}" "${tiny[@]}" --output "$limited" --steps 6 --checkpoint-every 6
refused "a limit on the size of files" 74 "File too large" bash -c 'ulimit -f 200 && exec "$@"' limited \
    "$program" "${data[@]}" "${tiny[@]}" --output "$limited" --steps 30 --checkpoint-every 6 --resume
check "a limit on the size of files: the failed saves leave nothing" test "$(find "$limited" -name 'step_*' -printf '%f ')" = "step_000006 "
check "a limit on the size of files: the checkpoint before can be resumed" "$program" "${data[@]}" "${tiny[@]}" --output "$limited" \
    --steps 12 --checkpoint-every 6 --resume
check "a limit on the size of files: the resumed run trains the next steps" grep -q '"step":11,' "$limited/log.jsonl"
if unshare --mount true 2>/dev/null; then
    disk=$scratch/disk
    mkdir "$disk"
    # 1 MB holds the log and one checkpoint of about 700 kB, but not two. The first one must survive.
    unshare --mount bash -c '
        mount -t tmpfs -o size=1000k none "$0"
        "$@" >"$0.out" 2>"$0.err"; echo $? >"$0.status"
        ls "$0/run" >"$0.list"' "$disk" "$program" "${data[@]}" "${tiny[@]}" --output "$disk/run" --steps 12 --checkpoint-every 6 --keep 0
    check "disk full: exit code 74" test "$(cat "$disk.status")" = 74
    check "disk full: one error with the sizes" grep -q "^error: .*a checkpoint needs .* are free" "$disk.err"
    check "disk full: the error names the step that is lost, and the last checkpoint" \
        grep -q "^error: the checkpoint of step 12 was not saved: .*; the last good checkpoint is .*/step_000006$" "$disk.err"
    check "disk full: the checkpoint before survives" grep -qx step_000006 "$disk.list"

    # The lines of 2,000 steps fill the disk of the log.
    unshare --mount bash -c '
        mount -t tmpfs -o size=100k none "$0"
        "$@" --output "$0/run" --steps 2000 --checkpoint-every 0 2>"$0.log.err"; echo $? >"$0.log.status"
        grep -c "\"kind\":\"step\"" "$0/run/log.jsonl" >"$0.log.lines"' "$disk" "$program" "${data[@]}" "${tiny[@]}"
    check "the disk of the log is full: exit code 74" test "$(cat "$disk.log.status")" = 74
    check "the disk of the log is full: a warning says that the run continues" grep -q '^warning: cannot write .*log.jsonl: No space left on device; the run continues' "$disk.log.err"
    check "the disk of the log is full: the steps before are there, and the others are counted" \
        test "$(sed -n 's/^warning: \([0-9]*\) lines could not be written to .*/\1/p' "$disk.log.err")" -ge "$((2000 - $(cat "$disk.log.lines")))"

    # Two old checkpoints, and too little space for a third. `none`: not enough even without the older one. `keep`: enough without
    # the older one, but --keep 3 keeps it. `room` and `full`: enough, because --keep 1 deletes it.
    unshare --mount bash -c '
        mount -t tmpfs -o size=4m none "$0"
        run=("$@" --output "$0/run" --checkpoint-every 6)
        "${run[@]}" --steps 12 --keep 0
        attempt() {  # NAME KIB_FREE OPTION...
            rm -f "$disk/ballast"
            head -c $((($(df --output=avail -k "$disk" | tail -1) - $2) * 1024)) /dev/zero >"$disk/ballast"
            "${run[@]}" --resume "${@:3}" 2>"$disk.$1.err"; echo $? >"$disk.$1.status"
            ls "$disk/run" | grep step_ | tr "\n" " " >"$disk.$1.list"
        }
        disk=$0
        attempt none 50 --steps 60 --keep 1
        attempt keep 400 --steps 60 --keep 3
        attempt room 400 --steps 18 --keep 1
        rm "$disk/ballast"
        "${run[@]}" --resume --steps 30 --keep 0 2>/dev/null
        attempt full 0 --steps 36 --keep 1' "$disk" "$program" "${data[@]}" "${tiny[@]}"
    # Space for 30 files. A checkpoint has about 10.
    unshare --mount bash -c '
        mount -t tmpfs -o size=40m,nr_inodes=30 none "$0"
        "$@" --output "$0/run" --steps 20 --checkpoint-every 2 --keep 2 2>"$0.inodes.err"; echo $? >"$0.inodes.status"
        ls "$0/run" | grep step_ | tr "\n" " " >"$0.inodes.list"' "$disk" "$program" "${data[@]}" "${tiny[@]}"
    check "a disk without room for files: --keep 2 makes it" test "$(cat "$disk.inodes.status") $(cat "$disk.inodes.list")" = "0 step_000018 step_000020 "
    check "a disk without room for files: no save fails" test ! -s "$disk.inodes.err"
    for name in none keep; do
        check "disk full, $name: exit code 74" test "$(cat "$disk.$name.status")" = 74
        check "disk full, $name: both old checkpoints are there" test "$(cat "$disk.$name.list")" = "step_000006 step_000012 "
        check "disk full, $name: the error names the last checkpoint and the reason" grep -q "^error: three saves in a row failed, .* $disk/run/step_000012; .*a checkpoint needs" "$disk.$name.err"
    done
    check "disk full: a lower --keep is named only where it helps" test "$(cat "$disk".{none,keep}.err | grep -c '^error: .*; --keep 2 would make room')" = 1
    check "disk full: --keep 1 makes room" test "$(cat "$disk.room.status") $(cat "$disk.room.list")" = "0 step_000018 "
    check "disk full: --keep 1 makes room where not a byte is free" test "$(cat "$disk.full.status") $(cat "$disk.full.list")" = "0 step_000036 "
else
    skip "disk full" "unshare --mount is not permitted here"
fi
finish
