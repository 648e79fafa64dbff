#!/usr/bin/env bash
# test_cgroup.sh: tests training in a control group that has too little memory: it ends with one sentence before the
# first step, and its checkpoints stay whole.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

# The groups of this process: a path below the folder of the memory controller (version 1) or of
# all controllers (version 2).
own_group() {
    local path
    if path=$(sed -n 's/^[0-9]*:\([^:]*,\)\?memory\(,[^:]*\)\?:\(.*\)/\3/p' /proc/self/cgroup) && [ -n "$path" ]; then
        echo "/sys/fs/cgroup/memory${path%/}"
    else
        echo "/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup | sed 's:/$::')"
    fi
}
group=$(own_group)/train_gpt2_test_$$
# limit BYTES: of the group, without swap.
limit() {
    local file bytes=$1
    for file in memory.limit_in_bytes memory.max; do
        if [ -e "$group/$file" ]; then echo "$bytes" >"$group/$file" && return; fi
    done
    return 1
}
trap 'if is_main_shell; then rmdir "$group" 2>/dev/null; rm -rf "$scratch"; fi' EXIT
if ! mkdir "$group" 2>/dev/null || ! limit 1G 2>/dev/null; then
    skip "a control group with too little memory" "no group with a memory limit can be made here" && finish
fi
# shellcheck disable=SC2016  # for the inner shell
grouped=(bash -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group")
if ! "${grouped[@]}" true 2>/dev/null; then skip "a control group" "no process can be moved into it" && finish; fi

make_shards "$scratch/data" || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --channels 256 --checkpoint-every 4
    --output "$scratch/run")
check "4 steps without a limit" "${train[@]}" --steps 4

# GPT-2 124M needs 2 GiB.
check "a limit of 300 MiB" limit 314572800
refused "a model for 2 GiB in 300 MiB" 1 \
    "no memory for " "${grouped[@]}" "$program" --train-data "$scratch/data/train_*.bin" --model d12 \
    --vocab-size 50257 --seq-len 64 --micro-batch 1 --global-batch 0 --output "$scratch/large"
check "a model for 2 GiB: the error has the sizes" \
    grep -qE '^error: no memory for [^:]*: [0-9,]* bytes asked, [0-9.]* [MG]iB available' "$scratch/err"
check "a model for 2 GiB: no checkpoint" test -z "$(compgen -G "$scratch/large/step_*")"
check "a model that fits trains" "${grouped[@]}" "${train[@]}" --resume --steps 8 --keep 0
checkpoints() { (cd "$scratch/run" && cat latest && sha256sum step_*/*); }
before=$(checkpoints)
check "there are two checkpoints" test "$(grep -c model.safetensors <<<"$before")" = 2

# A resume with less memory than the start.
check "a limit of 64 MiB" limit 67108864
refused "a resume in 64 MiB" 1 "no memory for " "${grouped[@]}" "${train[@]}" --resume --steps 12
check "a resume in 64 MiB: the checkpoints are unchanged" test "$(checkpoints)" = "$before"
finish
