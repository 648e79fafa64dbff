"""test_hosts.py: training on two and four hosts (hosts.py): the same bits as one rank, the bytes that the hosts send, a
host whose cable is cut, and SIGTERM."""

import signal

import pytest
from harness import SLOWER, assert_same_run, close, data_options, run, train
from hosts import open_mpi_5

pytestmark = pytest.mark.launchers

# 3.4 MB of gradients in fp32, so that the headers of the network are small in comparison.
PARAMETERS = 850816  # 384 x 128 + 64 x 128 + 4 (12 x 128 x 128 + 13 x 128) + 2 x 128
MODEL = ("--layers 4 --heads 2 --channels 128 --vocab-size 384 --seq-len 64 --micro-batch 1 --global-batch 512"
         " --precision fp32 --deterministic-ranks 8 --steps 3")
ENDLESS = f"{MODEL} --steps 100000 --timeout {5 * SLOWER}"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, more_data):
    return train(MODEL, out=tmp_path_factory.mktemp("one") / "run", data=more_data, val=False,
                 env={"OMP_NUM_THREADS": 1})


# The virtual cables carry frames of 64 KiB and more with one header of 66 bytes, as network cards with segmentation
# offload do. Headers and acknowledgements are less than 1 % of the gradients.
@pytest.mark.parametrize("n, each, options, copies", [
    (2, 2, "", 2), (4, 1, "", 6), (2, 2, "--zero 1", 2), (2, 2, "--grad-dtype bf16", 1)])
def test_hosts_send_2_copies_of_the_gradients_per_further_host(n, each, options, copies, hosts, one_rank, more_data,
                                                               tmp_path):
    group = hosts(n)
    given = dict(data=more_data, val=False, by=group.ranks(each))
    train(MODEL, options, "--stop-after 1", out=tmp_path / "short", **given)
    before = group.sent()
    whole = train(MODEL, options, out=tmp_path / "whole", **given)
    after = group.sent()
    per_step = (after - before - before) / 2  # the whole run has two steps more
    assert close(per_step, copies * PARAMETERS * 4, 0.02), per_step
    if "bf16" not in options:
        assert_same_run(one_rank, whole, 3)
    group.wait_until_empty()


def test_first_table_counts_the_machines(hosts, more_data):
    by = hosts(2).ranks(2)
    out = run(by.command(data_options(more_data, val=False), MODEL, "--warmup 0 --steps 1 --output ''"), env=by.env).out
    assert "4 ranks by MPI on 2 machines" in out
    assert ("Open MPI 5's mpirun may end with exit code 0 when it loses a host" in out) == open_mpi_5()


@pytest.fixture
def endless(hosts, train_in_background, more_data, tmp_path):
    """Starts an endless run on two hosts; returns both."""
    group = hosts(2)
    # mpirun notices a lost host after the ranks: Open MPI 5's would end with exit code 0.
    process = train_in_background(ENDLESS, by=group.ranks(1, keepalive="30 2 5"), out=tmp_path / "run", data=more_data,
                                  val=False)
    process.wait_for_step(tmp_path / "run", 3)
    return group, process


def test_cut_cable_ends_the_run_and_the_error_says_where_it_was(endless):
    group, process = endless
    group.cut(1)
    process.wait_for(lambda: "no progress" in process.output, "the error of a rank")
    group.give_up_soon()
    assert process.wait() != 0
    assert f"error: rank 0 on {group.names[0]}: no progress for {5 * SLOWER} s (--timeout): step" in process.output
    group.wait_until_empty()


def test_sigterm_to_mpirun_ends_the_ranks_on_all_hosts(endless):
    group, process = endless
    process.signal(signal.SIGTERM)
    assert process.wait() != 0
    group.wait_until_empty()
