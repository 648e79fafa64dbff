"""test_golden.py: short runs have the bits that golden.txt records."""

from harness import ROOT


def test_golden(run_cases):
    run_cases("bash", ROOT / "dev/test/golden.sh")
