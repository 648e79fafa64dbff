"""mpi.py: what the tests of ranks share: other commands on each rank, refusals, and the end of all ranks."""

import os
import re
import shlex
import socket

from harness import MPI_ENVIRONMENT, execute, ranks, runs, wait_until, words

HOST = socket.gethostname()


def each_rank(*commands):
    """Returns the words by which rank r of one mpirun runs the words commands[r].

    `mpirun -np 1 A : -np 1 B` would do the same, but it crashes the mpirun of Open MPI 5.0.7.
    """
    cases = " ".join(f"{rank}) exec {shlex.join(command)} ;;" for rank, command in enumerate(commands))
    return words(ranks(len(commands)).prefix) + ["sh", "-c", f"case $OMPI_COMM_WORLD_RANK in {cases} esac"]


def by_hand(rank, n, folder, address="127.0.0.1"):
    """Returns the variables of a rank that no launcher starts, in a run that is named by the folder of the test."""
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": address,
            "MASTER_PORT": 20000 + os.getpid() % 600 * 20, "TORCHELASTIC_RUN_ID": folder}


def ranks_refuse(text, *command, code=2):
    """Runs ranks that must end with this code. Each line "error: ..." of a rank must name it and have this text."""
    result = execute(*command, env=MPI_ENVIRONMENT)
    assert result.code == code and result.errors, result
    for error in result.errors:
        assert text in error and re.match(rf"error: rank \d+ on {HOST}: ", error), result
    return result


def mpirun_says(expression, output):
    """Returns whether mpirun's message, which it breaks at 80 columns, matches."""
    return re.search(expression, " ".join(output.split())) is not None


def wait_for_end_of(pids):
    """Waits until all processes have ended. The mpirun of Open MPI 5 can end a moment before its last rank."""
    wait_until(lambda: not any(map(runs, pids)), f"the end of the processes {pids}")


def damaged(data, folder, kind, change=lambda token: 65535):
    """Copies the train or val shards; token 288 (byte 1,600) is changed, by default to none of the vocabulary."""
    for shard in data.glob(f"{kind}_*.bin"):
        content = bytearray(shard.read_bytes())
        content[1600:1602] = change(int.from_bytes(content[1600:1602], "little")).to_bytes(2, "little")
        (folder / shard.name).write_bytes(content)
    return folder / f"{kind}_*.bin"
