"""Open MPI's all-reduce, by mpi4py, for `shoal bench collectives`: how its workers are started, and what they do.

MPI's workers cannot take turns with ours: they are processes of another launcher. So they run directly before and
directly after ours, and all their turns count alike.
"""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.bench.turns import take_turns
from shoal.core.errors import WorkerFailed
from shoal.core.files import write_whole
from shoal.core.host import usable_cores
from shoal.launch.parent import die_with_parent

NAME = "MPI"
_HOW = "Install Open MPI (openmpi-bin of Debian and Ubuntu) and then mpi4py (pip install mpi4py) to have it measured."


def why_not() -> str:
    """Return in a sentence why MPI cannot be measured here, or "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"MPI is left out: this Python has no mpi4py. {_HOW}"
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return f"MPI is left out: there is no mpirun. {_HOW}"
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    if "Open MPI" not in version:  # others are kept to loopback in other ways
        return f"MPI is left out: {mpirun} is not Open MPI's. {_HOW}"
    return ""


def start_command(folder: Path, *, workers: int, seconds: float, sizes: Sequence[int]) -> list[str]:
    """Return the command that becomes mpirun, to be started by this process; worker 0 writes mpi.json into `folder`."""
    options = [str(folder), str(seconds), ",".join(map(str, sizes))]
    return [sys.executable, "-m", "shoal.bench.collectives_mpi", "start", str(os.getpid()), str(workers), *options]


def mpirun_command(workers: int, options: Sequence[str], *, is_root: bool) -> list[str]:
    """Return the mpirun of `workers` workers of this host, who meet in shared memory and open no port.

    mpirun itself talks over loopback, but Open MPI 4.1 opens its control port on every interface, whatever it is told.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    host = f"localhost:{usable_cores()}"  # with more workers than this, they give way to each other while they wait
    return [
        *["mpirun", "-n", str(workers), "--host", host, "--oversubscribe", "--bind-to", "none"],
        *(["--allow-run-as-root"] if is_root else []),
        *["--mca", "pml", "ob1", "--mca", "btl", "^tcp", "--mca", "oob_tcp_if_include", loopback],
        *[sys.executable, "-m", "shoal.bench.collectives_mpi", "work", *options],
    ]


def start(parent: str, workers: str, *options: str) -> None:
    """Become mpirun; it ends when the process `parent` does."""
    die_with_parent(int(parent))
    command = mpirun_command(int(workers), options, is_root=hasattr(os, "geteuid") and os.geteuid() == 0)
    os.execvp(command[0], command)  # noqa: S606  no shell is wanted


def work(folder: str, seconds: str, sizes: str) -> None:
    """Measure for about `seconds`, as a worker under mpirun; worker 0 writes the seconds of each turn."""
    die_with_parent(os.getppid())
    begin_s = time.perf_counter()
    mpi: Any = importlib.import_module("mpi4py.MPI")
    numpy: Any = importlib.import_module("numpy")
    world = mpi.COMM_WORLD
    numels = [int(size) // 4 for size in sizes.split(",")]
    index = numpy.arange(max(numels), dtype="i4")
    own = ((index + 7 * world.rank) % 61).astype("f4")
    expected = sum(((index + 7 * other) % 61).astype("f4") for other in range(world.size))
    total = numpy.zeros_like(own)
    for numel in numels:
        world.Allreduce(own[:numel], total[:numel])
        if not numpy.array_equal(total[:numel], expected[:numel]):
            raise WorkerFailed(f"MPI gave worker {world.rank} of {world.size} a wrong sum of {4 * numel} bytes.")
    times = take_turns(
        {4 * numel: {NAME: partial(world.Allreduce, own[:numel], total[:numel])} for numel in numels},
        seconds=max(0.5 * float(seconds), float(seconds) - (time.perf_counter() - begin_s)),
        wait=world.Barrier,
        agree=lambda value: int(world.bcast(value, root=0)),
        say=lambda _part: None,
    )
    slowest = {size: [world.allreduce(s, op=mpi.MAX) for s in row[NAME]] for size, row in times.items()}
    if world.rank == 0:
        write_whole(Path(folder) / "mpi.json", json.dumps(slowest))


if __name__ == "__main__":
    (start if sys.argv[1] == "start" else work)(*sys.argv[2:])
