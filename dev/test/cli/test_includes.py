"""test_includes.py: the folders of llmc/ include each other as docs/architecture.md says, and no module includes itself
through others. A module is a header and its source."""

import re
from graphlib import TopologicalSorter

from harness import ROOT


def includes_between(part_of):
    """Returns the parts of llmc/ and train_gpt2.cu, such as folders or modules, each with the parts that it includes.
    part_of names the part of a file."""
    files = [path for path in (ROOT / "llmc").rglob("*") if path.is_file()]
    names = {str(path.relative_to(ROOT / "llmc")): path for path in files} | {"train_gpt2.cu": ROOT / "train_gpt2.cu"}
    parts = {}
    for name, path in names.items():
        found = {part_of(include) for include in re.findall('^#include "(.*?)"', path.read_text(), re.M)}
        parts[part_of(name)] = parts.get(part_of(name), set()) | found - {part_of(name)}
    return parts


def test_each_folder_includes_those_that_the_documentation_lists_which_come_before_it():
    rules = (ROOT / "docs/architecture.md").read_text().split("```includes\n")[1].split("```")[0].splitlines()
    listed = {folder: set(others.split()) for folder, others in (line.split(":") for line in rules)}
    assert listed == includes_between(lambda file: file.split("/")[0])
    before = set()
    for folder, others in listed.items():
        assert others <= before, folder
        before.add(folder)


def test_the_emulator_includes_one_header_of_llmc():
    sources = [path.read_text() for path in (ROOT / "dev/simt").iterdir() if path.is_file()]
    found = re.findall('^#include "(.*?)"', "\n".join(sources), re.M)
    assert {name for name in found if not (ROOT / "dev/simt" / name).exists()} == {"cuda/types.h"}


def test_no_module_includes_itself_through_others():
    modules = includes_between(lambda file: file.rsplit(".", 1)[0])
    assert len(modules) > 50
    list(TopologicalSorter(modules).static_order())  # raises CycleError, with the circle
