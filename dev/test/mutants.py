"""mutants.py [--list] [NAME...]: do the default tests fail when the program is wrong?

Applies single-line faults one at a time, and says which test catches each. Without names it runs the faults that have
no result yet in build/mutants.jsonl. It works in build/mutants, a worktree of the commit that is checked out here.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE, RESULTS = ROOT / "build/mutants", ROOT / "build/mutants.jsonl"
DEFAULT = "not (slow or sanitizers or launchers or faults or hf or arm)"  # as in scripts/test.sh
MAKE = ["make", f"-j{os.cpu_count()}", "CUDA=0", "WERROR=1", "all", "tests", "emulator",
        *(f"build/release/emulator/{part}train_gpt2cu" for part in ("", "nonccl/", "alone/"))]

# Area, name, file in llmc/, old and new text, and the tests that probably fail: C++ programs (node_of) and Python
# files, quickest first. These are faults that would hurt users, not those that a test is known to look for.
MUTANTS = [
    ("kernels", "CPU attention's output is not rescaled when a later key raises the maximum", "cpu/vector_attention.h",
     "load(block.out + d * QUERIES + i) * rescale", "load(block.out + d * QUERIES + i)", "test_attention"),
    ("kernels", "the CPU's head keeps the exponential at the target", "cpu/vector_head.h",
     "part(0, lane) + part(lane + 1, used)", "part(0, used)", "test_head"),
    ("kernels", "CPU matmul adds the second half of a tile to the first half's values", "cpu/vector_microkernel.h",
     "? load(out) + sums", "? load(c + i * ldc) + sums", "test_matmul"),
    ("kernels", "CUDA attention's gradient leaves out each query's own key", "cuda/attention_plain.cuh",
     "column > first_row + row;", "column >= first_row + row;", "emulator/test_gpu_attention"),
    ("kernels", "CUDA LayerNorm's backward takes a wrong row after the first two", "cuda/layernorm.cuh", "n + 2 * step",
     "n + step", "emulator/test_gpu_layernorm"),
    ("kernels", "on GPUs the loss of a step is that of its last micro-step", "cuda/head.cuh",
     "*total += scale * sum", "*total = scale * sum", "emulator/test_gpu_head"),
    ("optimizer", "AdamW's epsilon is added before the square root", "cpu/vector_ops.h", "vi * s.inverse2)",
     "vi * s.inverse2 + s.config.eps)", "test_adamw"),
    ("optimizer", "weight decay is not multiplied by the learning rate", "cpu/vector_ops.h",
     "s.lr * (update + decay * w)", "(s.lr * update + decay * w)", "test_adamw"),
    ("optimizer", "stochastic rounding repeats its random bits in each shard", "cpu/vector_ops.h", "first + i, s);",
     "i, s);", "test_adamw ranks/test_zero.py"),
    ("optimizer", "CUDA AdamW decays every shard as if it were the first", "cuda/adamw.cuh", "run(begin + first_own)",
     "run(first_own)", "emulator/test_gpu_ops ranks/test_nccl.py"),
    ("gradients", "only the first of a rank's virtual ranks starts with zero gradients", "../train_gpt2.cu",
     "(m.index == 0) model", "(n == 0) model", "ranks/test_ranks.py"),
    ("gradients", "with --logit-chunks only the last chunk counts in the gradient of wte", "model/gpt2.cpp",
     "accumulate || n > 0", "accumulate", "test_gpt2"),
    ("gradients", "gradients of all positions but the first stay from the step before", "model/gpt2.cpp",
     "layout.size(wpe) *", "config.C *", "test_gpt2 cli/test_cli.py"),
    ("gradients", "the norm counts undivided tensors once for each tensor-parallel rank", "train/gradients.cpp",
     "(tensor_comm.rank == 0)", "(tensor_comm.rank >= 0)", "ranks/test_tensor_parallel.py ranks/test_layouts.py"),
    ("ranks", "with ZeRO a rank updates the shard of its rank, not of its place in the sum", "train/optimizer.h",
     "(model.layout, b, shards, shard_index)", "(model.layout, b, shards, comm.rank)",
     "ranks/test_zero.py ranks/test_ranks.py"),
    ("ranks", "with ZeRO-2 every rank sums the first shard of a bucket", "train/gradients.cpp",
     "grads.bucket(b) + own.begin - layout.bucket(b).begin;", "grads.bucket(b);",
     "ranks/test_ranks.py ranks/test_zero.py"),
    ("ranks", "with ZeRO-3 the last bucket in memory keeps the weights of the step before", "train/optimizer.h",
     "b <= model", "b < model", "ranks/test_zero.py"),
    ("ranks", "checkpoints of tensor-parallel ranks repeat a tensor's first million elements", "train/optimizer.cpp",
     "own.data() + at", "own.data()", "ranks/test_tensor_parallel.py ranks/test_layouts.py"),
    ("checkpoint", "the files of a checkpoint are not synced", "base/files.cpp",
     'if (fsync(fd) != 0) fail_errno(EXIT_IO, path, "write to disk");', "", "test_checkpoint_faults"),
    ("checkpoint", "a step's old checkpoint is deleted before the new one has its name", "checkpoint/checkpoint.cpp",
     "path_exists(dir) ? exchange_paths(tmp, dir) :", "remove_tree(dir),", "test_checkpoint_faults"),
    ("checkpoint", "a weights file that is longer than its tensors is read", "checkpoint/safetensors.cpp",
     "if (at != data_bytes)", "if (at > data_bytes)", "test_safetensors"),
    ("checkpoint", "--init does not verify the checksum of the weights", "checkpoint/checkpoint.cpp",
     ', "model.safetensors"}) verify_file', "}) verify_file", "test_checkpoint_load cli/test_damaged_files.py"),
    ("checkpoint", "a checkpoint in the background stores the step and position of a later step", "train/saver.cpp",
     ", state = trainer", ", &state = trainer", "cli/test_resume.py ranks/test_checkpoint_async.py"),
    ("loader", "in a step of several micro-batches ranks read the same windows", "data/dataloader.cpp",
     "config.rank * share", "config.rank * B", "test_dataloader"),
    ("loader", "a micro-batch is lost: the one after the next overwrites it", "data/dataloader.cpp", "batch < used + 2",
     "batch < used + 3", "test_dataloader"),
    ("loader", "each epoch has the same order", "data/dataloader.cpp", "000000 + epoch", "000000 + 0 * epoch",
     "test_dataloader"),
    ("loader", "the last window of a shard needs a token after its end", "data/dataloader.cpp", "(shard.tokens - 1, 0)",
     "(shard.tokens, 0)", "test_dataloader"),
    ("tokenizer", "in a long word a pair is merged as the pair that was there before", "text/tokenizer.cpp",
     "(ranks[i] != rank)", "(ranks[i] == PairRanks::NONE)", "test_tokenizer"),
    ("tokenizer", "the first document of each chunk has no end of text before it", "commands/tokenize.cpp",
     "if (starts) tokens", "if (starts && !tokens.empty()) tokens", "test_tokenize"),
    ("tokenizer", "byte 173, the soft hyphen, stands for itself in a tokenizer's files", "text/tokenizer_files.cpp",
     "|| byte >= 174;", "|| byte >= 173;", "test_tokenizer_files test_tokenizer"),
    ("tokenizer", "of pairs with equal counts the one with larger tokens is merged first", "text/bpe_train.cpp",
     "-p.left, -p.right,", "p.left, p.right,", "test_bpe_train"),
    ("options", "the default of --beta2 is PyTorch's 0.999", "train/options.inc", "beta2, 0.95", "beta2, 0.999",
     "test_options"),
    ("options", "--beta1 1 is accepted, and divides by zero", "train/options.inc", 'the first moment", 0, 1 - 6e-8)',
     'the first moment", 0, 1)', "test_options"),
    ("options", "--config overrides the command line", "train/options.cpp",
     "if (d->is_set() || not_here", "if (not_here", "test_options"),
    ("options", "--stop-after is kept, so that each resume stops again", "train/options.inc",
     'OPTION(ONE_START, "", stop_after', 'OPTION(FREE, "", stop_after', "test_options cli/test_resume.py"),
    ("schedule", "the learning rate never reaches its final value", "train/schedule.h", "last = s.steps - 1",
     "last = s.steps", "test_schedule"),
    ("eval", "validation leaves out windows that do not fill a micro-batch", "data/dataloader.cpp",
     "ceil_div(num_windows, per_call)", "num_windows / per_call", "test_dataloader"),
    ("generate", "generated tokens all have the first position", "model/gpt2.cpp",
     "embed(tokens, std::max(0, decode_at)", "embed(tokens, 0", "test_gpt2 cli/test_cli.py"),
    ("skipped steps", "after a step that is not finite, --on-nan skip leaves out all others", "train/optimizer.cpp",
     "if (config.skip_nan)", "if (!config.skip_nan)", "test_optimizer"),
    ("log", "after a resume the log has the first repeated step twice", "train/log.cpp", ": step < resume_step",
     ": step <= resume_step", "test_log"),
]
UNMODIFIED = ("", "no fault", "../train_gpt2.cu", "int main(", "int main(", "")  # before the others: all tests pass


def node_of(test):
    """Returns pytest's name of a Python file, or of a C++ program."""
    kind = "test_emulated" if "/" in test else "test_whole_model" if test == "test_gpt2" else "test_unit"
    return test if test.endswith(".py") else f"test_programs.py::{kind}" + (f"[{test}]" if test != "test_gpt2" else "")


def execute(command):
    done = subprocess.run(command, cwd=TREE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.returncode, done.stdout


def outcome(likely):
    """Builds and tests what is in TREE; returns the result and the test that fails."""
    if execute(MAKE)[0] != 0:
        return "does not compile", ""
    if execute(["build/release/train_gpt2", "--version"])[0] != 0:
        return "does not start", ""
    for tests in [*([f"dev/test/{node_of(test)}"] for test in likely.split()), ["-n", "auto"]]:
        code, output = execute([sys.executable, "-m", "pytest", "-qx", "-m", DEFAULT, *tests])
        if found := re.search("^(?:FAILED|ERROR) (?:dev/test/)?(.+?)(?: - .*)?$", output, re.M):
            return "caught", found.group(1)
        if code not in (0, 5):  # 5: no test of this file is among the default ones; 4: there is no such test
            sys.exit(output) if tests[0] == "-n" else print(f"pytest {tests[0]}: exit code {code}")
    return "missed", ""


def run(mutant):
    (_, name, file, old, new, likely), begin = mutant, time.monotonic()
    text = (path := TREE / "llmc" / file).read_text()
    path.write_text(text.replace(old, new))
    try:
        result, test = outcome(likely)
    finally:
        path.write_text(text)
    line = {"name": name, "result": result, "test": test, "seconds": round(time.monotonic() - begin)}
    with open(RESULTS, "a") as results:
        results.write(json.dumps(line) + "\n")
    print(f"{name}: {result} {test} ({line['seconds']} s)", flush=True)
    assert mutant is not UNMODIFIED or result == "missed", "without a fault the tests must pass"
    return line


def stale():
    """Returns a sentence for each fault whose old text is not exactly once in its file."""
    counts = ((row, (ROOT / "llmc" / row[2]).read_text().count(row[3])) for row in [UNMODIFIED, *MUTANTS])
    return [f"{row[1]}: {row[2]} has {count} times: {row[3]}" for row, count in counts if count != 1]


def main(names):
    if lines := stale():
        sys.exit("\n".join(lines))
    if unknown := set(names) - {"--list", UNMODIFIED[1], *(row[1] for row in MUTANTS)}:
        sys.exit(f"there is no fault named {', '.join(unknown)}; --list has the names")
    if names == ["--list"]:
        return print(*(f"{row[0]}: {row[1]}\n    {row[2]}: {row[3]} -> {row[4]}" for row in MUTANTS), sep="\n")
    if not TREE.exists():
        subprocess.run(["git", "worktree", "add", "--detach", TREE], cwd=ROOT, check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    subprocess.run(["git", "checkout", "--quiet", "--force", "--detach", head], cwd=TREE, check=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {line["name"]: line for line in map(json.loads, lines)}
    for mutant in [UNMODIFIED, *MUTANTS]:
        if mutant[1] in names or (not names and mutant[1] not in known):
            known[mutant[1]] = run(mutant)
    print("\n| area | fault | result |\n|---|---|---|")
    for area, name, *_ in MUTANTS:
        if line := known.get(name):
            print(f"| {area} | {name} | {line['result']}{' by `%s`' % line['test'] if line['test'] else ''} |")


if __name__ == "__main__":
    main(sys.argv[1:])
