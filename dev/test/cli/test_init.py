"""test_init.py: what --init finds, and what of the configuration beside the weights checkpoints go on with."""

import json
import shutil

import pytest
from harness import PROGRAM, Run, edit_json, execute, read_weights, refused, run


def tune(*options, data, out=""):
    """Trains weights on for a step, unless options say more, and returns the result of the command."""
    return execute(PROGRAM, "--seq-len 16 --micro-batch 2 --global-batch 64 --warmup 0 --steps 1 --train-data",
                   data / "train_*.bin", ["--output", out], *options)


def configs(folder):
    return [json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")]


@pytest.fixture
def model(trained, tmp_path):
    """A copy of trained weights with their tokenizer of 300 tokens, as any Hugging Face directory."""
    return shutil.copytree(trained.checkpoint(30), tmp_path / "model",
                           ignore=shutil.ignore_patterns("trainer.json", "optimizer.*"))


def test_checkpoints_of_checkpoints_and_resumed_runs_keep_keys_that_are_not_read(model, data, tmp_path):
    roles = {"bos_token_id": 3, "eos_token_id": [4, 299], "pad_token_id": 5}
    edit_json(model / "config.json", resid_pdrop=0.1, summary_type="mean", transformers_version="4.0", dtype="float16",
         **roles)
    generation = '{"eos_token_id": [4, 299],\n "temperature": 0.7, "transformers_version": "4.0"}'
    (model / "generation_config.json").write_text(generation)
    first, last, without = (Run(tmp_path / name) for name in ("first", "last", "without"))
    for done in (tune("--init", model, out=first, data=data), tune("--steps 2 --resume", out=first, data=data),
                 tune("--init", first, out=last, data=data)):
        assert done.code == 0, done
    for checkpoint in (first.checkpoint(1), first.checkpoint(2), last.checkpoint(1)):
        want = {**json.loads((model / "config.json").read_text()), "torch_dtype": "float32"}
        del want["dtype"], want["transformers_version"]
        assert configs(checkpoint)[0] == want
        assert (checkpoint / "generation_config.json").read_text() == generation
    (model / "generation_config.json").unlink()
    tune("--init", model, out=without, data=data)
    assert "generation_config.json" not in [path.name for path in without.checkpoint(1).iterdir()]


def test_a_tokenizer_without_a_length_gets_none_and_that_of_a_new_model_has_the_context(model, trained, data, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()  # leaves vocab.json and merges.txt
    tune("--init", model, out=tmp_path / "run", data=data)
    folders = (trained.checkpoint(30), Run(tmp_path / "run").checkpoint(1), data)
    found = [json.loads((folder / "tokenizer_config.json").read_text()).get("model_max_length") for folder in folders]
    assert found == [16, None, None]


def test_config_json_has_the_tokens_of_another_tokenizer_and_a_line_says_so(model, data, tmp_path):
    for name in ("config.json", "generation_config.json"):
        edit_json(model / name, eos_token_id=7, pad_token_id=8)
    own = tune("--init", model, out=tmp_path / "own", data=data)
    assert f"texts end with token 7 in {model}, and with 299 in the tokenizer {model}: both stay" in own.err
    assert configs(Run(tmp_path / "own").checkpoint(1))[0]["eos_token_id"] == 7
    other = tune("--init", model, "--tokenizer", data, out=tmp_path / "other", data=data)
    assert "checkpoints have the tokens of the tokenizer" in other.err
    for found in configs(Run(tmp_path / "other").checkpoint(1)):
        assert found["eos_token_id"] == found["bos_token_id"] == 299 and found.get("pad_token_id") is None
    edit_json(model / "generation_config.json", eos_token_id=[7, 299])
    assert "texts end with" not in tune("--init", model, data=data).err


def test_an_end_of_text_that_the_model_lacks_becomes_the_tokenizers_and_other_ids_stay(model, data, tmp_path):
    for name in ("config.json", "generation_config.json"):
        edit_json(model / name, eos_token_id=50256, bos_token_id=3, pad_token_id=5)
    assert "texts end with" not in tune("--init", model, out=tmp_path / "run", data=data).err
    for found in configs(Run(tmp_path / "run").checkpoint(1)):
        assert [found[f"{name}_token_id"] for name in ("eos", "bos", "pad")] == [299, 3, 5]


def test_generate_ends_at_each_of_the_tokens_that_end_a_text(model, tmp_path):
    sample = [PROGRAM, "generate --temperature 0 --max-tokens 40 --prompt king --init", model]
    assert len(run(*sample).out) > len("king\n")
    edit_json(model / "config.json", eos_token_id=[299, *range(299)])  # generation_config.json counts alone
    assert len(run(*sample).out) > len("king\n")
    edit_json(model / "generation_config.json", eos_token_id=[299, *range(299)])
    assert run(*sample).out == "king\n"


def test_a_larger_vocabulary_adds_rows_that_depend_on_the_seed_alone(model, data, tmp_path):
    old, rows, still = read_weights(model)["transformer.wte.weight"][1], [], "--lr 0 --weight-decay 0"
    for options in ("--seed 1", "--seed 1 --ranks 2", "--seed 2"):
        out = Run(tmp_path / f"run{len(rows)}")
        said = tune(still, options, "--vocab-size 310 --init", model, out=out, data=data)
        assert f"--vocab-size adds 10 tokens to the 300 of {model}, with embeddings drawn around the mean" in said.out
        shape, values = read_weights(out.checkpoint(1))["transformer.wte.weight"]
        assert shape == [310, 32] and values[:300 * 32] == old
        rows.append(values[300 * 32:])
    assert rows[0] == rows[1] != rows[2] and len(set(rows[0])) > 300
    mean = [sum(old[c::32]) / 300 for c in range(32)]
    assert max(abs(x - mean[i % 32]) for i, x in enumerate(rows[0])) < 1e-3
    assert configs(out.checkpoint(1))[0]["vocab_size"] == 310
    assert tune("--steps 2 --resume", out=out, data=data).code == 0
    assert read_weights(out.checkpoint(2))["transformer.wte.weight"][1][300 * 32:] == rows[2]
    less = tune("--vocab-size 299 --init", model, data=data)
    assert less.code == 2 and "has a vocabulary of 300; give that, or leave the option out, or give more" in less.err
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    edit_json(model / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], {
        "id": 300, "content": "<new>", "special": True, "normalized": False}])
    assert "--vocab-size 301 adds them" in tune("--allow-other-tokenizer --init", model, data=data).err
    (tmp_path / "new.txt").write_text("<new> " * 3000)
    new = tmp_path / "new"
    run(PROGRAM, "tokenize --special-tokens --tokenizer", model, tmp_path / "new.txt", "--output", new)
    for command in (["eval --val-data", new / "val_*.bin"], ["--steps 1 --train-data", new / "train_*.bin"]):
        refused(65, ": a new run with --init and --vocab-size 301 adds the others", PROGRAM, *command, "--init", model)
    edit_json(model / "tokenizer_config.json", bos_token="<new>")  # would be in front of each text
    for command in (["eval --text", tmp_path / "new.txt", "--init", model], ["export", model, tmp_path / "m.gguf"]):
        refused(2, "has 301 tokens, but the model's vocabulary has 300", PROGRAM, *command)


def test_what_other_programs_call_a_model_is_found(model, data, tmp_path):
    cache, trainer = tmp_path / "hf/hub/models--org--tiny", tmp_path / "trainer"
    shutil.copytree(model, cache / "snapshots/0ab1")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("0ab1")
    for step in (90, 100):
        shutil.copytree(model, trainer / f"checkpoint-{step}")
    (trainer / "checkpoint-90/config.json").write_text("{}")
    sample = [PROGRAM, "generate --temperature 0 --max-tokens 9 --prompt king --init"]
    want = run(*sample, model).out
    for init, env in ((cache, {}), (trainer, {}), ("org/tiny", {"HF_HOME": tmp_path / "hf"}),
                      ("org/tiny", {"HF_HOME": "~/hf", "HOME": tmp_path}), ("org/tiny", {"HF_HOME": "${A}/h$B"}),
                      ("org/tiny", {"HUGGINGFACE_HUB_CACHE": "~/hf/hub", "HOME": tmp_path, "HF_HOME": "/nowhere"}),
                      ("org/tiny", {"HF_HUB_CACHE": "$A/hf/hub", "HUGGINGFACE_HUB_CACHE": "/nowhere"})):
        assert run(*sample, init, env={"A": tmp_path, "B": "f", **env}, cwd=tmp_path).out == want
    (cache / "refs/main").write_text("0ab2")
    refused(66, f"names no snapshot; name one of {cache}/snapshots", *sample, cache)
    refused(66, "hf download org/tiny --local-dir tiny", *sample, "org/tiny", env={"HF_HOME": tmp_path}, cwd=tmp_path)


def test_a_checkpoint_over_which_transformers_has_saved_is_a_model_alone(trained, data, tmp_path):
    out, other = Run(shutil.copytree(trained.folder, tmp_path / "run")), Run(tmp_path / "other")
    assert tune("--init", trained, out=other, data=data).code == 0
    saved, older = out.checkpoint(30), other.checkpoint(1)
    shutil.copy(older / "model.safetensors", saved)
    sample = [PROGRAM, "generate --temperature 0 --max-tokens 9 --prompt king --init"]
    refused(65, "the checkpoint is damaged", *sample, saved)
    edit_json(saved / "config.json", transformers_version="5.24.0")
    loss = [PROGRAM, "eval --val-data", data / "val_*.bin", "--init"]
    for command, model in ((sample, saved), (sample, out), (loss, saved)):
        done = run(*command, model)
        assert done.out.replace(str(saved), str(older)) == run(*command, older).out
        assert "and the optimizer's state does not belong to them" in done.err
    run(PROGRAM, "export", saved, tmp_path / "x.gguf")
    assert tune("--init", saved, out=tmp_path / "new", data=data).code == 0
    for output in (out, saved):
        refused(2, "transformers has saved a model over this checkpoint", PROGRAM, "--resume --output", output)


def test_folders_that_hold_something_else_are_refused_and_the_message_says_what_to_do(model, tmp_path):
    sample = [PROGRAM, "generate --prompt king --init"]
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064d}\nsize 548105171\n"
    for name in ("model.safetensors", "config.json"):
        kept = (model / name).read_bytes()
        for content, says in ((pointer, "is a git-lfs pointer in place of the file, not "),
                              ("<!DOCTYPE html><html></html>", "is a web page (HTML), not ")):
            (model / name).write_text(content)
            refused(65, f"{name}: {says}", *sample, model)
        (model / name).write_bytes(kept)
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for removed in (None, "model.safetensors", "config.json"):
        if removed:
            (model / removed).unlink()
        refused(65, "is a LoRA adapter (adapter_config.json), which is not applied; ", *sample, model)


def test_weights_of_other_programs_are_named_in_a_folder_and_alone(model, tmp_path):
    sample = [PROGRAM, "generate --prompt king --init"]
    # As PyTorch's HuggingFaceStorageWriter names them, if it does not consolidate.
    part = "shard-00001-model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / part)
    refused(66, f"{model}: has no model.safetensors, and no model.safetensors.index.json, which would name {part} as a "
            "part", *sample, model)
    (tmp_path / "accelerate").mkdir()
    (model / part).rename(tmp_path / "accelerate/model.safetensors")  # its save_model() writes no config.json
    refused(66, "(no step_*); copy config.json and the tokenizer's files of the model into it", *sample,
            tmp_path / "accelerate")
    (model / "tokenizer.json").rename(model / "tokenizer.pkl")
    for name in ("vocab.json", "merges.txt"):
        (model / name).unlink()
    pickle = refused(66, f"{model}: is no whole tokenizer, which has tokenizer.json, or both ", PROGRAM,
                     "tokenize --tokenizer", model, model / "config.json", "--output", tmp_path / "shards")
    assert "; nanochat's tokenizer.pkl splits text otherwise; --train-bpe makes one" in pickle.err
    for name, program in (("flax_model.msgpack", "Flax"), ("model.onnx", "ONNX"), ("d2.gguf", "llama.cpp"),
                          ("model.weights.h5", "Keras"), ("model_000100.pt", "PyTorch"),
                          ("openvino_model.xml", "OpenVINO")):
        (model / name).write_bytes(b"weights")
        says = f"; {name} is of {program}, and only safetensors are read: give the model that it was made from, or"
        refused(66, f"{model}: has no model.safetensors{says}", *sample, model)
        refused(65, says, *sample, model / name)
        (tmp_path / program).mkdir()
        (model / name).rename(tmp_path / program / name)
        refused(66, f"{tmp_path / program}: is neither a Hugging Face directory (no config.json) nor the output of a "
                f"run (no step_*){says}", *sample, tmp_path / program)
    (model / "onnx").mkdir()  # where the Hub's exports have it
    refused(66, f"{model}: has no model.safetensors; onnx is of ONNX, ", *sample, model)
