#!/usr/bin/env bash
# test_install.sh: make install, make uninstall, make dist and make compile_commands.json.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

prefix=$scratch/prefix
check "make install" make CUDA=0 install PREFIX="$prefix"
check "the installed program runs" "$prefix/bin/train_gpt2" --version
version=$(sed -n 's/^version: //p' CITATION.cff)
commit=$(if [ -e .git ]; then git rev-parse --short=12 HEAD 2>/dev/null; fi)
check "--version is that of CITATION.cff, and names the commit where there is one" grep -Eqx \
    "train_gpt2 $version${commit:+ \(commit $commit(-dirty)?\)}" <("$prefix/bin/train_gpt2" --version)
check "the licence is installed" cmp LICENSE "$prefix/share/doc/train_gpt2/LICENSE"

# The man page has every long option of --help.
options=$("$program" --help | grep -o '^  \(-[a-z],\)\?--[a-z0-9-]*' | sed 's/.*--/--/')
check "the help lists options" test "$(wc -l <<<"$options")" -gt 40
man=$(sed 's/\\-/-/g' "$prefix/share/man/man1/train_gpt2.1")
check "the man page has every option" bash -c \
    'for o in $1; do grep -q -- "^\.B $o" <<<"$2" || { echo "$o"; exit 1; }; done' has "$options" "$man"
if command -v man >/dev/null; then
    check "the man page is formatted without warnings" test -z \
        "$(man --warnings=w -l "$prefix/share/man/man1/train_gpt2.1" 2>&1 >/dev/null)"
else
    skip "the man page is formatted" "there is no man"
fi

# complete_by_bash WORD...: the completions that bash offers for the last word.
complete_by_bash() {
    bash -c 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _train_gpt2; echo "${COMPREPLY[*]}"' \
        bash "$prefix/share/bash-completion/completions/train_gpt2" train_gpt2 "$@"
}
check "bash completes an option" test "$(complete_by_bash --prec)" = "--precision"
check "bash completes a value" test "$(complete_by_bash plan --precision b)" = "bf16"
check "bash completes a command" test "$(complete_by_bash to)" = "tokenize"
check "bash completes options of the command" test "$(complete_by_bash generate --top)" = "--top-k --top-p"
if command -v zsh >/dev/null; then
    check "zsh reads its completion" zsh -n "$prefix/share/zsh/site-functions/_train_gpt2"
else
    skip "zsh reads its completion" "there is no zsh"
fi
check "make uninstall" make CUDA=0 uninstall PREFIX="$prefix"
check "make uninstall leaves no file" test -z "$(find "$prefix" -type f)"

printf '#include <cstdio>\n#include <string>\nstd::string version();\nint main() { puts(version().c_str()); }\n' \
    >"$scratch/say.cpp"
# has_commit TREE COMMIT: the version in TREE names this commit.
has_commit() {
    g++ "$scratch/say.cpp" "$1/$object" -o "$scratch/say" &&
        test "$("$scratch/say")" = "train_gpt2 $version${2:+ (commit $2)}"
}
# build_in TREE TEXT: make builds the two objects in TREE, and prints TEXT, after the count "1 of 2" of each.
build_in() {
    make -s -C "$1" CXX=g++ SANITIZE= DEBUG=0 CUDA=0 CUDNN=0 NCCL=0 MPI=0 \
        "build/release-nocudnn-nompi-nonccl/llmc/base/common.o" "$object" >"$scratch/made" &&
        test "$(sed 's/^ *[0-9]* of *[0-9]*//' "$scratch/made" | tr -d '\n')" = "$2"
}
object=build/release-nocudnn-nompi-nonccl/llmc/train/version.o
if [ -n "$commit" ]; then
    check "make dist" make CUDA=0 dist
    check "the archive of make dist has the sources" grep -q "^train_gpt2-$version/train_gpt2.cu$" \
        <(tar -tzf "train_gpt2-$version.tar.gz")
    git clone -q . "$scratch/clone"
    clone() { git -C "$scratch/clone" -c user.name=a -c user.email=a@b "$@"; }
    tar -xzf "train_gpt2-$version.tar.gz" -C "$scratch/clone"
    rm -f "train_gpt2-$version.tar.gz"
    check "make compiles a clone" build_in "$scratch/clone" "  CXX   llmc/base/common.cpp  CXX   llmc/train/version.cpp"
    check "the clone's version has its commit" has_commit "$scratch/clone" "$commit"
    check "make again compiles nothing" build_in "$scratch/clone" ""
    clone commit -q --allow-empty -m "another"
    check "a new commit compiles version.cpp alone" build_in "$scratch/clone" "  CXX   llmc/train/version.cpp"
    check "the version has the new commit" has_commit "$scratch/clone" "$(clone rev-parse --short=12 HEAD)"
    echo "#" >>"$scratch/clone/README.md"
    check "a changed file compiles version.cpp alone" build_in "$scratch/clone" "  CXX   llmc/train/version.cpp"
    check "the version says that a file was changed" has_commit "$scratch/clone" \
        "$(clone rev-parse --short=12 HEAD)-dirty"
    archive=$scratch/clone/train_gpt2-$version  # a git checkout surrounds it
    check "make compiles the archive" build_in "$archive" "  CXX   llmc/base/common.cpp  CXX   llmc/train/version.cpp"
    check "the archive's version has no commit" has_commit "$archive" ""
else
    skip "make dist, and the commit in the version" "this is no git checkout"
fi
if command -v python3 >/dev/null; then
    check "make compile_commands.json" make CUDA=0 compile_commands.json
    check "compile_commands.json has every source of the CPU program" python3 - <<'PY'
import glob, json
entries = {entry["file"] for entry in json.load(open("compile_commands.json"))}
missing = {"train_gpt2.cu", *glob.glob("llmc/base/*.cpp"), *glob.glob("llmc/cpu/*.cpp")} - entries
assert not missing, missing
PY
    rm -f compile_commands.json
else
    skip "make compile_commands.json" "there is no python3"
fi
finish
