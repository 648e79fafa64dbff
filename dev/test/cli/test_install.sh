#!/usr/bin/env bash
# test_install.sh: make install, make uninstall, make dist and make compile_commands.json.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

prefix=$scratch/prefix
check "make install" make CUDA=0 install PREFIX="$prefix"
check "the installed program runs" "$prefix/bin/train_gpt2" --version
check "the licence is installed" cmp LICENSE "$prefix/share/doc/train_gpt2/LICENSE"

# The man page has every long option of --help.
options=$("$program" --help | grep -o '^  \(-[a-z],\)\?--[a-z0-9-]*' | sed 's/.*--/--/')
check "the help lists options" test "$(wc -l <<<"$options")" -gt 40
man=$(sed 's/\\-/-/g' "$prefix/share/man/man1/train_gpt2.1")
check "the man page has every option" bash -c 'for o in $1; do grep -q -- "^\.B $o" <<<"$2" || { echo "$o"; exit 1; }; done' has "$options" "$man"
if command -v man >/dev/null; then
    check "the man page is formatted without warnings" test -z "$(man --warnings=w -l "$prefix/share/man/man1/train_gpt2.1" 2>&1 >/dev/null)"
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

if git rev-parse --git-dir >/dev/null 2>&1; then
    version=$(sed -n 's/^version: //p' CITATION.cff)
    check "make dist" make CUDA=0 dist
    check "the archive of make dist has the sources" grep -q "^train_gpt2-$version/train_gpt2.cu$" <(tar -tzf "train_gpt2-$version.tar.gz")
    rm -f "train_gpt2-$version.tar.gz"
    check "the version of the archive is the program's" grep -q "train_gpt2 $version" <("$program" --version)
else
    skip "make dist" "this is no git checkout"
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
