"""test_bench.py: scripts/plot.py, dev/bench/ledger.py and bench_ops, whose operations are the ledger's."""

import re
import sys

import pytest
from harness import PROGRAM, RELEASE, ROOT, execute, run

BENCH_OPS = RELEASE / "bench_ops"
DOCS = (ROOT / "docs/performance.md").read_text()


@pytest.fixture
def ledger(monkeypatch):
    """The script as a module, and assume(name, value), which changes an assumption."""
    monkeypatch.syspath_prepend(ROOT / "dev/bench")
    monkeypatch.delitem(sys.modules, "ledger", raising=False)
    import ledger
    ledger.assume = lambda name, value: monkeypatch.setattr(ledger.ASSUMPTIONS[name], "value", value)
    return ledger


def lines_of(text):
    """Model, GPUs, B, micro-steps, ms, tokens/s, ms not hidden and ms of the host, of each line of the table."""
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d+M \|", line)]
    return [(row[0][2:], int(row[1]), *map(int, row[2].split(" x ")), float(row[3]), int(row[4].replace(",", "")),
             float(row[6]), float(row[7])) for row in rows]


def test_plot_finds_a_python3_with_matplotlib(tmp_path):
    if all(execute(python, "-c 'import matplotlib'").code for python in ("python3", "/usr/bin/python3")):
        pytest.skip("no python3 here has matplotlib (apt-get install python3-matplotlib)")
    (tmp_path / "log.jsonl").write_text('{"kind":"step","step":0,"loss":5}\n{"kind":"step","step":1,"loss":4}\n')
    plot = "python3 -S scripts/plot.py"  # -S: without packages
    printed = run(plot, tmp_path / "log.jsonl", "-o", tmp_path / "loss.png").out
    assert re.search("^drawn by .*python3: .* has no matplotlib", printed, re.MULTILINE)
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert execute(plot, tmp_path / "none").err == (
        f"plot.py: {tmp_path}/none: No such file or directory; name the output folder of a run, or its log.jsonl\n")


@pytest.mark.skipif(not BENCH_OPS.exists(), reason="bench_ops is not built (make bench)")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model, precision, micro_batch, seq_len", [("d24", "bf16", 5, 512), ("d12", "fp32", 2, 1024)])
def test_the_ledger_has_the_operations_of_bench_ops(model, precision, micro_batch, seq_len, optimizer):
    shape = f"--model {model} --precision {precision} --optimizer {optimizer}"
    listed = sorted(run(BENCH_OPS, "--list", shape, "-b", micro_batch, "-t", seq_len).out.splitlines())
    # On a CPU bench_ops computes 1024 rows of logits at a time. On an A100 the ledger does not fuse GELU.
    for gpu in ("", "--gpu a100"):
        ledger = run("dev/bench/ledger.py --operations --logit-rows 1024", shape, gpu, "--micro-batch", micro_batch,
                     "--seq-len", seq_len).out
        assert sorted(ledger.splitlines()) == listed


def test_tables_in_the_documentation_are_made_by_their_scripts():
    run("dev/bench/ledger.py --check-docs")
    run("dev/bench/readme_table.py --check")


def test_every_line_has_the_tokens_of_a_step():
    for _, gpus, B, micro_steps, ms, tokens, *_ in lines_of(DOCS):
        assert gpus * B * micro_steps == 512 and tokens == pytest.approx(1e3 * 524288 / ms, rel=5e-3)


def test_an_assumption_changes_the_table_as_it_says(ledger):
    before = lines_of(DOCS)
    named = re.findall(r"^\* \*\*(.+): (\S+), (\S+) %\*\*, at (\S+) and (\S+) in place", DOCS, re.M)
    assert len(named) == 3 and abs(float(named[0][1])) > abs(float(named[2][1])) > 0
    for name, *changes_and_ends in named:
        for change, end in zip(changes_and_ends[:2], changes_and_ends[2:]):
            kept = ledger.assumed(name)
            ledger.assume(name, float(end))
            after = lines_of(ledger.docs_ranks())
            ledger.assume(name, kept)
            changes = [100 * (new[5] / old[5] - 1) for new, old in zip(after, before)]
            assert sum(changes) / len(changes) == pytest.approx(float(change), abs=0.06)


@pytest.mark.parametrize("model, ranks", [("d12", 8), ("d48", 64)])
def test_the_ledger_sends_the_bytes_of_a_plan(ledger, model, ranks):
    plan = run(PROGRAM, "plan --measure off --zero 1 --precision bf16 --vocab-size 50257 --micro-batch 8",
               "--global-batch 0 --model", model, "--ranks", ranks).out
    number, unit = re.search("each rank sends ([0-9.]+) ([MG])iB per step", plan).groups()
    ledger.assume(f"latency of {ranks} GPUs", 0)
    ledger.assume(f"GB/s of {ranks} GPUs", 1e-3)  # so slow that all is waiting
    s = ledger.shape_of(ledger.arguments(["--model", model, "--ranks", f"{ranks}"]))
    _, duration = ledger.nccl_seconds(s, {"forward": 1, "backward": 1, "update": 1})
    assert 1e6 * duration == pytest.approx(float(number) * {"M": 1 << 20, "G": 1 << 30}[unit], rel=6e-3)


def test_collectives_are_hidden_or_waited_for_and_a_slow_host_decides(ledger):
    s, gpu = ledger.shape_of(ledger.arguments(["--ranks", "8"])), ledger.GPUS["h100-sxm"]
    launches = list(ledger.step(s, gpu))
    kernels = sum(launch.seconds(gpu) for launch in launches)
    seconds = {"forward": 0.01, "backward": 0.02, "update": 0.001}
    ledger.assume("latency of 8 GPUs", 0)
    ledger.assume("GB/s of 8 GPUs", 1e9)
    assert ledger.step_seconds(s, gpu, launches)[0] == pytest.approx(kernels)
    ledger.assume("GB/s of 8 GPUs", 1e-3)
    waits, duration = ledger.nccl_seconds(s, seconds)
    assert duration - 0.031 < waits < duration
    assert ledger.step_seconds(s, gpu, launches)[1] > duration - kernels
    ledger.assume("GB/s of 8 GPUs", 360)
    slowed = ledger.step_seconds(s, gpu, launches)[1]
    ledger.assume("speed beside NCCL", 1)
    assert 0 < ledger.step_seconds(s, gpu, launches)[1] < slowed
    ledger.assume("host per collective", 1e6)
    assert ledger.step_seconds(s, gpu, launches)[0] == pytest.approx(27, rel=1e-3)  # 13 buckets, twice, and the norm
