"""test_sweep.py: dev/learn/sweep.py runs each combination once, and its table is right for results made by hand."""

import json
import re

import pytest
from harness import PROGRAM, execute, make_script, run, train

SWEEP = "python3 dev/learn/sweep.py"
BASE = "--layers 1 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --warmup 1 --val-every 2"


def lines_of(results):
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_runs_what_is_missing_and_writes_complete_lines(jobs, tmp_path, data):
    results, program = tmp_path / "results.jsonl", tmp_path / "program"
    make_script(program, f"""set -e
        "{PROGRAM}" "$@"
        words="$*"
        output=${{words##*--output }}
        sed -i 's/"step_ms":[0-9.]*/"step_ms":250/' "${{output%% *}}/log.jsonl" """)
    sweep = [*f"{SWEEP} run {results} --corpus {data} --jobs {jobs} --program {program}".split(), "--base",
             f"{BASE} --steps 4", "--grid", "--lr 1e-2,1e-3"]
    assert "2 runs to do, 0 in" in run(sweep, "--seeds 5").out
    first = results.read_text()
    with open(results, "a") as file:
        file.write(first[:100])  # a line that was cut
    assert "2 runs to do, 2 in" in run(sweep, "--seeds 5-6").out
    assert results.read_text().startswith(first)
    assert "0 runs to do, 4 in" in run(sweep, "--seeds 5,6").out
    lines = lines_of(results)
    assert [(line["name"][5:], line["seed"]) for line in sorted(lines, key=lambda line: (line["seed"], line["name"]))] \
        == [("1e-2", 5), ("1e-3", 5), ("1e-2", 6), ("1e-3", 6)]
    for line in lines:
        assert line["device"] and line["jobs"] == jobs and line["options"] == f"{BASE} --steps 4 {line['name']}"
        assert [point[:3] for point in line["curve"]] == [[0, 0, 0], [2, 128, 0.5], [4, 256, 1]]
        assert line["curve"][2][3] == line["val_loss"] and line["bits_per_byte"] < line["val_loss"]
    alone = train(f"{BASE} --steps 4 --lr 1e-3 --seed 6 --checkpoint-every 0", out=tmp_path / "alone", data=data)
    assert alone.val_loss() in [line["val_loss"] for line in lines if (line["seed"], line["name"]) == (6, "--lr 1e-3")]


def test_a_run_that_fails_ends_the_sweep_and_a_loss_that_is_not_finite_is_a_result(tmp_path, data):
    results = tmp_path / "results.jsonl"
    sweep = [*f"{SWEEP} run {results} --corpus {data} --program {PROGRAM} --base".split()]
    make_script(tmp_path / "fails", f'"{PROGRAM}" "$@"; exit 74')
    failed = execute(sweep, [f"{BASE} --steps 2 --program {tmp_path}/fails"])
    assert failed.code == 1 and "exit code 74 and 2 validations" in failed.err and lines_of(results) == []
    run(sweep, [f"{BASE} --steps 8 --lr 1e30"])
    assert [line["val_loss"] for line in lines_of(results)] == [None]
    assert re.search(r"\| all \| 1, 1 not finite \| - \| - \|", run(f"{SWEEP} compare {results}").out)


def made(lr, seed, losses, jobs=1, seconds=1.0):
    curve = [[10 * i, 1000 * i, 10 * i * seconds, loss] for i, loss in enumerate(losses)]
    return {"corpus": "c", "vocab": 300, "options": f"--steps 20 --lr {lr}", "seed": seed, "device": "x", "threads": 2,
            "jobs": jobs, "val_loss": losses[-1], "bits_per_byte": losses[-1] / 2, "curve": curve}


def test_a_comparison_has_means_standard_errors_and_the_way_to_the_loss_of_the_baseline(tmp_path):
    results = tmp_path / "results.jsonl"
    lines = [made("1", 1, [8, 6, 4.1]), made("1", 2, [8, 6, 3.9]), made("2", 1, [8, 5, 2.9], seconds=3),
             made("2", 2, [8, 5, 3.1], seconds=3)]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # The standard errors are 0.0707 / sqrt(2) bits. The seeds differ by 0.6 and 0.4 bits: by 0.5, with a standard error
    # of 0.1. The second curve falls from 2.5 bits at step 10 to 1.5 at step 20, so that it is at 2.0 at step 15.
    table = run(f"{SWEEP} compare {results}").out
    assert "| --lr 1 | 2 | 4.0000 | 2.0000 | 0.0500 | +0.0000 | - | 20 | 20 |\n" in table
    assert "| --lr 2 | 2 | 3.0000 | 1.5000 | 0.0500 | -0.5000 | -5.0 | 15 | 45 |\n" in table
    swapped = run(f"{SWEEP} compare {results} --baseline '--lr 2'").out
    assert "| --lr 1 | 2 | 4.0000 | 2.0000 | 0.0500 | +0.5000 | +5.0 | - | - |\n" in swapped
    # Runs beside others have no seconds that can be compared.
    results.write_text("".join(json.dumps({**line, "jobs": 2}) + "\n" for line in lines))
    assert "| -5.0 | 15 | - |\n" in run(f"{SWEEP} compare {results}").out
