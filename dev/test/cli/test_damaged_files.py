"""test_damaged_files.py: damaged checkpoints, weights and shards: what every command says, and that a resume takes the
checkpoint before and never deletes or repeats anything."""

import shutil
from pathlib import Path

import pytest
from harness import PROGRAM, Run, edit_json, limited, overwrite, refused, run, train_command

USES = {
    "generate": "--max-tokens 3",
    "eval": "--val-data DATA/val_*.bin",
    "train": "--train-data DATA/train_*.bin --steps 1 --warmup 0 --output ''",
}


@pytest.mark.parametrize("command", USES)
def test_weights_that_differ_from_those_that_were_saved_or_are_not_finite_are_refused(command, trained, tmp_path, data):
    def refuses(text):
        refused(65, text, PROGRAM, command, USES[command].replace("DATA", str(data)), "--init", copy)

    copy = shutil.copytree(trained.checkpoint(30), tmp_path / "copy")
    overwrite(copy / "model.safetensors", -4, b"\x00\x00\xc0\x7f")
    refuses("model.safetensors: its checksum does not match")
    (copy / "trainer.json").unlink()  # without checksums, as in any Hugging Face directory
    refuses("model.safetensors: element 31 of transformer.h.1.mlp.c_proj.bias is nan, so the model cannot")


@pytest.mark.parametrize("command", USES)
def test_a_config_json_of_a_larger_model_than_its_weights_is_refused_before_memory_is_taken(command, trained, tmp_path,
                                                                                             data):
    copy = shutil.copytree(trained.checkpoint(30), tmp_path / "copy")
    (copy / "trainer.json").unlink()
    edit_json(copy / "config.json", n_positions=1 << 20)
    refused(65, "model.safetensors: wpe.weight is F32 [", limited("-v 600000"), PROGRAM, command,
            USES[command].replace("DATA", str(data)), "--init", copy)


@pytest.mark.parametrize("file, wrong", [("model.safetensors", "its checksum does not match"),
                                         ("optimizer.safetensors", "its checksum does not match"),
                                         ("config.json", "is not a file, but a directory")])
def test_a_resume_skips_a_damaged_checkpoint_with_a_warning(file, wrong, trained, tmp_path, data):
    out = Run(shutil.copytree(trained, tmp_path / "run"))
    damaged = out.checkpoint(30) / file
    if file == "config.json":
        damaged.unlink()
        damaged.mkdir()
    else:
        overwrite(damaged, 5000, b"x")
    result = run(train_command("--precision fp32 --steps 30 --checkpoint-every 15 --resume", out=out, data=data))
    warning = f"skipping a damaged checkpoint: {damaged}: {wrong}"
    assert f"warning: {warning}" in result.err
    assert any(line["text"].startswith(warning) for line in out.lines("warning"))
    assert out.lines("run")[-1]["resumed_at"] == 15
    assert out.losses() == trained.losses()


def test_if_all_checkpoints_are_damaged_no_run_begins_and_no_file_is_changed(trained, tmp_path, data):
    out = Run(shutil.copytree(trained, tmp_path / "run"))
    overwrite(out.checkpoint(30) / "optimizer.safetensors", 5000, b"x")
    overwrite(out.checkpoint(15) / "trainer.json", 5, b"x")
    before = {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    begin = train_command("--steps 40 --keep 1", out=out, data=data)
    error = refused(65, "none of its checkpoints is intact", begin, "--resume").errors[0]
    assert "step_000030/optimizer.safetensors: its checksum" in error and "/step_000015/trainer.json: " in error
    refused(2, "holds the checkpoints of an earlier run", begin)
    refused(65, "none of its checkpoints is intact", PROGRAM, "generate --init", out)
    assert before == {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    run(PROGRAM, "--train-data", data / "train_*.bin", "--seq-len 16 --micro-batch 2 --steps 2 --quiet --output",
        tmp_path / "new", "--init", out.checkpoint(30))  # its weights are intact
