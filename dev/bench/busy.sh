#!/usr/bin/env bash
# busy.sh [PROGRAM...]: how much slower training is beside one busy thread on two cores. Trains 12.3M parameters, or
# 124M with MODEL=124M, each program in turns alone and beside a busy loop, and prints the least median time of a step
# in five rounds. The default is build/release/train_gpt2. ROUNDS=1 and STEPS=4 shorten it. Run nothing else at the
# same time.
set -euo pipefail
rounds=${ROUNDS:-5} steps=${STEPS:-12} scratch=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$scratch"' EXIT
[ $# -gt 0 ] || set -- build/release/train_gpt2
seq 60000 >"$scratch/text.txt"
"$1" tokenize "$scratch/text.txt" --output "$scratch/data" --train-bpe 300 --quiet >"$scratch/log"
model=(--layers 6 --heads 6 --channels 384 --vocab-size 4096 --seq-len 256 --micro-batch 4)
[ "${MODEL:-}" != 124M ] ||
    model=(--layers 12 --heads 12 --channels 768 --vocab-size 50257 --seq-len 512 --micro-batch 2)
options=(--train-data "$scratch/data/train_*.bin" "${model[@]}" --global-batch 1024 --precision fp32 --steps "$steps"
    --checkpoint-every 0 --val-every 0 --sample-every 0 --quiet --output "$scratch/out")

# step_ms PROGRAM: the median of a run's steps but the first two.
step_ms() {
    rm -rf "$scratch/out"
    taskset -c 0,1 "$1" "${options[@]}" >"$scratch/log" 2>&1 || { tail -3 "$scratch/log" >&2 && exit 1; }
    sed -n 's/.*"step_ms":\([0-9.]*\).*/\1/p' "$scratch/out/log.jsonl" | tail -n +3 | sort -n |
        awk '{ ms[NR] = $1 } END { print ms[int((NR + 1) / 2)] }'
}

for ((round = 0; round < rounds; round++)); do
    for program in "$@"; do
        echo "$program alone $(step_ms "$program")"
        taskset -c 0,1 sh -c 'while :; do :; done' &
        echo "$program busy $(step_ms "$program")"
        kill $!
        wait $! 2>/dev/null || true
    done
done | tee "$scratch/times"
awk '!(($1, $2) in best) || $3 < best[$1, $2] { best[$1, $2] = $3; seen[$1] }
    END { for (p in seen) printf "%s: %s ms alone, %s ms beside a busy thread: %.2f times\n", p, best[p, "alone"],
                                 best[p, "busy"], best[p, "busy"] / best[p, "alone"] }' "$scratch/times"
