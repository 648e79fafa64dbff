"""test_libraries.py: what cuDNN can do without a GPU: cudnn_plans.cpp with a stand-in for the driver."""

import os
import re

import pytest
from harness import RELEASE, run
from test_programs import build


@pytest.mark.slow  # it needs the CUDA build
def test_cudnn_without_a_gpu(run_cases):
    if not re.search(r"\| cuDNN \d", run("make found").out):
        pytest.skip("there is no cuDNN (CUDNN_HOME=... names it)")
    mock = RELEASE / "cuda/mock"
    build("build/release/cuda/cudnn_plans", "build/release/cuda/mock/libcuda.so.1")
    run_cases(RELEASE / "cuda/cudnn_plans", env={"LD_LIBRARY_PATH": f"{mock}:{os.environ.get('LD_LIBRARY_PATH', '')}"})
