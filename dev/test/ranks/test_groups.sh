#!/usr/bin/env bash
# test_groups.sh: tests groups of ranks and collectives of activations: on CPU ranks by mpirun, and on GPU ranks in the
# emulator by NCCL and through host memory. It also tests a rank that is killed during a group's collective, and
# tensor-parallel ranks on several hosts.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "groups of ranks by mpirun" "$reason" && exit 0; fi
several_ranks_here
group_ranks=${program%/*}/group_ranks emulated=${program%/*}/emulator/group_ranks

# correct TEXT N COMMAND...: the checks of N ranks end with this line.
correct() {
    local text=$1
    shift
    ranks "$@" >"$scratch/correct" && grep -qx "$text: correct" "$scratch/correct"
}

# ---- every group of 1, 2, 3, 4 and 6 ranks
# Rows: elements per rank. 40000 elements are several messages, the last of another size.
for n in 1 2 3 4 6; do
    check "$n ranks: groups of all sizes at the same time" ranks $n "$group_ranks" check 1 7 40000
done
ranks 2 "$group_ranks" check 1 >/dev/null 2>"$scratch/errors"
check "2 ranks: Open MPI prints nothing of its own: $(head -n 1 "$scratch/errors")" test ! -s "$scratch/errors"
check "2 ranks: messages without shared pages" \
    ranks 2 -x OMPI_MCA_btl_vader_single_copy_mechanism=none -x OMPI_MCA_smsc=^cma \
    "$group_ranks" check 7 400000
# A collective for which training waits in every layer yields its core instead of sleeping. Open MPI
# must not yield itself.
for n in 2 3; do
    if [ $n -gt "$(nproc)" ] && mpirun --version | grep -q 'Open MPI) 5'; then
        skip "$n ranks wait promptly" "Open MPI 5 yields itself if there are more ranks than cores" && continue
    fi
    yields=$(OMPI_MCA_mpi_yield_when_idle=0 ranks $n "$group_ranks" yields)
    check "$n ranks wait promptly for activations and for their sums: $yields" \
        test "$yields" = "weights 0, activations 1, sums 1"
done
if [ -x "$emulated" ]; then
    for n in 2 4; do
        check "$n GPU ranks in the emulator by NCCL" \
            correct "$n ranks by NCCL 2.*" $n -x SIMT_DEVICES=$n "$emulated" check 1 64 40000
    done
else
    skip "groups of GPU ranks in the emulator" "make emulator builds $emulated"
fi

# ---- tensor-parallel groups
numbers=$(ranks 6 "$group_ranks" tensor-parallel 3 | sort)
expected=$(for rank in 0 1 2 3 4 5; do echo "rank $rank: dp $((rank / 3)) of 2, tp $((rank % 3)) of 3"; done)
check "6 ranks, --tensor-parallel 3: $(head -2 <<<"$numbers" | tail -1)" test "$numbers" = "$expected"
check "2 ranks, --tensor-parallel 1" \
    test "$(ranks 2 "$group_ranks" tensor-parallel 1 | sort | head -1)" = "rank 0: dp 0 of 2, tp 0 of 1"
ranks 4 "$group_ranks" tensor-parallel 3 >"$scratch/refused" 2>&1
check "4 ranks, --tensor-parallel 3 is refused: exit code" test $? = 2
without_zeros "$scratch/refused"
check "4 ranks, --tensor-parallel 3 is refused" \
    grep -q "^error: .*--tensor-parallel 3 does not divide 4 ranks; give 1, 2 or 4" "$scratch/refused"

# ---- a rank that is killed while the others wait for it in a collective of a group
for n in 2 4; do
    mpirun --timeout 60 -np $n "$group_ranks" wait >"$scratch/wait_$n" 2>&1 </dev/null &
    job=$!
    for _ in $(seq 500); do if [ "$(grep -c '^rank . pid ' "$scratch/wait_$n")" = $n ]; then break; fi; sleep 0.02; done
    mapfile -t pids < <(sed -n 's/^rank . pid //p' "$scratch/wait_$n")
    check "$n ranks: the others wait" test "${#pids[@]}" = $n
    sleep 0.3  # they are in the collective
    kill -9 "$(sed -n "s/^rank $((n - 1)) pid //p" "$scratch/wait_$n")"
    SECONDS=0
    wait $job
    status=$?
    check "$n ranks, one killed: all end after $SECONDS s, exit code $status" test $SECONDS -lt 15 -a $status != 0
    check "$n ranks, one killed: mpirun's time limit was not reached" test "$(timed_out $status; echo $?)" = 1
    for _ in $(seq 100); do if ! runs "${pids[0]}"; then break; fi; sleep 0.02; done
    for pid in ${pids[@]+"${pids[@]}"}; do
        check "$n ranks, one killed: process $pid has ended" test "$(runs "$pid"; echo $?)" = 1
    done
done

# ---- several hosts
reason=$(no_hosts_because)
if [ -n "$reason" ]; then skip "tensor-parallel groups on several hosts" "$reason" && finish; fi
export CLUSTER=g$$n CLUSTER_SUBNET=10.79.0
trap 'if is_main_shell; then dev/test/ranks/cluster.sh down 2; rm -rf "$scratch"; fi' EXIT
check "cluster.sh makes 2 hosts" dev/test/ranks/cluster.sh up 2
on_hosts() { dev/test/ranks/cluster.sh run 2 2 --timeout 60 "$group_ranks" "$@"; }
on_hosts tensor-parallel 4 >"$scratch/hosts" 2>&1
check "a tensor-parallel group on 2 hosts works" test $? = 0
without_zeros "$scratch/hosts"
check "a tensor-parallel group on 2 hosts: a warning" grep -q \
    "^warning: --tensor-parallel 4: ranks on ${CLUSTER}0 and ${CLUSTER}1 exchange activations" "$scratch/hosts"
on_hosts tensor-parallel 2 >"$scratch/hosts" 2>&1
check "tensor-parallel groups within 2 hosts work" test $? = 0
check "tensor-parallel groups within 2 hosts: no warning" test "$(grep -c '^warning: ' "$scratch/hosts")" = 0
check "groups of all sizes on 2 hosts" on_hosts check 7 40000
finish
