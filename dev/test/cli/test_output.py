"""test_output.py: outputs that cannot be written: an output folder that another run uses, that is read-only or full,
and a standard output that is closed, full, or whose reader has ended."""

import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from harness import PROGRAM, Run, execute, refused, run, train, train_command

ENDLESS = "--steps 1000000000 --schedule constant --val-every 0"


def test_one_run_at_a_time_in_an_output(train_in_background, tmp_path, data):
    busy = Run(tmp_path / "busy")
    owner = train_in_background(ENDLESS, "--checkpoint-every 50 --keep 1", out=busy, data=data)
    owner.wait_for(busy.latest, "the first checkpoint")
    text = f"{busy} is in use by another run: pid {owner.pid} on {socket.gethostname()};"
    refused(73, text, train_command("--steps 3", out=busy, data=data))
    refused(73, text, train_command(ENDLESS, "--stop-after 200 --resume", out=busy, data=data))
    assert not [*Path(busy).glob("*.stale*"), *Path(busy).glob("log.1.jsonl")]
    owner.signal(signal.SIGKILL)
    owner.wait()
    train(ENDLESS, "--stop-after 5 --resume", out=busy, data=data)
    assert not (busy / "run.lock").exists()


@pytest.mark.parametrize("redirection, reason", [
    (">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")])
def test_training_continues_without_stdout_and_warns_once(redirection, reason, tmp_path, data):
    command = train_command("--log-every 1 --quiet=0 --steps 3", out=tmp_path / "run", data=data)
    result = run(["bash", "-c", f'"$@" {redirection}', "run"], command)
    assert result.err.count(f"cannot write to stdout: {reason}; the run continues") == 1
    assert list(Run(tmp_path / "run").losses()) == [0, 1, 2]


@pytest.mark.parametrize("command, redirection, reason", [
    ("eval --val-tokens 64 --init RUN --val-data DATA/val_*.bin", ">/dev/full", "No space left on device"),
    ("plan --layers 1 --heads 1 --channels 16 -t 16 -d 0", ">/dev/full", "No space left on device"),
    ("--help", ">/dev/full", "No space left on device"),
    ("generate --max-tokens 1000 --num-samples 100000 --init RUN", "| head -c 10 >/dev/null", "Broken pipe")])
def test_other_commands_fail_if_stdout_is_full_or_its_reader_has_ended(command, redirection, reason, trained, data):
    command = command.replace("RUN", str(trained)).replace("DATA", str(data))
    shell = ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "bash"]
    refused(74, f"cannot write to standard output: {reason}", shell, PROGRAM, command)


@pytest.fixture
def own_mounts():
    """The words that run a command with mounts of its own."""
    if execute("unshare --mount mount -t tmpfs none /tmp").code != 0:
        pytest.skip("no mounts can be made here")
    return ["unshare", "--mount"]


def test_the_checkpoint_before_survives_a_full_disk(own_mounts, tmp_path, data):
    # 1 MB holds the log and one checkpoint of about 700 kB.
    script = 'mount -t tmpfs -o size=1000k none "$0" && "$@"; code=$?; ls "$0/run"; exit $code'
    result = refused(74, "the checkpoint of step 12 was not saved: ", own_mounts, ["sh", "-c", script, tmp_path],
                     train_command("--steps 12 --checkpoint-every 6 --keep 0", out=tmp_path / "run", data=data))
    assert re.search("a checkpoint needs .* are free", result.errors[0])
    assert result.errors[0].endswith(f"; the last good checkpoint is {tmp_path}/run/step_000006")
    assert "step_000006" in result.out.splitlines()


def test_a_checkpoint_that_was_removed_is_not_called_the_last_good_one(train_in_background, tmp_path, data):
    out = Run(tmp_path / "run")
    process = train_in_background(ENDLESS, "--checkpoint-every 500", out=out, data=data)
    process.wait_for(out.latest, "the first checkpoint")
    process.signal(signal.SIGSTOP)
    shutil.move(out.folder, tmp_path / "moved")
    out.folder.touch()  # so that the folder cannot be made again
    process.signal(signal.SIGCONT)
    assert process.wait() in (66, 73, 74), process.output
    error = process.output.splitlines()[-1]
    assert "was not saved: " in error and re.search("/run/step_[0-9]+ is no longer there$", error)


def test_a_run_trains_on_while_its_output_is_read_only_and_saves_later(own_mounts, start, tmp_path, data):
    def while_stopped(*commands):
        process.signal(signal.SIGSTOP)
        for command in commands:
            run("nsenter --mount --root --target", process.pid, command, out)
        process.signal(signal.SIGCONT)

    def failed():
        """Returns the last step that was not saved."""
        found = re.findall("^warning: the checkpoint of step ([0-9]+) was not saved: .*Read-only file system.*; "
                           "training continues$", process.output, re.MULTILINE)
        return int(found[-1]) if found else None

    # A mount hides the output from calls that open or make a file. The log is open, and is written. The run ends after
    # three saves that fail, so there are a thousand steps between two.
    out = Run(tmp_path / "run")
    process = start(own_mounts, train_command(ENDLESS, "--checkpoint-every 1000 --keep 2 --quiet=0", out=out,
                                              data=data))
    process.wait_for(out.latest, "the first checkpoint")
    while_stopped(["mount", "--bind", out], "mount -o remount,ro,bind")
    process.wait_for(failed, "a warning")
    assert not out.checkpoint(failed()).exists()
    while_stopped("umount --lazy")
    process.wait_for(lambda: out.lines("checkpoint")[-1]["step"] > failed(), "a later checkpoint")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75
    assert out.unfinished() == []
    assert list(out.losses()) == list(range(int(out.latest().removeprefix("step_"))))
