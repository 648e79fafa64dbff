"""test_gpu_pass.py: dev/gpu_pass.sh with small shapes. The emulator's programs, with two GPUs, take the place of the
GPU build; make, nvidia-smi, compute-sanitizer, the bench and all kernel tests but one are stand-ins."""

import json
import os
import re

import pytest
from harness import EMULATED, PROGRAM, ROOT, execute, make_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(not EMULATED.exists(), reason="build/release/emulator/train_gpt2cu is not built")]
# The statements of the script about losses, up to the first variable.
CLAIMS = re.findall(r'^ *claim "([^"$]*)', (ROOT / "dev/gpu_pass.sh").read_text(), re.M)

MAKE = 'if [ "$1" = found ]; then echo "CPU | CUDA | cuDNN 9.19.0 | Open MPI 4 | NCCL"; fi'
# Only memcheck checks all kernels; the others must select ours.
SANITIZER = """case "$2 $*" in memcheck*) ;; *"--kernel-name kns=adamw_kernel "*) exit 0 ;; *) exit 1 ;; esac
while [[ "$1" == --* ]]; do shift 2; done
exec "$@" """
BENCH = r"""while [ $# != 0 ]; do if [ "$1" = --json ]; then json=$2; fi; shift; done
step='"bench":"step","device":"none","model":"d12","dtype":"bf16"'
echo "{$step,\"B\":2,\"T\":16,\"ms\":1.0,\"tokens_per_s\":32000}" >>"$json" """
TRAINER = """if [ "$1" != tokenize ]; then set -- "$@" --val-tokens 32; fi
exec PROGRAM "$@" """


@pytest.fixture
def gpu_pass(tmp_path):
    """Runs gpu_pass.sh in a tree of its own; returns its result, and its folder."""
    tree, commands, out = tmp_path / "tree", tmp_path / "bin", tmp_path / "out"
    kernels = tree / "build/release/cuda"
    for folder in (kernels, commands):
        folder.mkdir(parents=True)
    for name in ("dev", "llmc", "scripts", "data", "README.md"):
        (tree / name).symlink_to(ROOT / name)
    programs = {kernels / source.stem: "" for source in ROOT.glob("dev/test/gpu/test_gpu_*.cu")}
    programs[kernels / "test_gpu_device"] = f"exec {EMULATED.with_name('test_gpu_device')}"
    programs |= {kernels / "bench_ops": BENCH, tree / "test_gpt2cu": "", commands / "make": MAKE,
                 commands / "nvidia-smi": "echo GPU 0; echo GPU 1", commands / "compute-sanitizer": SANITIZER,
                 tree / "train_gpt2": TRAINER.replace("PROGRAM", str(PROGRAM)),
                 tree / "train_gpt2cu": TRAINER.replace("PROGRAM", str(EMULATED))}
    for path, text in programs.items():
        make_script(path, text)

    env = {"PATH": f"{commands}:{os.environ['PATH']}", "SHAPES": "tiny", "STAGE_SECONDS": 1700, "SIMT_DEVICES": 2,
           "TEXT": tree / "README.md"}
    return execute("bash", tree / "dev/gpu_pass.sh", "-o", out, env=env, limit=1700), out


def test_every_stage_passes_and_every_claim_holds(gpu_pass):
    result, out = gpu_pass
    assert result.code == 0, result
    summary, tables = (out / "summary.txt").read_text(), (out / "results.md").read_text()
    assert len(CLAIMS) >= 11
    assert [claim for claim in CLAIMS if f"\nok   {claim}" not in summary] == []
    runs = "small d12 d12-autotune-off d48 two-gpus-zero-1 d12-two-gpus d12-tensor-parallel".split()
    assert [name for name in runs if f"\n| {name} |" not in tables] == []
    assert "\n| train_gpt2 | none | d12 " in tables
    assert json.loads((out / "d12/step_000002/config.json").read_text())["vocab_size"] == 384
