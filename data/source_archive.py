#!/usr/bin/env python3
"""source_archive.py ARCHIVE OUT: writes the text files of a packed tar archive as documents to OUT/train.jsonl. One
file in 350 goes to OUT/held_out.jsonl instead, chosen by its name: the same ones in each version of a source."""
import json
import sys
import tarfile
import zlib
from pathlib import Path

archive, out = sys.argv[1:]
with (tarfile.open(archive, "r|*") as files, open(Path(out, "held_out.jsonl"), "w") as held_out,
      open(Path(out, "train.jsonl"), "w") as train):
    for file in files:
        content = files.extractfile(file).read() if file.isfile() else b""
        if content == b"" or b"\0" in content:
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:  # an old encoding
            continue
        name = file.name.partition("/")[2]  # without the version
        print(json.dumps({"text": text}), file=train if zlib.crc32(name.encode()) % 350 else held_out)
