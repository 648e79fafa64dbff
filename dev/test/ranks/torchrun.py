"""torchrun.py: how the tests start ranks by PyTorch's torchrun."""

import importlib.util
import sys

import pytest
from harness import words

# -r and -t are given, because version 1.13 cannot parse their default values under Python 3.11.
TORCHRUN = words([sys.executable], "-m torch.distributed.run -r 9:1 -t 9:1 --monitor_interval 0.1 --no_python")
# For one host: torchrun listens on any free port. These options replace --standalone, which in version 1.13 always
# listens on port 29400: a second run would join the store of the first run, and fail when the first run ends.
ONE_HOST = words("--nnodes 1 --rdzv_backend c10d --rdzv_endpoint localhost:0 --rdzv_id one")


@pytest.fixture(scope="session")
def torchrun():
    """The words of a torchrun on one host."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torchrun (ALL=1 ./scripts/test.sh installs it: apt-get install python3-torch)")
    return TORCHRUN + ONE_HOST
