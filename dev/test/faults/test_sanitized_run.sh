#!/usr/bin/env bash
# test_sanitized_run.sh: runs of FAULT_STEPS steps [1000] under sanitizers, without a report: one process and two ranks
# by mpirun under AddressSanitizer and UndefinedBehaviorSanitizer, and two emulated GPUs under ThreadSanitizer, without
# and with ZeRO. It builds the programs.
#
# Leaks are reported for the single process only. In the ranks Open MPI, which is not instrumented, leaks memory
# of plugins that it has unloaded, whose names are then unknown; test_constant_memory.sh shows that the ranks'
# memory does not grow.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

steps=${FAULT_STEPS:-1000}
make_shards "$scratch/data" 30000 || fail "no shards"
train=(--train-data "$scratch/data/train_*.bin" --val-data "$scratch/data/val_*.bin" "${tiny[@]}"
    --steps "$steps" --val-every 100 --val-batches 2
    --sample-every 200 --sample-tokens 8 --checkpoint-every 20 --keep 2 --checkpoint-async on --check-replicas 20)
clean() { ! grep -E 'ERROR: |WARNING: |runtime error' "$1"; }
has_steps() { test "$(grep -c '"kind":"step"' "$1/log.jsonl")" = "$steps"; }
# sanitized NAME COMMAND...: a run that must end without a report.
sanitized() {
    local name=$1 status=0
    shift
    "$@" --output "$scratch/$name" >"$scratch/$name.log" 2>&1 </dev/null || status=$?
    check "$name: exit code 0" test $status = 0
    check "$name: no report of the sanitizer" clean "$scratch/$name.log"
    check "$name: the log has $steps steps" has_steps "$scratch/$name"
    if [ $status != 0 ]; then tail -n 40 "$scratch/$name.log" | sed 's/^/      /'; fi
}

build=build/address+undefined/train_gpt2
if ! make -j"$(nproc)" SANITIZE=address,undefined $build >"$scratch/build.log" 2>&1; then
    fail "the build for AddressSanitizer: $(tail -n 3 "$scratch/build.log")"
else
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
    sanitized address_1 env ASAN_OPTIONS=detect_leaks=1 $build "${train[@]}"
    reason=$(no_ranks_because)
    if [ -n "$reason" ]; then
        skip "two ranks under AddressSanitizer" "$reason"
    else
        several_ranks_here
        for zero in 0 2; do
            sanitized address_2_zero_$zero env ASAN_OPTIONS=detect_leaks=0 mpirun -np 2 $build "${train[@]}" \
                --zero $zero
        done
    fi
fi

build=build/thread-clang++/emulator/train_gpt2cu
if ! command -v clang++ >/dev/null; then
    skip "two emulated GPUs under ThreadSanitizer" "no clang++, and by g++ they take many minutes"
elif [ "$(uname -m)" != x86_64 ]; then
    skip "two emulated GPUs under ThreadSanitizer" "the emulator switches stacks as x86-64 does"
elif ! make -j"$(nproc)" SANITIZE=thread CXX=clang++ $build >"$scratch/build.log" 2>&1; then
    fail "the build for ThreadSanitizer: $(tail -n 3 "$scratch/build.log")"
else
    # One OpenMP thread: clang's OpenMP runtime is not instrumented, and would be reported.
    # With --zero 1 a thread of each rank sends its part of every checkpoint.
    for zero in 0 1; do
        sanitized thread_2_zero_$zero env SIMT_DEVICES=2 OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1 $build \
            --ranks 2 "${train[@]}" \
            --zero $zero --layers 1 --heads 1 --vocab-size 384 --micro-batch 1 --global-batch 32 --precision fp32 \
            --autotune off \
            --timeout 0
    done
fi
finish
