"""test_gpus.py: --ranks N on GPUs, which starts one rank per GPU, in the emulator: the same bits as one GPU, signals,
a killed rank, a killed parent process, and refused starts."""

import os
import pty
import signal

import pytest
from harness import (EMULATED, Launch, Run, assert_same_run, environment, ranks_of, refused, run, runs, train,
                     train_command, wait_until)

pytestmark = pytest.mark.skipif(not EMULATED.exists(), reason="build/release/emulator/train_gpt2cu is not built")
GPUS = Launch(EMULATED, env={"SIMT_DEVICES": 4, "OMP_NUM_THREADS": 1})
SMALL = "--layers 1 --heads 1 --vocab-size 384 --micro-batch 1 --precision fp32 --autotune off"
SHORT = f"{SMALL} --steps 4 --checkpoint-every 4 --deterministic-ranks 2"
ENDLESS = f"{SMALL} --global-batch 0 --steps 1000000 --checkpoint-every 1000000 --ranks 2"


def world_size(folder):
    return Run(folder).lines()[0]["world_size"]


def test_ranks_2_gives_the_bits_of_one_gpu_and_a_resume_needs_no_other_option(data, tmp_path):
    one = train(SHORT, by=GPUS, data=data, val=False, out=tmp_path / "one")
    two = train(SHORT, "--ranks 2", by=GPUS, data=data, val=False, out=tmp_path / "two")
    assert (world_size(one), world_size(two)) == (1, 2)
    assert_same_run(one, two, 4)
    run(EMULATED, "--resume --ranks 2 --steps 6 --output", two, env=GPUS.env)
    assert two.last_step() == 5


def test_every_rank_computes_attention_and_matmuls_as_rank_0_has_chosen(data, tmp_path):
    library = {"SIMT_CUDNN": 1, "XDG_CACHE_HOME": tmp_path}  # a kernel of ours takes no time, and is chosen
    short = f"{SHORT} --channels 64 --precision bf16 --autotune on"
    one = train(short, by=GPUS, data=data, val=False, out=tmp_path / "one", env=library)
    choices = tmp_path / "train_gpt2/algorithms.txt"
    for name in "kept", "timed":
        out = train(short, "--ranks 2", by=GPUS, data=data, val=False, out=tmp_path / name, env=library)
        assert_same_run(one, out, 4)
        assert choices.read_text().count(": wgmma ") == 5  # two of attention, two with a residual, the head
        choices.unlink()


def test_ranks_all_takes_every_gpu(data, tmp_path):
    out = train(SMALL, "--steps 2 --warmup 1 --ranks all", by=GPUS, data=data, val=False, out=tmp_path / "run")
    assert world_size(out) == 4


@pytest.fixture
def endless(train_in_background, data, tmp_path):
    """A run of two ranks that trains: its process, the process IDs of the ranks, and its folder."""
    out = Run(tmp_path / "run")
    process = train_in_background(ENDLESS, by=GPUS, data=data, val=False, out=out)
    process.wait_for_step(out, 3)
    return process, ranks_of(process), out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_all_ranks_after_a_checkpoint(endless, number):
    process, ranks, out = endless
    process.signal(number)
    assert process.wait() == 75
    assert out.latest() and not any(map(runs, ranks))


def test_ctrl_c_on_a_terminal_ends_all_ranks_after_a_checkpoint(data, tmp_path):
    out = Run(tmp_path / "run")
    command = train_command(ENDLESS, by=GPUS, data=data, val=False, out=out)
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, environment(GPUS.env))
    try:
        wait_until(lambda: out.last_step() >= 3 or not runs(child), "step 3")
        os.write(terminal, b"\x03")
        wait_until(lambda: not runs(child), "the end")
    finally:
        if runs(child):
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(terminal)
    assert status == 75 and out.latest()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_the_error_names_it(endless, rank):
    process, ranks, _ = endless
    process.signal(signal.SIGSTOP)  # it looks when the other one has ended, too
    os.kill(ranks[rank], signal.SIGKILL)
    wait_until(lambda: all(len(os.listdir(f"/proc/{pid}/task")) == 1 and not runs(pid) for pid in ranks),
               "the end of the ranks and their threads")
    process.signal(signal.SIGCONT)
    assert process.wait() == 137
    assert f"error: rank {rank} was ended by signal 9 (Killed)\n" in process.output
    assert not any(map(runs, ranks))


def test_kill_9_of_the_parent_leaves_no_rank(endless):
    process, ranks, _ = endless
    process.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(runs, ranks)), "the end of the ranks")


TORCHRUN = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}


@pytest.mark.parametrize("code, text, options, env", [
    (2, "--global-batch 24 is not", "--ranks 2 --global-batch 24", {}),  # an error of all ranks is printed once
    (66, "none_", "--ranks 2 --train-data none_*.bin", {}),
    (2, "--ranks 5, but there are 4 GPUs on this machine", "--ranks 5", {}),
    (2, "torchrun has started 2", "--ranks 4", TORCHRUN)])
def test_refused_starts_print_one_error_and_write_nothing(data, tmp_path, code, text, options, env):
    out = tmp_path / "never"
    refused(code, text, train_command(SHORT, options, by=GPUS, data=data, out=out), env={**GPUS.env, **env})
    assert not (out / "log.jsonl").exists()
