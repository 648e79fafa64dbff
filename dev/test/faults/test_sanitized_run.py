"""test_sanitized_run.py: runs of FAULT_STEPS steps [1000] under sanitizers, without a report. Builds the programs."""

import os
import re

import pytest
from harness import Launch, Run, no_mpi_because, run, train_command
from test_programs import build_for, needs_clang, needs_x86

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]
STEPS = int(os.environ.get("FAULT_STEPS", "1000"))
OPTIONS = f"--steps {STEPS} --val-every 100 --val-tokens 64 --sample-every 200 --sample-tokens 8 " \
          "--checkpoint-every 20 --keep 2 --checkpoint-async on --check-replicas 20 --timeout 0"


def assert_clean(program, *options, data, out, env):
    command = train_command(OPTIONS, *options, by=Launch(program), data=data, out=out)
    result = run(command, env={"OMP_NUM_THREADS": 1, **env}, limit=7000)
    assert not re.search("ERROR: |WARNING: |runtime error", result.out + result.err), result
    assert len(Run(out).losses()) == STEPS


# Leaks are reported for the single process only. In the ranks Open MPI, which is not instrumented, leaks memory of
# plugins that it has unloaded, whose names are then unknown; test_constant_memory.py shows that the ranks' memory does
# not grow.
@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 0), (2, 2)])
def test_address_and_undefined_behavior(data, tmp_path, ranks, zero):
    if ranks > 1 and no_mpi_because():
        pytest.skip(no_mpi_because())
    program = build_for("address,undefined", "train_gpt2") / "train_gpt2"
    env = {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1", "ASAN_OPTIONS": f"detect_leaks={int(ranks == 1)}"}
    assert_clean(program, f"--ranks {ranks} --zero {zero}", data=data, out=tmp_path / "run", env=env)


# Two emulated GPUs. One OpenMP thread: clang's OpenMP runtime is not instrumented, and would be reported. With --zero 1
# a thread of each rank sends its part of every checkpoint.
@needs_x86
@needs_clang
@pytest.mark.parametrize("zero", [0, 1])
def test_thread(data, tmp_path, zero):
    program = build_for("thread", "emulator/train_gpt2cu") / "emulator/train_gpt2cu"
    options = f"--ranks 2 --zero {zero} --layers 1 --heads 1 --vocab-size 384 --micro-batch 1 --global-batch 32 " \
              "--precision fp32 --autotune off"
    suppressions = tmp_path / "suppressions"
    suppressions.write_text("race:nvtxRange\n")  # the first calls of two threads race in NVIDIA's header
    assert_clean(program, options, data=data, out=tmp_path / "run",
                 env={"SIMT_DEVICES": 2, "TSAN_OPTIONS": f"halt_on_error=1:suppressions={suppressions}"})
