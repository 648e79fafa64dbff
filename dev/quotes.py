#!/usr/bin/env python3
"""quotes.py [--check]: renews the quotes of docs/step.md, blocks of code below a line <!-- source: FILE -->.

A block is found in its file by its first line, which must be there once, and its last one. --check changes nothing, and
fails if a quote is not what the file has.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/step.md"


def quote(source, block):
    """Returns the lines of the source from the block's first line to its last one, without their indentation."""
    lines = (ROOT / source).read_text(encoding="utf-8").splitlines()
    first, *_, last = block if len(block) > 1 else block * 2
    begins = [i for i, line in enumerate(lines) if line.strip() == first]
    if len(begins) != 1:
        sys.exit(f"{PAGE.name}: {source} has {len(begins)} lines \"{first}\"; begin the quote with one that is unique")
    begin, indent = begins[0], lines[begins[0]][:-len(first)]
    for end in range(begin + (len(block) > 1), len(lines)):
        if lines[end] == indent + last:
            return [line.removeprefix(indent) for line in lines[begin:end + 1]]
    sys.exit(f"{PAGE.name}: {source} has no line \"{last}\" after \"{first}\"; end the quote with a line that it has")


def main():
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- source: (\S+) -->\n```cpp\n)(.*?)(?=\n```)", re.S)
    new = marked.sub(lambda m: m[1] + "\n".join(quote(m[2], m[3].splitlines())), text)
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if new == text else f"{PAGE.name}: a quote is not what its source has: run dev/quotes.py")
    PAGE.write_text(new, encoding="utf-8")


main()
