"""test_random_faults.py: one random fault in each run on two ranks, which is then started again until it is complete.
It must have the log, weights and moments of a run that was not disturbed. Runs with an odd seed have --zero 1, so that
each rank sends its part of a checkpoint to rank 0.

FAULT_COUNT faults [200] have the seeds FAULT_SEED [1], FAULT_SEED + 1, ...
"""

import os
import random
import shutil
import signal
import time

import pytest
from harness import Run, assert_same_run, execute, no_mpi_because, overwrite, ranks_of, runs, train, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.skipif(bool(no_mpi_because()), reason=no_mpi_because())]
STEPS = 400
OPTIONS = f"--steps {STEPS} --checkpoint-every 20 --timeout 5"
FIRST = int(os.environ.get("FAULT_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("FAULT_COUNT", "200")))
BAD = 2, 65, 66  # exit codes after which a run is not started again


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    return train(OPTIONS, "--ranks 2", data=data, val=False, out=tmp_path_factory.mktemp("undisturbed") / "run",
                 env={"OMP_NUM_THREADS": 1})


@pytest.fixture
def small_disk(tmp_path, undisturbed):
    """small_disk() returns a folder on a disk of its own, which has room for eight checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount():
        size = 8 * sum(file.stat().st_size for file in undisturbed.checkpoint(STEPS).iterdir())
        if execute(f"mount -t tmpfs -o size={size} faults", disk).code != 0:
            pytest.skip("no tmpfs can be mounted here")
        return disk

    yield mount
    execute("umount --lazy", disk)


def to_a_rank(number):
    return lambda process, rng, **_: os.kill(rng.choice(ranks_of(process)), number)


def to_the_launcher(*numbers):
    return lambda process, rng, **_: process.signal(rng.choice(numbers))


def full_disk(process, out, **_):
    """Lasts until a save fails; takes the space of checkpoints that the run deletes."""
    filler = out.folder.with_name("filler")
    while process.lives() and "was not saved" not in process.output:
        try:
            with open(filler, "ab") as file:
                file.write(bytes(1 << 20))
        except OSError:
            time.sleep(0.01)
    filler.unlink()


def flip_bit(process, rng, out, **_):
    file = rng.choice(sorted((out / out.latest()).iterdir()))
    at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
    overwrite(file, at, bytes([file.read_bytes()[at] ^ 1 << bit]))
    print(f"bit {bit} of byte {at} of {file} flipped, and a rank killed")
    to_a_rank(signal.SIGKILL)(process, rng)


FAULTS = {"a killed rank": to_a_rank(signal.SIGKILL), "a stopped rank": to_a_rank(signal.SIGSTOP),
          "a killed launcher": to_the_launcher(signal.SIGKILL),
          "a request to stop": to_the_launcher(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
          "a full disk": full_disk, "a flipped bit": flip_bit}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(seed, undisturbed, data, tmp_path, small_disk,
                                                            train_in_background):
    rng = random.Random(seed)
    fault = rng.choice(list(FAULTS))
    out = Run((small_disk() if fault == "a full disk" else tmp_path) / "run")

    def start():
        return train_in_background(OPTIONS, "--ranks 2 --resume --zero", seed % 2, data=data, val=False, out=out,
                                   env={"OMP_NUM_THREADS": 1})

    for _ in range(5):  # until the fault strikes before the run ends
        shutil.rmtree(out, ignore_errors=True)
        step, pause = rng.randrange(60 if fault == "a flipped bit" else 0, STEPS // 2), rng.random() / 20
        process, starts = start(), 1
        wait_until(lambda: out.last_step() >= step or not process.lives(), f"step {step}")
        time.sleep(pause)
        print(f"{fault} {pause:.3f} s after step {step}")
        pids = ranks_of(process)
        if pids:
            FAULTS[fault](process=process, rng=rng, out=out)
        while (code := process.wait()) not in (0, *BAD) and starts < 6:
            wait_until(lambda: not any(map(runs, pids)), "the end of the ranks of a launcher that was killed")
            process, starts = start(), starts + 1
        if starts > 1 or code != 0 or "was not saved" in process.output:
            break
    else:
        pytest.fail("the fault has never struck")
    assert code == 0, f"{starts} starts: {process.output[-2000:]}"
    assert_same_run(undisturbed, out, STEPS)
