#!/usr/bin/env bash
# test_scripts.sh: the scripts in scripts/ and data/: the plans of the recipes, how they start training again, and
# messages for bad arguments and missing data. Also dev/bench/ledger.py.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

# Other rules come before `all` in the Makefile, and make without a goal takes the first.
check "make alone builds the trainer" grep -q 'ln -sf .*/train_gpt2 ' <(make --always-make --dry-run CUDA=0)

# planned SCRIPT RANKS TOKENS PARAMETERS [T]: the plan has these tokens per step (= sequences x T x ranks x micro-steps)
# and this size of the model. T is 1024 if not given.
planned() {
    local out tokens
    out=$("scripts/$1" --plan) || return 1
    tokens=$(sed 's/,//g' <<<"$out" | awk -v ranks="$2" -v T="${5:-1024}" '
        $1 == "batch" && $2 == $7 * $10 * $13 * $16 && $10 == T && $13 == ranks { print $2 }')
    if [ "$tokens" != "$3" ]; then grep batch <<<"$out" && return 1; fi
    if ! grep -q "vocabulary 50257 .* $4 parameters" <<<"$out"; then grep model <<<"$out" && return 1; fi
}
check "recipe 124M: tokens per step and parameters" planned run_gpt2_124M.sh 8 524288 124,439,808
check "recipe 350M: tokens per step and parameters" planned run_gpt2_350M.sh 8 524288 354,823,168
check "recipe 774M: tokens per step and parameters" planned run_gpt2_774M.sh 8 524288 774,030,080
check "recipe 1558M: tokens per step and parameters" planned run_gpt2_1558M.sh 8 1048576 1,557,611,200
check "recipe GPT-3 6.7B: tokens per step and parameters" planned run_gpt3_6.7B.sh 8 2097152 6,658,404,352 2048
check "recipe GPT-3 13B: tokens per step and parameters" planned run_gpt3_13B.sh 8 2097152 12,853,386,240 2048
check "recipe 124M by torchrun: tokens per step and parameters" planned run_gpt2_124M_torchrun.sh 8 524288 124,439,808
check "recipe 124M by torchrun on 2 nodes: tokens per step" env NODES=2 bash -c \
    "$(declare -f planned); planned run_gpt2_124M_torchrun.sh 16 524288 124,439,808"
check "recipe 124M by torchrun on 1 or 2 nodes: tokens per step" \
    env NODES=1:2 bash -c "$(declare -f planned); planned run_gpt2_124M_torchrun.sh 16 524288 124,439,808"
check "recipe 124M by Slurm on 2 nodes: tokens per step" planned run_gpt2_124M.sbatch 16 524288 124,439,808
check "recipe 124M by Slurm on 4 nodes: tokens per step" env NODES=4 bash -c \
    "$(declare -f planned); planned run_gpt2_124M.sbatch 32 524288 124,439,808"
for ranks in 1 2 4; do
    check "recipe 124M on $ranks GPUs: tokens per step" env NP=$ranks bash -c \
        "$(declare -f planned); planned run_gpt2_124M.sh $ranks 524288 124,439,808"
    check "recipe 1558M on $ranks GPUs: tokens per step" env NP=$ranks bash -c \
        "$(declare -f planned); planned run_gpt2_1558M.sh $ranks 1048576 1,557,611,200"
done
refused "a number of GPUs that does not divide the batch" 2 "is not a multiple of" env NP=3 scripts/run_gpt2_124M.sh \
    --plan
refused "an unknown option of a recipe" 2 "did you mean --steps?" scripts/run_gpt2_124M.sh --plan --stesp 3
check "an option overrides the recipe's" grep -q 'd24\|24 layers' <(scripts/run_gpt2_124M.sh --plan --model d24)

# Steps, tokens and FLOP in the comment of each recipe.
for script in scripts/run_gpt2_*M.sh scripts/run_gpt3_*.sh; do
    work=$("$script" --plan | awk '$1 == "work" { print $2 }')
    check "$(basename "$script"): its comment has the FLOP of the plan" awk -v per_token="$work" '
        function near(a, b) { return a > 0.99 * b && a < 1.01 * b }
        /^#/ { gsub(",", ""); sub("# *", ""); text = text " " $0 }
        END { n = split(text, w, " "); for (i = 1; i < n; i++) {
                  if (w[i] == "steps" && w[i + 1] == "of") { steps = w[i - 1]; tokens = w[i + 2] }
                  if (w[i] == "GFLOP") said = w[i - 1]
                  if (w[i] == "all" && w[i - 1] == "in") total = w[i + 1] }
              exit !(steps > 0 && near(said, per_token) && near(total, steps * tokens * per_token * 1e9)) }' "$script"
done

for script in scripts/run_gpt*; do
    refused "$(basename "$script") without data" 66 "data/fineweb10B.sh" env DATA="$scratch/nothing" "$script"
done
# ---- how recipes start training again. Stand-ins replace mpirun, srun and the trainer, which ends with the next code
# of `codes`.
tree=$scratch/tree
mkdir -p "$tree/data/fineweb10B" "$tree/bin"
cp -r scripts "$tree/" && touch "$tree/data/fineweb10B/fineweb_train_000001.bin"
stand_in() { printf '#!/usr/bin/env bash\n%s\n' "$2" >"$1" && chmod +x "$1"; }
stand_in "$tree/train_gpt2cu" 'echo "$*" >>runs; code=$(sed -n "$(wc -l <runs)p" codes); exit "${code:-0}"'
stand_in "$tree/bin/mpirun" 'while [ "$1" != ./train_gpt2cu ]; do shift; done; "$@"'
stand_in "$tree/bin/srun" 'shift; "$@"'
stand_in "$tree/bin/scontrol" 'echo "$*" >requeued'
stand_in "$tree/bin/sleep" ''

# after CODES RUNS CODE SCRIPT: the trainer ends with these codes. It is started RUNS times, and the recipe ends with
# CODE.
after() {
    local status=0
    rm -f "$tree/runs" "$tree/requeued" && tr ' ' '\n' <<<"$1" >"$tree/codes"
    (cd "$tree" && PATH=$tree/bin:$PATH "scripts/$4" --seed 7) || status=$?
    test "$(grep -c -- '--train-data data/fineweb10B/\*train_\*.bin .* --resume --seed 7$' "$tree/runs") $status" = \
        "$2 $3"
}
check "a run that succeeds is started once" after "0" 1 0 run_gpt2_124M.sh
check "a run that fails is started again" after "137 1 0" 3 0 run_gpt2_124M.sh
check "a run is started six times at most" after "1 1 1 1 1 1 1 1" 6 1 run_gpt2_124M.sh
check "a run with bad options is not started again" after "2" 1 2 run_gpt2_124M.sh
check "a run that was asked to stop is not started again" after "75" 1 75 run_gpt2_124M.sh

export SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=2 SLURM_SUBMIT_DIR=$tree
check "Slurm: a run that succeeds ends the job" after "0" 1 0 run_gpt2_124M.sbatch
check "Slurm: a run that succeeds is not queued again" test ! -e "$tree/requeued"
check "Slurm: a run whose time is up ends the job" after "75" 1 0 run_gpt2_124M.sbatch
check "Slurm: a run whose time is up is queued again" grep -qx 'requeue 5' "$tree/requeued"
SLURM_RESTART_COUNT=5 check "Slurm: a sixth failure ends the job with its code" after "1" 1 1 run_gpt2_124M.sbatch
check "Slurm: a sixth failure is not queued again" test ! -e "$tree/requeued"
unset SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_SUBMIT_DIR

# ---- data/: messages of the scripts for bad arguments. Stand-ins for curl, apt-get and make show that nothing is
# fetched.
mkdir -p "$scratch/no_net" "$scratch/data_tree"
cp -r data "$scratch/data_tree/"
for command in curl apt-get make; do stand_in "$scratch/no_net/$command" "touch '$scratch/fetched'; exit 1"; done
# says CODE STREAM TEXT SCRIPT ARGUMENT...: the script ends with CODE, prints TEXT, and fetches nothing.
says() {
    local code=$1 stream=$2 text=$3 status=0
    shift 3
    (cd "$scratch/data_tree/data" && PATH=$scratch/no_net:$PATH "./$1" "${@:2}") >"$scratch/out" 2>"$scratch/err" \
        || status=$?
    [ "$status" = "$code" ] && grep -qF -- "$text" "$scratch/$stream" && [ ! -e "$scratch/fetched" ]
}
for script in bible_austen fineweb10B text tinyshakespeare tinystories; do
    check "$script.sh --help" says 0 out "$script.sh " $script.sh --help
    check "$script.sh --vocab-size 300" says 2 err "$script.sh: unknown option --vocab-size" $script.sh --vocab-size 300
done
for script in bible_austen tinyshakespeare tinystories; do
    check "$script.sh foo" says 2 err "$script.sh: unexpected argument foo" $script.sh foo
    check "$script.sh --vocab" says 2 err "--vocab needs a value" $script.sh --vocab
    check "$script.sh --vocab 10" says 2 err "--vocab 10 must be a number of tokens, 257" $script.sh --vocab 10
done
check "fineweb10B.sh 104" says 2 err "104: the number of training shards is 1 to 103" fineweb10B.sh 104
check "text.sh without a text" says 2 err "name a file or folder of text" text.sh
check "text.sh of a file that is not there" says 66 err "nothing.txt: there is no such file" text.sh nothing.txt

# ---- data/text.sh: the training command that it prints works, in any folder, or the text is refused
ln -s "$program" "$scratch/data_tree/train_gpt2"
for kb in 6 20; do
    text="$scratch/$kb kB of it's text.txt" shards="$scratch/with space/it's $kb"
    cat README.md docs/data.md dev/test/*/*.sh | head -c ${kb}000 >"$text"
    check "text.sh of $kb kB" "$scratch/data_tree/data/text.sh" "$text" --out "$shards"
    sed -n '/^  /p' "$scratch/check.log" >"$scratch/command"
    check "text.sh of $kb kB: its command trains" env -C "$scratch/data_tree" bash -c \
        "$(cat "$scratch/command") --steps 1 --warmup 0 --quiet --checkpoint-every 0 --val-every 1 --sample-every 0"
    check "text.sh of $kb kB: its command writes into the folder that it names" test -s \
        "$scratch/data_tree/out/it's $kb/log.jsonl"
done
check "text.sh of a text of less than two steps" says 65 err "to validate on: the text is too short to train on" \
    text.sh "$scratch/6 kB of it's text.txt" --out "$scratch/short" --vocab 1200

echo "ten bytes" >"$scratch/ten.txt"
check "text.sh of ten bytes" says 65 err "10 bytes: the text is too short to train on; bring at least 10 kB" text.sh \
    "$scratch/ten.txt"
head -c 1500 README.md >"$scratch/page.txt"
check "text.sh of a page" says 65 err "to validate on: the text is too short to train on; bring at least 10 kB" \
    text.sh "$scratch/page.txt"
yes "hello world" | head -c 20000 >"$scratch/uniform.txt"
check "text.sh of a uniform text" says 65 err "text.sh: --vocab N sets the size of the vocabulary" text.sh \
    "$scratch/uniform.txt"

# ---- data/to_shard.py: one line on stderr for bad input
# to_shard TEXT ARGUMENT...: fails with one line that has TEXT.
to_shard() {
    local text=$1 status=0
    shift
    python3 data/to_shard.py "$@" >"$scratch/out" 2>"$scratch/err" || status=$?
    [ $status = 1 ] && [ "$(wc -l <"$scratch/err")" = 1 ] && grep -qF -- "$text" "$scratch/err" && [ ! -s \
        "$scratch/out" ]
}
for bytes in 0 2 3 4; do head -c $bytes /dev/zero >"$scratch/tokens$bytes.bin"; done
printf '\x93NUMPY\x01' >"$scratch/cut.npy"
printf '\x93NUMPY\x01\x00\x04\x00{]}\n' >"$scratch/bad.npy"
printf 'BIN.TOK\n\x02' >"$scratch/cut.tok"
printf 'BIN.TOK\n\x02\x00\x00\x00\x02\x00\x00\x00' >"$scratch/head.tok"
check "to_shard.py of an empty file" to_shard "tokens0.bin: 0 bytes of tokens are too few" "$scratch/tokens0.bin" \
    "$scratch/shard.bin"
check "to_shard.py of 3 bytes" to_shard "3 bytes are not a whole number of 2-byte tokens" "$scratch/tokens3.bin" \
    "$scratch/shard.bin"
check "to_shard.py of a file that is not there" to_shard "nothing.bin: No such file" "$scratch/nothing.bin" \
    "$scratch/shard.bin"
for file in cut.npy bad.npy cut.tok; do
    check "to_shard.py of $file" to_shard "$file: its header is damaged" "$scratch/$file" "$scratch/shard.bin"
done
check "to_shard.py of two tokens" python3 data/to_shard.py "$scratch/tokens4.bin" "$scratch/shard.bin"
check "to_shard.py of two tokens: the size of the shard" test "$(stat -c %s "$scratch/shard.bin")" = 1028

# ---- plot.py under a python3 without packages (-S), where another python3 has matplotlib
printf '{"kind":"step","step":%d,"loss":%d}\n' 0 5 1 4 >"$scratch/log.jsonl"
if python3 -c 'import matplotlib' 2>/dev/null || /usr/bin/python3 -c 'import matplotlib' 2>/dev/null; then
    check "plot.py by another python3 draws" bash -c \
        "python3 -S scripts/plot.py '$scratch/log.jsonl' -o '$scratch/loss.png' >'$scratch/plot'"
    check "plot.py by another python3 says which" grep -q "^drawn by .*python3: .* has no matplotlib" "$scratch/plot"
    check "plot.py by another python3: the picture is there" test -s "$scratch/loss.png"
    python3 -S scripts/plot.py "$scratch/none.jsonl" >"$scratch/plot" 2>&1
    check "plot.py names a missing file before it looks for matplotlib" test "$(cat "$scratch/plot")" = \
        "plot.py: [Errno 2] No such file or directory: '$scratch/none.jsonl'"
else
    skip "plot.py by another python3" "no python3 here has matplotlib"
fi

# ---- dev/bench/ledger.py
# ledger_refuses TEXT ARGUMENT...: exit code 2 and one line that has TEXT.
ledger_refuses() {
    local text=$1 status=0
    shift
    dev/bench/ledger.py "$@" >"$scratch/out" 2>"$scratch/err" || status=$?
    [ $status = 2 ] && [ "$(wc -l <"$scratch/err")" = 1 ] && grep -qF -- "$text" "$scratch/err" && [ ! -s \
        "$scratch/out" ]
}
# same_operations PRECISION ARGUMENT...: bench_ops --list and ledger.py --operations print the same lines for d24 and
# d12. On a CPU bench_ops computes 2048 rows of logits at a time.
same_operations() {
    diff <(build/release/bench_ops --list --model d24 -b 5 -t 512 --precision "$1" | sort) \
        <(dev/bench/ledger.py --operations --model d24 --micro-batch 5 --seq-len 512 --logit-rows 2048 \
            --precision "$1" "${@:2}" | sort) &&
        diff <(build/release/bench_ops --list --model d12 -b 2 -t 1024 --precision "$1" | sort) \
            <(dev/bench/ledger.py --operations --model d12 --micro-batch 2 --precision "$1" "${@:2}" | sort)
}
if command -v python3 >/dev/null; then
    check "bench_ops is built" make build/release/bench_ops
    refused "an operation that bench_ops does not know" 2 "--op 'fc': no operation has this name" \
        build/release/bench_ops --op fc
    for precision in bf16 fp32; do
        check "the ledger has the operations of bench_ops: $precision" same_operations $precision
        check "the ledger has the operations of bench_ops: $precision, GELU not fused" same_operations $precision \
            --gpu a100
    done
    dev/bench/ledger.py --gpu h100-sxm --model d12 >"$scratch/ledger"
    check "the ledger's sums" awk '
        /^phase / { rows = 1; next } /^group / { rows = 0; next } rows && NF { sum += $NF }
        /^the whole step/ { total = $(NF - 2) } !rows && /%$/ && !/^the whole/ { groups += $(NF - 2) }
        function near(a, b) { return a - b < 0.2 && b - a < 0.2 }
        END { exit !(total > 50 && near(sum, total) && near(groups, total)) }' "$scratch/ledger"
    check "the ledger refuses an unknown model" ledger_refuses \
        "--model d13 is not known; give one of d12, d24, d36, d48" --model d13
    check "the ledger refuses a part of a shape" ledger_refuses "all three of --layers, --heads and --channels" \
        --layers 2 --heads 2
    check "the ledger's tables in docs/performance.md" dev/bench/ledger.py --check-docs
else
    skip "dev/bench/ledger.py" "there is no python3"
fi

for script in scripts/*.sh scripts/*.sbatch data/*.sh dev/*.sh dev/test/*/*.sh; do check "bash -n $script" bash -n \
    "$script"; done
if command -v shellcheck >/dev/null; then
    check "shellcheck" shellcheck -x --severity=warning --exclude=SC2034 scripts/*.sh scripts/*.sbatch \
        dev/test/*/*.sh
else
    skip "shellcheck" "it is not here (apt-get install shellcheck)"
fi
finish
