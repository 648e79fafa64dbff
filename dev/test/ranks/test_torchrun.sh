#!/usr/bin/env bash
# test_torchrun.sh: ranks started by PyTorch's torchrun in each of its modes: the rank that each process finds, and the
# rendezvous of the ranks while the agent listens on MASTER_PORT; two agents, two runs at once, and a restart.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"
export OMP_NUM_THREADS=1

reason=$(no_torchrun_because)
if [ -n "$reason" ]; then skip "torchrun" "$reason" && exit 0; fi
rank_program=$PWD/build/release/rendezvous_rank
make --no-print-directory -o Makefile "${rank_program#"$PWD"/}" >/dev/null || fail "$rank_program is not built"
who=("$rank_program" who)
host=$(hostname)
take_ports  # agents listen on port + 0, 40, 60, 80 and 81, and their ranks on the ports above

torchrun() { timeout 60 "${torchrun[@]}" "$@" 2>>"$scratch/err"; }
modes() {
    echo "${one_host[*]}"
    echo "--nnodes=1 --master_addr=127.0.0.1 --master_port=$port"
}

# joined RANKS ATTEMPT FILE...: one line of each rank, of this attempt, all with the same id.
joined() {
    local ranks=$1 rank wanted=""
    for ((rank = 0; rank < ranks; rank++)); do
        wanted+="torchrun rank $rank of $ranks on $host, attempt $2, joined"$'\n'
    done
    cat "${@:3}" | grep '^torchrun rank' >"$scratch/joined"
    if [ "$(sed 's/ process .*//' "$scratch/joined" | sort)"$'\n' != "$wanted" ] ||
        [ "$(sed 's/.*, joined //' "$scratch/joined" | sort -u | wc -l)" != 1 ]; then
        cat "$scratch/joined"
        tail -n 20 "$scratch/err"
        return 1
    fi
}

# ---- one agent
while read -r mode; do
    # shellcheck disable=SC2086  # words
    torchrun $mode --nproc_per_node=3 sh -c "${who[*]}; exec $rank_program" >"$scratch/out"
    expected=$(for rank in 0 1 2; do echo "torchrun, rank $rank of 3, local rank $rank of 3 on $host"; done)
    found=$(grep ', local rank' "$scratch/out" | sort)
    check "$mode: every process finds its rank" test "$found" = "$expected"
    check "$mode: 3 ranks join" joined 3 0 "$scratch/out"
done < <(modes)
torchrun "${one_host[@]}" --nproc_per_node=1 "${who[@]}" >"$scratch/out"
check "1 rank needs no rendezvous" grep -qx "torchrun, rank 0 of 1, local rank 0 of 1 on $host" "$scratch/out"

# ---- two agents, as on two hosts
two_agents() {
    local agent pids=()
    for agent in 0 1; do
        # shellcheck disable=SC2086  # words
        torchrun --nnodes=2 ${1//AGENT/$agent} --nproc_per_node=2 "$rank_program" >"$scratch/agent$agent" &
        pids+=($!)
    done
    wait "${pids[0]}" && wait "${pids[1]}"
}
check "2 agents, c10d" two_agents "--rdzv_backend=c10d --rdzv_endpoint=localhost:$((port + 40)) --rdzv_id=two"
check "2 agents, c10d: 4 ranks join" joined 4 0 "$scratch/agent0" "$scratch/agent1"
check "2 agents, static" two_agents "--node_rank=AGENT --master_addr=127.0.0.1 --master_port=$((port + 60))"
check "2 agents, static: 4 ranks join" joined 4 0 "$scratch/agent0" "$scratch/agent1"

# ---- two runs at once whose ports overlap: the second agent has the port at which rank 0 of the first run would
# listen, so that this rank listens at the first port of the second run. Rank 1 of the second run finds it there, and
# must go on to the next port. A rank starts when its file is there.
for run in 0 1; do
    torchrun --nnodes=1 --master_addr=127.0.0.1 --master_port=$((port + 80 + run)) --nproc_per_node=2 \
        sh -c "echo >'$scratch/agent_$run'
            until [ -e '$scratch/start_$run'\$RANK ]; do sleep 0.02; done
            exec $rank_program" >"$scratch/run$run" &
    runs[run]=$!
done
wait_for "$scratch/agent_0" && wait_for "$scratch/agent_1" || fail "two runs on overlapping ports: the agents"
for rank in 00 11 10 01; do touch "$scratch/start_$rank" && sleep 0.5; done
wait "${runs[@]}"
for run in 0 1; do check "two runs on overlapping ports: the ranks of run $run join" joined 2 0 "$scratch/run$run"; done
check "two runs on overlapping ports: each has its own id" \
    test "$(sed 's/.*, joined //' "$scratch/run0" "$scratch/run1" | sort -u | wc -l)" = 2

# ---- a restart, and a refused start
torchrun "${one_host[@]}" --max_restarts=1 --nproc_per_node=2 \
    sh -c "[ \"\$TORCHELASTIC_RESTART_COUNT \$RANK\" != '0 1' ] || exit 3; ${who[*]}; exec $rank_program" \
        >"$scratch/out"
check "the restarted ranks join as attempt 1" joined 2 1 "$scratch/out"
check "the restarted ranks name the restart" test "$(grep -c ', restart 1$' "$scratch/out")" = 2
: >"$scratch/err"
torchrun "${one_host[@]}" --nproc_per_node=2 env OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=1 \
    OMPI_COMM_WORLD_LOCAL_RANK=1 "${who[@]}" >"$scratch/out"
check "mpirun's variables of another run: exit code 2" grep -q 'exitcode *: 2 ' "$scratch/err"
check "mpirun's variables of another run: the error names the contradiction" \
    grep -q 'they contradict each other; start with one launcher' "$scratch/err" "$scratch/out"

# ---- exit code 75. torchrun takes it for a failure, starts the rank --max_restarts times, and itself ends with 1.
# No step is lost.
make_shards "$scratch/data" 30000 || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --steps 1000000 --checkpoint-every 1000000
    --resume)
# steps_once RUN: the log has each step once, in the order.
steps_once() {
    sed -n 's/.*"kind":"step","step":\([0-9]*\),.*/\1/p' "$1/log.jsonl" |
        awk '$1 != NR - 1 { exit 1 } END { exit NR == 0 }'
}
starts() { grep -c '"kind":"run"' "$1/log.jsonl"; }
# shellcheck disable=SC2016  # for the inner shell
noted=(sh -c 'timeout --preserve-status -s TERM '$((2 * \
    slower))' "$@"; status=$?; grep -c "\"kind\":\"step\"" "$0/log.jsonl" >>"$0.steps"; exit $status' "$scratch/timed")
torchrun "${one_host[@]}" --max_restarts=2 --nproc_per_node=1 "${noted[@]}" "${train[@]}" --checkpoint-every 7 \
    --output "$scratch/timed" >"$scratch/out" 2>&1
check "exit code 75 under torchrun: torchrun ends with 1" test $? = 1
check "exit code 75 under torchrun: 2 restarts" test "$(starts "$scratch/timed")" = 3
check "exit code 75 under torchrun: each restart resumes at the last step" \
    test "$(sed -n 's/.*"resumed_at":\([1-9][0-9]*\).*/\1/p' "$scratch/timed/log.jsonl")" = "$(head -n 2 \
        "$scratch/timed.steps")"
check "exit code 75 under torchrun: the log has each step once" steps_once "$scratch/timed"
# SIGTERM to torchrun: it passes the signal on, and starts nothing again.
"${torchrun[@]}" "${one_host[@]}" --max_restarts=2 --nproc_per_node=1 \
    "${train[@]}" --output "$scratch/ended" >"$scratch/out" 2>&1 &
agent=$!
check "SIGTERM to torchrun: the rank trains" wait_for "$scratch/ended/log.jsonl" '"step":12,'
kill -TERM $agent
wait $agent
check "SIGTERM to torchrun: exit code $?" test $? != 0
check "SIGTERM to torchrun: the rank has saved its last step" \
    test "$(cat "$scratch/ended/latest")" = "step_$(printf %06d "$(grep -c '"kind":"step"' \
        "$scratch/ended/log.jsonl")")"
check "SIGTERM to torchrun: no restart" test "$(starts "$scratch/ended")" = 1
finish
