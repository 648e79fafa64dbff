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
    result = group_ranks(n, "1 7 40000")
    assert result.out.endswith(": correct\n") and result.err == ""  # Open MPI prints nothing of its own


@pytest.mark.parametrize("n", [2, 4])
def test_gpu_ranks_by_nccl(n):
    emulated = RELEASE / "emulator/group_ranks"
    if not emulated.exists():
        pytest.skip("emulator/group_ranks is not built (make emulator)")
    result = group_ranks(n, "1 64 40000", env={"SIMT_DEVICES": n}, program=emulated)
    assert re.search(rf"^{n} ranks by NCCL 2.*: correct$", result.out, re.M), result


@pytest.mark.launchers
def test_groups_on_two_hosts(hosts):
    two = hosts(2).ranks(2, program=GROUP_RANKS)
    assert ": correct\n" in run(two.command("7 40000"), env=two.env).out
