#!/usr/bin/env bash
# test_cli.sh: train, generate, eval, plan and tokenize end to end on a tiny model, and their messages for bad input.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
train_data=(--train-data "$scratch/data/train_*.bin") val_data=(--val-data "$scratch/data/val_*.bin")
data=("${train_data[@]}" "${val_data[@]}")
train=("$program" "${data[@]}" "${tiny[@]}" --output '' --steps 3)
run=$scratch/run
first_shard=$(find "$scratch/data" -name 'train_*.bin' | head -1)

# ---- runs that succeed
# warned NAME TEXT COMMAND...: the command succeeds and prints a warning with this text.
warned() { check "$1" bash -c '"${@:2}" 2>&1 >/dev/null | grep -qF -- "warning: $1"' warned "${@:2}"; }
check "train runs to its last step" "$program" "${data[@]}" "${tiny[@]}" --output "$run" --steps 30 --val-every 10 \
    --checkpoint-every 15
loss_of() { sed -n 's/.*"kind":"val".*"step":'"$1"',.*"val_loss":\([0-9.]*\).*/\1/p' "$run/log.jsonl"; }
check "the loss falls" awk -v a="$(loss_of 0)" -v b="$(loss_of 30)" 'BEGIN { exit !(a > 0 && b > 0 && b < 0.8 * a) }'
check "log.jsonl is JSON" python3 -c "import json; [json.loads(line) for line in open('$run/log.jsonl')]"
generate() { "$program" generate --init "$run" --prompt "the king" --max-tokens 40 "$@"; }
check "generate with the same seed writes the same text" test "$(generate --seed 3)" = "$(generate --seed 3)"
check "generate with another seed writes another text" test "$(generate --seed 3)" != "$(generate --seed 4)"
check "eval gives the validation loss of training" python3 - "$run" "$scratch" "$program" <<'PY'
import json, re, subprocess, sys
run, scratch, program = sys.argv[1:]
val = [json.loads(line) for line in open(run + "/log.jsonl")]
want = [x["val_loss"] for x in val if x["kind"] == "val" and x["step"] == 30][-1]
out = subprocess.run([program, "eval", "--init", run, "--val-data", scratch + "/data/val_*.bin", "--micro-batch", "2",
                      "--batches", "20"], capture_output=True, text=True, check=True).stdout
got = float(re.search(r"loss ([0-9.]+)", out).group(1))
assert abs(got - want) < 1e-4 * want, (got, want)
PY
check "plan succeeds" "$program" plan --model d12 --micro-batch 4
check "plan succeeds for every named size" bash -c \
    "for m in d{12,24,36,48} gpt2{,-medium,-large,-xl} gpt3-{125m,350m,760m,1.3b,2.7b,6.7b,13b}; do
        '$program' plan --model \$m -b 4 -t 1024 | grep -q parameters || exit 1; done"
check "training takes llm.c's one-letter options" "$program" -i "$scratch/data/train_*.bin" -j \
    "$scratch/data/val_*.bin" -o '' -b 2 -t 16 -d 64 -l 1e-2 -u 1 -q 0.1 \
    -c 0.1 -v 2 -s 2 -g 4 -x 3 -n 0 -y 0 -k cosine --layers 2 --heads 2 --channels 32 --quiet
check "plan measures a step" grep -q "per step.*: measured here with 2 x 16 tokens, .* tokens/s, .* % of the peak" \
    <("$program" plan "${data[@]}" "${tiny[@]}")
check "plan says that it does not measure a step that is too large" grep -q \
    "estimated at 40 % of the peak: a step is too large" <("$program" plan --model d48 -b 4 -t 1024)
check "plan says what does not fit, and what to try" grep -q \
    "^memory .* of .* available, does not fit: try a smaller model" \
    <("$program" plan --layers 2 --heads 250 --channels 64000 --micro-batch 1)
"${train[@]}" --quiet=0 >"$scratch/out"
check "train says how much memory there is" grep -q "^memory .* of .* available: weights" "$scratch/out"

# ---- run.toml, --resume and --config
check "run.toml has the options of the run" grep -qx "lr = 0.01" "$run/run.toml"
if python3 -c "import tomllib" 2>/dev/null; then
    check "run.toml is TOML" python3 -c \
        "import tomllib; assert tomllib.load(open('$run/run.toml', 'rb'))['layers'] == 2"
else
    skip "run.toml is TOML" "python3 has no tomllib (before 3.11)"
fi
cp -r "$run" "$scratch/again"
"$program" "${data[@]}" "${tiny[@]}" --quiet=0 --output "$scratch/again" --steps 30 --resume >"$scratch/out" 2>&1
check "--resume says that there is nothing to do" grep -q \
    "^nothing to do: the run is at step 30, and --steps is 30; a larger --steps continues" "$scratch/out"
"$program" --resume --output "$scratch/again" --steps 5 --lr 1e-5 >"$scratch/nothing" 2>&1
check "--resume without anything to do leaves run.toml alone" cmp "$run/run.toml" "$scratch/again/run.toml"
"$program" --resume --output "$scratch/again" --steps 33 --quiet=0 >"$scratch/out" 2>&1
check "--resume alone takes the options of the run" grep -q '"step":32,' "$scratch/again/log.jsonl"
check "--resume alone prints the options of the run" grep -q \
    "^options from $scratch/again/run.toml: --train-data .* --layers 2 .* --lr 0.01 " "$scratch/out"
check "--resume reports only the changed options" grep -q \
    "^warning: changed since the checkpoint: --steps 33 (was 30)$" "$scratch/out"
printf 'steps = 34 # more\nlr = 5e-3\n' >"$scratch/more.toml"
"$program" --resume --output "$scratch/again" --config "$scratch/more.toml" --lr 0.02 >"$scratch/out" 2>&1
check "the command line comes before --config, and --config before run.toml" grep -q \
    "^warning: changed since the checkpoint: --steps 34 (was 33), --lr 0.02 (was 0.01)$" "$scratch/out"
check "a new run takes --config of another run" "$program" --config "$run/run.toml" --output "$scratch/by_config" \
    --steps 2
check "a new run takes --config of another run: the same losses" cmp \
    <(head -3 "$run/log.jsonl" | grep -o '"loss":[^,]*') \
    <(grep -o '"loss":[^,]*' "$scratch/by_config/log.jsonl" | head -n "$(head -3 "$run/log.jsonl" | grep -c '"loss":')")
refused "a --config that does not exist" 66 "none.toml" "$program" --config "$scratch/none.toml"
sed 's/^lr = .*/lr = 1e31/' "$run/run.toml" >"$scratch/by_config/run.toml"
refused "a bad value in run.toml" 65 \
    "--lr 1e31 must be at least 0 and at most 1e+30 (from $scratch/by_config/run.toml" \
    "$program" --resume --output "$scratch/by_config"
# A run of version 0.2.0 has no run.toml.
cp -r "$run" "$scratch/older" && rm "$scratch/older/run.toml"
python3 - "$scratch/older/run.json" "${data[@]}" <<'PY'
import json, sys
options = {"train-data": sys.argv[3], "val-data": sys.argv[5], "layers": 2, "heads": 2, "channels": 32,
           "seq-len": 16, "micro-batch": 2, "global-batch": 64, "lr": 0.01, "warmup": 2,
           "steps": 30, "hash-check": 1000, "threads": 2, "gpus": ""}
json.dump({"version": "0.2.0", "directory": "/", "options": options}, open(sys.argv[1], "w"))
PY
check "a run of version 0.2.0 is resumed" "$program" --resume --output "$scratch/older" --steps 32 --quiet
check "a run of version 0.2.0 has a run.toml then" grep -qx "global-batch = 64" "$scratch/older/run.toml"
default_warmup=("$program" "${data[@]}" "${tiny[@]:0:14}" --quiet --output "$scratch/warmup")
rate_of() { sed -n 's/.*"step":'"$1"',.*"lr":\([0-9.e-]*\),.*/\1/p' "$scratch/warmup/log.jsonl"; }
"${default_warmup[@]}" --steps 400 --stop-after 1
check "the default warmup is a tenth of the steps" test "$(rate_of 0)" = 0.00025
"$program" --resume --quiet --output "$scratch/warmup" --steps 20 --stop-after 1
check "a warmup that was not given follows --steps on resume" test "$(rate_of 1)" = 0.01
check "a warmup that was not given fits a shorter run on resume" "$program" --resume --quiet --output \
    "$scratch/warmup" --steps 3
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
check "a path that is given on resume is relative to the current directory" env -C "$scratch/elsewhere" \
    "${started_run[@]}" --resume \
    --steps 8 --quiet --train-data 'near/train_*.bin'
"$program" "${train_data[@]}" "${tiny[@]}" --global-batch 0 --output "$scratch/no_batch" --steps 2 --checkpoint-every 2
"$program" --resume --output "$scratch/no_batch" --steps 3 --micro-batch 1 --quiet
check "another --micro-batch on resume keeps the tokens of a step" test \
    "$(sed -n 's/.*"step":2,"tokens":\([0-9]*\),.*/\1/p' \
    "$scratch/no_batch/log.jsonl")" = 96
odd=$scratch/$(printf 'd\xffx #"]')
cp -r "$scratch/data" "$odd"
check "data whose name is not UTF-8" "$program" "${tiny[@]}" --output "$scratch/odd_run" --train-data \
    "$odd/train_*.bin" --steps 2
check "data whose name is not UTF-8, on resume" "$program" --resume --output "$scratch/odd_run" --steps 4 --quiet

warned "validation on the training data gives a warning" "$first_shard is in both --train-data and --val-data" \
    "${train[@]}" --val-data "$first_shard"
check "tokenize takes the tokenizer of a checkpoint" "$program" tokenize "$scratch/data.txt" --output \
    "$scratch/by_run" --tokenizer "$run/step_000030" --quiet
check "tokenize with the tokenizer of a checkpoint makes its shards again" cmp "$scratch/by_run/train_000001.bin" \
    "$first_shard"

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
check "tokenize --val-tokens" "$program" tokenize "$scratch/data.txt" --output "$scratch/held_out" --tokenizer \
    "$scratch/data" \
    --val-tokens 777 --quiet
check "--val-tokens holds out exactly so many" grep -q '^777 ' <(shard_counts "$scratch/held_out/val_000000.bin")

# ---- usage
refused "unknown option" 2 "did you mean --micro-batch?" "$program" --mirco-batch 4
refused "no training data" 2 "--train-data is missing" "$program"
refused "unknown model" 2 "d12 (gpt2), d24 (gpt2-medium), d36 (gpt2-large), d48 (gpt2-xl)" "$program" "${data[@]}" \
    --model d13
refused "no master weights in fp32" 2 "--master-weights off, but --precision auto is fp32 on this device" env \
    CPU_ISA=plain \
    "$program" "${data[@]}" --master-weights off
refused "global batch that does not divide" 2 \
    "is not a multiple of 32 tokens = --micro-batch 2 x --seq-len 16 x 1 rank; try --global-batch 96" "${train[@]}" \
    --global-batch 100
refused "channels that are not a multiple of the heads" 2 "33 channels are not a multiple of 2 heads" "${train[@]}" \
    --channels 33
refused "unknown instruction set" 2 "CPU_ISA=mmx is not known" env CPU_ISA=mmx "$program" "${data[@]}" "${tiny[@]}" \
    --output ''
refused "a second run in the same output" 2 "--resume" "$program" "${data[@]}" "${tiny[@]}" --output "$run" --steps 3
refused "a sample prompt that does not fit" 2 "error: --sample-prompt has " \
    "${train[@]}" --sample-every 5 --sample-prompt "$(printf 'king queen %.0s' $(seq 40))"
refused "an option of nanoGPT" 2 "there is no --max_iters; use --steps" "${train[@]}" --max_iters=100
refused "an option that is gone" 2 "there is no --gpus; use --ranks N" "${train[@]}" --gpus 2
refused "--resume alone without a run" 2 "run.toml, from which --resume takes options, does not exist" "$program" \
    --resume --output "$scratch/none"
cp -r "$run/step_000030" "$scratch/own_model"
for resume in '' --resume; do
    # shellcheck disable=SC2086  # nothing, or an option
    refused "an output that already holds a model $resume" 2 "--output $scratch/own_model already holds a model" \
        "$program" \
        "${train_data[@]}" --init "$scratch/own_model" --seq-len 16 --steps 1 --output "$scratch/own_model" $resume
done
check "an output that already holds a model gets no new file" diff -r "$run/step_000030" "$scratch/own_model"
cp -r "$run/step_000015" "$scratch/own_model/"
refused "a directory with both a model and checkpoints" 2 "name the checkpoint ($scratch/own_model/step_000015)" \
    "$program" generate --init "$scratch/own_model"
started_by_init=("$program" "${train_data[@]}" --init "$run" --seq-len 16 --micro-batch 2 --quiet \
    --checkpoint-every 2 --resume)
for steps in 2 4; do
    check "--resume --init, to step $steps" "${started_by_init[@]}" --output "$scratch/by_init" --steps $steps
done
cp "$scratch/check.log" "$scratch/by_init.log"
check "--resume --init reports only --steps as changed" grep -qx \
    "warning: changed since the checkpoint: --steps 4 (was 2)" "$scratch/by_init.log"
check "--resume --init trains the next steps" grep -q '"step":3,' "$scratch/by_init/log.jsonl"
check "--resume without other options after --init, from another directory" env -C "$scratch/elsewhere" "$program" \
    --resume --output "$scratch/by_init" --steps 6 --quiet
refused "another --init on resume" 2 "so the weights of --init $run/step_000015 would not be read" \
    "${started_by_init[@]}" \
    --init "$run/step_000015" --output "$scratch/by_init" --steps 10
refused "another shape on resume" 2 "4 layers" "$program" "${data[@]}" "${tiny[@]}" --layers 4 --output "$run" \
    --resume --steps 40
refused "tokenizer larger than the vocabulary" 2 "but the model's vocabulary has 256" "${train[@]}" --vocab-size 256
long_prompt=$(make_text 200)
refused "prompt longer than the context" 2 "error: --prompt has " "$program" generate --init "$run" --prompt \
    "$long_prompt"
check "prompt longer than the context: nothing is printed" test ! -s "$scratch/out"

# ---- missing and damaged input
mkfifo "$scratch/a_pipe" && ln -s none "$scratch/dangling"
for output in data.txt a_pipe dangling; do
    refused "an output that is no directory: $output" 73 \
        "$scratch/$output is not a directory; give another name" "${train[@]}" --output "$scratch/$output"
done
hostile=$scratch/$(printf 'h\033[2J\nerror: x\302\233')
refused "control characters in a name are printed as escapes" 66 'h\x1b[2J\x0aerror: x\x9b: there is no such file' \
    "$program" tokenize "$hostile" --output "$scratch/hostile" --train-bpe 300
refused "a pattern that matches no shard" 66 "nothing_*.bin" "${train[@]}" --train-data "$scratch/nothing_*.bin"
refused "a directory that does not exist" 66 \
    "--init $scratch/nowhere: there is no such directory; nothing is downloaded" "$program" generate --init \
    "$scratch/nowhere"
mkdir "$scratch/empty"
refused "a directory that is no checkpoint" 66 "neither a Hugging Face directory" "$program" generate --init \
    "$scratch/empty"

# overwrite FILE OFFSET BYTES
overwrite() { printf '%b' "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }
cp "$first_shard" "$scratch/truncated.bin" && truncate -s -100 "$scratch/truncated.bin"
refused "truncated shard" 65 "truncated.bin" "${train[@]}" --train-data "$scratch/truncated.bin"
cp "$first_shard" "$scratch/magic.bin" && overwrite "$scratch/magic.bin" 0 '\x01\x02\x03\x04'
refused "wrong magic" 65 "magic.bin" "${train[@]}" --train-data "$scratch/magic.bin"
cp "$first_shard" "$scratch/token.bin" && overwrite "$scratch/token.bin" 1400 '\xff\xff'
refused "a token outside of the vocabulary" 65 "65535" "${train[@]}" --train-data "$scratch/token.bin" --steps 100

# A copy without trainer.json, which has the checksums: a plain Hugging Face directory.
copy_run() { rm -rf "$scratch/copy" && cp -r "$run/step_000030" "$scratch/copy" && rm "$scratch/copy/trainer.json"; }
copy_run && overwrite "$scratch/copy/model.safetensors" 9 x
refused "broken safetensors header" 65 "model.safetensors" "$program" generate --init "$scratch/copy"
copy_run && truncate -s 1000 "$scratch/copy/model.safetensors"
refused "truncated weights" 65 "model.safetensors" "$program" generate --init "$scratch/copy"
copy_run && overwrite "$scratch/copy/model.safetensors" \
    $(($(stat -c %s "$scratch/copy/model.safetensors") - 4)) '\x00\x00\xc0\x7f'
not_a_number="model.safetensors: element 31 of transformer.h.1.mlp.c_proj.bias is nan, so the model cannot"
refused "NaN weights: generate" 65 "$not_a_number" "$program" generate --init "$scratch/copy"
refused "NaN weights: eval" 65 "$not_a_number" "$program" eval --init "$scratch/copy" "${val_data[@]}"
refused "NaN weights: train --init" 65 "$not_a_number" "$program" "${train_data[@]}" --init "$scratch/copy" --steps 1 \
    --output ''
copy_run && sed 's/"tokens": [0-9]*/"tokens": 1/' "$run/step_000030/trainer.json" >"$scratch/copy/trainer.json"
refused "a checkpoint whose trainer.json is damaged" 65 "$scratch/copy/trainer.json: its checksum does not match" \
    "$program" generate --init "$scratch/copy" --max-tokens 3
copy_run && cp "$run/step_000030/trainer.json" "$scratch/copy" && overwrite "$scratch/copy/model.safetensors" 20000 \
    '\x01\x02\x03'
for command in "generate" "eval ${val_data[*]}" "train ${train_data[*]} --steps 1 --output $scratch/none"; do
    # shellcheck disable=SC2086
    refused "other weights than were saved: ${command%% *}" 65 "model.safetensors: its checksum does not match" \
        "$program" $command --init "$scratch/copy"
done
copy_run && sed -i 's/"n_embd": *32/"n_embd": 64/' "$scratch/copy/config.json"
refused "weights of another shape" 65 "needs" "$program" generate --init "$scratch/copy"
copy_run && rm "$scratch/copy/tokenizer.json" "$scratch/copy/vocab.json"
refused "no tokenizer" 66 "tokenizer" "$program" generate --init "$scratch/copy"

# If the newest checkpoint is damaged, --resume names it and takes the one before.
cp -r "$run" "$scratch/damaged_run"
overwrite "$scratch/damaged_run/step_000030/optimizer.safetensors" 5000 x
"$program" "${data[@]}" "${tiny[@]}" --output "$scratch/damaged_run" --steps 30 --resume \
    --checkpoint-every 15 >"$scratch/out" 2>&1
check "damaged checkpoint: the one before is used" grep -q '"step":15' "$scratch/damaged_run/log.jsonl"
check "damaged checkpoint: a warning, also with --quiet" grep -q \
    "^warning: skipping a damaged checkpoint: .*step_000030/optimizer" "$scratch/out"
check "damaged checkpoint: a warning in the log" grep -q '"kind":"warning","text":"skipping a damaged checkpoint: ' \
    "$scratch/damaged_run/log.jsonl"

# If all checkpoints are damaged, no run starts from the beginning and no file is deleted. One has lost its optimizer
# state, the
# other its trainer.json; both still have their weights.
cp -r "$run" "$scratch/all_damaged"
overwrite "$scratch/all_damaged/step_000030/optimizer.safetensors" 5000 x
overwrite "$scratch/all_damaged/step_000015/trainer.json" 5 x
tree_of() { (cd "$1" && find . -type f -exec sha256sum {} + | sort | sha256sum); }
before=$(tree_of "$scratch/all_damaged")
on_damaged=("$program" "${data[@]}" "${tiny[@]}" --output "$scratch/all_damaged" --steps 40 --keep 1)
refused "every checkpoint damaged" 65 "none of its checkpoints is intact" "${on_damaged[@]}" --resume
check "every checkpoint damaged: both files are named, and advice is given" grep -qE \
    "step_000030/optimizer.safetensors: its checksum.*/step_000015/trainer.json: .* or start in another --output" \
    "$scratch/err"
refused "every checkpoint damaged: a new run" 2 "holds the checkpoints of an earlier run" "${on_damaged[@]}"
refused "every checkpoint damaged: generate" 65 "none of its checkpoints is intact" "$program" generate --init \
    "$scratch/all_damaged"
check "every checkpoint damaged: no file is changed" test "$(tree_of "$scratch/all_damaged")" = "$before"
check "every checkpoint damaged: --init takes the weights of one" "$program" "${train_data[@]}" --init \
    "$scratch/all_damaged/step_000030" --seq-len 16 \
    --micro-batch 2 --global-batch 64 --steps 2 --quiet --output "$scratch/from_damaged"

# ---- one run at a time in an output
busy=$scratch/busy
in_busy=("$program" "${data[@]}" "${tiny[@]}" --output "$busy" --val-every 0 --checkpoint-every 50 --keep 1)
"${in_busy[@]}" --steps 1000000 &
owner=$!
check "a run in the background saves" wait_for "$busy/latest"
refused "a second run in the output of a live one" 73 \
    "$busy is in use by another run: pid $owner on $(hostname);" "${in_busy[@]}" --steps 3
refused "--resume in the output of a live run" 73 "is in use by another run: pid $owner" "${in_busy[@]}" \
    --steps 1000000 --stop-after 200 --resume
check "a refused second run changes no file" test -z "$(find "$busy" -name '*.stale*' -o -name 'log.1.jsonl')"
kill -9 $owner
wait $owner 2>/dev/null
check "after kill -9 the run can be resumed" "${in_busy[@]}" --steps 1000000 --resume --stop-after 5
check "a run that ends leaves no lock" test ! -e "$busy/run.lock"

# ---- output that cannot be written
bash -c '"$@" >&-' closed "$program" "${train_data[@]}" "${tiny[@]}" --log-every 1 --quiet=0 --output \
    "$scratch/unheard_run" --steps 3 2>"$scratch/err"
check "train with a closed stdout continues" test $? = 0
check "train with a closed stdout warns once" test \
    "$(grep -c 'cannot write to stdout: Bad file descriptor; the run continues' "$scratch/err")" = 1
check "train with a closed stdout logs every step" test "$(grep -c '"kind":"step"' "$scratch/unheard_run/log.jsonl")" \
    = 3
if [ -e /dev/full ]; then
    for command in "plan --layers 1 --heads 1 --channels 16 -t 16 -d 0" "generate --init $run --max-tokens 5" \
        "eval --init $run --val-data $scratch/data/val_*.bin --batches 1" \
        "tokenize $scratch/data.txt --output $scratch/unread --train-bpe 300" "--help" "--version"; do
        # shellcheck disable=SC2086  # words
        refused "${command%% *} to a full device" 74 "cannot write to standard output: No space left on device" \
            bash -fc 'exec "$@" >/dev/full' full "$program" $command
    done
    check "tokenize to a full device leaves its shards" test -s "$scratch/unread/train_000001.bin"
    bash -c '"$@" >/dev/full' full "$program" "${train_data[@]}" "${tiny[@]}" --log-every 1 --quiet=0 --output \
        "$scratch/unread_run" \
        --steps 3 2>"$scratch/err"
    check "train to a full device continues" test $? = 0
    check "train to a full device warns once" test \
        "$(grep -c 'cannot write to stdout: No space left on device; the run continues' "$scratch/err")" = 1
    check "train to a full device logs every step" test "$(grep -c '"kind":"step"' "$scratch/unread_run/log.jsonl")" = 3
else
    skip "output to a full device" "there is no /dev/full"
fi
timeout 20 "$program" generate --init "$run" --max-tokens 1000 --num-samples 100000 2>"$scratch/err" \
    | head -c 10 >"$scratch/out"
check "generate ends when its reader has ended" test "${PIPESTATUS[0]}" = 74
check "generate names the broken pipe" grep -q "^error: cannot write to standard output: Broken pipe" "$scratch/err"
: >"$scratch/file"
refused "output below a file" 73 "$scratch/file" "${train[@]}" --output "$scratch/file/out" --checkpoint-every 1
if unshare --mount true 2>/dev/null; then
    disk=$scratch/disk
    mkdir "$disk"
    # 1 MB holds the log and one checkpoint of about 700 kB, but not two. The first one must survive.
    unshare --mount bash -c '
        mount -t tmpfs -o size=1000k none "$0"
        "$@" >"$0.out" 2>"$0.err"; echo $? >"$0.status"
        ls "$0/run" >"$0.list"' \
        "$disk" "$program" "${data[@]}" "${tiny[@]}" --output "$disk/run" --steps 12 --checkpoint-every 6 --keep 0
    check "disk full: exit code 74" test "$(cat "$disk.status")" = 74
    check "disk full: one error with the sizes" grep -q "^error: .*a checkpoint needs .* are free" "$disk.err"
    check "disk full: the error names the step that is lost, and the last checkpoint" \
        grep -q "^error: the checkpoint of step 12 was not saved: .*; the last good checkpoint is .*/step_000006$" \
        "$disk.err"
    check "disk full: the checkpoint before survives" grep -qx step_000006 "$disk.list"
else
    skip "disk full" "unshare --mount is not permitted here"
fi
finish
