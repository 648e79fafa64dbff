"""test_programs.py: the test programs in C++, each as one test that reports its cases.

Default: unit tests, the CUDA backend in the emulator and on the GPU if there is one, and the whole model against its
reference. `sanitizers`: the same by clang with AddressSanitizer, ThreadSanitizer and MemorySanitizer, kernels also with
a GPU's arithmetic and other orders of blocks. `slow`: other GPUs in the emulator, the fuzzers on their committed
inputs, all kernels through nvcc, and what depends on the instruction set as on other CPUs.
"""

import fcntl
import functools
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import mutants
import pytest
from harness import RELEASE, ROOT, execute, needs_isa

HERE = Path(__file__).parent
UNIT = sorted(path.stem for path in HERE.glob("unit/test_*.cpp"))
REPLAYS = sorted(path.stem.replace("fuzz_", "replay_") for path in HERE.glob("../fuzz/fuzz_*.cpp"))
GPU_TESTS = sorted(path.stem for path in HERE.glob("gpu/test_*.cu"))
SIMT = sorted(path.stem for path in HERE.glob("../simt/test/test_*.cu"))  # tests of the emulator itself
KERNELS = GPU_TESTS + SIMT
SHOWN_STORES = [*SIMT, "test_gpu_attention_wgmma", "test_gpu_matmul_wgmma"]  # SANITIZE=stores
EMULATED = [f"emulator/{name}" for name in [*KERNELS, "test_gpt2cu"]]
# Tests with the CPU's matrix instructions in plain C++ (support/emulated_units.h), for machines with AVX-512.
UNITS = ["units/test_gpt2", "units/test_matmul", "units/test_attention", "units/test_head"]
TOO_SLOW_SANITIZED = ["test_checkpoint_faults", "test_matmul", "test_tokenize_refused"]
# With kernels that use scratch or shared memory.
MEMORY_TESTS = [*SIMT, "test_gpu_attention", "test_gpu_layernorm", "test_gpu_embedding"]

has_clang = shutil.which("clang++") is not None
cpu_flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
has_avx512 = "avx512bw" in cpu_flags
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator switches stacks as x86-64 does")
needs_avx512 = pytest.mark.skipif(not has_avx512, reason="this machine has no AVX-512")
needs_clang = pytest.mark.skipif(not has_clang, reason="there is no clang++ (apt-get install clang)")
sanitizers = pytest.mark.sanitizers
slow = pytest.mark.slow


@functools.cache
def build(*arguments):
    """Runs make, which must succeed, once in this process; other processes wait, and then find everything built."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/make.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = execute(f"make -j{os.cpu_count()} --keep-going", list(arguments), limit=3600)
    assert made.code == 0, (made.out + made.err)[-4000:]


def build_for(sanitizer, *targets, math=""):
    """Builds programs by clang with a sanitizer; returns the folder of the build. By g++ they take longer, those with
    ThreadSanitizer many minutes."""
    folder = "build/" + sanitizer.replace(",", "+") + "-clang++" + (math and f"-{math}math")
    build("CXX=clang++", f"SANITIZE={sanitizer}", f"MATH={math}", *(f"{folder}/{target}" for target in targets))
    return ROOT / folder


# ---- with sanitizers

ADDRESS = [*(name for name in UNIT if name not in TOO_SLOW_SANITIZED), *REPLAYS]
ADDRESS_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
                   "LSAN_OPTIONS": f"suppressions={HERE}/support/leaks.supp:print_suppressions=0",
                   "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}


# train_gpt2.o is a target because g++ accepts some sources that clang does not.
@sanitizers
@needs_clang
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [*ADDRESS, *(pytest.param(name, marks=needs_avx512) for name in UNITS)])
def test_address_and_undefined(name, run_cases):
    folder = build_for("address,undefined", "train_gpt2.o", *ADDRESS, *(UNITS if has_avx512 else []))
    run_cases(folder / name, *(["--test-suite-exclude=large"] if name in UNITS[1:] else []), env=ADDRESS_OPTIONS)


# The build fuses multiplications and additions, and has inexact instructions, as a GPU (dev/simt/emulator.h). Tests of
# the emulator itself set the order and the arithmetic themselves.
@sanitizers
@needs_x86
@needs_clang
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [*KERNELS, "test_gpt2cu"])
def test_address_and_undefined_with_a_gpus_arithmetic_in_reverse_order(name, run_cases):
    folder = build_for("address,undefined", *KERNELS, "test_gpt2cu", math="gpu")
    order = {} if name in SIMT else {"SIMT_ORDER": "reverse", "SIMT_MATH": "gpu"}
    run_cases(folder / name, env={**ADDRESS_OPTIONS, **order})


# One OpenMP thread, because clang's OpenMP runtime is not instrumented. Tests of the emulator itself set the order
# themselves. MemorySanitizer finds reads of memory that was never written. "stores" is no sanitizer: it shows the
# emulator each access of the kernels.
@sanitizers
@needs_x86
@needs_clang
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("sanitizer, name", sorted([*(("thread", name) for name in KERNELS),
                                                    *(("memory", name) for name in MEMORY_TESTS),
                                                    *(("stores", name) for name in SHOWN_STORES)], key=lambda x: x[1]))
def test_kernels_under_thread_and_memory_sanitizer(sanitizer, name, run_cases):
    names = {"thread": KERNELS, "memory": MEMORY_TESTS, "stores": SHOWN_STORES}[sanitizer]
    folder = build_for(sanitizer, *(f"emulator/{kernel}" for kernel in names))
    order = "random" if sanitizer == "thread" and name not in SIMT else None
    run_cases(folder / "emulator" / name, env={"OMP_NUM_THREADS": 1, "SIMT_ORDER": order})


# ---- the release build


@pytest.mark.parametrize("name", UNIT)
def test_unit(name, run_cases):
    run_cases(RELEASE / name)


@needs_avx512
@pytest.mark.parametrize("name", UNITS)
def test_matrix_instructions_in_plain_cpp(name, run_cases):
    run_cases(RELEASE / name, *(["--test-suite-exclude=large"] if name in UNITS[1:] else []), env={"CPU_ISA": "amx"})


def instruction_sets():
    """Returns the values of CPU_ISA. The error for an unknown value lists all."""
    if not (RELEASE / "test_gpt2").exists():
        return ["base"]
    refused = execute(RELEASE / "test_gpt2", env={"CPU_ISA": "unknown"}).err
    return re.split(", | or ", re.search("CPU_ISA=unknown is not known: (.*)", refused).group(1))


@pytest.mark.parametrize("isa", instruction_sets())
def test_whole_model(isa, run_cases):
    needs_isa(isa, RELEASE / "train_gpt2")
    run_cases(RELEASE / "test_gpt2", env={"CPU_ISA": isa})


# AMX runs in plain C++ on machines with AVX-512, but not where all tests have run it already.
@slow
@needs_x86
@pytest.mark.parametrize("isa", [
    "base", "avx2", pytest.param("amx", marks=pytest.mark.skipif("amx_bf16" in cpu_flags, reason="this CPU has AMX"))])
def test_what_depends_on_the_cpu_holds_on_others(isa, run_cases):
    program = RELEASE / ("train_gpt2_amx" if isa == "amx" else "train_gpt2")
    needs_isa(isa, program)
    run_cases([sys.executable, "-m", "pytest", "-m", "isa and not slow", HERE],
              env={"PROGRAM": program, **({} if isa == "amx" else {"CPU_ISA": isa})})


@needs_x86
@pytest.mark.parametrize("name", EMULATED)
def test_emulated(name, run_cases):
    run_cases(RELEASE / name)


# Registers and shared memory of a kernel, and the blocks that a GPU runs at once, differ between architectures. The
# default is sm_90. sm_89 has the limits of sm_120, and sm_100 those of sm_90. FP8 needs sm_89.
@slow
@needs_x86
@pytest.mark.parametrize("architecture, name", [
    (architecture, f"test_gpu_{name}") for architecture in [80, 120]
    for name in ["attention", "embedding", "fp8", "head", "layernorm", "ops"]
    if (architecture, name) != (80, "fp8")])
def test_emulated_on_other_gpus(architecture, name, run_cases):
    run_cases(RELEASE / "emulator" / name, env={"SIMT_ARCH": architecture})


@pytest.mark.gpu
def test_on_gpu(run_cases):
    if not shutil.which("nvidia-smi") or execute("nvidia-smi -L").code != 0:
        pytest.skip("no GPU (nvidia-smi lists none)")
    names = [f"cuda/{name}" for name in [*GPU_TESTS, "test_gpt2cu"]]
    build(*(f"build/release/{name}" for name in names))
    for name in names:
        run_cases(RELEASE / name)


@slow
@pytest.mark.parametrize("name", REPLAYS)
def test_committed_inputs_of_the_fuzzer(name, run_cases):
    run_cases(RELEASE / name)


@slow
def test_kernels_compile_within_their_registers(run_cases):
    run_cases(ROOT / "dev/check_cuda.sh", 80, "90a")  # without arguments it takes all architectures


# FUZZ_SECONDS: for each fuzzer. Inputs that it finds are where the next run begins.
@pytest.mark.faults
@needs_clang
@pytest.mark.parametrize("name", [name.replace("replay_", "fuzz_") for name in REPLAYS])
def test_fuzzer(name, run_cases):
    build("fuzz")
    found = ROOT / f"build/fuzz/corpus_{name}"
    found.mkdir(exist_ok=True)
    corpus = ROOT / "dev/fuzz/corpus" / name.removeprefix("fuzz_")
    run_cases(ROOT / f"build/fuzz/{name}", found, corpus, f"-max_total_time={os.environ.get('FUZZ_SECONDS', 20)}",
              "-max_len=4096", "-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=256",
              f"-artifact_prefix={ROOT}/build/fuzz/")


# The CPU program for arm64. qemu-user is 10 to 50 times slower than the machine.
ARM = ROOT / "build/release-nompi-aarch64-linux-gnu-g++"
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]


@pytest.mark.arm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*UNIT, "test_gpt2"])
def test_arm64(name, run_cases):
    if not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"):
        pytest.skip("no cross compiler or qemu (apt-get install g++-aarch64-linux-gnu qemu-user)")
    build("CXX=aarch64-linux-gnu-g++", "tests")
    run_cases(*QEMU, ARM / name, limit=3600)


def test_make_names_the_package_of_a_missing_header(tmp_path):
    compiler = tmp_path / "clang++-17"  # Debian's clang has omp.h in a package of the same version
    compiler.write_text('#!/bin/sh\ntext=$(cat)\n! expr "$text" : ".*<omp.h>" >/dev/null && echo "$text" | g++ "$@"\n')
    compiler.chmod(0o755)
    made = execute("make found", [f"CXX={compiler}"])
    assert made.code == 2 and "omp.h not found: apt-get install libomp-17-dev " in made.err


def test_each_fault_of_mutants_is_possible():
    assert mutants.stale() == []
