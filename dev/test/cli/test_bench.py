"""test_bench.py: scripts/plot.py, dev/bench/ledger.py and bench_ops, whose operations are the ledger's."""

import re

import pytest
from harness import RELEASE, execute, run

BENCH_OPS = RELEASE / "bench_ops"


def test_plot_finds_a_python3_with_matplotlib(tmp_path):
    if all(execute(python, "-c 'import matplotlib'").code for python in ("python3", "/usr/bin/python3")):
        pytest.skip("no python3 here has matplotlib (apt-get install python3-matplotlib)")
    (tmp_path / "log.jsonl").write_text('{"kind":"step","step":0,"loss":5}\n{"kind":"step","step":1,"loss":4}\n')
    plot = "python3 -S scripts/plot.py"  # -S: without packages
    printed = run(plot, tmp_path / "log.jsonl", "-o", tmp_path / "loss.png").out
    assert re.search("^drawn by .*python3: .* has no matplotlib", printed, re.MULTILINE)
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert execute(plot, tmp_path / "none").err == f"plot.py: [Errno 2] No such file or directory: '{tmp_path}/none'\n"


@pytest.mark.skipif(not BENCH_OPS.exists(), reason="bench_ops is not built (make bench)")
@pytest.mark.parametrize("model, precision, micro_batch, seq_len", [("d24", "bf16", 5, 512), ("d12", "fp32", 2, 1024)])
def test_the_ledger_has_the_operations_of_bench_ops(model, precision, micro_batch, seq_len):
    shape = f"--model {model} --precision {precision}"
    listed = sorted(run(BENCH_OPS, "--list", shape, "-b", micro_batch, "-t", seq_len).out.splitlines())
    # On a CPU bench_ops computes 2048 rows of logits at a time. On an A100 the ledger does not fuse GELU.
    for gpu in ("", "--gpu a100"):
        ledger = run("dev/bench/ledger.py --operations --logit-rows 2048", shape, gpu, "--micro-batch", micro_batch,
                     "--seq-len", seq_len).out
        assert sorted(ledger.splitlines()) == listed


def test_tables_in_the_documentation_are_made_by_their_scripts():
    run("dev/bench/ledger.py --check-docs")
    run("dev/bench/readme_table.py --check")
