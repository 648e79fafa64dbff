"""test_constant_memory.py: the memory of two ranks does not grow, with a save in the background every 50 steps."""

import re
from pathlib import Path

import pytest
from harness import Run, close, no_mpi_because, ranks_of, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200),
              pytest.mark.skipif(bool(no_mpi_because()), reason=no_mpi_because())]
OPTIONS = "--ranks 2 --micro-batch 1 --global-batch 32 --steps 1000000 --schedule constant --checkpoint-every 50 " \
          "--keep 2 --checkpoint-async on --check-replicas 100"


def resident(pid):
    return int(re.search("^VmRSS: *([0-9]*)", Path(f"/proc/{pid}/status").read_text().replace("\t", ""), re.M).group(1))


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_need_no_more_memory_after_10000_steps_than_after_1000(data, tmp_path, train_in_background, zero):
    out = Run(tmp_path / "run")
    process = train_in_background(OPTIONS, "--zero", zero, data=data, val=False, out=out,
                                  env={"OMP_NUM_THREADS": 1})
    measured = []
    for step in (1000, 10000):
        wait_until(lambda: out.last_step() >= step or not process.lives(), f"step {step}", limit=7000)
        measured.append({pid: resident(pid) for pid in ranks_of(process)})
    before, after = measured
    assert len(before) == 2 and before.keys() == after.keys()
    assert all(close(after[pid], before[pid], 0.01) for pid in before), f"KiB: {before}, then {after}"
