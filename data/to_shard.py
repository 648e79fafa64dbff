#!/usr/bin/env python3
"""to_shard.py IN OUT.bin: converts a token file of another trainer to a token shard (format: docs/data.md).

Reads bare uint16 tokens (nanoGPT's train.bin), one-dimensional NumPy arrays (.npy) of uint16, uint32 or int32, and
LLM.Q's token files. Splits into OUT_000001.bin, OUT_000002.bin, ... above 100 million tokens.
"""
import argparse
import ast
import os
import struct
import sys

MAGIC, SHARD_TOKENS = 20240520, 100_000_000
NUMPY_WIDTHS = {"<u2": 2, "<u4": 4, "<i4": 4}


def numpy_header(file):
    """Returns the bytes per token, and leaves the file at the first token."""
    file.seek(6)
    major = file.read(2)[0]
    length = struct.unpack("<H", file.read(2))[0] if major == 1 else struct.unpack("<I", file.read(4))[0]
    header = ast.literal_eval(file.read(length).decode("latin-1").strip())
    if header["descr"] not in NUMPY_WIDTHS or len(header["shape"]) != 1:
        sys.exit(f"{file.name}: is an array {header['shape']} of {header['descr']}; "
                 "tokens must be one-dimensional uint16 or uint32")
    return NUMPY_WIDTHS[header["descr"]]


def token_width(file):
    start = file.read(8)
    if start[:6] == b"\x93NUMPY":
        return numpy_header(file)
    if start == b"BIN.TOK\n":
        version, width = struct.unpack("<ii", file.read(8))
        if version != 2 or width not in (2, 4):
            sys.exit(f"{file.name}: version {version} with {width} bytes per token is not supported")
        file.seek(1024)
        return width
    if start[:4] == struct.pack("<i", MAGIC):
        sys.exit(f"{file.name}: is a token shard already")
    file.seek(0)
    return 2


def write_shard(path, tokens, width, vocab_size):
    count = len(tokens) // width
    header = [MAGIC, 1, count, 0] if width == 2 else [MAGIC, 2, count, vocab_size]
    with open(path + ".part", "wb") as out:
        out.write(struct.pack("<256i", *header, *[0] * 252))
        out.write(tokens)
    os.replace(path + ".part", path)
    print(f"{path}: {count:,} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--vocab-size", type=int, default=0, help="vocabulary size, for tokens of four bytes")
    args = parser.parse_args()
    folder = os.path.dirname(args.output) or "."
    if not os.path.isdir(folder):
        sys.exit(f"{args.output}: there is no folder {folder} to write it into")
    with open(args.input, "rb") as file:
        try:
            width = token_width(file)
        except (IndexError, KeyError, SyntaxError, TypeError, ValueError, struct.error) as error:
            sys.exit(f"{args.input}: its header is damaged: {error}")
        rest = max(0, os.path.getsize(args.input) - file.tell())
        if rest % width:
            sys.exit(f"{args.input}: {rest} bytes are not a whole number of {width}-byte tokens")
        if rest < 2 * width:
            sys.exit(f"{args.input}: {rest} bytes of tokens are too few; a training window has at least two tokens")
        if rest <= SHARD_TOKENS * width:
            write_shard(args.output, file.read(), width, args.vocab_size)
            return
        number = 0
        while tokens := file.read(SHARD_TOKENS * width):
            number += 1
            write_shard(f"{os.path.splitext(args.output)[0]}_{number:06d}.bin", tokens, width, args.vocab_size)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.filename or 'to_shard.py'}: {error.strerror}")
