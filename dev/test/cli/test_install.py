"""test_install.py: make install, uninstall, dist and compile_commands.json, the man page, completions, --version."""

import json
import re
import shutil

import pytest
from harness import PROGRAM, ROOT, run

VERSION = re.search("^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]


def git(folder, *words):
    return run("git -C", folder, "-c user.name=a -c user.email=a@b", *words).out.strip()


def make_here(goal, prefix):
    """Runs make where other tests run the program: it is not linked again."""
    run("make CUDA=0 --old-file=train_gpt2", goal, f"PREFIX={prefix}")
    return prefix


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return make_here("install", tmp_path_factory.mktemp("prefix"))


def test_make_without_a_goal_builds_the_trainer():
    assert re.search("ln -sf .*/train_gpt2 ", run("make --always-make --dry-run CUDA=0").out)


def test_make_uninstall_removes_what_make_install_has_made(tmp_path):
    prefix = make_here("install", tmp_path)
    commit = r"( \(commit [0-9a-f]{12}(-dirty)?\))?"
    assert re.fullmatch(f"train_gpt2 {re.escape(VERSION)}{commit}\n", run(prefix / "bin/train_gpt2", "--version").out)
    assert (prefix / "share/doc/train_gpt2/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    if shutil.which("zsh"):
        run("zsh -n", prefix / "share/zsh/site-functions/_train_gpt2")
    make_here("uninstall", prefix)
    assert not [path for path in prefix.rglob("*") if path.is_file()]


def test_the_man_page_has_every_option_of_the_help(prefix):
    page = prefix / "share/man/man1/train_gpt2.1"
    options = re.findall("^  (?:-[a-z],)?(--[a-z0-9-]+)", run(PROGRAM, "--help").out, re.MULTILINE)
    assert len(options) > 40
    text = page.read_text().replace("\\-", "-")
    assert not [option for option in options if f"\n.B {option}" not in text]
    if shutil.which("man"):
        assert run("man --warnings=w -l", page).err == ""


@pytest.mark.parametrize("typed, offered", [
    ("--prec", "--precision"),
    ("plan --precision b", "bf16"),
    ("to", "tokenize"),
    ("generate --top", "--top-k --top-p"),
])
def test_bash_completes(typed, offered, prefix):
    script = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _train_gpt2; echo "${COMPREPLY[*]}"'
    completions = prefix / "share/bash-completion/completions/train_gpt2"
    assert run(["bash", "-c", script, completions, "train_gpt2"], typed).out == offered + "\n"


def test_the_version_has_the_commit_which_a_new_commit_compiles_alone(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    folder = "build/release-nocudnn-nompi-nonccl/llmc"
    both = ["llmc/base/xxhash.cpp", "llmc/train/version.cpp"]

    def compiled(tree):
        made = run("make -s CXX=g++ SANITIZE= DEBUG=0 CUDA=0 CUDNN=0 NCCL=0 MPI=0 -C", tree, f"{folder}/base/xxhash.o",
                   f"{folder}/train/version.o").out
        return re.findall(r"CXX +(\S+)", made)

    def version(tree):
        (tmp_path / "say.cpp").write_text("#include <cstdio>\n#include <string>\nstd::string version();\n"
                                          "int main() { puts(version().c_str()); }\n")
        run("g++", tmp_path / "say.cpp", tree / folder / "train/version.o", "-o", tmp_path / "say")
        return run(tmp_path / "say").out.removeprefix(f"train_gpt2 {VERSION}").strip()

    def commit():
        return git(clone, "rev-parse --short=12 HEAD")

    clone = tmp_path / "clone"
    run("git clone -q", ROOT, clone)
    run("make -C", clone, "CUDA=0 dist")
    run("tar -xzf", clone / f"train_gpt2-{VERSION}.tar.gz", "-C", clone)
    (clone / f"train_gpt2-{VERSION}.tar.gz").unlink()
    assert compiled(clone) == both and version(clone) == f"(commit {commit()})"
    assert compiled(clone) == []
    git(clone, "commit -q --allow-empty -m another")
    assert compiled(clone) == both[1:] and version(clone) == f"(commit {commit()})"
    (clone / "README.md").write_text("changed")
    assert compiled(clone) == both[1:] and version(clone) == f"(commit {commit()}-dirty)"
    archive = clone / f"train_gpt2-{VERSION}"  # a git checkout surrounds it
    assert (archive / "train_gpt2.cu").exists()
    assert compiled(archive) == both and version(archive) == ""


def test_compile_commands_has_every_source_of_the_cpu_program(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "*.bin"))
    run("make CUDA=0 compile_commands.json", cwd=tree)
    entries = {entry["file"] for entry in json.loads((tree / "compile_commands.json").read_text())}
    sources = ["train_gpt2.cu", *(str(path.relative_to(ROOT)) for part in ("base", "cpu")
                                  for path in (ROOT / "llmc" / part).glob("*.cpp"))]
    assert set(sources) <= entries
