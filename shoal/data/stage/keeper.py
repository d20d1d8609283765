"""Small processes that give the space of a copy back when others have ended, however these ended.

    python -m shoal.data.stage.keeper DESCRIPTOR PATH PID

A keeper owns a copy for as long as another process lives: the shell or job script that had it staged. It holds the lock
that the descriptor has, and leaves the copy when process PID has ended, or when the copy is to be released (`shoal
stage --release`).

    python -m shoal.data.stage.keeper PATH

A sweeper owns nothing: it waits until nobody owns the copy, and removes it if the last owner could not, as workers that
are killed cannot.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.core.notice import leave_to_others
from shoal.data.stage.copies import OWNERS, RELEASE, Copy, remove
from shoal.data.stage.locks import FileLock

_LOOK_S = 0.5


def start_keeper(descriptor: int, path: Path, *, until_pid: int) -> int:
    """Start a keeper of the copy at `path`, which `descriptor` owns, and close that; return the process id."""
    process = _start([str(descriptor), str(path), str(until_pid)], pass_fds=[descriptor])
    os.close(descriptor)
    process.returncode = 0  # it is not ours to wait for: it outlives us
    return process.pid


class Sweeper:
    """A process that removes the copy at `path` when nobody owns it; it outlives this one if need be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no more processes here: then the next staging removes what is left
            self._process = _start([str(path)])

    @property
    def pid(self) -> int | None:
        """The process; None where none could be had."""
        return None if self._process is None else self._process.pid

    def leave(self, *, timeout_s: float = 5.0) -> None:
        """End it if it has no more to do; others of this node may still use the copy."""
        if self._process is None:
            return
        if not self._path.exists():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        if self._process.poll() is None:
            self._process.returncode = 0  # it is not ours to wait for


def _start(arguments: Sequence[str], *, pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "shoal.data.stage.keeper", *arguments]
    null = subprocess.DEVNULL
    # In a session of its own: what ends the workers of a run, with all that they have started, does not end it.
    return subprocess.Popen(command, pass_fds=pass_fds, start_new_session=True, stdin=null, stdout=null, stderr=null)


def keep(descriptor: int, path: Path, pid: int) -> None:
    """Own the copy at `path` until process `pid` has ended or the copy is to be released, then leave it."""
    copy = Copy(path, FileLock.adopt(path / "owners.lock", descriptor))
    try:
        with _watched(pid) as ended:
            while not ended(_LOOK_S) and not (path / RELEASE).exists():
                pass
    finally:
        copy.leave()


def sweep(path: Path) -> None:
    """Remove the copy at `path` as soon as nobody owns it; return, too, when somebody else has removed it."""
    with FileLock(path / OWNERS) as lock:
        if (path / OWNERS).exists() and lock.wait():
            remove(path)


class _watched:  # noqa: N801  reads as a function
    """Whether a process has ended: by a descriptor of it where the system has these, else by looking."""

    def __init__(self, pid: int) -> None:
        self._pid, self._handle = pid, -1
        with contextlib.suppress(OSError, AttributeError):  # ended already, or no such call
            self._handle = os.pidfd_open(pid)

    def __enter__(self) -> "_watched":
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def __call__(self, wait_s: float) -> bool:
        """Return whether it has ended, after `wait_s` at most."""
        if self._handle >= 0:
            return bool(select.select([self._handle], [], [], wait_s)[0])
        with contextlib.suppress(PermissionError):
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                return True
        time.sleep(wait_s)
        return False


def _end(*_: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    leave_to_others()
    signal.signal(signal.SIGTERM, _end)
    if len(sys.argv) == 2:
        sweep(Path(sys.argv[1]))
    else:
        keep(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
