"""test_export.py: `export` writes GGUF files: names, shapes, types, values and the vocabulary, by a reader of our own;
with -m hf by the package gguf and by llama.cpp (pip install gguf xllamacpp). A failed export leaves no file."""

import json
import math
import shutil
import struct

import pytest
from harness import PROGRAM, Run, limited, make_shards, overwrite, read_weights, refused, run, train

TYPES = {0: "f32", 1: "f16", 8: "q8_0", 30: "bf16"}  # ggml_type
BYTES = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34)}  # elements and bytes of a block
NAMES = {  # name in a GGUF file after "blk.N.", from that of Hugging Face after "transformer." and "h.N."
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}


class Gguf:
    """Reads a GGUF file of version 3: values by key; type, shape (slowest dimension first) and bytes by tensor."""

    def __init__(self, path):
        self.data, self.at = path.read_bytes(), 4
        version, count, keys = self.take("<IQQ")
        assert self.data[:4] == b"GGUF" and version == 3
        self.values = {self.text(): self.value(*self.take("<I")) for _ in range(keys)}
        infos = {}
        for _ in range(count):
            name, (dimensions,) = self.text(), self.take("<I")
            infos[name] = self.take(f"<{dimensions}Q")[::-1], TYPES[self.take("<I")[0]], *self.take("<Q")
        begin = end = -(-self.at // 32) * 32
        self.tensors = {}
        for name, (shape, kind, offset) in infos.items():
            block, size = BYTES[kind]
            start, end = begin + offset, begin + offset + math.prod(shape) // block * size
            assert offset % 32 == 0 and end <= len(self.data)
            self.tensors[name] = kind, list(shape), self.data[start:end]
        assert len(self.data) == -(-end // 32) * 32

    def take(self, form):
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self):
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length:self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.take("<IQ")
            return [self.value(inner) for _ in range(count)]
        return self.take({4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind])[0]


def expected(name, shape, values):
    """Returns the name, shape and floats that a tensor of Hugging Face has in a GGUF file."""
    parts = name.removeprefix("transformer.").split(".")
    layer = f"blk.{parts[1]}." if parts[0] == "h" else ""
    name = layer + NAMES[".".join(parts[2 if layer else 0:-1])] + "." + parts[-1]
    if layer and len(shape) == 2:  # Conv1D is (in, out)
        values = [values[i * shape[1] + o] for o in range(shape[1]) for i in range(shape[0])]
    return name, shape[::-1] if layer else shape, list(values)


def single(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def encode(kind, values):
    """Returns the bytes of floats. Double precision rounded to single is exact for one operation."""
    if kind in ("f32", "f16"):
        return struct.pack(f"<{len(values)}{'f' if kind == 'f32' else 'e'}", *values)
    if kind == "bf16":
        bits = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        return struct.pack(f"<{len(bits)}H", *((b + 0x7fff + (b >> 16 & 1)) >> 16 for b in bits))
    out = b""
    for i in range(0, len(values), 32):
        scale = single(max(map(abs, values[i:i + 32])) / 127)
        inverse = single(1 / scale)
        out += struct.pack("<e32b", scale, *(int(math.copysign(math.floor(abs(single(x * inverse)) + 0.5), x))
                                             for x in values[i:i + 32]))
    return out


def export(model, file, *options):
    return run(PROGRAM, "export", model, file, *options).out


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("channels", [32, 48])  # 32 does not divide 48, and divides 4 x 48
def test_a_file_of_each_type_has_the_weights_of_the_checkpoint(kind, channels, tmp_path, data):
    out = train("--steps 3 --channels", channels, "--vocab-size 310", out=tmp_path / "run", data=data)
    said = export(out, tmp_path / "model.gguf", "--type", kind)
    assert f"{out}/step_000003 as {kind}, 28 tensors" in said
    assert (", 7 of them f16 because 32 does not divide their rows" in said) == (kind == "q8_0" and channels == 48)
    found = Gguf(tmp_path / "model.gguf")
    weights = read_weights(out.checkpoint(3))
    assert len(found.tensors) == len(weights)
    for name, shape, values in (expected(name, *tensor) for name, tensor in weights.items()):
        matrix = len(shape) == 2 and name != "position_embd.weight"
        of_type = "f32" if not matrix else "f16" if kind == "q8_0" and shape[1] % 32 else kind
        assert found.tensors[name][:2] == (of_type, shape), name
        assert found.tensors[name][2] == encode(of_type, values), name
    values = {"architecture": "gpt2", "type": "model", "name": "model", "quantization_version": 2,
              "file_type": {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind]}
    sizes = {"context_length": 16, "embedding_length": channels, "feed_forward_length": 4 * channels,
             "block_count": 2, "attention.head_count": 2, "attention.layer_norm_epsilon": single(1e-5)}
    assert {key: value for key, value in found.values.items() if not key.startswith("tokenizer.")} == \
        {**{f"general.{key}": value for key, value in values.items()},
         **{f"gpt2.{key}": value for key, value in sizes.items()}}


def test_the_vocabulary_has_added_tokens_and_names_for_those_that_the_tokenizer_lacks(tmp_path, data):
    file = json.loads((data / "tokenizer.json").read_text())
    for content, special in (("<|user|>", True), ("new", False)):
        file["added_tokens"].append({"id": 300 + special, "content": content, "special": special, "normalized": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    out = train("--steps 1 --warmup 0 --vocab-size 304", out=tmp_path / "run", data=data)
    (out.checkpoint(1) / "trainer.json").unlink()
    (out.checkpoint(1) / "config.json").write_text((out.checkpoint(1) / "config.json").read_text().replace(
        '"bos_token_id": 299', '"bos_token_id": 299, "pad_token_id": 300'))
    export(out.checkpoint(1), tmp_path / "model.gguf", "--tokenizer", tmp_path)
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in Gguf(tmp_path / "model.gguf").values.items()
             if key.startswith("tokenizer.")}
    vocab = sorted(file["model"]["vocab"].items(), key=lambda item: item[1])
    assert found == {
        "model": "gpt2", "pre": "gpt-2", "bos_token_id": 299, "eos_token_id": 299, "padding_token_id": 300,
        "merges": file["model"]["merges"],
        "tokens": [token for token, _ in vocab] + ["new", "<|user|>", "[PAD302]", "[PAD303]"],
        "token_type": [1] * 299 + [3, 4, 3, 5, 5]}


def test_a_small_stack_is_enough(trained, tmp_path):
    run(limited("-s 100"), PROGRAM, "export", trained, tmp_path / "m.gguf")


def test_what_cannot_be_exported_is_one_sentence_and_leaves_no_file(trained, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    file, copy = folder / "m.gguf", shutil.copytree(trained.folder, tmp_path / "copy")
    for step in ("step_000015", "step_000030"):
        overwrite(copy / step / "model.safetensors", -4, b"\x00\x00\xc0\x7f")
    refused(65, "model.safetensors: its checksum does not match", PROGRAM, "export", copy, file)
    (copy / "step_000030/trainer.json").unlink()  # the weights are read then, and the last tensor has a NaN
    refused(65, "element 31 of transformer.h.1.mlp.c_proj.bias is nan", PROGRAM, "export", copy / "step_000030", file)
    full_disk = limited("-f 100")
    refused(74, "m.gguf.tmp: cannot write", full_disk, PROGRAM, "export --type f32", trained, file)
    refused(2, "--type q4 is not known; give f32|f16|bf16|q8_0", PROGRAM, "export --type q4", trained, file)
    refused(2, "m.bin: the file to write must end in .gguf", PROGRAM, "export", trained, folder / "m.bin")
    assert refused(2, "it got", PROGRAM, "export", file).errors[0].endswith("it got 1 name")
    refused(66, "none: there is no such directory", PROGRAM, "export", tmp_path / "none", file)
    refused(73, "no/m.gguf.tmp: cannot create", PROGRAM, "export", trained, folder / "no/m.gguf")
    assert list(folder.iterdir()) == []
    file.write_text("mine")
    refused(73, "m.gguf exists and is not replaced", PROGRAM, "export", trained, file)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("m.gguf", "mine")]


def test_a_value_that_f16_cannot_hold_is_refused(tmp_path, data):
    out = train("--steps 1 --warmup 0", out=tmp_path / "run", data=data).checkpoint(1)
    (out / "trainer.json").unlink()
    with open(out / "model.safetensors", "r+b") as weights:  # the first value of wte
        weights.seek(8 + int.from_bytes(weights.read(8), "little"))
        weights.write(struct.pack("<f", 65520))
    refused(65, "token_embd.weight has a value of size 65520, which is too large for f16; give --type bf16 or f32",
            PROGRAM, "export", out, tmp_path / "m.gguf")
    export(out, tmp_path / "m.gguf", "--type q8_0")
    assert Gguf(tmp_path / "m.gguf").tensors["token_embd.weight"][2][:3] == struct.pack("<eb", 65520 / 127, 127)


# ---- by the programs that read such files


@pytest.fixture(scope="session")
def talker(tmp_path_factory):
    """The output of a run that has learned a text of 400 different sentences."""
    folder = tmp_path_factory.mktemp("talker")
    words = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
    text = "".join(f"The {words[i % 16]} of {words[i * 7 % 15]} saw {words[i * i % 13]} dogs.\n" for i in range(400))
    data = make_shards(folder / "data", text * 4)
    options = "--channels 64 --heads 4 --seq-len 128 --micro-batch 4 --global-batch 512 --steps 300 --val-every 0"
    run(PROGRAM, options, "--layers 2 --lr 3e-3 --precision fp32 --quiet --train-data", data / "train_*.bin",
        "--output", folder / "run")
    return Run(folder / "run")


@pytest.mark.hf
@pytest.mark.parametrize("kind", BYTES)
def test_the_package_gguf_reads_the_tensors_that_it_would_write(kind, talker, tmp_path):
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    export(talker, tmp_path / "model.gguf", "--type", kind)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = read_weights(talker.checkpoint(300))
    assert len(found) == len(weights)
    for name, shape, values in (expected(name, *tensor) for name, tensor in weights.items()):
        tensor = found[name]
        want = gguf.quants.quantize(numpy.array(values, numpy.float32).reshape(shape), tensor.tensor_type)
        assert tensor.data.tobytes() == want.tobytes(), name
        assert list(tensor.shape) == shape[::-1]


@pytest.mark.hf
@pytest.mark.parametrize("names, ids, prefix", [
    ({}, {}, None), ({"bos_token": "<b>", "pad_token": "<p>"}, {}, None), ({}, {"pad_token_id": 5}, None),
    ({"bos_token": "<b>", "chat_template": "{{ messages }}"}, {}, "<b>"),
    ({"pad_token": "<p>"}, {"pad_token_id": 5}, None),
    ({"eos_token": "<p>"}, {"eos_token_id": [301, 299]}, None),
])
def test_the_package_gguf_finds_the_same_special_tokens_in_the_directory(names, ids, prefix, tmp_path, data):
    gguf = pytest.importorskip("gguf")
    model = train("--steps 1 --warmup 0 --vocab-size 304", out=tmp_path / "run", data=data).checkpoint(1)

    def edit(name, change):
        value = json.loads((model / name).read_text())
        change(value)
        (model / name).write_text(json.dumps(value))

    def change(tokenizer):
        for n, text in enumerate(("<b>", "<p>")):
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300 + n, "content": text})
        if prefix:
            tokenizer["post_processor"] = {
                "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "single": [{"SpecialToken": {"id": prefix, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {prefix: {"id": prefix, "ids": [300], "tokens": [prefix]}}}

    edit("tokenizer.json", change)
    edit("tokenizer_config.json", lambda found: found.update(names))
    edit("config.json", lambda found: found.update(ids))
    for name in ("trainer.json", "vocab.json", "merges.txt"):
        (model / name).unlink()
    export(model, tmp_path / "m.gguf")
    found, want = Gguf(tmp_path / "m.gguf").values, gguf.SpecialVocab(model, n_vocab=304)
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        assert found.get(f"tokenizer.ggml.{ours}_token_id") == want.special_token_ids.get(theirs), ours
    assert found.get("tokenizer.ggml.add_bos_token", False) == want.add_special_token.get("bos", False)
    assert found.get("tokenizer.chat_template") == want.chat_template
    gguf.GGUFReader(tmp_path / "m.gguf")


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_llama_cpp_continues_as_generate_does(kind, talker, tmp_path):
    llama = pytest.importorskip("xllamacpp")
    export(talker, tmp_path / "model.gguf", "--type", kind)
    params = llama.CommonParams()
    params.model.path = str(tmp_path / "model.gguf")
    params.n_ctx, params.cpuparams.n_threads, params.warmup = 128, 2, False
    server = llama.Server(params)
    for prompt in ("The", "The two of three saw", "The fifteen of nine saw four dogs.\nThe nine"):
        theirs = server.handle_completions({"prompt": prompt, "n_predict": 60, "temperature": 0, "top_k": 1,
                                            "ignore_eos": True})
        ours = run(PROGRAM, "generate --precision fp32 --temperature 0 --max-tokens 60 --init", talker, "--prompt",
                   [prompt]).out
        assert prompt + theirs["choices"][0]["text"] + "\n" == ours
