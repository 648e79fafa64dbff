"""test_llmc_bin.py: --init reads llm.c's model files, which give what a directory with the same weights gives. A
damaged file is refused by name."""

import json
import shutil
import struct

import pytest
from harness import PROGRAM, Run, refused, run
from test_export import expected, export, read_weights

ORDER = ["token_embd.weight", "position_embd.weight"] + [f"blk.{{}}.{name}.{kind}" for name in (
    "attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down") for kind in ("weight", "bias")] + [
    "output_norm.weight", "output_norm.bias"]


def write_model(path, weights, version):
    """Writes the weights of a checkpoint of 2 layers, 2 heads, 32 channels, 16 positions and 300 tokens, padded to 384.
    The padded rows are not zero, and must not be read."""
    tensors = {name: values for name, _, values in (expected(name, *tensor) for name, tensor in weights.items())}
    tensors["token_embd.weight"] += [7.0] * (84 * 32)
    floats = [x for name in ORDER for layer in range(2 if "{}" in name else 1) for x in tensors[name.format(layer)]]
    body = struct.pack(f"<{len(floats)}f", *floats)
    if version == 5:  # the upper half of each float
        body = b"".join(body[i + 2:i + 4] for i in range(0, len(body), 4))
    path.write_bytes(struct.pack("<256i", 20240326, version, 16, 300, 2, 2, 32, 384, *[0] * 248) + body)
    return path


@pytest.mark.parametrize("version", [3, 5])
def test_a_model_of_llm_c_is_the_same_as_the_directory_with_its_weights(version, trained, tmp_path, data):
    checkpoint = trained.checkpoint(30)
    weights = read_weights(checkpoint)
    if version == 5:  # cut to bf16 in both files
        content = bytearray((checkpoint / "model.safetensors").read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        content[begin::4] = content[begin + 1::4] = bytes(len(content[begin::4]))
        (tmp_path / "cut").mkdir()
        (tmp_path / "cut/model.safetensors").write_bytes(content)
        (tmp_path / "cut/config.json").write_bytes((checkpoint / "config.json").read_bytes())
        checkpoint, weights = tmp_path / "cut", read_weights(tmp_path / "cut")
    model = write_model(tmp_path / "gpt2.bin", weights, version)
    shutil.copy(data / "tokenizer.json", tmp_path)

    losses = [run(PROGRAM, "eval --precision fp32 --val-data", data / "val_*.bin", "--init", init).out.split(": ")[1]
              for init in (checkpoint, model)]
    assert losses[0] == losses[1]
    texts = [run(PROGRAM, "generate --precision fp32 --prompt 'the king' --max-tokens 30 --init", init, *more).out
             for init, *more in ((checkpoint, "--tokenizer", data), (model,))]
    assert texts[0] == texts[1]
    export(checkpoint, tmp_path / "a.gguf", "--type f32 --tokenizer", data)
    (tmp_path / "b").mkdir()
    export(model, tmp_path / "b/a.gguf", "--type f32")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b/a.gguf").read_bytes()
    out = Run(tmp_path / "run")
    run(PROGRAM, "-e", model, "--lr 0 --warmup 0 --steps 1 --micro-batch 2 --precision fp32 --quiet --train-data",
        data / "train_*.bin", "--output", out)
    assert read_weights(out.checkpoint(1)) == weights
    assert json.loads((out.checkpoint(1) / "tokenizer.json").read_text()) == \
        json.loads((data / "tokenizer.json").read_text())


def test_a_file_that_is_damaged_or_of_another_version_is_refused(trained, tmp_path, data):
    model = write_model(tmp_path / "gpt2.bin", read_weights(trained.checkpoint(30)), 3)
    content = model.read_bytes()

    def refuses(text, changed):
        model.write_bytes(changed)
        refused(65, text, PROGRAM, "generate --tokenizer", data, "--init", model)

    def with_number(place, value):
        return content[:4 * place] + struct.pack("<i", value) + content[4 * place + 4:]

    size = f"{len(content):,}"
    refuses(f"gpt2.bin: has {len(content) - 4:,} bytes, but a model of its header has {size}", content[:-4])
    refuses(f"gpt2.bin: has {len(content) + 1:,} bytes, but a model of its header has {size}", content + b"x")
    refuses("gpt2.bin: has version 1; versions 3 (fp32) and 5 (bf16) of llm.c's models can be read", with_number(1, 1))
    refuses("gpt2.bin: its header has 300 tokens padded to 299", with_number(7, 299))
    refuses("gpt2.bin: ", with_number(4, 2**31 - 1))  # too many layers
    refuses("gpt2.bin: element 0 of wte.weight is inf", with_number(256, 0x7f800000))
    refuses("gpt2.bin is a token shard: give a directory", with_number(0, 20240520))
