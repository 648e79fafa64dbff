#!/usr/bin/env bash
# finetune.sh FILE|DIR... [--init DIR|NAME] [--prompt TEXT] [-- OPTIONS]: trains GPT-2 further on your own text.
#
# Installs missing system packages, builds, takes GPT-2's weights from DIR, or fetches them from huggingface.co (NAME is
# gpt2, gpt2-medium, gpt2-large or gpt2-xl; default: gpt2, 0.5 GB), tokenizes the text (as data/text.sh does), and
# trains until three validations in a row are not better than the best one, at most five epochs. Shows what the model
# writes before and after, for the prompt TEXT if one is given. OPTIONS are those of train_gpt2. Run again, it continues
# where it stopped.
set -euo pipefail
# shellcheck source=data/functions.sh
source "$(dirname "$0")/../data/functions.sh"

again="$0 ${*@Q}"
refuse() {
    echo "finetune.sh: $2" >&2
    exit "$1"
}
init=gpt2 prompt=""
inputs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --init | --prompt)
            [ $# -gt 1 ] || refuse 2 "$1 needs a value; see --help"
            printf -v "${1#--}" %s "$2"
            shift ;;
        -*) refuse 2 "unknown option $1; see --help. Options of train_gpt2 follow after --" ;;
        *) [ -f "$1" ] || [ -d "$1" ] || refuse 66 "$1: there is no such file or folder (of a pipe make a file first)"
           inputs+=("$(path_of "$1")") ;;
    esac
    shift
done
[ ${#inputs[@]} != 0 ] || refuse 2 "name a file or folder of text; see --help"
case $init in
    gpt2 | gpt2-medium | gpt2-large | gpt2-xl) if [ ! -d "$init" ]; then weights=data/$init; fi ;;
    *) [ -d "$init" ] || refuse 66 "--init $init: there is no such folder; the names of weights to fetch are gpt2, \
gpt2-medium, gpt2-large and gpt2-xl" ;;
esac
weights=${weights:-$(realpath -- "$init")}
cd "$(dirname "$0")/.."

stopped() {
    echo "stopped; to go on from here: $again"
    exit 75
}
trap 'echo; stopped' INT

fetch_weights() {
    local hub=${HF_ENDPOINT:-https://huggingface.co}/openai-community/$init
    fetch_gpt2_tokenizer "$weights"  # the same for all sizes
    fetch "$hub/resolve/main/config.json" "$weights/config.json"
    fetch_from_hub "openai-community/$init" model.safetensors "$weights/model.safetensors" ""
}

# Sets `options`. A text is read at most five times; each reading has four validations.
choose_options() {
    local epoch steps every
    choose_windows "$data"
    read -ra options <<<"$windows"
    epoch=$((train_tokens / ${windows##* }))
    steps=$((5 * epoch > 20 ? 5 * epoch : 20))
    every=$((epoch > 20 ? epoch / 4 : 5))
    options+=(--micro-batch 4 --init "$weights" --train-data "$data/train_*.bin" --val-data "$data/val_*.bin"
              --lr 3e-5 --steps "$steps" --warmup $((steps / 20)) --val-every "$every" --val-tokens 20480 --patience 3
              --checkpoint-every $((4 * every)) --keep 1)
}

# An older run is kept under another name if the text or the weights have changed since.
set_aside() {
    local stamp aside
    stamp="$(cksum <"$data/made_of") $weights"
    if [ -e "$run" ] && [ "$stamp" != "$(cat "$run/made_of" 2>/dev/null)" ]; then
        aside=$run.$(date +%s)
        echo "$run was trained on another text or from other weights; it is renamed to $aside"
        mv "$run" "$aside"
    fi
    mkdir -p "$run"
    echo "$stamp" >"$run/made_of"
}

train() {
    local status=0
    "$program" "${options[@]}" --output "$run" --log-every 10 --resume "$@" || status=$?
    if [ $status = 75 ]; then stopped; fi
    if [ $status != 0 ]; then exit $status; fi
}

sample() {
    heading "$1"
    "$program" generate --init "$2" --prompt "$prompt" --max-tokens 100 --seed 1 </dev/null
}

heading "packages"
./scripts/install.sh
echo "everything needed is installed"
heading "build"
build
heading "weights: $weights"
if [ "$weights" = "data/$init" ]; then fetch_weights; fi
echo "they are here"
name=finetune_$(name_of "${inputs[0]}")
data=data/$name run=out/$name
heading "text: $data"
HIDE_TRAIN_COMMAND=1 data/text.sh "${inputs[@]}" --tokenizer "$weights" --out "$data"
choose_options
set_aside
sample "before, for the prompt '$prompt'" "$weights"
heading "training: $run"
train "${@:2}"
sample "after, for the prompt '$prompt'" "$run/best"
heading "what next"
best=$run/$(cat "$run/best")
cat <<END
  $program generate --init $best        continues the lines that you type; --help lists the options
  $program eval --init $best --val-data '$data/val_*.bin' ${options[*]:0:2}
  $program export $best $name.gguf --type q8_0        for llama.cpp and Ollama
  AutoModelForCausalLM.from_pretrained("$best")        in Python, with Hugging Face's transformers
END
