"""test_muon.py: --optimizer muon on emulated GPUs: the losses of the CPU, and in each stage of ZeRO one GPU's bits."""

import pytest
from harness import assert_same_run, close, emulated_gpus, train

OPTIONS = ("--optimizer muon --layers 3 --micro-batch 1 --global-batch 32 --warmup 1 --steps 3 --checkpoint-every 3"
           " --autotune off")


# Losses of two layouts differ by the order of sums in fp32, or by roundings to bf16, in some hundred additions.
@pytest.mark.isa
@pytest.mark.parametrize("n, options, layout, tolerance", [
    (1, "--precision fp32", "", 1e-5), (2, "--precision fp32", "--tensor-parallel 2", 1e-5),
    (1, "--precision bf16 --master-weights off", "", 2e-3)])
def test_muon_on_gpus_has_the_losses_of_one_cpu(n, options, layout, tolerance, data, tmp_path):
    cpu = train(OPTIONS, options, out=tmp_path / "cpu", data=data, val=False).losses()
    gpus = train(OPTIONS, options, layout, out=tmp_path / "gpus", data=data, val=False, by=emulated_gpus(n)).losses()
    assert len(cpu) == 3 and all(close(gpus[step], loss, tolerance) for step, loss in cpu.items()), (gpus, cpu)


@pytest.mark.parametrize("precision, runs", [("fp32", [("--zero 0", None), ("--zero 2", "deferred:3")]),
                                             ("bf16", [("--zero 1", "deferred"), ("--zero 3", "deferred:5")])])
def test_each_stage_of_zero_has_the_bits_of_one_gpu_in_any_order_of_streams(precision, runs, data, tmp_path):
    options = f"{OPTIONS} --precision {precision} --deterministic-ranks 2"
    one = train(options, out=tmp_path / "one", data=data, val=False, by=emulated_gpus(1))
    for stage, order in runs:
        two = train(options, stage, out=tmp_path / "two" / stage, data=data, val=False, by=emulated_gpus(2),
                    env={"SIMT_STREAMS": order})
        assert_same_run(one, two, 3)


def test_the_matmuls_of_muon_are_timed_too(data, tmp_path):
    options = OPTIONS.replace(" --autotune off", "")
    train(options, "--precision fp32", out=tmp_path / "run", data=data, val=False, by=emulated_gpus(1))
    choices = (tmp_path / "cache/train_gpt2/algorithms.txt").read_text().splitlines()
    # X X^T and the polynomial times X, of matrices (C, C) and (C, 4C). A^2 has the shape of the squares' X X^T.
    assert len([choice for choice in choices if ", a batch, " in choice]) == 4
