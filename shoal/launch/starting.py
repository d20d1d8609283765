"""How a launcher starts the processes of workers: each by a command, or forked from a nursery."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from shoal.core.errors import WorkerFailed
from shoal.core.host import THREADS, threads_per_worker

PYTHON = (sys.executable, "-m", "shoal")


class Vain(Exception):
    """A process was not started, because nobody wants it any more."""


class NotStarted(WorkerFailed):
    """The system has no room for another process: those that run go on."""


class Process(Protocol):
    """A worker's process, as its launcher sees it: the first of a session of its own."""

    pid: int
    stdout: IO[bytes] | None
    """What it prints, on stderr as well."""

    def poll(self) -> int | None:
        """Return its exit code once it has ended; negative: the signal that killed it."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it still runs."""

    def kill(self) -> None:
        """End it at once."""

    def open_end(self) -> int:
        """Return a descriptor that can be read once it has ended; OSError if there is none."""


class Starting(Protocol):
    """Starts processes, between `open` and `close`."""

    def open(self, env: dict[str, str]) -> None:
        """Prepare, for processes with this environment."""

    def start(self, env: dict[str, str], in_vain: Callable[[], bool], /) -> Process:
        """Start one, with `env` besides; Vain if that takes a while and is `in_vain` by then.

        OSError if the system has no room for it.
        """

    def close(self) -> None:
        """Leave nothing behind, once the processes have ended."""


class Spawned(subprocess.Popen[bytes]):
    """A process that was started by a command."""

    def open_end(self) -> int:
        """Return a descriptor that can be read once it has ended; OSError if there is none."""
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes.")
        return os.pidfd_open(self.pid)


class Spawning:
    """Starts each process by a command."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._env: dict[str, str] = {}

    def open(self, env: dict[str, str]) -> None:
        """Keep the environment."""
        self._env = env

    def start(self, env: dict[str, str], _: Callable[[], bool]) -> Process:
        """Start one, with `env` besides."""
        return Spawned(
            self._command,
            env={**self._env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and what a worker starts can be ended with it
        )

    def close(self) -> None:
        """Leave nothing: there is nothing."""


def workers_of(run: Path) -> Starting:
    """Return what starts the workers of the run at `run`, for this process."""
    from shoal.launch.nursery import Nursery, can_fork

    arguments = ["worker", str(run)]
    return Nursery(arguments) if can_fork() else Spawning([*PYTHON, *arguments, "--parent", str(os.getpid())])


@contextlib.contextmanager
def getting_ready(workers: int) -> Iterator[None]:
    """Have what starts `workers` of a run here get ready, for the length of a `with` block; `workers_of` then has it.

    For a command that is about to import torch itself, which takes as long: both do so at once.
    """
    from shoal.launch.nursery import can_fork, early

    env = import_environment(os.environ, threads=threads_per_worker(workers))
    with early((*PYTHON, "nursery"), env) if can_fork() else contextlib.nullcontext():
        yield


def import_environment(env: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """Return `env` with what every worker is told before it imports anything: its threads, where `env` has none."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Without gaps in a GPU's memory, which took up to a quarter of the peak (docs/accuracy.md).
        "PYTORCH_ALLOC_CONF": env.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        **env,
        "PYTHONUNBUFFERED": "1",
    }


def worker_environment(env: Mapping[str, str], *, threads: int, host: str, port: int) -> dict[str, str]:
    """Return that, and where all workers meet: in the store there, which their launcher hosts."""
    is_given = "OMP_NUM_THREADS" in env or "MKL_NUM_THREADS" in env
    return import_environment(env, threads=threads) | {
        THREADS: "" if is_given else "shared",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
