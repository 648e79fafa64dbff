"""test_libraries.py: what cuDNN and NCCL can do without a GPU: cudnn_plans.cpp with a stand-in for the driver, and
../ranks/nccl_id.cpp."""

import os
import re

import pytest
from harness import RELEASE, run
from test_programs import build


@pytest.mark.slow  # it needs the CUDA build
@pytest.mark.parametrize("library, program", [("cuDNN", "cudnn_plans"), ("NCCL", "nccl_id")])
def test_library_without_a_gpu(run_cases, library, program):
    if not re.search(rf"\| {library} \d", run("make found").out):
        pytest.skip(f"there is no {library} ({library.upper()}_HOME=... names it)")
    mock = RELEASE / "cuda/mock"
    build(f"build/release/cuda/{program}", "build/release/cuda/mock/libcuda.so.1")
    run_cases(RELEASE / "cuda" / program, env={"LD_LIBRARY_PATH": f"{mock}:{os.environ.get('LD_LIBRARY_PATH', '')}"})
