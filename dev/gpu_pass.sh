#!/usr/bin/env bash
# gpu_pass.sh [-o FOLDER] [STAGE...]: tests and measures everything that needs a real GPU. Its stages, and the seconds
# that each may take, 38 minutes in all:
#
#   build      300   the programs, tests and benchmarks
#   test       120   all kernel tests and test_gpt2cu, eight at a time
#   bench      120   every operation of 124M; whole steps with other options and in FP8
#   compare    210   PyTorch and llm.c in the same minutes
#   train      330   runs repeated, resumed, with and without graphs, cuDNN and recomputation; compared with the CPU;
#                    124M for 300 steps; two ranks if there are two GPUs
#   sweep      210   124M with other micro-batches and in fp32; every operation of 1558M
#   curve      210   124M in PyTorch with the same weights and tokens: the same losses
#   memcheck   150   compute-sanitizer on the kernel tests and a tiny run
#   racecheck   90   the same for our own kernels, because cuBLAS and cuDNN have reports of their own
#   initcheck   60
#   synccheck   30
#   models     540   350M, 774M and 1558M: whole steps with and without cuDNN, determinism and timed algorithms;
#                    PyTorch; llm.c
#
# Without arguments it runs all stages, the most important first. It continues after a failure and lists the failures
# at the end. Programs that do not fit into the time of their stage count as failures. STAGE_SECONDS changes the time of
# each stage. SHAPES=tiny replaces models and steps by small ones, to try the script itself. Stages may also be run in
# several commands with the same FOLDER, "build" in the first.
#
# If a machine cannot install packages, copy the headers that the build needs into .deps/include on another machine:
#   mkdir -p .deps/include && cp -r /usr/include/{CLI,doctest,nlohmann,xxhash.h} .deps/include
# cuDNN and NCCL are taken from PyTorch's packages unless CUDNN_HOME and NCCL_HOME name them.
#
# FOLDER [out/gpu_pass] receives a log per program, results.jsonl (one object per figure), results.md (tables made by
# dev/bench/results.py) and summary.txt. TEXT='files': the training data [this repository's own text]. The stages
# "compare" and "models" run PyTorch if python3 has it with CUDA, and llm.c if LLMC names a folder with its sources.
# They build llm.c there, with cuDNN's attention if CUDNN_FRONTEND names the folder "include" of cudnn-frontend 1.18.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

all_stages=(build test bench compare train sweep curve memcheck racecheck initcheck synccheck models)
stage_seconds() { sed -n "s/^#   $1 *\([0-9]*\).*/\1/p" dev/gpu_pass.sh; }
out=out/gpu_pass
if [ "${1:-}" = -o ]; then out=$2 && shift 2; fi
stages=("$@")
if [ ${#stages[@]} = 0 ]; then stages=("${all_stages[@]}"); fi
mkdir -p "$out"
results=$out/results.jsonl
failures=$out/failures.txt  # a file, because programs that run at the same time add to it
: >"$failures"
bin=build/release/cuda
deadline=0

PATH=$PATH:/usr/local/cuda/bin
if [ -d .deps/include ]; then export CPATH=$PWD/.deps/include${CPATH:+:$CPATH}; fi
while read -r nvidia; do
    if [ -e "$nvidia/cudnn/include/cudnn_version.h" ]; then export CUDNN_HOME=${CUDNN_HOME:-$nvidia/cudnn}; fi
    if [ -e "$nvidia/nccl/include/nccl.h" ]; then export NCCL_HOME=${NCCL_HOME:-$nvidia/nccl}; fi
done < <(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null)
# All runs of the pass share one file of timed algorithms: a run that times anew may choose others,
# which give other bits.
XDG_CACHE_HOME=${XDG_CACHE_HOME:-$(cd "$out" && pwd)/cache}
export XDG_CACHE_HOME

# The models and their steps.
small=(--layers 6 --heads 6 --channels 384 --seq-len 256 --micro-batch 8 --global-batch 4096 --lr 1e-3 --warmup 20
       --sample-every 0 --checkpoint-every 0)
d12=(--model d12 --vocab-size 50257 --seq-len 1024 --sample-every 0)
d48=(--model d48 --vocab-size 50257 --seq-len 1024 --sample-every 0)
micro_batch=64 batch=131072 large_batch=524288 vocabulary=4096
steps=200 few=20 d12_steps=300 curve_steps=150 d48_steps=5
if [ "${SHAPES:-}" = tiny ]; then
    small=(--layers 1 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --lr 1e-2 --warmup 2
           --sample-every 0 --checkpoint-every 0)
    d12=(--layers 2 --heads 2 --channels 32 --vocab-size 384 --seq-len 16 --sample-every 0)
    d48=("${d12[@]}")
    micro_batch=2 batch=64 large_batch=64 vocabulary=320
    steps=6 few=3 d12_steps=2 curve_steps=4 d48_steps=2
fi

say() { echo "$*" | tee -a "$out/summary.txt"; }

# run NAME SECONDS COMMAND...: runs the command with a time limit and a log of its own, and prints the log's last line.
run() {
    local name=$1 limit=$2 status=0 start=$SECONDS
    shift 2
    if [ $((deadline - start)) -lt "$limit" ]; then limit=$((deadline - start)); fi
    if [ "$limit" -lt 5 ]; then
        echo "$name: no time left in this stage" >>"$failures"
        return 1
    fi
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null || status=$?
    say "$(printf '%-4s %-44s %4d s  %s\n' "$([ $status = 0 ] && echo ok || echo FAIL)" "$name" $((SECONDS - start)) \
        "$(grep -av '^[=[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c1-120)")"
    if [ $status != 0 ]; then
        echo "$name: status $status" >>"$failures"
        tail -n 15 "$out/$name.log" | sed 's/^/      /'
    fi
    return $status
}

# claim NAME COMMAND...: prints ok or FAIL; NAME is a statement about results, which COMMAND checks.
claim() {
    local name=$1
    shift
    if "$@"; then say "ok   $name"; else say "FAIL $name" && echo "$name" >>"$failures"; fi
}

build() {
    run build 560 make -k CUDA=1 -j"$(nproc)" all gpu-tests gpu-bench
    local found
    found=$(make found CUDA=1 2>&1)
    say "$found"
    if [[ "$found" != *"| cuDNN "[0-9]* ]]; then echo "build: without cuDNN" >>"$failures"; fi
}

kernel_tests() { for source in dev/test/gpu/test_gpu_*.cu; do basename "$source" .cu; done; }

# Waits until fewer than eight programs run.
room() { while [ "$(jobs -rp | wc -l)" -ge 8 ]; do wait -n; done; }

test() {
    run test_gpt2cu 300 ./test_gpt2cu &
    for name in $(kernel_tests); do
        room
        run "$name" 120 "$bin/$name" &
    done
    wait
}

# Makes the training runs' data: tokenizes the text with a tokenizer trained on it.
tokens() {
    if compgen -G "$out/data/train_*.bin" >/dev/null; then return; fi
    # shellcheck disable=SC2086  # a list of files
    run tokenize 120 ./train_gpt2 tokenize \
        ${TEXT:-$(find README.md data dev llmc scripts -type f -regex '.*\.\(md\|cpp\|h\|cuh?\|py\|sh\)')} \
        --output "$out/data" --train-bpe $vocabulary
}
data=(--train-data "$out/data/train_*.bin" --val-data "$out/data/val_*.bin")

our_kernels() { awk '!/^#/ { sub(/<.*/, "", $2); print $2 }' dev/cuda_budget.txt | sort -u; }

# Under compute-sanitizer a program takes ten to a hundred times as long, mostly on the CPU, so eight run at a time.
sanitize() {
    if ! command -v compute-sanitizer >/dev/null; then say "no compute-sanitizer here" && return; fi
    local tool=$1
    # --report-api-errors no: a test asks for a petabyte on purpose, and libraries try calls that may fail.
    local under=(env OMP_NUM_THREADS=2 compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no)
    if [ "$tool" != memcheck ]; then
        for name in $(our_kernels); do under+=(--kernel-name "kns=$name"); done
    fi
    tokens
    run "$tool-test_gpt2cu" 500 "${under[@]}" ./test_gpt2cu &
    run "$tool-train" 500 "${under[@]}" ./train_gpt2cu "${data[@]}" --layers 2 --heads 2 --channels 128 --seq-len 64 \
        --micro-batch 2 --global-batch 256 --steps 3 --val-every 2 --val-tokens 256 --sample-every 0 --warmup 1 \
        --autotune off --output '' &
    for name in $(kernel_tests); do
        room
        run "$tool-$name" 500 "${under[@]}" "$bin/$name" &
    done
    wait
}
memcheck() { sanitize memcheck; }
racecheck() { sanitize racecheck; }  # checks shared memory only
initcheck() { sanitize initcheck; }
synccheck() { sanitize synccheck; }

ops=("$bin/bench_ops" -t 1024 --json "$results")
bench() {
    local variant
    run bench-d12 60 "${ops[@]}" --model d12 -b 64 --precision bf16
    for variant in "--deterministic off" "--cudnn off" "--autotune off"; do
        # shellcheck disable=SC2086  # an option and its value
        run "bench-d12${variant// /-}" 60 "${ops[@]}" --model d12 -b 64 --precision bf16 --op step $variant
    done
    run bench-d12-fp8 60 "${ops[@]}" --model d12 -b 64 --precision fp8 --op step
}

sweep() {
    for B in 16 32 48 96 128; do run "bench-d12-B$B" 30 "${ops[@]}" --model d12 -b $B --precision bf16 --op step; done
    run bench-d12-hand-written 60 "${ops[@]}" --model d12 -b 64 --precision bf16 --cudnn off
    run bench-d12-fp32 60 "${ops[@]}" --model d12 -b 16 --precision fp32
    run bench-d48 120 "${ops[@]}" --model d48 -b 16 --precision bf16
    run bench-d48-fp8 60 "${ops[@]}" --model d48 -b 16 --precision fp8 --op step
    for B in 4 8; do run "bench-d48-B$B" 30 "${ops[@]}" --model d48 -b $B --precision bf16 --op step; done
}

# train_run NAME ARGUMENTS...: trains, and appends the run's losses and speed to results.jsonl.
train_run() {
    local name=$1
    shift
    if [[ " $* " != *" --resume "* ]]; then rm -rf "${out:?}/$name"; fi
    run "$name" 200 ./train_gpt2cu "${data[@]}" --output "$out/$name" "$@"
    if [ -e "$out/$name/log.jsonl" ]; then
        python3 dev/bench/results.py --run "$name" "$out/$name/log.jsonl" >>"$results"
    fi
}

losses() { sed -n 's/.*"kind":"step".*"loss":\([^,]*\),.*/\1/p' "$out/$1/log.jsonl" | head -n "$2"; }
# same_losses A B STEPS: whether the logged losses of the runs A and B are identical.
same_losses() { [ -n "$(losses "$1" 1)" ] && [ "$(losses "$1" "$3")" = "$(losses "$2" "$3")" ]; }
# near_losses A B STEPS TOLERANCE: whether the losses of the runs A and B agree within the relative tolerance, on
# average. A step whose gradient is far above the others magnifies any rounding.
near_losses() {
    paste <(losses "$1" "$3") <(losses "$2" "$3") | awk -v n="$3" -v e="$4" '
        { d = ($1 - $2) / $2; if (d < 0) d = -d; sum += d; if (d > e) print "step " NR - 1 ": " $1 " and " $2 }
        END { exit NR != n || !(sum <= n * e) }'
}

# two_ranks NAME ARGUMENTS...: train_run on two GPUs by NCCL.
two_ranks() { train_run "$@" --ranks 2; }

# Two GPUs with --tensor-parallel and --sequence-parallel: the losses, which differ from one GPU's in the order of the
# sums, and the speed.
split_layers() {
    local whole=("${d12[@]}" --micro-batch "$micro_batch" --global-batch "$batch" --steps "$few" --warmup 1
        --val-every 0 --checkpoint-every 0)
    two_ranks two-gpus-tensor-parallel "${small[@]}" --steps "$steps" --stop-after "$few" --tensor-parallel 2
    claim "two GPUs with --tensor-parallel 2 have one GPU's losses within 1 %" \
        near_losses one-of-two-gpus two-gpus-tensor-parallel $few 0.01
    two_ranks two-gpus-sequence-parallel "${small[@]}" --steps "$steps" --stop-after "$few" --tensor-parallel 2 \
        --sequence-parallel
    claim "two GPUs with --sequence-parallel have one GPU's losses within 1 %" \
        near_losses one-of-two-gpus two-gpus-sequence-parallel $few 0.01
    two_ranks d12-tensor-parallel "${whole[@]}" --tensor-parallel 2
    two_ranks d12-sequence-parallel "${whole[@]}" --tensor-parallel 2 --sequence-parallel
}

# On a machine with two GPUs: two ranks by NCCL have the same losses, bit for bit, as one rank, with every --zero. Also
# the speed, and layers split between the GPUs.
two_gpus() {
    local zero name one options=("${small[@]}" --steps "$steps" --stop-after "$few" --deterministic-ranks 2)
    if [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then say "one GPU: no ranks by NCCL" && return; fi
    train_run one-of-two-gpus "${options[@]}"
    train_run one-of-two-gpus-sharded "${options[@]}" --zero 2  # sums in another order than --zero 0 and 1
    for zero in 0 1 2 3; do
        name=two-gpus-zero-$zero one=one-of-two-gpus
        if [ $zero -ge 2 ]; then one="one-of-two-gpus-sharded"; fi
        two_ranks $name "${options[@]}" --zero $zero
        claim "two GPUs with --zero $zero have the same losses as one" same_losses $one $name $few
    done
    two_ranks d12-two-gpus "${d12[@]}" --micro-batch $micro_batch --global-batch 0 --steps "$few" --warmup 1 \
        --val-every 0 --checkpoint-every 0
    split_layers
}

train() {
    tokens
    local long=("${small[@]}" --steps "$steps" --val-every $((steps / 4)))
    local short=("${small[@]}" --steps "$steps" --stop-after "$few")
    train_run small "${long[@]}"
    train_run small-again "${long[@]}"
    claim "two runs with the same seed have the same losses" same_losses small small-again $steps
    train_run small-resumed "${long[@]}" --checkpoint-every $((steps / 2)) --stop-after $((steps / 2))
    train_run small-resumed "${long[@]}" --checkpoint-every $((steps / 2)) --resume
    claim "a resumed run has the same losses as one that was not interrupted" same_losses small small-resumed $steps
    train_run small-no-graph "${short[@]}" --cuda-graph off
    claim "a run without CUDA graphs has the same losses" same_losses small small-no-graph $few
    train_run small-recompute "${short[@]}" --recompute layer
    claim "a run with --recompute layer has the same losses" same_losses small small-recompute $few
    train_run small-hand-written "${short[@]}" --cudnn off
    claim "with our attention instead of cuDNN's the losses agree within 1 %" \
        near_losses small small-hand-written $few 0.01
    train_run small-fp8 "${short[@]}" --precision fp8
    claim "with --precision fp8 the losses agree within 1 %" near_losses small small-fp8 $few 0.01
    train_run small-fp32 "${short[@]}" --precision fp32
    for precision in fp32 bf16; do
        rm -rf "$out/cpu-$precision"
        run "cpu-$precision" 100 ./train_gpt2 "${data[@]}" --output "$out/cpu-$precision" "${short[@]}" \
            --precision $precision --val-every 0
    done
    claim "the losses of GPU and CPU in fp32 agree within 0.01 %" near_losses small-fp32 cpu-fp32 $few 0.0001
    claim "the losses of GPU and CPU in bf16 agree within 1 %" near_losses small cpu-bf16 $few 0.01
    two_gpus
    train_run d12 "${d12[@]}" --val-tokens 524288 --micro-batch auto --global-batch $batch --steps $d12_steps \
        --val-every $(((d12_steps + 2) / 3)) --lr 6e-4 --warmup $((d12_steps / 6)) --checkpoint-every $d12_steps
    train_run d12-autotune-off "${d12[@]}" --micro-batch $micro_batch --global-batch $large_batch --steps $few \
        --warmup 1 --val-every 0 --autotune off --checkpoint-every 0
    train_run d48-fp8 "${d48[@]}" --micro-batch auto --global-batch $batch --steps $d48_steps --warmup 1 --val-every 0 \
        --checkpoint-every 0 --precision fp8
    train_run d48 "${d48[@]}" --micro-batch auto --global-batch $batch --steps $d48_steps --warmup 1 --val-every 0 \
        --checkpoint-every 0
}

has_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }

# 124M from the same weights: with two seeds, and in PyTorch with the tokens of the first.
curve() {
    if ! has_torch; then say "no PyTorch with CUDA here" && return; fi
    tokens
    local options=(--val-every 0 --sample-every 0 --micro-batch "$micro_batch" --global-batch "$batch")
    train_run curve-weights "${d12[@]}" --micro-batch "$micro_batch" --global-batch "$batch" --steps 1 --warmup 0 \
        --lr 0 --val-every 0
    options+=(--init "$out/curve-weights" --steps "$curve_steps" --warmup $((curve_steps / 10)) --lr 6e-4
        --checkpoint-every 0)
    train_run curve "${options[@]}"
    train_run curve-other-seed "${options[@]}" --seed 43
    run curve-torch 150 python3 dev/bench/torch_curve.py "$out/curve" --noise "$out/curve-other-seed" --compile
}

# Builds llm.c in its folder, unless it is built there already.
build_llmc() {
    if [ -x "$LLMC/train_gpt2cu" ]; then return; fi
    local cudnn=() folder headers=${CPATH:-}
    # CUDA 13 changed the signature of cudaMemAdvise, which llm.c calls where memory is short. llm.c links
    # libnvidia-ml.so, but a driver installs only libnvidia-ml.so.1.
    sed -i 's/^\( *\)cudaCheck_(cudaMemAdvise(.*/\1;/' "$LLMC/llmc/cuda_utils.cuh"
    for folder in $(ldconfig -p | awk '/libnvidia-ml\.so\.1/ { sub(/\/[^\/]*$/, "", $NF); print $NF }') \
        ${LD_LIBRARY_PATH:+${LD_LIBRARY_PATH//:/ }} /usr/local/nvidia/lib64; do
        if [ -e "$folder/libnvidia-ml.so.1" ]; then
            ln -sf "$folder/libnvidia-ml.so.1" "$LLMC/libnvidia-ml.so" && break
        fi
    done
    if [ -n "${CUDNN_FRONTEND:-}" ]; then
        mkdir -p "$LLMC/cudnn-frontend"
        ln -sfn "$CUDNN_FRONTEND" "$LLMC/cudnn-frontend/include"
        cudnn=(USE_CUDNN=1)
    fi
    if [ -n "${CUDNN_HOME:-}" ]; then  # pip's package has no libcudnn.so
        ln -sf "$CUDNN_HOME/lib/libcudnn.so.9" "$LLMC/libcudnn.so"
        headers=$CUDNN_HOME/include${headers:+:$headers}
        export LD_LIBRARY_PATH=$CUDNN_HOME/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
    run llmc-build 300 env LIBRARY_PATH="$LLMC" CPATH="$headers" make -C "$LLMC" NO_MULTI_GPU=1 NO_USE_MPI=1 \
        GPU_COMPUTE_CAPABILITY="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)" \
        ${cudnn[@]+"${cudnn[@]}"} train_gpt2cu
}

# others MODEL:B...: PyTorch and llm.c with these micro-batches. llm.c trains on the same shards, whose
# format is its own.
others() {
    local each model B
    if has_torch; then
        for each in "$@"; do
            model=${each%:*} B=${each#*:}
            run "torch-$model-B$B" 150 python3 dev/bench/torch_baseline.py --device cuda --model "$model" --B "$B" \
                --T 1024 --precision bf16 --compile --steps 20 --json "$results"
        done
    else
        say "no PyTorch with CUDA here"
    fi
    if [ -z "${LLMC:-}" ]; then say "llm.c not run: LLMC is not set" && return; fi
    build_llmc || return
    tokens
    for each in "$@"; do
        model=${each%:*} B=${each#*:}
        run "llmc-$model-B$B" 150 "$LLMC/train_gpt2cu" -i "$out/data/train_*.bin" -j "$out/data/train_*.bin" \
            -e "$model" -b "$B" -t 1024 -d $((B * 1024)) -x 30 -v 1000 -m 1 -s 0 -h 0 -r 0 &&
            python3 dev/bench/results.py --llmc "$model:$B" "$out/llmc-$model-B$B.log" >>"$results"
    done
}

compare() {
    run again-d12 30 "$bin/bench_ops" --model d12 -b 64 -t 1024 --precision bf16 --op step --json "$results"
    others d12:64
}

models() {
    local each variant
    for each in d24:32 d36:16 d48:16; do
        for variant in "" "--autotune off" "--deterministic off" "--cudnn off"; do
            # shellcheck disable=SC2086  # an option and its value
            run "bench-${each%:*}${variant// /-}" 60 "${ops[@]}" --model "${each%:*}" -b "${each#*:}" \
                --precision bf16 --op step $variant
        done
    done
    others d24:32 d36:16 d48:8
}

for stage in "${stages[@]}"; do
    if [[ " ${all_stages[*]} " != *" $stage "* ]]; then
        echo "gpu_pass.sh: no stage $stage: ${all_stages[*]}" >&2
        exit 2
    fi
done
say "$(nvidia-smi --query-gpu=name,driver_version,memory.total,persistence_mode --format=csv,noheader 2>&1 | head -n 1)"
for stage in "${stages[@]}"; do
    say "== $stage ($SECONDS s)"
    deadline=$((SECONDS + ${STAGE_SECONDS:-$(stage_seconds "$stage")}))
    "$stage"
done
if [ -e "$results" ]; then python3 dev/bench/results.py "$results" >"$out/results.md"; fi
while read -r failure; do say "failed: $failure"; done <"$failures"
[ ! -s "$failures" ]
