"""conftest.py: fixtures that only tests of ranks use."""

from slurm import slurm
from torchrun import torchrun

__all__ = ["slurm", "torchrun"]
