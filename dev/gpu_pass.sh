#!/usr/bin/env bash
# gpu_pass.sh [-o FOLDER] [first|second|hopper|further|STAGE]...: tests and measures all that needs a real GPU, in
# stages. Without a name it runs all of them. A machine that is lent for 15 minutes is used in two calls, `first` and
# `second`, with two starts of up to two minutes beside them. The second machine may be a new one.
#
# The seconds are limits, and estimates for 16 cores. What a stage leaves goes to the next ones. Measured with 16 cores
# and an H200: 63 s for all programs, 35 for the tests, 40 for `bench` and `options`, 60 for PyTorch and llm.c.
#
# first: 400
#   build      130   the programs and the tests
#   test        90   all kernel tests and test_gpt2cu, eight at a time
#   bench       60   every operation of 124M at B 64
#   options     60   whole steps with --deterministic off, --autotune off and --attention mma
#   graphs      60   124M for 40 steps with and without CUDA graphs: the same losses
#
# second: 240
#   rebuild     80   the programs, if the machine is new; ops.cu alone takes 47 s of a Zen 3 core
#   parts       35   attention's backward with 50, 128 and 256 MiB of dS at a time, and with all of it
#   profile     40   Nsight Compute on the kernels that are farthest from their prediction
#   torch       45   124M in PyTorch, and again here in the same minutes
#   d48         20   a step of 1558M
#   memcheck    20   compute-sanitizer on a tiny run and the kernel tests
#
# hopper: 400, in a call of its own
#   wgmma      170   our attention and matmuls for Hopper: right, alone and under compute-sanitizer
#   routes      60   attention of 124M by cuDNN, by wgmma, by mma, and by what --autotune chooses
#   steps      110   124M trained with wgmma and with cuDNN, with power and clock: the same losses
#   matmuls     60   124M with matmuls of ours and with cuBLASLt's, if --autotune chose ours: the same losses
#
# further: 1690
#   llmc       120   124M in llm.c, and again here
#   train      300   runs repeated, resumed, with recomputation, by mma; compared with the CPU; 124M, 300 steps
#   two_gpus   120   two ranks, if there are two GPUs
#   sweep      220   124M with other micro-batches, in FP8 and fp32; every operation of 1558M
#   curve      210   124M in PyTorch with the same weights and tokens: the same losses
#   racecheck   90   compute-sanitizer for our own kernels, because cuBLAS and cuDNN have reports of their own
#   initcheck   60
#   synccheck   30
#   models     540   350M, 774M and 1558M: steps with other options; PyTorch; llm.c
#
# The script continues after a failure, and lists the failures at the end; a program that does not fit into the time of
# its stage is one. STAGE_SECONDS changes the time of each stage. SHAPES=tiny has small models and few steps, to try the
# script itself.
#
# If a machine cannot install packages, copy the headers that the build needs into .deps/include on another machine:
#   mkdir -p .deps/include && cp -r /usr/include/{CLI,doctest,nlohmann,xxhash.h} .deps/include
# Programs may be copied without their objects: if they start, they are not built. cuDNN and NCCL are taken from
# PyTorch's packages unless CUDNN_HOME and NCCL_HOME name them.
#
# FOLDER [out/gpu_pass] receives a log per program (of a long one the first and last 50 kB), results.jsonl (one object
# per figure), results.md (tables by dev/bench/results.py), summary.txt, and results.tar.xz with all these and the logs
# of the runs, in at most 16 MB. They are written after each stage, and when a signal ends the script. TEXT='files': the
# training data [this repository's own text]. PyTorch needs a python3 that has it with CUDA; llm.c needs LLMC, a folder
# where its train_gpt2cu is built.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

# Rows "group stage seconds" of the table above.
table=$(awk '/^# [a-z]+: / { group = $2; sub(":", "", group) } /^#   [a-z0-9_]+ +[0-9]/ { print group, $2, $3 }' \
    dev/gpu_pass.sh)
out=out/gpu_pass
if [ "${1:-}" = -o ]; then out=$2 && shift 2; fi
if [ $# = 0 ]; then set -- first second hopper further; fi
for name in "$@"; do
    if ! grep -qE "(^| )$name " <<<"$table"; then
        printf 'gpu_pass.sh: no stage %s; there are first, second, hopper, further, and\n%s\n' "$name" "$table" >&2
        exit 2
    fi
done
mkdir -p "$out"
out=$(realpath "$out")
results=$out/results.jsonl
failures=$out/failures.txt  # a file, because programs that run at the same time add to it
: >"$failures"
bin=build/release/cuda
programs=(./train_gpt2 ./train_gpt2cu "$bin/bench_ops")
tests=(./test_gpt2cu)
for source in dev/test/gpu/test_gpu_*.cu; do tests+=("$bin/$(basename "$source" .cu)"); done

PATH=$PATH:/usr/local/cuda/bin
if [ -d .deps/include ]; then export CPATH=$PWD/.deps/include${CPATH:+:$CPATH}; fi
while read -r nvidia; do
    if [ -e "$nvidia/cudnn/include/cudnn_version.h" ]; then export CUDNN_HOME=${CUDNN_HOME:-$nvidia/cudnn}; fi
    if [ -e "$nvidia/nccl/include/nccl.h" ]; then export NCCL_HOME=${NCCL_HOME:-$nvidia/nccl}; fi
    for folder in "$nvidia"/*/lib; do export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder; done
done < <(python3 -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null)
# All runs share one file of timed algorithms: a run that times anew may choose others, which give other bits.
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$out/cache}

# The models and their steps.
small=(--layers 6 --heads 6 --channels 384 --seq-len 256 --micro-batch 8 --global-batch 4096 --lr 1e-3 --warmup 20)
d12=(--model d12) d48=(--model d48) layer=(--layers 1 --heads 12 --channels 768) hopper=("${d12[@]}")
B=64 T=1024 V=50257 batch=131072 vocabulary=4096 large=d48 large_B=16
steps=200 few=20 d12_steps=300 graph_steps=40 hopper_steps=100 curve_steps=150 d48_steps=5
if [ "${SHAPES:-}" = tiny ]; then
    small=(--layers 1 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --lr 1e-2 --warmup 2)
    d12=(--layers 2 --heads 2 --channels 32) d48=("${d12[@]}") layer=("${d12[@]}")
    hopper=(--layers 1 --heads 1 --channels 64)
    B=2 T=16 V=384 batch=64 vocabulary=320 large=d12 large_B=2
    steps=6 few=3 d12_steps=2 graph_steps=6 hopper_steps=3 curve_steps=4 d48_steps=2
fi
quiet=(--sample-every 0 --checkpoint-every 0)
quick=("${quiet[@]}" --vocab-size "$V" --seq-len "$T" --micro-batch "$B" --global-batch 0 --warmup 1 --val-every 0)
small+=("${quiet[@]}") d12+=("${quick[@]}") d48+=("${quick[@]}") layer+=("${quick[@]}") hopper+=("${quick[@]}")

say() { echo "$*" | tee -a "$out/summary.txt"; }
fail() { say "FAIL $*" && echo "$*" >>"$failures"; }

# Ends the groups of processes and the shells that this shell has started. The script then writes what it has.
quit() {
    trap '' TERM INT HUP
    for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || kill "$job" 2>/dev/null; done
    wait
    if [ $BASHPID = $$ ]; then say "ended by a signal" && write_results; fi
    exit 143
}
trap quit TERM INT HUP

# run NAME COMMAND...: runs the command until the stage's time is over, with a log, and prints the log's last line.
run() {
    local name=$1 start=$SECONDS limit=$((deadline - SECONDS)) status=0 said
    shift
    trap quit TERM INT HUP  # in the background bash has reset it
    if [ "$limit" -lt 1 ]; then fail "$name: no time left in this stage" && return 1; fi
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null &
    wait $! || status=$?
    said=$(printf '%-44s %4d s  %s\n' "$name" $((SECONDS - start)) \
        "$(tail -c 9999 "$out/$name.log" | grep -av '^[=[:space:]]*$' | tail -n 1 | cut -c1-120)")
    if [ $status = 0 ]; then say "ok   $said" && return; fi
    fail "$said [status $status]"
    tail -n 15 "$out/$name.log" | sed 's/^/      /'
    return $status
}

# claim NAME COMMAND...: prints ok or FAIL; NAME is a statement about results, which COMMAND checks.
claim() { if "${@:2}"; then say "ok   $1"; else fail "$1"; fi; }

# Writes the tables and the archive, and cuts long logs. Nothing else runs.
write_results() {
    local archive=results.tar.xz
    command -v xz >/dev/null || archive=results.tar.gz
    if [ -e "$results" ]; then python3 dev/bench/results.py "$results" >"$out/results.md"; fi
    find "$out" -maxdepth 1 -name '*.log' -size +100k | while read -r log; do
        { head -c 50000 "$log" && printf '\n[the middle is left out]\n' && tail -c 50000 "$log"; } >"$log.cut"
        mv "$log.cut" "$log"
    done
    (cd "$out" && find . -maxdepth 3 \( -name '*.log' -o -name '*.csv' -o -name '*.jsonl' -o -name results.md \
        -o -name summary.txt -o -name algorithms.txt \) -print0 |
        tar --null -T - -caf new.$archive && mv new.$archive $archive)
}

# A status from 124 on says that a program or its libraries are not there, or that it hangs.
starts() { for program; do timeout 20 "$program" --help &>/dev/null </dev/null || [ $? -lt 124 ] || return; done; }
# need PROGRAM...: builds them, ops.cu first, because it takes longest. Programs without objects came from another
# machine, and stay if they start.
need() {
    if [ ! -e "$bin/libllmc.a" ] && starts "$@"; then say "ok   $# programs from another machine start" && return; fi
    run "make-$stage" make -k CUDA=1 -j"$(nproc)" found "$bin/llmc/cuda/ops.o" "${@#./}"
    say "$(grep ' | cuDNN ' "$out/make-$stage.log")"
    grep -q ' | cuDNN [0-9]' "$out/make-$stage.log" || fail "$stage: without cuDNN"
}
build() { need "${programs[@]}" "${tests[@]}"; }
rebuild() { need "${programs[@]}"; }

# Waits until fewer than eight programs run.
room() { while [ "$(jobs -rp | wc -l)" -ge 8 ]; do wait -n; done; }

test() {
    for program in "${tests[@]}"; do
        room
        run "$(basename "$program")" "$program" &
    done
    wait
}

# ops MODEL B OPTIONS...: bench_ops once for each list of options, which begins with the precision.
ops() {
    local model=$1 B=$2 options
    shift 2
    for options in "$@"; do
        run "bench-$model-B$B-${options// --/-}" "$bin/bench_ops" --model "$model" -b "$B" -t $T --json "$results" \
            --precision $options
    done
}
bench() { ops d12 $B bf16; }
options() { ops d12 $B "bf16 --op=step --"{deterministic=off,autotune=off,attention=mma}; }
# 100000 MiB is more than all of dS.
parts() { for size in 50 128 256 100000; do ops d12 $B "bf16 --op=attention_backward --ds-part-mib=$size"; done; }
d48() { ops $large $large_B "bf16 --op=step" || ops $large $((large_B / 2)) "bf16 --op=step"; }  # 80 GB may not do
sweep() {
    for size in 16 32 48 96 128; do ops d12 $size "bf16 --op=step"; done
    ops d12 64 "bf16 --attention=mma" "fp8 --op=step"
    ops d12 16 fp32
    ops d48 16 bf16 "fp8 --op=step"
    for size in 4 8; do ops d48 $size "bf16 --op=step"; done
}

# Makes the training runs' data: tokenizes the text with a tokenizer trained on it.
tokens() {
    if compgen -G "$out/data/train_*.bin" >/dev/null; then return; fi
    run tokenize ./train_gpt2 tokenize --output "$out/data" --train-bpe $vocabulary \
        ${TEXT:-$(find README.md data dev llmc scripts -type f -regex '.*\.\(md\|cpp\|h\|cuh?\|py\|sh\)')}
}
data=(--train-data "$out/data/train_*.bin" --val-data "$out/data/val_*.bin")

# Nsight Compute on the matmuls and the attention of a layer of d12. Those with the longest time above the ledger's
# prediction on an H200 (RESULTS.md, ms a step): both matmuls of "fcproj backward", 13.3 for 11.2, and the kernels of
# attention_backward, 14.0 for 12.6. The first run stores the timed choices, so that the second has no candidates.
profile() {
    if ! command -v ncu >/dev/null; then say "no ncu here" && return; fi
    tokens
    local step=(./train_gpt2cu "${data[@]}" "${layer[@]}" --steps 1 --cuda-graph off --output '')
    run profile-choices "${step[@]}"
    # Without permission for counters ncu fails. That is no failure of the pass; $0 is the log.
    run profile bash -c 'ncu "$@" || grep -m 1 -E "ERR_NVGPUCTRPERM|initialize the profiler" "$0"' \
        "$out/profile.log" --clock-control none --kernel-name-base demangled --launch-count 24 \
        --kernel-name 'regex:nvjet|gemm|cutlass|cudnn|sdpa' --section SpeedOfLight --section Occupancy \
        --section LaunchStats --section WarpStateStats --section MemoryWorkloadAnalysis "${step[@]}"
}

# has_sanitizer TOOL: whether compute-sanitizer is here; `under` becomes its command for a tool.
has_sanitizer() {
    if ! command -v compute-sanitizer >/dev/null; then say "no compute-sanitizer here" && return 1; fi
    # --report-api-errors no: a test asks for a petabyte on purpose, and libraries try calls that may fail.
    under=(env OMP_NUM_THREADS=2 compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no)
    if [ "$1" != memcheck ]; then
        for name in $(awk '!/^#/ { sub(/<.*/, "", $2); print $2 }' dev/cuda_budget.txt | sort -u); do
            under+=(--kernel-name "kns=$name")
        done
    fi
}

# Under compute-sanitizer a program takes ten to a hundred times as long, mostly on the CPU, so eight run at a time.
sanitize() {
    local tool=$1
    has_sanitizer "$tool" || return
    tokens
    run "$tool-train" "${under[@]}" ./train_gpt2cu "${data[@]}" --layers 2 --heads 2 --channels 128 --seq-len 64 \
        --micro-batch 2 --global-batch 256 --steps 3 --val-every 2 --val-tokens 256 --sample-every 0 --warmup 1 \
        --autotune off --output '' &
    need "${tests[@]}"
    for program in "${tests[@]}"; do
        room
        run "$tool-$(basename "$program")" "${under[@]}" "$program" &
    done
    wait
}
memcheck() { sanitize memcheck; }
racecheck() { sanitize racecheck; }  # checks shared memory only
initcheck() { sanitize initcheck; }
synccheck() { sanitize synccheck; }

# train_run NAME ARGUMENTS...: trains, and appends the run's losses and speed to results.jsonl.
train_run() {
    local name=$1
    shift
    if [[ " $* " != *" --resume "* ]]; then rm -rf "${out:?}/$name"; fi
    run "$name" ./train_gpt2cu "${data[@]}" --output "$out/$name" "$@"
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

graphs() {
    tokens
    train_run d12-graph "${d12[@]}" --steps $graph_steps
    train_run d12-no-graph "${d12[@]}" --steps $graph_steps --cuda-graph off
    claim "a run without CUDA graphs has the same losses" same_losses d12-graph d12-no-graph $graph_steps
}

wgmma() {
    local tests=("$bin"/test_gpu_{attention_wgmma,attention_routes,matmul_wgmma}) tool program
    need "${tests[@]}"
    for program in "${tests[@]}"; do run "$(basename "$program")" "$program"; done
    for tool in memcheck racecheck; do
        has_sanitizer $tool || return
        for program in "${tests[@]}"; do run "$tool-$(basename "$program")" "${under[@]}" "$program" & done
    done
    wait
}

routes() {
    local passes="--op=attention_forward --op=attention_backward"
    ops d12 $B "bf16 $passes --attention="{cudnn,wgmma,mma,auto}
}

# The power limit decides the speed of a step, so power and clock are logged, and the two take turns.
steps() {
    tokens
    local route name log power
    for name in wgmma cudnn wgmma-again cudnn-again; do
        route=${name%-again} log=$out/power-$name.csv
        nvidia-smi --query-gpu=timestamp,power.draw.instant,clocks.sm,clocks_event_reasons.active --format=csv \
            --loop-ms=50 >"$log" 2>&1 &
        power=$!
        train_run "d12-$name" "${hopper[@]}" --steps "$hopper_steps" --attention "$route"
        kill $power 2>/dev/null
        wait $power
        say "$(awk -F', *' '$2 + 0 > 300 { watts += $2; clock += $3; n++ }
            END { print n + 0, "busy samples, means", watts / (n + !n), "W,", clock / (n + !n), "MHz" }' "$log")"
    done
    claim "two runs by wgmma have the same losses" same_losses d12-wgmma d12-wgmma-again $hopper_steps
    claim "by wgmma and by cuDNN the losses agree within 1 %" near_losses d12-wgmma d12-cudnn $hopper_steps 0.01
}

# The first run times both routes. Their times are in its choice, which another file of choices changes to cuBLASLt.
matmuls() {
    tokens
    local kept=$XDG_CACHE_HOME/train_gpt2/algorithms.txt changed=$out/matmuls/train_gpt2/algorithms.txt
    train_run d12-matmuls "${hopper[@]}" --steps $few
    run matmuls-choice grep '^wgmma ' "$kept"
    mkdir -p "${changed%/*}"
    sed '/^wgmma /s/: wgmma /: cuBLASLt /' "$kept" >"$changed"
    XDG_CACHE_HOME=$out/matmuls train_run d12-library-matmuls "${hopper[@]}" --steps $few
    train_run d12-matmuls-again "${hopper[@]}" --steps $few
    claim "two runs with the chosen matmuls have the same losses" same_losses d12-matmuls d12-matmuls-again $few
    claim "with cuBLASLt's in place of ours the losses agree within 1 %" \
        near_losses d12-matmuls d12-library-matmuls $few 0.01
}

# On two GPUs: ranks by NCCL have the same losses, bit for bit, as one rank, with every --zero. With layers split
# between the GPUs the sums have another order. Also the speed.
two_gpus() {
    local short=("${small[@]}" --steps "$steps" --stop-after "$few") one=one-of-two-gpus zero split
    if [ "$(nvidia-smi -L | wc -l)" -lt 2 ]; then say "one GPU: no ranks by NCCL" && return; fi
    tokens
    train_run $one "${short[@]}" --deterministic-ranks 2
    train_run $one-sharded "${short[@]}" --deterministic-ranks 2 --zero 2  # sums in another order than --zero 0 and 1
    for zero in 0 1 2 3; do
        train_run two-gpus-zero-$zero "${short[@]}" --deterministic-ranks 2 --zero $zero --ranks 2
        claim "two GPUs with --zero $zero have the same losses as one" \
            same_losses $one"$([ $zero -lt 2 ] || echo -sharded)" two-gpus-zero-$zero "$few"
    done
    train_run d12-two-gpus "${d12[@]}" --ranks 2 --steps "$few"
    for split in "" --sequence-parallel; do
        train_run two-gpus-tensor$split "${short[@]}" --ranks 2 --tensor-parallel 2 $split
        claim "two GPUs with --tensor-parallel 2 $split have one GPU's losses within 1 %" \
            near_losses $one two-gpus-tensor$split "$few" 0.01
        train_run d12-two-gpus-tensor$split "${d12[@]}" --ranks 2 --steps "$few" --tensor-parallel 2 $split
    done
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
    train_run small-recompute "${short[@]}" --recompute layer
    claim "a run with --recompute layer has the same losses" same_losses small small-recompute $few
    train_run small-hand-written "${short[@]}" --attention mma
    claim "with our attention instead of cuDNN's the losses agree within 1 %" \
        near_losses small small-hand-written $few 0.01
    train_run small-fp8 "${short[@]}" --precision fp8
    claim "with --precision fp8 the losses agree within 1 %" near_losses small small-fp8 $few 0.01
    train_run small-fp32 "${short[@]}" --precision fp32
    for precision in fp32 bf16; do
        rm -rf "$out/cpu-$precision"
        run "cpu-$precision" ./train_gpt2 "${data[@]}" --output "$out/cpu-$precision" "${short[@]}" \
            --precision $precision --val-every 0
    done
    claim "the losses of GPU and CPU in fp32 agree within 0.01 %" near_losses small-fp32 cpu-fp32 $few 0.0001
    claim "the losses of GPU and CPU in bf16 agree within 1 %" near_losses small cpu-bf16 $few 0.01
    train_run d12 "${d12[@]}" --val-tokens 524288 --micro-batch auto --global-batch $batch --steps $d12_steps \
        --val-every $(((d12_steps + 2) / 3)) --lr 6e-4 --warmup $((d12_steps / 6)) --checkpoint-every $d12_steps
    for precision in fp8 bf16; do
        train_run d48-$precision "${d48[@]}" --precision $precision --micro-batch auto --global-batch $batch \
            --steps $d48_steps
    done
}

has_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }

# 124M from the same weights: with two seeds, and in PyTorch with the tokens of the first.
curve() {
    if ! has_torch; then say "no PyTorch with CUDA here" && return; fi
    tokens
    train_run curve-weights "${d12[@]}" --steps 1 --warmup 0 --lr 0 --checkpoint-every 1
    local options=(--init "$out/curve-weights" "${quiet[@]}" --micro-batch "$B" --global-batch "$batch" --val-every 0
        --steps "$curve_steps" --warmup $((curve_steps / 10)) --lr 6e-4)
    train_run curve "${options[@]}"
    train_run curve-other-seed "${options[@]}" --seed 43
    run curve-torch python3 dev/bench/torch_curve.py "$out/curve" --noise "$out/curve-other-seed" --compile
}

# torch_runs MODEL:B...: PyTorch with these micro-batches.
torch_runs() {
    if ! has_torch; then say "no PyTorch with CUDA here" && return; fi
    for each in "$@"; do
        run "torch-$each" python3 dev/bench/torch_baseline.py --device cuda --model "${each%:*}" --B "${each#*:}" \
            --T 1024 --precision bf16 --compile --steps 20 --json "$results"
    done
}

# llmc_runs MODEL:B...: llm.c with these micro-batches, on the same shards, whose format is its own.
llmc_runs() {
    if [ -z "${LLMC:-}" ]; then say "llm.c not run: LLMC is not set" && return; fi
    tokens
    for each in "$@"; do
        run "llmc-$each" "$LLMC/train_gpt2cu" -i "$out/data/train_*.bin" -j "$out/data/train_*.bin" \
            -e "${each%:*}" -b "${each#*:}" -t 1024 -d $((${each#*:} * 1024)) -x 30 -v 1000 -m 1 -s 0 -h 0 -r 0 &&
            python3 dev/bench/results.py --llmc "$each" "$out/llmc-$each.log" >>"$results"
    done
}

torch() { ops d12 $B "bf16 --op=step"; torch_runs d12:64; }
llmc() { ops d12 $B "bf16 --op=step"; llmc_runs d12:64; }
models() {
    for each in d24:32 d36:16 d48:16; do
        ops "${each%:*}" "${each#*:}" "bf16 --op=step"{,\ --autotune=off,\ --deterministic=off,\ --attention=mma}
    done
    torch_runs d24:32 d36:16 d48:8
    llmc_runs d24:32 d36:16 d48:8
}

say "$(nvidia-smi --query-gpu=name,driver_version,memory.total,persistence_mode --format=csv,noheader 2>&1 | head -n 1)"
deadline=$SECONDS
while read -r group stage seconds <&3; do
    if [[ " $* " != *" $group "* && " $* " != *" $stage "* ]]; then continue; fi
    deadline=$((deadline + ${STAGE_SECONDS:-$seconds}))
    say "== $stage ($SECONDS s, until $deadline s)"
    [[ $stage == *build ]] || starts "${programs[@]}" || need "${programs[@]}"
    "$stage"
    write_results
done 3<<<"$table"
while read -r failure; do say "failed: $failure"; done <"$failures"
write_results
[ ! -s "$failures" ]
