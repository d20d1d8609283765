"""A small process that removes a room when all who had it open have ended, however they ended.

    python sweeper.py LOCK

It waits for the lock that everybody in the room shares, and gets it when the last of them is gone. If the room is still
there then, nobody could remove it any more: the launcher and all workers were killed. It is in a session of its own, so
that what ends the others, with all that they have started, does not end it; and imports next to nothing.

What ends even this process (a job's control group, a host that runs out of memory) leaves the room to the next run.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


class Sweeper:
    """Such a process for the room at `path`, which this process has open. OSError where none can be started."""

    def __init__(self, path: Path) -> None:
        # Without the site's packages, and whatever the environment says of Python: it is there in some 20 ms.
        command = [sys.executable, "-I", "-S", __file__, str(path / "lock")]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, start_new_session=True, stdin=null, stdout=null, stderr=null)

    def leave(self, *, timeout_s: float = 5.0) -> None:
        """Wait for its end, now that the room is removed; for so long at most, should others still have it open."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.poll() is None:
            self._process.returncode = 0  # it is not ours to wait for


def sweep(lock: Path) -> None:
    """Remove the room of `lock` as soon as nobody has it open; return, too, when somebody else has removed it."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            shutil.rmtree(lock.parent, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # which a batch system sends to every process
        signal.signal(number, signal.SIG_IGN)
    sweep(Path(sys.argv[1]))
