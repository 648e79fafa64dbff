#!/usr/bin/env bash
# test_readme.sh: runs the commands of README.md and docs/ as they are written there. Downloads come from a folder on
# this machine. Training is short, because options after those of the page choose a small model and a few steps.
#
# Every command in a block ```sh must be run here. Commands that cannot be run here are in blocks ```sh network, ```sh
# gpu or ```sh ci.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

tree=$scratch/tree hub=$scratch/hub
mkdir -p "$tree/data/fineweb10B" "$tree/bin"
cp data/*.sh data/*.py "$tree/data/" && ln -s "$program" "$tree/train_gpt2"

# commands_of PAGE: the commands of its ```sh blocks, one per line.
commands_of() {
    awk '/^```sh$/ { inside = 1; next } /^```/ { inside = 0 } inside' "$1" | sed -e ':again' -e \
        '/\\$/ { N; s/\\\n *//; b again' -e '}'
}
# command_of PAGE BEGINNING: the first command with this text, its beginning.
command_of() { commands_of "$1" | grep -m1 -F -- "$2"; }
# as_written NAME PAGE BEGINNING [OPTION...]: the command of the page succeeds in the tree, with these options after it.
as_written() {
    local name=$1 line
    line=$(command_of "$2" "$3")
    if [ -z "$line" ]; then fail "$name: $2 has no such command" && return; fi
    printf '%s\n' "$line" >>"$scratch/run"
    shift 3
    if [ $# != 0 ]; then line=${line/--model d12/}; fi
    check "$name" env -C "$tree" PATH="$tree/bin:$PATH" HF_ENDPOINT="file://$hub" bash -c "$line $*"
}
short=(--layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 64 --steps 2 --warmup 0 \
    --val-every 2 --val-batches 1
       --sample-every 0 --quiet)

# ---- shards of web text with GPT-2's vocabulary, or with a trained one if GPT-2's is not on this machine
set_of_shards=$hub/datasets/kjj0/fineweb10B-gpt2 vocabulary=$hub/openai-community/gpt2/resolve/main \
    bpe=../shared/data/gpt2-bpe
mkdir -p "$set_of_shards"/{raw,resolve}/main "$vocabulary"
make_text 600000 >"$scratch/web.txt"
if [ -e $bpe ]; then
    cp $bpe/encoder.json "$vocabulary/vocab.json" && cp $bpe/vocab.bpe "$vocabulary/merges.txt"
    check "tokenize makes shards of web text" "$program" tokenize "$scratch/web.txt" --output "$scratch/web" \
        --tokenizer "$vocabulary" --quiet
else
    skip "GPT-2's vocabulary is fetched" "it is not on this machine"
    check "tokenize makes shards of web text" "$program" tokenize "$scratch/web.txt" --output "$scratch/web" \
        --train-bpe 300 --quiet
    cp "$scratch"/web/{vocab.json,merges.txt} "$tree/data/fineweb10B/"
fi
for name in val_000000 train_000001; do
    cp "$scratch/web/$name.bin" "$set_of_shards/resolve/main/fineweb_$name.bin"
    printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %s\n' \
        "$(sha256sum <"$scratch/web/$name.bin" | cut -d' ' -f1)" \
        "$(stat -c %s "$scratch/web/$name.bin")" >"$set_of_shards/raw/main/fineweb_$name.bin"
done
as_written "fineweb10B.sh fetches shards" README.md "data/fineweb10B.sh 1"
check "fineweb10B.sh writes the shard that it fetched" cmp "$scratch/web/train_000001.bin" \
    "$tree/data/fineweb10B/fineweb_train_000001.bin"
as_written "plan of GPT-2 succeeds" README.md "./train_gpt2 plan"
as_written "GPT-2 trains" README.md "./train_gpt2 --model d12" "${short[@]}"
keys() { grep -m1 '"kind":"step"' "$1" | grep -o '"[a-z_]*":' | tr -d '\n'; }
check "the README's line of log.jsonl has the keys of a run's" test "$(keys README.md)" = \
    "$(keys "$tree/out/d12/log.jsonl")"
as_written "GPT-2 is resumed" docs/checkpoints.md "./train_gpt2 --resume" --steps 3 --quiet
check "the checkpoint of GPT-2 has a tokenizer" test -e "$tree/out/d12/step_000002/tokenizer.json"

# ---- the corpus of the quick start. Stand-ins replace Debian's packages: a program that prints verses, and novels in
# R's format.
stand_in() { printf '#!/usr/bin/env bash\n%s\n' "$2" >"$tree/bin/$1" && chmod +x "$tree/bin/$1"; }
stand_in bible "awk 'BEGIN { srand(1); split(\"ba ke lo mi nu ra se to vi zu da fe go hi ju pa\", s, \" \")
    for (w = 0; w < 6000; w++) { word[w] = s[int(rand() * 16) + 1]; while (rand() < 0.7) word[w] = word[w] \
        s[int(rand() * 16) + 1] }
    for (i = 0; i < 31102; i++) { printf \"Ge%d:%d\", i / 30 + 1, i % 30 + 1
        for (j = 0; j < 9; j++) printf \" %s\", word[int(rand() * rand() * 6000)]; print \"\" } }'"
if command -v python3 >/dev/null && command -v dpkg-deb >/dev/null; then
    package=$scratch/package
    folder=$package/usr/lib/R/site-library/janeaustenr/data
    mkdir -p "$folder" "$package/DEBIAN"
    printf 'Package: r-cran-janeaustenr\nVersion: 1\nArchitecture: all\n%s\nDescription: novels\n' \
        "Maintainer: nobody <nobody@localhost>" \
        >"$package/DEBIAN/control"
    python3 - "$folder" <<'PY'
import struct, sys, zlib
names = ["emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility"]
def characters(lines):
    head = b"X\n" + struct.pack(">iiiii", 2, 0, 0, 16, len(lines))
    return head + b"".join(struct.pack(">ii", 9, len(line)) + line.encode() for line in lines)
index, database = b"", b""
for name in names:
    lines = [f"It was said of {name}, line {i}." for i in range(5000)]
    content = characters([f"{name.upper()}", "", "CHAPTER I", ""] + lines)
    packed = zlib.compress(content)
    database += struct.pack(">I", len(content)) + packed
open(sys.argv[1] + "/Rdata.rdb", "wb").write(database)
open(sys.argv[1] + "/Rdata.rdx", "wb").write(index)
PY
    dpkg-deb --build "$package" "$scratch/r-cran-janeaustenr_1_all.deb" >/dev/null
    stand_in apt-get \
        "case \"\$*\" in *'download r-cran-janeaustenr') cp '$scratch'/r-cran-janeaustenr_1_all.deb . ;;
            *) exit 100 ;; esac"
else
    skip "Jane Austen's novels" "there is no python3 or dpkg-deb"
    stand_in apt-get 'exit 100'
fi
as_written "bible_austen.sh makes the corpus" README.md "data/bible_austen.sh"
check "the corpus has all verses" test "$(grep -c . "$tree/data/bible_austen/text/king_james_bible.txt")" = 31102
if [ -d "$scratch/package" ]; then
    check "the corpus has all novels" test \
        "$(cat "$tree"/data/bible_austen/text/{emma,persuasion,mansfieldpark}.txt | grep -c 'It was said')" = 3
fi
as_written "the model of the quick start trains" README.md "./train_gpt2 --train-data 'data/bible_austen" "${short[@]}"
as_written "the model of the quick start generates" README.md "./train_gpt2 generate --init out/bible_austen" \
    --max-tokens 3

# ---- two ranks
mkdir -p "$tree/data/x"
cp "$tree"/data/bible_austen/{train_*.bin,tokenizer.json} "$tree/data/x/"
if make found | grep -q "Open MPI [0-9]"; then
    several_ranks_here
    as_written "two ranks of --ranks train" docs/distributed.md "./train_gpt2 --ranks 2" "${short[@]}" --val-every 0
    rm -rf "$tree/out/two"
else
    skip "two ranks" "there is no Open MPI"
    command_of docs/distributed.md "./train_gpt2 --ranks 2" >>"$scratch/run"
fi

# ---- every command, and the table
for page in README.md docs/*.md; do
    check "$page: every command was run" diff <(commands_of "$page") <(commands_of "$page" | grep -xFf "$scratch/run")
done
if command -v python3 >/dev/null; then
    check "the table of speeds in the README is made from RESULTS.md" dev/bench/readme_table.py --check
else
    skip "the table of speeds" "there is no python3"
fi
check "README.md has at most 140 lines" test "$(wc -l <README.md)" -le 140
# The files that the links of a page name, without their headings.
links() { grep -o '](\([^)#]*\)' "$1" | sed 's/](//' | grep -v '^https\?:' | sed "s@^@$(dirname "$1")/@"; }
for page in README.md CONTRIBUTING.md docs/*.md; do
    check "$page: every link names a file" bash -c \
        'while read -r link; do [ -e "${link:-.}" ] || { echo "$link"; exit 1; }; done <<<"$1"' links "$(links "$page")"
done
finish
