#!/usr/bin/env python3
"""Writes llmc/text/unicode_table.inc: the letters (L*) and numbers (N*) of Unicode as ranges of code points.

usage: pip install unicodedata2==16.0.0 && dev/unicode_table.py > llmc/text/unicode_table.inc

The version is fixed, because another one splits rare text at other places. 16.0 is the version of Hugging Face
tokenizers 0.23 (compared over all code points). A Python whose own unicodedata has this version needs no package.
"""
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "16.0.0"


def ranges(group):
    found = []
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] != group:
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def main():
    if unicodedata.unidata_version != VERSION:
        sys.exit(f"this Python knows Unicode {unicodedata.unidata_version}: pip install unicodedata2=={VERSION}")
    print(f"// Written by dev/unicode_table.py from Unicode {VERSION}: first and last code point of each range.")
    for name, group in (("letter_ranges", "L"), ("number_ranges", "N")):
        items = [f"{{0x{first:x}, 0x{last:x}}}," for first, last in ranges(group)]
        print(f"static constexpr CodeRange {name}[] = {{")
        line = "   "
        for item in items:
            if len(line) + 1 + len(item) > 120:
                print(line)
                line = "   "
            line += " " + item
        print(line + "\n};")


main()
