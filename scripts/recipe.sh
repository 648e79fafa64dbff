# shellcheck shell=bash disable=SC2154
# recipe.sh: the common part of the recipes run_gpt*, which source it from the repository's root after they set:
#   model, steps, lr, final_lr_fraction, checkpoint_every
#   tokens_per_step, most_micro_batch (sequences that fit 80 GB), data (folder with shards), ranks
#   more=(...)                  options of this recipe alone
#   seq_len, warmup, zero       if they are not 1024, 700 and 1
# With --plan as its first argument a recipe prints the plan of the run and trains nothing. Other arguments are options
# of train_gpt2, and override the recipe's own.

: "${seq_len:=1024}" "${warmup:=700}" "${zero:=1}"
# Halves the micro-batch until one micro-step of all ranks fits into a step. Fewer ranks make more micro-steps.
micro_batch=$most_micro_batch
while [ $((micro_batch * seq_len * ranks)) -gt "$tokens_per_step" ] && [ "$micro_batch" -gt 1 ]; do
    micro_batch=$((micro_batch / 2))
done

recipe=(--model "$model" --seq-len "$seq_len" --micro-batch "$micro_batch" --global-batch "$tokens_per_step"
        --steps "$steps" --lr "$lr" --final-lr-fraction "$final_lr_fraction" --warmup "$warmup" --schedule cosine
        --weight-decay 0.1 --precision bf16 --zero "$zero" --val-every 250 --val-tokens 10485760
        --checkpoint-every "$checkpoint_every" "${more[@]}")

if [ "${1:-}" = --plan ]; then
    shift
    program=./train_gpt2
    if [ -x ./train_gpt2cu ] && nvidia-smi -L >/dev/null 2>&1; then program=./train_gpt2cu; fi
    if [ ! -x $program ]; then echo "error: $program is not built: run make" >&2 && exit 2; fi
    exec $program plan "${recipe[@]}" --ranks "$ranks" "$@"
fi

shards=("$data"/*train_*.bin)
if [ ! -e "${shards[0]}" ]; then
    echo "error: no shards $data/*train_*.bin; data/fineweb10B.sh fetches some, and DATA=... names another folder" >&2
    exit 66
fi
if [ ! -x ./train_gpt2cu ]; then
    echo "error: ./train_gpt2cu is not built: run make where the GPUs are" >&2
    exit 2
fi
recipe+=(--train-data "$data/*train_*.bin" --val-data "$data/*val_*.bin"
         --output "${OUT:-out/$(basename "$0" .sh)}" --resume "$@")

# If mpirun itself is killed, the shared memory of its ranks stays in /dev/shm, some MB for each. The files of this user
# and host are vader_segment.HOST.UID.* (Open MPI 4) and sm_segment.HOST.UID.* (Open MPI 5). A process that uses such a
# file maps it within moments of its creation.
remove_left_segments() {
    local mapped segment host=${HOSTNAME%%.*} user count=0
    user=$(id -u)
    mapped=$(grep -hsoE '/dev/shm/(vader|sm)_segment[^ ]*' /proc/[0-9]*/maps | sort -u) || true
    while read -r segment; do
        if grep -qxF -- "$segment" <<<"$mapped"; then continue; fi
        if rm -f -- "$segment"; then count=$((count + 1)); fi
    done < <(find /dev/shm -maxdepth 1 -type f -user "$user" -mmin +1 \
        \( -name "vader_segment.$host.$user.*" -o -name "sm_segment.$host.$user.*" \) 2>/dev/null)
    if [ $count = 0 ]; then return; fi
    echo "removed shared memory that a killed mpirun has left in /dev/shm: $count files" >&2
}

# until_done COMMAND...: runs the command. After a failure it runs it again, from the last checkpoint, at most five
# times. It does not do so after bad options (2), bad or missing data (65, 66), or a request to stop (75).
until_done() {
    local attempt status
    for ((attempt = 1; ; attempt++)); do
        status=0
        remove_left_segments
        "$@" || status=$?
        case $status in 0 | 2 | 65 | 66 | 75) return $status ;; esac
        if [ $attempt = 6 ]; then return $status; fi
        echo "ended with exit code $status; continuing from the last checkpoint in 10 s" >&2
        sleep 10
    done
}
