"""A worker process, as its pool sees it: the other end of worker.py."""

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from shoal.tasks.batch import Batch
from shoal.tasks.worker import MARK_BYTES

STALL_S = 600.0
"""How long one message may take through a local socket before its worker counts as dead."""
CLOSE_S = 5.0


class Worker:
    """One worker process, and what it is doing."""

    def __init__(self, number: int, place: int, env: Mapping[str, str]) -> None:
        """Start it; OSError where the system has no more processes, memory or files."""
        self.number, self.place = number, place
        self.batch: Batch | None = None
        self.positions: Sequence[int] = ()
        self.known: set[int] = set()
        self.end, theirs = socket.socketpair()
        self.end.settimeout(STALL_S)
        mark = _shared_memory()
        os.ftruncate(mark, MARK_BYTES)
        self._mark = memoryview(mmap.mmap(mark, MARK_BYTES)).cast("q")
        numbers = [str(each) for each in (theirs.fileno(), mark, os.getpid())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.tasks.worker", *numbers],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), mark),
                env=dict(env),
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        except OSError:
            self.end.close()
            raise
        finally:
            theirs.close()
            os.close(mark)

    def begin(self, batch: Batch, positions: Sequence[int]) -> None:
        """Note which chunk it is about to get."""
        self.batch, self.positions, self._mark[0] = batch, positions, -1

    def rest(self) -> None:
        """Note that it has nothing to do."""
        self.batch, self.positions = None, ()

    @property
    def at(self) -> int:
        """The task it is at, of its chunk; -1: none yet."""
        return self._mark[0]

    def stop(self, *, grace_s: float = 0.0) -> int:
        """End it, by its process id; return its exit code."""
        self.end.close()  # an idle one ends by this
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(CLOSE_S)


def _shared_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal-mark")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
