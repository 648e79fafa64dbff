"""test_gpu_pass.py: dev/gpu_pass.sh with small shapes, on new machines without programs, as two calls and the rest. The
emulator's programs, with two GPUs, take the place of the GPU build; make, nvidia-smi, ncu, compute-sanitizer, the bench
and all kernel tests but one are stand-ins."""

import json
import os
import re
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
from harness import EMULATED, PROGRAM, ROOT, execute, make_script, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(not EMULATED.exists(), reason="build/release/emulator/train_gpt2cu is not built")]
SCRIPT = (ROOT / "dev/gpu_pass.sh").read_text()
# The statements of the script about losses, up to the first variable.
CLAIMS = re.findall(r'^ *claim "([^"$]*)', SCRIPT, re.M)
KERNELS = "build/release/cuda/"
TESTS = [KERNELS + source.stem for source in ROOT.glob("dev/test/gpu/test_gpu_*.cu")]

# Copies the programs that it is asked to make.
MAKE = """echo "$@" >>made.txt
echo "g++ | x86_64 | CUDA 13.0 | cuDNN 9.19.0 | NCCL"
for target; do
    if [ -e BUILT/$target ]; then mkdir -p $(dirname $target) KERNELS && cp BUILT/$target $target; fi
done
touch KERNELSlibllmc.a"""
# Only memcheck checks all kernels; the others must select ours.
SANITIZER = """case "$2 $*" in memcheck*) ;; *"--kernel-name kns=adamw_kernel "*) exit 0 ;; *) exit 1 ;; esac
while [[ "$1" == --* ]]; do shift 2; done
exec "$@" """
NCU = """while [[ "$1" == --* ]]; do shift 2; done
"$@" && echo "==ERROR== ERR_NVGPUCTRPERM" && exit 1"""
BENCH = r"""for word; do if [ "$before" = --json ]; then json=$word; fi; before=$word; done
if [[ "$LOUD$*" == 1*--model* && "$*" != *--op* ]]; then head -c 15000000 /dev/urandom | base64; sleep 300; fi
step='"bench":"step","device":"none","model":"d12","dtype":"bf16"'
if [ -n "$json" ]; then echo "{$step,\"B\":2,\"T\":16,\"ms\":1.0,\"tokens_per_s\":32000}" >>"$json"; fi"""
TRAINER = """if [[ "$*" != tokenize* && "$*" != *help* ]]; then set -- "$@" --val-tokens 32; fi
exec PROGRAM "$@" """


class Machine:
    """A tree in which nothing is built, and commands in front of the PATH."""

    def __init__(self, folder):
        self.tree, self.out, commands, self.built = [folder / name for name in ("tree", "out", "bin", "built")]
        for name in (self.tree, commands, self.built / KERNELS):
            name.mkdir(parents=True)
        for name in ("dev", "llmc", "scripts", "data", "README.md"):
            (self.tree / name).symlink_to(ROOT / name)
        programs = {name: 'if [ -n "$LOUD" ] && [ $# = 0 ]; then sleep 300; fi' for name in TESTS}
        programs |= {KERNELS + "test_gpu_device": f'exec {EMULATED.with_name("test_gpu_device")} "$@"',
                     KERNELS + "bench_ops": BENCH, "test_gpt2cu": "exit $#",
                     "train_gpt2": TRAINER.replace("PROGRAM", str(PROGRAM)),
                     "train_gpt2cu": TRAINER.replace("PROGRAM", str(EMULATED))}
        for name, text in programs.items():
            make_script(self.built / name, text)
        make = MAKE.replace("BUILT", str(self.built)).replace("KERNELS", KERNELS)
        stand_ins = {"make": make, "nvidia-smi": "echo GPU 0; echo GPU 1", "ncu": NCU, "compute-sanitizer": SANITIZER}
        for name, text in stand_ins.items():
            make_script(commands / name, text)
        self.env = {"PATH": f"{commands}:{os.environ['PATH']}", "SHAPES": "tiny", "STAGE_SECONDS": 1700,
                    "SIMT_DEVICES": 2, "TEXT": self.tree / "README.md", "XDG_CACHE_HOME": None}

    def command(self, *stages):
        return "bash", self.tree / "dev/gpu_pass.sh", "-o", self.out, *stages

    def made(self):
        """The targets given to make, one list of words per call."""
        return [line.split() for line in (self.tree / "made.txt").read_text().splitlines()]

    def archive(self):
        """The files of the archive."""
        path = self.out / "results.tar.xz"
        assert path.stat().st_size < 16e6
        with tarfile.open(path) as files:
            return {f.name.removeprefix("./"): files.extractfile(f).read().decode(errors="replace") for f in files}


def test_the_stages_of_a_call_have_its_seconds():
    sums = dict(re.findall(r"^# (first|second|hopper|further): (\d+)", SCRIPT, re.M))
    for group, total in sums.items():
        rows = SCRIPT.partition(f"# {group}: {total}")[2].partition("\n#\n")[0]
        assert sum(int(seconds) for seconds in re.findall(r"^#   \w+ +(\d+)", rows, re.M)) == int(total)
    assert sums["first"] == sums["hopper"] == "400" and sums["second"] == "240" and "further" in sums


def test_every_stage_passes_and_every_claim_holds(tmp_path):
    machines = [Machine(tmp_path / name) for name in ("first", "second")]
    said = ""
    hopper = {"SIMT_CUDNN": 1}
    for machine, call, logs in ((machines[0], "first", ["test_gpu_device.log", "d12-no-graph/log.jsonl"]),
                                (machines[1], "second", ["profile.log", "memcheck-train.log"]),
                                (machines[1], "hopper", ["power-wgmma.csv", "d12-cudnn/log.jsonl"]),
                                (machines[1], "further", ["d12.log", "d12/log.jsonl"])):
        run(*machine.command(call), env=machine.env | (hopper if call == "hopper" else {}), limit=1700)
        files = machine.archive()
        wanted = ["summary.txt", "results.jsonl", "results.md", "cache/train_gpt2/algorithms.txt", *logs]
        assert [file for file in wanted if not files.get(file)] == []
        assert [file for file in files if "step_" in file or file.startswith("data")] == []
        said += (machine.out / "summary.txt").read_text()

    first, second = [machine.made() for machine in machines]
    assert {*TESTS, "test_gpt2cu", "train_gpt2", "train_gpt2cu", KERNELS + "bench_ops"} < {*first[0]}
    assert {"train_gpt2", "train_gpt2cu", KERNELS + "bench_ops"} < {*second[0]} and not {*TESTS} & {*second[0]}
    assert {*TESTS, "test_gpt2cu"} < {*second[1]}
    assert "ok   racecheck-test_gpu_attention_wgmma " in said and "ok   profile " in said and "ERR_NVGPUCTRPERM" in said
    assert "ok   racecheck-test_gpu_matmul_wgmma " in said and re.search("\nok   matmuls-choice .* wgmma 1; ", said)
    assert len(CLAIMS) >= 10 and said.count("\nok   two GPUs with --") == 6
    assert [claim for claim in CLAIMS if f"\nok   {claim}" not in said] == []
    tables = (machines[1].out / "results.md").read_text()
    names = "small d12 d48-bf16 two-gpus-zero-1 d12-two-gpus d12-two-gpus-tensor".split()
    assert [name for name in names if f"\n| {name} |" not in tables] == []
    assert "\n| train_gpt2 | none | d12 " in tables
    assert json.loads((machines[1].out / "d12/step_000002/config.json").read_text())["vocab_size"] == 384


def test_programs_from_another_machine_are_built_if_one_does_not_start(tmp_path):
    machine = Machine(tmp_path)
    shutil.copytree(machine.built, machine.tree, dirs_exist_ok=True)
    run(*machine.command("build"), env=machine.env)
    assert not (machine.tree / "made.txt").exists()
    make_script(machine.tree / "test_gpt2cu", "exit 127")
    run(*machine.command("build"), env=machine.env)
    assert "test_gpt2cu" in machine.made()[0]


def test_a_stage_ends_at_its_limit_and_the_next_one_runs(tmp_path):
    machine = Machine(tmp_path)
    result = execute(*machine.command("bench", "d48"), env={**machine.env, "STAGE_SECONDS": 4, "LOUD": 1})
    assert result.code == 1, result
    assert "FAIL bench-d12-B2-bf16" in result.out and "ok   bench-d12-B2-bf16-op=step" in result.out
    assert "failed: bench-d12-B2-bf16" in result.out and "[status 124]" in result.out
    log = machine.archive()["bench-d12-B2-bf16.log"]
    assert "\n[the middle is left out]\n" in log and len(log) < 110e3
    assert KERNELS + "bench_ops" in machine.made()[0] and len(machine.made()) == 1


@pytest.mark.parametrize("stage, log", [("bench", "bench-d12-B2-bf16.log"), ("test", "test_gpu_attention.log")])
def test_a_signal_ends_the_programs_and_leaves_the_results(tmp_path, start, stage, log):
    machine = Machine(tmp_path)
    job = start(*machine.command("build", stage), env={**machine.env, "LOUD": 1})
    job.wait_for((machine.out / log).exists, "the log of a program that does not end")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert [cwd for cwd in Path("/proc").glob("[0-9]*/cwd") if os.path.realpath(cwd) == str(machine.tree)] == []
    assert {"summary.txt", "make-build.log", log} <= {*machine.archive()}


def test_the_headers_of_the_build_travel_in_a_folder(tmp_path):
    [command] = re.findall(r"^#   (mkdir -p .deps/include && .*)$", SCRIPT, re.M)
    run("bash -c", [command], cwd=tmp_path)
    headers = [tmp_path / ".deps/include" / name for name in
               ("CLI/CLI.hpp", "doctest/doctest.h", "nlohmann/json.hpp", "xxhash.h")]
    assert [path for path in headers if not path.exists()] == []
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 50e6
    run("git check-ignore", ROOT / ".deps/include")
