"""test_cpu_isa.py: CPU_ISA as docs/cpu.md describes it, the number of threads and their cores, and peak and MFU in
log.jsonl."""

import os
import platform
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness import PROGRAM, ROOT, Run, execute, needs_isa, refused, run, train_command

MODEL = "--quiet=0 --layers 1 --channels 128 --seq-len 64 --micro-batch 8 --global-batch 0 --steps 2"
VALUES = re.findall(r"^\| `([a-z0-9]+)` \|", (ROOT / "docs/cpu.md").read_text(), re.MULTILINE)


def test_the_documentation_has_the_values_that_the_message_about_an_unknown_one_lists():
    error = refused(2, "CPU_ISA=unknown is not known: ", PROGRAM, "plan", env={"CPU_ISA": "unknown"}).errors[0]
    known = re.split(", | or ", error.partition(" is not known: ")[2])
    assert known[0] == "base" and set(known) <= set(VALUES)


@pytest.mark.parametrize("removed", ["plain", "neon"])
def test_a_removed_instruction_set_is_refused_with_its_new_name(removed):
    refused(2, f"CPU_ISA={removed} has another name now: use CPU_ISA=base", PROGRAM, "plan", env={"CPU_ISA": removed})


@pytest.mark.isa
@pytest.mark.parametrize("isa", VALUES)
def test_training_uses_an_instruction_set_that_the_machine_has_and_refuses_others(isa, tmp_path, data):
    offered = execute(PROGRAM, "plan --layers 1 --heads 1 --channels 16", env={"CPU_ISA": isa})
    if "is not known" in offered.err:
        pytest.skip(f"{isa} is of another architecture")
    if offered.code != 0:
        refused(2, f"CPU_ISA={isa}, but this machine offers", train_command(MODEL, out=tmp_path / "run", data=data),
                env={"CPU_ISA": isa})
        assert not (tmp_path / "run").exists()
        pytest.skip(offered.err.strip().removeprefix("error: "))
    faster = re.search("^precision +(fp32|bf16)", offered.out, re.MULTILINE)[1]
    cpu = Path("/proc/cpuinfo").read_text()
    fast_pairs = "AuthenticAMD" in cpu or not re.search(r"\bamx_bf16\b|\bavx512_fp16\b", cpu)
    assert faster == ("bf16" if isa == "amx" or isa == "avx512bf16" and fast_pairs else "fp32")
    for precision in ("fp32", "bf16"):
        out = Run(tmp_path / precision)
        command = train_command(MODEL, "--precision", precision, out=out, data=data, val=False)
        printed = run(command, env={"CPU_ISA": isa, "OMP_NUM_THREADS": 2, "OMP_STACKSIZE": "64K"}).out
        first = out.lines("run")[0]
        assert (first["cpu_isa"], first["precision"], first["threads"]) == (isa, precision, 2)
        peak = f"{first['peak_flops'] / 1e12:.3g} TFLOP/s in {precision}, measured at start"
        assert f" 2 threads, {isa}; peak {peak}\n" in printed
        for step in out.lines("step"):
            now = step.get("peak_flops", first["peak_flops"])
            mfu = step["tokens_per_s"] * first["model"]["flops_per_token"] / now
            assert step["mfu"] == pytest.approx(mfu, rel=1 / step["tokens_per_s"], abs=1e-4)  # both are rounded
        # Without bf16 instructions operands are widened to fp32.
        slower = re.search("^precision .*--precision fp32 is faster", printed, re.MULTILINE)
        assert bool(slower) == (precision == "bf16" and faster == "fp32")


# Starts a program whose arch_prctl(ARCH_REQ_XCOMP_PERM) fails with EPERM, by a seccomp filter.
WITHOUT_AMX = """
import ctypes, os, struct, sys
rules = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (6, 0, 0, 0x50001),
         (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, struct.pack("NP", len(rules), ctypes.addressof(code))) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(PROGRAM.name == "train_gpt2_amx", reason="AMX in plain C++ needs no kernel")
def test_a_kernel_that_refuses_amx_is_reported_and_another_set_runs():
    needs_isa("amx")
    command = [sys.executable, "-c", WITHOUT_AMX, PROGRAM, "plan", "--layers", 1, "--heads", 1, "--channels", 16]
    refusal = "; the kernel refuses AMX, which Linux has since 5.16: Operation not permitted"
    out = run(command, env={"CPU_ISA": None}).out
    assert re.search(f"^device +.*, avx512{refusal}", out, re.MULTILINE)
    refused(2, f"this machine offers avx512bf16 at most{refusal}", command, env={"CPU_ISA": "amx"})


def spin_count(**settings):
    """Returns for how many turns idle threads spin, as libgomp prints it; None if it does not."""
    env = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None, "OMP_DISPLAY_ENV": "verbose", **settings}
    printed = run(PROGRAM, "--version", env=env).err
    found = re.findall(r"^ *(?:\[host\] )?GOMP_SPINCOUNT = '([0-9]*)'", printed, re.MULTILINE)
    return int(found[-1]) if found else None


def test_idle_threads_spin_briefly_unless_the_user_sets_how_long():
    if spin_count(GOMP_SPINCOUNT=7) is None or " U GOMP_parallel" in run("nm -D", PROGRAM).out:
        pytest.skip("this build's OpenMP is not GCC's, or is not linked statically")
    assert 0 < spin_count(KMP_BLOCKTIME=1) == spin_count() < 100000  # a setting of another runtime
    assert spin_count(GOMP_SPINCOUNT=7) == 7
    assert spin_count(OMP_WAIT_POLICY="passive") == 0


def test_the_program_has_one_openmp_runtime():
    libraries = re.findall(r"^\s*lib(?:gomp|omp|iomp5)\b", run("ldd", PROGRAM).out, re.MULTILINE)
    inside = re.findall(r" T (?:GOMP_parallel|__kmpc_fork_call)$", run("nm", PROGRAM).out, re.MULTILINE)
    assert len(libraries) + len(inside) == 1


# Prints the cores of each thread as /proc has them.
PLAIN = r"""
#include <stdio.h>
int main() {
#pragma omp parallel
#pragma omp critical
    for (FILE* f = fopen("/proc/thread-self/status", "r"); f;) {
        char line[4096];
        if (!fgets(line, sizeof line, f)) break;
        fputs(line, stdout);
    }
}
"""


def masks(status):
    return Counter(re.findall(r"^Cpus_allowed_list:\t(.*)$", status, re.MULTILINE))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    source = tmp_path_factory.mktemp("plain") / "plain.c"
    source.write_text(PLAIN)
    if "GOMP_parallel" not in run("nm", PROGRAM).out:
        pytest.skip("this build's OpenMP is not GCC's")
    run("gcc -fopenmp", source, "-o", source.with_suffix(""))
    return source.with_suffix("")


@pytest.mark.parametrize("settings", [
    "OMP_PROC_BIND=true", "OMP_PROC_BIND=close", "OMP_PROC_BIND=spread", "OMP_PROC_BIND=false", "OMP_PROC_BIND=master",
    "OMP_PLACES=cores", "OMP_PLACES=threads", "OMP_PLACES={1},{0}", "GOMP_CPU_AFFINITY=0-1", "GOMP_CPU_AFFINITY=1",
    "OMP_PROC_BIND=close OMP_NUM_THREADS=3", "OMP_PROC_BIND=spread OMP_THREAD_LIMIT=1"])
def test_threads_and_their_cores_are_those_of_a_plain_openmp_program(settings, plain, train_in_background, data,
                                                                     tmp_path):
    env = {"OMP_NUM_THREADS": None, **dict(setting.split("=") for setting in settings.split())}
    expected = masks(run(plain, env=env).out)
    process = train_in_background("--steps 1000000", out=tmp_path, data=data, val=False, env=env)
    process.wait_for_step(tmp_path, 1)
    status = [(task / "status").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    assert Run(tmp_path).lines("run")[0]["threads"] == expected.total()
    if "OMP_THREAD_LIMIT" in env:
        printed = run(PROGRAM, "plan --model d12", env=env).out
        assert re.search("^threads +1: OpenMP.s variables$", printed, re.MULTILINE)
    assert expected <= masks("".join(status))


@pytest.fixture
def quota(tmp_path):
    """quota(CORES): the start of a command whose control groups, of both versions, have this CPU quota."""

    def start(cores):
        groups, us = tmp_path / "groups", int(cores * 100000)
        for name, text in (("cpu.max", f"{us} 100000"), ("cpu/cpu.cfs_quota_us", us),
                           ("cpu/cpu.cfs_period_us", 100000)):
            (groups / name).parent.mkdir(parents=True, exist_ok=True)
            (groups / name).write_text(f"{text}\n")
        command = ["unshare", "-rm", "sh", "-c", f'mount --bind {groups} /sys/fs/cgroup && exec "$@"', "sh"]
        if execute(command, "true").code != 0:
            pytest.skip("unshare cannot mount here")
        return command

    return start


def test_a_cpu_quota_is_shared_by_ranks_and_the_user_overrides_it(quota, data, tmp_path):
    cores = os.cpu_count()
    if not 2 <= cores == len(os.sched_getaffinity(0)):
        pytest.skip("needs two cores, and all of the machine's")

    def threads(granted, options="", **env):
        """Returns the row `threads` and the number in log.jsonl."""
        given = ["--steps 2 --quiet=0 --checkpoint-every 0", options]
        command = train_command(*given, out=tmp_path / "run", data=data, val=False)
        printed = run(quota(granted), command, env={"OMP_NUM_THREADS": None, **env}).out
        row = re.search("^threads +(.*)$", printed, re.MULTILINE)[1]
        return [row, Run(tmp_path / "run").lines("run")[0]["threads"]]

    assert threads(0.6) == [f"1: a CPU quota of 0.6 of {cores} cores", 1]
    assert threads(cores) == [f"{cores}: {cores} cores", cores]
    for ignored in ("", "abc", "0", "2,x"):
        assert threads(0.6, OMP_NUM_THREADS=ignored) == threads(0.6)
    for count in (2, " 2 , 1"):
        assert threads(0.6, OMP_NUM_THREADS=count) == ["2: OMP_NUM_THREADS", 2]
    half = cores // 2
    shared = [f"{half}: {cores} cores, shared by 2 ranks", half]
    assert threads(cores, "--ranks 2", OMP_NUM_THREADS="") == shared
    for binding in ("OMP_PROC_BIND=true", "OMP_PLACES=cores", f"GOMP_CPU_AFFINITY=0-{cores - 1}"):
        assert threads(cores, "--ranks 2", **dict([binding.split("=")])) == shared


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other architectures have one instruction set")
@pytest.mark.parametrize("name", [source.stem for source in sorted((ROOT / "llmc/cpu").glob("*.cpp"))
                                  if re.search("^// x86_64: ", source.read_text(), re.MULTILINE)])
def test_an_instruction_sets_object_has_no_copy_of_a_function_of_others(name):
    """A weak symbol may stand for all copies in the program, and would run where the CPU lacks the instructions."""
    source, item = f"llmc/cpu/{name}.cpp", f"llmc/cpu/{name}.o"
    built = Path(PROGRAM).resolve().parent / item
    symbols = execute("nm", "-C", built).out
    assert f"cpu::{name}::" in symbols
    weak = [line for line in symbols.splitlines() if re.search(r" [WVu] (?!DW\.ref\.)", line)]
    assert [line for line in weak if f"cpu::{name}::" not in line] == []
    command = execute("make", "-C", ROOT, "-n", "V=1", "DEBUG=1", "-W", source, f"build/release-debug/{item}").out
    assert " -O1 " in command and " -O0 " not in command  # -O0 has copies
