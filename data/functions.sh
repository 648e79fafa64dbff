# shellcheck shell=bash
# functions.sh: functions and settings shared by the scripts in this folder, which source it in the repository's root.

# The batch of a training step: 8 windows of 256 tokens (dev/LOG.md has other sizes). A text of a few pages has fewer
# windows than that, or would be memorized, so it gets short windows.
book_windows="--seq-len 256 --micro-batch 8 --global-batch 2048"
page_windows="--seq-len 64 --micro-batch 16 --global-batch 1024"

# Options of the model that the printed commands train: 12 million parameters; an hour on a laptop, seconds on a GPU.
# shellcheck disable=SC2034  # used by the scripts
small_model="--layers 6 --heads 6 --channels 384 $book_windows --steps 2000 \\
      --lr 2e-3 --beta2 0.995 --warmup 400 --val-every 200 --val-tokens 81920 --sample-every 500 \\
      --checkpoint-every 1000"
# The same for a text of a few pages.
# shellcheck disable=SC2034
few_pages_model="--layers 4 --heads 4 --channels 256 $page_windows --steps 200 \\
      --lr 1e-3 --warmup 20 --val-every 20 --sample-every 50 --checkpoint-every 100"

# The endings of packed files, as in llmc/text/input.cpp: a pattern for bash and awk, for names in lower case.
packed='[.](gz|gzip|zst|zstd|xz|lzma|bz2)'

heading() { printf '\n== %s\n' "$*"; }
say() { echo "$(basename "$0"): $*"; }
die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# bad_usage MESSAGE...: reports invalid arguments and exits with code 2.
bad_usage() {
    echo "$(basename "$0"): $*; --help prints the usage" >&2
    exit 2
}

# parse_arguments MOST "NAME..." ARGUMENT...: sets the variable NAME, with _ for -, for each option --NAME VALUE, and
# the array operands, of at most MOST; -- ends the options. NAME! is an option without a value. --help prints the usage,
# which is the comment at the script's start.
parse_arguments() {
    local most=$1 names=" $2 " name
    shift 2
    operands=()
    while [ $# -gt 0 ]; do
        name=${1#--}
        if [ "$1" = -h ] || [ "$1" = --help ]; then
            sed -n '2,/^[^#]/s/^# //p' "data/$(basename "$0")"
            exit 0
        elif [[ $1 =~ ^--[a-z-]+$ && $names == *" $name! "* ]]; then
            printf -v "${name//-/_}" %s "$1"
        elif [[ $1 =~ ^--[a-z-]+$ && $names == *" $name "* ]]; then
            [ -n "${2:-}" ] || bad_usage "$1 needs a value"
            printf -v "${name//-/_}" %s "$2"
            shift
        elif [ "$1" = -- ]; then
            operands+=("${@:2}")
            break
        elif [[ $1 == -?* ]]; then
            bad_usage "unknown option $1"
        else
            operands+=("$1")
        fi
        shift
    done
    [ ${#operands[@]} -le "$most" ] || bad_usage "unexpected argument ${operands[most]}"
    if [ -n "${vocab:-}" ] && ! [[ $vocab =~ ^[0-9]{3,7}$ && $vocab -ge 257 ]]; then
        bad_usage "--vocab $vocab must be a number of tokens, 257 (the bytes and <|endoftext|>) or more"
    fi
}

# Sets `program` to an existing build of the trainer, which also tokenizes; builds the CPU program if there is none.
find_program() {
    for program in ./train_gpt2 ./train_gpt2cu; do
        if [ -x "$program" ]; then return; fi
    done
    say "building train_gpt2"
    program=./train_gpt2
    make -j"$(nproc)" train_gpt2 || die "the build failed; ./scripts/quickstart.sh installs what it needs"
}

# Builds the trainer, for the GPU if there is one, and sets `program` to it.
build() {
    program=train_gpt2
    if nvidia-smi -L >/dev/null 2>&1; then
        if make found | grep -q '| CUDA [0-9]'; then
            program=train_gpt2cu
        else
            echo "there is a GPU, but no nvcc to build for it (NVCC=... or CUDA_HOME=... names it): training on the CPU"
        fi
    fi
    make -j"$(nproc)" found train_gpt2 $program  # train_gpt2 makes the tokens
    program=./$program
}

# fetch URL FILE [SIZE SHA256]: downloads to FILE, or continues an interrupted download; checks size and sum if given.
fetch() {
    local url=$1 file=$2 size=${3:-} sum=${4:-}
    if [ -f "$file" ]; then return; fi
    command -v curl >/dev/null || die "curl is missing: apt-get install curl"
    say "fetching $url"
    mkdir -p "$(dirname "$file")"
    local status=0 progress=--silent
    if [ -t 2 ]; then progress=--progress-bar; fi
    # otherwise the download is complete, and only the rename is missing
    if [ -z "$size" ] || [ "$(stat -c %s "$file.part" 2>/dev/null)" != "$size" ]; then
        curl --fail --location --show-error $progress --connect-timeout 20 --retry 3 --speed-limit 1000 \
            --speed-time 60 --continue-at - --output "$file.part" "$url" || status=$?
    fi
    if [ $status != 0 ]; then
        die "the download failed (curl: $status); run this again to continue." \
            "By hand: download $url, store it as $file, run this again"
    fi
    check "$file.part" "$size" "$sum"
    mv "$file.part" "$file"
}

# check FILE SIZE SHA256: removes the file and exits if its size or sum is not as expected.
check() {
    local file=$1 size=$2 sum=$3 got
    got=$(stat -c %s "$file")
    if [ -n "$size" ] && [ "$got" != "$size" ]; then
        rm "$file"
        die "$file had $got bytes instead of $size and was removed; run this again"
    fi
    if [ -z "$sum" ]; then return; fi
    got=$(sha256sum "$file" | cut -d' ' -f1)
    if [ "$got" != "$sum" ]; then
        rm "$file"
        die "$file had sha256 $got instead of $sum and was removed; run this again"
    fi
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -n "$@"
    else
        return 1
    fi
}

# unpack DIR PACKAGE...: downloads packages from the system's package mirror, and unpacks their files into DIR.
unpack() {
    local folder=$PWD/$1
    shift
    command -v apt-get >/dev/null || return 1
    mkdir -p "$folder"
    download() { (cd "$folder" && apt-get -qq -o APT::Sandbox::User=root download "$@" 2>"$folder/log"); }
    if ! download "$@"; then
        as_root apt-get -qq update >/dev/null 2>&1 || true  # the package lists may be missing or old
        download "$@" || { sed 's/^/  /' "$folder/log" >&2; return 1; }
    fi
    for package in "$@"; do dpkg -x "$folder/$package"_*.deb "$folder" || return 1; done
}

# fetch_from_hub DATASET NAME FILE [""]: downloads NAME from a data set on huggingface.co (or HF_ENDPOINT) to FILE, or
# with "" from a model. The git repository has the size and checksum of each large file.
fetch_from_hub() {
    local base=${HF_ENDPOINT:-https://huggingface.co}/${4-datasets/}$1 name=$2 file=$3 pointer size sum
    if [ -f "$file" ]; then return; fi
    command -v curl >/dev/null || die "curl is missing: apt-get install curl"
    pointer=$(curl --fail --location --silent --connect-timeout 20 --retry 3 \
        --max-filesize 10000 "$base/raw/main/$name") ||
        die "no answer from $base; by hand: download $base/resolve/main/$name, store it as $file, run this again"
    size=$(sed -n 's/^size \([0-9]*\)$/\1/p' <<<"$pointer")
    sum=$(sed -n 's/^oid sha256:\([0-9a-f]*\)$/\1/p' <<<"$pointer")
    if [ -z "$size" ] || [ -z "$sum" ]; then die "$base/raw/main/$name names neither size nor checksum"; fi
    fetch "$base/resolve/main/$name" "$file" "$size" "$sum"
}

# shard_count DEFAULT MOST: sets `shards` to the first operand, the number of training shards to download.
shard_count() {
    shards=${operands[0]:-$1}
    if ! [[ $shards =~ ^[0-9]{1,4}$ ]] || [ "$shards" -lt 1 ] || [ "$shards" -gt "$2" ]; then
        bad_usage "$shards: the number of training shards is 1 to $2"
    fi
}

# fetch_all DATASET DIR NAME...: downloads files of a data set on huggingface.co into DIR.
fetch_all() {
    local dataset=$1 dir=$2 name done=0
    shift 2
    for name in "$@"; do
        done=$((done + 1))
        if [ -f "$dir/$name" ]; then continue; fi
        say "file $done of $#: $name"
        fetch_from_hub "$dataset" "$name" "$dir/$name"
    done
}

# GPT-2's own vocabulary, into DIR.
fetch_gpt2_tokenizer() {
    local hub=${HF_ENDPOINT:-https://huggingface.co}/openai-community/gpt2/resolve/main
    fetch "$hub/vocab.json" "$1/vocab.json" 1042301 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
    fetch "$hub/merges.txt" "$1/merges.txt" 456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
}

# path_of FILE|DIR: prints its full path. The name says what is in a file; it is that of a link if the file's own has
# no ending, as in the cache of huggingface.co.
path_of() {
    local path
    path=$(realpath -m -- "$1")
    if [ ! -d "$path" ] && [[ ${path##*/} != *.* && ${1##*/} == *.* ]]; then
        path=$(realpath -m -- "$(dirname -- "$1")")/${1##*/}
    fi
    echo "$path"
}

# name_of FILE|DIR: prints the name of a text's folder in data/: "a_book" for "a book.txt.gz".
name_of() {
    local name
    name=$(basename "$1")
    if [[ ${name,,} =~ $packed$ ]]; then name=${name%.*}; fi
    name=$(tr -c 'A-Za-z0-9_.\n-' _ <<<"${name%.*}")
    echo "${name:-text}"
}

# files_in FILE|DIR... -printf FORMAT: prints this for each file, as find does. Links may go round in a circle.
files_in() {
    local last=$(($# - 1))
    find -L "${@:1:last-1}" -type f "${@:last}" 2>/dev/null || true
}

# suitable_vocab BYTES: prints a vocabulary size for a text of so many bytes; in a larger vocabulary most
# tokens would be rare. BOOK_VOCAB sets that of texts of some MB.
suitable_vocab() {
    local bytes=$1
    if [ "$bytes" -lt 300000 ]; then echo 512
    elif [ "$bytes" -lt 3000000 ]; then echo 2048
    elif [ "$bytes" -lt 100000000 ]; then echo "${BOOK_VOCAB:-4096}"
    else echo 16384; fi
}

too_short() {
    echo "$(basename "$0"): $*: the text is too short to train on; bring at least 10 kB, better a book" >&2
    exit 65
}

# tokens_in FILE...: prints the number of tokens in shards with two bytes per token.
tokens_in() { stat -c %s "$@" | awk '{ sum += ($1 - 1024) / 2 } END { print int(sum) }'; }

# choose_windows OUT: sets train_tokens, and sets windows to the longest for which the shards in OUT have enough text.
# Exits if there is not enough text for two steps and a validation.
choose_windows() {
    local val_tokens
    train_tokens=$(tokens_in "$1"/train_*.bin) val_tokens=$(tokens_in "$1"/val_*.bin)
    if [ "$train_tokens" -ge 50000 ] && [ "$val_tokens" -gt 256 ]; then
        windows=$book_windows
    elif [ "$train_tokens" -ge 2100 ] && [ "$val_tokens" -gt 64 ]; then
        windows=$page_windows
    else
        too_short "$train_tokens tokens to train on and $val_tokens to validate on"
    fi
}

# without_options: prints the lines of stdin that come before the first option.
without_options() { sed '/^--/,$d'; }

# tokenize OUT INPUT... OPTIONS...: makes shards in OUT, unless they were made from the same files with the same
# options. Never replaces shards of other files. The program deletes older shards, because it knows whether another
# process is writing there.
tokenize() {
    local out=$1 stamp sources
    shift
    stamp=$(printf '%s\n' "$@"; for input in "$@"; do
        if [ -e "$input" ]; then files_in "$input" -printf '%p %s %T@\n' | sort; fi
    done)
    # text.sh has read pipes into the folder `copies`, which has another name in each call.
    if [ -n "${copies:-}" ]; then stamp=${stamp//"$copies/"/}; fi
    sources=$(without_options <<<"$stamp")
    if has_shards "$out" && [ "$sources" != "$(without_options 2>/dev/null <"$out/made_of")" ]; then
        die "$out has shards of another text; give another --out, or remove that folder"
    fi
    if [ -f "$out/made_of" ] && [ "$stamp" = "$(cat "$out/made_of")" ] && has_shards "$out"; then
        say "the shards in $out already exist"
        return
    fi
    find_program
    mkdir -p "$out"
    printf '%s\n--incomplete\n' "$sources" >"$out/made_of"
    "$program" tokenize "$@" --output "$out" --replace || exit
    has_shards "$out" || too_short "$out has no train and val shards"
    echo "$stamp" >"$out/made_of"
}

has_shards() { compgen -G "$1/train_*.bin" >/dev/null && compgen -G "$1/val_*.bin" >/dev/null; }

# quoted TEXT: prints the text for the shell, in quotes if it needs them.
quoted() { if [[ $1 =~ ^[A-Za-z0-9_./-]+$ ]]; then echo "$1"; else echo "${1@Q}"; fi; }

# print_train_command OUT OPTIONS [PREFIX]: prints the command that trains on the shards OUT/PREFIXtrain_*.bin.
print_train_command() {
    local out=$1 options=$2 prefix=${3:-} train val
    if [ -n "${HIDE_TRAIN_COMMAND:-}" ]; then return; fi
    train=$(quoted "$out/${prefix}train_*.bin") val=$(quoted "$out/${prefix}val_*.bin")
    say "$out is ready; train with"
    echo
    echo "  ${program:-./train_gpt2} --train-data $train --val-data $val \\"
    echo "      --output $(quoted "out/$(basename "$out")") \\"
    echo "      $options"
    echo
}
