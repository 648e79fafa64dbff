"""test_tensor_parallel.py: --tensor-parallel and --sequence-parallel on CPU ranks and on emulated GPUs: one checkpoint
for all layouts of ranks, and refused options. layouts.cpp compares more layouts."""

import re

import pytest
from harness import ONE, assert_same_run, close, emulated_gpus, ranks, train, train_command
from mpi import ranks_refuse

# The vocabulary is padded, and the tensor-parallel ranks have unequal parts of it.
OPTIONS = "--heads 4 --channels 64 --vocab-size 301 --seq-len 32 --micro-batch 1 --global-batch 128 --steps 14"
LAYOUTS = [(2, "--tensor-parallel 2"), (2, "--tensor-parallel 2 --sequence-parallel"), (4, "--tensor-parallel 4"),
           (4, "--tensor-parallel 2 --zero 0"), (2, "--zero 3"),
           (4, "--tensor-parallel 2 --zero 2 --sequence-parallel"), (4, "--tensor-parallel 2 --zero 3")]


def in_layout(n, layout, *options, **where):
    """Trains in this layout; the options that it does not name are set back, because a resumed run keeps them."""
    return train(OPTIONS, "--tensor-parallel 1 --zero 0 --sequence-parallel=false", layout, *options,
                 by=ranks(n) if n > 1 else ONE, val=False, **where)


def header(file):
    """Returns the length and the JSON object at the begin of a safetensors file."""
    content = file.read_bytes()
    return content[:8 + int.from_bytes(content[:8], "little")]


def assert_same_losses(run, one, tolerance):
    losses = run.losses()
    assert losses
    for step, loss in losses.items():
        assert close(loss, one.losses()[step], tolerance), f"step {step}: {loss} instead of {one.losses()[step]}"


# Each layout continues the run of the one before. The losses of two layouts differ by the order in which they add fp32
# values: a relative error of 6e-8 for each addition, in sums of at most some hundred values. AdamW's first steps
# amplify it for weights with small gradients.
def test_each_layout_continues_the_checkpoint_of_any_other(data, tmp_path):
    one = in_layout(1, "--precision fp32 --checkpoint-every 2", "--keep 0", out=tmp_path / "one", data=data)
    resume = ""
    for i, (n, layout) in enumerate(LAYOUTS):
        run = in_layout(n, layout, f"--precision fp32 --stop-after 2 {resume}", out=tmp_path / "run", data=data)
        resume = "--resume"
        ours, theirs = run.checkpoint(2 * i + 2), one.checkpoint(2 * i + 2)
        assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert header(ours / name) == header(theirs / name)
    assert b'"transformer.wte.weight":{"dtype":"F32","shape":[301,64]' in header(ours / "model.safetensors")
    assert len(run.losses()) == 14
    assert_same_losses(run, one, 2e-5)


# The ranks round what they all have alike, or else a checkpoint, which has it once, would change some of them.
def test_a_resume_changes_no_bit_of_what_is_rounded_stochastically(data, tmp_path):
    options = "--precision bf16 --master-weights off --grad-accum bf16 --checkpoint-every 7 --keep 0"
    for name, parts in ("whole", [""]), ("parts", ["--stop-after 7", "--resume"]):
        for part in parts:
            in_layout(2, "--tensor-parallel 2", options, part, out=tmp_path / name, data=data)
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 14)


@pytest.mark.parametrize("n, options, text", [
    (2, "--heads 3 --channels 48 --tensor-parallel 2", "does not divide the model's 3 heads; give 1"),
    (3, "--tensor-parallel 2", "--tensor-parallel 2 does not divide 3 ranks; give 1"),
    (2, "--seq-len 31 --global-batch 124 --tensor-parallel 2 --sequence-parallel", "give --seq-len 30")])
def test_refused_options(n, options, text, data, tmp_path):
    ranks_refuse(text, train_command(OPTIONS, options, out=tmp_path / "never", data=data, by=ranks(n)))
    assert not (tmp_path / "never/log.jsonl").exists()


@pytest.mark.isa
@pytest.mark.parametrize("n, options, order", [
    (2, "--precision bf16 --sequence-parallel", None), (4, "--precision fp32 --zero 2 --sequence-parallel", None),
    (4, "--precision fp32 --zero 3 --sequence-parallel", "deferred:5")])
def test_gpus_have_the_losses_of_one_cpu(n, options, order, data, tmp_path):
    small = f"{OPTIONS} --layers 1 --heads 2 --channels 32 --seq-len 16 --global-batch 32 --steps 3 {options}"
    gpus = train(small, "--autotune off --tensor-parallel 2", out=tmp_path / "gpus", data=data, val=False,
                 by=emulated_gpus(n), env={"SIMT_STREAMS": order})
    precision = re.search("--precision .{4}", options).group()
    one = train(small, "--zero 0 --sequence-parallel=false", precision, out=tmp_path / "one", data=data, val=False)
    assert len(gpus.losses()) == 3
    assert_same_losses(gpus, one, 1e-4 if "fp32" in precision else 1e-2)
