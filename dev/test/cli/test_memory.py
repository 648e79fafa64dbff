"""test_memory.py: the memory that `plan` prints is the peak of a run, and too little of it, under ulimit -v or in a
control group, ends a command with one sentence."""

import os
import re
from pathlib import Path

import pytest
from harness import PROGRAM, execute, no_mpi_because, refused, run, train, train_command

# The embedding makes this model so large that the memory of the program and its libraries, 20 MB, hardly counts.
LARGE = "--heads 12 --channels 768 --vocab-size 50257 --micro-batch 1 --global-batch 0 --steps 1 --warmup 0"
AUTO = "--precision fp32 --layers 8 --heads 4 --channels 128 --seq-len 1024 --global-batch 0 --steps 1 --warmup 0"


def limited(kib):
    """The words that run a command with this much address space."""
    return ["bash", "-c", 'ulimit -v "$0" && exec "$@"', kib]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_peak_of_a_run_is_that_of_its_plan(precision, start, data):
    program, *options = train_command(LARGE, "--precision", precision, out="", data=data, val=False)
    plan = run(program, "plan", options).out
    number, unit = re.search(r"^memory\s+([0-9.]+) (MiB|GiB) of .* available: ", plan, re.MULTILINE).groups()
    mib = float(number) * {"MiB": 1, "GiB": 1024}[unit]
    process = start(program, options)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, process.output
    assert 0.95 * mib <= usage.ru_maxrss / 1024 <= 1.05 * mib


def test_micro_batch_auto_fits_the_memory(data):
    def command(*options):
        return train_command(AUTO, "--micro-batch auto", *options, out="", data=data, val=False)

    run(limited(600000), command())
    refused(2, "--micro-batch auto: one sequence of 1024 tokens needs", limited(600000),
            command("--layers 12 --heads 12 --channels 768"))


def test_an_error_of_the_cpp_library_names_the_limit(data):
    errors = []
    for kib in range(30000, 75000, 5000):
        result = execute(limited(kib), train_command(AUTO, "--seq-len 64 --micro-batch 1", out="", data=data))
        if result.code == 0 or re.search("^libgomp: |error while loading", result.err, re.MULTILINE):
            continue  # how much address space the program and its libraries need for a start differs
        limit = rf"under a limit of {kib / 1024:.1f} MiB \(ulimit -v\)"
        assert re.match(rf"error: no (memory .* {limit}|(memory|thread) .*\(check .*ulimit -v\))", result.err), result
        assert result.code == 1
        errors += result.errors
    assert errors


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory, data):
    """The command that evaluates a small model."""
    model = train("--heads 8 --channels 512 --seq-len 64 --global-batch 0 --steps 1 --warmup 0 --val-every 0",
                  out=tmp_path_factory.mktemp("eval") / "run", data=data)
    return [PROGRAM, "eval", "--val-data", str(data / "val_*.bin"), "--init", str(model), "--micro-batch"]


def test_eval_refuses_a_micro_batch_beyond_memory_and_the_one_that_it_advises_fits(evaluate):
    result = refused(2, "--micro-batch 1000000 with --seq-len 64 needs ", limited(600000), evaluate, 1000000)
    advised = re.search(r" needs [0-9,.]* GiB of memory, and [0-9.]* GiB are free; try --micro-batch ([0-9]*)$",
                        result.errors[0])[1]
    run(limited(600000), evaluate, int(0.95 * int(advised)))


def test_ranks_on_one_host_share_its_memory(evaluate):
    def gib_free(text, *options):
        error = refused(2, text, evaluate, 1048576, *options).errors[0]
        return float(re.search(r" and ([0-9.]+) GiB are free", error)[1])

    if reason := no_mpi_because():
        pytest.skip(reason)
    assert 0 < gib_free("error: rank 0 on ", "--ranks 2") < 0.75 * gib_free("needs ")


# ---- control groups


def memory_group():
    """Returns the folder of this process's control group that limits memory, and the file of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            return Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup", path.lstrip("/")), "memory.max"


@pytest.fixture
def grouped():
    """grouped(MIB) returns the words that run a command in a control group with this limit of memory."""
    parent, limit = memory_group()
    group = parent / f"train_gpt2_test_{os.getpid()}"

    def with_limit(mib):
        (group / limit).write_text(str(mib << 20))
        return ["bash", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', group]

    try:
        group.mkdir()
        possible = execute(with_limit(1024), "true").code == 0
    except OSError:
        possible = False
    if possible:
        yield with_limit
    if group.exists():
        group.rmdir()
    if not possible:
        pytest.skip("no control group with a limit of memory can be made here")


def test_a_control_group_with_too_little_memory_refuses_a_run_and_its_resume(grouped, tmp_path, data):
    def checkpoints():
        return {path: path.read_bytes() for path in Path(out).glob("step_*/*")}

    options, large = "--channels 256 --checkpoint-every 4 --keep 0", tmp_path / "large"
    out = train(options, "--steps 4", out=tmp_path / "run", data=data)
    error = refused(1, "no memory for ", grouped(300), train_command(LARGE, out=large, data=data)).errors[0]
    assert re.match(r"error: no memory for [^:]*: [0-9,]* bytes asked, [0-9.]* [MG]iB available", error)
    assert not list(large.glob("step_*"))
    run(grouped(300), train_command(options, "--steps 8 --resume", out=out, data=data))
    before = checkpoints()
    assert {path.parent.name for path in before} == {"step_000004", "step_000008"}
    refused(1, "no memory for ", grouped(64), train_command(options, "--steps 12 --resume", out=out, data=data))
    assert checkpoints() == before
