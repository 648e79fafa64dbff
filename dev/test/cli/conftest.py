"""conftest.py: the run that many tests of the command line read, and their number of threads."""

import pytest
from harness import train


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Makes one thread the default: several would wait for each other beside other programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory, data):
    """A finished run of 30 steps with checkpoints of steps 15 and 30. Tests read it, and change copies only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return train("--precision fp32 --steps 30 --val-every 10 --checkpoint-every 15", out=out, data=data)
