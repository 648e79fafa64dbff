"""harness.py: what the tests that start the program share: commands, runs and their logs, and waits for events.

A command is given in parts: a string is cut into words as a shell does, a list is words already, and a path or a
number is one word. No test asserts a time: it waits for an event (a line of a log, the end of a process), and LIMIT
seconds only end a test that hangs.
"""

import functools
import json
import math
import os
import shlex
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "build/release"
PROGRAM = ROOT / os.environ.get("PROGRAM", RELEASE / "train_gpt2")
EMULATED = RELEASE / "emulator/train_gpt2cu"  # the GPU program in the emulator
LIMIT = 240  # seconds after which a command hangs
ISAS = "base avx2 avx512 avx512bf16 amx".split()
# A shell makes a program in the background ignore SIGINT, and the program's children inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]

# Options of a run of about a second. Later options override them.
TINY = "--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --lr 1e-2 --warmup 2 --quiet"

# Lets mpirun start more ranks than cores, also as root, and lets a waiting rank yield its core. The variables OMPI_*
# are for Open MPI 4, PRTE_* for Open MPI 5, whose mpirun is PRRTE's.
MPI_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def words(*parts):
    """Returns the words of a command: a string is cut into words, a list is words, anything else is one word."""
    found = []
    for part in parts:
        found += shlex.split(part) if isinstance(part, str) else map(str, part if isinstance(part, list) else [part])
    return found


def environment(changes=()):
    """Returns the environment of a command; a change to None removes a variable. CPU_ISA around the tests makes this a
    machine that has no more: a test of a better instruction set is skipped."""
    result, most = {**os.environ, "OMP_WAIT_POLICY": "passive"}, os.environ.get("CPU_ISA") or ISAS[-1]
    result.setdefault("OMP_NUM_THREADS", "2")
    for name, value in dict(changes).items():
        if name == "CPU_ISA" and value in ISAS[ISAS.index(most) + 1:]:
            pytest.skip(f"the tests run with CPU_ISA={most} at most, this one with {value}")
        if value is None:
            result.pop(name, None)
        else:
            result[name] = str(value)
    return result


def text_of(data):
    """Returns printed text. The mpirun of Open MPI 5 ends its own messages with a zero byte."""
    return data.decode(errors="replace").replace("\0", "")


class Result:
    """The exit code and the output of a command that has ended."""

    def __init__(self, command, code, out, err):
        self.command, self.code, self.out, self.err = command, code, out, err
        self.errors = [line for line in err.splitlines() if line.startswith("error: ")]

    def __repr__(self):
        return f"{shlex.join(self.command)}: exit code {self.code}\n{self.out[-2000:]}\n{self.err[-2000:]}"


def execute(*command, env=(), cwd=ROOT, limit=LIMIT):
    """Runs a command to its end, whatever its exit code."""
    command = words(*command)
    try:
        done = subprocess.run(command, env=environment(env), cwd=cwd, timeout=limit, capture_output=True,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"{shlex.join(command)} still runs after {limit} s: "
                    f"{text_of(expired.stdout or b'')[-2000:]}{text_of(expired.stderr or b'')[-2000:]}")
    return Result(command, done.returncode, text_of(done.stdout), text_of(done.stderr))


def run(*command, **keywords):
    """Runs a command that must succeed."""
    result = execute(*command, **keywords)
    assert result.code == 0, result
    return result


def refused(code, text, *command, **keywords):
    """Runs a command that must end with this exit code and one line "error: ..." with this text."""
    result = execute(*command, **keywords)
    assert result.code == code, result
    assert len(result.errors) == 1 and text in result.errors[0], result
    return result


def needs_isa(isa, program=PROGRAM):
    """Skips the test if the program or this machine does not have the instruction set."""
    tried = execute(program, "plan --layers 1 --heads 1 --channels 16", env={"CPU_ISA": isa})
    if tried.code != 0:
        pytest.skip(tried.err.strip().removeprefix("error: "))


class Process:
    """A command that runs in the background. The fixture `start` makes it, and kills it when the test ends."""

    def __init__(self, folder, *command, env=(), cwd=ROOT):
        self.command = words(*command)
        self.log = Path(folder) / f"process{time.monotonic_ns()}.log"
        with open(self.log, "wb") as log:
            self.popen = subprocess.Popen(self.command, env=environment(env), cwd=cwd, stdin=subprocess.DEVNULL,
                                          stdout=log, stderr=log, start_new_session=True)
        self.pid = self.popen.pid

    @property
    def output(self):
        return text_of(self.log.read_bytes())

    def lives(self):
        return self.popen.poll() is None

    def signal(self, number):
        os.kill(self.pid, number)

    def wait(self, limit=LIMIT):
        """Waits for the end, and returns the exit code: 128 + N after signal N."""
        try:
            code = self.popen.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{shlex.join(self.command)} still runs after {limit} s: {self.output[-2000:]}")
        return code if code >= 0 else 128 - code

    def wait_for(self, condition, what):
        """Waits until the condition holds; fails if the process ends before."""
        wait_until(lambda: condition() or not self.lives(), what)
        assert condition(), f"{shlex.join(self.command)} ended before {what}: {self.output[-2000:]}"

    def wait_for_step(self, run_folder, step):
        """Waits until the run has logged this step (from 0) or a later one."""
        self.wait_for(lambda: Run(run_folder).last_step() >= step, f"step {step} of {run_folder}")

    def descendants(self):
        """Returns the IDs of all processes that this one has started and that live, in their order."""
        children = {}
        for pid, (state, parent) in processes().items():
            if state != "Z":
                children.setdefault(parent, []).append(pid)
        found, new = [], [self.pid]
        while new:
            new = [child for pid in new for child in sorted(children.get(pid, []))]
            found += new
        return found

    def kill(self):
        for pid in [self.pid, *self.descendants()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.popen.wait()


def processes():
    """Returns {ID: (state, ID of the parent)} of all processes of this machine."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        found[int(folder.name)] = state, int(parent)
    return found


def runs(pid):
    """Returns whether the process exists and is not a zombie."""
    return processes().get(pid, ("Z", 0))[0] != "Z"


def ranks_of(process):
    """Returns the processes of the ranks that `process` (mpirun, train_gpt2 --ranks N) has started, in their order."""
    own = []
    for pid in process.descendants():
        try:
            if Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("train_gpt2"):
                own.append(pid)
        except OSError:
            pass
    return own


def wait_until(condition, what, limit=LIMIT):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"waited {limit} s for {what}"
        time.sleep(0.02)


def read_weights(folder):
    """Returns the shape and the floats of each tensor of model.safetensors."""
    content = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__")
    return {name: (info["shape"], struct.unpack(f"<{math.prod(info['shape'])}f", content[begin:][slice(
        *info["data_offsets"])])) for name, info in header.items()}


class Run:
    """The folder of a run: its log and its checkpoints."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __truediv__(self, name):
        return self.folder / name

    def __fspath__(self):
        return str(self.folder)

    __str__ = __fspath__

    def lines(self, kind=None):
        """Returns the lines of log.jsonl, all or those of one kind. A line that is being written is left out."""
        try:
            text = (self.folder / "log.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if kind is None or line.get("kind") == kind]

    def last_step(self):
        steps = self.lines("step")
        return steps[-1]["step"] if steps else -1

    def by_step(self, kind, field):
        """Returns {step: value}; where a resumed run has repeated a step, the later value."""
        return {line["step"]: line[field] for line in self.lines(kind)}

    def losses(self):
        return self.by_step("step", "loss")

    def val_losses(self):
        return self.by_step("val", "val_loss")

    def val_loss(self):
        """Returns the last validation loss."""
        return self.lines("val")[-1]["val_loss"]

    def results(self):
        """Returns the lines of steps, validations and samples, without what depends on time."""
        kept = ("kind", "step", "loss", "grad_norm", "lr", "val_loss", "text")
        lines = {(line["kind"], line["step"]): {name: line.get(name) for name in kept}
                 for line in self.lines() if line.get("kind") in ("step", "val", "sample")}
        return [lines[key] for key in sorted(lines)]

    def checkpoint(self, step):
        return self.folder / f"step_{step:06d}"

    def latest(self):
        """Returns the name of the newest checkpoint, as step_000004; None if there is none."""
        try:
            return (self.folder / "latest").read_text().strip()
        except FileNotFoundError:
            return None

    def unfinished(self):
        return sorted(path.name for path in self.folder.glob("*.tmp"))


def assert_same_run(a, b, step):
    """Asserts that two runs have the same log, and the same bits of weights and moments at this step."""
    a, b = Run(a), Run(b)
    assert a.results() and a.results() == b.results()
    assert_same_weights(a.checkpoint(step), b.checkpoint(step))


def assert_same_weights(a, b):
    """Asserts that two checkpoints have the same bytes of weights and moments."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), f"{a / name} and {b / name} differ"


def close(a, b, tolerance):
    """Returns whether two positive numbers differ by at most this fraction."""
    return a > 0 and b > 0 and abs(a - b) <= tolerance * b


class Launch:
    """How a program is started: one process, ranks by mpirun, or emulated GPUs."""

    def __init__(self, program=PROGRAM, prefix="", options="", env=()):
        self.program, self.prefix, self.options, self.env = program, prefix, options, dict(env)

    def command(self, *rest):
        """Returns the command that runs the program with these arguments."""
        return words(self.prefix, self.program, *rest, self.options)


ONE = Launch()


@functools.cache
def no_mpi_because():
    """Returns why ranks cannot be started by mpirun here, or nothing."""
    if not shutil.which("mpirun"):
        return "there is no mpirun (apt-get install openmpi-bin)"
    if "Open MPI off" in subprocess.run(["make", "found"], cwd=ROOT, capture_output=True, text=True).stdout:
        return "this build has no Open MPI"
    return ""


def ranks(n):
    """Starts n CPU ranks by mpirun; skips the test where that cannot be."""
    if reason := no_mpi_because():
        pytest.skip(reason)
    return Launch(prefix=f"mpirun --timeout {LIMIT} -np {n}", env=MPI_ENVIRONMENT)


def emulated_gpus(n):
    """Starts one rank for each of n GPUs in the emulator; skips the test where that cannot be."""
    if not EMULATED.exists():
        pytest.skip(f"{EMULATED.relative_to(ROOT)} is not built")
    return Launch(EMULATED, options=f"--ranks {n}" if n > 1 else "", env={"SIMT_DEVICES": n, "OMP_NUM_THREADS": 1})


def make_text(count):
    """Returns random words of a small language."""
    vocabulary = "the a king queen old young saw heard of and to in house river went came".split()
    text, state = [], 1
    for i in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        text.append(vocabulary[(state >> 16) % 16] + (".\n" if i % 12 == 11 else " "))
    return "".join(text)


def make_shards(folder, text, program=PROGRAM, vocab=300):
    """Writes and tokenizes a text; returns the folder of the shards and the tokenizer."""
    folder.with_suffix(".txt").write_text(text)
    run(program, "tokenize", folder.with_suffix(".txt"), "--output", folder, "--quiet --train-bpe", vocab)
    return folder


def make_script(path, text):
    """Writes a script of bash, for example in place of another program."""
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def preload(folder, source):
    """Compiles C functions that take the place of the C library's; returns the environment of a program with them."""
    (folder / "preload.c").write_text(source)
    run(os.environ.get("CC", "cc"), "-shared -fPIC -o", folder / "preload.so", folder / "preload.c")
    return {"LD_PRELOAD": folder / "preload.so"}


def limited(limits):
    """Returns the words that run a command under a limit of ulimit, such as "-v 600000" (KiB of address space)."""
    return ["bash", "-c", f'ulimit {limits} && exec "$@"', "bash"]


def on_path(folder, **env):
    """Returns the environment in which programs of this folder take the place of others."""
    return {"PATH": f"{folder}:{os.environ['PATH']}", **env}


def overwrite(path, offset, bytes_):
    """Writes these bytes at this offset, from the end of the file if negative."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(bytes_)


def edit_json(path, **values):
    """Gives keys of the JSON object in a file, which may be new, these values."""
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def data_options(folder, val=True, given=()):
    """Returns the options for the shards in a folder, without those that are given, which would add up."""
    kinds = [kind for kind in (("train", "val") if val else ("train",)) if f"--{kind}-data" not in given]
    return words(*([f"--{kind}-data", f"{folder}/{kind}_*.bin"] for kind in kinds))


def train_command(*options, out, data, by=ONE, val=True):
    """Returns the command that trains a tiny model into the folder `out` ("": none); later options override earlier."""
    given = words(*options)
    return by.command(data_options(data, val, given), TINY, ["--output", out], given)


def train(*options, out, data, by=ONE, val=True, env=(), **keywords):
    """Trains a tiny model to its end, and returns its Run."""
    run(train_command(*options, out=out, data=data, by=by, val=val), env={**by.env, **dict(env)}, **keywords)
    return Run(out)
