#!/usr/bin/env python3
"""to_shard.py IN OUT.bin: converts a token file of another trainer to a token shard (format: docs/data.md).

Reads bare tokens (nanoGPT's train.bin, dolma's .npy, datatrove's .ds, Megatron's .bin), NumPy arrays of one dimension
(.npy), LLM.Q's token files and litgpt's chunks (chunk-*.bin of litdata). Splits into OUT_000001.bin, OUT_000002.bin,
... above 100 million tokens. Shards of these names are replaced when all are written; if OUT.bin or another
OUT_NNNNNN.bin is there, nothing is written.

The size of bare tokens is that of --dtype, else of an index beside the file (.idx, .ds.index), else of tokens with
zeros in their upper bytes, else of --vocab-size. A file that may have tokens of 2 or of 4 bytes is refused.
"""
import argparse
import array
import ast
import codecs
import contextlib
import glob
import json
import os
import struct
import sys

MAGIC, SHARD_TOKENS = 20240520, 100_000_000
DTYPES = {"uint16": "H", "uint32": "I", "int32": "i", "uint64": "Q", "int64": "q"}  # typecodes of array.array
NUMPY_TYPES = {"<u2": "H", "<u4": "I", "<i4": "i", "<u8": "Q", "<i8": "q"}
MEGATRON_TYPES = {1: "B", 4: "i", 5: "q", 8: "H"}
LITDATA_TYPES = {"no_header_tensor:16": "i", "no_header_tensor:18": "q", "no_header_tensor:20": "H"}
MEGATRON_INDEX = b"MMIDIDX\0\0"
LLAMA3_MAGIC = 20240801
# The first four bytes of llm.c's other files.
LLMC_FILES = {20240326: "model", 20240327: "state for its tests", 20240328: "tokenizer", 20240522: "evaluation rows",
              20240527: "optimizer state", 20240803: "model of Llama 3"}
OTHERS = {b"PK\3\4": "a zip archive (.npz?)", b"PK\5\6": "an empty zip archive", b"7z\xbc\xaf\x27\x1c": "a 7z archive",
          b"Rar!\x1a\7": "a rar archive", b"\x1f\x8b\x08": "compressed (gzip)",
          b"\x28\xb5\x2f\xfd": "compressed (zstd)", b"\xfd7zXZ\0": "compressed (xz)",
          b"\x04\x22\x4d\x18": "compressed (lz4)",
          b"PAR1": "a Parquet file", b"ARROW1": "an Arrow or Feather file", b"FEA1": "a Feather file",
          b"\xff\xff\xff\xff": "an Arrow stream", b"Obj\1": "an Avro file", b"\x89HDF\r\n": "an HDF5 file",
          b"SQLite format 3\0": "an SQLite database", b"GGUF": "a model of llama.cpp (GGUF)",
          b"\x80\2\x8a\n\x6c\xfc\x9c\x46": "a Python pickle (PyTorch's .pt)", b"%PDF-": "a PDF document",
          b"\x89PNG\r\n": "a PNG picture", b"\xff\xd8\xff\xe0": "a JPEG picture",
          b"version https://git-lfs": "a git-lfs pointer (run git lfs pull)",
          MEGATRON_INDEX: "the index of the .bin file beside it"}


@contextlib.contextmanager
def reading(path, what):
    """Names the file of which something is damaged, if reading it fails."""
    try:
        yield
    except (EOFError, IndexError, KeyError, MemoryError, OverflowError, SyntaxError, TypeError, ValueError,
            struct.error) as error:
        sys.exit(f"{path}: {what} is damaged: {error}")


def check_rest(file, tokens, width):
    """Exits unless so many tokens of so many bytes are left in the file."""
    rest = os.path.getsize(file.name) - file.tell()
    if tokens * width != rest:
        sys.exit(f"{file.name}: is cut off or too long: its header says {tokens} tokens, and {rest} bytes follow")


def numpy_header(file):
    """Returns the type of the tokens, and leaves the file at the first token."""
    file.seek(6)
    major = file.read(2)[0]
    length = struct.unpack("<H", file.read(2))[0] if major == 1 else struct.unpack("<I", file.read(4))[0]
    header = ast.literal_eval(file.read(length).decode("latin-1").strip())
    if str(header["descr"]) not in NUMPY_TYPES or len(header["shape"]) != 1:
        sys.exit(f"{file.name}: is an array {header['shape']} of {header['descr']}; "
                 "tokens must be one-dimensional uint16, uint32, int32, uint64 or int64")
    kind = NUMPY_TYPES[header["descr"]]
    check_rest(file, header["shape"][0], array.array(kind).itemsize)
    return kind


def is_text(start):
    """Returns whether these first bytes of a file are UTF-8 without control characters; the last may be cut off."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return all(c >= " " or c in "\t\n\f\r" for c in text)


def other_kind(file, start):
    """Returns what a file without tokens is, or None; it may be anything with zeros, so not every kind is known."""
    for magic, what in OTHERS.items():
        if start.startswith(magic):
            return what
    if start[257:262] == b"ustar":
        return "a tar archive"
    if start[:3] == b"BZh" and start[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "compressed (bzip2)"
    if start[8:10] == b'{"' and start[10:11] > b" " and int.from_bytes(start[:8], "little") < 1 << 27:
        return "a safetensors file"
    if start[:2] in (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"):  # tokens may begin so, but seldom end so, too
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b".":
            return "a Python pickle"
    file.seek(4 * int.from_bytes(start[:4], "little") + 8)  # after the places of MDS's samples
    return "a shard of MosaicML's streaming (MDS)" if file.read(19) == b'{"column_encodings"' else None


def litdata_type(file, size, args):
    """Returns the type of the tokens of litdata's chunk, and leaves the file at the first; None for other files. A
    chunk begins with its number of items and, in bytes, where each item begins and the last one ends."""
    file.seek(0)
    count, begin = struct.unpack("<II", file.read(8).ljust(8, b"\0"))
    if count == 0 or begin != 4 * count + 8 or begin > size:
        return None
    file.seek(begin - 4)
    end, = struct.unpack("<I", file.read(4))
    index, items = os.path.join(os.path.dirname(file.name), "index.json"), ""
    if os.path.exists(index):
        with reading(index, "the index"), open(index, encoding="utf-8") as text:
            items = " ".join(json.load(text)["config"]["data_format"])
        if items not in LITDATA_TYPES or end != size:
            sys.exit(f"{file.name}: is a chunk of litdata with {end} bytes of {items}; it has {size} bytes, and "
                     f"litgpt's tokens are of {' or '.join(LITDATA_TYPES)}")
    elif end == size and not args.dtype:
        sys.exit(f"{file.name}: is a chunk of litdata, whose index.json is missing; give --dtype")
    elif end != size:
        return None
    return LITDATA_TYPES[items] if items else DTYPES[args.dtype]


def indexed_type(path, size):
    """Returns the type of tokens that an index beside the file has, or None. Refuses an index of another file."""
    kind, tokens, index = None, 0, os.path.splitext(path)[0] + ".idx"
    if os.path.exists(index):
        with reading(index, "the index"), open(index, "rb") as file:
            magic, version, code, sequences, _ = struct.unpack("<9sQBQQ", file.read(34))
            if magic != MEGATRON_INDEX or version != 1 or code not in MEGATRON_TYPES:
                sys.exit(f"{file.name}: version {version} with tokens of type {code} is not supported; give --dtype")
            kind, lengths = MEGATRON_TYPES[code], array.array("i")
            lengths.fromfile(file, sequences)
            tokens = sum(lengths)
    elif os.path.exists(path + ".index"):
        with reading(path + ".index", "the index"), open(path + ".index", "rb") as file:
            tokens = struct.unpack("<Q", file.read()[-8:])[0]
            kind = "H" if size == 2 * tokens else "I"
    if kind and tokens * array.array(kind).itemsize != size:
        sys.exit(f"{path}: has {size} bytes, and the index beside it {tokens} tokens; is one of them cut off?")
    return kind


def bare_type(file, size, vocab_size):
    """Returns the type of tokens without a header. A token is below 2^20, so of 4 bytes the upper two are below 16."""
    if kind := indexed_type(file.name, size):
        return kind
    words = array.array("H")
    words.frombytes(file.read(min(size, 1 << 22) & ~7 or size & ~1))
    file.seek(0)
    upper = max(words[1::2], default=0)
    if size % 8 == 0 and not any(words[2::4]) and not any(words[3::4]) and any(words):
        return "Q"
    if size % 4 == 0 and (upper == 0 and any(words) or upper < 16 and vocab_size > 65536):
        return "I"
    if size >= 4 and (upper < 16 or not any(words[::2])):  # the latter: of 4 bytes in big-endian order?
        sys.exit(f"{file.name}: may have tokens of 2 or of 4 bytes; give --dtype uint16 or --dtype uint32")
    return "I" if vocab_size > 65536 else "H"


def token_type(file, size, args):
    start = file.read(4096)
    if start[:6] == b"\x93NUMPY":
        return numpy_header(file)
    if start[:8] == b"BIN.TOK\n":
        version, width, tokens, _, has_masks = struct.unpack("<5i", start[8:28])
        if version != 2 or width not in (2, 4) or has_masks:
            sys.exit(f"{file.name}: version {version} with {width} bytes per token and {'' if has_masks else 'no '}"
                     "masks is not supported")
        file.seek(1024)
        check_rest(file, tokens, width)
        return "H" if width == 2 else "I"
    magic, version, tokens = struct.unpack("<3i", start[:12].ljust(12, b"\0"))
    if magic == MAGIC:
        sys.exit(f"{file.name}: is a token shard already")
    if magic in LLMC_FILES:
        sys.exit(f"{file.name}: is llm.c's {LLMC_FILES[magic]}, not tokens")
    if magic == LLAMA3_MAGIC:
        if version != 7:
            sys.exit(f"{file.name}: version {version} of llm.c's tokens for Llama 3 is not supported")
        file.seek(1024)
        check_rest(file, tokens, 4)
        return "I"
    if what := other_kind(file, start):
        sys.exit(f"{file.name}: is {what}, not tokens")
    if start and is_text(start):
        sys.exit(f"{file.name}: is text, not tokens; tokenize it with train_gpt2 tokenize")
    if kind := litdata_type(file, size, args):
        return kind
    file.seek(0)
    return DTYPES.get(args.dtype) or bare_type(file, size, args.vocab_size)


def read_tokens(file, kind, vocab_size):
    tokens = array.array(kind)
    tokens.frombytes(file.read(SHARD_TOKENS * tokens.itemsize))
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        sys.exit(f"{file.name}: has tokens {min(tokens)} to {max(tokens)}, which are not all in a vocabulary of "
                 f"{vocab_size}, so no shard is written; give another --vocab-size")
    return tokens


def write_shard(path, tokens, vocab_size):
    wide = vocab_size > 65536
    header = [MAGIC, 2, len(tokens), vocab_size] if wide else [MAGIC, 1, len(tokens), 0]
    with open(path, "wb") as out:
        out.write(struct.pack("<256i", *header, *[0] * 252))
        out.write(array.array("I" if wide else "H", tokens).tobytes())


def shard_names(output, count):
    """Returns the names of so many shards; exits if others, which a pattern would take too, are there."""
    stem = os.path.splitext(output)[0]
    names = [f"{stem}_{n:06d}.bin" for n in range(1, count + 1)] if count > 1 else [output]
    replaced = [os.path.basename(name) for name in names]
    for name in [output, *sorted(glob.glob(glob.escape(stem) + "_" + "[0-9]" * 6 + ".bin"))]:
        if os.path.exists(name) and os.path.basename(name) not in replaced:
            sys.exit(f"{name}: is there already, and would stay beside the new {names[-1]}; move it away, or give "
                     "another OUT")
    return names


def write_shards(file, kind, names, vocab_size):
    """Writes all shards or none: a pattern would take half of them for all."""
    try:
        for name in names:
            tokens = read_tokens(file, kind, vocab_size)
            write_shard(name + ".part", tokens, vocab_size)
            print(f"{name}: {len(tokens):,} tokens", flush=True)
        for name in names:
            os.replace(name + ".part", name)
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(name + ".part")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--dtype", choices=DTYPES, help="type of tokens without a header")
    parser.add_argument("--vocab-size", type=int, default=65536, help="vocabulary size, if it is above 65536")
    args = parser.parse_args()
    if not 1 <= args.vocab_size <= 1 << 20:
        sys.exit(f"--vocab-size {args.vocab_size} must be 1 to {1 << 20}")
    folder = os.path.dirname(args.output) or "."
    if not os.path.isdir(folder):
        sys.exit(f"{args.output}: there is no folder {folder} to write it into")
    if os.path.isdir(args.output):
        sys.exit(f"{args.output}: is a folder; name a file in it")
    with open(args.input, "rb") as file:
        if not os.path.isfile(args.input):
            sys.exit(f"{args.input}: is a pipe or a device; write its content to a file, and name that")
        size = os.path.getsize(args.input)
        with reading(args.input, "its header"):
            kind = token_type(file, size, args)
        width = array.array(kind).itemsize
        rest = max(0, size - file.tell())
        if rest % width:
            sys.exit(f"{args.input}: {rest} bytes are not a whole number of {width}-byte tokens")
        if rest < 2 * width:
            sys.exit(f"{args.input}: {rest} bytes of tokens are too few; a training window has at least two tokens")
        names = shard_names(args.output, -(-rest // (SHARD_TOKENS * width)))
        write_shards(file, kind, names, args.vocab_size)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.filename or 'to_shard.py'}: {error.strerror}")
