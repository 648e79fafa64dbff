"""test_groups.py: groups of ranks and collectives of activations (group_ranks.cpp), on CPU ranks, on emulated GPUs and
on several hosts."""

import re

import pytest
from harness import RELEASE, ranks, run

GROUP_RANKS = RELEASE / "group_ranks"


def group_ranks(n, *arguments, env=(), program=GROUP_RANKS):
    by = ranks(n)
    return run(by.prefix, program, *arguments, env={**by.env, **dict(env)})


# Rows: elements per rank. 40000 elements are several messages, the last of another size.
@pytest.mark.parametrize("n", [1, 3, 6])
def test_groups_of_all_sizes_at_the_same_time(n):
    result = group_ranks(n, "check 1 7 40000")
    assert result.out.endswith(": correct\n") and result.err == ""  # Open MPI prints nothing of its own


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


@pytest.mark.launchers
def test_tensor_parallel_groups_on_two_hosts(hosts):
    group = hosts(2)
    two = group.ranks(2, program=GROUP_RANKS)
    warning = f"warning: --tensor-parallel 4: ranks on {group.names[0]} and {group.names[1]} exchange activations"
    assert warning in run(two.command("tensor-parallel 4"), env=two.env).err
    assert "warning: " not in run(two.command("tensor-parallel 2"), env=two.env).err
    assert ": correct\n" in run(two.command("check 7 40000"), env=two.env).out
