"""test_slurm.py: ranks under Slurm on two hosts (slurm.py): the rank that each process finds under srun, sbatch and
salloc, training by srun with PMIx, the rendezvous without it, and jobs that are asked to stop or queued again."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from harness import PROGRAM, RELEASE, ROOT, Run, assert_same_run, train, train_command, wait_until
from hosts import SUBNET

pytestmark = pytest.mark.launchers

JOIN = RELEASE / "rendezvous_rank"  # joins the rendezvous; with the argument `who` it only prints its rank
TWO_BY_TWO = "--nodes=2 --ntasks-per-node=2"
MPIRUN = f"mpirun --mca btl_tcp_if_include {SUBNET}.0/24 --mca oob_tcp_if_include {SUBNET}.0/24"
OPTIONS = "--micro-batch 1 --global-batch 128 --precision fp32 --deterministic-ranks 4 --val-every 0"


def four_ranks(launcher, of="", mpi=""):
    """Returns what 4 ranks print, 2 on each host. `of` is " of 2" if the launcher gives the number of local ranks, and
    `mpi` is ", MPI" if MPI joins the ranks."""
    return [f"{launcher}, rank {rank} of 4, local rank {rank % 2}{of} on HOST{rank // 2}{mpi}" for rank in range(4)]


@pytest.mark.parametrize("command, expected", [
    (f"srun {TWO_BY_TWO} --mpi=none", four_ranks("srun")),
    (f"srun {TWO_BY_TWO} --mpi=pmi2", four_ranks("srun")),
    (f"srun {TWO_BY_TWO} --mpi=pmix", four_ranks("srun", mpi=", MPI")),
    ("srun --nodelist=HOST0 --ntasks=1 --mpi=none", ["single process on HOST0"]),
    ("srun --nodelist=HOST0 --ntasks=1 --mpi=pmix", ["single process on HOST0"]),
    (f"salloc {TWO_BY_TWO} {MPIRUN}", four_ranks("mpirun", " of 2", ", MPI")),
    ("salloc --nodelist=HOST0 --nodes=1 --ntasks=1 mpirun -np 2 --host HOST0:2",
     [f"mpirun, rank {rank} of 2, local rank {rank} of 2 on HOST0, MPI" for rank in (0, 1)]),
    ("sbatch", ["single process on HOST0 (SLURM_NTASKS=4, but srun did not start this process)"]),
    (f"sbatch {MPIRUN}", four_ranks("mpirun", " of 2", ", MPI"))])
def test_each_process_finds_its_rank(command, expected, slurm, tmp_path):
    if command.startswith("sbatch"):
        slurm.batch(tmp_path / "job", f"{command.removeprefix('sbatch')} {JOIN} who", TWO_BY_TWO, "--wait")
        found = (tmp_path / "job.out").read_text()
    else:
        found = slurm.run(command.replace("HOST0", slurm.hosts[0]), JOIN, "who").out
    for i, name in enumerate(slurm.hosts):
        found = found.replace(name, f"HOST{i}")
    assert sorted(found.splitlines()) == expected


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, more_data):
    return train(OPTIONS, "--steps 4", out=tmp_path_factory.mktemp("one") / "run", data=more_data, val=False)


@pytest.mark.parametrize("launcher", [f"srun {TWO_BY_TWO} --mpi=pmix", f"salloc {TWO_BY_TWO} {MPIRUN}"])
def test_ranks_give_the_bits_of_one_process(launcher, slurm, one_process, more_data, tmp_path):
    slurm.run(launcher, train_command(OPTIONS, "--steps 4", out=tmp_path / "run", data=more_data, val=False))
    assert_same_run(one_process, tmp_path / "run", 4)


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_cpu_ranks_without_pmix_are_refused(mpi, slurm, more_data, tmp_path):
    result = slurm.execute("srun", TWO_BY_TWO, f"--mpi={mpi}",
                           train_command(OPTIONS, out=tmp_path / "run", data=more_data, val=False))
    assert result.code == 2 and "Exited with exit code 2" in result.err, result
    text = "4 CPU ranks need MPI: start with mpirun -np 4 (found: srun)"
    assert len(result.errors) == 4 and all(text in error for error in result.errors), result
    assert not (tmp_path / "run/log.jsonl").exists()


# ---- the TCP rendezvous of ranks without MPI, which NCCL uses


def joined(output, places, slurm):
    """Returns the id with which ranks on these hosts (0, 1) have joined. All must have the same."""
    found = re.findall(rf"^srun rank (\d+) of {len(places)} on (\S+), .*, joined (.*)$", output, re.MULTILINE)
    assert sorted((int(rank), host) for rank, host, _ in found) == [
        (rank, slurm.hosts[place]) for rank, place in enumerate(places)], output
    assert len({id for _, _, id in found}) == 1, output
    return found[0][2]


@pytest.mark.parametrize("options, places", [
    (TWO_BY_TWO, [0, 0, 1, 1]), ("--nodelist=HOST1 --ntasks=2", [1, 1]),
    ("--nodes=2 --ntasks=4 --distribution=block:block,pack", [0, 0, 0, 1])])
def test_tasks_join_one_run(options, places, slurm):
    joined(slurm.run("srun --mpi=none", options.replace("HOST1", slurm.hosts[1]), JOIN).out, places, slurm)


def test_two_steps_of_a_job_at_once_join_each_its_own(slurm, tmp_path):
    # The second ranks start when the first ranks of both steps run. The steps do not start in the same instant, at
    # which Debian 12's slurmd has crashed with a segmentation fault.
    rank = tmp_path / "rank"
    rank.write_text(f"""#!/bin/sh
cd {tmp_path} && touch started$SLURM_STEP_ID
[ $SLURM_PROCID = 0 ] || until [ -e started0 ] && [ -e started1 ]; do sleep 0.02; done
exec {JOIN}
""")
    rank.chmod(0o755)
    srun = f"srun --nodelist={slurm.hosts[0]} --ntasks=2 --nodes=1 --overlap --mpi=none {rank}"
    slurm.batch(tmp_path / "job", f"""cd {tmp_path}
{srun} >step0 & until [ -e started0 ]; do sleep 0.02; done; {srun} >step1 & wait""", TWO_BY_TWO, "--wait")
    ids = {joined((tmp_path / f"step{step}").read_text(), [0, 0], slurm) for step in (0, 1)}
    assert len(ids) == 2


# ---- jobs that are asked to stop, or queued again


def text_of(path):
    return path.read_text() if path.exists() else ""


def test_scancel_usr1_saves_and_another_job_resumes(slurm, more_data, tmp_path):
    run = Run(tmp_path / "run")
    endless = train_command(OPTIONS, "--steps 100000 --checkpoint-every 100000", out=run, data=more_data, val=False)
    job = slurm.batch(tmp_path / "job", f"srun --mpi=pmix {shlex.join(endless)}; echo code $?", TWO_BY_TWO)
    wait_until(lambda: run.last_step() >= 3, "step 3")
    slurm.run("scancel --signal=USR1", job)
    wait_until(lambda: "code " in text_of(tmp_path / "job.out"), "the end of the job")
    assert text_of(tmp_path / "job.out").endswith("code 75\n")
    steps = run.last_step() + 1
    slurm.run("srun --mpi=pmix", TWO_BY_TWO, endless, "--resume --stop-after 2")
    assert run.lines("run")[1]["resumed_at"] == steps and run.last_step() == steps + 1
    wait_until(lambda: not any("train_gpt2" in text_of(Path(f"/proc/{pid}/comm")) for pid in slurm.group.processes()),
               "the end of the ranks")


def test_recipe_that_ends_with_code_75_is_queued_again(slurm, tmp_path):
    # Its trainer ends with exit code 75 at first, and prints its rank the second time.
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "data/fineweb10B").mkdir(parents=True)
    (tmp_path / "data/fineweb10B/fineweb_train_000001.bin").touch()
    trainer = tmp_path / "train_gpt2cu"
    trainer.write_text(f"#!/bin/sh\n[ ${{SLURM_RESTART_COUNT:-0}} != 0 ] || exit 75\nexec {JOIN} who\n")
    trainer.chmod(0o755)
    (tmp_path / "train_gpt2").symlink_to(PROGRAM)

    def submit(name, *options):
        return slurm.run("sbatch --parsable --gpus-per-node=0 --cpus-per-task=1", TWO_BY_TWO,
                         f"--output={tmp_path / name}", "scripts/run_gpt2_124M.sbatch", *options, cwd=tmp_path).out

    submit("plan", "--plan")
    wait_until(lambda: "x 16 ranks" in text_of(tmp_path / "plan"), "a plan of 8 ranks per node")
    out = tmp_path / "out"
    job = submit("out", "--seed 7").strip()
    wait_until(lambda: "ended with exit code 75; queued again" in text_of(out), "exit code 75")
    slurm.start_again(job, lambda: "restart 1" in text_of(out), "the second attempt")
    wait_until(lambda: sorted(re.findall(r"^srun, rank (\d) of 4, .*, restart 1$", text_of(out), re.MULTILINE)) ==
               ["0", "1", "2", "3"], "the ranks of the second attempt")


def test_requeue_saves_and_the_second_attempt_ends_with_the_same_bits(slurm, more_data, tmp_path):
    given = [OPTIONS, "--steps 200 --checkpoint-every 1000"]
    one = train(*given, out=tmp_path / "one", data=more_data, val=False, env={"OMP_NUM_THREADS": 1})
    run = Run(tmp_path / "run")
    command = train_command(*given, "--resume", out=run, data=more_data, val=False)
    job = slurm.batch(tmp_path / "job", f"exec srun --mpi=pmix {shlex.join(command)}", TWO_BY_TWO,
                      "--requeue --open-mode=append")
    wait_until(lambda: run.last_step() >= 3, "step 3")
    slurm.run("scontrol requeue", job)  # Slurm sends SIGTERM
    wait_until(run.latest, "a checkpoint")
    saved = run.latest()
    assert saved != "step_000200", "training ended before"
    slurm.start_again(job, lambda: len(run.lines("run")) == 2, "the second attempt")
    assert run.lines("run")[1]["resumed_at"] == int(saved.removeprefix("step_"))
    wait_until(lambda: run.latest() == "step_000200", "the last step")
    assert_same_run(one, run, 200)
