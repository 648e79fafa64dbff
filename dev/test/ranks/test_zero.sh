#!/usr/bin/env bash
# test_zero.sh: --zero 3 on CPU ranks, and on GPUs by NCCL in the emulator: the bits of --zero 2, the bytes that ranks
# send, resuming with another --zero, texts that all ranks generate together, and a rank that cannot read its data.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "--zero 3" "$reason" && exit 0; fi
several_ranks_here

make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin"
    --tokenizer "$scratch/data"
       --heads 2 --channels 64 --vocab-size 384 --seq-len 32 --micro-batch 1 --global-batch 256 --lr 1e-2 --warmup 2
       --quiet --steps 4 --checkpoint-every 4 --val-every 4 --sample-every 2 --sample-tokens 9 --deterministic-ranks 4)

# ---- the same bits as --zero 2: with fewer and more layers than there are in memory, and with each memory option
# agrees NAME OPTION...: 2 and 4 ranks with --zero 3 give the bits of 1 rank with --zero 2.
agrees() {
    local name=$1 n
    shift
    check "$name: 1 rank, --zero 2" ranks 1 "${train[@]}" "$@" --zero 2 --output "$scratch/${name// /_}_1"
    for n in 2 4; do
        check "$name: $n ranks, --zero 3" ranks $n "${train[@]}" "$@" --zero 3 --output "$scratch/${name// /_}_$n"
        check "$name: $n ranks, --zero 3, give its bits and texts" \
            same_run "$scratch/${name// /_}_1" "$scratch/${name// /_}_$n" 4
    done
}
for layers in 1 2 3; do agrees "$layers layers" --layers $layers --precision bf16; done
agrees "fp32" --layers 5 --precision fp32
agrees "recompute" --layers 4 --precision bf16 --recompute layer
agrees "no masters" --layers 4 --precision bf16 --master-weights off
agrees "fp8" --layers 4 --precision fp8 --channels 32

# ---- one checkpoint for every stage
stages=("${train[@]}" --layers 4 --precision bf16 --global-batch 128 --checkpoint-every 1 --output "$scratch/stages")
check "1 rank, one micro-step per virtual rank" ranks 1 "${stages[@]}" --output "$scratch/one_stage"
check "--zero 3 on 2 ranks, one step" ranks 2 "${stages[@]}" --zero 3 --stop-after 1
check "--zero 0 on 1 rank, one step more" ranks 1 "${stages[@]}" --stop-after 1 --resume
check "--zero 3 on 4 ranks, one step more" ranks 4 "${stages[@]}" --zero 3 --stop-after 1 --resume
check "--zero 1 on 2 ranks, the last step" ranks 2 "${stages[@]}" --zero 1 --resume
check "each --zero goes on with the bits of the others" same_run "$scratch/one_stage" "$scratch/stages" 4

# ---- a run that ends with an update: its weights are still being gathered when the last step is done
for zero in 1 2 3; do
    check "--zero $zero: a run that ends without a checkpoint or validation" \
        ranks 4 "${train[@]}" --layers 4 --channels 128 \
        --precision fp32 --zero $zero --val-every 0 --checkpoint-every 0 --sample-every 0 --output ''
done

# ---- bytes: 2 ranks make 4 micro-steps each, on 2 virtual ranks; the gradients are sent in 2 of them
embeddings=26752 layer=49984  # 384 x 64 + 32 x 64 + 2 x 64; 12 x 64 x 64 + 13 x 64
bytes() { sed -n 's/.*"kind":"step","step":'"$2"',.*"comm_bytes":\([0-9]*\).*/\1/p' "$1/log.jsonl"; }
whole=$((embeddings + 5 * layer)) in_pass=$((3 * layer))
want=$(((2 * whole + whole + 7 * in_pass) * 4 / 2))
# Step 1 follows no validation and no text, after which a pass finds other layers in memory.
check "--zero 3 sends weights in every forward and backward: $(bytes "$scratch/fp32_2" 1) bytes, $want by the formula" \
    within "$(bytes "$scratch/fp32_2" 1)" $want
# plan rounds to three digits.
traffic=(--heads 2 --channels 64 --vocab-size 300 --seq-len 32 --micro-batch 1 --layers 5 --precision bf16)
# as_planned RANKS OPTION...: step 1 of a run sends the bytes of plan.
as_planned() {
    local planned sent out=$scratch/as_planned
    planned=$("$program" plan --ranks "$1" "${traffic[@]}" "${@:2}" |
        sed -nE 's/.*each rank sends ([0-9.]+) ([KM])iB .*/\1 \2/p' |
        awk '{ printf "%.0f", $1 * ($2 == "K" ? 1024 : 1048576) }')
    ranks "$1" "$program" --train-data "$scratch/data/train_*.bin" "${traffic[@]}" "${@:2}" --quiet --steps 2 \
        --output "$out" || return 1
    sent=$(bytes "$out" 1)
    rm -r "$out"
    echo "$sent bytes, planned $planned"
    awk -v a="$sent" -v b="$planned" 'BEGIN { exit !(a > 0.995 * b && a < 1.005 * b) }'
}
for zero in 0 1 2 3; do
    check "plan has the bytes of --zero $zero on 2 ranks" as_planned 2 --zero $zero --global-batch 256
    check "plan has the bytes of --zero $zero, --grad-dtype bf16 on 4 ranks" \
        as_planned 4 --zero $zero --grad-dtype bf16 --global-batch 256
done
check "plan has the bytes of 3 ranks" as_planned 3 --zero 3 --global-batch 192
check "plan has the bytes of virtual ranks" as_planned 2 --zero 2 --deterministic-ranks 4 --global-batch 256

# ---- a rank that cannot read its data takes part in the others' gathers until all have ended
make_shards "$scratch/damaged" 1500 || fail "no shards"
cp "$scratch"/data/val_*.bin "$scratch/damaged"
for file in "$scratch"/damaged/*.bin; do printf '\xff\xff' | dd of="$file" bs=1 seek=1600 conv=notrunc status=none; done
for what in train val; do
    ranks 4 "${train[@]}" --layers 4 --precision bf16 --zero 3 --steps 300 --val-every 1 --sample-every 0 \
        --output "$scratch/damaged_$what" \
        --$what-data "$scratch/damaged/${what}_*.bin" >"$scratch/damaged.log" 2>&1
    check "bad $what data for one rank: exit code 65" test $? = 65
    check "bad $what data for one rank: the error names the token" \
        grep -q "^error: rank [0-3] on $(hostname): .*65535" "$scratch/damaged.log"
done

# ---- the CUDA backend in the emulator
emulated=$PWD/build/release/emulator/train_gpt2cu
if [ -x "$emulated" ]; then
    on_gpu=("${train[@]}" --layers 4 --heads 1 --channels 32 --seq-len 16 --global-batch 64 --deterministic-ranks 2
        --steps 3
            --checkpoint-every 3 --val-batches 2 --val-every 3 --sample-tokens 3)
    on_gpu[0]=$emulated
    for precision in fp32 bf16; do
        check "emulator, $precision: 1 GPU, --zero 2" \
            "${on_gpu[@]}" --precision $precision --zero 2 --output "$scratch/gpu_1"
        SIMT_DEVICES=2 check "emulator, $precision: 2 GPUs by NCCL, --zero 3" "${on_gpu[@]}" --ranks 2 \
            --precision $precision --zero 3 --output "$scratch/gpu_2"
        check "emulator, $precision: 2 GPUs, --zero 3, give its bits" same_run "$scratch/gpu_1" "$scratch/gpu_2" 3
        for order in deferred deferred:3; do
            SIMT_DEVICES=2 SIMT_STREAMS=$order check \
                "emulator, $precision: 2 GPUs, --zero 3, other order of streams ($order)" \
                "${on_gpu[@]}" --ranks 2 --precision $precision --zero 3 --output "$scratch/gpu_2_$order"
            check "emulator, $precision: the order $order changes no bit" \
                same_run "$scratch/gpu_1" "$scratch/gpu_2_$order" 3
        done
        rm -r "$scratch"/gpu_*
    done
    SIMT_DEVICES=2 timeout 100 "${on_gpu[@]}" --ranks 2 --zero 3 --train-data "$scratch/damaged/train_*.bin" \
        --steps 300 --output "$scratch/gpu_bad" >"$scratch/bad.log" 2>&1
    check "emulator: bad data for one GPU: exit code 65" test $? = 65
else
    skip "--zero 3 on GPUs" "build/release/emulator/train_gpt2cu is not built"
fi
finish
