#!/usr/bin/env bash
# test_cpu_isa.sh: tests CPU_ISA as docs/cpu.md describes it. With an instruction set that this machine has, training
# works, and the first lines and log.jsonl name it. One that the machine lacks is refused. Also tests threads, peak
# and MFU in log.jsonl.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

make_shards "$scratch/data" || fail "no shards"
# The model is so large that MFU, which log.jsonl has with four decimals, is not 0.
train=("$program" --train-data "$scratch/data/train_*.bin" --layers 1 --heads 2 --channels 128 --seq-len 64
    --micro-batch 8
    --global-batch 0 --steps 2)

refused "an unknown value of CPU_ISA" 2 "CPU_ISA=unknown is not known" env CPU_ISA=unknown "${train[@]}" --output ''
values=$(sed -n 's/.*CPU_ISA=unknown is not known: //p' "$scratch/err" | sed 's/,/ /g; s/ or / /')
check "the message lists the values of CPU_ISA" test -n "$values"
for value in $values; do check "docs/cpu.md has $value" grep -q "^| \`$value\` |" docs/cpu.md; done

# printing FILE COMMAND...: stdout of the command goes to FILE.
printing() { "${@:2}" >"$1"; }

# facts RUN ISA PRECISION THREADS: the first line of log.jsonl, the first lines (RUN.out) and the MFU of the steps must
# agree on these.
facts() {
    python3 - "$@" <<'PY'
import json, sys
path, isa, precision, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
run, *lines = map(json.loads, open(path + "/log.jsonl"))
assert (run["cpu_isa"], run["precision"], run["threads"]) == (isa, precision, threads), run
device = next(line for line in open(path + ".out") if line.startswith("device ")).rstrip()
peak = f"{run['peak_flops'] / 1e12:.3g} TFLOP/s in {precision}, measured at start"
words = f"{threads} thread{'s' * (threads > 1)}, {isa}; peak {peak}"
assert device.endswith(words), (device, words)
steps = [line for line in lines if line["kind"] == "step"]
assert len(steps) == 2, steps
for step in steps:
    mfu = step["tokens_per_s"] * run["model"]["flops_per_token"] / run["peak_flops"]
    assert 0 < step["mfu"] and abs(step["mfu"] - mfu) < 1e-4, (step, mfu)
PY
}

refusals=0
for isa in $values; do
    if offers=$(CPU_ISA=$isa "$program" plan --layers 1 --heads 1 --channels 16 2>&1 >/dev/null); then
        for precision in fp32 bf16; do
            run=$scratch/${isa}_$precision
            check "CPU_ISA=$isa trains in $precision" printing "$run.out" \
                env CPU_ISA="$isa" "${train[@]}" --precision $precision --output "$run"
            check "CPU_ISA=$isa in $precision: log.jsonl, the first lines and MFU agree" \
                facts "$run" "$isa" $precision 2
            # Without bf16 instructions operands are widened to fp32, so bf16 matmuls are never faster than fp32 ones.
            case $isa:$precision in plain:bf16 | avx2:bf16 | avx512:bf16 | neon:bf16)
                check "CPU_ISA=$isa in bf16: the table says that fp32 is faster" \
                    grep -q '^precision .*--precision fp32 is faster' "$run.out" ;;
            esac
        done
    else
        refused "CPU_ISA=$isa, which this machine lacks" 2 "CPU_ISA=$isa, but this machine offers" \
            env CPU_ISA="$isa" "${train[@]}" --output "$scratch/$isa"
        check "CPU_ISA=$isa: the refused run makes no output" test ! -e "$scratch/$isa"
        skip "CPU_ISA=$isa trains" "${offers#error: }"
        refusals=$((refusals + 1))
    fi
done
if [ $refusals = 0 ]; then skip "a value above the machine's is refused" "this machine offers all of them"; fi

# The number of threads is OMP_NUM_THREADS, up to OMP_THREAD_LIMIT.
for setting in OMP_NUM_THREADS=1 OMP_NUM_THREADS=3 OMP_THREAD_LIMIT=1; do
    threads=${setting#*=} run=$scratch/$setting
    check "$setting" printing "$run.out" env CPU_ISA=plain "$setting" "${train[@]}" --precision fp32 --output "$run"
    check "$setting: log.jsonl has $threads" facts "$run" plain fp32 "$threads"
done

# The number of turns for which idle threads spin, as libgomp prints it. The program sets its own, unless the user has
# set one. spin_count SETTING...: prints the number.
spin_count() {
    env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose "$@" "$program" --version 2>&1 |
        sed -nE "s/^ *(\[host\] )?GOMP_SPINCOUNT = '([0-9]*)'/\2/p" | tail -1
}
if [ -z "$(spin_count GOMP_SPINCOUNT=7)" ]; then
    skip "how long threads spin" "this build's OpenMP is not GCC's"
elif nm -D "$program" | grep -q ' U GOMP_parallel'; then
    skip "how long threads spin" "this build's libgomp is not linked statically"
else
    check "threads spin briefly: $(spin_count) turns" test "$(spin_count)" -gt 0 -a "$(spin_count)" -lt 100000
    check "GOMP_SPINCOUNT of the user is used" test "$(spin_count GOMP_SPINCOUNT=7)" = 7
    check "OMP_WAIT_POLICY=passive of the user is used" test "$(spin_count OMP_WAIT_POLICY=passive)" = 0
    check "OMP_WAIT_POLICY=active of the user is used" test "$(spin_count OMP_WAIT_POLICY=active)" -gt 1000000
fi
finish
