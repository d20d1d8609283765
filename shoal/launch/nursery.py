"""The nursery: a process of this host that has imported all that a worker needs, and forks the workers.

Importing torch and its engines takes seconds of a core. A worker that is forked from a process that has done so starts
in some 20 ms and shares the memory of the code with the others: sixteen workers on two cores, or one that replaces
another in the middle of a run, are there at once. The nursery computes nothing and has one thread, so that a fork is
whole: no thread pool, no lock that somebody held, no CUDA context.

1. The launcher starts it as `python -m shoal nursery`, with one end of a Unix socket, through which it says when it has
   imported everything. A command that is going to start workers has it begin before it imports torch itself (`early`).
2. For each worker the launcher sends the arguments and variables of its environment, and two descriptors: where it
   prints to, and where the nursery tells its process id at once and its exit code in the end, 4 bytes each. Where the
   system has no room for it, even after a while, it tells the number of that error, negative, instead.
3. The worker is in a session of its own, dies with the nursery, and the nursery with the launcher. What asks a run to
   stop is not for the nursery (Slurm sends it to all processes of a step): the launcher and the workers see to that.
   What comes in the moment of the fork waits until the worker can be asked.
4. When the launcher closes the socket, the nursery ends.

This is the launcher's side; what the process of the nursery does is in forking.py.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from shoal.core.errors import WorkerFailed
from shoal.launch.forking import NUMBER
from shoal.launch.starting import PYTHON, Vain

READY_S = 300.0
"""How long the nursery may take to import everything: 5 s on a quiet machine, a minute from a slow file system."""
_CLOSE_S = 5.0
_LOOK_S = 5e-3


def can_fork() -> bool:
    """Return whether a nursery works on this system."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class Forked:
    """A process that the nursery has forked: what a Popen is to launchers."""

    def __init__(self, output: int, told: int) -> None:
        os.set_blocking(told, False)
        self.stdout: IO[bytes] | None = open(output, "rb", buffering=0)  # noqa: SIM115  # the launcher closes it
        self._told = open(told, "rb", buffering=0)  # noqa: SIM115  # closed below
        self._code: int | None = None
        self.pid = 0

    def has_started(self) -> bool:
        """Return whether it runs: from then on it has a `pid`.

        ConnectionError if the nursery is gone, another OSError if the system had no room for it.
        """
        number = self._hear()
        if number is not None and number < 0:
            raise OSError(-number, os.strerror(-number))
        if number is not None:
            self.pid = number
        return number is not None

    def poll(self) -> int | None:
        """Return its exit code once it has ended; negative: the signal that killed it."""
        if self._code is None:
            try:
                self._code = self._hear()
            except ConnectionError:  # the nursery is gone, and its workers with it
                self._code = -signal.SIGKILL
            if self._code is not None:
                self._told.close()
        return self._code

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def open_end(self) -> int:
        """Return a descriptor that can be read once it has ended; OSError if there is none."""
        if self._told.closed:
            raise OSError("it has ended already.")
        return os.dup(self._told.fileno())

    def abandon(self) -> None:
        """Close what there is of one that was not started."""
        self._told.close()
        if self.stdout is not None:
            self.stdout.close()

    def _hear(self) -> int | None:
        """Return the next number that the nursery tells, if there is one yet."""
        data = self._told.read(NUMBER.size)
        if data == b"":
            raise ConnectionError("the nursery is gone.")
        return NUMBER.unpack(data)[0] if data else None


class _Importing:
    """The process of a nursery, with `env`, which imports from now on."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.command, self.env = tuple(command), env
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the nursery
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*command, "--control", str(theirs.fileno()), "--parent", str(os.getpid())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.said,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches us alone
            )

    def is_for(self, command: Sequence[str], env: dict[str, str]) -> bool:
        """Return whether workers of `command` with this environment can be forked from it, given what it lacks."""
        return self.command == tuple(command) and self.env.items() <= env.items()

    def close(self, *, wait_s: float) -> None:
        """End the process: it ends by itself once it sees that nobody is there, else after `wait_s`."""
        self.control.close()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_CLOSE_S)
        self.said.close()


_EARLY: list[_Importing] = []
"""The one that was begun before anybody needed it, if any."""


@contextlib.contextmanager
def early(command: Sequence[str], env: dict[str, str]) -> Iterator[None]:
    """Have a nursery that imports, for the length of a `with` block: for the first that is opened and can use it."""
    _EARLY.append(_Importing(command, env))
    try:
        yield
    finally:
        while _EARLY:
            _EARLY.pop().close(wait_s=0.0)


def await_early() -> None:
    """Wait until the early nursery, if there is one, has imported all: meanwhile it takes a core."""
    for importing in _EARLY:
        select.select([importing.control], [], [], READY_S)  # whatever is wrong with it, who opens it is told


class Nursery:
    """The launcher's side. Forks processes that do what `python -m shoal ARGUMENTS` does.

    `command` starts the nursery; tests have another.
    """

    def __init__(self, arguments: list[str], *, command: Sequence[str] = (*PYTHON, "nursery")) -> None:
        self._arguments, self._command = arguments, command
        self._importing: _Importing | None = None
        self._env: dict[str, str] = {}

    def open(self, env: dict[str, str]) -> None:
        """Start the nursery, which imports from now on, with the environment of the workers; or take the early one."""
        is_there = _EARLY and _EARLY[0].is_for(self._command, env)
        self._importing = _EARLY.pop() if is_there else _Importing(self._command, env)
        self._env = dict(env.items() - self._importing.env.items())

    def start(self, env: dict[str, str], in_vain: Callable[[], bool]) -> Forked:
        """Fork one, with `env` besides, as soon as everything is imported. OSError if the system has no room for it."""
        assert self._importing is not None
        output, prints = os.pipe()
        told, tells = os.pipe()
        forked = Forked(output, told)
        request = json.dumps({"arguments": self._arguments, "env": {**self._env, **env}}).encode()
        try:
            socket.send_fds(self._importing.control, [request], [prints, tells])
        except OSError:  # it has ended: what follows says why
            pass
        finally:
            os.close(prints)
            os.close(tells)
        try:
            _await(forked, self._importing, in_vain)
        except BaseException:
            forked.abandon()
            raise
        return forked

    def close(self) -> None:
        """End the nursery: its workers have ended."""
        if self._importing is not None:
            self._importing.close(wait_s=_CLOSE_S)
        self._importing = None


def _await(forked: Forked, importing: _Importing, in_vain: Callable[[], bool]) -> None:
    end_s = time.monotonic() + READY_S
    try:
        while not forked.has_started():
            if in_vain():
                raise Vain
            if time.monotonic() > end_s:
                raise WorkerFailed(f"torch and shoal were not imported within {READY_S:g} s.")
            time.sleep(_LOOK_S)
    except ConnectionError:
        importing.said.seek(0)
        said = importing.said.read().decode(errors="replace")
        raise WorkerFailed("the process that starts workers has ended.", details=said) from None
