#!/usr/bin/env bash
# test.sh [PYTEST-ARGUMENT...]: builds the programs and runs the tests in dev/test. `test.sh -k layernorm` runs those
# whose names contain the word; docs/testing.md explains more.
#
# ALL=1 adds the tests that are marked slow, sanitizers or launchers, and installs what they need (clang, Slurm,
# PyTorch; some 500 MB). The marks hf, arm and faults are for tests that run by name only: test.sh -m faults.
# CPU_ISA=avx2 tests as on a CPU that has no more than AVX2.
#
# The last line is "N passed, N failed, N skipped", in test cases. A check that cannot run here is skipped, and the
# lines above name it with the reason. Only failures decide the exit code.
set -euo pipefail
cd "$(dirname "$0")/.."

./scripts/install.sh python3-pytest python3-pytest-xdist python3-pytest-timeout zstd xz-utils bzip2
left_out="slow or sanitizers or launchers or faults or hf or arm" workers=auto
if [ "${ALL:-0}" != 0 ]; then
    left_out="faults or hf or arm"
    workers=$(($(nproc) + 1))  # tests of launchers wait more than they compute
    ./scripts/install.sh clang libclang-rt-dev libomp-dev slurm-wlm munge python3-torch ||
        echo "test.sh: the tests that need these are skipped"
fi
python=python3
if ! $python -c "import pytest, xdist, pytest_timeout" 2>/dev/null; then python=/usr/bin/python3; fi

programs=(all tests build/release/bench_ops)
if [ "$(uname -m)" = x86_64 ]; then  # the emulator of the CUDA backend switches stacks in x86-64's assembly
    programs+=(emulator build/release/emulator/{,nonccl/,alone/}train_gpt2cu)
fi
if ! make -j"$(nproc)" "${programs[@]}"; then
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
tests=(dev/test)  # given by name, so that its conftest.py prints the last line with pytest 7.2 too
for word in "$@"; do if [[ $word == dev/test/* ]]; then tests=(); fi; done
exec $python -m pytest -n "$workers" -m "not ($left_out)" "$@" ${tests[@]+"${tests[@]}"}
