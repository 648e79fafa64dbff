#!/usr/bin/env python3
"""MB/s and seconds of Hugging Face's tokenizers on one thread, training and encoding, in the format of bench_tokenizer.

usage: tokenizers_baseline.py [--tokenizer DIR] [--vocab-size N] TEXT...       needs pip install tokenizers
"""
import argparse
import os
import pathlib
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers

PARTS = 64 * 1024  # characters: encoding one text of many megabytes would measure memory allocation


def print_row(what, num_bytes, seconds, detail):
    print(f"{what:14} {num_bytes / 1e6 / seconds:8.1f} MB/s  {seconds:8.3f} s   {detail}", flush=True)


def byte_level(model):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def load(directory):
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (directory / vocab).exists():
            return byte_level(tokenizers.models.BPE.from_file(str(directory / vocab), str(directory / merges)))
    raise SystemExit(f"{directory} has neither vocab.json nor encoder.json")


def parts_of(text):
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + PARTS)
        end = len(text) if end < 0 else end
        yield text[begin:end]
        begin = end


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=pathlib.Path)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("text", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    data = b"".join(path.read_bytes() for path in options.text)
    texts = list(parts_of(data.decode("utf-8", "replace")))

    trained = byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=options.vocab_size - 1, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    start = time.perf_counter()
    trained.train_from_iterator(texts, trainer)
    print_row("train", len(data), time.perf_counter() - start, f"tokenizers {tokenizers.__version__}")

    tokenizer = load(options.tokenizer) if options.tokenizer else trained
    best, count = float("inf"), 0
    for _ in range(2):
        start = time.perf_counter()
        count = sum(len(tokenizer.encode(text).ids) for text in texts)
        best = min(best, time.perf_counter() - start)
    print_row("encode", len(data), best, f"{count:,} tokens")


main()
