"""test_ranks_option.py: --ranks N, which starts CPU ranks by mpirun: the same bits as mpirun -np N, signals, a killed
rank, a killed parent, and refused starts."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from harness import (MPI_ENVIRONMENT, STOP_SIGNALS, Launch, Run, assert_same_run, execute, limited, make_script,
                     on_path, preload, ranks, ranks_of, refused, run, train, train_command)
from mpi import mpirun_says, wait_for_end_of

ENDLESS = "--ranks 2 --steps 1000000 --checkpoint-every 100000"
OPTIONS = "--steps 4 --checkpoint-every 4"


@pytest.fixture(autouse=True)
def needs_mpi():
    ranks(2)


@pytest.fixture
def job(train_in_background, data, tmp_path):
    """job(OPTION...) starts an endless run in tmp_path / "run" and waits until it trains; returns the process, and the
    IDs of mpirun and the ranks."""

    def begin(*options):
        process = train_in_background(ENDLESS, *options, out=tmp_path / "run", data=data, env={"OMP_NUM_THREADS": 1})
        process.wait_for_step(tmp_path / "run", 3)
        return process, process.descendants()[:1] + ranks_of(process)

    return begin


def test_ranks_has_the_bits_of_mpirun_and_needs_no_ssh(data, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("mpirun", "orterun", "orted", "prterun", "prte", "prted", "sh"):
        if path := shutil.which(name):
            (programs / name).symlink_to(path)
    option = train(OPTIONS, "--ranks 2", out=tmp_path / "option", data=data, env={"PATH": programs})
    assert option.lines()[0]["world_size"] == 2
    assert_same_run(option, train(OPTIONS, out=tmp_path / "mpirun", data=data, by=ranks(2)), 4)


def test_ranks_stay_on_this_machine_in_a_slurm_job_of_others(data):
    slurm = {"SLURM_JOB_ID": 5, "SLURM_JOBID": 5, "SLURM_NNODES": 2, "SLURM_NTASKS": 2, "SLURM_NODELIST": "h[1-2]",
             "SLURM_JOB_NODELIST": "h[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    train(OPTIONS, "--ranks 2", out="", data=data, env=slurm)


def listening(pid):
    """Returns the sockets by which a process listens for TCP."""
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    return sockets & {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}


def network_of(pid):
    return os.readlink(f"/proc/{pid}/ns/net")


def test_strangers_reach_neither_mpirun_nor_the_ranks(job):
    process, (mpirun, *pids) = job()
    assert not any(map(listening, pids))
    warned = "warning: mpirun listens on all addresses, for want of a network namespace" in process.output
    assert (network_of(mpirun) == network_of(os.getpid())) == warned
    assert {network_of(pid) for pid in pids} == {network_of(mpirun)}


def test_ranks_start_where_no_network_can_be_made(data):
    limited = ["unshare", "--user", "--map-root-user", "sh", "-c",
               'echo 0 >/proc/sys/user/max_net_namespaces && exec "$@"', "sh"]
    if execute(limited, "true").code != 0:
        pytest.skip("namespaces cannot be limited here")
    result = run(limited, train_command(OPTIONS, "--ranks 2", out="", data=data))
    assert "warning: mpirun listens on all addresses" in result.err


def test_ranks_start_without_home_and_user_name(data, tmp_path):
    nobody = preload(tmp_path, "void* getpwuid(unsigned id) { return (void*)(id * 0ul); }")
    train(OPTIONS, "--ranks 2", out="", data=data, env={**nobody, "HOME": None})


def test_a_crash_of_mpirun_for_want_of_stack_is_explained(data, tmp_path):
    make_script(tmp_path / "mpirun", "kill -SEGV $$")
    failed = execute(limited("-s 512"), train_command(OPTIONS, "--ranks 2", out="", data=data), env=on_path(tmp_path))
    assert failed.code == 139 and "its stack may be too small: give ulimit -s 1024 or more" in failed.err


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_saves_and_ends_all(number, job, tmp_path):
    process, pids = job()
    process.signal(number)
    assert process.wait() == 75 and (tmp_path / "run/latest").exists()
    wait_for_end_of(pids)


# mpirun drops signals until its ranks exist, or hangs. This fake one notes a signal, and is late to start the real one.
@pytest.mark.parametrize("by", [Launch(options="--ranks 2"), Launch(prefix="scripts/mpirun.sh -np 2")])
@pytest.mark.parametrize("number, codes", [(signal.SIGTERM, (75, 138, 143)), (signal.SIGKILL, (137,))])
def test_mpirun_gets_a_signal_when_its_ranks_exist(number, codes, by, train_in_background, data, tmp_path):
    waits, signalled = tmp_path / "waits", tmp_path / "signalled"
    make_script(tmp_path / "mpirun", f"""trap ": >'{signalled}'" USR1; : >'{waits}'; sleep 0.5
                exec '{shutil.which("mpirun")}' "$@\"""")
    process = train_in_background("--steps 3000", out=tmp_path / "run", data=data, by=by,
                                  env=on_path(tmp_path, **MPI_ENVIRONMENT))
    process.wait_for(waits.exists, "mpirun")
    mpirun = process.descendants()[:1]
    process.signal(number)
    assert process.wait() in codes
    wait_for_end_of(mpirun)
    assert Run(tmp_path / "run").last_step() < 2999
    assert signalled.exists() == (number == signal.SIGKILL)  # the kernel's


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_without_checkpoints_the_exit_code_names_the_signal(number, job):
    process, _ = job("--checkpoint-every 0")
    process.signal(number)
    assert process.wait() == 128 + number


# systemd and Slurm signal all processes of a job. mpirun itself would kill the ranks within two seconds.
def test_a_signal_to_all_processes_leaves_time_for_the_save(job, tmp_path):
    process, pids = job()
    for pid in pids[::-1]:
        os.kill(pid, signal.SIGTERM)
    pending = int(re.search("ShdPnd:(.*)", Path(f"/proc/{pids[0]}/status").read_text())[1], 16)
    assert pending >> (signal.SIGTERM - 1) & 1
    assert process.wait() == 75 and (tmp_path / "run/latest").exists()
    wait_for_end_of(pids)


def test_a_second_signal_ends_ranks_that_cannot_stop(job):
    process, pids = job()
    os.kill(pids[1], signal.SIGSTOP)
    while process.lives():  # two signals at the same time would be one
        process.signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.wait() not in (0, 75)
    wait_for_end_of(pids)


# At the end of a preempted job's time of grace, or of a time limit after a notice.
def test_the_second_sigterm_of_slurm_leaves_time_for_the_save(job, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    process, pids = job()
    os.kill(pids[1], signal.SIGSTOP)
    for _ in range(4):
        process.signal(signal.SIGTERM)
        time.sleep(0.5)
    os.kill(pids[1], signal.SIGCONT)
    assert process.wait() == 75


def test_a_killed_rank_is_named_and_the_run_is_resumed(job, data, tmp_path):
    process, pids = job("--checkpoint-every 2")
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait() == 137
    assert mpirun_says("process rank 0.*signal 9", process.output)
    wait_for_end_of(pids)
    train(ENDLESS, "--resume --stop-after 2", out=tmp_path / "run", data=data)


def test_a_killed_parent_leaves_no_process_and_no_step_is_lost(job, tmp_path):
    process, pids = job()
    process.signal(signal.SIGKILL)
    wait_for_end_of(pids)
    assert (tmp_path / "run/latest").exists()


@pytest.mark.parametrize("limit, text", [
    ("-S", ""), ("-HS", "error: --ranks 2 takes up to 74 open files, but the hard limit is 28")])
def test_too_few_open_files_become_more_or_are_refused(limit, text, data):
    result = execute(limited(f"{limit} -n 28"), train_command(OPTIONS, "--ranks 2", out="", data=data))
    assert result.code == (2 if text else 0) and text in result.err, result


@pytest.mark.parametrize("code, text, options, env", [
    (2, "--zero 9", "--ranks 2 --zero 9", {}),
    (2, "mpirun has started 2", "--ranks 4", {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2,
                                              "OMPI_COMM_WORLD_LOCAL_RANK": 0, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}),
    (2, "this program is for the CPU: give a number of ranks", "--ranks all", {}),
    (2, "--ranks 2 needs mpirun: No such file", "--ranks 2", {"PATH": "/nowhere"}),
    (73, "/proc/a: cannot hold mpirun's files, for which", "--ranks 2", {"TMPDIR": "/proc/a"})])
def test_refused_starts_print_one_error_and_write_nothing(code, text, options, env, data, tmp_path):
    refused(code, text, train_command(options, out=tmp_path / "never", data=data), env=env)
    assert not (tmp_path / "never/log.jsonl").exists()
