"""test_cpu_isa.py: CPU_ISA as docs/cpu.md describes it, the number of threads, and peak and MFU in log.jsonl."""

import re

import pytest
from harness import PROGRAM, ROOT, Run, execute, refused, run, train_command

# MFU, which log.jsonl has with four decimals, is not 0 for a model of this size.
MODEL = "--quiet=0 --layers 1 --channels 128 --seq-len 64 --micro-batch 8 --global-batch 0 --steps 2"
VALUES = re.findall(r"^\| `([a-z0-9]+)` \|", (ROOT / "docs/cpu.md").read_text(), re.MULTILINE)


def test_the_documentation_has_the_values_that_the_message_about_an_unknown_one_lists():
    error = refused(2, "CPU_ISA=unknown is not known: ", PROGRAM, "plan", env={"CPU_ISA": "unknown"}).errors[0]
    known = re.split(", | or ", error.partition(" is not known: ")[2])
    assert "plain" in known and set(known) <= set(VALUES)


@pytest.mark.parametrize("isa", VALUES)
def test_training_uses_an_instruction_set_that_the_machine_has_and_refuses_others(isa, tmp_path, data):
    offered = execute(PROGRAM, "plan --layers 1 --heads 1 --channels 16", env={"CPU_ISA": isa})
    if "is not known" in offered.err:
        pytest.skip(f"{isa} is of another architecture")
    if offered.code != 0:
        refused(2, f"CPU_ISA={isa}, but this machine offers", train_command(MODEL, out=tmp_path / "run", data=data),
                env={"CPU_ISA": isa})
        assert not (tmp_path / "run").exists()
        pytest.skip(offered.err.strip().removeprefix("error: "))
    for precision in ("fp32", "bf16"):
        out = Run(tmp_path / precision)
        command = train_command(MODEL, "--precision", precision, out=out, data=data, val=False)
        printed = run(command, env={"CPU_ISA": isa, "OMP_NUM_THREADS": 2}).out
        first = out.lines("run")[0]
        assert (first["cpu_isa"], first["precision"], first["threads"]) == (isa, precision, 2)
        peak = f"{first['peak_flops'] / 1e12:.3g} TFLOP/s in {precision}, measured at start"
        assert f" 2 threads, {isa}; peak {peak}\n" in printed
        for step in out.lines("step"):
            mfu = step["tokens_per_s"] * first["model"]["flops_per_token"] / first["peak_flops"]
            assert step["mfu"] > 0 and abs(step["mfu"] - mfu) < 1e-4
        # Without bf16 instructions operands are widened to fp32.
        slower = precision == "bf16" and isa in ("plain", "avx2", "avx512", "neon")
        assert bool(re.search("^precision .*--precision fp32 is faster", printed, re.MULTILINE)) == slower


def spin_count(**settings):
    """Returns for how many turns idle threads spin, as libgomp prints it; None if it does not."""
    env = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None, "OMP_DISPLAY_ENV": "verbose", **settings}
    printed = run(PROGRAM, "--version", env=env).err
    found = re.findall(r"^ *(?:\[host\] )?GOMP_SPINCOUNT = '([0-9]*)'", printed, re.MULTILINE)
    return int(found[-1]) if found else None


def test_idle_threads_spin_briefly_unless_the_user_sets_how_long():
    if spin_count(GOMP_SPINCOUNT=7) is None or " U GOMP_parallel" in run("nm -D", PROGRAM).out:
        pytest.skip("this build's OpenMP is not GCC's, or is not linked statically")
    assert 0 < spin_count() < 100000
    assert spin_count(GOMP_SPINCOUNT=7) == 7
    assert spin_count(OMP_WAIT_POLICY="passive") == 0
