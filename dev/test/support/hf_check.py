#!/usr/bin/env python3
"""Loads a model directory of train_gpt2 with Hugging Face's transformers, as a user would.

    hf_check.py DIR                        checks that no tensor is missing or unexpected
    hf_check.py DIR --logits FILE          also checks that the model computes FILE's logits from FILE's tokens
    hf_check.py DIR --export OUT           also writes the model by transformers to OUT: one/, sharded/, half/, bare/
    hf_check.py DIR --tokenizer TEXT       also checks that its tokenizer gives TEXT back

FILE is a safetensors file of F32 with tokens (B, T) and logits (B, T, V), such as
dev/test/support/reference.safetensors. Exit code 0: all checks pass; 1: one fails; 77: PyTorch or transformers is not
installed. test_hf_weights runs this script.
"""
import argparse
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)


def load(directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[what]:
            sys.exit(f"{directory}: {what}: {info[what]}")
    return model.eval()


def check_logits(model, path):
    reference = load_file(path)
    with torch.no_grad():
        got = model(reference["tokens"].long()).logits
    # transformers sums floats in another order, which changes logits of about 5 by a few roundings. A wrong layout
    # would change them far more.
    difference = (got - reference["logits"]).abs().max().item()
    print(f"largest difference of {got.numel()} logits: {difference:.2e}")
    if not difference < 1e-4:
        sys.exit("the logits differ from the reference")


def export(model, out):
    model.save_pretrained(f"{out}/one", safe_serialization=True)
    model.save_pretrained(f"{out}/sharded", safe_serialization=True, max_shard_size="100KB")
    model.transformer.save_pretrained(f"{out}/bare", safe_serialization=True)  # GPT2Model: names without "transformer."
    model.half().save_pretrained(f"{out}/half", safe_serialization=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--logits", metavar="FILE")
    parser.add_argument("--export", metavar="OUT")
    parser.add_argument("--tokenizer", metavar="TEXT")
    options = parser.parse_args()
    model = load(options.directory)
    print(f"transformers {transformers.__version__}: {sum(p.numel() for p in model.parameters()):,} parameters")
    if options.logits:
        check_logits(model, options.logits)
    if options.export:
        export(model, options.export)
    if options.tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.directory)
        if tokenizer.decode(tokenizer(options.tokenizer)["input_ids"]) != options.tokenizer:
            sys.exit("the decoded tokens differ from the text")


if __name__ == "__main__":
    main()
