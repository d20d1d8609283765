"""Who trains a run: one at a time holds the lock of its folder, and two would undo each other's work.

1. Whoever starts a run (the launcher, the first worker of a loop of one's own, the process that conducts a job on a
   cluster) holds `lock` in its folder (flock) from before it changes anything there until the run has ended. The kernel
   lets go of it however that process ends.
2. Its content says who that is, for the sentence of whoever comes second.
3. Where the file system has no such locks, runs go on without.

A node that is switched off may hold a lock on NFS for long. A job of Slurm that is started again goes on all the same:
Slurm has ended its first start. Others are told which file to remove.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder

_PATIENCE_S, _LOOK_S = 1.0, 0.05
"""How long one that holds it may take to let go: another may only have looked, or just be killed."""
_MOST_BYTES = 4096
_held: set[int] = set()


@dataclass(frozen=True)
class Holder:
    """Who trains a run."""

    host: str = ""
    process: int = 0
    job: str = ""
    """The number of its job, under Slurm."""

    def __str__(self) -> str:
        """Return it as a sentence names it."""
        if not self.host:
            return "another process"
        return f"process {self.process} on {self.host}" + (f", of job {self.job}" if self.job else "")


@contextlib.contextmanager
def held(folder: RunFolder, *, job: str = "") -> Iterator[None]:
    """Be the one that trains the run in `folder`, for the length of a `with` block; `job` is that of Slurm, if any.

    Raises ConfigError where another process trains it.
    """
    handle = _taken(folder.lock, patience_s=_PATIENCE_S)
    if handle is None:
        other = _read(folder.lock)
        if not job or other.job != job:
            raise ConfigError(
                f"{folder.path} is being trained, by {other}. Wait for its end, or end it; or begin a run of another "
                f"--name. If that host is down for good, remove {folder.lock}"
            )
        yield  # the first start of the same job, on a node that is gone
        return
    if handle < 0:
        yield  # without locks
        return
    _held.add(handle)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(asdict(Holder(socket.gethostname(), os.getpid(), job))).encode(), 0)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def is_held(folder: RunFolder) -> bool:
    """Return whether somebody trains the run in `folder` now, as far as the file system can tell."""
    if not folder.lock.exists():
        return False
    handle = _taken(folder.lock, patience_s=0.0)
    if handle is not None and handle >= 0:
        os.close(handle)
    return handle is None


def holder_of(folder: RunFolder) -> Holder:
    """Return who trains the run in `folder`, or who did last."""
    return _read(folder.lock)


def _taken(path: Path, *, patience_s: float) -> int | None:
    """Return a descriptor that holds the lock; None where another does; -1 where there are no locks."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # a folder that cannot be written to: what is written there first says so
        return -1
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= until_s:
                os.close(handle)
                return None
            time.sleep(_LOOK_S)
        except OSError:
            os.close(handle)
            return -1


def _read(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_text()[:_MOST_BYTES]))
    except (OSError, ValueError, TypeError):
        return Holder()


def _forget_in_child() -> None:
    """Close a forked child's copies: a lock is held while any copy is open, and a child may outlive its parent."""
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
