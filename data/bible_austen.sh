#!/usr/bin/env bash
# bible_austen.sh [--vocab N]: the default corpus, 8.2 MB of public-domain prose from the system's own package mirror: the King James
# Bible (bible-kjv) and six novels by Jane Austen (r-cran-janeaustenr). Works for any user: packages are downloaded and
# unpacked into data/bible_austen, not installed. Without the second package the Bible alone.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

vocab=4096
parse_arguments 0 vocab "$@"
out=data/bible_austen
text=$out/text
packages=$out/packages

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -n "$@"
    else
        return 1
    fi
}

# unpack PACKAGE...: their files, below $packages.
unpack() {
    local folder=$PWD/$packages
    command -v apt-get >/dev/null || return 1
    mkdir -p "$folder"
    download() { (cd "$folder" && apt-get -qq -o APT::Sandbox::User=root download "$@" 2>"$folder/log"); }
    if ! download "$@"; then
        as_root apt-get -qq update >/dev/null 2>&1 || true  # no lists, or old ones
        download "$@" || { sed 's/^/  /' "$folder/log" >&2; return 1; }
    fi
    for package in "$@"; do dpkg -x "$folder/$package"_*.deb "$folder" || return 1; done
}

# One verse per line, an empty line between chapters. The tool prints "Ge1:1 In the beginning ..."
bible_text() {
    "$@" -f gen1:1-rev22:21 </dev/null | awk '
        { chapter = $1; sub(/:.*/, "", chapter); sub(/^[^ ]* /, "")
          if (chapter != last && NR > 1) print ""
          last = chapter; print; verses++ }
        END { exit verses != 31102 }'
}

make_bible() {
    if [ -f $text/king_james_bible.txt ]; then return; fi
    say "King James Bible: package bible-kjv"
    if command -v bible >/dev/null && bible_text bible >$text/bible.part; then
        :
    elif unpack bible-kjv bible-kjv-text && bible_text $packages/usr/bin/bible -p $packages/usr/lib >$text/bible.part; then
        :
    elif as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes bible-kjv >/dev/null &&
        bible_text bible >$text/bible.part; then  # the unpacked one may lack a library
        :
    else
        die "the package bible-kjv cannot be had (on Ubuntu it is in universe). By hand: apt-get install bible-kjv and run" \
            "this again, or bring your own text: data/text.sh FILE"
    fi
    mv $text/bible.part $text/king_james_bible.txt
}

make_austen() {
    if [ -f $text/pride_and_prejudice.txt ]; then return; fi
    say "Jane Austen's novels: package r-cran-janeaustenr"
    if unpack r-cran-janeaustenr && python3 data/janeaustenr.py $packages/usr/lib/R/site-library/janeaustenr/data $text; then
        return
    fi
    say "r-cran-janeaustenr cannot be had or read: going on with the Bible alone"
}

mkdir -p $text
make_bible
make_austen
rm -rf $packages $text/*.part
say "$(cat $text/*.txt | wc -c) bytes of text: $(cd $text && echo ./*.txt | sed 's@\./@@g')"
tokenize $out $text --train-bpe "$vocab"
print_train_command $out "$small_model"
