"""test_memory.py: the memory that `plan` prints is the peak of a run, and too little of it, under ulimit -v, ends a
command with one sentence. dev/test/unit/test_device.cpp tests the limits of control groups."""

import os
import re

import pytest
from harness import PROGRAM, Run, execute, limited, no_mpi_because, refused, run, train, train_command

# The embedding makes this model so large that the memory of the program and its libraries, 20 MB, hardly counts.
LARGE = "--heads 12 --channels 768 --vocab-size 50257 --micro-batch 1 --global-batch 0 --steps 1 --warmup 0"
AUTO = "--precision fp32 --layers 8 --heads 4 --channels 128 --seq-len 1024 --global-batch 0 --steps 1 --warmup 0"


@pytest.mark.isa
@pytest.mark.parametrize("precision, saves, limit", [
    ("bf16 --grad-accum bf16", "", "unlimited"), ("fp32", "a copy of the state while it is saved", "unlimited"),
    ("fp32", "training waits for saves: no memory for a copy of", 1600000),
    ("bf16 --moments 8bit --master-weights off", "training waits for saves: no memory for a copy of", 1600000)])
def test_the_peak_of_a_run_is_that_of_its_plan(precision, saves, limit, start, data, tmp_path):
    out, shell = tmp_path / "run" if saves else "", limited(f"-v {limit}")
    steps = "--steps 2 --checkpoint-every 1" if saves else ""
    program, *options = train_command(LARGE, f"--precision {precision}", steps, out=out, data=data, val=False)
    plan = run(shell, program, "plan --measure off", options).out
    number, unit = re.search(r"^memory\s+([0-9.]+) (MiB|GiB) of .* available: ", plan, re.MULTILINE).groups()
    mib = float(number) * {"MiB": 1, "GiB": 1024}[unit]
    assert f"; {saves}" in plan if saves else " of the state" not in plan
    if saves.startswith("a copy"):
        mib += float(re.search(f"; {saves} ([0-9.]+) MiB", plan)[1])
    process = start(shell, program, options)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, process.output
    assert mib - 10 <= usage.ru_maxrss / 1024 <= mib + 50  # the program itself


@pytest.mark.isa
def test_micro_batch_auto_fits_the_memory(data):
    def command(*options):
        return train_command(AUTO, "--micro-batch auto", *options, out="", data=data, val=False)

    run(limited("-v 600000"), command())
    refused(2, "--micro-batch auto: one sequence of 1024 tokens needs", limited("-v 600000"),
            command("--layers 12 --heads 12 --channels 768"))


def test_eval_refuses_a_micro_batch_beyond_memory_and_the_one_that_it_advises_fits(tmp_path, data):
    def mib_free(text, *command, what=r" and ([0-9.]+) ([GM])iB are free"):
        free = re.search(what, refused(2, text, *command).errors[0])
        return float(free[1]) * {"G": 1024, "M": 1}[free[2]]

    model = train("--heads 8 --channels 512 --vocab-size 20480 --seq-len 64 --global-batch 0 --steps 1 --warmup 0",
                  "--val-every 0",
                  out=tmp_path / "run", data=data)
    evaluate = [PROGRAM, "eval", "--val-data", str(data / "val_*.bin"), "--init", str(model), "--micro-batch"]
    result = refused(2, "--micro-batch 1000000 with --seq-len 64 needs ", limited("-v 600000"), evaluate, 1000000)
    advised = re.search(r"iB are free; try --micro-batch ([0-9]*)$", result.errors[0])[1]
    run(limited("-v 600000"), evaluate, int(0.95 * int(advised)))
    few = 600000 - int(1024 * mib_free("needs ", limited("-v 600000"), evaluate, 1000000)) + 8192  # KiB; 8 MiB are free
    needs = mib_free(" MiB are free; try a machine with more", limited(f"-v {few}"), evaluate, 1,
                     what=r" needs ([0-9.]+) ([GM])iB")
    run(limited(f"-v {few - 7168 + int(1024 * needs)}"), evaluate, 1)
    if not no_mpi_because():  # ranks on one host share its memory
        alone = mib_free("needs ", evaluate, 1048576)
        assert 0 < mib_free("error: rank 0 on ", evaluate, 1048576, "--ranks 2") < 0.75 * alone


def test_too_little_memory_refuses_a_run_and_its_resume_and_changes_no_file(tmp_path, data):
    def files():
        return {path: path.read_bytes() for path in out.folder.rglob("*") if path.is_file()}

    large, options = tmp_path / "large", "--channels 256 --layers 12 --checkpoint-every 4"
    error = refused(1, "no memory for ", limited("-v 400000"), train_command(LARGE, out=large, data=data)).errors[0]
    assert re.match(r"error: no memory for [^:]*: [0-9,]* bytes asked, .*\(ulimit -v\), .*; (lower|try)", error)
    assert not list(large.glob("step_*"))
    out = train(options, "--steps 4", out=tmp_path / "run", data=data)
    before = files()
    refused(1, "no memory for ", limited("-v 150000"), train_command(options, "--steps 8 --resume", out=out, data=data))
    assert before and files() == before


def test_a_run_under_any_ulimit_saves_all_checkpoints_or_ends_with_one_sentence(tmp_path, data):
    codes, doubtful = [], 0
    for kib in range(60000, 180000, 12000):
        out = tmp_path / str(kib)
        options = "--layers 2 --channels 256 --steps 6 --checkpoint-every 2 --keep 0 --quiet=0"
        result = execute(limited(f"-v {kib}"), train_command(options, out=out, data=data, val=False))
        codes.append(result.code)
        assert result.code in (0, 1) and "bad_alloc" not in result.err, result
        if result.code == 0:
            assert [Run(out).latest(), len(list(out.glob("step_*")))] == ["step_000006", 3]
            doubtful += "does not fit" in result.out
        else:
            assert len(result.errors) == 1
    assert codes == sorted(codes, reverse=True) and set(codes) == {0, 1}
    assert doubtful <= 2  # the plan is cautious by 24 MB at most


def test_threads_that_cannot_be_started_are_refused_with_the_number_that_can(tmp_path, data):
    command = train_command("--steps 1", out=tmp_path / "run", data=data)
    many = {"OMP_NUM_THREADS": 1000}
    error = refused(2, "1000 threads are wanted, and ", limited("-v 2000000"), command, env=many).errors[0]
    can = re.search("set OMP_NUM_THREADS=([0-9]+)$", error)[1]
    assert 1 < int(can) < 300
    for number in (5000, (1 << 32) + 1):
        refused(2, f"OMP_NUM_THREADS={number} is more than 4096 threads", command, env={"OMP_NUM_THREADS": number})


def test_threads_need_little_stack(tmp_path, data):
    (tmp_path / "a.jsonl").write_text('{"text": "the king"}\n' * 20000)
    for command in ([PROGRAM, "tokenize", tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", data],
                    [train_command("--steps 3", out=tmp_path / "run", data=data)]):
        run(*command, env={"OMP_NUM_THREADS": 2, "OMP_STACKSIZE": "16K"})


def test_tokenize_needs_no_more_memory_for_more_long_rows(data, start, tmp_path):
    peaks = []
    for rows in (4, 32):
        text, out = tmp_path / f"{rows}.jsonl", tmp_path / f"{rows}"
        with text.open("w") as file:
            for _ in range(rows):  # one by one: a process counts the memory of the one that has started it
                file.write(f'{{"text": "{"the king of that " * 250000}"}}\n')
        process = start(PROGRAM, "tokenize", text, "--tokenizer", data, "-o", out)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, process.output
        peaks.append(usage.ru_maxrss / 1024)
    assert peaks[1] < 1.5 * peaks[0], peaks
