"""test_slurm.py: ranks under Slurm on two hosts (slurm.py): the rank that each process finds under srun, sbatch and
salloc, training by srun with PMIx, the rendezvous without it, and jobs that are asked to stop or queued again."""

import re
import shlex
import shutil

import pytest
from harness import RELEASE, Run, assert_same_run, no_mpi_because, train, train_command, wait_until
from hosts import SUBNET, no_hosts_because
from slurm import SBIN, Slurm

pytestmark = pytest.mark.launchers

JOIN = RELEASE / "rendezvous_rank"  # joins the rendezvous; with the argument `who` it only prints its rank
TWO_BY_TWO = "--nodes=2 --ntasks-per-node=2"
# Without -N 2 the mpirun of Open MPI 5 starts all four ranks on the first host.
MPIRUN = f"mpirun -N 2 --mca btl_tcp_if_include {SUBNET}.0/24 --mca oob_tcp_if_include {SUBNET}.0/24"
OPTIONS = "--micro-batch 1 --global-batch 128 --precision fp32 --deterministic-ranks 4 --val-every 0"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = no_mpi_because() or no_hosts_because()
    if not reason and not all(shutil.which(name, path=SBIN) for name in ("srun", "slurmctld", "slurmd", "munged")):
        reason = "there is no Slurm (ALL=1 ./scripts/test.sh installs it: apt-get install slurm-wlm munge)"
    if reason:
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def four_ranks(launcher, mpi=""):
    """Returns what 4 ranks print, 2 on each host. `mpi` is ", MPI" if MPI joins the ranks."""
    return [f"{launcher}, rank {rank} of 4, local rank {rank % 2} of 2 on HOST{rank // 2}{mpi}" for rank in range(4)]


@pytest.mark.parametrize("command, expected", [
    (f"srun {TWO_BY_TWO} --mpi=none", four_ranks("srun")),
    (f"srun {TWO_BY_TWO} --mpi=pmix", four_ranks("srun", mpi=", MPI")),
    ("srun --nodelist=HOST0 --ntasks=1 --mpi=pmix", ["single process on HOST0"]),
    (f"salloc {TWO_BY_TWO} {MPIRUN}", four_ranks("mpirun", ", MPI")),
    ("sbatch", ["single process on HOST0 (SLURM_NTASKS=4, but srun did not start this process)"])])
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


def test_cpu_ranks_without_pmix_are_refused(slurm, more_data, tmp_path):
    result = slurm.execute("srun", TWO_BY_TWO, "--mpi=none",
                           train_command(OPTIONS, out=tmp_path / "run", data=more_data, val=False))
    assert result.code == 2 and "Exited with exit code 2" in result.err, result
    text = "4 CPU ranks need MPI: start with mpirun -np 4 or srun --mpi=pmix (found: srun)"
    assert len(result.errors) == 4 and all(text in error for error in result.errors), result
    assert not (tmp_path / "run/log.jsonl").exists()


# The TCP rendezvous of ranks without MPI, which NCCL uses. places: the hosts of the ranks.
@pytest.mark.parametrize("options, places", [
    (TWO_BY_TWO, [0, 0, 1, 1]), ("--nodelist=HOST1 --ntasks=2", [1, 1]),
    ("--nodes=2 --ntasks=4 --distribution=block:block,pack", [0, 0, 0, 1])])
def test_tasks_join_one_run(options, places, slurm):
    output = slurm.run("srun --mpi=none", options.replace("HOST1", slurm.hosts[1]), JOIN).out
    found = re.findall(rf"^srun rank (\d+) of {len(places)} on (\S+), .*, joined (.*)$", output, re.MULTILINE)
    assert sorted((int(rank), host) for rank, host, _ in found) == [
        (rank, slurm.hosts[place]) for rank, place in enumerate(places)], output
    assert len({id for _, _, id in found}) == 1, output


def test_scancel_usr1_saves_and_another_job_resumes(slurm, more_data, tmp_path):
    run = Run(tmp_path / "run")
    endless = train_command(OPTIONS, "--steps 100000 --checkpoint-every 100000", out=run, data=more_data, val=False)
    job = slurm.batch(tmp_path / "job", f"srun --mpi=pmix {shlex.join(endless)}; echo code $?", TWO_BY_TWO)
    wait_until(lambda: run.last_step() >= 3, "step 3")
    slurm.run("scancel --signal=USR1", job)
    wait_until(lambda: "code " in (tmp_path / "job.out").read_text(), "the end of the job")
    assert (tmp_path / "job.out").read_text().endswith("code 75\n")
    steps = run.last_step() + 1
    slurm.run("srun --mpi=pmix", TWO_BY_TWO, endless, "--resume --stop-after 2")
    assert run.lines("run")[1]["resumed_at"] == steps and run.last_step() == steps + 1
