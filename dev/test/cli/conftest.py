"""conftest.py: what several tests of the command line share, and their number of threads."""

import shutil

import pytest
from harness import PROGRAM, ROOT, train


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


@pytest.fixture
def tree(tmp_path):
    """A folder with the scripts of data/, the program, and bin/ for stand-ins of other programs."""
    shutil.copytree(ROOT / "data", tmp_path / "tree/data", ignore=lambda folder, names: [
        name for name in names if not name.endswith((".sh", ".py"))])
    (tmp_path / "tree/train_gpt2").symlink_to(PROGRAM)
    (tmp_path / "tree/bin").mkdir()
    return tmp_path / "tree"
