"""test_seeing.py: what shows a run: TensorBoard's event files, the reference curve, the picture, wandb_log.py, the hint
on the learning rate; and the job for Kubernetes. Tests by name only (-m hf) need the packages tensorboard, wandb and
kubernetes-validate.
"""

import json
import re
import shutil
import signal
import struct
import sys

import pytest
from harness import PROGRAM, ROOT, Run, execute, refused, run, train, train_command

KINDS = ("step", "val", "eval")


def scalars(folder):
    """Returns {(tag, step): value} of the numbers in log.jsonl that the trackers show."""
    found = {}
    for line in Run(folder).lines():
        if line["kind"] in KINDS:
            prefix = "/".join([line["kind"], line["task"]] if "task" in line else [line["kind"]])
            found |= {(f"{prefix}/{name}", line["step"]): value for name, value in line.items()
                      if name != "step" and isinstance(value, (int, float))}
    return found


def as_float(values):
    """Returns the values as TensorBoard has them, in 32 bits."""
    return {key: struct.unpack("<f", struct.pack("<f", value))[0] for key, value in values.items()}


# ---- TensorBoard


def records(path):
    """Yields the events of a file. test_log.cpp and TensorBoard itself check lengths and checksums."""
    data = path.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield data[12:12 + size]
        data = data[16 + size:]


def read_events(folder):
    """Returns {(tag, step): value} of a folder. The start of a session removes what comes from its step on."""
    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        version, *events = records(path)
        assert version.endswith(b"brain.Event:2")
        for event in events:
            time, digits, content = re.fullmatch(rb"\t(.{8})(?:\x10([\x80-\xff]*.))?(.*)", event, re.DOTALL).groups(b"")
            assert 1.6e9 < struct.unpack("<d", time)[0] < 1e10
            step = sum((digit & 127) << 7 * i for i, digit in enumerate(digits))
            if content == b"\x3a\x02\x08\x01":
                found = {(tag, at): value for (tag, at), value in found.items() if at < step}
            for tag, number in re.findall(rb"\n.\n.((?:step|val|eval)/[\w/]+)\x15(.{4})", content, re.DOTALL):
                assert (tag.decode(), step) not in found
                found[tag.decode(), step] = struct.unpack("<f", number)[0]
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, data):
    """A run with event files that has logged steps 5 to 7 twice, because its newest checkpoint was removed."""
    out = Run(tmp_path_factory.mktemp("seeing") / "run")
    options = "--tensorboard --steps 12 --val-every 3 --checkpoint-every 5 --check-replicas 0"
    train(options, "--stop-after 8", out=out, data=data)
    shutil.rmtree(out.checkpoint(8))
    train("--resume", out=out, data=data)
    return out


def test_event_files_have_every_number_of_the_log_once_also_after_a_resume(resumed):
    events = read_events(resumed.folder)
    assert events == as_float(scalars(resumed)) and len({step for _, step in events}) == 13
    assert len(list(resumed.folder.glob("events.*"))) == 2
    first, *_ = sorted(resumed.folder.glob("events.*"))
    assert len(list(records(first))) == 2 + 8 + 3  # with the steps that were repeated
    assert "val/val_loss" in {tag for tag, _ in events}


@pytest.mark.hf
def test_tensorboard_reads_every_number_of_the_log(resumed):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(resumed), size_guidance={reader.SCALARS: 0}).Reload()
    read = [((tag, event.step), event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    assert dict(read) == as_float(scalars(resumed)) and len(read) == len(dict(read))


# ---- the reference


def test_a_run_says_how_far_it_is_from_its_reference_also_when_it_is_resumed_elsewhere(tmp_path, data):
    options = "--steps 12 --val-every 4 --checkpoint-every 8 --log-every 12 --quiet=0"
    first = train(options, out=tmp_path / "first", data=data)
    command = train_command(options, "--lr 1e-3 --reference first --stop-after 8", out="second", data=data)
    printed = run(command, cwd=tmp_path).out
    printed += run(train_command("--resume --quiet=0", out=tmp_path / "second", data=data)).out
    second = Run(tmp_path / "second")
    references, losses = second.by_step("val", "reference_loss"), second.val_losses()
    assert references == first.val_losses() and list(references) == [0, 4, 8, 12]
    for step in references:
        difference = losses[step] - references[step]
        side = "from" if abs(difference) < 5e-5 else "below" if difference < 0 else "above"
        words = f"{abs(difference):.4f} {side} "
        assert re.search(fr"step +{step}/12 \| val loss {losses[step]:.4f} .* \| {words}", printed), printed
    assert second.lines("run")[-1]["reference"]["losses"] == [[step, pytest.approx(loss)] for step, loss
                                                              in references.items()]
    run(train_command("--steps 8 --stop-after 4 --reference none", out="third", data=data), cwd=tmp_path)
    train("--resume", out=tmp_path / "third", data=data)
    assert [line["options"]["reference"] for line in Run(tmp_path / "third").lines("run")] == ["none", "none"]


@pytest.mark.parametrize("code, text, options", [
    (66, "none/log: cannot open: No such file", "--reference none/log"),
    (65, "--reference pytest.ini has no validation losses", "--reference pytest.ini"),
    (2, "--reference compares validation losses: give --val-data", "--reference README.md --val-every 0"),
    (2, "--tensorboard writes into --output, which is empty", "--tensorboard --output ''")])
def test_what_cannot_be_seen_is_refused(code, text, options, tmp_path, data):
    refused(code, text, train_command("--steps 4", options, out=tmp_path / "run", data=data))


def test_every_field_that_a_curve_compares_is_in_the_first_line_of_a_log(resumed):
    line = resumed.lines("run")[0]
    curves = [json.loads(path.read_text().splitlines()[0]) for path in (ROOT / "data/curves").glob("*.jsonl")]
    assert curves
    for curve in curves:
        assert curve["source"] and curve["name"] and curve["conditions"] and "tokens_per_step" in curve["match"]
        for name, fields in curve["match"].items():
            assert type(line[name]) is type(fields)
            assert not isinstance(fields, dict) or set(fields) <= set(line[name]), (curve["name"], name)


# ---- the picture


def test_plot_draws_runs_with_reference_evaluations_and_log_axes(resumed, tmp_path):
    plotted = tmp_path / "plotted"
    plotted.mkdir()
    points = [[0, 5.5], [4, 5.0], [100, 2.0]]
    lines = [{"kind": "run", "reference": {"name": "another run", "losses": points}},
             {"kind": "val", "step": 4, "val_loss": 4.5, "reference_loss": 5.0},
             {"kind": "eval", "step": 4, "task": "piqa", "acc": 0.625}]
    (plotted / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot = [ROOT / "scripts/plot.py", resumed, plotted]
    printed = run(plot, "--log xy --smooth 3 --dark -o", tmp_path / "dark.svg").out
    assert re.search(r"validation loss .* 4\.5000 +steps 4 to 4, 0\.500 below the reference", printed)
    if "no picture" in printed:
        pytest.skip("no python3 here has matplotlib")
    run(plot, "-o", tmp_path / "light.svg")
    texts = [(tmp_path / name).read_text() for name in ("dark.svg", "light.svg")]
    backgrounds = [re.search(r'id="patch_1">\s*<path [^>]*>', text)[0] for text in texts]
    assert ["fill: #ffffff" in background for background in backgrounds] == [False, True]
    for label in ("run: training, mean of 3", "plotted: validation 4.500, 0.500 below the reference", "another run",
                  "plotted: piqa 0.625", "accuracy"):
        assert f"<!-- {label} -->" in texts[0], label
    assert "<!-- $\\mathdefault{10^{0}}$ -->" in texts[0] and "mathdefault" not in texts[1]


# ---- Weights & Biases


def wandb_records(path):
    """Yields the records of a .wandb file: LevelDB's log, blocks of 32 KiB with parts of records, after 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, part = struct.unpack("<HB", data[at + 4:at + 7])
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield record
            record = b""


def sent(output):
    """Returns the configuration and {(name, step): value} in the files of wandb's offline runs."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    config, found = {}, {}
    for path in sorted(output.glob("wandb/offline-run-*/*.wandb")):
        for record in map(messages.Record.FromString, wandb_records(path)):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    assert (name, row["_step"]) not in found
                    found[name, row["_step"]] = value
    return config, found


@pytest.mark.hf
def test_wandb_gets_every_number_of_a_growing_log_once_also_after_a_resume(start, train_in_background, tmp_path, data):
    pytest.importorskip("wandb")
    out = Run(tmp_path / "run")
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    script = [sys.executable, ROOT / "scripts/wandb_log.py"]
    options = "--val-every 50 --checkpoint-every 100 --check-replicas 0 --schedule constant"
    training = train_in_background(options, "--steps 100000", out=out, data=data)
    training.wait_for_step(out, 150)
    follower = start(script, out, "--follow", env=env)
    follower.wait_for(lambda: (out / "wandb.json").exists(), "the first row")
    follower.signal(signal.SIGSTOP)  # the log is replaced while it does not look
    training.signal(signal.SIGTERM)
    assert training.wait() == 75
    newest = int(out.latest().removeprefix("step_"))
    shutil.rmtree(out.checkpoint(newest))
    training = train_in_background("--resume --steps", newest + 500, out=out, data=data)
    training.wait_for_step(out, newest)
    follower.signal(signal.SIGCONT)
    assert training.wait() == 0 and follower.wait() == 0
    config, found = sent(out.folder)
    times = re.compile("step/(step_ms|tokens_per_s|mfu|peak_flops|loader_wait_ms)")  # another time in a repeated step
    assert {key: value for key, value in found.items() if not times.match(key[0])} == \
        {key: value for key, value in scalars(out).items() if not times.match(key[0])}
    sometimes = {"step/peak_flops"}  # if a CPU's peak has been raised
    assert {key for key, _ in found} - sometimes == {key for key, _ in scalars(out)} - sometimes
    assert config["tokens_per_step"] == 64 and config["options"] == out.lines("run")[0]["options"]
    run(script, out, env=env)
    assert sent(out.folder)[1] == found


@pytest.mark.parametrize("text, message", [(None, "No such file"), ("", "has no first line yet")])
def test_a_folder_without_a_run_is_not_sent(text, message, tmp_path):
    (tmp_path / "wandb.py").touch()  # in place of the package
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    result = execute("python3", ROOT / "scripts/wandb_log.py", tmp_path, env={"PYTHONPATH": tmp_path})
    assert result.code == 1 and result.err.startswith("wandb_log.py: ") and message in result.err


# ---- containers


def manifest():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "scripts/mpijob.yaml").read_text())["spec"]


def test_the_job_for_kubernetes_starts_as_many_ranks_as_its_workers_have_gpus(tmp_path):
    replicas = manifest()["mpiReplicaSpecs"]
    launcher, worker = (replicas[name]["template"]["spec"]["containers"][0] for name in ("Launcher", "Worker"))
    ranks = manifest()["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(manifest()["slotsPerWorker"])
    assert launcher["command"][:3] == ["mpirun", "-np", str(ranks)] and launcher["command"][-1] == "train_gpt2cu"
    options = [option for option in launcher["args"] if not re.match("--(train-data|val-data|resume)", option)]
    plan = run(PROGRAM, "plan --measure off --ranks", ranks, options, cwd=tmp_path).out
    assert "524,288 tokens per step = 32 sequences x 1,024 tokens x 16 ranks x 1 micro-step" in plan


@pytest.mark.hf
def test_the_pods_of_the_job_have_the_form_that_kubernetes_has(tmp_path):
    kubernetes = pytest.importorskip("kubernetes_validate")
    for name, replica in manifest()["mpiReplicaSpecs"].items():
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name.lower()},
                "template": replica["template"]}
        kubernetes.validate(pods, "1.31", strict=True)
        replica["template"]["spec"]["containers"][0]["comand"] = []
        with pytest.raises(kubernetes.ValidationError):
            kubernetes.validate(pods, "1.31", strict=True)


@pytest.mark.parametrize("options, hint", [
    ("--lr 0.06", "--lr 0.06 is more than 3 times 1.9e-02 = 0.6 / 32 channels, near which new models learn fastest"),
    ("--lr 0.05", None), ("--lr 0.007", None),
    ("--lr 0.015 --optimizer muon", "--lr 0.015 is less than a third of 4.7e-02 = 1.5 / 32 channels")])
def test_a_rate_far_from_the_rule_has_a_hint_when_a_new_model_starts(options, hint, tmp_path, data):
    command = train_command(options, "--quiet=0 --steps 2 --val-every 0", out=tmp_path, data=data)
    said = run(command).out
    assert hint in said if hint else "hint" not in said
    assert "hint" not in run(command, "--resume --steps 3").out
