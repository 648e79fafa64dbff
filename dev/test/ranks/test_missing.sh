#!/usr/bin/env bash
# test_missing.sh: tests ranks under mpirun of which one never calls MPI_Init. The others wait for --rendezvous-timeout, name the
# missing rank, and end. It tests one host and two.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks by mpirun" "$reason" && exit 0; fi
several_ranks_here
make_shards "$scratch/data" || fail "no shards"
train=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --threads 1 --steps 2 --output "$scratch/never" --val-every 0
       --rendezvous-timeout 2)
host=$(hostname)

# as_rank RANK COMMAND: makes a script for mpirun, in which rank RANK runs the command before it trains. If the command does not
# end, the rank never joins the others.
as_rank() {
    printf '#!/usr/bin/env bash\nif [ $OMPI_COMM_WORLD_RANK = %s ]; then %s; fi\nexec "$@"\n' "$1" "$2" >"$scratch/as_rank"
    chmod +x "$scratch/as_rank"
}

# refuses_missing_rank NAME REGEX COMMAND...: the job ends after 2 to 12 s with exit code 1, writes nothing and leaves no
# process. One or two ranks print an error, which matches the regular expression: the first one ends the job.
refuses_missing_rank() {
    local name=$1 text=$2 status=0 start=$EPOCHREALTIME
    shift 2
    timeout 60 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || status=$?
    without_zeros "$scratch/err"
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    if [ $status != 1 ]; then
        fail "$name: exit code $status: $(tail -n 3 "$scratch/err")"
    elif ! awk -v s="$seconds" 'BEGIN { exit !(s >= 2 && s < 12) }'; then
        fail "$name: took $seconds s"
    elif ! grep -q '^error: ' "$scratch/err" || grep '^error: ' "$scratch/err" | grep -qvE -- "$text"; then
        fail "$name: said $(cat "$scratch/err")"
    elif [ "$(grep -c '^error: ' "$scratch/err")" -gt 2 ] || [ -e "$scratch/never" ] || [ -n "$(left)" ]; then
        fail "$name: $(grep -c '^error: ' "$scratch/err") errors, $(ls "$scratch"), left $(left)"
    else
        pass "$name: $(grep -m1 '^error: ' "$scratch/err") ($seconds s)"
    fi
}
# Processes of this test: with its scratch folder on their command line, or sleeping in place of a rank.
left() { grep -lsazE "^7$$\$|[/]${scratch#/}" /proc/[0-9]*/cmdline | cut -d/ -f3 | xargs; }

refuses_missing_rank "rank 1 runs another program" "^error: rank 0 on $host: gave up after waiting 2 s for rank 1 \(process [0-9]+ on $host runs .*/sleep\)$" \
    mpirun -np 2 "$each_rank" "${train[@]}" + sleep "7$$"
refuses_missing_rank "rank 0 runs another program" "gave up after waiting 2 s for rank 0 \(process [0-9]+ on $host runs .*/sleep\)$" \
    mpirun -np 4 "$each_rank" sleep "7$$" + "${train[@]}" + "${train[@]}" + "${train[@]}"
as_rank 2 "sleep 7$$"
refuses_missing_rank "rank 2 is in a script that does not end" "for rank 2 \(process [0-9]+ on $host runs .*/sleep\)$" mpirun -np 3 "$scratch/as_rank" "${train[@]}"
as_rank 1 'kill -STOP $$'
refuses_missing_rank "rank 1 is stopped" "for rank 1 \(process [0-9]+ on $host is stopped\)$" mpirun -np 2 "$scratch/as_rank" "${train[@]}"
as_rank 1 "sleep 1"
check "the others wait for a rank that comes late" mpirun -np 2 "$scratch/as_rank" "${train[@]}" --rendezvous-timeout 30 --output ''
check "a rank that comes late causes no warning" test "$(grep -cE 'still waiting|gave up' "$scratch/check.log")" = 0
as_rank 0 "sleep 12"
check "the others wait for a rank that comes after 12 s" mpirun -np 3 "$scratch/as_rank" "${train[@]}" --global-batch 96 --rendezvous-timeout 40 --output ''
words=$(grep 'still waiting' "$scratch/check.log")
check "one of the waiting ranks warns once after 10 s: $words" grep -qxE "warning: rank 1 on $host: still waiting after 10 s for rank 0 \
\(process [0-9]+ on $host runs .*/(bash|sleep)\); giving up in 30 s \(--rendezvous-timeout\)" <<<"${words//$'\n'/ }"

reason=$(no_hosts_because)
if [ -n "$reason" ]; then skip "ranks on two hosts" "$reason" && finish; fi
export CLUSTER=m$$n
trap 'if is_main_shell; then dev/test/ranks/cluster.sh down 2; rm -rf "$scratch"; fi' EXIT
check "cluster.sh makes 2 hosts" dev/test/ranks/cluster.sh up 2
for rank in 1 2; do
    as_rank $rank "sleep 7$$"
    refuses_missing_rank "2 hosts, without rank $rank" "for rank $rank \(process [0-9]+ on ${CLUSTER}$((rank / 2)) runs .*/sleep\)$" \
        dev/test/ranks/cluster.sh run 2 2 "$scratch/as_rank" "${train[@]}"
done
# A process in a network namespace of its own counts as being on another host.
as_rank 3 "exec unshare --net sleep 7$$"
refuses_missing_rank "2 hosts, the missing rank has no visible process" "for 1 of the 2 ranks on ${CLUSTER}1 \(no process\)$" \
    dev/test/ranks/cluster.sh run 2 2 "$scratch/as_rank" "${train[@]}"
as_rank 1 "exec unshare --net sleep 7$$"
refuses_missing_rank "1 host, the missing rank has no visible process" "for rank 1 \(no process on $host\)$" mpirun -np 2 "$scratch/as_rank" "${train[@]}"
for _ in $(seq 50); do if nobody_inside 2; then break; fi; sleep 0.1; done
check "no process is left on the hosts: $(inside 2)" nobody_inside 2
finish
