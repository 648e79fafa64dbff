"""test_ranks.py: training on CPU ranks under mpirun: the same bits for any number of ranks, the bytes that they send,
and what the others do if a rank is killed, asked to stop, or has other options, data or another program."""

import functools
import os
import re
import signal

import pytest
from harness import ONE, PROGRAM, ROOT, TINY, assert_same_run, close, ranks, ranks_of, run, train, train_command, words
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


# --zero 2 adds the ranks in every one of the two micro-steps, so its sums are rounded in another order. sent: the bytes
# that the others get for each parameter.
@pytest.mark.parametrize("precision, zero, numbers, sent", [
    ("fp32", 0, (1, 2, 8), 2 * 4), ("fp32", 2, (2, 4), 2 * 4 + 4), ("bf16", 1, (2, 4), 4 + 2),
    ("bf16", 2, (4,), 2 * 4 + 2)])
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


@pytest.fixture
def start_two(train_in_background, data, tmp_path):
    """start_two(STEP, OPTION...) starts two ranks and waits for this step; returns mpirun's process and the ranks."""

    def begin(step, *options):
        process = train_in_background(*options, out=tmp_path / "run", data=data, by=ranks(2))
        process.wait_for_step(tmp_path / "run", step)
        return process, ranks_of(process)

    return begin


def end_of(process, pids):
    """Waits for the end of mpirun and its ranks; returns the exit code."""
    code = process.wait()
    assert code not in TIMED_OUT
    wait_for_end_of(pids)
    return code


def test_a_run_whose_rank_is_killed_continues_with_the_same_bits(start_two, data, tmp_path):
    process, pids = start_two(5, ENDLESS)
    os.kill(pids[1], signal.SIGKILL)
    assert end_of(process, pids) != 0
    assert mpirun_says("process rank 1.*signal 9", process.output)
    killed = train(ENDLESS, "--resume --stop-after 3", out=tmp_path / "run", data=data, by=ranks(4))
    steps = killed.last_step() + 1
    assert_same_run(killed, train(ENDLESS, "--stop-after", steps, out=tmp_path / "whole", data=data), steps)


# mpirun passes SIGUSR1 on to the ranks; at SIGTERM it kills them after two seconds.
@pytest.mark.parametrize("number, stops", [(signal.SIGUSR1, True), (signal.SIGUSR2, True), (signal.SIGTERM, False)])
def test_a_signal_to_mpirun_ends_all(number, stops, start_two, tmp_path):
    process, pids = start_two(3, ENDLESS, "--checkpoint-every 100000 --quiet=0")
    process.signal(number)
    code = end_of(process, pids)
    assert code == 75 if stops else code != 0
    assert (tmp_path / "run/latest").exists() or not stops
    assert "to end this run with a save send SIGUSR1 to mpirun, or start it with scripts/mpirun.sh" in process.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
                                    signal.SIGXCPU, signal.SIGKILL])
def test_the_ranks_of_mpirun_sh_save_at_a_signal(number, train_in_background, data, tmp_path):
    script = ranks(2)
    script.prefix = ["env", "--default-signal=INT,HUP", f"{ROOT}/scripts/mpirun.sh", *words(script.prefix)[1:]]
    options = f"{ENDLESS} --checkpoint-every 100000 --quiet=0"
    process = train_in_background(options, out=tmp_path / "run", data=data, by=script)
    process.wait_for_step(tmp_path / "run", 3)
    pids = ranks_of(process)
    process.signal(number)
    assert end_of(process, pids) == (137 if number == signal.SIGKILL else 75)
    assert (tmp_path / "run/latest").exists() and "send SIGUSR1 to mpirun" not in process.output


# All ranks abandon the step at the same micro-step, and the resumed run repeats it.
def test_a_signal_to_one_rank_abandons_a_long_step(start_two, data, tmp_path):
    long = [SMALL, "--seq-len 16 --global-batch 8000 --steps 1000 --val-every 0 --checkpoint-every 1000 --quiet=0"]
    process, pids = start_two(0, *long)
    os.kill(pids[1], signal.SIGTERM)
    assert end_of(process, pids) == 75
    saved = int(re.search("^stopped on request.* step ([0-9]+) is saved", process.output, re.M)[1])
    assert (tmp_path / "run/latest").read_text().strip() == f"step_{saved:06}"
    resumed = train(*long, "--resume --stop-after 1", out=tmp_path / "run", data=data, by=ranks(2))
    whole = train(*long, "--stop-after", saved + 1, out=tmp_path / "whole", data=data, by=ranks(2))
    assert_same_run(resumed, whole, saved + 1)


def test_ranks_end_if_mpirun_is_killed(start_two, data, tmp_path):
    process, pids = start_two(4, ENDLESS)
    process.signal(signal.SIGKILL)
    wait_for_end_of(pids)
    train(ENDLESS, "--resume --stop-after 1", out=tmp_path / "run", data=data, by=ranks(2))


# The rank that reads a token outside of the vocabulary takes part in the others' collectives until all have ended. With
# ZeRO-3 and large layers their shards still arrive in its memory when the bad token is found, at the start.
@pytest.mark.parametrize("kind, zero", [("train", 0), ("val", 3)])
def test_bad_data_of_one_rank_ends_all_and_good_data_continue(kind, zero, data, tmp_path):
    options = [ENDLESS, f"--val-every 1 --checkpoint-every 1 --zero {zero}", "--channels 512" if zero else ""]
    where = {"out": tmp_path / "run", "data": data, "by": ranks(4)}
    command = train_command(*options, f"--{kind}-data", damaged(data, tmp_path, kind), **where)
    assert len(ranks_refuse("token 288 (byte 1,600) is 65535", command, code=65).errors) == 1
    if kind == "train":  # some steps are saved
        resumed = train(*options, "--resume --stop-after 1", **where)
        steps = resumed.last_step() + 1
        whole = train(*options, "--stop-after", steps, out=tmp_path / "whole", data=data)
        assert_same_run(resumed, whole, steps)


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


def test_ranks_of_different_commands_are_refused(never):
    ranks_refuse("rank 1 runs eval, and rank 0 runs train: start all ranks with one command",
                 each_rank(never(), [str(PROGRAM), *"eval --init x --val-data x".split()]))


@pytest.mark.parametrize("text, n, options", [
    ("--global-batch 1000 is not a multiple of 128 tokens = --micro-batch 1 x --seq-len 64 x 2 ranks; try", 2,
     "--global-batch 1000"),
    ("--deterministic-ranks 8 on 3 ranks", 3, "--global-batch 1536 --deterministic-ranks 8")])
def test_batches_that_ranks_cannot_divide_are_refused(text, n, options, never):
    ranks_refuse(text, ranks(n).prefix, never(options))


@pytest.mark.parametrize("kind", ["train", "val"])
def test_one_other_bit_of_data_is_refused(kind, data, never, tmp_path):
    what = {"train": "training", "val": "validation"}[kind]
    ranks_refuse(f"rank 1 differs from rank 0: {what} data ",
                 each_rank(never(), never(f"--{kind}-data", damaged(data, tmp_path, kind, lambda token: token ^ 1))))


def test_ranks_of_different_programs_are_refused(never, tmp_path):
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
    ranks_refuse("rank 1 runs another build of the sources than rank 0: they may round differently, and "
                 "--deterministic-ranks", each_rank(never(VIRTUAL), [str(rebuilt), *never(VIRTUAL)[1:]]))


@pytest.mark.isa
def test_virtual_ranks_with_another_instruction_set_are_refused(never):
    if ", base;" in run(PROGRAM, "plan", TINY).out:
        pytest.skip("this machine has CPU_ISA=base only")
    command = never(VIRTUAL, "--precision fp32")  # auto is bf16 on some CPUs
    ranks_refuse("rank 1 has CPU_ISA=base, rank 0 has ", each_rank(command, ["env", "CPU_ISA=base", *command]))


def test_ranks_by_torchrun_are_refused(never):
    torchrun = words("env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29511", never())
    ranks_refuse("2 CPU ranks need MPI: start with mpirun -np 2 (found: torchrun)", torchrun)


def test_commands_that_do_not_divide_their_work_are_refused(trained, data, tmp_path):
    init = ["--init", trained(0, "")]
    for n, text, command in [
        (2, "tokenize runs in one process, but mpirun started 2, which would all do the same; start it without mpirun",
         ["tokenize", data.with_suffix(".txt"), "--output", tmp_path / "tokens", "--train-bpe", 300]),
        (3, "generate needs as many ranks as --tensor-parallel 2 says, and there are 3; start it with --ranks 2, or "
         "by a launcher with as many",
         ["generate", *init, "--tensor-parallel", 2])]:
        ranks_refuse(text, ranks(n).command(command))
    assert not (tmp_path / "tokens").exists()


def test_ranks_evaluate_and_generate_as_one(trained, data):
    init = words("--init", trained(0, ""), "--precision fp32")
    losses = words(PROGRAM, "eval", init, "--val-data", data / "val_*.bin", "--micro-batch 2")
    texts = words(PROGRAM, "generate", init, "--max-tokens 40 --num-samples 2 --prompt a --top-k 20")
    for command, options in [(texts, "--ranks 2 --tensor-parallel 2"), (losses, "--ranks 2"),
                             (losses, "--ranks 2 --tensor-parallel 2"), (losses, "--ranks 4 --tensor-parallel 2")]:
        one = run(command).out
        assert len(one) > 20 and one == run(command, options).out
    ranks_refuse("rank 1 differs from rank 0: --seq-len 32 there, 64 on rank 0",
                 each_rank(losses + ["--seq-len", "64"], losses + ["--seq-len", "32"]))
    texts += ["--tensor-parallel", "2"]
    ranks_refuse('rank 1 differs from rank 0: --prompt "b" there, "a" on rank 0',
                 each_rank(texts, texts + ["--prompt", "b"]))
