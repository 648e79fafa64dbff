"""trace_check.py FILE RUN RANKS FIRST_STEP STEPS MICRO_STEPS [gpu|hosts|tensor]: checks a trace of these steps, of a run whose log.jsonl is in RUN.

gpu: the trace is of the emulator, whose times mean nothing: checks only names and their order. hosts: of several hosts, each
with its own clock. tensor: all ranks are tensor-parallel; also checks that they sum the gradients of activations while they compute."""

import json
import sys
from collections import defaultdict

file, run, ranks, first, steps, micro_steps = *sys.argv[1:3], *map(int, sys.argv[3:7])
gpu, hosts = sys.argv[7:] == ["gpu"], sys.argv[7:] == ["hosts"]
tensor = sys.argv[7:] == ["tensor"]
slack = 20000 if hosts else 1  # microseconds
events = json.load(open(file))["traceEvents"]
processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
spans = [e for e in events if e["ph"] == "X"]
assert [name.split(" on ")[0] for name in processes.values()] == [f"rank {r}" for r in range(ranks)], processes

for s in spans:
    s["track"], s["begin"], s["end"] = tracks[s["tid"]], s["ts"], s["ts"] + s["dur"]
    s["step"] = s.get("args", {}).get("step")
    assert s["ts"] >= 0 and s["dur"] >= 0, s


def of(rank, track=None, name=None, within=None):
    return [s for s in spans if s["pid"] == rank + 1 and track in (None, s["track"]) and (name is None or s["name"].startswith(name))
            and (within is None or within["begin"] <= s["begin"] and s["end"] <= within["end"])]


# Spans of one track are nested or disjoint, and the file has outer spans first.
by_track = defaultdict(list)
for s in spans:
    by_track[s["tid"]].append(s)
for track in by_track.values():
    open_spans, before = [], 0
    for s in track:
        assert s["begin"] >= before, ("not in order", s)
        before = s["begin"]
        # A GPU span of zero length at the end of another span may be inside of it or after it.
        while open_spans and open_spans[-1]["end"] + (gpu and s["dur"] == 0) <= s["begin"]:
            open_spans.pop()
        assert not open_spans or s["end"] <= open_spans[-1]["end"], ("overlap", s, open_spans[-1])
        if s["dur"]:
            open_spans.append(s)

log = {line["step"]: line for line in map(json.loads, open(run + "/log.jsonl")) if line["kind"] == "step"}
for rank in range(ranks):
    whole = of(rank, "training", "step ")
    assert [s["name"] for s in whole] == [f"step {s}" for s in range(first, first + steps)], [s["name"] for s in whole]
    for step in whole:
        micro = [s for s in of(rank, "training", "micro-step ") if s["step"] == step["step"]]
        assert [s["name"] for s in micro] == [f"micro-step {i}" for i in range(micro_steps)], micro
        assert all(step["begin"] <= s["begin"] and s["end"] <= step["end"] for s in micro), step
        update = [s for s in of(rank, "training", "update") if s["step"] == step["step"]]
        assert len(update) == 1 and update[0]["begin"] >= micro[-1]["end"], update
        sent = [s for s in of(rank, "communication") if s["step"] == step["step"]]
        reduced = [s for s in sent if s["name"].startswith("reduce bucket ")]
        buckets = [s["name"].split()[-1] for s in reduced]
        assert buckets == [str(b) for b in range(len(buckets) - 1, -1, -1)] and (len(buckets) > 1) == (ranks > 1 and not tensor), buckets
        if gpu:
            continue
        for s in micro:
            passes = [p["name"] for p in of(rank, "training", within=s) if p["name"] in ("forward", "backward")]
            assert passes == ["forward", "backward"], passes
        for s in reduced:
            assert s["begin"] >= of(rank, "training", "backward", micro[-1])[0]["begin"], ("reduced too early", s)
        if rank > 0:
            continue
        # A span contains the time that the log has measured, so it is not shorter, except for rounding.
        line = log[step["step"]]
        for name, key in ("wait for", "comm_exposed_ms"), ("wait for data", "loader_wait_ms"):
            waits = [s for s in of(rank, "training", name, step) if (s["name"] == "wait for data") == (name == "wait for data")]
            shown, measured = sum(s["dur"] for s in waits) / 1e3, line.get(key, 0.0)
            most = max(50, 10 * len(waits)) if tensor else 50  # ms; a step waits for some 60 sums and gathers of activations
            assert -0.051 - 0.001 * len(waits) <= shown - measured < most, (key, shown, measured)
        assert line.get("comm_bytes", 0) == sum(s["args"]["bytes"] for s in sent), (line, sent)

# Ranks are in a collective at the same time, if their clocks agree.
if not gpu:
    for rank in range(1, ranks):
        mine, theirs = of(0, "communication"), of(rank, "communication")
        assert [s["name"] for s in mine] == [s["name"] for s in theirs] and mine
        for a, b in zip(mine, theirs):
            assert a["begin"] <= b["end"] + slack and b["begin"] <= a["end"] + slack, (a, b)


# In forward a rank calls for a sum and waits for it at once. In backward it computes a weight's gradient between the two.
if tensor:
    computing = {"forward": [], "backward": []}  # microseconds between call and wait
    for rank in range(ranks):
        sums, waits = of(rank, "communication", "sum activations"), of(rank, "training", "wait for sum of activations")
        assert len(sums) == len(waits) > 0, (len(sums), len(waits))
        for name, times in computing.items():
            for whole in of(rank, "training", name):
                times += [w["begin"] - s["begin"] + s["args"]["queued_us"] for s, w in zip(sums, waits)
                          if whole["begin"] <= w["begin"] and w["end"] <= whole["end"]]
    middle = {name: sorted(times)[len(times) // 2] for name, times in computing.items()}
    assert middle["backward"] > 5 * middle["forward"] + 20, ("microseconds of computing between a sum's call and its wait", middle)
for name in "checkpoint", "validation", "sample":
    print(name, len(of(0, "host" if gpu else "training", name)))
print("read", len(of(0, "loader", "read batch")))
