#!/usr/bin/env bash
# test.sh [WORD...]: builds and runs every test. With words it runs only the programs whose names contain one of them.
#
# 1. Release build: unit tests (build/release/test_*), the fuzzers on their committed inputs (build/release/replay_*),
#    the CUDA backend in the emulator and, if there is one, on the GPU (dev/test/gpu/*.cu and test_gpt2cu), the whole
#    model against its reference (test_gpt2), the recorded bits of short runs (dev/test/golden.sh), and the shell tests
#    (dev/test/*/test_*.sh).
# 2. The quick unit tests, the fuzzers on their committed inputs and the CUDA backend under AddressSanitizer and
#    UndefinedBehaviorSanitizer, the emulator under ThreadSanitizer (by clang if there is one), and under clang's
#    MemorySanitizer. These builds run in the background at the lowest priority, during the tests of the release build.
# 3. With FUZZ_SECONDS=20 each fuzzer for 20 seconds (needs clang).
#
# The last line is "N passed, N failed, N skipped", in test cases. A crash or a hang counts as one failure. A check that
# cannot run here is skipped: its program prints a line "SKIP  <what>: <reason>", and the result lists all of these.
# Only failures decide the exit code.
#
# LAUNCHERS=1 installs Slurm and PyTorch (slurm-wlm, munge, python3-torch; some 300 MB) for test_slurm.sh,
# test_torchrun.sh, test_elastic.sh and a part of test_ranks.sh, which start ranks by srun and torchrun. Without these
# packages they are skipped.
#
# FAULTS=1 runs the tests of faults that take longer (dev/test/faults/test_*.sh); FAULT_COUNT=20 makes
# test_random_faults.sh shorter.
#
# ARM=1 installs a cross compiler and qemu-user (g++-aarch64-linux-gnu, qemu-user; some 300 MB), builds the CPU program
# for arm64, and runs its unit tests, test_gpt2 and test_resume.sh there.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

export OMP_WAIT_POLICY=passive  # idle threads do not spin: tests have many small parallel regions, and share cores
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:allocator_may_return_null=1}
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
logs=build/test_logs
mapfile -t replays < <(for source in dev/fuzz/fuzz_*.cpp; do basename "${source/fuzz_/replay_}" .cpp; done)
kernels=()
if [ "$(uname -m)" = x86_64 ]; then  # the emulator switches stacks in x86-64's assembly
    mapfile -t kernels < <(for source in dev/test/gpu/test_*.cu; do basename "$source" .cu; done)
fi
emulated=("${kernels[@]/#/emulator/}")
if [ ${#kernels[@]} != 0 ]; then emulated+=(emulator/test_gpt2cu); fi
on_gpu=() no_gpu=""
if ! nvidia-smi -L >/dev/null 2>&1; then
    no_gpu="no GPU (nvidia-smi lists none)"
elif ! make found | grep -q '| CUDA [0-9]'; then
    no_gpu="no nvcc (NVCC=... or CUDA_HOME=... names it)"
else
    for name in "${kernels[@]}"; do if [[ $name != test_simt* ]]; then on_gpu+=("cuda/$name"); fi; done
    on_gpu+=(cuda/test_gpt2cu)
fi
words=("$@")
passed=0 failed=0 failures=() skips=()

heading() { printf '\n== %s (%d s)\n' "$*" $SECONDS; }

wanted() {
    if [ ${#words[@]} = 0 ]; then return 0; fi
    for word in "${words[@]}"; do if [[ $1 == *"$word"* ]]; then return 0; fi; done
    return 1
}

# skip NAME REASON: a program that cannot run here.
skip() {
    if ! wanted "$1"; then return; fi
    printf 'SKIP  %s: %s\n' "$1" "$2"
    skips+=("$1: $2")
}

# count LOG STATUS: sets cases_passed, cases_failed and cases_skipped from the output of a program.
count() {
    local log=$1 status=$2 line
    cases_passed=0 cases_failed=0 cases_skipped=$(grep -acE '^SKIP  ' "$log")
    if line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$log" | tail -1) && [ -n "$line" ]; then
        cases_passed=${line%% *} cases_failed=${line#*, }
        cases_failed=${cases_failed%% *}
    elif grep -aqE '^(PASS|FAIL|SKIP)  ' "$log"; then
        cases_passed=$(grep -acE '^PASS  ' "$log")
        cases_failed=$(grep -acE '^FAIL  ' "$log")
    elif [ "$status" = 0 ]; then
        cases_passed=1
    fi
    # A program that reports no failure, but has another exit status than 0, counts as one failure.
    if [ "$status" != 0 ] && [ "$cases_failed" = 0 ]; then cases_failed=1; fi
}

log_of() { echo "$logs/${1//\//_}.log"; }

# execute NAME SECONDS COMMAND...: runs the command. Writes its log, and next to it its exit status and seconds.
execute() {
    local log status=0 limit=$2 start=$EPOCHREALTIME
    log=$(log_of "$1")
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null || status=$?
    awk -v a="$start" -v b="$EPOCHREALTIME" -v status=$status 'BEGIN { printf "%d %.1f\n", status, b - a }' >"$log.end"
}

# report NAME: prints the line of an executed program.
report() {
    local name=$1 log status seconds result=ok note="" line
    log=$(log_of "$name")
    read -r status seconds <"$log.end"
    rm "$log.end"
    count "$log" "$status"
    if [ "$cases_failed" != 0 ]; then
        result=FAIL
    elif [ "$cases_passed" = 0 ]; then
        result=SKIP
    fi
    case $status in
        0 | 1) ;;
        124) note="  hang: ended at its limit" ;;
        127) note="  not built" ;;
        *) note="  exit status $status" ;;
    esac
    printf '%-4s  %-36s %5d passed %3d failed %3d skipped %7.1f s%s\n' $result "$name" "$cases_passed" "$cases_failed" \
        "$cases_skipped" "$seconds" "$note"
    passed=$((passed + cases_passed)) failed=$((failed + cases_failed))
    while IFS= read -r line; do skips+=("$name: ${line#SKIP  }"); done < <(grep -aE '^SKIP  ' "$log")
    if [ $result = FAIL ]; then
        failures+=("$name ($log)")
        { head -n -40 "$log" | grep -a '^FAIL  ' && echo ...; tail -n 40 "$log"; } | sed 's/^/      /'
    fi
}

# run NAME SECONDS COMMAND...: runs one test program alone.
run() {
    if ! wanted "$1"; then return; fi
    execute "$@"
    report "$1"
}

# in_parallel NAME SECONDS COMMAND...: runs a test program at the same time as others; `report_all` waits for all and
# reports them. Many programs mostly wait, so one more runs at a time than there are cores.
parallel_names=() parallel_processes=()
in_parallel() {
    if ! wanted "$1"; then return; fi
    while [ "$(count_running)" -gt "$(nproc)" ]; do sleep 0.05; done
    execute "$@" &
    parallel_names+=("$1") parallel_processes+=($!)
    report_ended
}

count_running() {
    local process count=0
    for process in ${parallel_processes[@]+"${parallel_processes[@]}"}; do
        kill -0 "$process" 2>/dev/null && count=$((count + 1))
    done
    echo $count
}

# report_ended [all]: reports the programs of `in_parallel` in their order, up to the first that still runs; with
# "all" waits for it.
report_ended() {
    while [ ${#parallel_names[@]} != 0 ]; do
        if [ "${1:-}" != all ] && kill -0 "${parallel_processes[0]}" 2>/dev/null; then return; fi
        wait "${parallel_processes[0]}" 2>/dev/null
        report "${parallel_names[0]}"
        parallel_names=("${parallel_names[@]:1}") parallel_processes=("${parallel_processes[@]:1}")
    done
}
report_all() { report_ended all; }

# with_units NAME PROGRAM: `in_parallel` for a program with emulated matrix instructions. These are slow, so cases of
# large matmuls and long sequences run only on machines that have the instructions.
with_units() {
    local small=(--test-suite-exclude=large)
    if [[ $1 == *test_gpt2 ]]; then small=(); fi
    in_parallel "$1" 300 "$2" ${small[@]+"${small[@]}"}
}

# build TITLE MAKE-ARGUMENTS...: a build that fails counts as one failed test. Programs that were built are still run.
build() {
    local title=$1
    shift
    heading "build: $title"
    if ! make -j"$(nproc)" --keep-going "$@"; then
        failed=$((failed + 1))
        failures+=("build: $title")
    fi
}

# build_in_background TITLE MAKE-ARGUMENTS...: builds at the lowest priority, with output to a log. `built
# TITLE` waits for it.
build_in_background() {
    local log status=0
    log=$(log_of "build_$1")
    shift
    rm -f "$log.end"
    nice -n 19 make -j"$(nproc)" --keep-going "$@" >"$log" 2>&1 </dev/null &
    wait $! || status=$?
    echo $status >"$log.end"
}
built() {
    local log status=1
    log=$(log_of "build_$1")
    heading "build: $1"
    while ! [ -e "$log.end" ] && kill -0 "$builder" 2>/dev/null; do sleep 0.2; done
    cat "$log"
    read -r status <"$log.end"
    if [ "$status" != 0 ]; then
        failed=$((failed + 1))
        failures+=("build: $1")
    fi
}

heading "packages"
: "${FUZZ_SECONDS:=0}" "${LAUNCHERS:=0}" "${FAULTS:=0}" "${ARM:=0}"
more=()
if [ "$FUZZ_SECONDS" != 0 ]; then more+=(clang); fi
if [ "$LAUNCHERS" != 0 ]; then more+=(slurm-wlm munge python3-torch); fi
if [ "$ARM" != 0 ]; then more+=(g++-aarch64-linux-gnu qemu-user); fi
./scripts/install.sh "${more[@]}" || exit 1
mkdir -p $logs

# These are too slow under the sanitizers. Other tests run the same sources.
slow='^test_(checkpoint_faults|matmul|tokenize_refused)$'
sanitized=()
mapfile -t quick < <(for source in dev/test/unit/test_*.cpp; do basename "$source" .cpp; done | grep -vE "$slow")
for name in "${quick[@]}" "${replays[@]}" "${emulated[@]}"; do
    if wanted "sanitized/$name"; then sanitized+=("$name"); fi
done
# Tests with the CPU's matrix instructions in plain C++ (dev/test/support/emulated_units.h), which run the sources for
# AMX and AVX512-BF16 on any machine with AVX-512.
units=()
if grep -qs avx512bw /proc/cpuinfo; then units=(test_gpt2 test_matmul test_matrix_attention); fi
for name in ${units[@]+"${units[@]}"}; do if wanted "sanitized/units/$name"; then sanitized+=("units/$name"); fi; done
# ThreadSanitizer is many times faster with fibers in clang. With g++ only the emulator's own tests run,
# which take a minute.
compiler=${CXX:-g++} raced=() unwritten=()
if command -v clang++ >/dev/null; then compiler=clang++; fi
for name in "${kernels[@]}"; do
    if ! wanted "thread/random/$name"; then continue; fi
    if [ "$compiler" = clang++ ] || [[ $name == test_simt* ]]; then raced+=("$name"); fi
done
# MemorySanitizer finds reads of memory that was never written. It runs the emulator's own tests and the tests of three
# kernels that use scratch or shared memory.
if [ ${#kernels[@]} != 0 ] && command -v clang++ >/dev/null; then
    for name in test_simt test_simt_bugs test_gpu_attention test_gpu_layernorm test_gpu_embedding; do
        if wanted "memory/$name"; then unwritten+=("$name"); fi
    done
fi
in_asan=build/address+undefined in_msan=build/memory-clang++
in_tsan=build/thread$(case $compiler in g++ | c++) ;; *) echo "-$(basename "$compiler")" ;; esac)

programs=("${emulated[@]}" "${on_gpu[@]}")
if [ ${#kernels[@]} != 0 ]; then
    programs+=(emulator/train_gpt2cu emulator/nonccl/train_gpt2cu emulator/alone/train_gpt2cu emulator/group_ranks)
fi
build "release" all tests "${programs[@]/#/build/release/}"
(
    trap 'kill $(jobs -p); exit' TERM
    if [ ${#sanitized[@]} != 0 ]; then
        build_in_background "address,undefined" SANITIZE=address,undefined "${sanitized[@]/#/$in_asan/}"
    fi
    if [ ${#raced[@]} != 0 ]; then
        build_in_background "thread" SANITIZE=thread CXX="$compiler" "${raced[@]/#/$in_tsan/emulator/}"
    fi
    if [ ${#unwritten[@]} != 0 ]; then
        build_in_background "memory" SANITIZE=memory CXX=clang++ "${unwritten[@]/#/$in_msan/emulator/}"
    fi
) &
builder=$!
trap 'kill $builder 2>/dev/null' EXIT

heading "unit tests"
for source in dev/test/unit/test_*.cpp; do
    name=$(basename "$source" .cpp)
    run "$name" 600 "build/release/$name"
done
heading "committed inputs of the fuzzers"
for name in "${replays[@]}"; do in_parallel "$name" 300 "build/release/$name"; done
report_all
heading "the CUDA backend"
if [ ${#kernels[@]} = 0 ]; then skip "emulator" "it switches stacks as x86-64 does, and this machine is $(uname -m)"; fi
for name in "${emulated[@]}"; do in_parallel "$name" 300 "build/release/$name"; done
for name in "${emulated[@]}"; do
    if [[ $name != */test_gpu_* ]]; then continue; fi
    in_parallel "reverse/${name#*/}" 300 env SIMT_ORDER=reverse "build/release/$name"
done
report_all
if [ ${#on_gpu[@]} = 0 ]; then skip "cuda" "$no_gpu"; fi
for name in "${on_gpu[@]}"; do run "$name" 600 "build/release/$name"; done
run check_cuda 900 ./dev/check_cuda.sh 80 90a  # without arguments it takes all architectures

# test_gpt2 runs once for each value of CPU_ISA. The error for an unknown value lists all. Unit tests of operations go
# through the values themselves.
heading "the whole model"
instruction_sets=$(CPU_ISA=unknown ./test_gpt2 2>&1 |
    sed -n '/^error: CPU_ISA=unknown is not known: /{s///; s/,/ /g; s/ or / /; p}')
if [ -z "$instruction_sets" ]; then
    failed=$((failed + 1))
    failures+=("test_gpt2: no list of the values of CPU_ISA")
fi
for isa in $instruction_sets; do
    if refusal=$(CPU_ISA=$isa ./train_gpt2 plan --layers 1 --heads 1 --channels 16 2>&1 >/dev/null); then
        run "test_gpt2/$isa" 300 env CPU_ISA="$isa" ./test_gpt2
    else
        skip "test_gpt2/$isa" "${refusal#error: }"
        skip "unit tests/$isa" "${refusal#error: }"
    fi
done
heading "matrix instructions in plain C++"
if [ ${#units[@]} = 0 ]; then skip "units" "this machine has no AVX-512"; fi
for name in ${units[@]+"${units[@]}"}; do with_units "units/$name" "build/release/units/$name"; done
report_all
run golden.sh 600 bash dev/test/golden.sh
heading "the command line"
# These measure how long a run takes to end, or what it does at the same time as something else.
alone='/test_(hosts|lost_host|trace|watchdog).sh$'
for script in dev/test/{cli,ranks,gpu}/test_*.sh; do
    if ! [[ $script =~ $alone ]]; then in_parallel "$(basename "$script")" 900 bash "$script"; fi
done
report_all
for script in dev/test/{cli,ranks,gpu}/test_*.sh; do
    if [[ $script =~ $alone ]]; then run "$(basename "$script")" 900 bash "$script"; fi
done

if [ "$FAULTS" != 0 ]; then
    heading "faults"
    for script in dev/test/faults/test_*.sh; do run "$(basename "$script")" 7200 bash "$script"; done
fi

if [ ${#sanitized[@]} != 0 ]; then
    built "address,undefined"
    heading "unit tests under address,undefined"
    for name in "${sanitized[@]}"; do
        case $name in
            units/*) with_units "sanitized/$name" "$in_asan/$name" ;;
            *) in_parallel "sanitized/$name" 300 "$in_asan/$name" ;;
        esac
    done
    report_all
fi

heading "the CUDA backend under thread"
if [ ${#kernels[@]} != 0 ] && [ "$compiler" != clang++ ]; then
    skip "thread/test_gpu_*" "no clang++, and by g++ they take many minutes"
fi
if [ ${#raced[@]} != 0 ]; then
    built "thread"
    # One OpenMP thread: clang's OpenMP runtime is not instrumented, and would be reported.
    for name in "${raced[@]}"; do in_parallel "thread/$name" 240 env OMP_NUM_THREADS=1 "$in_tsan/emulator/$name"; done
    for name in "${raced[@]}"; do
        if [[ $name == test_simt* ]]; then continue; fi  # these set the order themselves
        in_parallel "thread/random/$name" 240 env OMP_NUM_THREADS=1 SIMT_ORDER=random "$in_tsan/emulator/$name"
    done
    report_all
fi

heading "the CUDA backend under memory"
if [ ${#kernels[@]} != 0 ] && ! command -v clang++ >/dev/null; then skip "memory" "no clang++"; fi
if [ ${#unwritten[@]} != 0 ]; then
    built "memory"
    for name in "${unwritten[@]}"; do in_parallel "memory/$name" 240 "$in_msan/emulator/$name"; done
    report_all
fi

# The CPU program for arm64. qemu-user is 10 to 50 times slower than the machine, hence the limits.
if [ "$ARM" != 0 ]; then
    compiler=aarch64-linux-gnu-g++
    folder=build/release-nompi-$compiler
    qemu=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
    build "arm64" CXX=$compiler tests
    heading "arm64, in qemu-aarch64"
    for source in dev/test/unit/test_*.cpp; do
        name=$(basename "$source" .cpp)
        run "arm64/$name" 2400 env RUN_BY="${qemu[*]}" "${qemu[@]}" "$folder/$name"
    done
    run arm64/test_gpt2 2400 "${qemu[@]}" "$folder/test_gpt2"
    printf '#!/bin/sh\nexec %s "%s" "$@"\n' "${qemu[*]}" "$PWD/$folder/train_gpt2" >"$folder/train"
    chmod +x "$folder/train"
    run arm64/test_resume.sh 2400 env PROGRAM="$PWD/$folder/train" SLOWER=20 bash dev/test/cli/test_resume.sh
fi

if [ "$FUZZ_SECONDS" != 0 ]; then
    build "fuzzers" fuzz
    heading "fuzzers, $FUZZ_SECONDS s each"
    for source in dev/fuzz/fuzz_*.cpp; do
        name=$(basename "$source" .cpp)
        mkdir -p "build/fuzz/corpus_$name"  # inputs that it finds are where the next run begins
        run "fuzz/$name" $((FUZZ_SECONDS + 60)) "build/fuzz/$name" "build/fuzz/corpus_$name" \
            "dev/fuzz/corpus/${name#fuzz_}" -max_len=4096 -max_total_time="$FUZZ_SECONDS" -timeout=10 \
            -rss_limit_mb=1024 -malloc_limit_mb=256 -artifact_prefix=$logs/
    done
else
    skip "fuzz" "FUZZ_SECONDS is 0"
fi

heading "result"
for line in ${skips[@]+"${skips[@]}"}; do echo "skipped: $line"; done
for failure in ${failures[@]+"${failures[@]}"}; do echo "failed: $failure"; done
if [ $((passed + failed + ${#skips[@]})) = 0 ]; then
    echo "no test is called ${words[*]}"
    failed=1
fi
echo "$passed passed, $failed failed, ${#skips[@]} skipped"
[ $failed = 0 ]
