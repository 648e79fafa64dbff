"""test_golden.py: short runs have the bits that golden.txt records."""

from harness import ROOT
from test_programs import run_cases


def test_golden(run_cases):
    run_cases("bash", ROOT / "dev/test/golden.sh")
