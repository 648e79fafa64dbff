#!/usr/bin/env bash
# quickstart.sh [FILE|DIR ...]: from a fresh clone to a model that writes text, in one command.
#
# Installs missing system packages, builds, prepares a corpus (your files, or the King James Bible and Jane Austen's
# novels from the package mirror), trains a small GPT-2 for about four minutes, and shows a sample and the loss curve.
# Run again, it continues where it stopped. TRAIN_SECONDS=1200 trains longer.
set -euo pipefail
# shellcheck source=data/functions.sh
source "$(dirname "$0")/../data/functions.sh"

again="${TRAIN_SECONDS:+TRAIN_SECONDS=$TRAIN_SECONDS }$0 ${*@Q}"
inputs=()
for input in "$@"; do
    case $input in
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "quickstart.sh: $input? only files and folders are expected; see --help" >&2; exit 2 ;;
    esac
    [ -f "$input" ] || [ -d "$input" ] ||
        { echo "quickstart.sh: $input: there is no such file or folder (of a pipe make a file first)" >&2; exit 66; }
    inputs+=("$(path_of "$input")")
done
cd "$(dirname "$0")/.."
seconds=${TRAIN_SECONDS:-240}
[[ $seconds =~ ^[1-9][0-9]{0,6}$ ]] || { echo "quickstart.sh: TRAIN_SECONDS=$seconds is no whole number" >&2; exit 2; }

stopped() {
    echo "stopped; to go on from here: $again"
    exit 75
}
trap 'echo; stopped' INT

# Sets name, data, prompt and run.
name_run() {
    name=bible_austen prompt="In the beginning"
    if [ ${#inputs[@]} != 0 ]; then
        name=$(name_of "${inputs[0]}") prompt=""
    fi
    data=data/$name
    run=out/quickstart_$name
}

# Sets `shape`, which holds the options for the model, its optimizer and its validation, and the vocabulary size for a
# text of some MB: those that learn most from the work that the machine does in the time at its peak, in TFLOP
# (dev/learn/RESULTS.md). Two cores with AVX2 do 48 in four minutes. GPUs whose peak is unknown get the last row.
choose_size() {
    local peak work below layers heads channels rate optimizer
    peak=$("$program" plan --measure off --layers 1 --heads 1 --channels 16 |
        sed -n 's/^device .*peak \([0-9.]*\) TFLOP.*/\1/p')
    work=$(awk "BEGIN { print int($seconds * ${peak:-100000}) }")
    while read -r below layers heads channels BOOK_VOCAB rate optimizer; do
        if [ "$work" -lt "$below" ]; then break; fi
    done <<END
75            1 2 128  8192 6e-3 muon
200           4 2 128 16384 6e-3 muon
1400          4 3 192 16384 4e-3 muon
1000000000000 6 6 384  4096 2e-3 adamw
END
    export BOOK_VOCAB
    shape=(--layers "$layers" --heads "$heads" --channels "$channels" --lr "$rate" --optimizer "$optimizer")
}

# Sets speed, in tokens/s. `plan` trains up to 16 steps on random tokens.
measure() {
    local batch
    echo "measuring the speed"
    read -ra batch <<<"$book_windows"
    speed=$("$program" plan "${shape[@]}" "${batch[@]}" --vocab-size "$BOOK_VOCAB" |
        sed -n 's/^time .* \([0-9,]*\) tokens\/s.*/\1/p' | tr -d ,)
    [ -n "$speed" ] || die "$program plan has measured no speed"
}

prepare_corpus() {
    if [ ${#inputs[@]} = 0 ]; then
        HIDE_TRAIN_COMMAND=1 data/bible_austen.sh
    else
        HIDE_TRAIN_COMMAND=1 data/text.sh "${inputs[@]}" --out "$data"
    fi
}

# Sets `batch` and `steps`. A text of a few pages gets short windows. The steps fill the time, up to 8 epochs: more
# would only memorize the text (dev/learn/RESULTS.md).
choose_steps() {
    local most tokens_per_step
    choose_windows "$data"
    read -ra batch <<<"$windows"
    tokens_per_step=${windows##* }
    steps=$((seconds * speed / tokens_per_step / 10 * 10))
    most=$((8 * train_tokens / tokens_per_step))
    echo "$speed tokens/s: $steps steps of $tokens_per_step tokens in $seconds s"
    if [ "$steps" -gt $most ]; then
        steps=$most
        echo "$steps are enough for this text"
    elif [ "$steps" -lt 500 ]; then
        echo "too few for readable text: that takes about TRAIN_SECONDS=$((600 * tokens_per_step / speed)) here"
    fi
    if [ "$steps" -lt 20 ]; then steps=20; fi
}

# Makes the corpus, and sets the options of the run. They are stored in its folder, so that a second start continues the
# same run, with the same vocabulary.
choose_run() {
    if [ -f "$run/quickstart" ] && [ -f "$data/made_of" ]; then
        BOOK_VOCAB=$(sed -n '/^--train-bpe$/{n;p}' "$data/made_of") prepare_corpus
        if [ "$(head -1 "$run/quickstart")" = "$(cksum <"$data/made_of")" ]; then
            mapfile -t options < <(tail -n +2 "$run/quickstart")
            echo "continuing $run"
            return
        fi
    fi
    choose_size
    measure
    prepare_corpus
    if [ -e "$run" ]; then
        echo "$run was trained on another text; it is renamed to $run.$(date +%s)"
        mv "$run" "$run.$(date +%s)"
    fi
    choose_steps
    options=(--train-data "$data/train_*.bin" --val-data "$data/val_*.bin" "${shape[@]}" "${batch[@]}"
             --recipe fast --steps "$steps" --warmup $((steps / 10 + 1)) --val-every $(((steps + 9) / 10))
             --val-tokens 81920 --sample-every $(((steps + 3) / 4)) --checkpoint-every $(((steps + 3) / 4)) --keep 1)
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
    if [ $status = 75 ]; then stopped; fi
    if [ $status != 0 ]; then exit $status; fi
    touch "$run/finished"
}

plot() { python3 scripts/plot.py "$run" -o out/loss.png; }

heading "packages"
./scripts/install.sh
echo "everything needed is installed"
heading "build"
build
name_run
heading "text: $data"
choose_run
heading "training: $run"
train
heading "a sample, for the prompt '$prompt'"
"$program" generate --init "$run" --prompt "$prompt" --max-tokens 200 --seed 1 </dev/null
heading "loss"
plot
heading "what next"
cat <<END
  $program generate --init $run --prompt "${prompt:-Once}" --temperature 0.7      more text; --help lists the options
  $program eval --init $run --val-data '$data/val_*.bin'
  TRAIN_SECONDS=1800 ./scripts/quickstart.sh my.txt      your own text, for half an hour
  data/tinystories.sh                                    other texts (docs/data.md)
END
