#!/usr/bin/env bash
# test_trace.sh: --trace: the files of one rank and of two have nested events, also of a run that is killed, and a trace
# changes nothing in the training.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

if ! command -v python3 >/dev/null; then skip "--trace" "there is no python3" && finish; fi
export OMP_NUM_THREADS=1
make_shards "$scratch/data" 30000 || fail "no shards"
run=("$program" --train-data "$scratch/data/train_*.bin" "${tiny[@]}" --steps 6)
reports=(--val-data "$scratch/data/val_*.bin" --val-every 3 --checkpoint-every 4 --sample-every 5 --sample-tokens 3)
# holds FILE RANK STEPS NAME...: the file has the events of this rank; its last bracket may be missing. Each name has
# events, and each step has a forward, a backward and an update within it, on its thread.
cat >"$scratch/holds.py" <<'END'
import json, sys
file, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
text = open(file).read()
events = [e for e in json.loads(text if text.endswith("]\n") else text + "]") if e["ph"] == "X"]
name = lambda e: e["name"].rstrip("0123456789").rstrip()
assert all(e["pid"] == rank for e in events)
found = [e for e in events if name(e) == "step"]
assert len(found) == steps, f"{len(found)} steps"
for what in sys.argv[4:]: assert any(name(e) == what for e in events), f"no {what}"
within = lambda e, s: s["tid"] == e["tid"] and s["ts"] <= e["ts"] and e["ts"] + e["dur"] <= s["ts"] + s["dur"]
for step in found:
    for what in ("forward", "backward", "update"):
        assert any(name(e) == what and within(e, step) for e in events), f"no {what} in {step}"
END
holds() { python3 "$scratch/holds.py" "$@"; }

check "without a trace" "${run[@]}" "${reports[@]}" --output "$scratch/untraced"
check "one rank with a trace" "${run[@]}" "${reports[@]}" --output "$scratch/one" --trace "$scratch/one.json"
check "the trace has nested events" holds "$scratch/one.json" 0 6 "read batch" clip checkpoint validation sample
check "the trace changes nothing in the training" same_run "$scratch/untraced" "$scratch/one" 6
check "a longer run over an older trace" "${run[@]}" --output '' --steps 30 --trace "$scratch/one.json"
check "the trace has the first 20 steps" holds "$scratch/one.json" 0 20
refused "--trace into a directory that does not exist" 73 "No such file" \
    "${run[@]}" --output '' --trace "$scratch/none/t.json"
refused "--trace to a file that is not a trace" 73 "is not a trace" \
    "${run[@]}" --output '' --trace "$scratch/data/train_000001.bin"

reason=$(no_ranks_because)
if [ -n "$reason" ]; then skip "ranks by mpirun" "$reason" && finish; fi
several_ranks_here
check "2 ranks with a trace" ranks 2 "${run[@]}" "${reports[@]}" --zero 1 --output "$scratch/two" \
    --trace "$scratch/two.json"
check "2 ranks: the trace of rank 0" holds "$scratch/two.json" 0 6 reduce-scatter all-gather "wait for ranks"
check "2 ranks: the trace of rank 1" holds "$scratch/two.json.rank1" 1 6 reduce-scatter all-gather "wait for ranks"

"${run[@]}" --steps 1000000 --micro-batch 1 --layers 8 --channels 64 --output "$scratch/killed" \
    --trace "$scratch/killed.json" >/dev/null 2>&1 &
job=$!
check "a run that is killed trains" wait_for "$scratch/killed/log.jsonl" '"step":3,'
kill -9 $job && wait $job 2>/dev/null
check "a run that is killed: the trace has its steps" \
    holds "$scratch/killed.json" 0 "$(grep -c '"name":"step ' "$scratch/killed.json")" "read batch"
finish
