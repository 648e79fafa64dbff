"""test_zero.py: --zero 3 on CPU ranks and on emulated GPUs: the bits and texts of --zero 2, and one checkpoint for all
stages; the bytes that ranks send in any layout."""

import re

import pytest
from harness import PROGRAM, TINY, assert_same_run, close, emulated_gpus, ranks, run, train, words

OPTIONS = ("--layers 4 --heads 2 --channels 64 --vocab-size 384 --seq-len 32 --micro-batch 1 --global-batch 256"
           " --steps 4 --checkpoint-every 4 --val-every 4 --sample-every 2 --sample-tokens 9 --deterministic-ranks 4")


# With fewer and more layers than there are in memory, and with each option for memory.
@pytest.mark.parametrize("n, options", [
    (4, "--precision bf16 --layers 1"), (2, "--precision bf16 --layers 2"), (4, "--precision fp32 --layers 5"),
    (4, "--precision bf16 --recompute layer --layers 3"), (4, "--precision bf16 --master-weights off"),
    (4, "--precision fp8 --channels 32")])
def test_zero_3_has_the_bits_and_texts_of_zero_2(n, options, data, tmp_path):
    one = train(OPTIONS, options, "--zero 2", out=tmp_path / "one", data=data)
    assert len(one.lines("sample")) >= 2
    assert_same_run(one, train(OPTIONS, options, "--zero 3", out=tmp_path / "run", data=data, by=ranks(n)), 4)


# With one micro-step for each virtual rank there is only one order of sums, and with bf16 always.
@pytest.mark.parametrize("rule", ["adamw", "muon", "adamw --moments 8bit", "muon --moments bf16",
                                  "adamw --grad-accum bf16 --global-batch 256", "muon --grad-accum bf16"])
def test_each_stage_continues_with_the_bits_of_the_others(rule, data, tmp_path):
    options = f"{OPTIONS} --precision bf16 --global-batch 128 --steps 5 --checkpoint-every 1 --optimizer {rule}"
    whole = train(options, out=tmp_path / "whole", data=data)
    for n, stage in [(2, "--zero 3"), (1, "--zero 0 --resume"), (4, "--zero 2 --resume"), (4, "--zero 3 --resume"),
                     (2, "--zero 1 --resume")]:
        run = train(options, stage, "--stop-after 1", out=tmp_path / "stages", data=data, by=ranks(n))
    assert_same_run(whole, run, 5)


# Its weights are still being gathered when the last step is done.
def test_a_run_ends_with_an_update(data):
    end = "--val-every 0 --checkpoint-every 0 --sample-every 0"
    train(OPTIONS, end, "--channels 128 --precision fp32 --zero 3", out="", data=data, by=ranks(4))


@pytest.mark.parametrize("n, options", [
    (2, "--zero 0"), (2, "--zero 1 --grad-accum bf16 --grad-dtype bf16"), (3, "--zero 3 --global-batch 192"),
    (2, "--zero 2 --deterministic-ranks 4"), (4, "--zero 1 --grad-dtype bf16"), (4, "--zero 3 --grad-dtype bf16"),
    (4, "--zero 3 --optimizer muon"), (2, "--zero 0 --optimizer muon"), (2, "--tensor-parallel 2 --recompute layer"),
    (4, "--tensor-parallel 4 --precision fp32 --sequence-parallel"), (4, "--tensor-parallel 2 --zero 2"),
    (4, "--tensor-parallel 2 --zero 3 --sequence-parallel"), (4, "--tensor-parallel 2 --zero 1 --optimizer muon")])
def test_ranks_send_the_bytes_of_plan(n, options, data, tmp_path):
    options = words("--layers 5 --heads 4 --channels 64 --vocab-size 301 --seq-len 32 --micro-batch 1"
                    " --global-batch 256 --precision bf16", options)
    plan = run(PROGRAM, "plan", TINY, options, "--ranks", n).out
    number, unit = re.search(r"each rank sends ([\d.]+) ([KM])iB ", plan).groups()  # three digits
    trained = train(options, "--steps 2", out=tmp_path / "run", data=data, val=False, by=ranks(n))
    sent = trained.by_step("step", "comm_bytes")[1]
    assert close(sent, float(number) * {"K": 1 << 10, "M": 1 << 20}[unit], 0.01), plan


GPU_OPTIONS = (OPTIONS + " --heads 1 --channels 32 --seq-len 16 --global-batch 64 --deterministic-ranks 2 --steps 2"
               " --checkpoint-every 2 --val-every 2 --val-tokens 64 --sample-every 0")


@pytest.mark.parametrize("model, order", [
    ("--precision bf16 --grad-accum bf16", None), ("--precision fp32 --recompute layer", "deferred:3"),
    ("--precision bf16", "deferred")])
def test_two_gpus_have_the_bits_of_one_in_any_order_of_streams(model, order, data, tmp_path):
    options = f"{GPU_OPTIONS} {model}"
    one = train(options, "--zero 2", out=tmp_path / "one", data=data, by=emulated_gpus(1))
    two = train(options, "--zero 3", out=tmp_path / "two", data=data, by=emulated_gpus(2), env={"SIMT_STREAMS": order})
    assert_same_run(one, two, 2)
