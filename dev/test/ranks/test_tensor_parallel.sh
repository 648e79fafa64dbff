#!/usr/bin/env bash
# test_tensor_parallel.sh: --tensor-parallel and --sequence-parallel on CPU ranks, and on GPUs in the emulator: one
# checkpoint for all layouts of ranks, the bytes that ranks send, refused options, and a killed rank.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "--tensor-parallel" "$reason" && exit 0; fi
several_ranks_here

make_shards "$scratch/data" 30000 || fail "no shards"
# The vocabulary is padded, and the tensor-parallel ranks have unequal parts of it.
train=("$program" --train-data "$scratch/data/train_*.bin" --layers 2 --heads 4 --channels 64 --vocab-size 301
    --seq-len 32
       --micro-batch 1 --global-batch 128 --lr 1e-2 --warmup 2 --quiet --steps 6 --checkpoint-every 4)

# layout NAME: sets n, the number of ranks, and options. --sequence-parallel is a flag that a resumed run keeps.
layout() {
    case $1 in
        one) n=1 options=(--tensor-parallel 1 --zero 0 --sequence-parallel=false) ;;
        tp2) n=2 options=(--tensor-parallel 2 --zero 0 --sequence-parallel=false) ;;
        tp2_sp) n=2 options=(--tensor-parallel 2 --zero 0 --sequence-parallel) ;;
        tp4) n=4 options=(--tensor-parallel 4 --zero 0 --sequence-parallel=false) ;;
        dp2_zero?) n=2 options=(--tensor-parallel 1 --zero "${1#dp2_zero}" --sequence-parallel=false) ;;
        tp2_dp2_zero?) n=4 options=(--tensor-parallel 2 --zero "${1#tp2_dp2_zero}" --sequence-parallel=false) ;;
        tp2_sp_dp2_zero?) n=4 options=(--tensor-parallel 2 --zero "${1#tp2_sp_dp2_zero}" --sequence-parallel) ;;
    esac
}
# in_layout NAME OPTION...: runs the training.
in_layout() {
    local n options
    layout "$1"
    ranks $n "${train[@]}" "${options[@]}" "${@:2}"
}
# losses RUN FIRST_STEP: the losses from this step on, one a line, the latest of each step.
losses() {
    sed -nE 's/.*"kind":"step","step":([0-9]+),.*"loss":([0-9.]+).*/\1 \2/p' "$1/log.jsonl" |
        awk -v first="$2" '$1 >= first { loss[$1] = $2 } END { for (s = first; s in loss; s++) print loss[s] }'
}
# same_losses A B FIRST_STEP COUNT TOLERANCE: COUNT steps of both runs have losses that differ by at most this fraction.
same_losses() {
    paste <(losses "$1" "$3") <(losses "$2" "$3") | head -n "$4" | tee "$scratch/pairs"
    awk -v n="$4" -v e="$5" '
        NF == 2 && $1 > 0 && $1 - $2 <= e * $1 && $2 - $1 <= e * $1 { good++ }
        END { exit !(good == n) }' "$scratch/pairs"
}
# header FILE: the length and the JSON object at the begin of a safetensors file. values FILE: what follows.
header_bytes() { echo $((8 + $(od -An -tu8 -N8 "$1"))); }
header() { head -c "$(header_bytes "$1")" "$1"; }
values() { tail -c "+$(($(header_bytes "$1") + 1))" "$1"; }
# without_step FILE: the header without the step and its tokens.
without_step() { header "$1" | tail -c +9 | sed 's/"__metadata__":{[^}]*},//'; }
# same_form A B: the checkpoints have the same configuration, and the same names, shapes and places of tensors.
same_form() {
    local file
    cmp "$1/config.json" "$2/config.json" || return 1
    for file in model optimizer; do
        cmp <(header "$1/$file.safetensors") <(header "$2/$file.safetensors") || return 1
    done
    grep -qaF '"transformer.wte.weight":{"dtype":"F32","shape":[301,64]' "$2/model.safetensors"
}
# same_weights A B: the checkpoints have the same weights, bit by bit.
same_weights() {
    cmp <(without_step "$1/model.safetensors") <(without_step "$2/model.safetensors") &&
        cmp <(values "$1/model.safetensors") <(values "$2/model.safetensors")
}

# ---- one checkpoint for all layouts
#
# Each layout continues the run of the one before. The losses of two layouts differ by the order in which they add fp32
# values: a relative error of 6e-8 for each addition, in sums of at most some hundred values. AdamW's first steps
# amplify it for weights with small gradients; the losses differed by less than 1e-6 when the bound of 2e-5 was chosen.
layouts=(one tp2 tp2_sp tp4 dp2_zero1 tp2_dp2_zero0 dp2_zero3 tp2_sp_dp2_zero2 tp2_dp2_zero3)
check "1 rank" in_layout one --precision fp32 --output "$scratch/whole"
before=${layouts[-1]}
for name in "${layouts[@]}"; do
    check "$name: 4 steps and a checkpoint" in_layout "$name" --precision fp32 --stop-after 4 --output "$scratch/$name"
    check "$name: the losses of 1 rank" same_losses "$scratch/whole" "$scratch/$name" 0 4 2e-5
    check "$name: the tensors' names and shapes are those of 1 rank" \
        same_form "$scratch/whole/step_000004" "$scratch/$name/step_000004"
done
for name in "${layouts[@]}"; do
    cp -r "$scratch/$before" "$scratch/resumed"
    check "$before, resumed as $name" in_layout "$name" --precision fp32 --resume --output "$scratch/resumed"
    check "$before, resumed as $name: the losses of 1 rank" same_losses "$scratch/whole" "$scratch/resumed" 4 2 2e-5
    check "$before, resumed as $name: the tensors' names and shapes are those of 1 rank" \
        same_form "$scratch/whole/step_000006" "$scratch/resumed/step_000006"
    cp -r "$scratch/$before" "$scratch/kept"
    check "$before, resumed as $name for a step that changes no weight" \
        in_layout "$name" --precision fp32 --lr 0 --weight-decay 0 --stop-after 1 --checkpoint-every 1 --resume \
            --output "$scratch/kept"
    check "$before, resumed as $name: loading and saving change no bit" \
        same_weights "$scratch/$before/step_000004" "$scratch/kept/step_000005"
    rm -r "$scratch/resumed" "$scratch/kept"
    before=$name
done
# bf16 has 8 bits, and without master weights each update is rounded to them at random.
no_masters=(--precision bf16 --master-weights off)
check "bf16 without masters: 1 rank" in_layout one "${no_masters[@]}" --output "$scratch/whole_bf16"
check "bf16 without masters: tp2_sp, 4 steps" \
    in_layout tp2_sp "${no_masters[@]}" --stop-after 4 --output "$scratch/bf16"
check "bf16 without masters: resumed as tp2_dp2_zero3" \
    in_layout tp2_dp2_zero3 "${no_masters[@]}" --resume --output "$scratch/bf16"
check "bf16 without masters: the losses of 1 rank" same_losses "$scratch/whole_bf16" "$scratch/bf16" 0 6 1e-2

# ---- refused options
# ranks_refuse NAME TEXT RANKS OPTION...: the exit code is 2, and the message has TEXT. Several ranks may print it.
ranks_refuse() {
    local status=0
    ranks "$3" "${train[@]}" --output "$scratch/never" "${@:4}" >"$scratch/refused.log" 2>&1 || status=$?
    check "$1: exit code $status" test $status = 2
    check "$1: $(grep -m1 '^error: ' "$scratch/refused.log")" grep -q -- "^error: .*$2" "$scratch/refused.log"
}
ranks_refuse "2 ranks share 3 heads" "--tensor-parallel 2 does not divide the model's 3 heads; give 1$" \
    2 --heads 3 --channels 48 --tensor-parallel 2
ranks_refuse "groups of 2 in 3 ranks" "--tensor-parallel 2 does not divide 3 ranks; give 1" 3 --tensor-parallel 2
ranks_refuse "--sequence-parallel alone" "--sequence-parallel needs --tensor-parallel 2 or more" 2 --sequence-parallel
ranks_refuse "2 ranks share 31 tokens" "give --seq-len 30$" 2 --seq-len 31 --global-batch 124 \
    --tensor-parallel 2 --sequence-parallel
check "2 ranks share 30 tokens, as the message says" \
    ranks 2 "${train[@]}" --output "$scratch/advised" --seq-len 30 --global-batch 120 \
    --tensor-parallel 2 --sequence-parallel --steps 2
ranks 3 "$program" eval --init "$scratch/advised" --val-data "$scratch/data/train_*.bin" --tensor-parallel 3 \
    >"$scratch/refused.log" 2>&1
check "eval on 3 ranks with 4 heads: the advice divides both" \
    grep -q "does not divide the model's 4 heads; give 1$" "$scratch/refused.log"
ranks_refuse "FP8" "--precision fp8 does not combine with --tensor-parallel 2; give --precision bf16" 2 \
    --precision fp8 --tensor-parallel 2
check "refused starts write nothing" test ! -e "$scratch/never/log.jsonl"

# ---- bytes
# as_planned RANKS OPTION...: step 1 of a run sends the bytes of plan, which rounds them to three digits.
shape=(--layers 3 --heads 4 --channels 64 --vocab-size 301 --seq-len 32 --micro-batch 2 --global-batch 256)
as_planned() {
    local planned sent out=$scratch/as_planned
    planned=$("$program" plan --ranks "$1" "${shape[@]}" "${@:2}" |
        sed -nE 's/.*each rank sends ([0-9.]+) ([KM])iB .*/\1 \2/p' |
        awk '{ printf "%.0f", $1 * ($2 == "K" ? 1024 : 1048576) }')
    ranks "$1" "$program" --train-data "$scratch/data/train_*.bin" "${shape[@]}" "${@:2}" --quiet --steps 2 \
        --output "$out" || return 1
    sent=$(sed -n 's/.*"kind":"step","step":1,.*"comm_bytes":\([0-9]*\).*/\1/p' "$out/log.jsonl")
    rm -r "$out"
    echo "$sent bytes, planned $planned"
    awk -v a="$sent" -v b="$planned" 'BEGIN { exit !(a > 0.99 * b && a < 1.01 * b) }'
}
for sequence in "" --sequence-parallel; do
    check "plan has the bytes of tp 2 in bf16 ${sequence#--}" \
        as_planned 2 --precision bf16 --tensor-parallel 2 $sequence
    check "plan has the bytes of tp 4 in fp32 ${sequence#--}" \
        as_planned 4 --precision fp32 --tensor-parallel 4 $sequence
    check "plan has the bytes of tp 2 with --recompute layer ${sequence#--}" \
        as_planned 2 --precision bf16 --tensor-parallel 2 --recompute layer $sequence
    for zero in 0 2 3; do
        check "plan has the bytes of tp 2, dp 2, --zero $zero ${sequence#--}" \
            as_planned 4 --precision bf16 --tensor-parallel 2 --zero $zero $sequence
    done
done

# ---- a rank is killed
"${interruptible[@]}" mpirun --timeout 60 -np 2 "${train[@]}" --tensor-parallel 2 --steps 1000000 --checkpoint-every 0 \
    --output "$scratch/killed" >"$scratch/killed.log" 2>&1 </dev/null &
job=$!
check "a rank killed: the ranks train" wait_for "$scratch/killed/log.jsonl" '"step":3,'
mapfile -t processes < <(children $job)
begin=$EPOCHREALTIME
kill -9 "${processes[1]}"
wait $job
status=$?
check "a rank killed: exit code $status" test $status != 0
check "a rank killed: all end within 10 s" \
    awk -v a="$begin" -v b="$EPOCHREALTIME" -v most="$((10 * slower))" 'BEGIN { exit !(b - a < most) }'
check "a rank killed: ${#processes[@]} processes have ended" \
    test "${#processes[@]} $(for pid in "${processes[@]}"; do runs "$pid" && echo "$pid"; done)" = "2 "

# ---- the CUDA backend in the emulator
emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then
    skip "--tensor-parallel on GPUs" "build/release/emulator/train_gpt2cu is not built" && finish
fi
small=(--layers 1 --heads 2 --channels 32 --seq-len 16 --global-batch 32 --steps 3 --checkpoint-every 0 --autotune off)
gpu=("$emulated" "${train[@]:1}" "${small[@]}" --tensor-parallel 2)
for precision in fp32 bf16; do
    check "$precision: 1 CPU rank" "${train[@]}" "${small[@]}" --precision $precision --output "$scratch/cpu_$precision"
done
# on_gpus PRECISION TOLERANCE OPTION...: the GPUs have the losses of 1 CPU rank.
on_gpus() {
    check "emulator, $1 ${*:3}" timeout 60 "${gpu[@]}" --precision "$1" "${@:3}" --output "$scratch/gpu"
    check "emulator, $1 ${*:3}: the losses of 1 CPU rank" same_losses "$scratch/cpu_$1" "$scratch/gpu" 0 3 "$2"
    rm -rf "$scratch/gpu"
}
export SIMT_DEVICES=4
on_gpus fp32 1e-4 --ranks 2
on_gpus fp32 1e-4 --ranks 4 --zero 2 --sequence-parallel
on_gpus bf16 1e-2 --ranks 2 --sequence-parallel
on_gpus bf16 1e-2 --ranks 4 --zero 3
export SIMT_STREAMS=deferred:5
on_gpus fp32 1e-4 --ranks 4 --zero 3 --sequence-parallel
finish
