"""test_refused.py: the exit codes and messages for options that the model, the data or the output rule out. The
messages that depend on the options alone are tested by dev/test/unit/test_options.cpp."""

import shutil

import pytest
from harness import PROGRAM, refused, train_command


@pytest.mark.isa
@pytest.mark.parametrize("text, options", [
    ("error: --sample-prompt has ", f"--sample-every 5 --sample-prompt '{'king ' * 40}'"),
    ("but the model's vocabulary has 256", "--vocab-size 256"),
    ("--master-weights off, but --precision auto is fp32 on this device", "--master-weights off"),
    ("--offload all is for GPUs: on a CPU the optimizer's state is in host memory already", "--offload all"),
])
def test_options_that_the_model_or_the_device_rules_out(text, options, data):
    refused(2, text, train_command(options, out="", data=data), env={"CPU_ISA": "base"})


def test_a_run_in_the_output_of_another(trained, data):
    refused(2, "--resume", train_command("--steps 3", out=trained, data=data))
    refused(2, "4 layers", train_command("--steps 40 --layers 4 --resume", out=trained, data=data))


def test_an_output_that_holds_a_model_gets_no_new_file(trained, tmp_path, data):
    model = shutil.copytree(trained.checkpoint(30), tmp_path / "model")
    command = [PROGRAM, "--train-data", data / "train_*.bin", "--seq-len 16 --steps 1 --output", model]
    for resume in ("", "--resume"):
        refused(2, f"--output {model} already holds a model", *command, "--init", model, resume)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == \
        {path.name: path.read_bytes() for path in trained.checkpoint(30).iterdir()}


def test_an_output_that_is_no_directory(tmp_path, data):
    (tmp_path / "dangling").symlink_to("none")
    refused(73, f"{tmp_path}/dangling is not a directory; give another name",
            train_command("--steps 3", out=tmp_path / "dangling", data=data))


def test_inputs_that_do_not_exist(tmp_path, data):
    refused(66, f"--init {tmp_path}/none: there is no such directory; nothing is downloaded", PROGRAM,
            "generate --init", tmp_path / "none")
    refused(66, "neither a Hugging Face directory", PROGRAM, "generate --init", tmp_path)
    (tmp_path / "ckpt.pt").touch()
    refused(65, f"--init {tmp_path}/ckpt.pt is no model that can be read: give a directory", PROGRAM, "generate --init",
            tmp_path / "ckpt.pt")
    refused(66, "nothing_*.bin", train_command("--train-data nothing_*.bin --steps 3", out="", data=data))


def test_control_characters_in_a_name_are_printed_as_escapes(tmp_path):
    hostile = tmp_path / "h\033[2J\nerror: x\udcc2\udc9b"
    refused(66, r"h\x1b[2J\x0aerror: x\x9b: there is no such file", PROGRAM, "tokenize", hostile, "--output",
            tmp_path / "out", "--train-bpe 300")
