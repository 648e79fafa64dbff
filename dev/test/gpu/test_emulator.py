"""test_emulator.py: the commands of train_gpt2cu in the emulator: training has the losses of train_gpt2, a resumed run
equals an uninterrupted one, matmuls are timed, and failures of the GPU end the program with one error. The emulator's
README.md shows what its commands print."""

import json
import re
import shutil
import signal

import pytest
from harness import (EMULATED, RELEASE, ROOT, TINY, assert_same_run, emulated_gpus, execute, limited, refused, run,
                     train, train_command, words)

pytestmark = pytest.mark.skipif(not EMULATED.exists(), reason="build/release/emulator/train_gpt2cu is not built")
RUN = "--layers 1 --autotune off --steps 6 --val-every 6 --val-tokens 64 --sample-every 6 --sample-tokens 4 " \
      "--checkpoint-every 3"
SHORT = "--layers 1 --global-batch 32 --precision bf16 --steps 2 --warmup 1 --checkpoint-every 2 --sample-every 0"
MICRO_STEPS = f"{SHORT} --micro-batch 1 --global-batch 64 --steps 4 --checkpoint-every 4"  # four in each step


@pytest.fixture
def emulated(data, tmp_path):
    """emulated(NAME, OPTIONS..., env=...) trains in the emulator; returns the run, and what it has printed."""
    gpu = emulated_gpus(1)

    def begin(name, *options, env=()):
        command = train_command(*options, by=gpu, data=data, val=False, out=tmp_path / name)
        command.remove("--quiet")
        result = run(command, env={**gpu.env, **dict(env)})
        return tmp_path / name, result.out + result.err

    return begin


@pytest.mark.isa
@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-4), ("bf16", 5e-2), ("fp8", 5e-2)])
def test_training_has_the_losses_of_the_cpu_and_a_resume_changes_no_bit(data, tmp_path, precision, tolerance):
    options = f"{RUN} --precision {precision}"
    cpu = train(options, data=data, out=tmp_path / "cpu")
    whole = train(options, by=emulated_gpus(1), data=data, out=tmp_path / "whole")
    # Losses are about 5, and in six steps of AdamW rounding errors grow to a few roundings of the precision.
    for here, there in (whole.losses(), cpu.losses()), (whole.val_losses(), cpu.val_losses()):
        assert list(here) == list(there) and all(abs(here[step] - there[step]) < tolerance for step in here)
    assert len(whole.losses()) == 6
    parts = tmp_path / "parts"
    train(options, "--stop-after 3", by=emulated_gpus(1), data=data, out=parts)
    train(options, "--resume", by=emulated_gpus(1), data=data, out=parts)
    assert_same_run(whole, parts, 6)


def test_cuda_graphs_and_recomputation_change_no_bit(emulated):
    options = f"{MICRO_STEPS} --layers 2 --autotune off"
    recorded, other = emulated("recorded", options), emulated("other", options, "--cuda-graph off --recompute layer")
    assert_same_run(recorded[0], other[0], 4)


@pytest.mark.parametrize("n, options", [
    (1, "--moments 8bit"), (1, "--optimizer muon --master-weights off"),
    (2, "--zero 3 --deterministic-ranks 2 --micro-batch 1")])
def test_state_in_host_memory_changes_no_bit_and_a_resume_may_move_it(data, tmp_path, n, options):
    options = f"{SHORT} --autotune off --steps 6 --checkpoint-every 3 {options}"
    whole = train(options, by=emulated_gpus(n), data=data, out=tmp_path / "whole")
    for first, then in ("none", "all"), ("moments", "none"):
        parts = tmp_path / first
        train(options, f"--offload {first} --stop-after 3", by=emulated_gpus(n), data=data, out=parts)
        train(options, f"--offload {then} --resume", by=emulated_gpus(n), data=data, out=parts)
        assert_same_run(whole, parts, 6)


def test_plan_says_what_the_state_in_host_memory_takes(data):
    big = "plan --model d48 --micro-batch 1 --recompute layer --logit-chunks 8 --measure off --moments 8bit"
    text = run(EMULATED, big, "--offload moments").out
    assert "moments 2.90 GiB of the host, exponents of moments" in text
    assert re.search(r"^ *offload +2.90 GiB of state in host memory, .*: 125 ms of an update at 25 GB/s", text, re.M)
    least = run(EMULATED, big, "--master-weights off --grad-accum bf16 --offload all").out
    assert 6.5 < float(re.search(r"^ *memory +([\d.]+) GiB of .*sums of gradients 2.90 GiB", least, re.M)[1]) <= 6.8
    refused(2, "--offload master: this run has no master weights", EMULATED, "plan --offload master --precision fp32")
    two = run(EMULATED, big, "--offload moments --ranks 2", env={"SIMT_DEVICES": 2}).out
    assert "5.80 GiB of state in host memory (2 ranks x 2.90 GiB), of which" in two
    saves = run(EMULATED, "plan --measure off", TINY, "--offload all --precision fp32 --checkpoint-every 2").out
    assert re.search(r"offload +\S+ MiB of state in host memory and \S+ MiB for its copy while it is saved, of", saves)


def test_plan_compares_the_state_in_host_memory_with_what_is_free_there():
    small = limited("-v 6000000")  # less than fp32 moments of d48, and more than those in 8 bits
    fits = run(small, EMULATED, "plan --model d48 --fits --memory 9.5GiB").out
    assert re.search(r"fastest tokens/s but for \d+ ms a step: .* --moments 8bit .* --offload moments$", fits, re.M)
    big = "plan --model d48 --measure off -b 1 --recompute layer --offload moments"
    advice = re.search("; does not fit: try (.*)", run(small, EMULATED, big).out)[1]
    assert advice.endswith(f"{big} --moments 8bit") and "does not fit" not in run(small, advice).out


def test_attention_for_hopper_is_timed_once_and_has_the_same_bits_in_graphs_and_recomputed(emulated, data, tmp_path):
    options = f"{MICRO_STEPS} --heads 1 --channels 64 --val-every 4 --val-tokens 32 --val-data {data}/val_*.bin"
    library = {"SIMT_CUDNN": 1}  # its fastest plan takes 2 ms, and a kernel no time
    first, text = emulated("first", options, env=library)
    chosen = "attention: wgmma kernels of ours; backward wgmma kernels of ours\n"
    assert chosen in text and "timed the algorithms" in text
    choices = (tmp_path / "cache/train_gpt2/algorithms.txt").read_text()
    assert len(re.findall(r"; wgmma \d+; attention .*: wgmma 0.0000 ms, first 5.0000 ms$", choices, re.M)) == 2
    again, text = emulated("again", options, "--cuda-graph off --recompute layer", env=library)
    assert chosen in text and "timed the algorithms" not in text
    fixed, text = emulated("fixed", options, "--attention wgmma")
    assert chosen in text
    for other in again, fixed:
        assert_same_run(first, other, 4)
    text = emulated("cudnn", options, "--attention cudnn", env=library)[1]
    assert "attention: cuDNN 9.25.0, engine 14; backward cuDNN" in text


def test_generate_eval_and_plan_work(emulated, data):
    model, _ = emulated("model", SHORT)
    run(EMULATED, "generate --max-tokens 8 --init", model)
    run(EMULATED, "eval --seq-len 16 --micro-batch 2 --val-tokens 64 --init", model, "--val-data", data / "val_*.bin")
    plan = [EMULATED, "plan", *words(TINY, "--micro-batch auto")]
    assert "cuBLASLt" in run(plan).out
    assert re.search(r"^ *batch.* x 1 micro-step\b", run(plan).out, re.M)  # the largest micro-batch


def test_timed_algorithms_are_kept_and_missing_ones_are_timed_again(emulated, tmp_path):
    first, text = emulated("first", SHORT)
    assert re.search("timed the algorithms of [0-9]* matmuls and attentions", text)
    choices = tmp_path / "cache/train_gpt2/algorithms.txt"
    assert [path.name for path in choices.parent.iterdir()] == [choices.name]
    kept = choices.read_text()
    assert "; forward bf16 m " in kept
    again, text = emulated("again", SHORT)
    assert "timed the algorithms" not in text and choices.read_text() == kept
    assert_same_run(first, again, 2)
    other = "another GPU; shape: 1 2 3\n"
    choices.write_text("".join(line for line in kept.splitlines(True) if "forward bf16" not in line) + other)
    assert "timed the algorithms" in emulated("some", SHORT)[1]
    assert sorted(choices.read_text().splitlines(True)) == sorted([*kept.splitlines(True), other])


def test_a_note_says_that_choices_cannot_be_kept(emulated):
    _, text = emulated("no_folder", SHORT, env={"XDG_CACHE_HOME": "pytest.ini"})
    assert re.search("the next start times them again: .* is not a directory", text)


# An illegal access in this operation of the GPU, or an error while a CUDA graph is captured.
@pytest.mark.parametrize("when, reason", [
    (1, "cudaErrorIllegalAddress"), (700, "cudaErrorIllegalAddress"),
    ("capture", "embedding_forward_kernel<bf16>, (2, 1, 1) blocks of (256, 1, 1) threads, 0 bytes of shared memory: an "
                "illegal memory access")])
def test_a_failure_on_the_gpu_ends_the_program_with_one_error_that_torchrun_gets(data, tmp_path, when, reason):
    gpu, error_file = emulated_gpus(1), tmp_path / "error.json"
    torchrun = {"TORCHELASTIC_ERROR_FILE": error_file, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    command = train_command(MICRO_STEPS, by=gpu, data=data, val=False, out=tmp_path / "run")
    result = refused(1, reason, command, env={**gpu.env, **torchrun, "SIMT_FAIL": when})
    assert json.loads(error_file.read_text())["message"]["message"] == result.errors[0].removeprefix("error: ")


# In a folder with the emulator's headers, where the test may change the example.
@pytest.mark.skipif(not shutil.which("clang++"), reason="there is no clang++ (apt-get install clang)")
def test_the_emulators_page_shows_its_example_and_what_its_commands_print(tmp_path):
    page = (ROOT / "dev/simt/README.md").read_text()
    blocks = dict(re.findall("^```(.*)\n((?:.*\n)+?)```", page, re.M))
    kernel, commands, report = blocks["cuda"], blocks["sh emulator"].replace("\\\n", ""), blocks[""]
    make, compile_it, run_it = commands.splitlines()
    example, code = tmp_path / "dev/simt/example/sums.cu", (ROOT / "dev/simt/example/sums.cu").read_text()
    example.parent.mkdir(parents=True)
    for header in ROOT.glob("dev/simt/*.h"):
        (example.parents[1] / header.name).symlink_to(header)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/release").symlink_to(RELEASE)
    run(make)
    example.write_text(code)
    run(compile_it, cwd=tmp_path)
    assert kernel in code and f"prints `{run([tmp_path / run_it]).out.strip()}`" in page
    example.write_text(code.replace("        __syncthreads();\n", ""))
    run(compile_it, cwd=tmp_path)
    wrong = execute([tmp_path / run_it], cwd=tmp_path)
    assert wrong.code == -signal.SIGABRT and wrong.err == report
