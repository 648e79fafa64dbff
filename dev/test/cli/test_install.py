"""test_install.py: make install, uninstall and dist, the man page, completions, --version."""

import os
import re
import shutil

import pytest
from harness import PROGRAM, ROOT, run

VERSION = re.search("^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]


def make_here(goal, prefix):
    """Runs make where other tests run the program: it is not linked again."""
    run("make CUDA=0 --old-file=train_gpt2", goal, f"PREFIX={prefix}")
    return prefix


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return make_here("install", tmp_path_factory.mktemp("prefix"))


def test_make_uninstall_removes_what_make_install_has_made(tmp_path):
    prefix = make_here("install", tmp_path)
    commit = r"( \(commit [0-9a-f]{12}(-dirty)?\))?"
    assert re.fullmatch(f"train_gpt2 {re.escape(VERSION)}{commit}\n", run(prefix / "bin/train_gpt2", "--version").out)
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
    ("--prec", "--precision"), ("plan --precision b", "bf16"), ("to", "tokenize"),
    ("generate --top", "--top-k --top-p")])
def test_bash_completes(typed, offered, prefix):
    script = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _train_gpt2; echo "${COMPREPLY[*]}"'
    completions = prefix / "share/bash-completion/completions/train_gpt2"
    assert run(["bash", "-c", script, completions, "train_gpt2"], typed).out == offered + "\n"


def test_the_link_follows_the_flags_each_of_which_has_a_folder(tmp_path):
    """Files take the places of the programs."""
    run("cp -r", *(ROOT / name for name in ("Makefile", "mk", "llmc", "dev", "train_gpt2.cu")), tmp_path)

    def make(flags, *more):
        return run("make -s CUDA=0 -C", tmp_path, flags.split(), *more).out

    def program(flags):
        said = make(flags, ["--eval", "where: ; @echo PROGRAM $(BUILD)/train_gpt2"], "where")
        return re.search("^PROGRAM (.*)", said, re.MULTILINE)[1]

    (tmp_path / "other-g++").symlink_to(shutil.which("g++"))
    programs = [program(flags) for flags in ("", "SANITIZE=address,undefined", f"CXX={tmp_path}/other-g++", "OPT=-O0",
                                             "CPPFLAGS=-Dx", "LDFLAGS=-s")]
    assert len(set(programs)) == 6
    for flags, name in ("", programs[0]), ("SANITIZE=address,undefined", programs[1]), ("", programs[0]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        make(flags, "-o", name, "train_gpt2")
        assert os.readlink(tmp_path / "train_gpt2") == name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no git checkout")
def test_the_version_has_the_commit_which_a_new_commit_compiles_alone(tmp_path):
    objects = [f"build/release-debug-nocudnn-nompi-nonccl/llmc/{name}.o" for name in ("base/files", "base/version")]
    clone = tmp_path / "clone"
    run("git clone -q", ROOT, clone)

    def compiled(tree):
        """Returns how many of two objects were compiled, and the commit in the second."""
        made = run("make -s CXX=g++ SANITIZE= DEBUG=1 CUDA=0 CUDNN=0 NCCL=0 MPI=0 -C", tree, objects).out
        commit = re.search(rb"commit ([0-9a-f]+(-dirty)?)\)", (tree / objects[1]).read_bytes())
        return made.count("CXX "), commit and commit[1].decode()

    def commit():
        return run("git -C", clone, "rev-parse --short=12 HEAD").out.strip()

    run("make -C", clone, "CUDA=0 dist")
    archive = clone / f"train_gpt2-{VERSION}"
    run("tar -xzf", f"{archive}.tar.gz", "-C", clone)
    assert (archive / "train_gpt2.cu").exists()
    assert compiled(archive) == (2, None)  # though a git checkout surrounds it
    shutil.rmtree(archive)
    (clone / f"{archive.name}.tar.gz").unlink()
    assert compiled(clone) == (2, commit())
    assert compiled(clone) == (0, commit())
    run("git -C", clone, "-c user.name=a -c user.email=a@b commit -q --allow-empty -m another")
    assert compiled(clone) == (1, commit())
    (clone / "README.md").write_text("changed")
    assert compiled(clone) == (1, f"{commit()}-dirty")
