"""Memory of a run that outlives its workers: a folder of files in the host's shared memory, removed with the run.

1. The workers of a run, and its launcher, know one token (from the store). A host's room is
   /dev/shm/shoal-room-USER-TOKEN. (shoal-USER-HOST beside it is of staging, and none of ours.)
2. Whoever has it open holds a lock on its file `lock`. The kernel lets go of that however a process ends.
3. The launcher removes the room at the end. If that was killed as well, nobody holds the lock any more: a small process
   that waits for it removes the room (sweeper.py). Where even that was killed, the next run of the same user on this
   host does, whichever it is, before it opens its own; or `shoal doctor`.
4. `id` in it is a random word: two workers that read the same one see the same memory, whatever their hosts are called.

Example: a job of 4 workers and its launcher are killed by SIGKILL: /dev/shm/shoal-room-1000-5d... goes at once.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.core.control_groups import memory_limit
from shoal.core.host import available_memory, memory_bytes

SHARED = Path("/dev/shm")  # noqa: S108  # memory that is shared by design; what is made in it is of mode 0700
TOKEN_KEY = "snapshots/token"  # noqa: S105  # a name, no secret
_LOCK, _ID, _MAKING = "lock", "id", "making"
_ALONE_S, _POLL_S = 30.0, 0.002
_SPARE_SHARE = 0.2
"""How much of a host's memory is left alone: for the model's activations, the page cache, and others."""


def token_of(store: Any) -> str:
    """Return the token of the run whose workers meet in `store`, made by the first that asks."""
    return bytes(store.compare_set(TOKEN_KEY, "", secrets.token_hex(8))).decode()


class Room:
    """A run's folder in the shared memory of this host, kept open by this process. Made by `open_room`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self.id = _read_id(path)

    def close(self) -> None:
        """Let go of the room; its files stay until it is removed. Can be called again."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one that takes memory in the room, for the length of a `with` block: what is free is then free.

        OSError where another does not come to an end.
        """
        handle = os.open(self.path / _MAKING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            until_s = time.monotonic() + _ALONE_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(handle)

    def free_bytes(self) -> int:
        """Return how much more may be put there, by what the folder and the host's memory have left."""
        found = os.statvfs(self.path)
        return min(found.f_bavail * found.f_frsize, _available_bytes())


def open_room(token: str, *, shared: Path = SHARED) -> Room:
    """Open this host's room of the run with that `token`, making it if need be; rooms of dead runs are removed.

    Raises OSError where the host has no shared memory that can be written to.
    """
    path = _path(shared, token)
    remove_dead(shared, but=path)
    for _ in range(100):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.stat().st_uid != os.geteuid() or path.is_symlink():
            raise PermissionError(f"{path} belongs to somebody else")
        with contextlib.suppress(FileNotFoundError):  # taken for a dead one's, and removed, by a run that starts
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if (path / _LOCK).exists() and os.fstat(lock).st_nlink:
                return Room(path, lock)
            os.close(lock)
    raise OSError(f"{path} is removed again and again")


def remove_room(token: str, *, shared: Path = SHARED) -> None:
    """Remove this host's room of the run with that `token`, whoever has it open."""
    shutil.rmtree(_path(shared, token), ignore_errors=True)


def remove_dead(shared: Path = SHARED, *, but: Path | None = None) -> dict[Path, int]:
    """Remove the rooms of this user's runs of which no process is left; return them, with the bytes that they held."""
    removed = {}
    for path in shared.glob(f"shoal-room-{os.geteuid()}-*"):
        if path == but or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                removed[path] = sum(file.lstat().st_size for file in path.iterdir())
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
    return removed


def _path(shared: Path, token: str) -> Path:
    return shared / f"shoal-room-{os.geteuid()}-{token}"


def _read_id(path: Path) -> str:
    """Return the room's word; who comes first writes it."""
    with contextlib.suppress(FileExistsError):
        made = path / f".{secrets.token_hex(8)}"
        made.write_text(secrets.token_hex(8))
        try:
            os.link(made, path / _ID)  # whole, or not there
        finally:
            made.unlink()
    return (path / _ID).read_text()


def _available_bytes() -> int:
    """Return how much memory the host, or the container that this is, can still give, less some to spare."""
    most = min(memory_bytes(), memory_limit() or memory_bytes())
    return max(0, available_memory() - int(_SPARE_SHARE * most))
