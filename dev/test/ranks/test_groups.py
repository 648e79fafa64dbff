"""test_groups.py: groups of ranks and collectives of activations (group_ranks.cpp), on CPU ranks and on emulated GPUs;
a rank that is killed during a group's collective; and groups on several hosts."""

import os
import re
import signal

import pytest
from harness import RELEASE, ranks, run
from mpi import wait_for_end_of

GROUP_RANKS = RELEASE / "group_ranks"


def group_ranks(n, *arguments, env=(), program=GROUP_RANKS):
    by = ranks(n)
    return run(by.prefix, program, *arguments, env={**by.env, **dict(env)})


# Rows: elements per rank. 40000 elements are several messages, the last of another size.
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_groups_of_all_sizes_at_the_same_time(n):
    result = group_ranks(n, "check 1 7 40000")
    assert result.out.endswith(": correct\n") and result.err == ""  # Open MPI prints nothing of its own


def test_messages_without_shared_pages():
    no_pages = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}
    assert group_ranks(2, "check 7 100000", env=no_pages).out.endswith(": correct\n")


# A collective for which training waits in every layer yields its core instead of sleeping. Open MPI must not yield
# itself.
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_wait_promptly_for_activations_and_their_sums_only(n):
    ranks(n)  # may skip
    if n > len(os.sched_getaffinity(0)) and "Open MPI) 5" in run("mpirun --version").out:
        pytest.skip("Open MPI 5 yields itself if there are more ranks than cores")
    result = group_ranks(n, "yields", env={"OMPI_MCA_mpi_yield_when_idle": 0})
    assert result.out == "weights 0, activations 1, sums 1\n"


@pytest.mark.parametrize("n", [2, 4])
def test_gpu_ranks_by_nccl(n):
    emulated = RELEASE / "emulator/group_ranks"
    if not emulated.exists():
        pytest.skip("emulator/group_ranks is not built (make emulator)")
    result = group_ranks(n, "check 1 64 40000", env={"SIMT_DEVICES": n}, program=emulated)
    assert re.search(rf"^{n} ranks by NCCL 2.*: correct$", result.out, re.M), result


def test_tensor_parallel_ranks_are_neighbours():
    assert sorted(group_ranks(6, "tensor-parallel 3").out.splitlines()) == [
        f"rank {rank}: dp {rank // 3} of 2, tp {rank % 3} of 3" for rank in range(6)]


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_that_is_killed_during_a_collective_ends_the_others(n, start):
    by = ranks(n)
    process = start(by.prefix, GROUP_RANKS, "wait", env=by.env)
    found = re.compile(r"^rank (\d) pid (\d+)$", re.M)
    process.wait_for(lambda: len(found.findall(process.output)) == n, "the ranks wait")
    pids = {int(rank): int(pid) for rank, pid in found.findall(process.output)}
    os.kill(pids[n - 1], signal.SIGKILL)
    assert process.wait() not in (0, 110, 241)  # 110 and 241: the limit of mpirun --timeout
    wait_for_end_of(pids.values())


@pytest.mark.launchers
def test_tensor_parallel_groups_on_two_hosts(hosts):
    group = hosts(2)
    two = group.ranks(2, program=GROUP_RANKS)
    warning = f"warning: --tensor-parallel 4: ranks on {group.names[0]} and {group.names[1]} exchange activations"
    assert warning in run(two.command("tensor-parallel 4"), env=two.env).err
    assert "warning: " not in run(two.command("tensor-parallel 2"), env=two.env).err
    assert ": correct\n" in run(two.command("check 7 40000"), env=two.env).out
