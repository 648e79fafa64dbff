#!/usr/bin/env python3
"""janeaustenr.py DIR OUT: writes the novels in the R package janeaustenr as text files; needs no R.

DIR/Rdata.rdx (an index) and DIR/Rdata.rdb are R's lazy-load database. In the .rdb file each object is a big-endian
uint32, its length, and a zlib stream that holds R's serialization in XDR: "X\\n", three int32 (format, writer, reader),
in format 3 the name of the encoding, then the object. A novel is a vector of strings: flags (type 16), length, and per
string flags (type 9), length, bytes. It has one string per printed line; we join the lines of a paragraph.
"""
import os
import struct
import sys
import zlib

STRING_VECTOR, STRING = 16, 9


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def bytes(self, count):
        if count < 0 or count > len(self.data) - self.at:
            raise ValueError(f"cannot read {count} bytes at offset {self.at}: there are only {len(self.data)}")
        self.at += count
        return self.data[self.at - count:self.at]

    def int32(self):
        return struct.unpack(">i", self.bytes(4))[0]


def objects(database):
    """The uncompressed objects of a .rdb file."""
    reader = Reader(database)
    while reader.at < len(database):
        length = reader.int32()
        inflate = zlib.decompressobj()
        content = inflate.decompress(database[reader.at:])
        reader.at = len(database) - len(inflate.unused_data)
        if len(content) != length:
            raise ValueError(f"an object has {len(content)} bytes instead of {length}")
        yield content


def strings(content):
    """The strings of a serialized character vector."""
    reader = Reader(content)
    if reader.bytes(2) != b"X\n":
        raise ValueError("not R's XDR serialization")
    version = reader.int32()
    reader.bytes(8)
    if version == 3:
        reader.bytes(reader.int32())
    if reader.int32() & 255 != STRING_VECTOR:
        raise ValueError("not a vector of strings")
    lines = []
    for _ in range(reader.int32()):
        if reader.int32() & 255 != STRING:
            raise ValueError("not a string")
        length = reader.int32()
        lines.append("" if length < 0 else reader.bytes(length).decode("utf-8"))  # a negative length: a missing string
    return lines


def paragraphs(lines):
    text, paragraph = [], []
    for line in lines + [""]:
        if line.strip():
            paragraph.append(line.strip())
        elif paragraph:
            text.append(" ".join(paragraph))
            paragraph = []
    return "\n\n".join(text) + "\n"


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.splitlines()[0])
    source, out = sys.argv[1:]
    with open(os.path.join(source, "Rdata.rdb"), "rb") as file:
        novels = [strings(content) for content in objects(file.read())]
    if len(novels) != 6 or min(map(len, novels)) < 5000:
        sys.exit(f"{source}: {len(novels)} texts of {[len(n) for n in novels]} lines are not the six novels")
    for novel in novels:
        name = novel[0].strip().lower().replace(" ", "_")
        path = os.path.join(out, name + ".txt")
        with open(path + ".part", "w", encoding="utf-8") as file:
            file.write(paragraphs(novel))
        os.replace(path + ".part", path)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, zlib.error) as error:
        sys.exit(f"janeaustenr.py: {error}")
