"""The command that starts a worker, and the worker's tie to the process that started it."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def worker_command(run: Path) -> list[str]:
    """Return the command of a worker of the run at `run`, to be started by this process."""
    return [sys.executable, "-m", "shoal", "worker", str(run), "--parent", str(os.getpid())]


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, so that a killed launcher leaves no orphan."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
