#!/usr/bin/env bash
# golden.sh: compares the bits of training with golden.txt, which has hashes of 22 short runs: 16 on the CPU and 6 in
# the emulator of GPUs. Each run has a hash of its results (step, loss, grad_norm, lr, val_loss, samples), one of the
# bytes that ranks send (comm_bytes), one of the weights, and one of AdamW's moments.
#
#     golden.sh [PROGRAM]                  compares PROGRAM [build/release/train_gpt2] with golden.txt
#     golden.sh --record [PROGRAM]         writes golden.txt
#     golden.sh --against OLD [PROGRAM]    compares with another program, such as one built from an older commit
#
# The program for the emulator is emulator/train_gpt2cu beside PROGRAM. The hashes hold on every x86-64 machine with
# AVX2, for the compiler and the C library that golden.txt names. Elsewhere --against compares two programs of one
# machine, on its own instruction set or that of CPU_ISA. WORDS="fp8 cpu_2" limits the runs to those whose names
# contain one of the words.
WORDS=${WORDS:-} mode=compare old=""
case ${1:-} in
    --record) mode=record && shift ;;
    --against) mode=against && old=$(realpath -e "${2:?a program}") && shift 2 ;;
esac
given=${1:+$(realpath -e "$1")}
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
program=${given:-$PWD/build/release/train_gpt2}
golden=dev/test/golden.txt failures=0 limit=240  # seconds after which a run hangs
scratch=$(mktemp -d)
trap 'if [ "$BASHPID" = $$ ]; then rm -rf "$scratch"; fi' EXIT  # not in a copy of this shell
export XDG_CACHE_HOME=$scratch/cache OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

pass() { echo "PASS  $1"; }
fail() { echo "FAIL  $1" && failures=$((failures + 1)); }
skip() { echo "SKIP  $1: $2"; }

# Random words of a small language, the same each time.
make_text() {
    awk 'BEGIN {
        srand(1)
        split("the a king queen old young saw heard of and to in house river went came", w, " ")
        for (i = 0; i < 30000; i++) printf "%s%s", w[int(rand() * 16) + 1], i % 12 == 11 ? ".\n" : " "
    }'
}
# More ranks than cores, also as root. The variables OMPI_* are for Open MPI 4, PRTE_* for Open MPI 5.
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none \
    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
# mpirun of Open MPI 4 can hang when it ends, beyond its own limit of time.
ranks() { timeout --foreground --kill-after 5 $((limit + 60)) mpirun --timeout $limit -np "$@"; }

# Ranks in the emulator meet at this port and those above it, which lie below Linux's choice of free ports. The search
# begins at a place that depends on the process ID, because a test in a chroot sees another /tmp but the same ports.
take_ports() {
    local i file lock
    for ((i = 0; i < 31; i++)); do
        port=$((20000 + ($$ + i) % 31 * 400))
        file=/tmp/train_gpt2_ports_$port
        if ! [ -e "$file" ]; then (umask 022 && : >>"$file"); fi
        exec {lock}<"$file"
        if flock --nonblock "$lock"; then return; fi
        exec {lock}<&-
    done
    fail "no free ports: other tests have locked all of /tmp/train_gpt2_ports_*" && exit 1
}

# NAME RANKS OPTIONS. The run cpu_resumed is five steps on one rank, then five on four ranks with another stage of ZeRO.
all_runs='cpu_1_fp32                1 --precision fp32
cpu_1_bf16                      1 --precision bf16 --recompute layer --schedule wsd --grad-clip 0.5
cpu_1_fp8                       1 --precision fp8
cpu_1_fp8_recompute             1 --precision fp8 --layers 4 --recompute layer
cpu_1_no_master_weights         1 --precision bf16 --master-weights off --logit-chunks 4
cpu_1_virtual_ranks             1 --precision bf16 --zero 2 --deterministic-ranks 4
cpu_2_fp32                      2 --precision fp32 --logit-chunks 2
cpu_2_bf16_gradients            2 --precision bf16 --zero 1 --grad-dtype bf16 --recompute gelu
cpu_2_zero2                     2 --precision bf16 --zero 2 --layers 4 --recompute layer
cpu_2_zero3                     2 --precision bf16 --zero 3 --layers 5 --recompute layer
cpu_2_tensor_parallel           2 --precision bf16 --tensor-parallel 2 --sequence-parallel
cpu_2_fp8_zero1                 2 --precision fp8 --zero 1 --recompute gelu
cpu_3_zero2                     3 --precision fp32 --zero 2 --global-batch 192
cpu_4_virtual_ranks             4 --precision bf16 --zero 3 --layers 5 --recompute gelu --deterministic-ranks 4
cpu_4_tensor_parallel           4 --precision bf16 --zero 3 --layers 3 --recompute layer --tensor-parallel 2
cpu_resumed                     4 --precision bf16 --deterministic-ranks 4
emulator_1_fp32                 1 --precision fp32 --recompute layer
emulator_1_bf16_no_graphs       1 --precision bf16 --cuda-graph off
emulator_1_fp8                  1 --precision fp8
emulator_2_zero1                2 --precision bf16 --zero 1
emulator_2_zero3                2 --precision bf16 --zero 3 --layers 2 --recompute layer
emulator_2_tensor_parallel      2 --precision fp32 --tensor-parallel 2 --sequence-parallel'
runs=$(grep -E "^[a-z0-9_]*(${WORDS// /|})" <<<"$all_runs")

# ---- where the hashes hold

# Prints the compilers of a program and the C library: "GCC 12.2.0, glibc 2.36".
environment() {
    local compilers
    compilers=$(readelf -p .comment "$1" | sed -nE '/^ *\[/{s/^[^]]*\] *//; s/: \([^)]*\)//; p}' | sort -u | paste -sd+)
    echo "$compilers, $(getconf GNU_LIBC_VERSION)"
}

if [ ! -x "$program" ]; then fail "golden: $program is not built" && exit 1; fi
if [ $mode != against ]; then
    if [ "$(uname -m)" != x86_64 ] || ! grep -qsw avx2 /proc/cpuinfo; then
        skip golden "its hashes are of x86-64 with AVX2" && exit 0
    fi
    export CPU_ISA=avx2
fi
if [ $mode = compare ]; then
    made_by=$(sed -n 's/^# made by //p' $golden) here=$(environment "$program")
    if [ "$here" != "$made_by" ]; then
        skip golden "its hashes are of $made_by, not of $here; golden.sh --against compares two programs here" && exit 0
    fi
fi
if ! command -v mpirun >/dev/null || make found | grep -q 'Open MPI off'; then
    skip "golden, runs of several CPU ranks" "no mpirun, or a build without Open MPI"
    runs=$(grep -vE '^cpu_([2-9]|resumed)' <<<"$runs")
fi
if ! [ -x "$(dirname "$program")/emulator/train_gpt2cu" ]; then
    skip "golden, runs in the emulator" "$(dirname "$program")/emulator/train_gpt2cu is not built"
    runs=$(grep -v '^emulator' <<<"$runs")
fi

# ---- the hashes of a run

# values FOLDER KEYS: prints these values of each step, validation and sample. A number with more digits than a float
# has is printed with nine: version 0.2.0 logged some floats with 17 digits.
values() {
    awk -v keys="kind step $2" '
        BEGIN { n = split(keys, key, " ") }
        function rounded(field,    colon, number) {
            colon = index(field, ":")
            number = substr(field, colon + 1)
            if (length(number) < 15 || number !~ /^[-0-9.e]+$/) return field
            return substr(field, 1, colon) sprintf("%.9g", number)
        }
        /"kind":"(step|val|sample)"/ {
            line = ""
            for (i = 1; i <= n; i++) {
                pattern = "\"" key[i] "\":(\"([^\"\\\\]|\\\\.)*\"|[^,}]*)"
                if (match($0, pattern)) line = line " " rounded(substr($0, RSTART, RLENGTH))
            }
            print line
        }' "$1/log.jsonl" | sort
}
# Prints the tensors of a safetensors file, which begins with the number of bytes of its header.
tensors() { tail -c +$((9 + $(od -An -tu8 -N8 "$1"))) "$1"; }
hash() { sha256sum | cut -c 1-12; }

# ---- the runs of a program

# emulated RANKS COMMAND...: starts ranks in the emulator, as torchrun does.
emulated() {
    local ranks=$1 rank status=0 pids=()
    shift
    for ((rank = 0; rank < ranks; rank++)); do
        RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            TORCHELASTIC_RUN_ID=$$ SIMT_DEVICES=$ranks timeout $limit "$@" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=$?; done
    return $status
}

# train NAME PROGRAM FOLDER RANKS OPTIONS...
train() {
    local name=$1 program=$2 folder=$3 count=$4 start=(ranks)
    local base=(--train-data "$folder/data/train_*.bin" --val-data "$folder/data/val_*.bin" --layers 2 --heads 2
                --channels 32 --seq-len 16 --micro-batch 2 --global-batch 256 --lr 1e-2 --warmup 2 --steps 10
                --checkpoint-every 1000 --val-every 4 --val-batches 4 --sample-every 4 --sample-tokens 8 --autotune off
                --quiet)
    if [[ $name == emulator_* ]]; then
        start=(emulated) program=$(dirname "$program")/emulator/train_gpt2cu
        base+=(--layers 1 --micro-batch 1 --global-batch 64 --steps 5 --val-batches 2 --sample-tokens 3)
    fi
    if [ "$count" = 1 ]; then start=(env SIMT_DEVICES=1 timeout) count=$limit; fi
    "${start[@]}" "$count" "$program" "${base[@]}" --output "$folder/$name" "${@:5}" </dev/null
}

# run_and_hash NAME PROGRAM FOLDER RANKS OPTIONS...: writes the line of a run to FOLDER/NAME.line.
run_and_hash() {
    local name=$1 out=$3/$1 status=0 saved
    if [ "$name" = cpu_resumed ]; then
        train "${@:1:3}" 1 "${@:5}" --zero 2 --stop-after 5 && train "$@" --zero 3 --resume
    else
        train "$@"
    fi >"$out.log" 2>&1 || status=$?
    if [ $status = 0 ]; then
        saved=$out/$(cat "$out/latest")
        printf '%-27s %s  %s  %s  %s\n' "$name" "$(values "$out" "loss grad_norm lr val_loss text" | hash)" \
            "$(values "$out" comm_bytes | hash)" "$(tensors "$saved/model.safetensors" | hash)" \
            "$(tensors "$saved/optimizer.safetensors" | hash)"
    else
        echo "$name failed with exit code $status: $(grep -m1 '^error: ' "$out.log" || tail -n 3 "$out.log" | xargs)"
    fi >"$out.line"
}

# run_all PROGRAM FOLDER: writes the lines of all runs to FOLDER/lines. The program tokenizes the text itself.
run_all() {
    local name options
    mkdir "$2"
    "$1" tokenize "$scratch/text.txt" --output "$2/data" --train-bpe 300 --quiet || fail "golden: $1 makes no shards"
    while read -r name options; do
        while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
        if [[ $name == emulator_2* ]]; then port=$((port + 20)); fi  # the ranks also use the ports above it
        # shellcheck disable=SC2086  # options are words
        run_and_hash "$name" "$1" "$2" $options &
    done <<<"$runs"
    wait
    while read -r name _; do cat "$2/$name.line"; done <<<"$runs" >"$2/lines"
}

take_ports
make_text >"$scratch/text.txt"
run_all "$program" "$scratch/new"

if [ $mode = record ]; then
    if grep ' failed ' "$scratch/new/lines"; then fail "golden.txt stays as it is" && exit 1; fi
    {
        sed "/^#/!d; s/^# made by .*/# made by $(environment "$program")/" $golden
        while read -r name _; do grep -h "^$name " "$scratch/new/lines" $golden | head -n 1; done <<<"$all_runs"
    } >"$scratch/golden.txt"
    diff $golden "$scratch/golden.txt"
    cp "$scratch/golden.txt" $golden
    exit 0
fi
expected=$golden
if [ $mode = against ]; then run_all "$old" "$scratch/old" && expected=$scratch/old/lines; fi

columns=("" results comm_bytes weights moments)
while read -ra is; do
    name=${is[0]} differ=()
    if [ "${is[1]}" = failed ]; then fail "golden $name ${is[*]:1}" && continue; fi
    read -ra was < <(grep "^$name " "$expected")
    for column in 1 2 3 4; do
        if [ "${is[column]}" != "${was[column]:-}" ]; then differ+=("${columns[column]}"); fi
    done
    if [ ${#differ[@]} = 0 ]; then
        pass "golden $name"
    elif [ $mode = against ]; then
        fail "golden $name: other ${differ[*]}: $(diff "$scratch"/{old,new}/"$name"/log.jsonl | head -n 5)"
    else
        fail "golden $name: other ${differ[*]}: ${is[*]:1} instead of ${was[*]:1}"
    fi
done <"$scratch/new/lines"
exit $((failures > 0))
