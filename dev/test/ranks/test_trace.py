"""test_trace.py: --trace: the files of one rank and of two have nested events, also of a run that is killed, and a
trace changes nothing in the training."""

import json
import signal

from harness import assert_same_run, ranks, train

REPORTS = "--steps 6 --val-every 3 --checkpoint-every 4 --sample-every 5 --sample-tokens 3"


def assert_trace(file, rank, steps, *names):
    """Asserts that a trace has the events of this rank: so many steps, each with a forward, a backward and an update
    within it, on its thread; and events of these names."""
    events = [event for event in json.loads(file.read_text()) if event["ph"] == "X"]
    assert all(event["pid"] == rank for event in events)
    by_name = {}
    for event in events:
        by_name.setdefault(event["name"].rstrip("0123456789").rstrip(), []).append(event)
    assert len(by_name["step"]) == steps and set(names) <= set(by_name)
    for step in by_name["step"]:
        for name in ("forward", "backward", "update"):
            assert any(event["tid"] == step["tid"] and step["ts"] <= event["ts"]
                       and event["ts"] + event["dur"] <= step["ts"] + step["dur"] for event in by_name[name]), step


def test_a_trace_has_nested_events_and_changes_nothing(data, tmp_path):
    trace = tmp_path / "trace.json"
    traced = train(REPORTS, "--trace", trace, out=tmp_path / "traced", data=data)
    assert_trace(trace, 0, 6, "read batch", "clip", "checkpoint", "validation", "sample")
    assert_same_run(traced, train(REPORTS, out=tmp_path / "untraced", data=data), 6)


def test_each_rank_has_a_trace(data, tmp_path):
    train(REPORTS, "--zero 1 --trace", tmp_path / "t.json", out=tmp_path / "run", data=data, by=ranks(2))
    for rank, name in enumerate(["t.json", "t.json.rank1"]):
        assert_trace(tmp_path / name, rank, 6, "reduce-scatter", "all-gather", "wait for ranks")


def test_a_killed_run_leaves_a_trace_of_its_steps(train_in_background, data, tmp_path):
    trace = tmp_path / "trace.json"
    process = train_in_background("--steps 1000000 --trace", trace, out=tmp_path / "run", data=data)
    process.wait_for_step(tmp_path / "run", 3)
    process.signal(signal.SIGKILL)
    process.wait()
    steps = trace.read_text().count('"name":"step ')
    assert steps >= 4
    assert_trace(trace, 0, steps, "read batch")
