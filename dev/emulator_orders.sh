#!/usr/bin/env bash
# emulator_orders.sh [address|thread|memory]...: runs every kernel test, test_gpt2cu, and the training program on two
# GPUs in the emulator, in every order of threads and of streams (emulator.h), under AddressSanitizer, ThreadSanitizer
# and MemorySanitizer. scripts/test.sh runs the orders that find most bugs. Needs clang. Logs are in build/orders_logs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ $# = 0 ]; then set -- address thread memory; fi
orders=(SIMT_ORDER=forward SIMT_ORDER=reverse SIMT_ORDER=random:7 SIMT_STREAMS=deferred:5)
logs=build/orders_logs
export OMP_NUM_THREADS=1  # clang's OpenMP runtime is not instrumented
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p $logs
passed=0 failed=0

# execute NAME COMMAND...: prints ok or FAIL with the time.
execute() {
    local name=$1 status=0 start=$SECONDS log=$logs/${1//[^a-zA-Z0-9_]/_}.log
    shift
    timeout 1800 "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ $status = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    printf '%-4s  %-60s %5d s\n' "$([ $status = 0 ] && echo ok || echo FAIL)" "$name" $((SECONDS - start))
    if [ $status != 0 ]; then tail -n 20 "$log" | sed 's/^/      /'; fi
}

make -j"$(nproc)" train_gpt2 || exit 1
head -c 40000 README.md >"$work/text.txt"
./train_gpt2 tokenize "$work/text.txt" --output "$work/data" --train-bpe 300 --quiet || exit 1
ranks=(--train-data "$work/data/train_*.bin" --layers 3 --heads 2 --channels 32 --vocab-size 384 --seq-len 16
       --micro-batch 1 --global-batch 64 --deterministic-ranks 2 --steps 3 --checkpoint-every 3 --ranks 2)

for sanitizer in "$@"; do
    case $sanitizer in
        address) build=("SANITIZE=address,undefined") in=build/address+undefined-nompi ;;
        thread | memory) build=(SANITIZE="$sanitizer" CXX=clang++) in=build/$sanitizer-nompi-clang++ ;;
        *) echo "emulator_orders: '$sanitizer' is not address, thread or memory" >&2 && exit 2 ;;
    esac
    programs=()
    for source in dev/test/gpu/test_*.cu; do programs+=("$(basename "$source" .cu)"); done
    programs+=(test_gpt2cu)
    make MPI=0 -j"$(nproc)" "${build[@]}" "${programs[@]/#/$in/emulator/}" "$in/emulator/train_gpt2cu" || exit 1
    for order in "${orders[@]}"; do
        for name in "${programs[@]}"; do
            execute "$sanitizer $order $name" env "$order" "$in/emulator/$name"
        done
        for options in "--zero 0" "--zero 1" "--zero 3" "--precision fp8" "--tensor-parallel 2" \
            "--tensor-parallel 2 --sequence-parallel"; do
            # shellcheck disable=SC2086
            execute "$sanitizer $order two ranks $options" env "$order" SIMT_DEVICES=2 "$in/emulator/train_gpt2cu" \
                "${ranks[@]}" --precision bf16 $options --output "$work/$sanitizer $order $options"
        done
    done
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
