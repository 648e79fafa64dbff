"""test_hf.py: Hugging Face's transformers and tokenizers compute what the program computes, and each reads the files of
the other. By name only (-m hf): pip install torch transformers tokenizers lm-eval[hf]==0.4.13, for the Python that runs
it.
"""

import array
import json
import math
import os
import random
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import PROGRAM, ROOT, Run, make_shards, refused, run, train

pytestmark = pytest.mark.hf
DATA = ROOT.parent / "shared/data"  # where it is there, GPT-2's vocabulary and tinyshakespeare


@pytest.fixture(scope="session")
def hf():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield SimpleNamespace(torch=pytest.importorskip("torch"), transformers=pytest.importorskip("transformers"),
                              tokenizers=pytest.importorskip("tokenizers"),
                              files=pytest.importorskip("safetensors.torch"))


def load(hf, folder):
    """Loads a model as a user would; no tensor may be missing or unexpected."""
    model, info = hf.transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


@pytest.fixture(scope="session")
def reference(hf):
    """The tensors of PyTorch's own computation (reference.py), and a model of transformers with its weights."""
    path = ROOT / "dev/test/support/reference.safetensors"
    header = json.loads(path.read_bytes()[8:8 + struct.unpack("<Q", path.read_bytes()[:8])[0]])
    config = hf.transformers.GPT2Config(**json.loads(header["__metadata__"]["config"]))
    tensors = hf.files.load_file(path)
    model = hf.transformers.GPT2LMHeadModel(config)
    weights = {name: value for name, value in tensors.items() if name.startswith("transformer.")}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return SimpleNamespace(tensors=tensors, weights=weights, model=model, vocab=config.vocab_size)


@pytest.mark.parametrize("form", ["one", "sharded", "bare", "half"])
def test_a_model_of_transformers_is_read_and_saved_with_the_same_bits_and_logits(form, hf, reference, tmp_path):
    model = hf.transformers.GPT2LMHeadModel(reference.model.config)
    model.load_state_dict(reference.model.state_dict())
    if form == "half":
        model.half()
    part = model.transformer if form == "bare" else model  # GPT2Model: names without "transformer."
    part.save_pretrained(tmp_path / form, max_shard_size="100KB" if form == "sharded" else "1GB")
    assert (tmp_path / form / "model.safetensors.index.json").exists() == (form == "sharded")

    tokens = array.array("H", [i * i % reference.vocab for i in range(1000)])
    (tmp_path / "data.bin").write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + tokens.tobytes())
    out = Run(tmp_path / "run")
    run(PROGRAM, "--lr 0 --weight-decay 0 --precision fp32 --seq-len 16 --micro-batch 2 --steps 1 --warmup 0 --quiet",
        ["--train-data", tmp_path / "data.bin", "--init", tmp_path / form, "--output", out])

    saved = hf.files.load_file(out.checkpoint(1) / "model.safetensors")
    want = {name: value.half().float() if form == "half" else value for name, value in reference.weights.items()}
    assert saved.keys() == want.keys()
    assert [name for name in want if not hf.torch.equal(saved[name], want[name])] == []
    if form == "half":
        return
    with hf.torch.no_grad():
        logits = load(hf, out.checkpoint(1))(reference.tensors["tokens"].long()).logits
    # transformers sums floats in another order, which changes logits of about 5 by a few roundings. A wrong layout
    # would change them far more.
    assert (logits - reference.tensors["logits"]).abs().max() < 1e-4


@pytest.fixture(scope="session")
def trained_long(data, tmp_path_factory):
    """A checkpoint with a context of 64 tokens."""
    options = "--precision fp32 --seq-len 64 --global-batch 128 --steps 40"
    return train(options, out=tmp_path_factory.mktemp("long") / "run", data=data).checkpoint(40)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_a_checkpoint_with_its_tokenizer(dtype, hf, data, tmp_path):
    out = train("--steps 2 --export-dtype", dtype, out=tmp_path / "run", data=data)
    model = load(hf, out.checkpoint(2))
    tokenizer = hf.transformers.AutoTokenizer.from_pretrained(out.checkpoint(2))
    text = "the old king\nheard  of a héron."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id


SOURCES = {
    "as transformers saves it": {},
    "a list of eos": {"eos_token_id": [299, 7], "pad_token_id": 5, "bos_token_id": 3, "task_specific_params": {"a": 1}},
    "no generation_config.json": {"pad_token_id": 5, "bos_token_id": 3, "eos_token_id": [299]},
    "save_model": {"resid_pdrop": 0.2, "summary_type": "mean", "use_cache": False},
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_fine_tuned_model_is_configured_and_generates_as_its_source(source, hf, data, tmp_path):
    model, out, positions = tmp_path / "model", Run(tmp_path / "out"), 64
    hf.torch.manual_seed(1)
    config = hf.transformers.GPT2Config(**{"vocab_size": 300, "n_positions": positions, "n_embd": 32, "n_layer": 2,
                                           "n_head": 2, "bos_token_id": 299, "eos_token_id": 299, **SOURCES[source]})
    begin = hf.transformers.GPT2LMHeadModel(config)
    begin.generation_config.update(max_new_tokens=30, repetition_penalty=1.2)
    begin.save_pretrained(model)
    if source == "no generation_config.json":
        (model / "generation_config.json").unlink()
    plain = shutil.copytree(model, tmp_path / "plain")  # transformers 4 does not read what save_model() writes
    if source == "save_model":
        hf.files.save_model(begin, model / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
        (model / file).write_bytes((data / file).read_bytes())
    run(PROGRAM, "--lr 0 --weight-decay 0 --precision fp32 --seq-len 16 --micro-batch 2 --steps 1 --warmup 0 --quiet",
        ["--train-data", data / "train_*.bin", "--init", model, "--output", out])
    before, after = load(hf, plain), load(hf, out.checkpoint(1))
    want, got = before.config.to_dict(), after.config.to_dict()
    changed = {key for key in want | got if want.get(key) != got.get(key)} - {"_name_or_path"}
    assert changed <= {"architectures", "n_ctx"}, (changed, want, got)
    assert before.generation_config.to_dict() == after.generation_config.to_dict()
    prompt = hf.torch.tensor([[5, 6, 7]])
    for sample in (False, True):
        texts = []
        for loaded in (before, after):
            hf.torch.manual_seed(2)
            texts.append(loaded.generate(prompt, do_sample=sample).tolist())
        assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_over_which_transformers_has_saved_is_its_model(dtype, hf, data, tmp_path):
    out = train("--steps 2 --checkpoint-every 1 --precision fp32", out=tmp_path / "run", data=data)
    saved = out.checkpoint(2)
    sample = [PROGRAM, "generate --temperature 0 --max-tokens 9 --prompt king --precision fp32 --init"]
    model = load(hf, saved)
    with hf.torch.no_grad():
        model.transformer.wpe.weight.normal_()
    model.to(getattr(hf.torch, dtype)).save_pretrained(saved)
    model.save_pretrained(tmp_path / "apart")
    hf.transformers.AutoTokenizer.from_pretrained(saved).save_pretrained(saved)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(saved / file, tmp_path / "apart")
    got = [run(*sample, folder) for folder in (saved, out, tmp_path / "apart")]
    assert got[0].out == got[1].out == got[2].out
    assert "transformers has saved a model over this checkpoint" in got[0].err
    refused(2, "the optimizer's state does not belong to its weights", PROGRAM, "--resume -o", out)


@pytest.mark.parametrize("reader", ["ctranslate2", "gguf"])
def test_other_readers_continue_a_text_as_transformers_does(reader, hf, data, tmp_path):
    package, source = pytest.importorskip(reader), tmp_path / "source"
    hf.torch.manual_seed(1)
    shape = {"vocab_size": 300, "n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 2, "eos_token_id": 299}
    config = hf.transformers.GPT2Config(**shape, initializer_range=0.3)
    hf.transformers.GPT2LMHeadModel(config).save_pretrained(source)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / file, source)
    run(PROGRAM, "--lr 0 --weight-decay 0 --precision fp32 --seq-len 16 --micro-batch 2 --steps 1 --warmup 0 --quiet",
        ["--train-data", data / "train_*.bin", "--init", source, "--output", tmp_path / "out"])
    saved, prompt = Run(tmp_path / "out").checkpoint(1), [5, 6, 7]

    def text(model):
        return model.generate(hf.torch.tensor([prompt]), do_sample=False, max_new_tokens=30)[0].tolist()

    want = text(load(hf, saved))
    if reader == "ctranslate2":
        package.converters.TransformersConverter(str(saved)).convert(str(tmp_path / "converted"))
        tokens = hf.transformers.AutoTokenizer.from_pretrained(saved).convert_ids_to_tokens(prompt)
        generator = package.Generator(str(tmp_path / "converted"))
        got = generator.generate_batch([tokens], max_length=40)[0].sequences_ids[0][:len(want)]
    else:
        pytest.importorskip("accelerate")
        run(PROGRAM, "export", saved, tmp_path / "model.gguf", "--type f32")
        got = text(hf.transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf"))
    assert got == want and len(set(want)) > 10


def test_new_tokens_are_distributed_as_by_resize_token_embeddings(hf, data, tmp_path):
    source = train("--steps 2 --precision fp32", out=tmp_path / "run", data=data).checkpoint(2)
    theirs = load(hf, source)
    old = theirs.transformer.wte.weight.detach().clone().double()
    hf.torch.manual_seed(1)
    theirs.resize_token_embeddings(300 + 4000)
    run(PROGRAM, "--lr 0 --weight-decay 0 --precision fp32 --seq-len 16 --micro-batch 2 --steps 1 --warmup 0 --quiet",
        ["--train-data", data / "train_*.bin", "--init", source, "--output", tmp_path / "more", "--vocab-size", 4300])
    ours = load(hf, Run(tmp_path / "more").checkpoint(1))
    assert ours.config.vocab_size == 4300
    samples = [model.transformer.wte.weight.detach().double() for model in (theirs, ours)]
    scale = (1e-9 * old.var(0, correction=0)).sqrt()
    normal = [(sample[300:] - old.mean(0)) / scale for sample in samples]  # variance 1, correlated as the old rows
    for sample, deviations in zip(samples, normal):
        assert hf.torch.equal(sample[:300], old)
        assert deviations.mean(0).abs().max() < 5 / 4000 ** 0.5
        assert (deviations.var(0) - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    covariance = [deviations.T @ deviations / 4000 for deviations in normal]
    assert (covariance[0] - covariance[1]).abs().max() < 6 * (2 * 2 / 4000) ** 0.5


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
def test_the_likeliest_text_with_a_repetition_penalty_is_that_of_transformers(penalty, hf, trained_long):
    model, tokenizer = load(hf, trained_long), hf.transformers.AutoTokenizer.from_pretrained(trained_long)
    tokens = hf.torch.tensor([tokenizer("the old king")["input_ids"]])
    theirs = model.generate(tokens, do_sample=False, repetition_penalty=penalty, max_new_tokens=40, pad_token_id=0)
    ours = run(PROGRAM, "generate --precision fp32 --temperature 0 --max-tokens 40 --prompt 'the old king' --init",
               trained_long, "--repetition-penalty", penalty).out
    assert ours == tokenizer.decode(theirs[0], skip_special_tokens=True, clean_up_tokenization_spaces=False) + "\n"


# ---- evaluation


def rows_of_eval(model, rows, file, *options):
    """Returns the results of the rows by `train_gpt2 eval`, and the table."""
    table = run(PROGRAM, "eval --precision fp32", ["--init", model, "--task", rows, "--rows", file], *options,
                limit=3600).out
    return [json.loads(line) for line in file.read_text().splitlines()], table


@pytest.mark.parametrize("prepend", [False, True])
def test_each_row_has_the_log_probability_of_transformers(prepend, hf, data, tmp_path):
    out = train("--steps 1 --warmup 0 --precision fp32", out=tmp_path / "run", data=data)
    model, end = load(hf, out.checkpoint(1)), [299] * prepend
    tokenizer = hf.transformers.AutoTokenizer.from_pretrained(out.checkpoint(1))
    rng, words = random.Random(3), "the a king queen old young saw heard of and to in house river went came".split()
    texts = [[" ".join(rng.choices(words, k=rng.randrange(1, 9))) for _ in range(3)] for _ in range(200)]
    (tmp_path / "task").write_text("".join(
        json.dumps({"query": query, "choices": choices, "gold": 0}) + "\n" for query, *choices in texts))
    found, _ = rows_of_eval(out.checkpoint(1), tmp_path / "task", tmp_path / "rows", *["--prepend-eot"] * prepend)
    for row, (query, *choices) in zip(found, texts):
        for ours, count, greedy, choice in zip(row["logprobs"], row["tokens"], row["greedy"], choices):
            tokens = (end + tokenizer(f"{query} {choice}")["input_ids"])[-17:]  # the context has 16 positions
            with hf.torch.no_grad():
                logits = model(hf.torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)[-count:]
            theirs = logits.gather(1, hf.torch.tensor(tokens[-count:])[:, None]).sum().item()
            assert abs(ours - theirs) < 1e-4 * count
            assert greedy == (logits.argmax(-1).tolist() == tokens[-count:])


TASKS = {"piqa": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_bytes}]
""", "lambada_openai": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{' ' + continuation}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""}


@pytest.mark.parametrize("task", TASKS)
def test_each_row_has_the_log_probability_and_the_accuracy_of_lm_eval(task, hf, tmp_path):
    """MODEL names a trained model; else a small one is trained for a few steps."""
    lm_eval, rows = pytest.importorskip("lm_eval"), DATA / f"eval/{task}.jsonl"
    pytest.importorskip("accelerate")  # lm-eval[hf] needs it
    if not rows.exists():
        pytest.skip(f"{rows} is not there")
    model = os.environ.get("MODEL")
    if not model:
        data = make_shards(tmp_path / "data", (DATA / "tinyshakespeare/input.txt").read_text(), vocab=4096)
        model = train("--channels 64 --seq-len 256 --global-batch 2048 --steps 30", out=tmp_path / "run", data=data)
        model = model.checkpoint(30)
    found, table = rows_of_eval(model, rows, tmp_path / "rows")
    # lm-eval refuses continuations that are longer than the context.
    positions = json.loads((Path(model) / "config.json").read_text())["n_positions"]
    docs = [json.loads(line) for line in rows.read_text().splitlines()]
    kept = [(row, doc) for row, doc in zip(found, docs, strict=True) if max(row["tokens"]) < positions]
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps(doc) + "\n" for _, doc in kept))
    (tmp_path / "task.yaml").write_text(f"task: rows\ndataset_path: json\ntest_split: test\ndataset_kwargs: "
                                        f"{{data_files: {{test: {tmp_path}/kept.jsonl}}}}\n{TASKS[task]}")
    from lm_eval.models.huggingface import HFLM
    result = lm_eval.simple_evaluate(
        HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=16), tasks=["rows"], bootstrap_iters=0,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False), log_samples=True)
    samples = sorted(result["samples"]["rows"], key=lambda sample: sample["doc_id"])
    worst = 0.0
    for (row, doc), sample in zip(kept, samples, strict=True):
        theirs = [response[0] for response in sample["resps"]]
        worst = max(worst, *(abs(a - b[0]) / n for a, b, n in zip(row["logprobs"], theirs, row["tokens"])))
        assert row["greedy"] == [greedy for _, greedy in theirs], row
        hit = row["prediction"] == row["gold"] if "gold" in row else row["greedy"][0]
        assert hit == sample["acc"], row
        if "gold" in row:
            by_byte = [value / len(choice.encode()) for value, choice in zip(row["logprobs"], doc["choices"])]
            assert (by_byte.index(max(by_byte)) == row["gold"]) == sample["acc_bytes"], row
    print(f"{table}{len(kept)} of {len(found)} rows in lm-eval: {result['results']['rows']}\n"
          f"largest difference per token {worst:.1e}")
    assert worst < 1e-4


def test_the_loss_of_a_text_is_the_rolling_log_likelihood_of_lm_eval(hf, trained_long, tmp_path):
    lm_eval = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance
    # Longer than the context of 64 tokens, shorter, white space at both ends, a special token, and empty.
    texts = ["the king \n" * 100, "king", "  the king\u00a0\n", "the<|endoftext|>king", ""]
    lm = lm_eval.HFLM(pretrained=str(trained_long), dtype="float32", device="cpu")
    sums = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts if text])
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = run(PROGRAM, "eval --precision fp32", ["--init", trained_long, "--text", tmp_path / "texts.jsonl"]).out
    bits = float(found.split(" bits per byte")[0].split()[-1])
    assert abs(bits + sum(sums) / math.log(2) / sum(len(text.encode()) for text in texts)) < 1e-5, found


# ---- a tokenizer that is fine-tuned

ROLES = ["bos_token", "eos_token", "pad_token", "sep_token", "unk_token", "mask_token", "cls_token"]
WORDS = ["Hogwarts", "New York", "<x>", "the king", " of", "<sep>", "<|im_start|>", "<pad>", "né<", "[MASK]", "old",
         "🙂", "<x><sep>", "|>"]


@pytest.fixture(scope="session")
def small_model(data, tmp_path_factory):
    """A checkpoint with 20 rows more than its tokenizer has tokens."""
    out = tmp_path_factory.mktemp("small") / "run"
    return train("--steps 1 --warmup 0 --vocab-size 320 --precision fp32", out=out, data=data).checkpoint(1)


def random_token(hf, rng, content, special):
    return hf.tokenizers.AddedToken(content, lstrip=rng.random() < 0.2, rstrip=rng.random() < 0.2, special=special,
                                    normalized=rng.random() < 0.5)


def random_setup(hf, rng, folder):
    """Saves a model with a random tokenizer: its roles, added tokens, templates, post_processor and length."""
    if rng.random() < 0.2:  # a vocabulary without <|endoftext|>, whose eos_token has its id
        for name in ("tokenizer.json", "vocab.json", "tokenizer_config.json"):
            (folder / name).write_text((folder / name).read_text().replace("<|endoftext|>", "</s>"))
    tokenizer = hf.transformers.AutoTokenizer.from_pretrained(folder)
    contents = rng.sample(WORDS, 6)
    for role in rng.sample(ROLES, rng.randrange(5)):
        content = rng.choice([tokenizer.eos_token, f"<{role}>", random_token(hf, rng, f"[{role}]", True)])
        tokenizer.add_special_tokens({role: content})
    for content in contents[:rng.randrange(4)]:
        tokenizer.add_tokens([random_token(hf, rng, content, rng.random() < 0.3)])
    if rng.random() < 0.3:
        tokenizer.add_special_tokens({"additional_special_tokens": [contents[4], f"<{contents[5]}>"]})
    if rng.random() < 0.4:
        tokenizer.chat_template = rng.choice(["{{ messages }}", {"default": "{{ messages }}", "rag": "{{ x }}"}])
    if rng.random() < 0.4:
        bos = tokenizer.bos_token or tokenizer.eos_token
        template = hf.tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))])
        byte_level = hf.tokenizers.processors.ByteLevel(trim_offsets=False)
        tokenizer._tokenizer.post_processor = rng.choice(
            [template, hf.tokenizers.processors.Sequence([byte_level, template])])
    tokenizer.model_max_length = rng.choice([16, 1000, tokenizer.model_max_length])
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)
    ids = {f"{role}_id": getattr(tokenizer, f"{role}_id") for role in ROLES[:3]}
    config = json.loads((folder / "config.json").read_text()) | ids
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["padding_side"] = rng.choice(["left", "right"])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("seed", range(200))
def test_a_fine_tuned_directory_is_to_transformers_what_its_source_is(seed, hf, small_model, tmp_path):
    rng, source, out = random.Random(seed), tmp_path / "source", Run(tmp_path / "run")
    shutil.copytree(small_model, source, ignore=shutil.ignore_patterns("trainer.json", "optimizer*"))
    random_setup(hf, rng, source)
    before = hf.transformers.AutoTokenizer.from_pretrained(source)
    pieces = [*WORDS, *before.all_special_tokens, " ", "  ", "\n", "a", "king", "Hogwarts'", "New", "York"]
    texts = ["a", *("".join(rng.choices(pieces, k=rng.randrange(1, 12))) for _ in range(20))]
    documents = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(documents * 3)
    run(PROGRAM, "tokenize --special-tokens --val-fraction 0", tmp_path / "texts.jsonl", "--tokenizer", source,
        "--output", tmp_path / "data")
    run(PROGRAM, "--lr 0 --weight-decay 0 --steps 1 --warmup 0 --seq-len 16 --micro-batch 1 --precision fp32 --quiet",
        ["--init", source, "--train-data", tmp_path / "data/train_*.bin", "--output", out])
    in_data, after = map(hf.transformers.AutoTokenizer.from_pretrained, (tmp_path / "data", out.checkpoint(1)))
    for now in (in_data, after):
        assert now.special_tokens_map == before.special_tokens_map
        assert now.added_tokens_decoder == before.added_tokens_decoder
        assert (now.chat_template, now.padding_side) == (before.chat_template, before.padding_side)
        assert now.model_max_length == before.model_max_length
        ids = now(texts)["input_ids"]
        assert ids == before(texts)["input_ids"]
        assert now.batch_decode(ids, skip_special_tokens=True) == before.batch_decode(ids, skip_special_tokens=True)
    end = before.eos_token_id if "<|endoftext|>" not in before.get_vocab() else before.get_vocab()["<|endoftext|>"]
    want = [[*([end] if tokens[:1] != [end] or not len(before("").input_ids) else []), *tokens]
            for tokens in before(texts)["input_ids"]]
    shard = array.array("H", (tmp_path / "data/train_000001.bin").read_bytes()[1024:])
    assert shard.tolist() == sum(want, []) * 3
    if before.pad_token is None:
        return
    texts, outputs = [text for text in texts if 0 < len(before(text).input_ids) < 8], []
    for folder, tokenizer in ((source, before), (out.checkpoint(1), after)):
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        outputs.append(load(hf, folder).generate(**batch, max_new_tokens=6, do_sample=False).tolist())
    assert outputs[0] == outputs[1]


# ---- tokens

AWKWARD = ["'s", "'t", "'re", "'ve", "'ll", "'d", "'m", "'S", "'", "''", "’", " ", "  ", "\t", "\n", "\r\n",
           "\v", "\f", "\0", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\xad", "\u1680", "\u180e", "\u2000",
           "\u200a", "\u200b", "\u2028", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff", "\ufffd",
           "e\u0301", "é", "²", "½", "Ⅷ", "٣", "कि", "ñ", "Ж", "漢", "字", "한", "😀", "👨‍👩‍👧", "𝔘", "\U0001e4d0",
           "\U00016d40", "\U000105c0", "a", "B", "z", "0", "9", "_", "-", ".", ",", "!", "<|endoftext|>",
           "the", " the", "ing", "aaaa", "\U0010ffff", "ﬁ", "ǅ", "ʰ", "Ⓐ", "\u0378"]


@pytest.fixture(scope="session")
def texts():
    """This repository's sources, random strings over awkward characters and code points, and tinyshakespeare."""
    rng = random.Random(20240520)
    sources = [*ROOT.glob("llmc/**/*.*"), *ROOT.glob("dev/**/*.py"), *ROOT.glob("dev/test/**/*.cpp")]
    found = [path.read_text("utf-8") for path in [*sorted(sources), *DATA.glob("tinyshakespeare/input.txt")]]
    for _ in range(2000):
        found.append("".join(rng.choice(AWKWARD) for _ in range(rng.randrange(1, 40))))
        code_points = (rng.randrange(0x110000) for _ in range(rng.randrange(1, 20)))
        found.append("".join(chr(c) for c in code_points if not 0xd800 <= c < 0xe000) + ".")
        found.append("".join(chr(rng.randrange(0x3000)) for _ in range(rng.randrange(1, 40))))
    return found


def tokenize(folder, texts, *options):
    """Returns the texts' tokens by `train_gpt2 tokenize`, without <|endoftext|>, and the folder that it wrote."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = folder / "out"
    run(PROGRAM, "tokenize", folder / "texts.jsonl", "--output", out, "--val-fraction 0", *options)
    end_of_text = json.loads((out / "vocab.json").read_text())["<|endoftext|>"]
    documents = []
    for token in array.array("H", b"".join(path.read_bytes()[1024:] for path in sorted(out.glob("train_*.bin")))):
        if token == end_of_text:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents, out


def byte_level(hf, model):
    """Returns a tokenizer without added tokens: <|endoftext|> in a text is text, as it is for the trainer."""
    pytest.importorskip("tokenizers", minversion="0.22")  # 0.19 has an older table of Unicode
    tokenizer = hf.tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = hf.tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.tokenizers.decoders.ByteLevel()
    return tokenizer


def assert_same_tokens(texts, documents, tokenizer):
    assert len(texts) == len(documents)
    for text, ours, theirs in zip(texts, documents, tokenizer.encode_batch(texts)):
        assert ours == theirs.ids, text[:60]


def assert_files_are_read(hf, out, texts, documents):
    """Asserts that Hugging Face reads the same tokenizer from tokenizer.json and from vocab.json and merges.txt."""
    model = hf.tokenizers.models.BPE.from_file(str(out / "vocab.json"), str(out / "merges.txt"))
    assert_same_tokens(texts, documents, byte_level(hf, model))
    loaded = hf.tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    end_of_text = loaded.token_to_id("<|endoftext|>")
    assert loaded.encode("a<|endoftext|>b").ids.count(end_of_text) == 1
    plain = [(text, tokens) for text, tokens in zip(texts, documents) if "<|endoftext|>" not in text]
    assert_same_tokens(*zip(*plain), loaded)
    for text, tokens in plain:
        assert loaded.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocab", [257, 8192])
def test_a_vocabulary_trained_on_the_same_texts_has_the_same_merges_and_tokens(vocab, hf, texts, tmp_path):
    documents, out = tokenize(tmp_path, texts, "--train-bpe", vocab)
    tokenizer = byte_level(hf, hf.tokenizers.models.BPE())
    alphabet = hf.tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, hf.tokenizers.trainers.BpeTrainer(
        vocab_size=vocab - 1, show_progress=False, initial_alphabet=alphabet))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert (out / "merges.txt").read_text().split("\n")[1:-1] == \
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    assert_files_are_read(hf, out, texts, documents)


def test_gpt2s_vocabulary_gives_the_same_tokens_and_is_written_as_it_was_read(hf, texts, tmp_path):
    vocab, merges = DATA / "gpt2-bpe/encoder.json", DATA / "gpt2-bpe/vocab.bpe"
    if not vocab.exists():
        pytest.skip(f"{vocab} is not there")
    documents, out = tokenize(tmp_path, texts, "--tokenizer", vocab.parent)
    assert_same_tokens(texts, documents, byte_level(hf, hf.tokenizers.models.BPE.from_file(str(vocab), str(merges))))
    assert_files_are_read(hf, out, texts, documents)
    assert json.loads((out / "vocab.json").read_text()) == json.loads(vocab.read_text())
    assert (out / "merges.txt").read_text() == merges.read_text()
