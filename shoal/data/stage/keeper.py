"""A small process that owns a copy for as long as another process lives: the shell or job script that had it staged.

    python -m shoal.data.stage.keeper DESCRIPTOR PATH PID

It holds the lock that the descriptor has, and ends, and gives the space back, when process PID has ended, or when the
copy is to be released (`shoal stage --release`).
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from shoal.data.stage.copies import RELEASE, Copy
from shoal.data.stage.locks import FileLock

_LOOK_S = 0.5


def start_keeper(descriptor: int, path: Path, *, until_pid: int) -> int:
    """Start a keeper of the copy at `path`, which `descriptor` owns, and close that; return the process id."""
    command = [sys.executable, "-m", "shoal.data.stage.keeper", str(descriptor), str(path), str(until_pid)]
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        command, pass_fds=[descriptor], start_new_session=True, stdin=null, stdout=null, stderr=null
    )
    os.close(descriptor)
    process.returncode = 0  # it is not ours to wait for: it outlives us
    return process.pid


def keep(descriptor: int, path: Path, pid: int) -> None:
    """Own the copy at `path` until process `pid` has ended or the copy is to be released, then leave it."""
    copy = Copy(path, FileLock.adopt(path / "owners.lock", descriptor))
    try:
        with _watched(pid) as ended:
            while not ended(_LOOK_S) and not (path / RELEASE).exists():
                pass
    finally:
        copy.leave()


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
    signal.signal(signal.SIGTERM, _end)
    keep(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
