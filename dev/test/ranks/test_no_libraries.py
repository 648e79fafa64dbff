"""test_no_libraries.py: programs that were built without MPI, without NCCL, and without both: every way to start two
ranks is refused with a sentence and exit code 2, and writes nothing."""

import pytest
from harness import MPI_ENVIRONMENT, RELEASE, Launch, refused, run, train_command

NO_MPI = RELEASE / "alone/train_gpt2"
NO_NCCL = RELEASE / "emulator/nonccl/train_gpt2cu"
NEITHER = RELEASE / "emulator/alone/train_gpt2cu"
OPTIONS = "--layers 1 --heads 1 --micro-batch 1 --global-batch 0 --steps 2 --precision fp32 --autotune off"
ENVIRONMENT = {**MPI_ENVIRONMENT, "SIMT_DEVICES": 2}
LAUNCHERS = {
    "torchrun": "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511",
    "srun": "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1 PMIX_RANK=1",
    # variables of an mpirun that starts this program without its MPI
    "mpirun": "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"}


@pytest.fixture
def command(data, tmp_path):
    """command(PROGRAM, OPTION...) is a training by this program, which writes nothing."""
    def make(program, *options):
        if not program.exists():
            pytest.skip(f"{program.relative_to(RELEASE.parents[1])} is not built")
        return train_command(OPTIONS, *options, out=tmp_path / "never", data=data, val=False, by=Launch(program))

    yield make
    assert not (tmp_path / "never/log.jsonl").exists()


@pytest.mark.parametrize("program", [NO_MPI, NO_NCCL])
def test_one_process_trains(program, command):
    run(command(program, "--output", [""], "" if program is NO_MPI else "--ranks 1"), env=ENVIRONMENT)


@pytest.mark.parametrize("program, text", [
    (NO_MPI, "--ranks needs MPI, which this build lacks: apt-get install libopenmpi-dev"),
    (NO_NCCL, "--ranks needs NCCL, which this build lacks: apt-get install libnccl-dev, and run make"),
    (NEITHER, "--ranks needs NCCL, which this build lacks: apt-get install libnccl-dev, and run make")])
def test_ranks_option_is_refused(program, text, command):
    refused(2, text, command(program, "--ranks 2"), env=ENVIRONMENT)


@pytest.mark.parametrize("program, launcher", [
    (NO_MPI, "srun"), (NO_MPI, "mpirun"), (NO_NCCL, "torchrun"), (NO_NCCL, "mpirun"), (NEITHER, "torchrun")])
def test_ranks_of_a_launcher_are_refused(program, launcher, command):
    kind = "CPU" if program is NO_MPI else "GPU"
    refused(2, f"2 {kind} ranks ({launcher}), but this build has no library",
            "env", LAUNCHERS[launcher], command(program), env=ENVIRONMENT)
