"""test_secret.py: ranks without MPI that prove TRAIN_GPT2_SECRET. test_rendezvous.cpp has the strangers."""

import os

import pytest
from harness import RELEASE, refused, run

JOIN = RELEASE / "rendezvous_rank"
SECRET = "b1946ac92492d2347c6235b4d2611184"
# Rank 0 listens for strangers, too, at an address that is not loopback.
VARIABLES = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "0.0.0.0", "TRAIN_GPT2_SECRET": None}
WARNING = "warning: without TRAIN_GPT2_SECRET rank 0 takes any process for a rank: trusted networks only"


@pytest.fixture
def variables(tmp_path):
    """The variables of a rank in a run of its own."""
    def make(rank, **others):
        port = 20000 + os.getpid() % 600 * 20
        return {**VARIABLES, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": tmp_path,
                **others}

    return make


@pytest.mark.parametrize("given", [{}, {"TRAIN_GPT2_SECRET": SECRET}])
def test_ranks_join_and_rank_0_warns_without_a_secret(given, start, variables):
    if given and "libcrypto off" in run("make found").out:
        pytest.skip("this build has no libcrypto")
    processes = [start(JOIN, env=variables(rank, **given)) for rank in (0, 1)]
    assert [process.wait() for process in processes] == [0, 0]
    assert (WARNING in processes[0].output) == (not given)
    assert SECRET not in processes[0].output + processes[1].output


@pytest.mark.parametrize("rank", [0, 1])
def test_weak_secret_is_refused(rank, variables):
    weak = variables(rank, TRAIN_GPT2_SECRET="12345")
    refused(2, "TRAIN_GPT2_SECRET has 5 characters, and needs at least 16", JOIN, env=weak)


@pytest.mark.parametrize("rank", [0, 1])
def test_secret_is_refused_without_libcrypto(rank, variables):
    refused(2, "TRAIN_GPT2_SECRET needs libcrypto, which this build lacks", RELEASE / "alone/rendezvous_rank",
            env=variables(rank, TRAIN_GPT2_SECRET=SECRET))
