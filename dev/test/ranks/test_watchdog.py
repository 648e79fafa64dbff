"""test_watchdog.py: a run in which a rank or a disk hangs ends with exit code 124 after --timeout, each rank that is
alive prints where it is, and no process is left."""

import os
import re
import signal

from harness import assert_same_run, emulated_gpus, preload, ranks, ranks_of, refused, train, train_command
from mpi import HOST, by_hand, wait_for_end_of

TIMEOUT = 3
ENDLESS = ("--micro-batch 1 --global-batch 48 --val-every 0 --steps 1000000 --checkpoint-every 1000000"
           f" --timeout {TIMEOUT}")


def assert_hangs(process, pids, *alive):
    """Waits for the end by the watchdogs; just the ranks that are alive must print where they are."""
    assert process.wait() == 124
    lines = re.findall(rf"error: rank (\d) on {HOST}: no progress for {TIMEOUT} s \(--timeout\): .* in collective \d+;"
                       " look at the ranks that print no such line", process.output)
    assert sorted(map(int, lines)) == list(alive), process.output
    assert process.output.count("no progress") == len(alive)
    wait_for_end_of(pids)


def test_a_disk_that_hangs_ends_the_run(data, tmp_path):
    hangs = preload(tmp_path, "unsigned sleep(unsigned); int fsync(int file) { for (;;) sleep(1000); }")
    refused(124, f"no progress for {TIMEOUT} s (--timeout): ",
            train_command(ENDLESS, out=tmp_path / "run", data=data), env=hangs)


def test_a_stopped_rank_ends_the_run_which_continues_with_the_same_bits(train_in_background, data, tmp_path):
    where = {"out": tmp_path / "run", "data": data, "by": ranks(3)}
    train(ENDLESS, "--stop-after 5", **where)
    process = train_in_background(ENDLESS, "--resume", **where)
    process.wait_for_step(tmp_path / "run", 8)
    pids = ranks_of(process)
    os.kill(pids[2], signal.SIGSTOP)
    assert_hangs(process, pids, 0, 1)
    assert re.search(r"\(--timeout\): step \d+, ", process.output)
    whole = train(ENDLESS, "--stop-after 9", out=tmp_path / "whole", data=data, by=ranks(3))
    assert_same_run(train(ENDLESS, "--resume --stop-after 4", **where), whole, 9)


# Without a launcher each rank must end by itself.
def test_a_stopped_gpu_rank_ends_the_other(train_in_background, data, tmp_path):
    options = f"{ENDLESS} --layers 1 --heads 1 --global-batch 0 --precision fp32 --autotune off"
    first, other = (train_in_background(options, out=tmp_path / "run", data=data, by=emulated_gpus(1),
                                        env={"SIMT_DEVICES": 2, **by_hand(rank, 2, tmp_path)}) for rank in (0, 1))
    first.wait_for_step(tmp_path / "run", 3)
    other.signal(signal.SIGSTOP)
    assert_hangs(first, [first.pid], 0)
