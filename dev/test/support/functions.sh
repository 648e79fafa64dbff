# shellcheck shell=bash
# functions.sh: the prologue and the functions of every shell test. Each check prints PASS, FAIL or SKIP.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1

program=${PROGRAM:-$PWD/build/release/train_gpt2}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

pass() { echo "PASS  $1"; }
fail() {
    echo "FAIL  $1"
    failures=$((failures + 1))
}

# skip NAME REASON: what this machine cannot test.
skip() { echo "SKIP  $1: $2"; }

# check NAME COMMAND...: it succeeds.
check() {
    local name=$1
    shift
    if "$@" >"$scratch/check.log" 2>&1; then pass "$name"; else fail "$name: $*: $(tail -n 5 "$scratch/check.log")"; fi
}

# refused NAME CODE TEXT COMMAND...: ends with the exit code, one line on stderr that holds the text, and nothing on stdout
# that could be taken for a result.
refused() {
    local name=$1 code=$2 text=$3 status=0
    shift 3
    timeout 60 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || status=$?
    if [ $status != "$code" ]; then
        fail "$name: exit code $status instead of $code: $(tail -n 3 "$scratch/err")"
    elif [ "$(grep -c '^error: ' "$scratch/err")" != 1 ] || ! grep -qF -- "$text" "$scratch/err"; then
        fail "$name: said $(cat "$scratch/err")"
    else
        pass "$name: $(grep '^error: ' "$scratch/err")"
    fi
}

# What a run computed: its log without what depends on time.
results() { sed -n '/"kind":"\(step\|val\|sample\)"/{s/,"step_ms".*//;p}' "$1/log.jsonl"; }
val_loss() { sed -n 's/.*"kind":"val".*"val_loss":\([0-9.]*\).*/\1/p' "$1/log.jsonl" | tail -1; }

# same_run A B [STEP]: the logs, and the weights and moments of that step, are the same.
same_run() {
    local step file
    step=step_000$(printf '%03d' "${3:-20}")
    grep -q '"kind":"step"' "$1/log.jsonl" || return 1
    diff <(results "$1") <(results "$2") || return 1
    for file in model optimizer; do cmp "$1/$step/$file.safetensors" "$2/$step/$file.safetensors" || return 1; done
}

# Random words of a small language, the same each time: enough structure for a loss that falls.
make_text() {
    awk -v n="$1" 'BEGIN { srand(1); split("the a king queen old young saw heard of and to in house river went came", w, " ")
        for (i = 0; i < n; i++) printf "%s%s", w[int(rand() * 16) + 1], i % 12 == 11 ? ".\n" : " " }'
}

# ---- ranks by mpirun

# More ranks than cores, by root in a container too. A rank that waits yields its core. The names of Open MPI 4 come first,
# those of Open MPI 5, whose mpirun is PRRTE's, second. Sets each_rank: see there.
several_ranks_here() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 OMP_WAIT_POLICY=passive \
        OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
    # mpirun -np 2 $each_rank A... + B...: rank 0 runs the first command, rank 1 the second. For `mpirun -np 1 A... : -np 1 B...`,
    # of which the mpirun of Open MPI 5.0.7 dies by a segmentation fault, whatever the commands are.
    each_rank=$scratch/each_rank
    cat >"$each_rank" <<'END'
#!/usr/bin/env bash
for ((rank = OMPI_COMM_WORLD_RANK; rank > 0; rank--)); do
    while [ "$1" != + ]; do shift; done
    shift
done
command=()
while [ $# != 0 ] && [ "$1" != + ]; do command+=("$1") && shift; done
exec "${command[@]}"
END
    chmod +x "$each_rank"
}

# The exit code of mpirun --timeout: 110 of Open MPI 4, 241 of Open MPI 5.
timed_out() { [ "$1" = 110 ] || [ "$1" = 241 ]; }

# mpirun breaks its lines at 80 columns: its message as one line.
mpirun_says() { tr -s ' \n' ' ' <"$2" | grep -q -- "$1"; }

# Why ranks cannot be tested here; nothing if they can.
no_ranks_because() {
    if ! command -v mpirun >/dev/null; then
        echo "there is no mpirun (apt-get install openmpi-bin)"
    elif make found | grep -q 'Open MPI off'; then
        echo "this build has no Open MPI"
    fi
}

# Why cluster.sh cannot make hosts here; nothing if it can.
no_hosts_because() {
    if [ "$(id -u)" != 0 ]; then
        echo "network namespaces are root's to make"
    elif ! command -v ip >/dev/null || ! command -v unshare >/dev/null; then
        echo "ip and unshare are needed (apt-get install iproute2 util-linux)"
    elif ! ip netns add "probe$$" 2>/dev/null; then
        echo "no network namespaces can be made here"
    fi
    ip netns del "probe$$" 2>/dev/null
}

# The mpirun of Open MPI 5 ends its own messages with a zero byte, after which the line of a rank may begin.
without_zeros() { sed -i 's/\x00//g' "$1"; }

# The child processes of a process; pgrep is in a package of its own, procps.
children() { cat /proc/[0-9]*/stat 2>/dev/null | sed 's/(.*) //' | awk -v parent="$1" '$3 == parent { print $1 }' | sort -n; }

# A process that has ended and that nobody has asked for yet (Z) does not run any more.
runs() { [ -e "/proc/$1" ] && [ "$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null)" != Z ]; }

# How many times slower than usual the program runs (in an emulator of another CPU, say): waits are as much longer.
slower=${SLOWER:-1}

# wait_for FILE [TEXT]: it is there, and has the text.
wait_for() {
    for _ in $(seq $((1000 * slower))); do if [ -e "$1" ] && grep -qs -- "${2:-}" "$1"; then return 0; fi; sleep 0.02; done
    return 1
}

# inside HOSTS: the processes that run inside of the hosts of $CLUSTER.
inside() {
    local host pid
    for ((host = 0; host < $1; host++)); do
        for pid in $(ip netns pids "$CLUSTER$host"); do if runs "$pid"; then echo "$pid on host $host"; fi; done
    done
}
nobody_inside() { test -z "$(inside "$1")"; }

# ---- a model and its data

# A model and steps that take a second. A caller's options come later and win.
tiny=(--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --lr 1e-2 --warmup 2 --quiet --threads 2)

make_shards() {
    make_text "${2:-6000}" >"$1.txt"
    "$program" tokenize "$1.txt" --output "$1" --train-bpe 300 --quiet
}

finish() { exit $((failures > 0)); }
