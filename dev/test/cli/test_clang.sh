#!/usr/bin/env bash
# test_clang.sh: clang accepts every source of the program for the CPU. Most builds are by g++, which accepts some that
# clang does not. No code is generated, so it takes half a minute.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

if ! command -v clang++ >/dev/null; then
    skip "the sources with clang" "no clang++ (apt-get install clang)" && finish
fi
check "clang++ accepts every source" make -j"$(nproc)" CXX=clang++ WERROR=1 OPT=-fsyntax-only objects
finish
