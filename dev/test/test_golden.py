"""test_golden.py: short runs, 16 on the CPU and 6 in the emulator of GPUs, have the bits that golden.txt records: a
hash of the results (step, loss, grad_norm, lr, val_loss, samples), one of the bytes that ranks send (comm_bytes), one
of the weights, and one of AdamW's moments.

    pytest dev/test/test_golden.py -k fp8              some of the runs, by the program PROGRAM
    OLD=PROGRAM pytest dev/test/test_golden.py         compares with a program of an older commit
    RECORD=1 pytest dev/test/test_golden.py            writes golden.txt

The program for the emulator is emulator/train_gpt2cu beside each. The hashes hold on every x86-64 machine with AVX2,
those of the CPU with every compiler (g++ 12 to 14, clang 14 to 19), those of the emulator with the compiler and the C
library that golden.txt names. OLD works elsewhere, too, also with another CPU_ISA.
"""

import ctypes
import hashlib
import os
import platform
import re
from pathlib import Path

import pytest
from harness import ONE, PROGRAM, Launch, Run, emulated_gpus, ranks, run, train_command

GOLDEN = Path(__file__).with_name("golden.txt")
OLD = os.environ.get("OLD")
BASE = "--global-batch 256 --steps 10 --checkpoint-every 1000 --val-every 4 --val-tokens 128 --sample-every 4 " \
       "--sample-tokens 8 --autotune off"
EMULATED_BASE = f"{BASE} --layers 1 --micro-batch 1 --global-batch 64 --steps 5 --val-tokens 32 --sample-tokens 3"
# A name and options; the digit in the name is the number of ranks. cpu_resumed is five steps on one rank, then five on
# four ranks with another stage of ZeRO.
RUNS = dict(line.split(None, 1) for line in """
cpu_1_fp32                      --precision fp32
cpu_1_bf16                      --precision bf16 --recompute layer --schedule wsd --grad-clip 0.5
cpu_1_fp8                       --precision fp8
cpu_1_fp8_recompute             --precision fp8 --layers 4 --recompute layer
cpu_1_no_master_weights         --precision bf16 --master-weights off --logit-chunks 4
cpu_1_virtual_ranks             --precision bf16 --zero 2 --deterministic-ranks 4
cpu_2_fp32                      --precision fp32 --logit-chunks 2
cpu_2_bf16_gradients            --precision bf16 --zero 1 --grad-dtype bf16 --recompute gelu
cpu_2_zero2                     --precision bf16 --zero 2 --layers 4 --recompute layer
cpu_2_zero3                     --precision bf16 --zero 3 --layers 5 --recompute layer
cpu_2_tensor_parallel           --precision bf16 --tensor-parallel 2 --sequence-parallel
cpu_2_fp8_zero1                 --precision fp8 --zero 1 --recompute gelu
cpu_3_zero2                     --precision fp32 --zero 2 --global-batch 192
cpu_4_virtual_ranks             --precision bf16 --zero 3 --layers 5 --recompute gelu --deterministic-ranks 4
cpu_4_tensor_parallel           --precision bf16 --zero 3 --layers 3 --recompute layer --tensor-parallel 2
cpu_resumed                     --precision bf16 --deterministic-ranks 4
emulator_1_fp32                 --precision fp32 --recompute layer
emulator_1_bf16_no_graphs       --precision bf16 --cuda-graph off
emulator_1_fp8                  --precision fp8
emulator_2_zero1                --precision bf16 --zero 1
emulator_2_zero3                --precision bf16 --zero 3 --layers 2 --recompute layer
emulator_2_tensor_parallel      --precision fp32 --tensor-parallel 2 --sequence-parallel
""".strip().splitlines())


def make_text():
    """Returns random words of a small language, the same each time."""
    words = "the a king queen old young saw heard of and to in house river went came".split()
    libc = ctypes.CDLL(None)
    libc.srandom(1)
    return "".join(words[libc.random() * 16 // 0x7fffffff] + (".\n" if i % 12 == 11 else " ") for i in range(30000))


def train(name, program, folder):
    """Makes the run, also its data, in a folder."""
    folder.mkdir()
    text, vocabulary, data = folder / "text.txt", folder / "vocabulary", folder / "data"
    text.write_text(make_text())
    # From all of the text, as programs before 0.3.0 learned it.
    run(program, "tokenize --quiet --train-bpe 300 --val-fraction 0", text, "--output", vocabulary)
    run(program, "tokenize --quiet --tokenizer", vocabulary, text, "--output", data)
    parts = [(1, "--zero 2 --stop-after 5"), (4, "--zero 3 --resume")]
    for n, options in parts if name == "cpu_resumed" else [(int(name.split("_")[1]), "")]:
        if name.startswith("emulator"):
            program, base, by = program.parent / "emulator/train_gpt2cu", EMULATED_BASE, emulated_gpus(n)
        else:
            base, by = BASE, ranks(n) if n > 1 else ONE
        command = train_command(base, RUNS[name], options, out=folder / "run", data=data,
                                by=Launch(program, by.prefix, by.options))
        run(command, env={**by.env, "OMP_NUM_THREADS": 1, **({} if OLD else {"CPU_ISA": "avx2"})})
    return Run(folder / "run")


def hash_of(data):
    return hashlib.sha256(data).hexdigest()[:12]


def values(out, keys):
    """Returns the lines of steps, validations and samples, with these values only, as they are written."""
    lines = []
    for line in (out / "log.jsonl").read_bytes().splitlines():
        if re.search(rb'"kind":"(step|val|sample)"', line):
            found = (re.search(rb'"%s":("([^"\\]|\\.)*"|[^,}]*)' % key.encode(), line) for key in keys.split())
            lines.append(b"".join(b" " + field[0] for field in found if field) + b"\n")
    return b"".join(sorted(lines))


def tensors(file):
    content = file.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little"):]


def hashes(name, program, folder):
    out = train(name, program, folder)
    saved = out / out.latest()
    return {"results": hash_of(values(out, "kind step loss grad_norm lr val_loss text")),
            "comm_bytes": hash_of(values(out, "kind step comm_bytes")),
            "weights": hash_of(tensors(saved / "model.safetensors")),
            "moments": hash_of(tensors(saved / "optimizer.safetensors"))}


def made_by(program):
    """Returns the compilers of a program and the C library: "GCC 12.2.0, glibc 2.36"."""
    comments = re.findall(r"^ *\[.*?\] +(.*)", run("readelf -p .comment", program).out, re.MULTILINE)
    compilers = {re.sub(r": \([^)]*\)", "", comment) for comment in comments}
    return "+".join(sorted(compilers)) + ", " + os.confstr("CS_GNU_LIBC_VERSION")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_bits_that_are_recorded(name, tmp_path):
    text = GOLDEN.read_text()
    if not OLD:
        if platform.machine() != "x86_64" or not re.search(r"\bavx2\b", Path("/proc/cpuinfo").read_text()):
            pytest.skip("the hashes are of x86-64 with AVX2")
        recorded_by = re.search("# made by (.*)", text)[1]
        if name.startswith("emulator") and "RECORD" not in os.environ and made_by(PROGRAM) != recorded_by:
            pytest.skip(f"the hashes are of {recorded_by}, not of {made_by(PROGRAM)}")
    ours = hashes(name, PROGRAM, tmp_path / "new")
    if "RECORD" in os.environ:
        line = f"{name:27} " + "  ".join(ours.values())
        text = re.sub("# made by .*", f"# made by {made_by(PROGRAM)}", text)
        GOLDEN.write_text(re.sub(f"^{name} .*", line, text, flags=re.MULTILINE))
    elif OLD:
        assert ours == hashes(name, Path(OLD), tmp_path / "old")
    else:
        assert ours == dict(zip(ours, re.search(f"^{name} (.*)", text, re.MULTILINE)[1].split()))
