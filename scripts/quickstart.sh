#!/usr/bin/env bash
# quickstart.sh [FILE|DIR ...]: from a fresh clone to a model that writes text, in one command.
#
# Installs missing system packages, builds, prepares a corpus (your files, or the King James Bible and Jane Austen's
# novels from the package mirror), trains a small GPT-2 for about four minutes, and shows a sample and the loss curve.
# Run again, it continues where it stopped. TRAIN_SECONDS=1200 trains longer.
set -euo pipefail

inputs=()
for input in "$@"; do
    case $input in
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "quickstart.sh: $input? only files and folders are expected; see --help" >&2; exit 2 ;;
    esac
    [ -e "$input" ] || { echo "quickstart.sh: $input: there is no such file or folder" >&2; exit 66; }
    inputs+=("$(realpath "$input")")
done
cd "$(dirname "$0")/.."
seconds=${TRAIN_SECONDS:-240}

# shellcheck source=data/functions.sh
source data/functions.sh

heading() { printf '\n== %s\n' "$*"; }

build() {
    program=train_gpt2
    if nvidia-smi -L >/dev/null 2>&1; then
        if make found | grep -q '| CUDA [0-9]'; then
            program=train_gpt2cu
        else
            echo "there is a GPU, but no nvcc to build for it (NVCC=... or CUDA_HOME=... names it): training on the CPU"
        fi
    fi
    make -j"$(nproc)" found train_gpt2 $program  # train_gpt2 makes the tokens
    program=./$program
}

# Makes the corpus. Sets data, prompt and run.
prepare_corpus() {
    if [ ${#inputs[@]} = 0 ]; then
        name=bible_austen
        data=data/bible_austen
        prompt="In the beginning"
        HIDE_TRAIN_COMMAND=1 data/bible_austen.sh
    else
        name=$(basename "${inputs[0]}")
        name=$(tr -c 'A-Za-z0-9_.\n-' _ <<<"${name%.*}")
        data=data/$name
        prompt=""
        HIDE_TRAIN_COMMAND=1 data/text.sh "${inputs[@]}" --out "$data"
    fi
    run=out/quickstart_$name
}

# choose_model middle|small: sets options and most_steps. For a text of a few pages it chooses short windows.
choose_model() {
    local size=$1 of_windows
    choose_windows "$data"
    options=(--train-data "$data/train_*.bin" --val-data "$data/val_*.bin")
    case $size in
        small) options+=(--layers 4 --heads 4 --channels 256) ;;
        *) options+=(--layers 6 --heads 6 --channels 384) ;;
    esac
    read -ra of_windows <<<"$windows"
    options+=("${of_windows[@]}")
    tokens_per_step=${windows##* }
    most_steps=$((20 * train_tokens / tokens_per_step))  # 20 epochs: more would only memorize the text
    if [ $most_steps -lt 100 ]; then most_steps=100; fi
}

# Sets steps: as many as fit into the time, at the median speed of the last 8 of 16 steps. The first ones are
# slow: memory is new.
measure() {
    local scratch speed
    scratch=$(mktemp -d)
    echo "measuring the speed of 16 steps"
    "$program" "${options[@]}" --output "$scratch" --steps 16 --warmup 1 --val-every 0 --checkpoint-every 0 --quiet
    speed=$(sed -n 's/.*"tokens_per_s": *\([0-9]*\).*/\1/p' "$scratch/log.jsonl" | tail -n 8 | sort -n |
        awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }')
    rm -r "$scratch"
    [ -n "$speed" ] || die "$program wrote no speed into its log"
    steps=$((seconds * speed / tokens_per_step / 10 * 10))
    echo "$speed tokens/s: $steps steps of $tokens_per_step tokens in $seconds s"
    if [ "$steps" -gt "$most_steps" ]; then steps=$most_steps && echo "$steps are enough for this text"; fi
    if [ "$steps" -lt 20 ]; then steps=20; fi
}

# The options of a run are stored in its folder, so that a second start continues the same run.
choose_run() {
    if [ -f "$run/quickstart" ] && [ "$(head -1 "$run/quickstart")" = "$(cksum <"$data/made_of")" ]; then
        mapfile -t options < <(tail -n +2 "$run/quickstart")
        echo "continuing $run"
        return
    fi
    if [ -e "$run" ]; then
        echo "$run was trained on another text; it is renamed to $run.$(date +%s)"
        mv "$run" "$run.$(date +%s)"
    fi
    choose_model middle
    measure
    # In the time that 2,000 steps of this model take, the smaller model reaches a loss lower by 0.34 (dev/LOG.md).
    if [ "$steps" -lt 5000 ] && [ "$steps" -lt "$most_steps" ]; then
        echo "a smaller model learns more in this time on this machine"
        choose_model small
        measure
    fi
    options+=(--steps "$steps" --lr 2e-3 --beta2 0.995 --warmup $((steps / 5 + 1)) --schedule cosine
              --final-lr-fraction 0.1 --val-every $(((steps + 9) / 10)) --val-tokens 81920
              --sample-every $(((steps + 3) / 4)) --checkpoint-every $(((steps + 3) / 4)) --keep 1)
    mkdir -p "$run"
    { cksum <"$data/made_of" && printf '%s\n' "${options[@]}"; } >"$run/quickstart"
}

train() {
    if [ -f "$run/finished" ]; then
        echo "$run is trained; remove that folder to train again"
        return
    fi
    local status=0
    "$program" "${options[@]}" --output "$run" --log-every 20 --resume || status=$?
    if [ $status = 75 ]; then echo "stopped; the same command continues from here" && exit 75; fi
    if [ $status != 0 ]; then exit $status; fi
    touch "$run/finished"
}

plot() { python3 scripts/plot.py "$run" -o out/loss.png; }

heading "packages"
./scripts/install.sh
echo "everything needed is installed"
heading "build"
build
heading "text"
prepare_corpus
heading "training: $run"
choose_run
train
heading "a sample, for the prompt '$prompt'"
"$program" generate --init "$run" --prompt "$prompt" --max-tokens 200 --seed 1
heading "loss"
plot
heading "what next"
cat <<END
  $program generate --init $run --prompt "${prompt:-Once}" --temperature 0.7      more text; --help lists the options
  $program eval --init $run --val-data '$data/val_*.bin'
  TRAIN_SECONDS=1800 ./scripts/quickstart.sh my.txt      your own text, for half an hour
  data/tinystories.sh                                    other texts (docs/data.md)
END
