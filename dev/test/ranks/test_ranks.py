"""test_ranks.py: training on CPU ranks under mpirun: the same bits for any number of ranks, the bytes that they send,
and what the others do if a rank is killed, asked to stop, or has other options, data or another program."""

import functools
import os
import re
import signal
from pathlib import Path

import pytest
from harness import ONE, PROGRAM, TINY, assert_same_run, close, ranks, ranks_of, run, train, train_command, words
from mpi import damaged, each_rank, mpirun_says, ranks_refuse, wait_for_end_of

# The vocabulary needs no padding, so that ranks send exactly the bytes of the parameters.
SMALL = ("--layers 2 --heads 2 --channels 64 --vocab-size 384 --seq-len 64 --micro-batch 1 --global-batch 1024"
         " --steps 4 --val-every 2 --checkpoint-every 4")
PARAMETERS = 384 * 64 + 64 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
VIRTUAL = "--deterministic-ranks 8"
ENDLESS = f"{SMALL} {VIRTUAL} --steps 100000 --val-every 0"
TIMED_OUT = (110, 241)  # the exit codes of mpirun --timeout, of Open MPI 4 and 5


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """trained(RANKS, OPTIONS) returns a run of SMALL, which is made once. 0 ranks are one process without mpirun."""

    @functools.cache
    def make(n, options):
        out = tmp_path_factory.mktemp("trained") / "run"
        return train(SMALL, options, out=out, data=data, by=ranks(n) if n else ONE)

    return make


# ---- the same bits


# --zero 2 adds the ranks in every one of the two micro-steps, so its sums are rounded in another order. sent: the bytes
# that the others get for each parameter.
@pytest.mark.parametrize("precision, zero, numbers, sent", [
    ("fp32", 0, (1, 2, 4, 8), 2 * 4), ("fp32", 1, (4,), 4 + 4), ("fp32", 2, (2, 4), 2 * 4 + 4),
    ("bf16", 0, (2, 8), 2 * 4), ("bf16", 1, (2, 4), 4 + 2), ("bf16", 2, (4,), 2 * 4 + 2)])
def test_any_number_of_ranks_has_the_bits_of_one_and_sends_its_share(precision, zero, numbers, sent, trained):
    options = f"{VIRTUAL} --precision {precision}"
    one = trained(0, f"{options} --zero {zero if zero == 2 else 0}")
    for n in numbers:
        several = trained(n, f"{options} --zero {zero}")
        assert_same_run(one, several, 4)
        if n > 1:
            sent_bytes = several.by_step("step", "comm_bytes")
            assert len(sent_bytes) == 4
            assert all(close(got, sent * PARAMETERS * (n - 1) / n, 0.02) for got in sent_bytes.values())
    assert close(one.val_loss(), trained(0, f"{options} --zero 0").val_loss(), 1e-4)


def test_zero_1_on_3_ranks_changes_no_bit(trained):
    assert_same_run(trained(3, "--global-batch 1536"), trained(3, "--global-batch 1536 --zero 1"), 4)


@pytest.mark.parametrize("options, tolerance", [("", 1e-4), (" --zero 2", 1e-4), (" --grad-dtype bf16", 1e-3),
                                                (" --grad-dtype bf16 --zero 1", 1e-3)])
def test_3_ranks_have_nearly_the_loss_of_one(options, tolerance, trained):
    one, three = trained(0, "--global-batch 1536"), trained(3, "--global-batch 1536" + options)
    assert close(three.val_loss(), one.val_loss(), tolerance)
    assert three.results() != one.results()


# Also if the ranks do not divide the number of windows.
@pytest.mark.parametrize("batches", [5, 0])
def test_any_number_of_ranks_validates_on_the_same_windows(batches, data, tmp_path):
    options = f"--micro-batch 1 --global-batch 96 --steps 1 --warmup 0 --val-every 1 --val-batches {batches}"
    runs = [train(options, out=tmp_path / str(n), data=data, by=ranks(n)) for n in (1, 2, 3)]
    assert len({run.val_losses()[0] for run in runs}) == 1


# ---- faults


def shared_memory(pids):
    """Returns the files of the memory that ranks share."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return sorted(set(re.findall(r"/dev/shm/(?:vader|sm)_segment\S*", maps)))


def training_ranks(process, run_folder, step):
    """Waits until this step is logged; returns the ranks and the files of their shared memory."""
    process.wait_for_step(run_folder, step)
    pids = ranks_of(process)
    return pids, shared_memory(pids)


def assert_all_end(process, pids, segments):
    """Waits for the end of mpirun and its ranks, which must leave nothing; returns the exit code."""
    code = process.wait()
    assert code not in TIMED_OUT
    wait_for_end_of(pids)
    assert len(segments) == len(pids) and not [segment for segment in segments if Path(segment).exists()]
    return code


def test_a_run_whose_rank_is_killed_continues_with_the_same_bits(train_in_background, data, tmp_path):
    process = train_in_background(ENDLESS, out=tmp_path / "killed", data=data, by=ranks(2))
    pids, segments = training_ranks(process, tmp_path / "killed", 5)
    os.kill(pids[1], signal.SIGKILL)
    assert assert_all_end(process, pids, segments) != 0
    assert mpirun_says("process rank 1.*signal 9", process.output)
    killed = train(ENDLESS, "--resume --stop-after 3", out=tmp_path / "killed", data=data, by=ranks(4))
    steps = killed.last_step() + 1
    assert_same_run(killed, train(ENDLESS, "--stop-after", steps, out=tmp_path / "whole", data=data), steps)


# mpirun passes SIGUSR1 on to the ranks; at SIGTERM it kills them after two seconds.
@pytest.mark.parametrize("number, stops", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_to_mpirun_ends_all(number, stops, train_in_background, data, tmp_path):
    process = train_in_background(ENDLESS, "--checkpoint-every 100000", out=tmp_path / "run", data=data, by=ranks(2))
    pids, segments = training_ranks(process, tmp_path / "run", 3)
    process.signal(number)
    code = assert_all_end(process, pids, segments)
    if stops:
        assert code == 75 and (tmp_path / "run/latest").exists()
    else:
        assert code != 0


# All ranks abandon the step at the same micro-step, and the resumed run repeats it.
def test_a_signal_to_one_rank_abandons_a_long_step(train_in_background, data, tmp_path):
    long = [SMALL, "--seq-len 16 --global-batch 8000 --steps 2 --val-every 0 --checkpoint-every 2 --quiet=0"]
    process = train_in_background(*long, out=tmp_path / "run", data=data, by=ranks(2))
    pids, segments = training_ranks(process, tmp_path / "run", 0)
    os.kill(pids[1], signal.SIGTERM)
    assert assert_all_end(process, pids, segments) == 75
    assert re.search("^stopped on request.* step 1 is saved", process.output, re.M)
    assert (tmp_path / "run/latest").read_text().strip() == "step_000001"
    resumed = train(*long, "--resume", out=tmp_path / "run", data=data, by=ranks(2))
    assert_same_run(resumed, train(*long, out=tmp_path / "whole", data=data, by=ranks(2)), 2)


def test_a_second_run_in_the_output_of_a_live_one_is_refused(train_in_background, data, tmp_path):
    live = train_in_background(ENDLESS, out=tmp_path / "run", data=data, by=ranks(2))
    live.wait_for_step(tmp_path / "run", 3)
    pids = ranks_of(live)
    second = train_command(ENDLESS, "--resume", out=tmp_path / "run", data=data, by=ranks(2))
    error, = ranks_refuse("is in use by another run: pid ", second, code=73).errors
    assert re.search(rf"pid ({pids[0]}|{pids[1]}) on ", error)
    live.signal(signal.SIGUSR1)
    assert live.wait() == 75


def test_ranks_end_if_mpirun_is_killed(train_in_background, data, tmp_path):
    process = train_in_background(ENDLESS, out=tmp_path / "run", data=data, by=ranks(2))
    pids, segments = training_ranks(process, tmp_path / "run", 4)
    process.signal(signal.SIGKILL)
    wait_for_end_of(pids)
    for segment in segments:  # no process is left to remove them
        Path(segment).unlink(missing_ok=True)
    train(ENDLESS, "--resume --stop-after 1", out=tmp_path / "run", data=data, by=ranks(2))


# The rank that reads a token outside of the vocabulary takes part in the others' collectives until all have ended.
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["train", "val"])
def test_bad_data_of_one_rank_ends_all_and_good_data_continue(kind, zero, data, tmp_path):
    options = [ENDLESS, f"--val-every 1 --checkpoint-every 1 --zero {zero}"]
    where = {"out": tmp_path / "run", "data": data, "by": ranks(4)}
    command = train_command(*options, f"--{kind}-data", damaged(data, tmp_path, kind), **where)
    assert len(ranks_refuse("token 288 (byte 1,600) is 65535", command, code=65).errors) == 1
    if (kind, zero) == ("train", 0):  # some steps are saved
        resumed = train(*options, "--resume --stop-after 1", **where)
        steps = resumed.last_step() + 1
        whole = train(*options, "--stop-after", steps, out=tmp_path / "whole", data=data)
        assert_same_run(resumed, whole, steps)


# ---- refused before any file is written


@pytest.fixture
def never(data, tmp_path):
    """never(OPTION...) is the command of a run that is refused, and writes no log."""
    yield lambda *options: train_command(SMALL, *options, out=tmp_path / "never", data=data)
    assert not (tmp_path / "never/log.jsonl").exists()


@pytest.mark.parametrize("text, options", [
    ("rank 2 differs from rank 0: --seed ", [[], [], ["--seed 7"], []]),
    ("rank 1 differs from rank 0: --tensor-parallel 1 there, 2 on rank 0", [["--tensor-parallel 2"], []])])
def test_ranks_with_other_options_are_refused(text, options, never):
    ranks_refuse(text, each_rank(*(never(*own) for own in options)))


@pytest.mark.parametrize("text, n, options", [
    ("--global-batch 1000 is not a multiple of 128 tokens = --micro-batch 1 x --seq-len 64 x 2 ranks; try", 2,
     "--global-batch 1000"),
    ("--deterministic-ranks 2 on 4 ranks", 4, "--deterministic-ranks 2"),
    ("--deterministic-ranks 8 on 3 ranks", 3, "--global-batch 1536 --deterministic-ranks 8")])
def test_batches_that_ranks_cannot_divide_are_refused(text, n, options, never):
    ranks_refuse(text, ranks(n).prefix, never(options))


@pytest.mark.parametrize("kind", ["train", "val"])
def test_one_other_bit_of_data_is_refused(kind, data, never, tmp_path):
    what = {"train": "training", "val": "validation"}[kind]
    ranks_refuse(f"rank 1 differs from rank 0: {what} data ",
                 each_rank(never(), never(f"--{kind}-data", damaged(data, tmp_path, kind, lambda token: token ^ 1))))


def test_ranks_of_different_programs_are_refused(trained, data, never, tmp_path):
    program = PROGRAM.read_bytes()
    sources = (PROGRAM.parent / "commit").read_text().split()[-1]  # the checksum of the program's sources
    others = sources.translate(str.maketrans("0123456789", "1234567890"))
    other, rebuilt = tmp_path / "other", tmp_path / "rebuilt"
    other.write_bytes(program.replace(sources.encode(), others.encode()))
    rebuilt.write_bytes(program + b"\n")
    for path in (other, rebuilt):
        path.chmod(0o755)
    version = run(PROGRAM, "--version").out.strip()
    ranks_refuse(f'rank 1 differs from rank 0: program "{version} for the CPU, sources {others}" there, "',
                 each_rank(never(), [str(other), *never()[1:]]))
    evaluate = words("eval --init", trained(0, ""), "--val-data", data / "val_*.bin")
    ranks_refuse('rank 1 differs from rank 0: program "', each_rank([str(PROGRAM), *evaluate], [str(other), *evaluate]))
    ranks_refuse("rank 1 runs another build of the sources than rank 0: they may round differently, and "
                 "--deterministic-ranks", each_rank(never(VIRTUAL), [str(rebuilt), *never(VIRTUAL)[1:]]))


def test_virtual_ranks_with_another_instruction_set_are_refused(never):
    if ", plain;" in run(PROGRAM, "plan", TINY).out:
        pytest.skip("this machine has CPU_ISA=plain only")
    ranks_refuse("rank 1 has CPU_ISA=plain, rank 0 has ",
                 each_rank(never(VIRTUAL), ["env", "CPU_ISA=plain", *never(VIRTUAL)]))


def test_ranks_by_torchrun_are_refused(never):
    torchrun = words("env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29511", never())
    ranks_refuse("2 CPU ranks need MPI: start with mpirun -np 2 (found: torchrun)", torchrun)


def test_commands_that_do_not_divide_their_work_are_refused(trained, data, tmp_path):
    init = ["--init", trained(0, "")]
    for n, text, command in [
        (2, "tokenize runs in one process, but mpirun started 2, which would all do the same; start it without mpirun",
         ["tokenize", data.with_suffix(".txt"), "--output", tmp_path / "tokens", "--train-bpe", 300]),
        (2, "generate needs as many ranks as --tensor-parallel 1 says, and there are 2; give --ranks 1",
         ["generate", *init]),
        (3, "generate needs as many ranks as --tensor-parallel 2 says, and there are 3; give --ranks 2",
         ["generate", *init, "--tensor-parallel", 2])]:
        ranks_refuse(text, ranks(n).command(command))
    assert not (tmp_path / "tokens").exists()


# ---- eval and generate


def test_ranks_evaluate_and_generate_as_one(trained, data):
    init = words("--init", trained(0, ""), "--precision fp32")
    losses = words(PROGRAM, "eval", init, "--val-data", data / "val_*.bin", "--micro-batch 2")
    texts = words(PROGRAM, "generate", init, "--max-tokens 40 --num-samples 2 --prompt a")
    for command, options in [(texts, "--ranks 2 --tensor-parallel 2"), (losses, "--ranks 2"),
                             (losses, "--ranks 2 --tensor-parallel 2"), (losses, "--ranks 4 --tensor-parallel 2")]:
        one = run(command).out
        assert len(one) > 20 and one == run(command, options).out
    ranks_refuse("rank 1 differs from rank 0: --seq-len 32 there, 64 on rank 0",
                 each_rank(losses + ["--seq-len", "64"], losses + ["--seq-len", "32"]))
    texts += ["--tensor-parallel", "2"]
    ranks_refuse('rank 1 differs from rank 0: --prompt "b" there, "a" on rank 0',
                 each_rank(texts, texts + ["--prompt", "b"]))
