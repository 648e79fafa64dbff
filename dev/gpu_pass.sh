#!/usr/bin/env bash
# gpu_pass.sh [-o FOLDER] [STAGE...]: everything that only a GPU can say, in stages of some minutes: build test sanitize
# bench train compare; without names all of them. Goes on after a failure, and names the failures at the end.
#
# Leaves in FOLDER (out/gpu_pass): a log per program, results.jsonl (an object per figure), results.md (its tables, by
# dev/bench/results.py) and summary.txt. TEXT='files' is what the training run reads [this repository's own text].
# compare runs PyTorch where python3 has it with CUDA, and llm.c where LLMC names a folder with its train_gpt2cu and a
# tokens file for it (LLMC_DATA).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

out=out/gpu_pass
if [ "${1:-}" = -o ]; then out=$2 && shift 2; fi
stages=("$@")
if [ ${#stages[@]} = 0 ]; then stages=(build test sanitize bench train compare); fi
mkdir -p "$out"
results=$out/results.jsonl
failures=()
bin=build/release/cuda

# run NAME SECONDS COMMAND...: a log of its own, its last line on the screen.
run() {
    local name=$1 limit=$2 status=0 start=$SECONDS
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null || status=$?
    printf '%-4s %-44s %4d s  %s\n' "$([ $status = 0 ] && echo ok || echo FAIL)" "$name" $((SECONDS - start)) \
        "$(grep -av '^[=[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c1-120)" | tee -a "$out/summary.txt"
    if [ $status != 0 ]; then
        failures+=("$name: status $status")
        tail -n 15 "$out/$name.log" | sed 's/^/      /'
    fi
}

build() { run build 590 make CUDA=1 -j"$(nproc)" all gpu-tests gpu-bench; }

kernel_tests() { for source in dev/test/test_gpu_*.cu; do basename "$source" .cu; done; }

test() {
    for name in $(kernel_tests); do run "$name" 120 "$bin/$name"; done
    run test_gpt2cu 300 ./test_gpt2cu
}

# The tools take the programs ten to a hundred times as long; racecheck looks at shared memory alone.
sanitize() {
    if ! command -v compute-sanitizer >/dev/null; then echo "no compute-sanitizer here" | tee -a "$out/summary.txt" && return; fi
    for tool in memcheck racecheck initcheck synccheck; do
        for name in $(kernel_tests); do
            run "$tool-$name" 120 compute-sanitizer --tool $tool --error-exitcode 9 "$bin/$name"
        done
        run "$tool-test_gpt2cu" 240 compute-sanitizer --tool $tool --error-exitcode 9 ./test_gpt2cu
    done
}

bench() {
    run bench-d12 240 "$bin/bench_ops" --model d12 -b 64 -t 1024 --precision bf16 --json "$results"
    run bench-d12-fp32 120 "$bin/bench_ops" --model d12 -b 16 -t 1024 --precision fp32 --json "$results"
    run bench-d48 240 "$bin/bench_ops" --model d48 -b 16 -t 1024 --precision bf16 --json "$results"
}

tokens() {
    if compgen -G "$out/data/train_*.bin" >/dev/null; then return; fi
    # shellcheck disable=SC2086  # a list of files
    run tokenize 120 ./train_gpt2 tokenize ${TEXT:-$(find README.md data dev llmc scripts -type f -regex '.*\.\(md\|cpp\|h\|cuh?\|py\|sh\)')} --output "$out/data" \
        --train-bpe 4096
}

# train_run NAME ARGUMENTS...: the losses of log.jsonl are results.
train_run() {
    local name=$1
    shift
    rm -rf "$out/$name"
    run "$name" 400 ./train_gpt2cu --train-data "$out/data/train_*.bin" --val-data "$out/data/val_*.bin" \
        --output "$out/$name" --progress plain --checkpoint-every 0 "$@"
    if [ -e "$out/$name/log.jsonl" ]; then
        python3 dev/bench/results.py --run "$name" "$out/$name/log.jsonl" >>"$results"
    fi
}

train() {
    tokens
    local small=(--layers 6 --heads 6 --channels 384 --seq-len 256 --global-batch 4096 --lr 1e-3)
    train_run train-small "${small[@]}" --micro-batch 16 --steps 200 --val-every 50
    train_run train-small-again "${small[@]}" --micro-batch 16 --steps 200 --val-every 50
    if ! diff <(grep -o '"loss":[^,]*' "$out/train-small/log.jsonl") \
        <(grep -o '"loss":[^,]*' "$out/train-small-again/log.jsonl") >/dev/null; then
        failures+=("train-small: two runs with the same seed differ")
    fi
    train_run train-small-no-graph "${small[@]}" --micro-batch 16 --steps 50 --cuda-graph off
    train_run train-small-recompute "${small[@]}" --micro-batch 16 --steps 50 --recompute layer
    train_run train-d12 --model d12 --seq-len 1024 --micro-batch auto --global-batch 524288 --steps 30 --val-every 0
    run train-small-cpu 400 ./train_gpt2 --train-data "$out/data/train_*.bin" --output "$out/train-small-cpu" \
        --progress plain --checkpoint-every 0 "${small[@]}" --micro-batch 16 --steps 20
    if [ -e "$out/train-small-cpu/log.jsonl" ]; then
        python3 dev/bench/results.py --run train-small-cpu "$out/train-small-cpu/log.jsonl" >>"$results"
    fi
}

compare() {
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        for B in 32 64; do
            run "torch-B$B" 200 python3 dev/bench/torch_baseline.py --device cuda --B $B --T 1024 --precision bf16 \
                --compile --steps 20 --json "$results"
        done
    else
        echo "no PyTorch with CUDA here" | tee -a "$out/summary.txt"
    fi
    if [ -n "${LLMC:-}" ]; then
        run llmc-B64 200 "$LLMC/train_gpt2cu" -i "$LLMC_DATA" -j "$LLMC_DATA" -e d12 -b 64 -t 1024 -d 65536 -x 30 -v 0 -s 0 -h 0
    else
        echo "llm.c not run: LLMC is not set" | tee -a "$out/summary.txt"
    fi
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | tee -a "$out/summary.txt"
for stage in "${stages[@]}"; do
    case $stage in
        build | test | sanitize | bench | train | compare) ;;
        *) echo "gpu_pass.sh: no stage $stage: build test sanitize bench train compare" >&2 && exit 2 ;;
    esac
    printf '== %s (%d s)\n' "$stage" $SECONDS | tee -a "$out/summary.txt"
    "$stage"
done
if [ -e "$results" ]; then python3 dev/bench/results.py "$results" >"$out/results.md"; fi
for failure in ${failures[@]+"${failures[@]}"}; do echo "failed: $failure"; done | tee -a "$out/summary.txt"
[ ${#failures[@]} = 0 ]
