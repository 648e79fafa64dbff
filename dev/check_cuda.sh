#!/usr/bin/env bash
# check_cuda.sh [--update] [ARCH...]: compiles the CUDA backend for every architecture, with warnings and spilled
# registers as errors, and links both programs for the last one. Fails if a kernel takes more registers or static shared
# memory or spills more bytes than dev/cuda_budget.txt allows, or lacks the instructions that it should use
# (opcodes.py). For sm_90a the test kernels of hopper_kernels.cuh are compiled, too. --update writes the file again. The
# emulator (dev/simt/occupancy.cpp) reads it. Needs nvcc, but no GPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

usage() { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' dev/check_cuda.sh; }

budget=dev/cuda_budget.txt update=0 archs=()
for word in "$@"; do
    case $word in
        --help | -h) usage && exit 0 ;;
        --update) update=1 ;;
        [1-9][0-9] | [1-9][0-9][0-9] | [1-9][0-9][af] | [1-9][0-9][0-9][af]) archs+=("$word") ;;
        *)
            echo "check_cuda: '$word' is neither an option nor an architecture such as 80 or 90a (see --help)" >&2
            exit 2
            ;;
    esac
done
if [ ${#archs[@]} = 0 ]; then archs=(80 89 90a 100 120); fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

if ! make found | grep -q '| CUDA [0-9]'; then
    echo "SKIP  check_cuda: no nvcc (NVCC=... or CUDA_HOME=... names it)"
    exit 0
fi

# compile SOURCE ARCH LOG: makes the object by the Makefile's own command, and $work/cubin, its kernels. LOG gets the
# report of ptxas.
compile() {
    local object=build/release/cuda/${1%.cu}.o command
    command=$(make -n V=1 CUDA=1 CUDA_ARCHS="$2" -W "$1" "$object" | grep -- " -c $1 ")
    mkdir -p "${object%/*}"
    eval "$command -Xptxas -v --keep --keep-dir $work" >"$3" 2>&1 && mv "$work"/*.cubin "$work/cubin"
}

# "arch kernel registers spilled-bytes shared-bytes", a line for each kernel that ptxas compiled.
kernels_of() {
    c++filt <"$2" | awk -v arch="$1" '
        /Compiling entry function/ { name = $0; sub(/.*entry function ./, "", name); sub(/. for .sm_.*/, "", name)
            sub(/^void /, "", name); gsub(/\(anonymous namespace\)::|\([A-Z][A-Za-z]*\)/, "", name)  # (Master)1
            sub(/\(.*/, "", name); gsub(/ /, "", name) }
        /bytes spill stores/ && name != "" { spilled = $5 + $9 }
        / Used [0-9]+ registers/ && name != "" {
            shared = 0
            for (i = 1; i <= NF; i++) if ($i == "Used") registers = $(i + 1); else if ($i ~ /^smem/) shared = $(i - 2)
            print arch, name, registers, spilled, shared
            name = ""
        }'
}

for arch in "${archs[@]}"; do
    sources=(llmc/cuda/*.cu)
    if [ "$arch" = 90a ]; then sources+=(dev/test/gpu/hopper_kernels.cu); fi
    for source in "${sources[@]}"; do
        if ! compile "$source" "$arch" "$work/log"; then
            echo "FAIL  $source for sm_$arch"
            grep -E 'error|warning' "$work/log" | c++filt | sed 's/^/      /' | head -20
            status=1
        fi
        # ptxas prints these without failing: asynchronous matrix instructions that it serializes, and
        # setmaxnreg that it ignores.
        if grep -E 'C75(04|05|08|10|11|17|19|20)|Potential Performance Loss' "$work/log"; then
            echo "FAIL  $source for sm_$arch: see above"
            status=1
        fi
        kernels_of "$arch" "$work/log" >>"$work/table"
        case $source:$arch in
            llmc/cuda/ops.cu:*) rules=() ;;
            */*_hopper.cu:90a | */hopper_kernels.cu:*) rules=(--hopper) ;;
            *) continue ;;
        esac
        if ! ./dev/opcodes.py "${rules[@]}" "$work/cubin"; then
            echo "FAIL  instructions for sm_$arch: see above"
            status=1
        fi
    done
done
sort -k1,1V -k2,2 "$work/table" -o "$work/table"
echo "$(wc -l <"$work/table") kernels, sm_${archs[*]}"

if [ $update = 1 ]; then
    toolkit=$(make found | grep -o 'CUDA [0-9.]*' | head -1)
    echo "# arch kernel registers spilled-bytes shared-bytes: dev/check_cuda.sh --update, $toolkit" >$budget
    cat "$work/table" >>$budget
    echo "written: $budget"
else
    awk 'NR == FNR { if ($1 !~ /^#/) { registers[$1 " " $2] = $3; spilled[$1 " " $2] = $4; shared[$1 " " $2] = $5 }
            next }
        { key = $1 " " $2 }
        !(key in registers) { print "FAIL  sm_" key " is not in the budget (--update)"; bad = 1; next }
        $3 > registers[key] || $4 > spilled[key] || $5 > shared[key] {
            printf "FAIL  sm_%s: %d registers, %d bytes spilled, %d bytes shared; ", key, $3, $4, $5
            printf "the budget has %d, %d and %d\n", registers[key], spilled[key], shared[key]
            bad = 1
        }
        $3 < registers[key] { printf "less  sm_%s: %d registers, the budget has %d\n", key, $3, registers[key] }
        END { exit bad }' $budget "$work/table" || status=1
fi

if [ $status = 0 ]; then
    make CUDA=1 CUDA_ARCHS="$arch" train_gpt2cu test_gpt2cu >"$work/log" 2>&1 || { tail -20 "$work/log" && status=1; }
fi
[ $status = 0 ] && echo "PASS  compiled, linked, within the budget"
exit $status
