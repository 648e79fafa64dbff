"""test_nccl.py: training on several GPUs by NCCL in the emulator, where each rank has its own GPU and a stand-in
replaces the NCCL library: the bits of one GPU, the bytes that ranks send, and the end of all ranks if one is lost."""

import functools
import re
import signal

import pytest
from harness import EMULATED, Launch, assert_same_run, close, emulated_gpus, ranks, train, train_command
from mpi import HOST, by_hand, damaged

pytestmark = pytest.mark.skipif(not EMULATED.exists(), reason="build/release/emulator/train_gpt2cu is not built")
# The vocabulary needs no padding, so that ranks send exactly the bytes of the parameters. Each of two ranks has two
# micro-steps, of which the first replays a CUDA graph from the third step on.
SMALL = "--layers 1 --heads 1 --vocab-size 384 --micro-batch 1 --steps 4 --val-every 4 --val-tokens 80 " \
        "--checkpoint-every 4 --autotune off"
PARAMETERS = 25568  # 384 x 32 + 16 x 32 + 12 x 32 x 32 + 13 x 32 + 2 x 32
FP32 = "--precision fp32"
SAME = f"{FP32} --deterministic-ranks 2"  # one GPU and two have the same bits
THREE = f"{FP32} --global-batch 96"
ENDLESS = f"{FP32} --steps 1000000 --checkpoint-every 1000000 --val-every 0 --global-batch 0"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """trained(GPUS, OPTIONS) returns the run with these options, which is made once."""

    @functools.cache
    def run_of(gpus, options):
        return train(SMALL, options, by=emulated_gpus(gpus), data=data, out=tmp_path_factory.mktemp("run") / "run")

    return run_of


@pytest.fixture
def start_ranks(start, data, tmp_path):
    """start_ranks(N, OPTIONS..., env=...) starts N ranks as torchrun does; returns their processes."""

    def begin(n, *options, out, env=()):
        command = train_command(SMALL, *options, by=Launch(EMULATED), data=data, out=out)
        common = {"SIMT_DEVICES": n, "OMP_NUM_THREADS": 1, **dict(env)}
        return [start(command, env={**by_hand(rank, n, tmp_path), **common}) for rank in range(n)]

    return begin


def by_mpirun(n, gpus):
    """Starts n ranks by mpirun, each of which sees so many GPUs."""
    launch = ranks(n)
    return Launch(EMULATED, launch.prefix, env={**launch.env, "SIMT_DEVICES": gpus})


# The sum over two ranks has the same bits in any library, because a + b = b + a.
@pytest.mark.parametrize("precision, zero", [("fp32", 0), ("fp32", 2), ("bf16", 1)])
def test_two_gpus_have_the_bits_of_one(trained, precision, zero):
    options = f"--precision {precision} --deterministic-ranks 2"
    one = trained(1, options)
    if zero == 2:  # adds the ranks in every micro-step, so its sums are rounded in another order
        one = trained(1, f"{options} --zero 2")
        assert close(one.val_loss(), trained(1, options).val_loss(), 1e-4)
    assert_same_run(one, trained(2, f"{options} --zero {zero}"), 4)


@pytest.mark.parametrize("options, env", [
    ("--zero 1", {"SIMT_STREAMS": "deferred:3"}), ("--zero 2", {"SIMT_STREAMS": "deferred:3"}),
    ("--cuda-graph off", {})])
def test_the_order_of_streams_and_cuda_graphs_change_no_bit(trained, data, tmp_path, options, env):
    out = train(SMALL, SAME, options, by=emulated_gpus(2), data=data, out=tmp_path / "run", env=env)
    assert_same_run(trained(1, f"{SAME} --zero 2" if "2" in options else SAME), out, 4)


@pytest.mark.parametrize("gpus", [2, 1])
def test_ranks_by_mpirun_that_see_all_gpus_or_one_each_have_the_bits_of_one(trained, data, tmp_path, gpus):
    out = train(SMALL, SAME, "--zero 1", by=by_mpirun(2, gpus), data=data, out=tmp_path / "run")
    assert_same_run(trained(1, SAME), out, 4)


@pytest.mark.parametrize("env, note", [
    ({}, ""),
    ({"SIMT_DEVICES": 1}, "note: process 1 of this machine sees one GPU and uses it\n")])  # LOCAL_RANK is the rank
def test_ranks_by_torchrun_have_the_bits_of_one_gpu(trained, start_ranks, tmp_path, env, note):
    processes = start_ranks(2, SAME, out=tmp_path / "run", env=env)
    assert [process.wait() for process in processes] == [0, 0]
    assert processes[1].output == note
    assert_same_run(trained(1, SAME), tmp_path / "run", 4)


def test_three_gpus_have_nearly_the_loss_of_one_and_the_same_first_validation(trained):
    one, three, sharded = trained(1, THREE), trained(3, THREE), trained(3, f"{THREE} --zero 1")
    assert close(three.val_loss(), one.val_loss(), 1e-4)
    assert one.val_losses()[0] == three.val_losses()[0]
    assert_same_run(three, sharded, 4)
    rounded = trained(3, f"{THREE} --grad-dtype bf16")
    assert close(rounded.val_loss(), three.val_loss(), 1e-3) and rounded.losses() != three.losses()


@pytest.mark.parametrize("gpus, options, bytes_per_parameter", [
    (3, THREE, 2 * 2 / 3 * 4),  # 2 (n-1)/n of the gradients
    (2, "--precision bf16 --deterministic-ranks 2 --zero 1", (4 + 2) / 2),  # gradients, and weights of half the size
    (2, f"{SAME} --zero 2", (4 + 4 + 4) / 2),  # gradients in both micro-steps, and weights once
    (2, f"{SAME} --grad-dtype bf16", 2)])
def test_each_step_sends_these_bytes(trained, gpus, options, bytes_per_parameter):
    sent = trained(gpus, options).by_step("step", "comm_bytes").values()
    assert len(sent) == 4 and all(close(bytes, bytes_per_parameter * PARAMETERS, 0.03) for bytes in sent)


@pytest.mark.parametrize("n, gone, nccl, code, text", [
    (3, 1, "", 1, "another rank is gone, or not to be reached: "),
    (2, 0, "", 1, "another rank is gone, or not to be reached: "),
    (2, 1, "deaf", 124, r"no progress for 3 s \(--timeout\): ")])  # NCCL does not notice
def test_the_others_end_and_say_why_if_a_rank_is_killed(start_ranks, tmp_path, n, gone, nccl, code, text):
    options = [ENDLESS, "--timeout 3" if nccl else ""]
    processes = start_ranks(n, *options, out=tmp_path / "run", env={"SIMT_NCCL": nccl} if nccl else {})
    processes[0].wait_for_step(tmp_path / "run", 3)
    processes[gone].signal(signal.SIGKILL)
    for rank in set(range(n)) - {gone}:
        assert processes[rank].wait() == code
        assert re.search(f"^error: rank {rank} on {HOST}: {text}", processes[rank].output, re.M)


# The rank that reads a token outside of the vocabulary ends with exit code 65, the other with the same or with 1.
def test_all_end_if_one_rank_reads_bad_data(start_ranks, data, tmp_path):
    bad = ["--train-data", damaged(data, tmp_path, "val")]  # few tokens, so that a rank reads the bad one soon
    processes = start_ranks(2, ENDLESS, bad, out=tmp_path / "run")
    codes = sorted(process.wait() for process in processes)
    assert codes[0] in (1, 65) and codes[1] == 65
