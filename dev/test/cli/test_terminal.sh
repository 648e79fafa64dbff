#!/usr/bin/env bash
# test_terminal.sh: no command sends bytes from outside to a terminal that control it: names of files and folders, options,
# variables, prompts, tokens, and the content of files. Each command runs on a terminal of its own.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

if ! command -v python3 >/dev/null; then skip "text on a terminal" "there is no python3" && finish; fi
# ESC [, BEL, CR, backspace, DEL, CSI in UTF-8, a right-to-left override, an isolate, and a forged line.
bad=$'e\e[2J\a\rx\b\x7f\xc2\x9b2J\xe2\x80\xae\xe2\x81\xa6\nerror: y'
shown='e\x1b[2J\x07\x0dx\x08\x7f\x9b2J\u202e\u2066\x0aerror: y' # as a message shows it
cat >"$scratch/terminal.py" <<'PY'
import os, pty, re, select, sys, time
code, text, *command = sys.argv[1:]
child, terminal = pty.fork()
if child == 0:
    os.execvp(command[0], command)
out, end = b"", time.monotonic() + 120
try:
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            chunk = os.read(terminal, 4096)
            if not chunk:
                break
            out += chunk
    else:
        sys.exit("the command hangs: %r" % out)
except OSError:  # the program has closed the terminal
    pass
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
printed = out.replace(b"\r\n", b"\n")  # the terminal's own
printed = re.sub(rb"\r([^\r\x1b]*)\x1b\[K", rb"\1", printed)  # the line of progress
found = re.search(rb"[\0-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]|^error: y", printed, re.M)
if found:
    sys.exit("sends %r in %r" % (found.group(), printed))
printed.decode()  # a single byte 0x9b is CSI on a terminal of 8-bit characters
if ended != int(code) or text.encode() not in printed:
    sys.exit("exit code %d instead of %s, or %r is not in %r" % (ended, code, text, printed))
PY
# harmless NAME CODE TEXT COMMAND...: on a terminal, the command ends with the exit code CODE and prints TEXT, and nothing that
# controls the terminal.
harmless() { check "$1" python3 "$scratch/terminal.py" "${@:2}"; }

make_shards "$scratch/data" || fail "no shards"
folder=$scratch/$bad
mkdir "$folder" && cp -r "$scratch/data" "$scratch/data.txt" "$folder"
train_data=(--train-data "$folder/data/train_*.bin") val_data=(--val-data "$folder/data/val_*.bin")
run=$folder/run
train=("$program" "${train_data[@]}" "${val_data[@]}" "${tiny[@]}" --quiet=false --progress plain)

# ---- names and prompts
prompt=$'\e[2J\xe2\x80\xae\a' prompt_shown='\x1b[2J\u202e\x07'
harmless "train" 0 "saved $scratch/$shown/run/step_000002" "${train[@]}" --output "$run" --steps 2 --val-every 1 --checkpoint-every 2 \
    --sample-every 2 --sample-prompt "$prompt" --sample-tokens 4
harmless "train: a sample" 0 "$prompt_shown" "${train[@]}" --output '' --steps 2 --sample-every 1 --sample-prompt "$prompt" --sample-tokens 4
harmless "eval" 0 "/$shown/run/step_000002 on " "$program" eval --init "$run" "${val_data[@]}" --batches 1
harmless "generate" 0 "$prompt_shown" "$program" generate --init "$run" --prompt "$prompt" --max-tokens 4 --num-samples 2
harmless "verify" 0 "/$shown/run/step_000002: " "$program" verify "$run"
harmless "tokenize" 0 "/$shown/shards/train_" "$program" tokenize "$folder/data.txt" --output "$folder/shards" --train-bpe 300
cp -r "$run" "$folder/damaged"
for file in model.safetensors trainer.json; do
    printf x >>"$folder/damaged/step_000002/$file"
    for command in "verify" "plan --resume --output" "eval ${val_data[0]} x --init"; do
        # shellcheck disable=SC2086  # several words
        harmless "$command: damaged $file" 65 "/$shown/damaged/step_000002/$file" "$program" $command "$folder/damaged"
    done
done
for command in "verify" "explain" "generate --init" "eval ${val_data[0]} x --init" "tokenize --train-bpe 300 --output $scratch/none"; do
    # shellcheck disable=SC2086  # several words
    harmless "$command: no file" 66 "/$shown/none" "$program" $command "$folder/none"
done

# ---- options and variables
harmless "a command that is unknown" 2 "$shown" "$program" "$bad"
harmless "an option that is unknown" 2 "$shown" "$program" "--$bad"
harmless "an option that is no number" 2 "$shown" "$program" --lr "$bad"
harmless "an option that is no word" 2 "$shown" "$program" --progress "$bad"
harmless "--rendezvous" 2 "$shown" "${train[@]}" --rank 0 --world-size 2 --rendezvous "$bad"
harmless "--print-launch" 0 "$shown" env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR="$bad" MASTER_PORT=29500 "$program" --print-launch
harmless "RANK" 2 "$shown" env RANK="$bad" WORLD_SIZE=2 MASTER_ADDR=h "${train[@]}"
harmless "SLURM_STEP_NODELIST" 2 "$shown" env SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=1 SLURM_STEP_NODELIST="[$bad"  "${train[@]}"

# ---- the content of files
json='e\u001b[2J\u0007\rx\b\u007f\u009b2J\u202e\u2066\nerror: y' json_shown=$shown
model=$scratch/model
mkdir "$model" && cp "$run"/step_000002/{config.json,model.safetensors,tokenizer.json} "$model"
config() { sed "s/\"model_type\": *\"gpt2\"/$1/" "$run/step_000002/config.json" >"$model/config.json"; }
config "\"model_type\": \"${json//\\/\\\\}\""
harmless "config.json: a value" 65 '"e\u001b[2J' "$program" generate --init "$model"
config "\"${json//\\/\\\\}\": 1, \"${json//\\/\\\\}\": 1"
harmless "config.json: a key that occurs twice" 65 "$json_shown" "$program" generate --init "$model"
cp "$run/step_000002/config.json" "$model"
rm "$model/model.safetensors"
printf '{"weight_map": {"wte.weight": "%s"}}' "$json" >"$model/model.safetensors.index.json"
harmless "model.safetensors.index.json: a name" 65 "$json_shown" "$program" generate --init "$model"
printf '{"model": {"vocab": {}, "merges": []}, "pre_tokenizer": {"type": "%s"}}' "$json" >"$model/tokenizer.json"
harmless "tokenizer.json: a value" 65 '"e\u001b[2J' "$program" tokenize "$scratch/data.txt" --tokenizer "$model" --output "$scratch/shards"
printf '%s' "$bad" >"$run/run.lock"
exec 9<"$run/run.lock" && flock 9
harmless "run.lock" 73 "run is in use by another run: ${shown%\\x0a*}" "${train[@]}" --output "$run" --steps 4
exec 9<&-
mkdir -p "$scratch/hung/errors"
printf '{"rank":0,"world_size":1,"tensor_parallel":1,"host":"%s","process":1,"phase":"%s","step":1,"seconds_without_progress":1,
    "shares_output":true,"last_entered":{"world":0,"data-parallel":0,"tensor-parallel":0},"hosts":["%s"],
    "events":[{"seconds_ago":1,"event":"reached","what":"%s","step":1}]}' "$json" "$json" "$json" "$json" >"$scratch/hung/errors/rank_0.json"
harmless "explain: a report" 0 "$json_shown" "$program" explain "$scratch/hung"
sed "s/\"lr\": *[0-9.e-]*/\"lr\": \"${json//\\/\\\\}\"/" "$run/run.json" >"$scratch/run.json" && cp "$scratch/run.json" "$run/run.json"
harmless "run.json: an option" 65 "$json_shown" "$program" --resume --output "$run"
finish
