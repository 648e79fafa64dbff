# shellcheck shell=bash disable=SC2154
# recipe.sh: what the recipes run_gpt2_* share. Sourced from the repository's root, after these are set:
#   model, steps, lr, final_lr_fraction, checkpoint_every
#   tokens_per_step, most_micro_batch (sequences that fit 80 GB), data (folder with shards), ranks
#   more=(...)                  options of this recipe alone
# As first argument of a recipe --plan says what the run is and takes, and runs nothing. Others are options of train_gpt2,
# which come after the recipe's own and win.

# The most sequences that a step divides into: fewer ranks make more micro-steps.
micro_batch=$most_micro_batch
while [ $((micro_batch * 1024 * ranks)) -gt "$tokens_per_step" ] && [ "$micro_batch" -gt 1 ]; do micro_batch=$((micro_batch / 2)); done

recipe=(--model "$model" --seq-len 1024 --micro-batch "$micro_batch" --global-batch "$tokens_per_step" --steps "$steps"
        --lr "$lr" --final-lr-fraction "$final_lr_fraction" --warmup 700 --schedule cosine --weight-decay 0.1
        --precision bf16 --zero 1 --val-every 250 --checkpoint-every "$checkpoint_every" "${more[@]}")

if [ "${1:-}" = --plan ]; then
    shift
    program=./train_gpt2
    if [ -x ./train_gpt2cu ] && nvidia-smi -L >/dev/null 2>&1; then program=./train_gpt2cu; fi
    if [ ! -x $program ]; then echo "error: $program is not built: run make" >&2 && exit 2; fi
    exec $program plan "${recipe[@]}" --world-size "$ranks" "$@"
fi

shards=("$data"/*train_*.bin)
if [ ! -e "${shards[0]}" ]; then
    echo "error: no shards $data/*train_*.bin; data/fineweb10B.sh fetches some, and DATA=... names a folder of others" >&2
    exit 66
fi
if [ ! -x ./train_gpt2cu ]; then echo "error: ./train_gpt2cu is not built: run make where the GPUs are" >&2 && exit 2; fi
recipe+=(--train-data "$data/*train_*.bin" --val-data "$data/*val_*.bin" --output "${OUT:-out/$(basename "$0" .sh)}" --resume "$@")

# Where mpirun itself was killed, Open MPI leaves its ranks' shared memory behind, some MB for each. Ours of this host are
# vader_segment.HOST.UID.* of Open MPI 4, sm_segment.HOST.UID.* of Open MPI 5; a live one is in the memory of a process, from
# within moments of its making.
remove_left_segments() {
    local mapped segment count=0
    mapped=$(grep -hsoE '/dev/shm/(vader|sm)_segment[^ ]*' /proc/[0-9]*/maps | sort -u) || true
    while read -r segment; do
        if grep -qxF -- "$segment" <<<"$mapped"; then continue; fi
        if rm -f -- "$segment"; then count=$((count + 1)); fi
    done < <(find /dev/shm -maxdepth 1 -type f -user "$(id -u)" -mmin +1 \
        \( -name "vader_segment.${HOSTNAME%%.*}.$(id -u).*" -o -name "sm_segment.${HOSTNAME%%.*}.$(id -u).*" \) 2>/dev/null)
    if [ $count != 0 ]; then echo "removed shared memory that a killed mpirun has left in /dev/shm: $count files" >&2; fi
}

# until_done COMMAND...: started again after a fault, from the last checkpoint, at most five times. Not after bad options (2),
# bad or missing data (65, 66), or when it was asked to stop (75).
until_done() {
    local attempt status
    for ((attempt = 1; ; attempt++)); do
        status=0
        remove_left_segments
        "$@" || status=$?
        case $status in 0 | 2 | 65 | 66 | 75) return $status ;; esac
        if [ $attempt = 6 ]; then return $status; fi
        echo "ended with exit code $status; going on from the last checkpoint in 10 s" >&2
        sleep 10
    done
}
