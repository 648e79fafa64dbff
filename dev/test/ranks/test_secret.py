"""test_secret.py: ranks without MPI that prove TRAIN_GPT2_SECRET. test_rendezvous.cpp has the strangers."""

import pytest
from harness import RELEASE, refused, run
from mpi import by_hand

JOIN = RELEASE / "rendezvous_rank"
SECRET = "b1946ac92492d2347c6235b4d2611184"
WARNING = "warning: without TRAIN_GPT2_SECRET rank 0 takes any process for a rank: trusted networks only"


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ranks_join_and_rank_0_warns_without_a_secret(secret, start, tmp_path):
    if secret and "libcrypto off" in run("make found").out:
        pytest.skip("this build has no libcrypto")
    # Rank 0 listens for strangers, too, at an address that is not loopback.
    processes = [start(JOIN, env={**by_hand(rank, 2, tmp_path, "0.0.0.0"), "TRAIN_GPT2_SECRET": secret})
                 for rank in (0, 1)]
    assert [process.wait() for process in processes] == [0, 0]
    assert (WARNING in processes[0].output) == (not secret)
    assert SECRET not in processes[0].output + processes[1].output


@pytest.mark.parametrize("rank", [0, 1])
def test_secret_is_refused_without_libcrypto(rank, tmp_path):
    refused(2, "TRAIN_GPT2_SECRET needs libcrypto, which this build lacks", RELEASE / "alone/rendezvous_rank",
            env={**by_hand(rank, 2, tmp_path), "TRAIN_GPT2_SECRET": SECRET})
