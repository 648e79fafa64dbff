# shellcheck shell=bash
# functions.sh: the prologue and the helpers of every shell test. Each check prints a line PASS, FAIL or SKIP.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1

program=${PROGRAM:-$PWD/build/release/train_gpt2}
scratch=$(mktemp -d)
# is_main_shell: a signal may end the copy that bash forks for a command in the background before it executes the
# command, and the copy runs the EXIT trap, too.
is_main_shell() { [ "$BASHPID" = $$ ]; }
trap 'if is_main_shell; then rm -rf "$scratch"; fi' EXIT
export XDG_CACHE_HOME=$scratch/cache  # for the choices of --autotune
export OMP_NUM_THREADS=2
failures=0

pass() { echo "PASS  $1"; }
fail() {
    echo "FAIL  $1"
    failures=$((failures + 1))
}

# skip NAME REASON: a check that cannot run on this machine.
skip() { echo "SKIP  $1: $2"; }

# check NAME COMMAND...: the command must succeed.
check() {
    local name=$1
    shift
    if "$@" >"$scratch/check.log" 2>&1; then pass "$name"; else fail "$name: $*: $(tail -n 5 "$scratch/check.log")"; fi
}

# refused NAME CODE TEXT COMMAND...: the command must end with the exit code CODE and print one line "error: ..." with
# TEXT.
refused() {
    local name=$1 code=$2 text=$3 status=0
    shift 3
    timeout 60 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || status=$?
    if [ $status != "$code" ]; then
        fail "$name: exit code $status instead of $code: $(tail -n 3 "$scratch/err")"
    elif [ "$(grep -c '^error: ' "$scratch/err")" != 1 ] || ! grep -qF -- "$text" "$scratch/err"; then
        fail "$name: the message is $(cat "$scratch/err")"
    else
        pass "$name: $(grep '^error: ' "$scratch/err")"
    fi
}

# Use as "${interruptible[@]}" COMMAND... &. bash makes a command in the background ignore SIGINT, and a run would keep
# ignoring it.
interruptible=(env --default-signal=INT)

# The results of a run: its log without the fields that depend on time.
results() { sed -n '/"kind":"\(step\|val\|sample\)"/{s/,"step_ms".*//;p}' "$1/log.jsonl"; }
val_loss() { sed -n 's/.*"kind":"val".*"val_loss":\([0-9.]*\).*/\1/p' "$1/log.jsonl" | tail -1; }

# first_val RUN: the validation loss before the first step.
first_val() { sed -n 's/.*"kind":"val","step":0,"val_loss":\([0-9.]*\).*/\1/p' "$1/log.jsonl"; }

# nearly A B TOLERANCE: the last validation losses of two runs differ by at most this fraction.
nearly() {
    awk -v a="$(val_loss "$1")" -v b="$(val_loss "$2")" -v e="$3" \
        'BEGIN { exit !(a > 0 && b > 0 && a - b < e * b && b - a < e * b) }'
}

# within A B: A and B differ by less than 2 %.
within() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > 0.98 * b && a < 1.02 * b) }'; }

# same_run A B [STEP]: the logs are equal, and so are weights and moments of that step.
same_run() {
    local step file
    step=step_000$(printf '%03d' "${3:-20}")
    grep -q '"kind":"step"' "$1/log.jsonl" || return 1
    diff <(results "$1") <(results "$2") || return 1
    for file in model optimizer; do cmp "$1/$step/$file.safetensors" "$2/$step/$file.safetensors" || return 1; done
}

# make_text WORDS: prints random words of a small language, the same each time, with enough structure for the loss to
# fall.
make_text() {
    awk -v n="$1" 'BEGIN {
        srand(1)
        split("the a king queen old young saw heard of and to in house river went came", w, " ")
        for (i = 0; i < n; i++) printf "%s%s", w[int(rand() * 16) + 1], i % 12 == 11 ? ".\n" : " "
    }'
}

# ---- ranks by mpirun

# Lets mpirun start more ranks than cores, also as root, and lets a waiting rank yield its core. The variables OMPI_*
# are for Open MPI 4, PRTE_* for Open MPI 5, whose mpirun is PRRTE's. Also sets each_rank, which is explained below.
several_ranks_here() {
    export OMP_WAIT_POLICY=passive OMPI_MCA_mpi_yield_when_idle=1 \
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none
    # mpirun -np 2 $each_rank A... + B...: rank 0 runs the first command, rank 1 the second. It replaces
    # `mpirun -np 1 A... : -np 1 B...`, at which the mpirun of Open MPI 5.0.7 crashes with a segmentation fault.
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

# ranks N COMMAND... mpirun of Open MPI 4 can hang when it ends, beyond its own limit of time.
ranks() { timeout --foreground --kill-after 5 $((90 * slower)) mpirun --timeout 60 -np "$@"; }

# The exit code of mpirun --timeout: 110 of Open MPI 4, 241 of Open MPI 5.
timed_out() { [ "$1" = 110 ] || [ "$1" = 241 ]; }

# mpirun_says REGEX FILE: joins the lines of mpirun's message, which it breaks at 80 columns.
mpirun_says() { tr -s ' \n' ' ' <"$2" | grep -q -- "$1"; }

# Prints why ranks cannot be tested here, or nothing.
no_ranks_because() {
    if ! command -v mpirun >/dev/null; then
        echo "there is no mpirun (apt-get install openmpi-bin)"
    elif make found | grep -q 'Open MPI off'; then
        echo "this build has no Open MPI"
    fi
}

# Prints why cluster.sh cannot make hosts here, or nothing.
no_hosts_because() {
    if [ "$(id -u)" != 0 ]; then
        echo "only root can make network namespaces"
    elif ! command -v ip >/dev/null || ! command -v unshare >/dev/null; then
        echo "ip and unshare are needed (apt-get install iproute2 util-linux)"
    elif ! ip netns add "probe$$" 2>/dev/null; then
        echo "no network namespaces can be made here"
    fi
    ip netns del "probe$$" 2>/dev/null
}

# without_zeros FILE: the mpirun of Open MPI 5 ends its own messages with a zero byte, before the line of a rank.
without_zeros() { sed -i 's/\x00//g' "$1"; }

# children PID: its child processes. pgrep would need the package procps.
children() {
    cat /proc/[0-9]*/stat 2>/dev/null | sed 's/(.*) //' | awk -v parent="$1" '$3 == parent { print $1 }' | sort -n
}

# runs PID: the process exists and is not a zombie (Z).
runs() { [ -e "/proc/$1" ] && [ "$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null)" != Z ]; }

# take_ports: reserves 400 TCP ports for this test, and sets port to the first of them. The test and the processes that
# it has started hold a lock on a file of /tmp until all of them have ended. The search begins at a place that depends
# on the process ID, because a test in a chroot sees another /tmp but the same ports. All ports are below 32768, where
# Linux's choice of free ports begins.
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

# Use as "${torchrun[@]}" OPTION... COMMAND.... It runs the torchrun of Debian's PyTorch. It gives -r and -t, because
# version 1.13 cannot parse their default values under Python 3.11.
python=/usr/bin/python3
torchrun=("$python" -m torch.distributed.run -r 9:1 -t 9:1 --monitor_interval=0.1 --no_python)
# The options of torchrun for one host; torchrun listens on any free port. They replace --standalone, which in version
# 1.13 always listens on port 29400: a second run would join the store of the first run, and fail when the first run
# ends.
# shellcheck disable=SC2034  # the tests use it
one_host=(--nnodes=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id=one)

# Prints why torchrun cannot start ranks here, or nothing.
no_torchrun_because() {
    if ! $python -c 'import torch.distributed.run' 2>/dev/null; then
        echo "there is no torchrun (LAUNCHERS=1 ./scripts/test.sh installs it: apt-get install python3-torch)"
    fi
}

# How many times slower than usual the program runs, for example under an emulator of another CPU. Waits are
# that many times longer.
slower=${SLOWER:-1}

# wait_for FILE [TEXT]: waits up to 20 s until the file exists and has the text.
wait_for() {
    for _ in $(seq $((1000 * slower))); do
        if [ -e "$1" ] && grep -qs -- "${2:-}" "$1"; then return 0; fi
        sleep 0.02
    done
    return 1
}

# ends SECONDS: waits for $job, which is killed after three times these seconds. Sets status and seconds. Succeeds if
# the job has ended in time.
# shellcheck disable=SC2154  # the test sets job
ends() {
    local begin=$EPOCHREALTIME killer
    (sleep $((3 * $1 * slower)) && kill -9 "$job") >/dev/null 2>&1 &
    killer=$!
    wait "$job" 2>/dev/null
    status=$?
    kill $killer 2>/dev/null
    seconds=$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    awk -v s="$seconds" -v most="$(($1 * slower))" 'BEGIN { exit !(s < most) }'
}

# inside HOSTS: prints the processes that run on the hosts of $CLUSTER.
inside() {
    local host pid
    for ((host = 0; host < $1; host++)); do
        for pid in $(ip netns pids "$CLUSTER$host"); do if runs "$pid"; then echo "$pid on host $host"; fi; done
    done
}
nobody_inside() { test -z "$(inside "$1")"; }

# ---- a model and its data

# Options of a run of about a second. Later options override them.
tiny=(--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --lr 1e-2 --warmup 2 --quiet)

# intact DIR: the weights of this checkpoint, or of the newest one of this run, have their checksum.
intact() { "$program" generate --init "$1" --max-tokens 1; }

make_shards() {
    make_text "${2:-6000}" >"$1.txt"
    "$program" tokenize "$1.txt" --output "$1" --train-bpe 300 --quiet
}

finish() { exit $((failures > 0)); }
