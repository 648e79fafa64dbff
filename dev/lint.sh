#!/usr/bin/env bash
# lint.sh: checks the form of all tracked files: clang-format, shellcheck, pyflakes, lines of at most 120 columns, and
# no file of more than 1 MB, such as a core dump.
# A tool that is not here is left out, with a line. `make lint` calls it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
status=0

# check NAME COMMAND...: prints what the command says if it fails.
check() {
    local name=$1 said
    shift
    if ! said=$("$@" 2>&1); then
        printf '%s:\n%s\n' "$name" "$(head -n 40 <<<"$said")"
        status=1
    fi
}
without() { echo "lint.sh: without $1"; }
sources() { git ls-files "$@" | while IFS= read -r file; do if [ -e "$file" ]; then echo "$file"; fi; done; }

# Lines of data and tables may be longer.
long_lines() {
    ! sources | grep -vE '\.(md|png|safetensors|jsonl?|txt|tok)$|unicode_table\.inc$|^dev/fuzz/corpus/' |
        xargs -d '\n' python3 -c 'import sys
for path in sys.argv[1:]:
    for number, line in enumerate(open(path, errors="replace"), 1):
        if len(line) > 121: print(f"{path}:{number}: {len(line) - 1} columns")' | grep .
}
check "lines of more than 120 columns" long_lines
large_files() { ! sources | xargs -d '\n' stat -c '%s bytes: %n' | grep -E '^[0-9]{7}'; }
check "large files" large_files

mapfile -t cpp < <(sources '*.cpp' '*.h' '*.cu' '*.cuh')
mapfile -t shell < <(sources '*.sh' '*.sbatch' .ci/run)
mapfile -t python < <(sources '*.py')
# Another version formats some lines otherwise.
if [[ $(clang-format --version 2>/dev/null) == *"version 14."* ]]; then
    check "clang-format -i" clang-format --dry-run -Werror "${cpp[@]}"
else
    without "clang-format 14 (apt-get install clang-format-14)"
fi
if command -v shellcheck >/dev/null; then
    check shellcheck shellcheck -x --severity=warning --exclude=SC2034 "${shell[@]}"
else
    without "shellcheck (apt-get install shellcheck)"
    for script in "${shell[@]}"; do check "$script" bash -n "$script"; done
fi
if command -v ruff >/dev/null; then
    check ruff ruff check --quiet --line-length 120 "${python[@]}"
elif command -v pyflakes3 >/dev/null; then
    unused() { ! pyflakes3 "${python[@]}" | grep -v "'matplotlib.pyplot' imported but unused"; }
    check pyflakes unused
else
    without "ruff or pyflakes (apt-get install pyflakes3)"
fi
exit $status
