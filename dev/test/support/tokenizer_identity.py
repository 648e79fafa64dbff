#!/usr/bin/env python3
"""Compares `train_gpt2 tokenize` with Hugging Face's tokenizers: tokens, merges and files.

usage: tokenizer_identity.py [PROGRAM]        default build/release/train_gpt2; needs pip install tokenizers

It runs the program and reads its files. Texts: this repository's sources, random strings over awkward
characters, and, where ../shared/data has them, tinyshakespeare and GPT-2's own vocabulary.
"""
import array
import json
import pathlib
import random
import subprocess
import sys
import tempfile

try:
    import tokenizers
except ImportError:
    print("skipped: the Python module tokenizers is not installed (pip install tokenizers)")
    sys.exit(0)

ROOT = pathlib.Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data"
PROGRAM = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/release/train_gpt2").resolve())

AWKWARD = ["'s", "'t", "'re", "'ve", "'ll", "'d", "'m", "'S", "'", "''", "’", " ", "  ", "\t", "\n", "\r\n",
           "\v", "\f", "\0", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\xad", "\u1680", "\u180e", "\u2000",
           "\u200a", "\u200b", "\u2028", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff", "\ufffd",
           "e\u0301", "é", "²", "½", "Ⅷ", "٣", "कि", "ñ", "Ж", "漢", "字", "한", "😀", "👨‍👩‍👧", "𝔘", "\U0001e4d0",
           "\U00016d40", "\U000105c0", "a", "B", "z", "0", "9", "_", "-", ".", ",", "!", "<|endoftext|>",
           "the", " the", "ing", "aaaa", "\U0010ffff", "ﬁ", "ǅ", "ʰ", "Ⓐ", "\u0378"]


def random_texts(count):
    rng = random.Random(20240520)
    texts = []
    for _ in range(count):
        texts.append("".join(rng.choice(AWKWARD) for _ in range(rng.randrange(1, 40))))
    for _ in range(count):
        code_points = (rng.randrange(0x110000) for _ in range(rng.randrange(1, 20)))
        texts.append("".join(chr(c) for c in code_points if not 0xd800 <= c < 0xe000) + ".")
    for _ in range(count):
        texts.append("".join(chr(rng.randrange(0x3000)) for _ in range(rng.randrange(1, 40))))
    return texts


def read_texts():
    sources = [*ROOT.glob("llmc/**/*.*"), *ROOT.glob("dev/**/*.py"), *ROOT.glob("dev/test/**/*.cpp")]
    texts = [path.read_text("utf-8") for path in sorted(sources)] + random_texts(2000)
    if (DATA / "tinyshakespeare/input.txt").exists():
        texts.append((DATA / "tinyshakespeare/input.txt").read_text("utf-8"))
    return texts


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def tokenize(folder, texts, *options):
    """The documents as `train_gpt2 tokenize` encodes them, without their <|endoftext|>, and the folder it wrote."""
    write_jsonl(folder / "texts.jsonl", texts)
    out = folder / "out"
    command = [PROGRAM, "tokenize", str(folder / "texts.jsonl"), "--output", str(out), "--val-fraction", "0", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    data = b"".join(path.read_bytes()[1024:] for path in sorted(out.glob("train_*.bin")))
    tokens = array.array("H", data).tolist()
    end_of_text = json.loads((out / "vocab.json").read_text())["<|endoftext|>"]
    documents = []
    for token in tokens:
        if token == end_of_text:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents, out


def byte_level(model):
    """Without added tokens: <|endoftext|> in a text is text, as it is for the trainer."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def compare_encoding(name, texts, documents, reference):
    assert len(texts) == len(documents), f"{name}: {len(texts)} texts, {len(documents)} documents"
    for text, ours, theirs in zip(texts, documents, reference.encode_batch(texts)):
        if ours != theirs.ids:
            place = next(i for i, pair in enumerate(zip(ours + [-1], theirs.ids + [-1])) if pair[0] != pair[1])
            sys.exit(f"FAILED {name}: {text[:60]!r}: at token {place}: ours {ours[place:place + 8]}, "
                     f"Hugging Face {theirs.ids[place:place + 8]}")
    print(f"passed {name}: {len(texts)} texts, {sum(map(len, documents))} tokens")


def check_saved_files(name, out, texts, documents):
    """tokenizer.json, and vocab.json with merges.txt, as Hugging Face reads them."""
    loaded = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    end_of_text = loaded.token_to_id("<|endoftext|>")
    assert loaded.encode("a<|endoftext|>b").ids.count(end_of_text) == 1, f"{name}: the special token is not special"
    plain = [(text, tokens) for text, tokens in zip(texts, documents) if "<|endoftext|>" not in text]
    compare_encoding(f"{name}, tokenizer.json", [text for text, _ in plain], [tokens for _, tokens in plain], loaded)
    for text, tokens in plain:
        assert loaded.decode(tokens, skip_special_tokens=False) == text, f"{name}: {text[:60]!r} is not decoded"
    model = tokenizers.models.BPE.from_file(str(out / "vocab.json"), str(out / "merges.txt"))
    compare_encoding(f"{name}, vocab.json and merges.txt", texts, documents, byte_level(model))
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "GPT2Tokenizer" and config["eos_token"] == "<|endoftext|>"
    assert json.loads((out / "special_tokens_map.json").read_text())["bos_token"] == "<|endoftext|>"


def trained_merges(texts, vocab_size):
    tokenizer = byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 1, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def check_training(texts, vocab_size):
    name = f"vocabulary of {vocab_size} trained"
    with tempfile.TemporaryDirectory() as folder:
        documents, out = tokenize(pathlib.Path(folder), texts, "--train-bpe", str(vocab_size))
        ours = (out / "merges.txt").read_text().split("\n")[1:-1]
        theirs = trained_merges(texts, vocab_size)
        for rank, (a, b) in enumerate(zip(ours, theirs)):
            if a != b:
                sys.exit(f"FAILED {name}: merge {rank}: ours {a!r}, Hugging Face {b!r}")
        assert len(ours) == len(theirs), f"{name}: {len(ours)} merges, Hugging Face has {len(theirs)}"
        print(f"passed {name}: {len(ours)} equal merges")
        check_saved_files(name, out, texts, documents)


def main():
    texts = read_texts()
    for vocab_size in (257, 1000, 8192):
        check_training(texts, vocab_size)
    vocab, merges = DATA / "gpt2-bpe/encoder.json", DATA / "gpt2-bpe/vocab.bpe"
    if not vocab.exists():
        print(f"skipped: GPT-2's vocabulary is not in {DATA}")
        return
    with tempfile.TemporaryDirectory() as folder:
        documents, out = tokenize(pathlib.Path(folder), texts, "--tokenizer", str(vocab.parent))
        reference = byte_level(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
        compare_encoding("GPT-2's vocabulary", texts, documents, reference)
        check_saved_files("GPT-2's vocabulary", out, texts, documents)
        assert json.loads((out / "vocab.json").read_text()) == json.loads(vocab.read_text()), "vocab.json differs"
        assert (out / "merges.txt").read_text() == merges.read_text(), "merges.txt differs"


main()
