#!/usr/bin/env python3
"""Writes llmc/text/unicode_table.inc: the letters (L*) and numbers (N*) of Unicode as lengths of runs.

usage: pip install unicodedata2==16.0.0 && dev/unicode_table.py > llmc/text/unicode_table.inc

The version is fixed, because another one splits rare text at other places. 16.0 is the version of Hugging Face
tokenizers 0.23 (compared over all code points). A Python whose own unicodedata has this version needs no package.
"""
import itertools
import sys
import textwrap

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

VERSION = "16.0.0"


def runs(group):
    """The lengths of the runs of code points that are not in the group, and that are, in turns."""
    inside = [unicodedata.category(chr(code))[0] == group for code in range(0x110000)]
    return [len(list(run)) for _, run in itertools.groupby(inside)][:-1]


def main():
    if unicodedata.unidata_version != VERSION:
        sys.exit(f"this Python knows Unicode {unicodedata.unidata_version}: pip install unicodedata2=={VERSION}")
    print(f"// Written by dev/unicode_table.py from Unicode {VERSION}: from U+0000 on, how many code points are not of "
          "the\n// class, how many are, how many are not, ...")
    for name, group in (("letter_runs", "L"), ("number_runs", "N")):
        print(f"static constexpr uint32_t {name}[] = {{")
        print(textwrap.indent(textwrap.fill(", ".join(map(str, runs(group))), 116), "    ") + "};")


main()
