#!/usr/bin/env bash
# bible_austen.sh [--vocab N]: makes train and val shards from 8.2 MB of public-domain prose, the default corpus: the
# King James Bible (package bible-kjv) and six novels by Jane Austen (r-cran-janeaustenr), from the system's package
# mirror. Any user can run it: packages are unpacked into data/bible_austen and not installed. Without the second
# package it uses the Bible alone.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=data/functions.sh
source data/functions.sh

vocab=${BOOK_VOCAB:-4096}
parse_arguments 0 vocab "$@"
out=data/bible_austen
text=$out/text
packages=$out/packages

# bible_text COMMAND...: prints one verse per line, with an empty line between chapters. The command bible prints
# "Ge1:1 In the beginning ..."
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
    elif unpack $packages bible-kjv bible-kjv-text && bible_text $packages/usr/bin/bible -p $packages/usr/lib \
        >$text/bible.part; then
        :
    elif as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes bible-kjv >/dev/null &&
        bible_text bible >$text/bible.part; then  # the unpacked program may lack a library
        :
    else
        die "cannot download the package bible-kjv (on Ubuntu it is in universe)." \
            "By hand: apt-get install bible-kjv and run" \
            "this again, or use your own text: data/text.sh FILE"
    fi
    mv $text/bible.part $text/king_james_bible.txt
}

make_austen() {
    if [ -f $text/pride_and_prejudice.txt ]; then return; fi
    say "Jane Austen's novels: package r-cran-janeaustenr"
    if unpack $packages r-cran-janeaustenr &&
        python3 data/janeaustenr.py $packages/usr/lib/R/site-library/janeaustenr/data $text; then
        return
    fi
    say "cannot download or read r-cran-janeaustenr: continuing with the Bible alone"
}

mkdir -p $text
make_bible
make_austen
rm -rf $packages $text/*.part
say "$(cat $text/*.txt | wc -c) bytes of text: $(cd $text && echo ./*.txt | sed 's@\./@@g')"
tokenize $out $text --train-bpe "$vocab"
print_train_command $out "$small_model"
